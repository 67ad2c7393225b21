"""The kernels of this process: the compiler is imported when they are first asked for."""

from __future__ import annotations

import functools
import warnings
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.storage.file_locks import LockedFile
from penstock.storage.key_loops import LOOPS

if TYPE_CHECKING:
    from taskmanager.kernels.compiled import Kernels

_COMPILING_MAX_S: Final = 300.0
_LOCK_NAME: Final = "kernels.lock"


_of_process: Final[list[Kernels]] = []


def kernels() -> Kernels:
    """The kernels, compiled or loaded when first asked for (see ``warm_up``)."""
    if not _of_process:
        use(_loaded())
    return _of_process[0]


def use(found: Kernels) -> None:
    """These are the process's kernels from now on, the loops over keys among them."""
    _of_process[:] = [found]
    for loop in fields(LOOPS):
        setattr(LOOPS, loop.name, getattr(found, loop.name))


@functools.cache
def _loaded() -> Kernels:
    from taskmanager.kernels.kernel_cache import kernel_directory

    directory = kernel_directory()
    with ExitStack() as alone:
        if directory is not None:
            enter_alone(alone, directory)
        from taskmanager.kernels import compiled

        return compiled.Kernels()


def warm_up() -> None:
    """Compiles all kernels, or loads them from where they are kept; starts no thread.

    Called before the first slot process is forked, so that a task never waits for a compiler: every
    kernel has fixed signatures and is ready when this returns. Of processes that share the directory one compiles.
    """
    kernels()


def enter_alone(stack: ExitStack, cache: Path, wait_max_s: float = _COMPILING_MAX_S) -> None:
    """Waits for whoever compiles into this directory: what they have compiled is loaded then.

    Who cannot be waited for is no reason to fail: compiling beside them costs time alone.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        stack.enter_context(LockedFile(cache / _LOCK_NAME, wait_max_s))
    except OSError as error:
        warnings.warn(
            f"kernels are compiled beside others that may do so too: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
