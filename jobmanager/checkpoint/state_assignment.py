"""Which subtask gets which state of an operator when it is restored, at the same parallelism or another one.

Every restore of a job and of a test goes through ``assign_state``, operator by operator. Handles are opaque.
With the parallelism unchanged, every subtask gets exactly what it had itself; that is no case of its own.

Invariants:
- keyed state: a handle goes to every subtask whose key-groups overlap its own, so each key-group that a
  snapshot holds is restored by exactly one subtask;
- split lists: every item goes to exactly one subtask, in order, and no two subtasks differ by more than
  one item;
- splits of a source: each goes to exactly one subtask, the largest first to the one with the least; those without
  a size (they are done) by number;
- union lists: every subtask gets all items in the order of the old subtasks;
- broadcast lists: all old subtasks held the same; every subtask gets one copy.

Source: Carbone et al., "State Management in Apache Flink", section 3.1; Flink, StateAssignmentOperation
and RoundRobinOperatorStateRepartitioner (which deals out item by item; here runs stay together).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from penstock.errors import StoreCorrupt, Unrecoverable
from penstock.storage.key_groups import check_parallelism, key_group_range

T = TypeVar("T")
K = TypeVar("K")
L = TypeVar("L")
S = TypeVar("S")


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


class Redistribution(Enum):
    """Who gets the items of a list."""

    SPLIT = "one subtask each"
    UNION = "every subtask all"
    BROADCAST = "all subtasks hold the same"


@dataclass(frozen=True, slots=True)
class ItemRun(Generic[T]):
    """Items of a list that lie together."""

    handle: T
    item_count: int


@dataclass(frozen=True, slots=True)
class Share(Generic[T]):
    """Some of the items of a run: ``count`` of them from ``first`` on."""

    run: ItemRun[T]
    first: int
    count: int

    @property
    def is_whole(self) -> bool:
        """Whether it is the run as it is."""
        return self.count == self.run.item_count


@dataclass(frozen=True, slots=True)
class HeldList(Generic[L]):
    """A list of an operator as one old subtask held it."""

    name: str
    redistribution: Redistribution
    run: ItemRun[L]


@dataclass(frozen=True, slots=True)
class HeldState(Generic[K, L, S]):
    """What one old subtask held of an operator; splits are those of a source."""

    keyed: KeyedPart[K] | None = None
    lists: tuple[HeldList[L], ...] = ()
    splits: tuple[S, ...] = ()


@dataclass(frozen=True, slots=True)
class AssignedState(Generic[K, L, S]):
    """What one new subtask begins with; the lists that every subtask gets come last."""

    keyed: list[K]
    lists: list[Share[L]]
    splits: list[S]


def assign_state(
    held: Sequence[HeldState[K, L, S] | None],
    parallelism: int,
    max_parallelism: int,
    size_of: Callable[[S], int] = lambda _: 0,
) -> list[AssignedState[K, L, S]]:
    """The state of one operator, per new subtask.

    Args:
        held: by old subtask; None = it had nothing.
        parallelism: number of new subtasks.
        max_parallelism: number of key-groups, the same as in the checkpoint.
        size_of: what is left to read of a split.

    Raises:
        StoreCorrupt: key-groups of the checkpoint overlap or are none of the operator's.

    Example: two subtasks become one.
        >>> held = [HeldState(KeyedPart(0, 3, "a"), splits=("x",)), HeldState(KeyedPart(4, 7, "b"))]
        >>> assign_state(held, 1, 8)
        [AssignedState(keyed=['a', 'b'], lists=[], splits=['x'])]
    """
    parts = [one.keyed for one in held if one is not None and one.keyed is not None]
    keyed: list[list[K]] = [[] for _ in range(parallelism)]
    if parts:
        keyed = assign_keyed(parts, parallelism, max_parallelism)
    splits = assign_by_size(
        [() if one is None else one.splits for one in held], parallelism, size_of
    )
    lists = _assign_lists([() if one is None else one.lists for one in held], parallelism)
    return [AssignedState(*own) for own in zip(keyed, lists, splits, strict=True)]


def _assign_lists(held: Sequence[Sequence[HeldList[L]]], parallelism: int) -> list[list[Share[L]]]:
    assigned: list[list[Share[L]]] = [[] for _ in range(parallelism)]
    named = dict.fromkeys((one.redistribution, one.name) for own in held for one in own)
    for key in sorted(named, key=lambda key: key[0] is Redistribution.UNION):
        runs = [[one.run for one in own if (one.redistribution, one.name) == key] for own in held]
        for own, more in zip(assigned, _assign_runs(key[0], runs, parallelism), strict=True):
            own += more
    return assigned


def _assign_runs(
    redistribution: Redistribution, runs: Sequence[Sequence[ItemRun[L]]], parallelism: int
) -> list[list[Share[L]]]:
    if redistribution is Redistribution.UNION:
        return [whole(own) for own in assign_union(runs, parallelism)]
    if redistribution is Redistribution.BROADCAST:
        copies = assign_broadcast([own or None for own in runs], parallelism)
        return [whole(copy or ()) for copy in copies]
    if len(runs) == parallelism:
        return [whole(own) for own in runs]
    return deal([run for own in runs for run in own], parallelism)


def whole(runs: Iterable[ItemRun[T]]) -> list[Share[T]]:
    """Each run as it is."""
    return [Share(run, 0, run.item_count) for run in runs]


def deal(runs: Sequence[ItemRun[T]], receivers: int) -> list[list[Share[T]]]:
    """Deals the items of runs out in order; the numbers that receivers get differ by at most one.

    Example: five items in two files, for two.
        >>> [[(s.run.handle, s.first, s.count) for s in own] for own in deal([ItemRun("a", 3), ItemRun("b", 2)], 2)]
        [[('a', 0, 2)], [('a', 2, 1), ('b', 0, 2)]]
    """
    total = sum(run.item_count for run in runs)
    bounds = [index * total // receivers for index in range(receivers + 1)]
    return [_cut(runs, bounds[index], bounds[index + 1]) for index in range(receivers)]


def _cut(runs: Iterable[ItemRun[T]], first: int, end: int) -> list[Share[T]]:
    """The items from ``first`` up to ``end`` of several runs, counted over all."""
    found = []
    begin = 0
    for run in runs:
        low, high = max(first - begin, 0), min(end - begin, run.item_count)
        begin += run.item_count
        if low < high:
            found.append(Share(run, low, high - low))
    return found


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


def assign_by_size(
    lists: Sequence[Sequence[T]], parallelism: int, size_of: Callable[[T], int]
) -> list[list[T]]:
    """Splits of a source, per new subtask, in the order in which they were.

    Args:
        lists: splits per old subtask, by its index; empty where it had none.
        parallelism: number of new subtasks.
        size_of: what is left to read of a split; 0 = nothing.

    Example: the large one is alone.
        >>> assign_by_size([["a", "bbb"], ["c"], ["d"]], 2, len)
        [['bbb'], ['a', 'c', 'd']]
    """
    _check_parallelism(parallelism)
    if len(lists) == parallelism:
        return [list(items) for items in lists]
    items = [item for own in lists for item in own]
    sizes = [size_of(item) for item in items]
    loads, counts = [0] * parallelism, [0] * parallelism
    owners = [0] * len(items)
    for place in sorted(range(len(items)), key=lambda place: -sizes[place]):
        least = loads if sizes[place] else counts
        owner = min(range(parallelism), key=lambda index: (least[index], counts[index], index))
        owners[place] = owner
        loads[owner] += sizes[place]
        counts[owner] += 1
    assigned: list[list[T]] = [[] for _ in range(parallelism)]
    for item, owner in zip(items, owners, strict=True):
        assigned[owner].append(item)
    return assigned


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
