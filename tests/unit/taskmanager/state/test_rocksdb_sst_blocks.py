"""Blocks of SST files, taken apart again by a reader that goes byte by byte."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from penstock.storage.entries.byte_strings import ByteStrings, SstEntries
from taskmanager.state.rocksdb.sst_blocks import (
    BLOCK_BYTES,
    KEY_TRAILER_BYTES,
    TRAILER,
    data_blocks,
    index_block,
)


def number_at(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, and where it ends."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def entries_in(block: bytes, restart_interval: int) -> list[tuple[bytes, bytes]]:
    """The entries of a block without its trailer; checks its restart points."""
    count = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 * (count + 1)
    restarts = np.frombuffer(block[end:-4], "<u4").tolist()
    found, at, starts = [], 0, []
    while at < end:
        starts.append(at)
        shared, at = number_at(block, at)
        key_size, at = number_at(block, at)
        value_size, at = number_at(block, at)
        assert shared == 0
        found.append((block[at : at + key_size], block[at + key_size : at + key_size + value_size]))
        at += key_size + value_size
    assert at == end
    assert restarts == starts[::restart_interval]
    return found


def strings(count: int, sizes: list[int], seed: int) -> list[bytes]:
    generator = random.Random(seed)
    found: set[bytes] = set()
    while len(found) < count:
        found.add(generator.randbytes(generator.choice(sizes)))
    return sorted(found)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 170, 5000])
@pytest.mark.parametrize(
    ("key_sizes", "value_sizes"),
    [([15], [16]), ([15], [300]), ([9], [9000]), ([15], [0]), ([8, 15], [16]), ([15], [8, 200])],
)
def test_blocks_hold_the_entries_and_the_index_finds_them(
    count: int, key_sizes: list[int], value_sizes: list[int]
) -> None:
    generator = random.Random(count)
    keys = strings(count, key_sizes, count)
    values = [generator.randbytes(generator.choice(value_sizes)) for _ in keys]
    entries = SstEntries(ByteStrings.of(keys), ByteStrings.of(values), None)
    first = count // 3
    built = data_blocks(entries, first, count)
    data, starts = built.data.tobytes(), built.starts.tolist()
    assert starts[0] == 0
    assert starts[-1] == len(data)
    found, last_keys = [], []
    for low, high in pairwise(starts):
        assert data[high - len(TRAILER) : high] == TRAILER
        block = entries_in(data[low : high - len(TRAILER)], 16)
        assert sum(len(key) + len(value) for key, value in block[:-1]) <= BLOCK_BYTES
        last_keys.append(block[-1][0])
        found += block
    trailer = b"\1".ljust(KEY_TRAILER_BYTES, b"\0")
    assert found == [
        (key + trailer, value) for key, value in zip(keys[first:], values[first:], strict=True)
    ]
    assert [keys[row] + trailer for row in built.last_rows.tolist()] == last_keys
    far = 1 << generator.randrange(33)
    positions = built.starts[:-1] + far
    sizes = np.diff(built.starts) - len(TRAILER)
    index = index_block(entries.keys, built.last_rows, positions, sizes)
    handles = []
    for key, handle in entries_in(index, 1):
        position, at = number_at(handle, 0)
        size, at = number_at(handle, at)
        assert at == len(handle)
        handles.append((key + trailer, position, size))
    assert handles == list(zip(last_keys, positions.tolist(), sizes.tolist(), strict=True))


def test_removed_keys_have_no_value() -> None:
    keys = ByteStrings.of([b"a", b"b", b"c"])
    values = ByteStrings.of([b"1", b"2", b"3"])
    entries = SstEntries(keys, values, np.array([False, True, False]))
    data = data_blocks(entries, 0, 3).data.tobytes()
    found = entries_in(data[: -len(TRAILER)], 16)
    assert [(key[:2], value) for key, value in found] == [
        (b"a\1", b"1"),
        (b"b\0", b""),
        (b"c\1", b"3"),
    ]
