"""The compiled kernels, and the numpy twins that they are compared with."""

from __future__ import annotations

from typing import Any, cast

from taskmanager.kernels.compiled import Kernels
from tests.support.kernel_twins import kernels as twins


def load(*, compiled: bool) -> Kernels:
    """One of the two."""
    return Kernels() if compiled else cast("Any", twins)
