"""Aim: of all JobManagers that believe they lead, one decides what becomes of a job, and no acknowledged job is lost.

Method: several leaders on one store in this process, one of them deposed at every point; swaps whose answers are
lost; a model of what each was told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from common.pb import job_record_pb2
from jobmanager.stores import job_store
from jobmanager.stores.job_store import JobStore
from jobmanager.stores.leader_store import LeaderStore
from penstock.errors import Fenced, StoreCorrupt, StoreNotFound, StoreTransient, StreamError
from penstock.pb import graph_pb2
from penstock.storage.memory_store import MemoryStore
from penstock.storage.object_store import SwapUnanswered
from tests.support.jobs import DEADLINE_S

GRAPH = graph_pb2.JobGraph(name="job")
JOB = "0" * 32
RECORD = f"{JOB}/record"
END = job_record_pb2.StoredEnd(state="FINISHED", ended_at_ms=5)


class Lossy(MemoryStore):
    """``lost`` swaps do what they are asked to and fail; ``failing`` ones do nothing and fail, as ``late`` ones, which may
    come."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.faults: list[str] = []
        self.late: list[Callable[[], bool]] = []

    @override
    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "failing":
            raise StoreTransient("refused")
        if fault == "late":
            self.late.append(partial(super().compare_and_swap, path, expected, new))
            raise SwapUnanswered("no answer yet")
        swapped = super().compare_and_swap(path, expected, new)
        if fault == "lost":
            raise StoreTransient("no answer")
        return swapped


def lead(kept: MemoryStore, jobs: MemoryStore) -> JobStore:
    leader = LeaderStore(kept, "kept")
    leader.take_over()
    return JobStore(jobs, "jobs", leader)


def two() -> tuple[MemoryStore, MemoryStore]:
    return MemoryStore(1 << 20), MemoryStore(1 << 20)


def test_epochs_grow_and_the_cluster_keeps_its_id() -> None:
    kept, _ = two()
    first, second = LeaderStore(kept, "kept"), LeaderStore(kept, "kept")
    first.take_over()
    first.verify()
    second.take_over()
    assert (first.epoch, second.epoch) == (1, 2)
    assert first.cluster_id == second.cluster_id
    with pytest.raises(Fenced, match="epoch 2 leads"):
        first.verify()
    second.verify()
    kept.delete("LEADER")
    with pytest.raises(StoreNotFound, match="is gone"):
        second.verify()
    kept.put("LEADER", [b"junk"])
    with pytest.raises(StoreCorrupt, match="restore it from a backup"):
        LeaderStore(kept, "kept").take_over()


def test_what_was_noted_is_found_by_the_next() -> None:
    kept, jobs = two()
    store = lead(kept, jobs)
    store.save("b" * 32, GRAPH, 20)
    store.save(JOB, GRAPH, 10)
    store.save(JOB, GRAPH, 30)  # once more: nothing changes
    store.reserve_attempts(JOB, 64)
    store.note_cancellation(JOB)
    store.note_operations(JOB, b"asked")
    later = lead(kept, jobs)
    first, second = later.stored()
    assert (first.job_id, second.job_id) == (JOB, "b" * 32)
    assert (first.graph, first.problem) == (GRAPH, "")
    record = first.record
    assert (record.attempts_end, record.is_cancelled, record.operations) == (64, True, b"asked")
    assert not second.record.is_cancelled
    later.note_end(JOB, END, b"all")
    assert not lead(kept, jobs).stored()[0].is_clean
    last = lead(kept, jobs)
    last.stored()
    last.note_clean(JOB, b"all")
    last.remove("b" * 32)
    last.remove("b" * 32)
    [only] = lead(kept, jobs).stored()
    assert (only.record.end.state, only.is_clean) == ("FINISHED", True)
    last = lead(kept, jobs)
    last.remove(JOB)
    assert jobs.list("") == []


CHANGES: list[Callable[[JobStore], Any]] = [
    lambda store: store.reserve_attempts(JOB, 64),
    lambda store: store.note_checkpoints(JOB, "/checkpoints"),
    lambda store: store.note_cancellation(JOB),
    lambda store: store.note_end(JOB, END, b""),
    lambda store: store.note_commit(JOB),
    lambda store: store.note_operations(JOB, b"x"),
    lambda store: store.remove(JOB),
]


@pytest.mark.parametrize("change", CHANGES)
def test_who_was_deposed_changes_nothing(change: Callable[[JobStore], Any]) -> None:
    kept, jobs = two()
    old = lead(kept, jobs)
    old.save(JOB, GRAPH, 1)
    new = lead(kept, jobs)
    new.stored()
    before = jobs.get(f"{JOB}/record")
    with pytest.raises(Fenced, match="epoch 2 has it"):
        change(old)
    assert jobs.get(f"{JOB}/record") == before
    change(new)


def test_a_job_is_acknowledged_by_who_leads_and_by_nobody_else() -> None:
    kept, jobs = two()
    old = lead(kept, jobs)
    new = lead(kept, jobs)
    assert new.stored() == []
    with pytest.raises(Fenced):
        old.save(JOB, GRAPH, 1)
    assert lead(kept, jobs).stored() == [], "nobody runs what was refused"
    # The client asks who leads; what the other has left is no obstacle.
    with pytest.raises(Fenced):
        old.save(JOB, GRAPH, 1)
    last = lead(kept, jobs)
    last.save(JOB, GRAPH, 2)
    [job] = lead(kept, jobs).stored()
    assert (job.record.submitted_at_ms, job.problem) == (2, "")


def test_numbers_of_attempts_of_a_leader_that_did_not_acknowledge_a_job_are_not_used_again() -> (
    None
):
    kept, jobs = two()
    old = lead(kept, jobs)
    assert old.save(JOB, GRAPH, 1) == 0
    old.reserve_attempts(JOB, 10)
    # The answer to its client was lost, who asks the next leader; that has not read the record.
    new = lead(kept, jobs)
    assert new.save(JOB, GRAPH, 2) == 10
    new.reserve_attempts(JOB, 20)
    assert new.save(JOB, GRAPH, 3) == 20, "its client asks once more"
    [job] = lead(kept, jobs).stored()
    assert job.record.attempts_end == 20


def test_a_graph_without_a_record_was_never_acknowledged() -> None:
    kept, jobs = two()
    jobs.put(f"{JOB}/graph-0", [b"x"])
    assert lead(kept, jobs).stored() == []
    assert [one.path for one in jobs.list("")] == [RECORD]
    assert lead(kept, jobs).stored() == []


@pytest.mark.parametrize("who", ["same", "next"])
def test_a_job_that_is_stored_late_is_run_by_nobody(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 has not answered the swap, and makes it behind all that was done since."""
    kept, jobs = MemoryStore(1 << 20), Lossy()
    store = lead(kept, jobs)
    jobs.faults = ["late"]
    with pytest.raises(SwapUnanswered):
        store.save(JOB, GRAPH, 1)
    if who == "same":
        store.withdraw(JOB)
    else:
        assert lead(kept, jobs).stored() == []
    for _ in range(2):
        assert [create() for create in jobs.late] == [False]
        assert lead(kept, jobs).stored() == []
    later = lead(kept, jobs)
    later.save(JOB, GRAPH, 2)
    [job] = lead(kept, jobs).stored()
    assert (job.record.submitted_at_ms, job.problem) == (2, "")
    lead(kept, jobs).withdraw("b" * 32)
    monkeypatch.setattr(job_store, "_now_ms", lambda: 1 << 62)
    assert [one.job_id for one in lead(kept, jobs).stored()] == [JOB]
    assert {one.path.split("/")[0] for one in jobs.list("")} == {JOB}


def test_no_job_is_withdrawn_that_another_leader_has_stored() -> None:
    kept, jobs = two()
    lead(kept, jobs).save(JOB, GRAPH, 1)
    with pytest.raises(StoreTransient, match="away for a moment"):
        lead(kept, jobs).withdraw(JOB)
    [job] = lead(kept, jobs).stored()
    assert not job.problem


def test_a_history_is_noted_where_a_swap_that_was_to_take_it_along_has_failed() -> None:
    kept, jobs = MemoryStore(1 << 20), Lossy()
    store = lead(kept, jobs)
    store.save(JOB, GRAPH, 1)
    changed = store._record(JOB).change
    history = job_record_pb2.StoredHistory(rivals_won=7)

    def change_behind_another(note: Callable[[job_record_pb2.StoredJob], None]) -> None:
        with pytest.raises(StoreTransient):
            changed(lambda _: None)
        changed(note)

    jobs.faults = ["failing"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store._record(JOB), "change", change_behind_another)
        store.note_history(JOB, history)
    (found,) = lead(kept, jobs).stored()
    assert found.record.history == history


class Overtaken:
    """A lock that the first who asks for it gets behind the second."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._is_second_done = threading.Event()

    def __enter__(self) -> None:
        if not self.asked.is_set():
            self.asked.set()
            assert self._is_second_done.wait(DEADLINE_S)

    def __exit__(self, *_: object) -> None:
        self._is_second_done.set()


def test_a_note_that_comes_late_undoes_nothing_of_a_later_one() -> None:
    """As one whose call was given up on, which waits behind a swap that hangs."""
    for kind in ("history", "taskmanagers"):
        kept, jobs = two()
        store = lead(kept, jobs)
        store.save(JOB, GRAPH, 1)
        lock = store._record(JOB)._lock = Overtaken()  # type: ignore[assignment]

        def note(number: int, kind: str = kind, store: JobStore = store) -> None:
            if kind == "history":
                store.note_history(JOB, job_record_pb2.StoredHistory(rivals_won=number))
            else:
                store.note_taskmanagers(JOB, {f"tm{number}": "host:1"})

        late = threading.Thread(target=note, args=(1,))
        late.start()
        assert lock.asked.wait(DEADLINE_S)
        note(2)
        late.join(DEADLINE_S)
        (found,) = lead(kept, jobs).stored()
        assert (found.record.history.rivals_won, dict(found.record.taskmanagers)) in (
            (2, {}),
            (0, {"tm2": "host:1"}),
        )


class Flapping(MemoryStore):
    """Its file system is not mounted while a call is made, and is again when the next one is."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.away = ""

    @override
    def get(self, path: str) -> bytes:
        if self.away and path.endswith(self.away):
            self.away = ""
            raise StoreNotFound(f"{path} does not exist")
        return super().get(path)


def test_a_job_is_not_removed_since_its_storage_was_away_for_a_moment() -> None:
    kept, jobs = MemoryStore(1 << 20), Flapping()
    lead(kept, jobs).save(JOB, GRAPH, 1)
    later = lead(kept, jobs)
    jobs.away = "record"
    [unread] = later.stored()
    assert not jobs.away
    assert "away" in unread.problem
    read = later.read(JOB)
    assert read is not None
    assert (read.graph, read.problem) == (GRAPH, "")


def test_what_is_no_job_is_left_alone() -> None:
    kept, jobs = two()
    for path in ("lost+found/file", f"{JOB}.bak/graph-0/notes"):
        jobs.put(path, [b"somebody's"])
    assert lead(kept, jobs).stored() == []
    assert len(jobs.list("")) == 2


def test_a_leader_that_was_lost_does_not_lead_behind_its_own_records() -> None:
    kept, jobs = two()
    for _ in range(5):
        store = lead(kept, jobs)
    store.save(JOB, GRAPH, 1)
    kept.delete("LEADER")
    again = lead(kept, jobs)
    assert again.leader_epoch == 1
    [job] = again.stored()
    assert (job.problem, again.leader_epoch) == ("", 6)
    with pytest.raises(Fenced):
        store.note_cancellation(JOB)
    again.note_cancellation(JOB)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["", "", "lost", "failing"])), max_size=30
    )
)
@settings(max_examples=100)
def test_what_was_said_to_be_noted_is_there_whatever_answers_are_lost(
    steps: list[tuple[int, str]],
) -> None:
    """Numbers only grow, so what is there last is between what was noted and what was tried."""
    kept, jobs = MemoryStore(1 << 20), Lossy()
    store = lead(kept, jobs)
    store.save(JOB, GRAPH, 1)
    noted = tried = 0
    for kind, fault in steps:
        jobs.faults = [fault]
        if kind == 0:
            store = lead(kept, jobs)
        try:
            if kind:
                tried += kind
                store.reserve_attempts(JOB, tried)
                noted = tried
            elif store.read(JOB) is None:
                raise AssertionError("an acknowledged job is lost")
        except StreamError:
            if not fault:
                raise
    jobs.faults = []
    [job] = lead(kept, jobs).stored()
    assert noted <= job.record.attempts_end <= tried
