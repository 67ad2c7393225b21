"""Cuts large record batches into batches of the wanted size, without copying."""

from __future__ import annotations

import pyarrow as pa


class BatchCutter:
    """Holds one batch and hands it out in pieces of about equal size."""

    def __init__(self) -> None:
        self._batch: pa.RecordBatch | None = None
        self._next_row = 0

    @property
    def remaining_rows(self) -> int:
        """Rows not handed out yet."""
        return 0 if self._batch is None else int(self._batch.num_rows) - self._next_row

    def fill(self, batch: pa.RecordBatch, skip_rows: int = 0) -> None:
        """Takes the next batch, once the one before it is used up."""
        assert self.remaining_rows == 0
        self._batch = batch
        self._next_row = skip_rows

    def take(self, max_rows: int) -> pa.RecordBatch:
        """The next rows, at least one and at most ``max_rows``."""
        assert self._batch is not None
        remaining = self.remaining_rows
        assert remaining > 0
        # Equal pieces instead of full ones and a small rest: the cost per batch is the same for all.
        rows = -(-remaining // -(-remaining // max_rows))
        if rows == self._batch.num_rows:
            piece = self._batch
        else:
            piece = self._batch.slice(self._next_row, rows)
        self._next_row += rows
        return piece
