"""The inner loops over the bytes of keys: hashing (whose values ``hashing`` specifies), copying and writing.

The functions here, in numpy, are their definition. ``LOOPS`` are those of this process: once a daemon has loaded its
compiled kernels it has these in place of them. Both agree byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.storage.key_types import ByteArray, Int64Array, UInt64Array

GOLDEN: Final = 0x9E3779B97F4A7C15
MIX_1: Final = 0xBF58476D1CE4E5B9
MIX_2: Final = 0x94D049BB133111EB
BYTES_SEED: Final = 0x51ED270B9F8C5A37
BYTES_MULTIPLIER: Final = 0x9FB21C651E98DF25
LENGTH_BYTES: Final = 4
"""Before a text in a key."""


def mix(words: UInt64Array) -> UInt64Array:
    """The finaliser of splitmix64, element by element."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(MIX_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(MIX_2)
    return words ^ (words >> np.uint64(31))


def hash_words(words: Int64Array, factor: int) -> UInt64Array:
    """Hashes of int64[n] words, each multiplied by ``factor`` first."""
    unsigned = words.view(np.uint64)
    if factor != 1:
        unsigned = unsigned * np.uint64(factor)
    return mix(unsigned + np.uint64(GOLDEN))


def hash_bytes(data: ByteArray, offsets: Int64Array) -> UInt64Array:
    """Hashes of the n byte strings ``data[offsets[i]:offsets[i + 1]]``."""
    starts = offsets[:-1]
    lengths = offsets[1:] - starts
    multiplier = np.uint64(BYTES_MULTIPLIER)
    hashes = np.uint64(BYTES_SEED) ^ (lengths.view(np.uint64) * multiplier)
    padded = np.zeros(len(data) + 8, dtype=np.uint8)
    padded[: len(data)] = data
    # A view that starts a little-endian word at every byte.
    words_at: UInt64Array = np.ndarray(len(data) + 1, dtype="<u8", buffer=padded, strides=(1,))
    longest = int(lengths.max(initial=0))
    for position in range(0, longest, 8):
        rows = np.flatnonzero(lengths > position)
        missing = np.maximum(8 - (lengths[rows] - position), 0).view(np.uint64)
        mask = np.uint64(2**64 - 1) >> (missing * np.uint64(8))
        words = words_at[starts[rows] + position] & mask
        state = (hashes[rows] ^ words) * multiplier
        hashes[rows] = state ^ (state >> np.uint64(32))
    return mix(hashes)


def copy_ranges(
    source: ByteArray,
    source_starts: Int64Array,
    target: ByteArray,
    target_starts: Int64Array,
    lengths: Int64Array,
) -> None:
    """Copies ``lengths[i]`` bytes from each source start to the target start, for all i."""
    before = np.cumsum(lengths) - lengths
    within = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(before, lengths)
    moved = source[np.repeat(source_starts, lengths) + within]
    target[np.repeat(target_starts, lengths) + within] = moved


def write_strings(
    source: ByteArray,
    starts: Int64Array,
    lengths: Int64Array,
    target: ByteArray,
    positions: Int64Array,
) -> None:
    """Writes tag, length and bytes of the string at each start to the target's position."""
    target[positions] = 1
    prefixes = lengths.astype("<u4").view(np.uint8).reshape(len(lengths), LENGTH_BYTES)
    for index in range(LENGTH_BYTES):
        target[positions + 1 + index] = prefixes[:, index]
    copy_ranges(source, starts, target, positions + 1 + LENGTH_BYTES, lengths)


@dataclass(slots=True)
class KeyLoops:
    """What each of the loops is done with."""

    hash_words: Callable[[Int64Array, int], UInt64Array]
    hash_bytes: Callable[[ByteArray, Int64Array], UInt64Array]
    copy_ranges: Callable[[ByteArray, Int64Array, ByteArray, Int64Array, Int64Array], None]
    write_strings: Callable[[ByteArray, Int64Array, Int64Array, ByteArray, Int64Array], None]


LOOPS: Final = KeyLoops(hash_words, hash_bytes, copy_ranges, write_strings)
