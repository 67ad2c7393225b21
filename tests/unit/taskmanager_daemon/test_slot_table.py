"""Aim: slots are held by one job at a time, in the newest epoch, and requests may be repeated.

Method: hypothesis drives the table and a dumb twin (a mapping slot -> job) through the same calls.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Fenced, JobRejected, NoResourceAvailable
from taskmanager.slots.slot_table import SlotTable

JOBS = st.sampled_from(["a", "b", "c"])
SLOTS = st.lists(st.sampled_from(["s0", "s1", "s2", "s3"]), min_size=1, max_size=4, unique=True)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), JOBS, SLOTS),
        st.tuples(st.just("stop"), JOBS, SLOTS),
        st.tuples(st.just("released"), JOBS, SLOTS),
        st.tuples(st.just("epoch"), JOBS, SLOTS),
    ),
    max_size=40,
)


@given(CALLS)
def test_any_sequence_of_calls_agrees_with_a_mapping(
    calls: list[tuple[str, str, list[str]]],
) -> None:
    table, epoch = SlotTable(3), 0
    allocated: dict[str, str] = {}
    stopping: dict[str, str] = {}
    for number, (call, job, slots) in enumerate(calls, 1):
        if call == "allocate":
            taken = any(allocated.get(slot, job) != job for slot in slots)
            waits = any(slot in stopping for slot in slots)
            new = [slot for slot in slots if slot not in allocated and slot not in stopping]
            free = 3 - len(allocated) - len(stopping)
            try:
                allocation = table.allocate(job, slots, number)
            except NoResourceAvailable:
                assert taken or len(new) > free + len(stopping)
            else:
                assert not taken
                if waits or len(new) > free:
                    assert allocation.wait_for
                    assert set(allocation.wait_for) <= set(stopping)
                else:
                    assert set(allocation.new) == set(new)
                    assert set(allocation.existing) == set(slots) - set(new)
                    allocated |= dict.fromkeys(new, job)
        elif call == "stop":
            stopped = table.stop(job, slots, number)
            assert set(stopped) == {slot for slot in slots if allocated.get(slot) == job}
            stopping |= {slot: allocated.pop(slot) for slot in stopped}
        elif call == "released":
            for slot in slots:
                table.released(slot)
                allocated.pop(slot, None)
                stopping.pop(slot, None)
        else:
            epoch += 1
            assert set(table.follow("c", epoch)) == set(allocated)
            stopping |= allocated
            allocated.clear()
            assert table.follow("c", epoch) == ()
            table.check_epoch(epoch)
            with pytest.raises(Fenced, match="is over"):
                table.follow("c", epoch - 1)
            for other in (epoch - 1, epoch + 1):
                with pytest.raises(Fenced):
                    table.check_epoch(other)
        table.check()
        assert dict(table.held()) == allocated
        assert dict(table.holders()) == allocated | stopping
        assert set(table.stopping()) == set(stopping)
        assert table.free_count == 3 - len(allocated) - len(stopping)


def test_epochs_of_another_cluster_begin_anew() -> None:
    table = SlotTable(1)
    table.follow("old", 7)
    table.allocate("a", ["s0"], 1)
    assert table.follow("new", 1) == ("s0",)
    table.check_epoch(1)
    with pytest.raises(Fenced, match="has not registered with epoch 7"):
        table.check_epoch(7)


def test_all_of_a_jobs_slots_are_stopped_where_none_is_named() -> None:
    table = SlotTable(3)
    table.allocate("a", ["s0", "s1"], 1)
    table.allocate("b", ["s2"], 2)
    assert table.stop("a", [], 3) == ("s0", "s1")
    assert table.slots_of("b") == ("s2",)
    assert table.stop_all() == ("s2",)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 201, "a\n"])
def test_names_that_would_be_paths_are_refused(name: str) -> None:
    with pytest.raises(JobRejected):
        SlotTable(1).allocate(name, ["s0"], 1)
    with pytest.raises(JobRejected):
        SlotTable(1).allocate("job", [name], 1)


def test_a_late_call_does_not_reach_the_slots_successor() -> None:
    table = SlotTable(2)
    table.follow("c", 1)
    table.allocate("a", ["s0"], allocation_id=1)
    assert table.stop("a", ["s0"], allocation_id=2) == ("s0",)
    table.released("s0")
    with pytest.raises(Fenced):
        table.allocate("a", ["s0"], allocation_id=1)
    table.allocate("b", ["s0"], allocation_id=3)
    assert table.stop("b", ["s0"], allocation_id=2) == ()
    assert table.is_late("s0", 2)
    assert not table.is_late("s0", 4)
    table.follow("c", 1)
    assert not table.is_late("s0", 1), "a registration numbers its calls anew"


def test_a_number_far_ahead_of_all_others_spoils_no_slot() -> None:
    table = SlotTable(1)
    table.follow("c", 1)
    for call in (table.stop, table.allocate):
        with pytest.raises(Fenced, match="all that come next would be late"):
            call("a", ["s0"], allocation_id=2**63 - 1)
    assert table.allocate("b", ["s0"], allocation_id=1).new == ("s0",)


def test_slots_that_were_freed_before_they_were_asked_for_stay_free() -> None:
    table = SlotTable(2)
    table.follow("c", 1)
    assert table.stop("a", ["s0"], allocation_id=2) == ()
    with pytest.raises(Fenced):
        table.allocate("a", ["s0"], allocation_id=1)
    assert table.free_count == 2
