"""Rows of the run format as entries of the database, and back.

What kind a state is of and the schema of its rows say how both look, so a state is converted without its
operator: a canonical savepoint is made of entries that nobody has asked for since they were restored, and
restored before anybody asks.

===================== ==========================================================================
group (numbers alone) ``entry_values``
group, counts         ``keyed_entries``
sessions              ``keyed_entries`` with their starts; their ends beside them (``timer_entries``)
timers                ``timer_entries``
rows                  ``row_entries``: the columns of the key are named in the schema (``ROW_KEYS``)
value, list, map      the entry key of the key, a map's with the key in the map behind it
===================== ==========================================================================
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from penstock.errors import Unrecoverable
from penstock.storage.codec import StateCodec, codec_of
from penstock.storage.key_encoding import KeyBatch, bounds_of
from penstock.storage.key_types import BoolArray, Int64Array, value_type
from taskmanager.kernels import AccumulatorKind, distinct, encode_keys
from taskmanager.kernels.backend import kernels as process_kernels
from taskmanager.state.accumulator_columns import from_columns
from taskmanager.state.aggregate_change import number_kinds
from taskmanager.state.keyed_rows import DELETED_FIELD, KEY_GROUP_FIELD
from taskmanager.state.rocksdb.entry_keys import (
    GROUP_BYTES,
    PARTITION_BYTES,
    decoded_keys,
    entry_keys,
    string_order,
)
from taskmanager.state.rocksdb.entry_values import decoded_rows, encoded_rows
from taskmanager.state.rocksdb.keyed_entries import (
    batch_entries,
    joined_column,
    keyed_batch,
    keyed_entries,
)
from taskmanager.state.rocksdb.row_entries import row_entries, row_sequences
from taskmanager.state.rocksdb.row_values import check_storable, decoded_values, encoded_values
from taskmanager.state.rocksdb.sst_file import ByteStrings, SstEntries
from taskmanager.state.rocksdb.timer_entries import decoded_timers, timer_entries, timer_groups
from taskmanager.state.row_table import ROW_KEYS, SEQUENCE, KeyedRows, RowDescriptor
from taskmanager.state.run_format import CODEC, sorted_batch
from taskmanager.state.timer_order import TIMER_KIND

OBJECT_KINDS: Final = frozenset({"value", "list", "map"})
"""Kinds of the columns of a key space."""
ADDED: Final = frozenset({KEY_GROUP_FIELD.name, DELETED_FIELD.name, SEQUENCE.name})
"""Columns of runs that are no part of the state."""

_LENGTH_BYTES: Final = 4
_KEY: Final = re.compile(r"key_\d+")


class RunEntries(ABC):
    """Converts the rows of one state.

    Args:
        schema: of the rows in runs.
        max_parallelism: number of key-groups.
    """

    def __init__(self, schema: pa.Schema, max_parallelism: int) -> None:
        self.schema = schema
        self._limit = max_parallelism
        self._key_types = tuple(
            value_type(field.type) for field in schema if _KEY.fullmatch(field.name)
        )
        self._key_stop = 2 + len(self._key_types)

    @abstractmethod
    def entries(self, partition: int, batches: list[pa.RecordBatch]) -> SstEntries:
        """The entries of at least one batch; of several rows of one identity the last one counts."""

    @abstractmethod
    def batch(self, names: list[bytes], values: list[bytes]) -> pa.RecordBatch:
        """Entries of a partition as rows, by ascending key-group."""

    def _rows(self, groups: Int64Array, columns: Sequence[pa.Array]) -> pa.RecordBatch:
        """Rows that are all there."""
        there = pa.repeat(False, len(groups))
        return sorted_batch(self.schema, groups.astype(np.uint16), [there, *columns])

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

    @override
    def batch(self, names: list[bytes], values: list[bytes]) -> pa.RecordBatch:
        keys = decoded_keys(self._key_types, ByteStrings.of(names), process_kernels())
        accumulators, validity = decoded_rows(self._kinds, values)
        numbers = [
            pa.array(found, mask=None if valid is None else ~valid)
            for found, valid in zip(accumulators, validity, strict=True)
        ]
        return self._rows(_groups(names), [*keys.to_arrays(), *numbers])


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

    @override
    def batch(self, names: list[bytes], values: list[bytes]) -> pa.RecordBatch:
        rows = keyed_batch(
            self.schema, self._key_types, names, values, with_numbers=self._with_numbers
        )
        return self._rows(_groups(names), rows.columns[2:])


class Sessions(_Keyed):
    """Open sessions, known by their starts."""

    def ends(self, partition: int, batches: list[pa.RecordBatch]) -> SstEntries | None:
        """The entries that say when the sessions of at least one batch end; None = they are all gone."""
        living = [batch.filter(pc.invert(batch.column(1))) for batch in batches]
        keys = self._keys(living)
        if not len(keys):
            return None
        ends = joined_column(living, self._key_stop + 1)
        return _timers(partition, keys, ends, np.zeros(len(keys), np.bool_))


class _Timers(RunEntries):
    """Timers. Their entries are in the order of time: parts of the database hold all key-groups."""

    @override
    def entries(self, partition: int, batches: list[pa.RecordBatch]) -> SstEntries:
        deleted = joined_column(batches, 1).to_numpy(zero_copy_only=False)
        return _timers(partition, self._keys(batches), joined_column(batches, -1), deleted)

    @override
    def batch(self, names: list[bytes], values: list[bytes]) -> pa.RecordBatch:
        loops = process_kernels()
        keys, times = decoded_timers(self._key_types, names, loops)
        groups = timer_groups(names, self._limit, loops)
        return self._rows(groups, [*keys.to_arrays(), pa.array(times)])


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
        loops = process_kernels()
        keyed = KeyedRows(RowDescriptor(self.schema, tuple(json.loads(names))))
        columns = [joined_column(batches, place) for place in range(2, len(self.schema))]
        return row_entries(
            partition,
            np.concatenate([keyed.hashes(batch) for batch in batches]),
            joined_column(batches, 1).to_numpy(),
            encoded_values(columns, loops),
            self._limit,
            loops,
        )

    @override
    def batch(self, names: list[bytes], values: list[bytes]) -> pa.RecordBatch:
        columns = decoded_values(self.schema.types[2:], ByteStrings.of(values), process_kernels())
        groups = _groups(names).astype(np.uint16)
        return sorted_batch(self.schema, groups, [pa.array(row_sequences(names)), *columns])


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
        names = list(found)
        order = string_order(names)
        ordered = [found[names[row]] for row in order]
        gone = np.array([value is None for value in ordered], np.bool_)
        return SstEntries(
            ByteStrings.of([names[row] for row in order]),
            ByteStrings.of([value or b"" for value in ordered]),
            gone if gone.any() else None,
        )

    @override
    def batch(self, names: list[bytes], values: list[bytes]) -> pa.RecordBatch:
        heads, columns = names, []
        if self._map_key is not None:
            lengths = [int.from_bytes(name[-_LENGTH_BYTES:], "big") for name in names]
            ends = [len(name) - _LENGTH_BYTES for name in names]
            starts = [end - length for end, length in zip(ends, lengths, strict=True)]
            heads = [name[:start] for name, start in zip(names, starts, strict=True)]
            decode = self._map_key.decode
            parts = zip(names, starts, ends, strict=True)
            columns.append(self._map_key.column([decode(n[start:end]) for n, start, end in parts]))
        keys = decoded_keys(self._key_types, ByteStrings.of(heads), process_kernels())
        columns.append(self._decoded(values))
        return self._rows(_groups(names), [*keys.to_arrays(), *columns])

    def _names(self, partition: int, batch: pa.RecordBatch) -> list[bytes]:
        heads = entry_keys(partition, self._keys([batch]), self._limit).to_list()
        if self._map_key is None:
            return heads
        encoded = map(self._map_key.encode, self._map_key.stored(batch.column(self._key_stop)))
        return [
            head + key + len(key).to_bytes(_LENGTH_BYTES, "big")
            for head, key in zip(heads, encoded, strict=True)
        ]

    def _encoded(self, column: pa.Array) -> list[bytes]:
        if not self._is_list:
            return list(map(self._codec.encode, self._codec.stored(column)))
        items = list(map(self._codec.encode, self._codec.stored(column.flatten())))
        found, start = [], 0
        for length in pc.list_value_length(column).to_pylist():
            parts = items[start : start + length]
            found.append(b"".join(part for one in parts for part in (_length(one), one)))
            start += length
        return found

    def _decoded(self, values: list[bytes]) -> pa.Array:
        if not self._is_list:
            return self._codec.column(list(map(self._codec.decode, values)))
        items: list[Any] = []
        lengths: list[int] = []
        for value in values:
            before = len(items)
            items += map(self._codec.decode, _items(value))
            lengths.append(len(items) - before)
        offsets = bounds_of(np.array(lengths, np.int64)).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), self._codec.column(items))


def run_entries(kind: str, schema: pa.Schema, max_parallelism: int) -> RunEntries:
    """What converts the rows of a state.

    Args:
        kind: of the state.
        schema: of its rows in runs.

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
    content = [one for one in schema if one.name not in ADDED and not _KEY.fullmatch(one.name)]
    kinds = number_kinds(content) if kind == "group" else None
    if kinds is not None:
        return _Numbers(schema, max_parallelism, kinds)
    return _Keyed(schema, max_parallelism, with_numbers=False)


def field_codec(field: pa.Field) -> StateCodec:
    """The codec of the values of a column."""
    return codec_of((field.metadata or {})[CODEC].decode())


def _timers(partition: int, keys: KeyBatch, times: pa.Array, deleted: BoolArray) -> SstEntries:
    """The entries of timers; of several rows of one timer the last one counts."""
    last_first = np.arange(len(keys))[::-1]
    timers = encode_keys([*keys.to_arrays(), times]).take(last_first)
    rows = last_first[distinct(timers)[0]]
    return timer_entries(partition, keys.take(rows), times.to_numpy()[rows], deleted[rows])


def _groups(names: list[bytes]) -> Int64Array:
    """int64[n]: the key-groups in entry keys."""
    stop = PARTITION_BYTES + GROUP_BYTES
    words = b"".join([name[PARTITION_BYTES:stop] for name in names])
    return np.frombuffer(words, ">u2").astype(np.int64)


def _length(item: bytes) -> bytes:
    return len(item).to_bytes(_LENGTH_BYTES, "little")


def _items(value: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(value):
        start = position + _LENGTH_BYTES
        position = start + int.from_bytes(value[position:start], "little")
        yield value[start:position]
