"""Which subtask gets which state when a job is restored, at the same parallelism or another one.

Handles are opaque. With the parallelism unchanged, every subtask gets exactly what it had itself.

Invariants:
- keyed state: a handle goes to every subtask whose key-groups overlap its own, so each key-group that a
  snapshot holds is restored by exactly one subtask;
- split lists: every item goes to exactly one subtask, in order, and no two subtasks differ by more than
  one item;
- union lists: every subtask gets all items in the order of the old subtasks;
- broadcast lists: all old subtasks held the same; every subtask gets one copy.

Source: Carbone et al., "State Management in Apache Flink", section 3.1; Flink, StateAssignmentOperation
and RoundRobinOperatorStateRepartitioner (which deals out item by item; here runs stay together).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.errors import StoreCorrupt, Unrecoverable
from penstock.storage.key_groups import check_parallelism, key_group_range

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KeyedPart(Generic[T]):
    """Keyed state of one operator in one old subtask.

    Attributes:
        first_key_group: of the range that subtask owned.
        last_key_group: inclusive.
        handle: opaque.
    """

    first_key_group: int
    last_key_group: int
    handle: T


def check_max_parallelism(operator: str, stored: int, wanted: int) -> None:
    """Checks that keys belong to the same key-groups as in the checkpoint.

    Raises:
        Unrecoverable: they do not.
    """
    if stored != wanted:
        raise Unrecoverable(
            f"operator {operator}: the checkpoint was taken with max-parallelism {stored}, the job has "
            f"{wanted}; it cannot change, since it decides which key-group a key belongs to: set it "
            f"back to {stored}"
        )


def assign_keyed(
    parts: Sequence[KeyedPart[T]], parallelism: int, max_parallelism: int
) -> list[list[T]]:
    """Keyed state per new subtask, in the order of key-groups.

    Args:
        parts: one per old subtask that had any; ranges do not overlap.
        parallelism: number of new subtasks.
        max_parallelism: number of key-groups, the same as in the checkpoint.

    Raises:
        StoreCorrupt: ranges overlap or lie outside the key-groups.
    """
    check_parallelism(parallelism, max_parallelism)
    ordered = sorted(parts, key=lambda part: part.first_key_group)
    _check_ranges(ordered, max_parallelism)
    assigned: list[list[T]] = []
    begin = 0
    for subtask_index in range(parallelism):
        owned = key_group_range(subtask_index, parallelism, max_parallelism)
        while begin < len(ordered) and ordered[begin].last_key_group < owned.start:
            begin += 1
        end = begin
        while end < len(ordered) and ordered[end].first_key_group < owned.stop:
            end += 1
        assigned.append([part.handle for part in ordered[begin:end]])
    return assigned


def assign_split(lists: Sequence[Sequence[T]], parallelism: int) -> list[list[T]]:
    """A list whose items are dealt out, per new subtask.

    Args:
        lists: items per old subtask, by its index; empty where it had none.
        parallelism: number of new subtasks.
    """
    _check_parallelism(parallelism)
    if len(lists) == parallelism:
        return [list(items) for items in lists]
    items = [item for own in lists for item in own]
    bounds = [index * len(items) // parallelism for index in range(parallelism + 1)]
    return [items[bounds[index] : bounds[index + 1]] for index in range(parallelism)]


def assign_union(lists: Sequence[Sequence[T]], parallelism: int) -> list[list[T]]:
    """A list of which every new subtask gets all items.

    Args:
        lists: items per old subtask, by its index; empty where it had none.
        parallelism: number of new subtasks.
    """
    _check_parallelism(parallelism)
    items = [item for own in lists for item in own]
    return [list(items) for _ in range(parallelism)]


def assign_broadcast(copies: Sequence[T | None], parallelism: int) -> list[T | None]:
    """State that all subtasks hold alike, per new subtask.

    Args:
        copies: what each old subtask held, by its index; None where it had finished or had none.
        parallelism: number of new subtasks.

    Returns:
        A subtask's own copy where there is one, else one of the others, taken in turn so that no file
        is read by all; None where there is no copy.
    """
    _check_parallelism(parallelism)
    present = [copy for copy in copies if copy is not None]
    assigned: list[T | None] = []
    for index in range(parallelism):
        own = copies[index] if index < len(copies) else None
        if own is None and present:
            own = present[index % len(present)]
        assigned.append(own)
    return assigned


def _check_parallelism(parallelism: int) -> None:
    if parallelism < 1:
        raise ValueError(f"parallelism is {parallelism}: it must be at least 1")


def _check_ranges(ordered: Sequence[KeyedPart[T]], max_parallelism: int) -> None:
    free_from = 0
    for part in ordered:
        first, last = part.first_key_group, part.last_key_group
        if not free_from <= first <= last < max_parallelism:
            raise StoreCorrupt(
                f"the checkpoint holds key-groups {first}..{last}, which overlap those of another "
                f"subtask or lie outside 0..{max_parallelism - 1}: restore from another checkpoint"
            )
        free_from = last + 1
