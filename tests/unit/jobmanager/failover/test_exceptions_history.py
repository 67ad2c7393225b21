"""Aim: people see what failed, what failed with it and what came of it, however much fails.

Method: failures in, entries out; random failures, of which the bounds must hold.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jobmanager.failover.exceptions_history import (
    ExceptionEntry,
    ExceptionsHistory,
    readable_subtasks,
)
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.graph.execution_attempt import SubtaskId

ROOT = FailureCause("TaskFailure", "it broke")
LOST = FailureCause("TaskManagerLost", "gone")
ECHO = FailureCause("PartitionUnavailable", "a connection was lost")
TASKS = [SubtaskId("v1", index) for index in range(4)]


def test_the_newest_entry_comes_first() -> None:
    history = ExceptionsHistory(2)
    for number in (1, 2, 3):
        history.failed(
            FailureCause("TaskFailure", f"failure {number}"),
            joined=False,
            restarted=TASKS,
            labels={"type": "USER"},
            restart_number=number,
            delay_ms=10 * number,
        )
    assert [entry.cause.message for entry in history.entries] == ["failure 3", "failure 2"]
    newest = history.entries[0]
    assert newest.restarted_ranges == ["v1/0..3"]
    assert (newest.labels, newest.restart_number, newest.delay_ms) == ({"type": "USER"}, 3, 30)
    assert not newest.ended_job


def test_what_joins_belongs_to_the_newest_entry() -> None:
    history = ExceptionsHistory()
    note(history, LOST, joined=False, restarted=TASKS[:1])
    note(history, ECHO, joined=True, restarted=TASKS[1:2], delay_ms=7)
    (entry,) = history.entries
    assert entry.cause == LOST
    assert entry.concurrent == (ECHO,)
    assert (entry.delay_ms, entry.restarted_ranges) == (100, ["v1/0..1"])


def test_a_cause_that_comes_after_its_consequences_becomes_the_root() -> None:
    history = ExceptionsHistory()
    note(history, ECHO, joined=False, labels={"type": "SYSTEM"})
    note(history, ROOT, joined=True, labels={"type": "USER"})
    note(history, LOST, joined=True, labels={"type": "SYSTEM"})
    (entry,) = history.entries
    assert (entry.cause, entry.labels) == (ROOT, {"type": "USER"})
    assert entry.concurrent == (ECHO, LOST)


def test_the_end_of_the_job_is_noted() -> None:
    history = ExceptionsHistory()
    note(history, ROOT, joined=False)
    note(history, LOST, joined=False, delay_ms=None)
    note(history, ECHO, joined=True, delay_ms=None)
    assert [entry.ended_job for entry in history.entries] == [True, False]
    history = ExceptionsHistory()
    note(history, ECHO, joined=True, delay_ms=None)
    assert history.entries[0].ended_job, "what joins nothing is an entry of its own"


def test_subtasks_in_short() -> None:
    tasks = [SubtaskId("b", 2), *TASKS, SubtaskId("a", 10), SubtaskId("b", 4), SubtaskId("b", 3)]
    assert readable_subtasks(tasks) == ["a/10", "b/2..4", "v1/0..3"]
    assert readable_subtasks([]) == []


@given(st.lists(st.tuples(st.booleans(), st.sampled_from((ROOT, LOST, ECHO))), max_size=80))
def test_a_history_is_bounded_and_loses_no_count(failures: list[tuple[bool, FailureCause]]) -> None:
    history = ExceptionsHistory(3)
    groups: list[list[FailureCause]] = []
    for joined, cause in failures:
        if not joined or not groups:
            groups.append([])
        groups[-1].append(cause)
        note(history, cause, joined=joined)
    assert len(history.entries) == min(3, len(groups))
    for entry, group in zip(history.entries, reversed(groups), strict=False):
        assert entry.concurrent_count == len(group) - 1
        assert len(entry.concurrent) == min(16, len(group) - 1)
        ranks = (ROOT, LOST, ECHO)
        assert entry.cause == min(group, key=ranks.index)


def note(
    history: ExceptionsHistory,
    cause: FailureCause,
    *,
    joined: bool,
    restarted: list[SubtaskId] | None = None,
    labels: dict[str, str] | None = None,
    delay_ms: int | None = 100,
) -> ExceptionEntry:
    history.failed(
        cause,
        joined=joined,
        restarted=restarted or [],
        labels=labels or {},
        restart_number=1,
        delay_ms=delay_ms,
    )
    return history.entries[0]
