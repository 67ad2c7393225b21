"""Compiled loops over a set of pairs of words, in the order in which they were added."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.storage.key_loops import GOLDEN
from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.kernels.compiled_words import mix
from taskmanager.kernels.jit import BOOLS, INT64, INT64S, INT64S_IN, VOID, inlined, kernel
from taskmanager.kernels.layout import PAIRS_MAX

_GOLDEN = np.uint64(GOLDEN)
_POSITION = np.int64(PAIRS_MAX - 1)
_MARK = np.uint64(0x7FFFFF0000000000)


@inlined
def _hash(one: Any, other: Any) -> Any:
    return mix(np.uint64(one) * _GOLDEN + mix(np.uint64(other)))


@kernel(INT64(INT64S_IN, INT64S_IN, INT64S, INT64S, INT64S, INT64, BOOLS), nogil=True)
def add_pairs(
    ones: Int64Array,
    others: Int64Array,
    slots: Int64Array,
    held_ones: Int64Array,
    held_others: Int64Array,
    count: int,
    is_new: BoolArray,
) -> int:
    """Adds n pairs of words to a set; those that it has already stay where they are.

    Args:
        slots: a power of two of them, more than pairs; -1 = empty, else the position of a pair, and above it
            bits of its hash; changed.
        held_ones: the pairs by position, as ``held_others``, with room for n more; changed.
        count: pairs that are held; returned as it is now.
        is_new: bool[n], filled: which were not there.
    """
    mask = np.uint64(len(slots) - 1)
    seen = np.int64(0)
    for row in range(len(ones)):  # brings what is needed next into the caches, many at a time
        seen |= slots[_hash(ones[row], others[row]) & mask]
    for row in range(len(ones)):
        one, other = ones[row], others[row]
        word = _hash(one, other)
        mark = np.int64(word & _MARK)
        slot = word & mask
        while True:
            entry = slots[slot]
            if entry < 0:
                slots[slot] = mark | np.int64(count)
                held_ones[count] = one
                held_others[count] = other
                count += 1
                is_new[row] = True
                break
            if (entry & ~_POSITION) == mark:
                position = entry & _POSITION
                if held_ones[position] == one and held_others[position] == other:
                    is_new[row] = False
                    break
            slot = (slot + np.uint64(1)) & mask
    # Entries and -1 never come to -2: said so that the compiler does not leave the first loop out.
    return count if seen != -2 else -count


@kernel(VOID(INT64S_IN, INT64S_IN, INT64, INT64S), nogil=True)
def place_pairs(
    held_ones: Int64Array, held_others: Int64Array, count: int, slots: Int64Array
) -> None:
    """Fills the empty ``slots`` for pairs that are held, see ``add_pairs``."""
    mask = np.uint64(len(slots) - 1)
    for position in range(count):
        word = _hash(held_ones[position], held_others[position])
        slot = word & mask
        while slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = np.int64(word & _MARK) | np.int64(position)
