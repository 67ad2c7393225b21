"""Rows of the run format as entries of the database (``entry_rows`` says how they lie there, and reads them).

A state is converted without its operator: a canonical savepoint is restored before anybody asks for what is in it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from penstock.errors import Unrecoverable
from penstock.storage.entries.byte_strings import SstEntries
from penstock.storage.entries.entry_keys import (
    entries_by_key,
    entry_keys,
    map_name,
)
from penstock.storage.entries.entry_rows import content_of, key_types_of
from penstock.storage.entries.entry_values import encoded_rows
from penstock.storage.entries.list_entries import head_value
from penstock.storage.entries.row_entries import row_entries
from penstock.storage.entries.row_values import check_storable, encoded_values
from penstock.storage.entries.timer_entries import timer_entries
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import BoolArray
from penstock.storage.run_columns import (
    OBJECT_KINDS,
    ROW_KEYS,
    TIMER_KIND,
    field_codec,
)
from taskmanager.kernels import AccumulatorKind, distinct, encode_keys
from taskmanager.state.accumulator_columns import from_columns
from taskmanager.state.aggregate_change import number_kinds
from taskmanager.state.rocksdb.keyed_entries import batch_entries, joined_column, keyed_entries
from taskmanager.state.row_table import KeyedRows, RowDescriptor


class RunEntries(ABC):
    """Converts the rows of one state."""

    def __init__(self, schema: pa.Schema, max_parallelism: int) -> None:
        self.schema = schema
        self._limit = max_parallelism
        self._key_types = key_types_of(schema)
        self._key_stop = 2 + len(self._key_types)

    @abstractmethod
    def entries(self, partition: int, batches: list[pa.RecordBatch]) -> SstEntries:
        """The entries of at least one batch; of several rows of one identity the last one counts."""

    def _keys(self, batches: list[pa.RecordBatch]) -> KeyBatch:
        return encode_keys([joined_column(batches, place) for place in range(2, self._key_stop)])


class _Numbers(RunEntries):
    """Aggregates that are numbers alone."""

    def __init__(
        self, schema: pa.Schema, max_parallelism: int, kinds: Sequence[AccumulatorKind]
    ) -> None:
        super().__init__(schema, max_parallelism)
        self._kinds = kinds

    @override
    def entries(self, partition: int, batches: list[pa.RecordBatch]) -> SstEntries:
        count = len(self.schema)
        columns = [joined_column(batches, place) for place in range(self._key_stop, count)]
        deleted = joined_column(batches, 1).to_numpy(zero_copy_only=False)
        values = encoded_rows(*from_columns(self._kinds, columns))
        return keyed_entries(partition, self._keys(batches), None, values, deleted, self._limit)


class _Keyed(RunEntries):
    """Rows that are known by their key, or by the key and the number behind it."""

    def __init__(self, schema: pa.Schema, max_parallelism: int, *, with_numbers: bool) -> None:
        super().__init__(schema, max_parallelism)
        self._with_numbers = with_numbers
        for field in schema:
            check_storable(field.type)

    @override
    def entries(self, partition: int, batches: list[pa.RecordBatch]) -> SstEntries:
        return batch_entries(
            partition, batches, len(self._key_types), self._limit, with_numbers=self._with_numbers
        )


class Sessions(_Keyed):
    """Open sessions, known by their starts."""

    def ends(self, partition: int, batches: list[pa.RecordBatch]) -> SstEntries:
        """The entries that say when the sessions of at least one batch end."""
        living = [batch.filter(pc.invert(batch.column(1))) for batch in batches]
        keys = self._keys(living)
        ends = joined_column(living, self._key_stop + 1)
        return _timers(partition, keys, ends, np.zeros(len(keys), np.bool_))


class _Timers(RunEntries):
    """Timers. Their entries are in the order of time: parts of the database hold all key-groups."""

    @override
    def entries(self, partition: int, batches: list[pa.RecordBatch]) -> SstEntries:
        deleted = joined_column(batches, 1).to_numpy(zero_copy_only=False)
        return _timers(partition, self._keys(batches), joined_column(batches, -1), deleted)


class _Rows(RunEntries):
    """Rows of windows and joins.

    Raises:
        Unrecoverable: it is not known which columns are their key.
    """

    def __init__(self, schema: pa.Schema, max_parallelism: int) -> None:
        super().__init__(schema, max_parallelism)
        for field in schema:
            check_storable(field.type)

    @override
    def entries(self, partition: int, batches: list[pa.RecordBatch]) -> SstEntries:
        names = (self.schema.metadata or {}).get(ROW_KEYS)
        if names is None:
            raise Unrecoverable(
                "the rows of a window or join were stored by a version of Penstock that did not say which of their "
                "columns are the key, and RocksDB keeps rows by their key: start with state.backend.type: hashmap, "
                "take a savepoint there, and start with RocksDB from that one"
            )
        keyed = KeyedRows(RowDescriptor(self.schema, tuple(json.loads(names))))
        columns = [joined_column(batches, place) for place in range(2, len(self.schema))]
        return row_entries(
            partition,
            np.concatenate([keyed.hashes(batch) for batch in batches]),
            joined_column(batches, 1).to_numpy(),
            encoded_values(columns),
            self._limit,
        )


class _Objects(RunEntries):
    """Values, lists and maps of a key space."""

    def __init__(self, kind: str, schema: pa.Schema, max_parallelism: int) -> None:
        super().__init__(schema, max_parallelism)
        self._is_list = kind == "list"
        self._codec = field_codec(schema.field(len(schema) - 1))
        self._map_key = field_codec(schema.field(self._key_stop)) if kind == "map" else None

    @override
    def entries(self, partition: int, batches: list[pa.RecordBatch]) -> SstEntries:
        found: dict[bytes, bytes | None] = {}
        for batch in batches:
            names = self._names(partition, batch)
            deleted = batch.column(1)
            values = iter(self._encoded(batch.columns[-1].filter(pc.invert(deleted))))
            for name, is_gone in zip(names, deleted.to_pylist(), strict=True):
                found[name] = None if is_gone else next(values)
        return entries_by_key(list(found), list(found.values()))

    def _names(self, partition: int, batch: pa.RecordBatch) -> list[bytes]:
        heads = entry_keys(partition, self._keys([batch]), self._limit).to_list()
        if self._map_key is None:
            return heads
        encoded = map(self._map_key.encode, self._map_key.stored(batch.column(self._key_stop)))
        return list(map(map_name, heads, encoded))

    def _encoded(self, column: pa.Array) -> list[bytes]:
        if not self._is_list:
            return list(map(self._codec.encode, self._codec.stored(column)))
        items = list(map(self._codec.encode, self._codec.stored(column.flatten())))
        found, start = [], 0
        for length in pc.list_value_length(column).to_pylist():
            found.append(head_value(0, items[start : start + length]))
            start += length
        return found


def run_entries(kind: str, schema: pa.Schema, max_parallelism: int) -> RunEntries:
    """What converts the rows of a state.

    Raises:
        Unrecoverable: values of a column cannot be kept in RocksDB.
    """
    if kind in OBJECT_KINDS:
        return _Objects(kind, schema, max_parallelism)
    if kind == TIMER_KIND:
        return _Timers(schema, max_parallelism)
    if kind == "rows":
        return _Rows(schema, max_parallelism)
    if kind == "sessions":
        return Sessions(schema, max_parallelism, with_numbers=True)
    kinds = number_kinds(content_of(schema)) if kind == "group" else None
    if kinds is not None:
        return _Numbers(schema, max_parallelism, kinds)
    return _Keyed(schema, max_parallelism, with_numbers=False)


def _timers(partition: int, keys: KeyBatch, times: pa.Array, deleted: BoolArray) -> SstEntries:
    """The entries of timers; of several rows of one timer the last one counts."""
    last_first = np.arange(len(keys))[::-1]
    timers = encode_keys([*keys.to_arrays(), times]).take(last_first)
    rows = last_first[distinct(timers)[0]]
    return timer_entries(partition, keys.take(rows), times.to_numpy()[rows], deleted[rows])
