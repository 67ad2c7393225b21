"""The compiled kernels, and the numpy twins that they are compared with."""

from __future__ import annotations

from taskmanager.kernels import compiled as compiled_kernels
from taskmanager.kernels.interface import Kernels
from tests.support.kernel_twins import kernels as twins


def load(*, compiled: bool) -> Kernels:
    """One of the two."""
    return compiled_kernels if compiled else twins
