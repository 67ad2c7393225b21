"""Canonical form of the keys of a batch: what tables compare and stores keep.

A key of one fixed-width column (integer, float, bool, date, time, timestamp, duration) is one int64
word plus a null flag. Every other key is a byte string, column after column:

- one tag byte: 0 for null (nothing follows), 1 for a value;
- fixed-width values: their canonical int64, 8 bytes little-endian;
- decimals and fixed-size binary: their bytes;
- strings and binary: the length as 4 bytes little-endian, then the bytes.

Invariants: two keys of the same types have the same bytes exactly when they are equal; no key's
bytes are a prefix of another's, so tuples never collide (("a", "bc") and ("ab", "c")) and a key can
be followed by other data. Decoding gives the values back, with -0.0 as 0.0 and every NaN as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.storage.hashing import NULL_HASH, hash_columns, word_factor
from penstock.storage.key_loops import LENGTH_BYTES, LOOPS
from penstock.storage.key_types import (
    BoolArray,
    ByteArray,
    Int64Array,
    KeyKind,
    UInt64Array,
    fixed_array,
    fixed_values,
    key_kind,
    null_array,
    null_rows,
    plain_array,
    value_type,
    variable_array,
    variable_values,
    wide_array,
    wide_values,
)

LENGTH_MAX: Final = 2**32 - 1


@dataclass(slots=True)
class KeyBatch:
    """The keys of n rows.

    Attributes:
        fixed: int64[n] canonical words where the key is one fixed-width column, else None.
        nulls: bool[n], with ``fixed`` only: rows whose key is null (their word is 0); None when no
            key is null.
        data: uint8[...] encoded keys, where ``fixed`` is None.
        offsets: int64[n + 1] bounds of the keys in ``data``.
    """

    types: tuple[pa.DataType, ...]
    fixed: Int64Array | None
    nulls: BoolArray | None
    data: ByteArray | None
    offsets: Int64Array | None
    _hashes: UInt64Array | None = None

    def __len__(self) -> int:
        if self.fixed is not None:
            return len(self.fixed)
        assert self.offsets is not None
        return len(self.offsets) - 1

    @property
    def hashes(self) -> UInt64Array:
        """uint64[n], ``hash_columns`` of the key columns; computed when first asked for."""
        if self._hashes is None:
            assert self.fixed is not None, "keys of bytes are hashed when they are encoded"
            hashes = LOOPS.hash_words(self.fixed, word_factor(self.types[0]))
            if self.nulls is not None:
                hashes[self.nulls] = np.uint64(NULL_HASH)
            self._hashes = hashes
        return self._hashes

    def take(self, indices: Int64Array) -> KeyBatch:
        """The keys of the given rows, in the order of ``indices`` (int64[m])."""
        hashes = None if self._hashes is None else self._hashes[indices]
        if self.fixed is not None:
            nulls = None if self.nulls is None else self.nulls[indices]
            return KeyBatch(self.types, self.fixed[indices], nulls, None, None, hashes)
        assert self.data is not None
        assert self.offsets is not None
        starts = self.offsets[indices]
        lengths = self.offsets[indices + 1] - starts
        offsets = bounds_of(lengths)
        data = np.empty(int(offsets[-1]), dtype=np.uint8)
        LOOPS.copy_ranges(self.data, starts, data, offsets[:-1], lengths)
        return KeyBatch(self.types, None, None, data, offsets, hashes)

    def slice(self, start: int, stop: int) -> KeyBatch:
        """The keys of rows ``start .. stop - 1``, without copying."""
        rows = slice(start, stop)
        hashes = None if self._hashes is None else self._hashes[rows]
        if self.fixed is not None:
            nulls = None if self.nulls is None else self.nulls[rows]
            return KeyBatch(self.types, self.fixed[rows], nulls, None, None, hashes)
        assert self.offsets is not None
        stop = min(stop, len(self))
        bounds = self.offsets[start : stop + 1]
        return KeyBatch(self.types, None, None, self.data, bounds, hashes)

    def to_arrays(self) -> list[pa.Array]:
        """The keys as arrays of the key types."""
        if self.fixed is not None:
            return [fixed_array(self.types[0], self.fixed, self.nulls)]
        assert self.data is not None
        assert self.offsets is not None
        return decode_keys(self.types, self.data, self.offsets)

    def to_bytes(self, row: int) -> bytes:
        """One key as self-delimiting bytes: the encoding above, whatever the representation."""
        if self.fixed is not None:
            if self.nulls is not None and self.nulls[row]:
                return b"\0"
            return b"\1" + int(self.fixed[row]).to_bytes(8, "little", signed=True)
        assert self.data is not None
        assert self.offsets is not None
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes()


def is_fixed_key(types: Sequence[pa.DataType]) -> bool:
    """True where keys of these types are one int64 word (``KeyBatch.fixed``)."""
    return len(types) == 1 and key_kind(types[0]) is KeyKind.FIXED


def encode_keys(columns: Sequence[pa.Array]) -> KeyBatch:
    """The keys that the columns form, row by row.

    Args:
        columns: the key's columns in order, n rows each, at least one.

    Raises:
        JobRejected: a column's type cannot be a key.
        OverflowError: one string of a key has more than 4 GiB.
    """
    if not columns:
        raise ValueError("a key has at least one column")
    types = tuple(column.type for column in columns)
    arrays = [plain_array(column) for column in columns]
    if is_fixed_key(types):
        return KeyBatch(types, fixed_values(arrays[0]), null_rows(arrays[0]), None, None)
    parts = [_ColumnPart.of(array) for array in arrays]
    offsets = bounds_of(sum((part.sizes for part in parts[1:]), start=parts[0].sizes))
    data = np.empty(int(offsets[-1]), dtype=np.uint8)
    positions = offsets[:-1].copy()
    for part in parts:
        part.write(data, positions)
        positions += part.sizes
    return KeyBatch(types, None, None, data, offsets, hash_columns(arrays))


def concatenated_keys(batches: Sequence[KeyBatch]) -> KeyBatch:
    """One batch of at least one batch, with the types of the first."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if first.fixed is not None:
        fixed = np.concatenate([batch.fixed for batch in batches if batch.fixed is not None])
        nulls = None
        if any(batch.nulls is not None for batch in batches):
            nulls = np.concatenate(
                [
                    np.zeros(len(batch), np.bool_) if batch.nulls is None else batch.nulls
                    for batch in batches
                ]
            )
        return KeyBatch(first.types, fixed, nulls, None, None)
    parts = []
    bounds = [np.zeros(1, np.int64)]
    size = 0
    for batch in batches:
        assert batch.data is not None
        assert batch.offsets is not None
        start = int(batch.offsets[0])
        parts.append(batch.data[start : int(batch.offsets[-1])])
        bounds.append(batch.offsets[1:] - start + size)
        size += len(parts[-1])
    offsets = np.concatenate(bounds)
    hashes = np.concatenate([batch.hashes for batch in batches])
    return KeyBatch(first.types, None, None, np.concatenate(parts), offsets, hashes)


def retyped(keys: KeyBatch, types: Sequence[pa.DataType]) -> KeyBatch:
    """The same keys, whose arrays have other types with the same values (dictionaries, plain ones)."""
    if keys.types == tuple(types):
        return keys
    return KeyBatch(tuple(types), keys.fixed, keys.nulls, keys.data, keys.offsets, keys.hashes)


def decode_keys(
    types: Sequence[pa.DataType],
    data: ByteArray,
    offsets: Int64Array,
) -> list[pa.Array]:
    """Inverse of ``encode_keys`` for keys of bytes.

    Args:
        data: uint8[...] encoded keys.
        offsets: int64[n + 1] bounds of the keys in ``data``; a single fixed-width column may be
            decoded too, from keys as ``KeyBatch.to_bytes`` gives them.

    Returns:
        One array of n rows per type.
    """
    positions = offsets[:-1].copy()
    return [_decode_column(type_, data, positions) for type_ in types]


def bounds_of(lengths: Int64Array) -> Int64Array:
    """int64[n + 1]: 0 and the running sums of n lengths."""
    bounds = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def untied(order: Int64Array, tied: BoolArray, key: Callable[[int], bytes]) -> Int64Array:
    """An order of rows in which those that are tied stand by their keys.

    Args:
        tied: bool[n - 1], which rows are equal to the one behind, as far as the order goes; few are.
    """
    same = np.flatnonzero(tied)
    starts = same[np.diff(same, prepend=-2) > 1]
    stops = same[np.diff(same, append=len(order) + 1) > 1] + 2
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        order[start:stop] = sorted(order[start:stop].tolist(), key=key)
    return order


@dataclass(slots=True)
class _ColumnPart:
    """One key column on its way into the encoded bytes.

    Attributes:
        present: int64[m] rows that are not null; None when all are.
        source: uint8[...] the bytes of the values.
        starts: int64[m] where the value of each present row starts in ``source``.
        lengths: int64[m] its length.
        prefixed: whether the length is written before the value.
        sizes: int64[n] encoded size of each row's value, tag included.
    """

    present: Int64Array | None
    source: ByteArray
    starts: Int64Array
    lengths: Int64Array
    prefixed: bool
    sizes: Int64Array

    @classmethod
    def of(cls, array: pa.Array) -> _ColumnPart:
        rows = len(array)
        kind = key_kind(array.type)
        if kind is KeyKind.VARIABLE:
            source, offsets = variable_values(array)
            starts = offsets[:-1]
            lengths = offsets[1:] - starts
            if rows and int(lengths.max()) > LENGTH_MAX:
                raise OverflowError(
                    f"a key of {int(lengths.max())} bytes is too long: "
                    "one string of a key has at most 4 GiB"
                )
        else:
            if kind is KeyKind.FIXED:
                words = np.ascontiguousarray(fixed_values(array))
                matrix: ByteArray = words.view(np.uint8).reshape(rows, 8)
            elif kind is KeyKind.WIDE:
                matrix = wide_values(array)
            else:
                matrix = np.empty((rows, 0), dtype=np.uint8)
            width = matrix.shape[1]
            source = matrix.reshape(-1)
            starts = np.arange(rows, dtype=np.int64) * width
            lengths = np.full(rows, width, dtype=np.int64)
        prefixed = kind is KeyKind.VARIABLE
        sizes = lengths + (1 + LENGTH_BYTES if prefixed else 1)
        present = None
        nulls = null_rows(array)
        if nulls is not None:
            sizes[nulls] = 1
            present = np.flatnonzero(~nulls)
            starts, lengths = starts[present], lengths[present]
        return cls(present, source, starts, lengths, prefixed, sizes)

    def write(self, data: ByteArray, positions: Int64Array) -> None:
        """Writes every row's tag, length and value at its position."""
        if self.present is not None:
            data[positions] = 0
            positions = positions[self.present]
        if self.prefixed:
            LOOPS.write_strings(self.source, self.starts, self.lengths, data, positions)
        else:
            data[positions] = 1
            LOOPS.copy_ranges(self.source, self.starts, data, positions + 1, self.lengths)


def _decode_column(type_: pa.DataType, data: ByteArray, positions: Int64Array) -> pa.Array:
    """Reads one column at ``positions`` and moves them behind it."""
    rows = len(positions)
    kind = key_kind(type_)
    present = data[positions] == 1
    positions += 1
    if kind is KeyKind.NULL:
        return null_array(type_, rows)
    nulls = None if present.all() else ~present
    lengths = np.zeros(rows, dtype=np.int64)
    if kind is KeyKind.VARIABLE:
        where = positions[present]
        prefix = np.empty(len(where) * LENGTH_BYTES, dtype=np.uint8)
        prefix_starts = np.arange(len(where), dtype=np.int64) * LENGTH_BYTES
        sizes = np.full(len(where), LENGTH_BYTES, dtype=np.int64)
        LOOPS.copy_ranges(data, where, prefix, prefix_starts, sizes)
        lengths[present] = prefix.view("<u4")
        positions[present] += LENGTH_BYTES
        offsets = bounds_of(lengths)
        values = np.empty(int(offsets[-1]), dtype=np.uint8)
        LOOPS.copy_ranges(data, positions, values, offsets[:-1], lengths)
        positions += lengths
        return variable_array(type_, values, offsets, nulls)
    width = 8 if kind is KeyKind.FIXED else value_type(type_).byte_width
    lengths[present] = width
    matrix = np.zeros((rows, width), dtype=np.uint8)
    starts = np.arange(rows, dtype=np.int64) * width
    LOOPS.copy_ranges(data, positions, matrix.reshape(-1), starts, lengths)
    positions += lengths
    if kind is KeyKind.FIXED:
        return fixed_array(type_, matrix.view("<i8").reshape(rows), nulls)
    return wide_array(type_, matrix, nulls)
