"""Blocks of SST files, made of many entries at once.

A block holds entries, then where its restart points are, then how many. In data blocks every 16th entry is
a restart point, in the index every one. An entry is: how many bytes of its key it shares with the one
before (always none), sizes of key and value, both of them.

Where all keys have one size and all values too, which is so for numbers, blocks are filled column by
column; else entry by entry, with positions that are computed for all at once.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.storage.entries.byte_strings import ByteStrings, SstEntries, varint
from penstock.storage.key_encoding import bounds_of
from penstock.storage.key_loops import LOOPS
from penstock.storage.key_types import ByteArray, Int64Array

BLOCK_BYTES: Final = 8 << 10
TRAILER: Final = b"\0" * 5
"""Behind each block: not compressed, and room for its checksum (``sst_file``)."""
KEY_TRAILER_BYTES: Final = 8

_RESTART_INTERVAL: Final = 16
_VALUE_TYPE: Final = 1


@dataclass(frozen=True, slots=True)
class DataBlocks:
    """Some data blocks.

    Attributes:
        data: their bytes with trailers.
        starts: int64[blocks + 1] where each starts in ``data``.
        last_rows: int64[blocks] the last entry of each.
    """

    data: ByteArray
    starts: Int64Array
    last_rows: Int64Array


def data_blocks(entries: SstEntries, start: int, stop: int) -> DataBlocks:
    """The blocks of the entries ``start .. stop - 1``, at least one."""
    key_sizes = np.diff(entries.keys.offsets[start : stop + 1])
    value_sizes = np.diff(entries.values.offsets[start : stop + 1])
    is_uniform = (
        entries.deleted is None
        and key_sizes[0] > 0
        and value_sizes[0] > 0
        and (key_sizes == key_sizes[0]).all()
        and (value_sizes == value_sizes[0]).all()
    )
    if is_uniform:
        return _uniform_blocks(entries, start, stop)
    return _varying_blocks(entries, start, stop)


def index_block(
    keys: ByteStrings,
    last_rows: Int64Array,
    positions: Int64Array,
    sizes: Int64Array,
) -> bytes:
    """The index of n data blocks, without its trailer.

    Args:
        keys: of all entries.
        last_rows: int64[n], the last entry of each block.
        positions: int64[n], where it is in the file.
        sizes: int64[n], of the blocks without their trailers.
    """
    key_starts = keys.offsets[last_rows]
    key_sizes = keys.offsets[last_rows + 1] - key_starts
    key_digits = _varint_sizes(key_sizes)
    position_digits, size_digits = _varint_sizes(positions), _varint_sizes(sizes)
    value_sizes = position_digits + size_digits
    starts = bounds_of(2 + key_digits + key_sizes + value_sizes)
    end, count = int(starts[-1]), len(last_rows)
    data = np.zeros(end + 4 * (count + 1), np.uint8)
    _write_varints(data, starts[:-1] + 1, key_sizes, key_digits)
    keys_at = starts[:-1] + 2 + key_digits
    data[keys_at - 1] = value_sizes
    LOOPS.copy_ranges(keys.data, key_starts, data, keys_at, key_sizes)
    values_at = keys_at + key_sizes
    _write_varints(data, values_at, positions, position_digits)
    _write_varints(data, values_at + position_digits, sizes, size_digits)
    data[end:] = np.append(starts[:-1], count).astype("<u4").view(np.uint8)
    return data.tobytes()


class BlockBuilder:
    """A block of a few entries; every one is a restart point."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._restarts: list[int] = []

    def add(self, key: bytes, value: bytes) -> None:
        """Adds an entry; keys come in their order."""
        self._restarts.append(len(self._data))
        self._data += b"\0" + varint(len(key)) + varint(len(value)) + key + value

    def finish(self) -> bytes:
        """The block, without its trailer."""
        count = len(self._restarts)
        return bytes(self._data) + struct.pack(f"<{count + 1}I", *self._restarts, count)


def _uniform_blocks(entries: SstEntries, start: int, stop: int) -> DataBlocks:
    keys = _same_size(entries.keys, start, stop)
    values = _same_size(entries.values, start, stop)
    header = b"\0" + varint(keys.dtype.itemsize + KEY_TRAILER_BYTES) + varint(values.dtype.itemsize)
    key_trailer = bytes([_VALUE_TYPE]).ljust(KEY_TRAILER_BYTES, b"\0")
    columns: list[Any] = [np.void(header), keys, np.void(key_trailer), values]
    layout = np.dtype([(f"f{index}", column.dtype) for index, column in enumerate(columns)])
    count, per_block = stop - start, max(1, BLOCK_BYTES // layout.itemsize)
    whole = count - count % per_block
    parts = []
    for low, high, size in ((0, whole, per_block), (whole, count, count - whole)):
        if high > low:
            parts.append(_equal_blocks(columns, layout, low, high, size))
    starts = bounds_of(np.concatenate([np.full(len(part), part.shape[1]) for part in parts]))
    last_rows = np.append(
        np.arange(per_block, whole + 1, per_block), count if whole < count else []
    )
    data = np.concatenate([part.reshape(-1) for part in parts])
    return DataBlocks(data, starts, start - 1 + last_rows.astype(np.int64))


def _equal_blocks(
    columns: list[Any],
    layout: np.dtype[np.void],
    low: int,
    high: int,
    size: int,
) -> ByteArray:
    """Blocks of ``size`` entries each: uint8[blocks, bytes]."""
    restarts = np.arange(0, size, _RESTART_INTERVAL) * layout.itemsize
    tail = np.append(restarts, len(restarts)).astype("<u4").tobytes() + TRAILER
    of_block = np.dtype([("entries", layout, (size,)), ("tail", f"V{len(tail)}")])
    blocks = np.empty((high - low) // size, of_block)
    for name, column in zip(layout.names or (), columns, strict=True):
        part = column if column.ndim == 0 else column[low:high].reshape(-1, size)
        blocks["entries"][name] = part
    blocks["tail"] = np.void(tail)
    return blocks.view(np.uint8).reshape(len(blocks), of_block.itemsize)


def _same_size(strings: ByteStrings, start: int, stop: int) -> npt.NDArray[np.void]:
    """The strings ``start .. stop - 1``, which have one size, as void[n]."""
    low, high = int(strings.offsets[start]), int(strings.offsets[stop])
    data = np.ascontiguousarray(strings.data[low:high])
    return data.view(f"V{(high - low) // (stop - start)}")


def _varying_blocks(entries: SstEntries, start: int, stop: int) -> DataBlocks:
    key_starts = entries.keys.offsets[start:stop]
    key_sizes = entries.keys.offsets[start + 1 : stop + 1] - key_starts
    value_starts = entries.values.offsets[start:stop]
    value_sizes = entries.values.offsets[start + 1 : stop + 1] - value_starts
    key_type = np.full(stop - start, _VALUE_TYPE, np.uint8)
    if entries.deleted is not None:
        gone = entries.deleted[start:stop]
        value_sizes = np.where(gone, 0, value_sizes)
        key_type[gone] = 0
    # An entry: 0 (bytes shared with the key before), sizes, key with type and sequence number, value.
    stored_sizes = key_sizes + KEY_TRAILER_BYTES
    key_digits, value_digits = _varint_sizes(stored_sizes), _varint_sizes(value_sizes)
    headers = 1 + key_digits + value_digits
    sizes = headers + stored_sizes + value_sizes
    before = np.cumsum(sizes) - sizes
    blocks = before // BLOCK_BYTES
    is_first = np.empty(len(blocks), np.bool_)
    is_first[0] = True
    np.not_equal(blocks[1:], blocks[:-1], out=is_first[1:])
    first_rows = np.flatnonzero(is_first)
    counts = np.diff(np.append(first_rows, len(blocks)))
    restart_counts = -(-counts // _RESTART_INTERVAL)
    tails = 4 * restart_counts + 4 + len(TRAILER)
    entry_bytes = np.add.reduceat(sizes, first_rows)
    starts = bounds_of(entry_bytes + tails)
    data = np.zeros(int(starts[-1]), np.uint8)
    within = before - np.repeat(before[first_rows], counts)
    positions = np.repeat(starts[:-1], counts) + within
    _write_varints(data, positions + 1, stored_sizes, key_digits)
    _write_varints(data, positions + 1 + key_digits, value_sizes, value_digits)
    keys_at = positions + headers
    LOOPS.copy_ranges(entries.keys.data, key_starts, data, keys_at, key_sizes)
    data[keys_at + key_sizes] = key_type
    values_at = keys_at + stored_sizes
    LOOPS.copy_ranges(entries.values.data, value_starts, data, values_at, value_sizes)
    rank = np.arange(len(blocks)) - np.repeat(first_rows, counts)
    restarts = np.flatnonzero(rank % _RESTART_INTERVAL == 0)
    tails_at = starts[:-1] + entry_bytes
    restarts_at = np.repeat(tails_at, restart_counts) + 4 * (rank[restarts] // _RESTART_INTERVAL)
    _write_words(data, restarts_at, within[restarts])
    _write_words(data, tails_at + 4 * restart_counts, restart_counts)
    return DataBlocks(data, starts, start + first_rows + counts - 1)


def _varint_sizes(values: Int64Array) -> Int64Array:
    sizes = np.ones(len(values), np.int64)
    for shift in (7, 14, 21, 28):
        sizes += values >> shift > 0
    return sizes


def _write_varints(
    data: ByteArray, positions: Int64Array, values: Int64Array, digits: Int64Array
) -> None:
    for digit in range(int(digits.max())):
        rows: Int64Array | slice = slice(None)
        if digit:
            rows = np.flatnonzero(digits > digit)
        more = np.where(digits[rows] > digit + 1, 0x80, 0)
        data[positions[rows] + digit] = (values[rows] >> 7 * digit & 0x7F) | more


def _write_words(data: ByteArray, positions: Int64Array, values: Int64Array) -> None:
    for byte in range(4):
        data[positions + byte] = values >> 8 * byte & 0xFF
