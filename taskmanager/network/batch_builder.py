"""Collects slices for one consumer until they make a full batch (pure).

Partitioning leaves each consumer a small slice of every batch; sent one by one they would cost more
than they carry. What is collected leaves as one batch when it is full, when the next slice does not
fit to it, when a control element must go, or when somebody asks for it.

A watermark overtaken by rows is harmless as long as none of these rows could have been late against
it, so a watermark does not cut the batch being collected where the rows that follow prove to be
younger than it (``keeps_lateness``); it then leaves right behind the batch. This keeps batches full
where every input batch brings a watermark.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pyarrow as pa
import pyarrow.compute as pc

from common.elements import Watermark
from penstock.rows.schema import EVENT_TIME

SLICE_METADATA = b"penstock.slice_ms"
"""Schema metadata of partial window aggregates: the width of a slice in milliseconds."""
SLICE_COLUMN = "__slice"


class BatchBuilder:
    """The batch that is being collected.

    Args:
        batch_rows: rows of a full batch.
        batch_bytes_max: a batch being collected is cut beyond this size.
        put_batch: takes a batch that leaves, with its estimated size in bytes.
        put_watermark: takes a watermark that leaves behind it.
    """

    def __init__(
        self,
        batch_rows: int,
        batch_bytes_max: int,
        put_batch: Callable[[pa.RecordBatch, int], None],
        put_watermark: Callable[[Watermark], None],
    ) -> None:
        self._batch_rows = batch_rows
        self._batch_bytes_max = batch_bytes_max
        self._put_batch = put_batch
        self._put_watermark = put_watermark
        self._pieces: list[pa.RecordBatch] = []
        self._copied = 0
        """How many of them are parts of no others."""
        self._piece_rows = 0
        self._piece_bytes = 0
        self._held_watermark: Watermark | None = None

    @property
    def is_empty(self) -> bool:
        """True while nothing is collected."""
        return not self._pieces

    def add(self, batch: pa.RecordBatch, size_bytes: int) -> bool:
        """Takes rows; True when a batch has left."""
        has_cut = bool(self._pieces) and not self._fits(batch) and self.cut()
        rows = batch.num_rows
        self._pieces.append(batch)
        self._piece_rows += rows
        self._piece_bytes += size_bytes
        # Half a piece early rather than half a piece late: slices of p consumers are all alike.
        is_full = self._piece_rows + rows // 2 >= self._batch_rows
        if is_full or self._piece_bytes >= self._batch_bytes_max:
            has_cut = self.cut()
        return has_cut

    def let_go(self) -> None:
        """Lets go of the batches that what is collected was cut out of."""
        cut = self._pieces[self._copied :]
        if cut:
            with suppress(pa.ArrowInvalid):  # as in _joined
                self._pieces[self._copied :] = [pa.concat_batches(map(_with_own_words, cut))]
            self._copied = len(self._pieces)

    def hold(self, watermark: Watermark) -> bool:
        """Keeps a watermark to leave behind what is collected; False when there is nothing, or it is the end of time."""
        if not (self._pieces and watermark.takes_place):
            return False
        self._held_watermark = watermark
        return True

    def cut(self) -> bool:
        """Lets go what is collected; False when there is nothing."""
        pieces = self._pieces
        if not pieces:
            return False
        batches = _joined(pieces)
        for batch in batches:
            self._put_batch(batch, self._piece_bytes // len(batches))
        watermark = self._held_watermark
        self.clear()
        if watermark is not None:
            self._put_watermark(watermark)
        return True

    def clear(self) -> None:
        """Drops what is collected."""
        self._pieces = []
        self._copied = self._piece_rows = self._piece_bytes = 0
        self._held_watermark = None

    def _fits(self, batch: pa.RecordBatch) -> bool:
        if not batch.schema.equals(self._pieces[-1].schema, check_metadata=True):
            return False
        held = self._held_watermark
        return held is None or keeps_lateness(batch, held)


def _joined(pieces: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """The pieces as one batch; as they are where that cannot be (dictionaries that outgrow their index)."""
    if len(pieces) == 1:
        return pieces
    try:
        return [pa.concat_batches(pieces)]
    except pa.ArrowInvalid:
        return pieces


def _with_own_words(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with no more in their dictionaries than they name: a part of a batch has the dictionaries of the whole one."""
    for index, column in enumerate(batch.columns):
        if pa.types.is_dictionary(column.type) and len(column.dictionary) > len(column):
            used = pc.unique(column.indices).drop_null().sort()
            indices = pc.index_in(column.indices, used).cast(column.type.index_type)
            words = column.dictionary.take(used)
            own = pa.DictionaryArray.from_arrays(indices, words, ordered=column.type.ordered)
            batch = batch.set_column(index, batch.schema.field(index), own)
    return batch


def keeps_lateness(batch: pa.RecordBatch, watermark: Watermark) -> bool:
    """True when no row of the batch could be late against the watermark.

    Such a watermark may as well arrive behind the batch. Rows younger than it are never late; in
    partial window aggregates a row stands for a slice, which is late only when it has ended.
    Streams without event time know no lateness.
    """
    schema = batch.schema
    slice_index = schema.get_field_index(SLICE_COLUMN)
    if slice_index >= 0:
        slice_ms = (schema.metadata or {}).get(SLICE_METADATA)
        if slice_ms is None:
            return False
        index, span_ms = slice_index, int(slice_ms) - 1
    else:
        index, span_ms = schema.get_field_index(EVENT_TIME), 0
        if index < 0:
            return True
    oldest = batch.column(index).to_numpy(zero_copy_only=False).min()
    return int(oldest) + span_ms > watermark.timestamp_ms
