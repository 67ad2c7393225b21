"""The twins of ``compiled_pairs``: a dict of the pairs that are held, which needs no slots."""

from __future__ import annotations

import numpy as np

from penstock.storage.key_types import BoolArray, Int64Array


def add_pairs(
    ones: Int64Array,
    others: Int64Array,
    slots: Int64Array,
    held_ones: Int64Array,
    held_others: Int64Array,
    count: int,
    is_new: BoolArray,
) -> int:
    """See ``compiled_pairs.add_pairs``."""
    del slots
    held = set(zip(held_ones[:count].tolist(), held_others[:count].tolist(), strict=True))
    for row, pair in enumerate(zip(ones.tolist(), others.tolist(), strict=True)):
        is_new[row] = pair not in held
        if is_new[row]:
            held.add(pair)
            held_ones[count], held_others[count] = pair
            count += 1
    return count


def place_pairs(
    held_ones: Int64Array, held_others: Int64Array, count: int, slots: Int64Array
) -> None:
    """See ``compiled_pairs.place_pairs``."""
    assert len(held_ones) == len(held_others) >= count
    assert np.all(slots == -1)
