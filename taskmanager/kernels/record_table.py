"""The table behind keyed aggregation: one record per key, the key and its accumulators side by side.

One batch is one call: the keys' slots are found or made, then each accumulator runs over the
batch's rows. Nothing here is per record in Python.

An accumulator to which no value was added (all its rows were invalid) has no value: ``validity``
says so. That is tracked, in one more word per record, only from the first batch on that has an
invalid row.

With versions, what changed between two of them can be exported while the table goes on changing: see
``record_versions``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from penstock.aggregates.accumulator_kind import AccumulatorKind
from penstock.storage.key_encoding import KeyBatch, is_fixed_key
from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.kernels.accumulators import AccumulatorOverflowError, Values
from taskmanager.kernels.backend import kernels as process_kernels
from taskmanager.kernels.byte_key_records import ByteKeyRecords
from taskmanager.kernels.record_versions import (
    NO_VERSION,
    RESTORED_VERSION,
    RecordExport,
    RecordPiece,
    RecordVersions,
)
from taskmanager.kernels.slot_table import FULL_PERCENT, NO_NULLS, FixedKeyRecords

EVERYTHING: Final = slice(None)
SEEN_BITS: Final = 63
"""Accumulators that share one word of seen bits."""

_LARGEST: Final = frozenset(
    {AccumulatorKind.MAX_INT64, AccumulatorKind.MAX_UINT64, AccumulatorKind.MAX_FLOAT64}
)


@dataclass(frozen=True, slots=True)
class Rows:
    """Records of some keys, row by row.

    Attributes:
        accumulators: one array per accumulator.
        validity: per accumulator bool[n], False where it has no value; None where all have.
    """

    keys: KeyBatch
    accumulators: list[Values]
    validity: list[BoolArray | None]


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """Accumulators of keys that were asked for.

    Attributes:
        present: bool[n], False where a key is not in the table; its accumulators are undefined.
        accumulators: one array per accumulator.
        validity: per accumulator bool[n], False where it has no value; None where all have.
    """

    present: BoolArray
    accumulators: list[Values]
    validity: list[BoolArray | None]


class RecordTable:
    """Accumulators per key.

    Keys come out in one order from ``keys``, ``accumulators``, ``validity`` and ``indices``, as long
    as the table is not changed: by dense index where it has one, else in no particular order.

    Args:
        accumulators: what to keep per key; may be empty with an index.
        with_index: gives every key a dense index (see ``lookup_or_insert``).
        with_versions: keeps in every record when it was changed last (``seal``).

    Raises:
        JobRejected: a type cannot be a key.
    """

    def __init__(
        self,
        key_types: Sequence[pa.DataType],
        accumulators: Sequence[AccumulatorKind],
        *,
        with_index: bool = False,
        with_versions: bool = False,
    ) -> None:
        self.kinds = tuple(accumulators)
        self._kernels = process_kernels()
        table_class = FixedKeyRecords if is_fixed_key(key_types) else ByteKeyRecords
        index_column = table_class.key_words if with_index else -1
        version_column = table_class.key_words + int(with_index)
        self._first = version_column + int(with_versions)
        self._seen_column = -1
        template = np.zeros(self._first + len(self.kinds), dtype=np.int64)
        if with_versions:
            template[version_column] = NO_VERSION
        template[self._first :] = [kind.initial_word for kind in self.kinds]
        self._slots = table_class(self._kernels, key_types, template, index_column=index_column)
        self._versions: RecordVersions | None = None
        self._lock: AbstractContextManager[object] = nullcontext()
        if with_versions:
            self._versions = RecordVersions(self._slots, version_column)
            self._lock = self._versions.lock

    def __len__(self) -> int:
        return len(self._slots)

    def accumulate(
        self,
        keys: KeyBatch,
        values: Sequence[np.ndarray[Any, Any] | None],
        valid: Sequence[BoolArray | None],
        *,
        merge: bool = False,
    ) -> None:
        """Adds a batch of n rows.

        Args:
            values: per accumulator int64[n], uint64[n] or float64[n] as its kind says (narrower
                types are widened); None for a COUNT of rows.
            valid: per accumulator bool[n], where False the row leaves the accumulator alone; None
                when every row counts.
            merge: the values are accumulators of another table: a COUNT adds them up.

        Raises:
            AccumulatorOverflowError: a sum left int64. Part of the batch is in the table already: the
                table is of no further use.
        """
        self._check_arguments(len(keys), values, valid)
        if len(keys) == 0:
            return
        masks = [_mask(rows) for rows in valid]
        with self._lock:
            if self._seen_column < 0 and any(len(mask) for mask in masks):
                self._track_validity()
            self._accumulate(self._upsert(keys), values, masks, merge)

    def _accumulate(
        self,
        slots: Int64Array,
        values: Sequence[np.ndarray[Any, Any] | None],
        masks: Sequence[BoolArray],
        merge: bool,
    ) -> None:
        for accumulator, kind in enumerate(self.kinds):
            mask = masks[accumulator]
            self._apply(accumulator, kind, slots, values[accumulator], mask, merge)
            if self._seen_column >= 0 and kind is not AccumulatorKind.COUNT:
                word, bit = divmod(accumulator, SEEN_BITS)
                column = self._seen_column + word
                self._kernels.mark_seen(slots, mask, self._slots.records, column, bit)

    def merge_rows(self, rows: Rows) -> None:
        """Adds the records of another table with the same key types and kinds (``Rows``).

        Raises:
            AccumulatorOverflowError: as in ``accumulate``.
        """
        self.accumulate(rows.keys, rows.accumulators, rows.validity, merge=True)

    def use_common_order(self) -> None:
        """This empty table takes in other whole tables only: that is faster between tables that say so."""
        self._slots.use_common_order()

    def make_room_in_order(self, other: RecordTable) -> None:
        """Before all ``rows`` of a table of that order are merged into this one."""
        with self._lock:
            self._slots.make_room_in_order(other._slots)

    def lookup_or_insert(self, keys: KeyBatch) -> Int64Array:
        """Dense indices of keys, int64[n], for what is kept outside the table (Python lists).

        New keys get 0, 1, 2, ... in order of first appearance; indices of removed keys are given
        out again, the last removed first.
        """
        assert self._slots.index_column >= 0, "the table was made without an index"
        with self._lock:
            slots = self._upsert(keys)
        indices: Int64Array = self._slots.records[slots, self._slots.index_column]
        return indices

    def lookup(self, keys: KeyBatch) -> Int64Array:
        """Dense indices of keys, -1 where a key is not in the table: int64[n]."""
        assert self._slots.index_column >= 0, "the table was made without an index"
        slots = self._slots.find(keys)
        return np.where(slots < 0, -1, self._slots.records[slots, self._slots.index_column])

    @property
    def index_bound(self) -> int:
        """One more than the largest dense index given out since the last ``clear``."""
        return self._slots.index_bound

    def indices(self) -> Int64Array:
        """The dense index of every key, ascending: int64[len]."""
        assert self._slots.index_column >= 0, "the table was made without an index"
        found: Int64Array = self._slots.records[self._slots.occupied(), self._slots.index_column]
        return found

    def key_batch(self, chosen: Int64Array | slice = EVERYTHING) -> KeyBatch:
        """All keys, or those of some records by their place in the order of ``rows``; ready to be used on another table."""
        return self._slots.keys_at(self._slots.occupied()[chosen])

    def keys(self) -> list[pa.Array]:
        """All keys as arrays of the key types."""
        return self.key_batch().to_arrays()

    def rows(self, chosen: Int64Array | slice = EVERYTHING) -> Rows:
        """All records, or some by their place in this order."""
        return self._rows_at(self._slots.occupied()[chosen])

    def row_versions(self) -> Int64Array:
        """The version of every record, in the order of ``rows``: int64[len]."""
        versions: Int64Array = self._slots.records[self._slots.occupied(), self.versions.column]
        return versions

    def gather(self, keys: KeyBatch) -> GatheredRows:
        """The current accumulators of the given keys."""
        slots = self._slots.find(keys)
        present = slots >= 0
        slots = np.where(present, slots, 0)
        return GatheredRows(present, self._accumulators_at(slots), self._validity_at(slots))

    def contains(self, keys: KeyBatch) -> BoolArray:
        """bool[n]: which keys are in the table."""
        present: BoolArray = self._slots.find(keys) >= 0
        return present

    def remove(self, keys: KeyBatch, *, may_be_exported: bool = False) -> None:
        """Removes keys; those that are not in the table are ignored.

        Args:
            may_be_exported: exports are told of all of them, those that are not in the table as well.
        """
        if not len(keys):
            return
        with self._lock:
            if self._versions is not None:
                self._versions.remove(keys, may_be_exported=may_be_exported)
            self._slots.remove(keys)

    def clear(self) -> None:
        """Removes all keys; the table is as new, and its versions begin anew."""
        with self._lock:
            self._slots.clear()
            if self._versions is not None:
                self._versions.restart()

    def memory_bytes(self) -> int:
        """Memory held by the table."""
        versions = 0 if self._versions is None else self._versions.memory_bytes()
        return self._slots.memory_bytes() + versions

    @property
    def versions(self) -> RecordVersions:
        """The versions of the records."""
        assert self._versions is not None, "the table was made without versions"
        return self._versions

    def seal(self, since_version: int) -> RecordExport:
        """Ends the current version: see ``record_versions``."""
        return self.versions.seal(since_version)

    def changed_keys(self, export: RecordExport) -> KeyBatch:
        """The keys of an export at once, on the thread that changes the table; ends the export."""
        found = [piece.slots for piece in export.pieces()]
        return self._slots.keys_at(np.concatenate([np.empty(0, np.int64), *found]))

    def exported(self, export: RecordExport) -> Iterator[Rows]:
        """The changed records of an export of this table, on any thread, in parts of bounded size.

        Raises:
            ReleasedError: the export was released before the last part.
        """
        return map(self._rows_of, export.pieces())

    def put(self, rows: Rows) -> None:
        """Sets restored records, whatever was there before. Before the first ``seal`` only."""
        if not len(rows.keys):
            return
        with self._lock:
            if self._seen_column < 0 and any(valid is not None for valid in rows.validity):
                self._track_validity()
            slots = self._slots.upsert(rows.keys)
            records = self._slots.records
            words = np.empty((1 + len(self.kinds), len(slots)), np.int64)
            words[0] = RESTORED_VERSION
            for word, values, kind in zip(words[1:], rows.accumulators, self.kinds, strict=True):
                np.copyto(word.view(kind.dtype), values, casting="safe")
            self._kernels.put_words(slots, words, records, self._first - 1)
            if self._seen_column >= 0:
                records[slots, self._seen_column :] = self._seen_words(rows)

    def discard(self, keys: KeyBatch) -> None:
        """Removes restored records without a trace."""
        if len(keys):
            self._slots.remove(keys)

    def must_grow_for(self, keys: int) -> bool:
        """The table gets larger where so many keys come and all are new."""
        return self._slots.must_grow_for(keys)

    def crowd(self) -> None:
        """Takes more keys before it grows, at more steps for each."""
        self._slots.load_percent = FULL_PERCENT

    @property
    def capacity(self) -> int:
        """Records that there is memory for."""
        return self._slots.capacity

    def resize(self, capacity: int) -> None:
        """Gives the table memory for so many records, more than it has keys."""
        with self._lock:
            self._slots.resize(capacity)

    def reserve(self, keys: int) -> None:
        """Makes room for that many keys at once."""
        with self._lock:
            self._slots.reserve(keys)

    def _upsert(self, keys: KeyBatch) -> Int64Array:
        if self._versions is None:
            return self._slots.upsert(keys)
        return self._versions.upsert(keys)

    def _rows_of(self, piece: RecordPiece) -> Rows:
        keys = self._slots.keys_of(piece.slots, piece.capacity, piece.matrix, piece.arena)
        seen = piece.matrix[:, self._first + len(self.kinds) :]
        return Rows(keys, self._accumulators_of(piece.matrix), self._validity_of(seen))

    def _accumulators_of(self, matrix: Int64Array) -> list[Values]:
        columns = matrix[:, self._first : self._first + len(self.kinds)].T.copy()
        return [column.view(kind.dtype) for column, kind in zip(columns, self.kinds, strict=True)]

    def _validity_of(self, seen: Int64Array) -> list[BoolArray | None]:
        """Per accumulator where it has a value, from the seen words (int64[n, words])."""
        if not seen.shape[1]:
            return [None] * len(self.kinds)
        validity: list[BoolArray | None] = []
        for accumulator, kind in enumerate(self.kinds):
            word, bit = divmod(accumulator, SEEN_BITS)
            valid = seen[:, word] >> bit & 1 == 1
            always = kind is AccumulatorKind.COUNT or valid.all()
            validity.append(None if always else valid)
        return validity

    def _seen_words(self, rows: Rows) -> Int64Array:
        """The inverse of ``_validity_of``."""
        words = -(-len(self.kinds) // SEEN_BITS)
        seen = np.full((len(rows.keys), words), -1, dtype=np.int64)
        for accumulator, valid in enumerate(rows.validity):
            if valid is not None:
                word, bit = divmod(accumulator, SEEN_BITS)
                seen[~valid, word] &= ~np.int64(1 << bit)
        return seen

    def _apply(
        self,
        accumulator: int,
        kind: AccumulatorKind,
        slots: Int64Array,
        values: np.ndarray[Any, Any] | None,
        mask: BoolArray,
        merge: bool,
    ) -> None:
        records = self._slots.records
        column = self._first + accumulator
        if kind is AccumulatorKind.COUNT and not merge:
            self._kernels.count_rows(slots, mask, records, column)
            return
        if values is None:
            raise ValueError(f"accumulator {accumulator} ({kind.value}) needs values")
        words = _words(values, kind)
        largest = kind in _LARGEST
        match kind:
            case AccumulatorKind.COUNT | AccumulatorKind.SUM_INT64:
                row = self._kernels.add_integers(slots, words, mask, records, column)
                if row >= 0:
                    raise AccumulatorOverflowError(accumulator, row)
            case AccumulatorKind.SUM_FLOAT64:
                floats = records.view(np.float64)
                self._kernels.add_floats(slots, words, mask, floats, column)
            case AccumulatorKind.MIN_INT64 | AccumulatorKind.MAX_INT64:
                self._kernels.extreme_integers(slots, words, mask, records, column, largest)
            case AccumulatorKind.MIN_UINT64 | AccumulatorKind.MAX_UINT64:
                unsigned = records.view(np.uint64)
                self._kernels.extreme_integers(slots, words, mask, unsigned, column, largest)
            case AccumulatorKind.MIN_FLOAT64 | AccumulatorKind.MAX_FLOAT64:
                floats = records.view(np.float64)
                self._kernels.extreme_floats(slots, words, mask, floats, column, largest)

    def _track_validity(self) -> None:
        """Adds the seen bits; every accumulator of the keys so far has a value."""
        words = -(-len(self.kinds) // SEEN_BITS)
        self._seen_column = len(self._slots.template)
        unseen = np.zeros(words, dtype=np.int64)
        self._slots.widen(unseen, np.full(words, -1, dtype=np.int64))

    def _accumulators_at(self, slots: Int64Array) -> list[Values]:
        # Whole records first: their memory is read once, and not once per column.
        return self._accumulators_of(self._slots.records.take(slots, axis=0))

    def _validity_at(self, slots: Int64Array) -> list[BoolArray | None]:
        if self._seen_column < 0:
            return [None] * len(self.kinds)
        return self._validity_of(self._slots.records[slots, self._seen_column :])

    def _rows_at(self, slots: Int64Array) -> Rows:
        records, capacity = self._slots.records.take(slots, axis=0), self._slots.capacity
        return self._rows_of(RecordPiece(slots, capacity, records, self._slots.arena))

    def _check_arguments(
        self,
        rows: int,
        values: Sequence[np.ndarray[Any, Any] | None],
        valid: Sequence[BoolArray | None],
    ) -> None:
        if len(values) != len(self.kinds) or len(valid) != len(self.kinds):
            raise ValueError(
                f"{len(self.kinds)} accumulators, but {len(values)} value columns and "
                f"{len(valid)} validity columns"
            )
        for column in (*values, *valid):
            if column is not None and column.shape != (rows,):
                raise ValueError(f"a column of shape {column.shape} for a batch of {rows} keys")


def _mask(valid: BoolArray | None) -> BoolArray:
    """The mask for the kernels: empty where every row is valid."""
    if valid is None or valid.all():
        return NO_NULLS
    return np.ascontiguousarray(valid, dtype=np.bool_)


def _words(values: np.ndarray[Any, Any], kind: AccumulatorKind) -> Values:
    """The values as the kind's dtype, contiguous and aligned; not copied where they are already."""
    if values.dtype != kind.dtype:
        values = values.astype(kind.dtype, casting="safe")
    return np.require(values, requirements=["C", "A"])
