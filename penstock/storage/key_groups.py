"""Key-groups: the unit in which keyed state is owned, moved and restored.

A key belongs to key-group ``hash mod M`` for good, where ``M`` is the operator's max-parallelism.
Subtask ``i`` of ``p`` owns the contiguous range ``ceil(i*M/p) .. ceil((i+1)*M/p) - 1``, which is
the same as ``owner(g) = g*p // M``.

Invariants: for every ``1 <= p <= M`` the ranges of all subtasks are non-empty, in order, disjoint
and cover ``0 .. M-1``.

Source: Carbone et al., "State Management in Apache Flink", section on key-groups. The upper bound
printed there overlaps the next range when read inclusively; this is the form that does not.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.errors import JobRejected
from penstock.storage.key_types import UInt64Array

UInt16Array = npt.NDArray[np.uint16]

MIN_DEFAULT_MAX_PARALLELISM: Final = 128
MAX_MAX_PARALLELISM: Final = 32768


def default_max_parallelism(parallelism: int) -> int:
    """clamp(next power of two of (p + p // 2), 128, 32768).

    Raises:
        JobRejected: the parallelism is below 1 or above 32768.
    """
    check_parallelism(parallelism, MAX_MAX_PARALLELISM)
    wanted = parallelism + parallelism // 2
    power = 1 << (wanted - 1).bit_length()
    return min(max(power, MIN_DEFAULT_MAX_PARALLELISM), MAX_MAX_PARALLELISM)


def check_parallelism(parallelism: int, max_parallelism: int) -> None:
    """Checks 1 <= parallelism <= max_parallelism <= 32768.

    Raises:
        JobRejected: it does not hold.
    """
    if not 1 <= max_parallelism <= MAX_MAX_PARALLELISM:
        raise JobRejected(
            f"max-parallelism is {max_parallelism}: it must be between 1 and {MAX_MAX_PARALLELISM}"
        )
    if not 1 <= parallelism <= max_parallelism:
        raise JobRejected(
            f"parallelism is {parallelism}: it must be between 1 and the max-parallelism "
            f"{max_parallelism}"
        )


def key_group_of(hashes: UInt64Array, max_parallelism: int) -> UInt16Array:
    """Key-groups of keys: uint16[n], hash mod max-parallelism.

    Args:
        hashes: uint64[n], see ``penstock.storage.hashing``.
    """
    check_parallelism(1, max_parallelism)
    if max_parallelism & (max_parallelism - 1) == 0:
        return hashes.astype(np.uint16) & np.uint16(max_parallelism - 1)
    return (hashes % np.uint64(max_parallelism)).astype(np.uint16)


def owner(key_group: int, parallelism: int, max_parallelism: int) -> int:
    """Index of the subtask that owns the key-group."""
    check_parallelism(parallelism, max_parallelism)
    if not 0 <= key_group < max_parallelism:
        raise ValueError(f"key-group {key_group} is outside 0..{max_parallelism - 1}")
    return key_group * parallelism // max_parallelism


def key_group_range(subtask_index: int, parallelism: int, max_parallelism: int) -> range:
    """The key-groups that subtask ``subtask_index`` of ``parallelism`` owns.

    Example: 8 key-groups over 3 subtasks, and who has one of them.
        >>> [list(key_group_range(index, parallelism=3, max_parallelism=8)) for index in range(3)]
        [[0, 1, 2], [3, 4, 5], [6, 7]]
        >>> owner(5, parallelism=3, max_parallelism=8)
        1
    """
    check_parallelism(parallelism, max_parallelism)
    if not 0 <= subtask_index < parallelism:
        raise ValueError(f"subtask {subtask_index} is outside 0..{parallelism - 1}")
    start = -(-subtask_index * max_parallelism // parallelism)
    stop = -(-(subtask_index + 1) * max_parallelism // parallelism)
    return range(start, stop)


def owners(hashes: UInt64Array, parallelism: int, max_parallelism: int) -> UInt16Array:
    """Indices of the subtasks that own the keys: uint16[n].

    Args:
        hashes: uint64[n].
    """
    check_parallelism(parallelism, max_parallelism)
    groups = key_group_of(hashes, max_parallelism)
    if parallelism == max_parallelism:
        return groups
    if max_parallelism & (max_parallelism - 1) == 0:
        shift = np.uint32(max_parallelism.bit_length() - 1)
        return (groups.astype(np.uint32) * np.uint32(parallelism) >> shift).astype(np.uint16)
    product = groups.astype(np.uint32) * np.uint32(parallelism)
    return (product // np.uint32(max_parallelism)).astype(np.uint16)
