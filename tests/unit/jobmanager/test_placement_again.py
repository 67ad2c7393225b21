"""Aim: what is placed again returns to where it was, as far as there is room, and the rest is spread.

Method: cases by hand; properties against the best that any assignment could do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from jobmanager.graph.slot import Slot
from jobmanager.scheduler.placement import place_again


def slots_of(taskmanager_id: str, *numbers: int, incarnation: str = "1") -> list[Slot]:
    return [Slot(f"{taskmanager_id}-{n}", taskmanager_id, incarnation) for n in numbers]


A0, A1, A2 = slots_of("a", 0, 1, 2)
B0, B1 = slots_of("b", 0, 1)


def test_the_same_slot_before_another_of_the_taskmanager_before_any() -> None:
    previous = {"x": A0, "y": A1, "z": B0}
    placed = place_again(["x", "y", "z"], [B1, A2, A1], previous)
    assert placed == {"x": A2, "y": A1, "z": B1}


def test_who_has_no_home_left_takes_nobody_elses() -> None:
    (gone,) = slots_of("gone", 0)
    placed = place_again(["x", "y"], [A0, B0], {"x": gone, "y": A0})
    assert placed == {"x": B0, "y": A0}


def test_another_incarnation_is_the_same_place() -> None:
    (again,) = slots_of("a", 0, incarnation="2")
    assert place_again(["x"], [B0, again], {"x": A0}) == {"x": again}


def test_the_rest_is_spread() -> None:
    placed = place_again(["w", "x", "y", "z"], [A0, A1, A2, B0, B1], {"w": A1})
    assert Counter(slot.taskmanager_id for slot in placed.values()) == {"a": 2, "b": 2}
    assert place_again(["x", "y"], [A0, A1, B0], {}) == {"x": A0, "y": B0}


def test_who_is_near_something_goes_there_wherever_it_was() -> None:
    assert place_again(["x", "y"], [A0, B0], {"x": A0}, {"x": "b"}) == {"x": B0, "y": A0}
    assert place_again(["x"], [A0, B1], {"x": B1}, {"x": "b"}) == {"x": B1}
    assert place_again(["x"], [A1], {}, {"x": "b"}) == {"x": A1}, "there is no room near it"
    assert place_again(["x"], [A1], {}, {"x": "b", "y": "a"}) == {"x": A1}, "y has its slot already"


SLOTS = st.builds(
    lambda tm, n: Slot(f"{tm}-{n}", tm, "1"), st.sampled_from("abcd"), st.integers(0, 4)
)


@given(st.data())
def test_nothing_could_be_kept_better(data: st.DataObject) -> None:
    free = data.draw(st.lists(SLOTS, unique=True))
    tenants = data.draw(st.lists(st.integers(0, 20), unique=True, max_size=len(free)))
    past = data.draw(st.lists(st.none() | SLOTS, min_size=len(tenants), max_size=len(tenants)))
    previous = {
        tenant: replace(slot, incarnation="0")
        for tenant, slot in zip(tenants, past, strict=True)
        if slot is not None
    }
    placed = place_again(tenants, free, previous)
    homes_alone = {tenant: slot.taskmanager_id for tenant, slot in previous.items()}
    in_them = {
        t: slot.taskmanager_id for t, slot in place_again(tenants, free, {}, homes_alone).items()
    }
    assert Counter(t for t, home in homes_alone.items() if in_them[t] == home).total() == sum(
        placed[t].taskmanager_id == home for t, home in homes_alone.items()
    )
    assert list(placed) == tenants
    assert len(set(placed.values())) == len(tenants)
    assert set(placed.values()) <= set(free)
    # Whose slot is free: one of its former tenants is back in it.
    wanted = {slot.slot_id for slot in previous.values()}
    kept = [t for t, slot in previous.items() if placed[t].slot_id == slot.slot_id]
    assert len(kept) == len(wanted & {slot.slot_id for slot in free})
    # Each TaskManager has back as many of its own as it has room for.
    homes = Counter(slot.taskmanager_id for slot in previous.values())
    rooms = Counter(slot.taskmanager_id for slot in free)
    home = Counter(
        slot.taskmanager_id
        for tenant, slot in previous.items()
        if placed[tenant].taskmanager_id == slot.taskmanager_id
    )
    assert home == Counter({name: n for name in homes if (n := min(homes[name], rooms[name]))})
    # Stable: who is placed once more stays, and the order of the slots does not matter.
    assert place_again(tenants, free[::-1], previous) == placed
    assert place_again(tenants, free, placed) == placed
    # Spread: nobody without a home is where another TaskManager with room has two tenants less.
    load = Counter(slot.taskmanager_id for slot in placed.values())
    left = Counter(slot.taskmanager_id for slot in set(free) - set(placed.values()))
    for tenant, slot in placed.items():
        is_new = tenant not in previous or previous[tenant].taskmanager_id != slot.taskmanager_id
        if is_new:
            assert all(load[slot.taskmanager_id] - load[other] < 2 for other in left)
