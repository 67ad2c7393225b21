"""The kernels of this process: the compiler is imported when they are first asked for."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from taskmanager.kernels.compiled import Kernels


@functools.cache
def kernels() -> Kernels:
    """The kernels, compiled or loaded when first asked for (see ``warm_up``)."""
    from taskmanager.kernels import compiled

    return compiled.Kernels()


def warm_up() -> None:
    """Compiles all kernels, or loads them from ``NUMBA_CACHE_DIR``; starts no thread.

    Called before the first slot process is forked, so that a task never waits for a compiler: every
    kernel has fixed signatures and is ready when this returns.
    """
    kernels()
