"""Which implementation of the kernels this process uses.

``PENSTOCK_KERNELS`` = ``numba`` or ``numpy`` decides; unset, it is numba where it can be imported.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Final

from penstock.errors import ConfigurationError
from taskmanager.kernels.interface import Kernels

VARIABLE: Final = "PENSTOCK_KERNELS"


@functools.cache
def kernels() -> Kernels:
    """The kernels of this process, compiled or loaded when first asked for (see ``warm_up``).

    Raises:
        ConfigurationError: ``PENSTOCK_KERNELS`` is not a known name, or numba is not installed.
    """
    choice = os.environ.get(VARIABLE, "")
    if choice not in ("", "numba", "numpy"):
        raise ConfigurationError(f"{VARIABLE} is {choice!r}: it must be 'numba' or 'numpy'")
    installed = importlib.util.find_spec("numba") is not None
    if choice == "numba" and not installed:
        raise ConfigurationError(f"{VARIABLE} is 'numba', but numba is not installed")
    return load(compiled=choice != "numpy" and installed)


def load(*, compiled: bool) -> Kernels:
    """One of the two implementations."""
    if compiled:
        from taskmanager.kernels import compiled as compiled_kernels

        return compiled_kernels
    from taskmanager.kernels import twin

    return twin


def warm_up() -> None:
    """Compiles all kernels, or loads them from ``NUMBA_CACHE_DIR``; starts no thread.

    Called before the first slot process is forked, so that a task never waits for a compiler: every
    kernel has one fixed signature and is ready when this returns.
    """
    kernels()
