"""Which keys the database may have: the others are new, and nothing is read for them.

A key is noted when memory forgets it. A Bloom filter over 64-bit words, one word and four bits of it per key, so
that a batch costs a few array operations; it grows by further levels, each four times as large as the one before
or what is left of its limit.

All tables of a database share one filter. What it holds of tables that are dropped stays, and it has a limit: when that
is reached it begins anew, as another *era*. A table that began before, or that the database had something of then
(``NO_ERA``), reads all its keys from there on.

Source: Putze, Sanders, Singler, Cache-, Hash- and Space-Efficient Bloom Filters (blocked filters).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from penstock.storage.key_types import BoolArray, UInt64Array

NO_ERA: Final = -1
"""Of a table whose keys were not all noted."""
_WORD_KEYS: Final = 4
"""Keys per word: 16 bits each; one new key in a hundred is read in vain."""
_LEVEL_WORDS: Final = 1 << 12
_LEVEL_GROWTH: Final = 4
_FACTORS: Final = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))
_WORD_MASK: Final = (1 << 64) - 1


class KeyFilter:
    """Keys of all tables of a database.

    Args:
        bytes_max: what it may take now.

    Attributes:
        era: of tables that begin now.

    >>> known = KeyFilter(lambda: 1 << 20)
    >>> hashes = np.arange(3, dtype=np.uint64)
    >>> known.add(7, hashes, known.era)
    >>> known.may_have(7, hashes, known.era).tolist()
    [True, True, True]
    >>> known.may_have(8, hashes, known.era).tolist()
    [False, False, False]
    """

    def __init__(self, bytes_max: Callable[[], int]) -> None:
        self.era = 0
        self._bytes_max = bytes_max
        self._levels: list[UInt64Array] = []
        self._room = 0
        """Keys that the last level still takes."""

    def memory_bytes(self) -> int:
        """Size."""
        return sum(level.nbytes for level in self._levels)

    def add(self, partition: int, hashes: UInt64Array, era: int) -> None:
        """Notes keys of a table; nothing happens where it is of another era."""
        if era != self.era:
            return
        new = hashes[~self.may_have(partition, hashes, era)]
        while len(new):
            if not self._room and not self._grow():
                return
            places, bits = _spread(partition, new[: self._room])
            level = self._levels[-1]
            np.bitwise_or.at(level, places >> _shift(level), bits)
            self._room -= len(places)
            new = new[len(places) :]

    def may_have(self, partition: int, hashes: UInt64Array, era: int) -> BoolArray:
        """bool[n]: False where the database certainly has nothing of a key that memory has not."""
        if era != self.era:
            return np.ones(len(hashes), np.bool_)
        found = np.zeros(len(hashes), np.bool_)
        places, bits = _spread(partition, hashes)
        for level in reversed(self._levels):
            found |= level[places >> _shift(level)] & bits == bits
        return found

    def _grow(self) -> bool:
        """Adds a level; False = it would be too large, and another era has begun."""
        left = (self._bytes_max() - self.memory_bytes()) // 8
        words = len(self._levels[-1]) * _LEVEL_GROWTH if self._levels else _LEVEL_WORDS
        while words > max(left, _LEVEL_WORDS):
            words //= 2
        if words > left:
            self.era += 1
            self._levels = []
            return False
        self._levels.append(np.zeros(words, np.uint64))
        self._room = words * _WORD_KEYS
        return True


def _shift(level: UInt64Array) -> np.uint64:
    """How far a place is shifted to be that of a word of the level."""
    return np.uint64(65 - len(level).bit_length())


def _spread(partition: int, hashes: UInt64Array) -> tuple[UInt64Array, UInt64Array]:
    """Of n keys: a place, whose highest bits count, and four bits of a word."""
    first, second = _FACTORS
    places = (hashes ^ np.uint64(partition * int(second) & _WORD_MASK)) * first
    rest = (places ^ (places >> np.uint64(29))) * second
    bits = np.zeros(len(hashes), np.uint64)
    for shift in (58, 52, 46, 40):
        bits |= np.uint64(1) << (rest >> np.uint64(shift) & np.uint64(63))
    return places, bits
