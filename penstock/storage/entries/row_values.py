"""Rows of Arrow columns as byte strings, one per row, and back.

Every column of a row is written as a piece of an array; a list within it is a piece of the array of its
items, so that one rule covers all types. A piece of n values is

- n bytes, 1 where the value is there and 0 where it is null;
- fixed width: n values as they lie in Arrow's buffer (booleans one byte each);
- strings and binary: n lengths (4 bytes, little-endian), then the bytes;
- structs: a piece per field;
- lists and maps: n lengths, then a piece of all items.

All rows are written and read with a number of array operations that depends on the columns alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from penstock.errors import Unrecoverable
from penstock.storage.entries.byte_strings import ByteStrings
from penstock.storage.key_encoding import bounds_of
from penstock.storage.key_loops import LOOPS
from penstock.storage.key_types import BoolArray, ByteArray, Int64Array

LENGTH_BYTES: Final = 4


def check_storable(kind: pa.DataType) -> None:
    """Checks that values of a type can be written.

    Raises:
        Unrecoverable: they cannot.
    """
    plain = _plain_type(kind)
    if pt.is_struct(plain):
        for field in plain:
            check_storable(field.type)
    elif _is_list(plain):
        check_storable(_item_type(plain))
    elif not (pt.is_string(plain) or pt.is_binary(plain) or pt.is_null(plain)) and not (
        pt.is_boolean(plain) or _width(plain)
    ):
        raise Unrecoverable(
            f"values of the type {kind} cannot be kept in RocksDB: cast the column, or use "
            "state.backend.type: hashmap"
        )


def encoded_values(columns: Sequence[pa.Array]) -> ByteStrings:
    """The rows of at least one column."""
    count = len(columns[0])
    pieces = _Pieces()
    for column in columns:
        pieces.add_array(column, np.arange(count + 1, dtype=np.int64))
    return pieces.joined(count)


def decoded_values(types: Sequence[pa.DataType], rows: ByteStrings) -> list[pa.Array]:
    """Inverse of ``encoded_values``."""
    reader = _Reader(rows)
    one = np.ones(len(rows), np.int64)
    return [reader.array(kind, one) for kind in types]


class _Pieces:
    """Parts of all rows in the order in which they lie in a row."""

    def __init__(self) -> None:
        self._parts: list[tuple[ByteArray, Int64Array, Int64Array]] = []

    def add_array(self, array: pa.Array, bounds: Int64Array) -> None:
        """Row i has the values ``bounds[i] .. bounds[i + 1] - 1`` of the array."""
        kind = _plain_type(array.type)
        if kind != array.type:
            array = array.cast(kind)
        valid = np.ones(len(array), np.uint8)
        if array.null_count:
            valid = array.is_valid().cast(pa.uint8()).to_numpy(zero_copy_only=False)
        self._add(valid, bounds, 1)
        if pt.is_null(kind):
            return
        if pt.is_struct(kind):
            for index in range(kind.num_fields):
                self.add_array(array.field(index), bounds)
        elif _is_list(kind):
            offsets = _offsets(array)
            self._add(_lengths(offsets), bounds, LENGTH_BYTES)
            # What lies outside of the array is not looked at.
            items = _items(array).slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
            self.add_array(items, (offsets - offsets[0])[bounds])
        elif pt.is_string(kind) or pt.is_binary(kind):
            offsets = _offsets(array)
            self._add(_lengths(offsets), bounds, LENGTH_BYTES)
            buffer = array.buffers()[2]
            data = np.empty(0, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)
            within = offsets[bounds]
            self._parts.append((data, within[:-1], np.diff(within)))
        else:
            if pt.is_boolean(kind):
                array = array.cast(pa.uint8())
            width = _width(array.type)
            buffer = array.buffers()[1]
            start = array.offset * width
            data = np.empty(0, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)
            self._add(data[start : start + len(array) * width], bounds, width)

    def joined(self, count: int) -> ByteStrings:
        """The rows."""
        total = np.zeros(count, np.int64)
        for _, _, lengths in self._parts:
            total += lengths
        offsets = bounds_of(total)
        data = np.empty(int(offsets[-1]), np.uint8)
        position = offsets[:-1].copy()
        for source, starts, lengths in self._parts:
            LOOPS.copy_ranges(source, np.ascontiguousarray(starts), data, position, lengths)
            position = position + lengths
        return ByteStrings(data, offsets)

    def _add(self, data: ByteArray, bounds: Int64Array, width: int) -> None:
        self._parts.append((data, bounds[:-1] * width, np.diff(bounds) * width))


class _Reader:
    """Reads piece after piece of all rows."""

    def __init__(self, rows: ByteStrings) -> None:
        self._data = rows.data
        self._position = rows.offsets[:-1].copy()

    def array(self, kind: pa.DataType, counts: Int64Array) -> pa.Array:
        """The next piece, of ``counts[i]`` values in row i."""
        plain = _plain_type(kind)
        if plain == kind:
            return self._plain_array(kind, counts)
        found = self._plain_array(plain, counts)
        if pt.is_dictionary(kind):
            found = found.dictionary_encode()
        return found.cast(kind)

    def _plain_array(self, kind: pa.DataType, counts: Int64Array) -> pa.Array:
        total = int(counts.sum())
        is_valid = self._take(counts) == 1
        mask = None if is_valid.all() else ~is_valid
        if pt.is_null(kind):
            return pa.nulls(total, kind)
        if pt.is_struct(kind):
            children = [self.array(field.type, counts) for field in kind]
            return pa.Array.from_buffers(kind, total, [_bitmap(is_valid, mask)], children=children)
        if _is_list(kind):
            lengths, sums = self._take_lengths(counts)
            items = self.array(_item_type(kind), sums)
            offsets = pa.py_buffer(bounds_of(lengths).astype(np.int32))
            return pa.Array.from_buffers(
                kind, total, [_bitmap(is_valid, mask), offsets], children=[items]
            )
        if pt.is_string(kind) or pt.is_binary(kind):
            lengths, sums = self._take_lengths(counts)
            offsets = pa.py_buffer(bounds_of(lengths).astype(np.int32))
            data = pa.py_buffer(self._take(sums))
            return pa.Array.from_buffers(kind, total, [_bitmap(is_valid, mask), offsets, data])
        if pt.is_boolean(kind):
            return pa.array(self._take(counts) == 1, mask=mask)
        data = pa.py_buffer(self._take(counts * _width(kind)))
        return pa.Array.from_buffers(kind, total, [_bitmap(is_valid, mask), data])

    def _take_lengths(self, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The lengths of values, and their sums by row."""
        lengths = self._take(counts * LENGTH_BYTES).view("<u4").astype(np.int64)
        before = bounds_of(lengths)
        bounds = bounds_of(counts)
        return lengths, before[bounds[1:]] - before[bounds[:-1]]

    def _take(self, sizes: Int64Array) -> ByteArray:
        """The next bytes of every row, one after the other."""
        bounds = bounds_of(sizes)
        found = np.empty(int(bounds[-1]), np.uint8)
        LOOPS.copy_ranges(self._data, self._position, found, bounds[:-1], sizes)
        self._position = self._position + sizes
        return found


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that values are written as: no dictionary, short offsets."""
    if pt.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pt.is_large_string(kind) or pt.is_string_view(kind):
        return pa.string()
    if pt.is_large_binary(kind) or pt.is_binary_view(kind):
        return pa.binary()
    if pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        return pa.list_(kind.value_field)
    return kind


def _is_list(kind: pa.DataType) -> bool:
    return bool(pt.is_list(kind) or pt.is_map(kind))


def _item_type(kind: pa.DataType) -> pa.DataType:
    return pa.struct([kind.key_field, kind.item_field]) if pt.is_map(kind) else kind.value_type


def _items(array: pa.Array) -> pa.Array:
    """The items of all lists, or the entries of all maps, from the beginning of their buffer on."""
    if not pt.is_map(array.type):
        return array.values
    entries = [array.keys, array.items]
    return pa.StructArray.from_arrays(entries, fields=list(_item_type(array.type)))


def _offsets(array: pa.Array) -> Int64Array:
    """int64[n + 1]: where values begin in the buffer, or the array, of an array's content."""
    if not len(array):
        return np.zeros(1, np.int64)
    offsets = np.frombuffer(array.buffers()[1], np.int32)
    return offsets[array.offset : array.offset + len(array) + 1].astype(np.int64)


def _lengths(offsets: Int64Array) -> ByteArray:
    return np.diff(offsets).astype("<u4").view(np.uint8)


def _width(kind: pa.DataType) -> int:
    """Bytes of a value of fixed width, 0 = none."""
    if pt.is_fixed_size_binary(kind):
        return int(kind.byte_width)
    try:
        return int(kind.bit_width) // 8
    except ValueError:
        return 0


def _bitmap(is_valid: BoolArray, mask: BoolArray | None) -> pa.Buffer | None:
    if mask is None:
        return None
    return pa.py_buffer(np.packbits(is_valid, bitorder="little"))
