"""The compiled kernels, and the numpy twins that they are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from taskmanager.kernels import backend
from taskmanager.kernels.compiled import Kernels
from tests.support.kernel_twins import kernels as twins


def load(*, compiled: bool) -> Kernels:
    """One of the two."""
    return Kernels() if compiled else cast("Any", twins)


@contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    """They are the process's meanwhile."""
    before = backend.kernels()
    backend.use(kernels)
    try:
        yield
    finally:
        backend.use(before)
