"""Entries of a database as rows of the run format (``run_entries`` makes entries of rows).

What kind a state is of and the schema of its rows say how both look, so that a state is read without its operator.

===================== ==========================================================================
group (numbers alone) ``entry_values``
group, counts         ``keyed_values``
sessions              ``keyed_values`` with their starts; their ends beside them (``timer_entries``)
timers                ``timer_entries``
rows                  ``row_entries``: the columns of the key are named in the schema (``ROW_KEYS``)
value, map            the entry key of the key, a map's with the key in the map behind it
list                  ``list_entries``; chunks are rows that are added to those of their heads
===================== ==========================================================================
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.storage.entries.byte_strings import ByteStrings
from penstock.storage.entries.entry_keys import (
    GROUP_BYTES,
    PARTITION_BYTES,
    decoded_keys,
    map_parts,
)
from penstock.storage.entries.entry_values import decoded_rows
from penstock.storage.entries.keyed_values import keyed_batch
from penstock.storage.entries.list_entries import head_of, is_chunk, items_of
from penstock.storage.entries.row_entries import row_sequences
from penstock.storage.entries.row_values import decoded_values
from penstock.storage.entries.timer_entries import decoded_timers, timer_groups
from penstock.storage.key_encoding import bounds_of
from penstock.storage.key_types import Int64Array, value_type
from penstock.storage.run_columns import (
    ADDED,
    OBJECT_KINDS,
    TIMER_KIND,
    field_codec,
    sorted_batch,
)

KEY_NAME: Final = re.compile(r"key_\d+")
_NUMBER: Final = "number_"


class EntryRows(ABC):
    """Reads the entries of one state."""

    def __init__(self, schema: pa.Schema, max_parallelism: int) -> None:
        self._schema = schema
        self._limit = max_parallelism
        self._key_types = key_types_of(schema)

    @abstractmethod
    def batch(self, names: list[bytes], values: list[bytes]) -> pa.RecordBatch:
        """Entries of a partition as rows, by ascending key-group."""

    def _rows(self, groups: Int64Array, columns: Sequence[pa.Array]) -> pa.RecordBatch:
        """Rows that are all there."""
        there = pa.repeat(False, len(groups))
        return sorted_batch(self._schema, groups.astype(np.uint16), [there, *columns])


class _Numbers(EntryRows):
    """Aggregates that are numbers alone."""

    @override
    def batch(self, names: list[bytes], values: list[bytes]) -> pa.RecordBatch:
        kinds = [kind.to_pandas_dtype() for kind in self._schema.types[2 + len(self._key_types) :]]
        keys = decoded_keys(self._key_types, ByteStrings.of(names))
        accumulators, validity = decoded_rows([np.dtype(kind) for kind in kinds], values)
        numbers = [
            pa.array(found, mask=None if valid is None else ~valid)
            for found, valid in zip(accumulators, validity, strict=True)
        ]
        return self._rows(_groups(names), [*keys.to_arrays(), *numbers])


class _Keyed(EntryRows):
    """Rows that are known by their key, or by the key and the number behind it."""

    def __init__(self, schema: pa.Schema, max_parallelism: int, *, with_numbers: bool) -> None:
        super().__init__(schema, max_parallelism)
        self._with_numbers = with_numbers

    @override
    def batch(self, names: list[bytes], values: list[bytes]) -> pa.RecordBatch:
        rows = keyed_batch(
            self._schema,
            self._key_types,
            names,
            values,
            with_numbers=self._with_numbers,
        )
        return self._rows(_groups(names), rows.columns[2:])


class _Timers(EntryRows):
    """Timers. Their entries are in the order of time: parts of the database hold all key-groups."""

    @override
    def batch(self, names: list[bytes], values: list[bytes]) -> pa.RecordBatch:
        keys, times = decoded_timers(self._key_types, names)
        groups = timer_groups(names, self._limit)
        return self._rows(groups, [*keys.to_arrays(), pa.array(times)])


class _Rows(EntryRows):
    """Rows of windows and joins."""

    @override
    def batch(self, names: list[bytes], values: list[bytes]) -> pa.RecordBatch:
        columns = decoded_values(self._schema.types[2:], ByteStrings.of(values))
        groups = _groups(names).astype(np.uint16)
        return sorted_batch(self._schema, groups, [pa.array(row_sequences(names)), *columns])


class _Objects(EntryRows):
    """Values, lists and maps of a key space."""

    def __init__(self, kind: str, schema: pa.Schema, max_parallelism: int) -> None:
        super().__init__(schema, max_parallelism)
        self._is_list = kind == "list"
        self._codec = field_codec(schema.field(len(schema) - 1))
        map_key = schema.field(2 + len(self._key_types))
        self._map_key = field_codec(map_key) if kind == "map" else None

    @override
    def batch(self, names: list[bytes], values: list[bytes]) -> pa.RecordBatch:
        heads, columns = names, []
        if self._map_key is not None:
            heads, keys_in_maps = map(list, zip(*map(map_parts, names), strict=True))
            columns.append(self._map_key.column(list(map(self._map_key.decode, keys_in_maps))))
        if self._is_list:
            heads = list(map(head_of, names, values))
            columns.append(pa.array(list(map(is_chunk, values)), pa.bool_()))
        keys = decoded_keys(self._key_types, ByteStrings.of(heads))
        columns.append(self._decoded(values))
        return self._rows(_groups(names), [*keys.to_arrays(), *columns])

    def _decoded(self, values: list[bytes]) -> pa.Array:
        if not self._is_list:
            return self._codec.column(list(map(self._codec.decode, values)))
        items: list[Any] = []
        lengths: list[int] = []
        for value in values:
            before = len(items)
            items += map(self._codec.decode, items_of(value))
            lengths.append(len(items) - before)
        offsets = bounds_of(np.array(lengths, np.int64)).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), self._codec.column(items))


def entry_rows(kind: str, schema: pa.Schema, max_parallelism: int) -> EntryRows:
    """What reads the entries of a state."""
    if kind in OBJECT_KINDS:
        return _Objects(kind, schema, max_parallelism)
    if kind == TIMER_KIND:
        return _Timers(schema, max_parallelism)
    if kind == "rows":
        return _Rows(schema, max_parallelism)
    if kind == "group" and is_of_numbers(schema):
        return _Numbers(schema, max_parallelism)
    return _Keyed(schema, max_parallelism, with_numbers=kind == "sessions")


def key_types_of(schema: pa.Schema) -> tuple[pa.DataType, ...]:
    """The types of the keys of a state."""
    return tuple(value_type(field.type) for field in schema if KEY_NAME.fullmatch(field.name))


def content_of(schema: pa.Schema) -> list[pa.Field]:
    """The columns of a state that are neither its keys nor added to it."""
    return [one for one in schema if one.name not in ADDED and not KEY_NAME.fullmatch(one.name)]


def is_of_numbers(schema: pa.Schema) -> bool:
    """Whether the aggregates of a state are numbers alone."""
    content = content_of(schema)
    return bool(content) and all(field.name.startswith(_NUMBER) for field in content)


def _groups(names: list[bytes]) -> Int64Array:
    """int64[n]: the key-groups in entry keys."""
    stop = PARTITION_BYTES + GROUP_BYTES
    words = b"".join([name[PARTITION_BYTES:stop] for name in names])
    return np.frombuffer(words, ">u2").astype(np.int64)
