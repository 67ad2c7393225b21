"""What the sums of a record table may come to."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt


class AccumulatorOverflowError(OverflowError):
    """A sum left the range of int64.

    Attributes:
        row: row of the batch whose value did not fit.
    """

    def __init__(self, accumulator: int, row: int) -> None:
        super().__init__(
            f"the sum in accumulator {accumulator} leaves the range of int64 at row {row} of the "
            "batch: cast the column to float64, or sum smaller values"
        )
        self.accumulator = accumulator
        self.row = row


Values = npt.NDArray[Any]
"""int64[n], uint64[n] or float64[n], as the accumulator's kind says."""
