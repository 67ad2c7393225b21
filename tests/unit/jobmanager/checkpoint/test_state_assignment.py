"""Aim: whatever the old and the new parallelism, each piece of state is restored where it belongs, once.

Method: properties over all parallelisms, against the owner formula for single key-groups.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobmanager.checkpoint.state_assignment import (
    KeyedPart,
    assign_broadcast,
    assign_by_size,
    assign_keyed,
    assign_union,
    check_max_parallelism,
)
from penstock.errors import JobRejected, StoreCorrupt, Unrecoverable
from penstock.storage.key_groups import key_group_range, owner

lists = st.lists(st.lists(st.integers(), max_size=5), max_size=12)
parallelisms = st.integers(1, 12)


@st.composite
def rescales(draw: st.DrawFn) -> tuple[int, int, int]:
    max_parallelism = draw(st.integers(1, 300))
    old = draw(st.integers(1, max_parallelism))
    new = draw(st.integers(1, max_parallelism))
    return old, new, max_parallelism


def old_parts(parallelism: int, max_parallelism: int) -> list[KeyedPart[int]]:
    ranges = [key_group_range(i, parallelism, max_parallelism) for i in range(parallelism)]
    return [KeyedPart(r[0], r[-1], index) for index, r in enumerate(ranges)]


@given(rescales(), st.randoms(use_true_random=False))
def test_each_key_group_finds_its_state_exactly_once(
    rescale: tuple[int, int, int], random: Random
) -> None:
    old, new, max_parallelism = rescale
    parts = old_parts(old, max_parallelism)
    random.shuffle(parts)
    assigned = assign_keyed(parts, new, max_parallelism)
    assert len(assigned) == new
    by_handle = {part.handle: part for part in parts}
    for group in range(max_parallelism):
        mine = owner(group, new, max_parallelism)
        holders = [
            handle
            for handle in assigned[mine]
            if by_handle[handle].first_key_group <= group <= by_handle[handle].last_key_group
        ]
        assert holders == [owner(group, old, max_parallelism)]
    for index, handles in enumerate(assigned):
        owned = key_group_range(index, new, max_parallelism)
        assert handles == sorted(set(handles))
        for handle in handles:
            assert by_handle[handle].first_key_group <= owned[-1]
            assert by_handle[handle].last_key_group >= owned[0]


@given(st.integers(1, 300).flatmap(lambda top: st.tuples(st.integers(1, top), st.just(top))))
def test_same_parallelism_gives_each_its_own(numbers: tuple[int, int]) -> None:
    parallelism, max_parallelism = numbers
    parts = old_parts(parallelism, max_parallelism)
    assert assign_keyed(parts, parallelism, max_parallelism) == [[i] for i in range(parallelism)]


def test_subtasks_without_state_leave_gaps() -> None:
    parts = [KeyedPart(0, 3, "a"), KeyedPart(8, 11, "c")]
    assert assign_keyed(parts, 3, 12) == [["a"], [], ["c"]]
    assert assign_keyed(parts, 1, 12) == [["a", "c"]]
    assert assign_keyed([], 2, 12) == [[], []]


@pytest.mark.parametrize(
    "parts",
    [
        [KeyedPart(0, 5, "a"), KeyedPart(5, 9, "b")],
        [KeyedPart(0, 10, "a")],
        [KeyedPart(-1, 4, "a")],
        [KeyedPart(4, 3, "a")],
    ],
)
def test_ranges_that_cannot_be_are_refused(parts: list[KeyedPart[str]]) -> None:
    with pytest.raises(StoreCorrupt, match="restore from another checkpoint"):
        assign_keyed(parts, 2, 10)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(JobRejected):
        assign_keyed([], 11, 10)
    with pytest.raises(ValueError, match="at least 1"):
        assign_union([], 0)
    with pytest.raises(Unrecoverable, match="set it back to 128"):
        check_max_parallelism("count", 128, 256)
    check_max_parallelism("count", 128, 128)


@given(lists, parallelisms)
def test_union_gives_everything_to_everybody(old: list[list[int]], parallelism: int) -> None:
    everything = [item for own in old for item in own]
    assert assign_union(old, parallelism) == [everything] * parallelism


@given(st.lists(st.one_of(st.none(), st.integers()), max_size=8), parallelisms)
def test_broadcast_gives_one_copy_each(old: list[int | None], parallelism: int) -> None:
    assigned = assign_broadcast(old, parallelism)
    present = {copy for copy in old if copy is not None}
    assert len(assigned) == parallelism
    for index, copy in enumerate(assigned):
        if index < len(old) and old[index] is not None:
            assert copy == old[index]
        else:
            assert copy in present if present else copy is None


sized = st.lists(st.lists(st.integers(0, 50), max_size=5), max_size=12)


@given(sized, parallelisms)
def test_splits_are_dealt_out_by_size_none_lost_and_none_twice(
    held: list[list[int]], parallelism: int
) -> None:
    numbered = [[(i, j, size) for j, size in enumerate(own)] for i, own in enumerate(held)]
    assigned = assign_by_size(numbered, parallelism, lambda split: split[2])
    assert sorted(split for own in assigned for split in own) == sorted(
        split for own in numbered for split in own
    )
    if len(held) == parallelism:
        assert assigned == numbered
        return
    assert all(own == sorted(own) for own in assigned)
    loads = [sum(size for _, _, size in own) for own in assigned]
    largest = max((split[2] for own in numbered for split in own), default=0)
    assert max(loads) - min(loads) <= largest


@given(
    st.lists(st.lists(st.none(), max_size=5), max_size=12), parallelisms, st.sampled_from([0, 7])
)
def test_splits_of_one_size_and_those_that_are_done_differ_by_at_most_one(
    held: list[list[None]], parallelism: int, size: int
) -> None:
    if len(held) != parallelism:
        counts = [len(own) for own in assign_by_size(held, parallelism, lambda _: size)]
        assert max(counts) - min(counts) <= 1
