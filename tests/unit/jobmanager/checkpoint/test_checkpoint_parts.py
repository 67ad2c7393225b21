"""Aim: the small parts of the coordinator that have rules of their own.

Method: each alone.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.completed_checkpoint import SnapshotSummary
from jobmanager.checkpoint.deletion_queue import (
    BATCH_PATHS_MAX,
    FIRST_RETRY_MS,
    LAST_RETRY_MS,
    DeletionQueue,
)
from jobmanager.checkpoint.failure_policy import FailurePolicy
from jobmanager.checkpoint.file_uses import FileUses, Holder, Role
from jobmanager.checkpoint.pending import summarize
from jobmanager.checkpoint.shared_state_registry import SharedFileMismatch, SharedStateRegistry
from jobmanager.checkpoint.statistics import HISTORY_MAX, CheckpointStatistics, CheckpointStatus
from jobmanager.checkpoint.steady_time import SteadyTime
from penstock.errors import InvariantViolation
from tests.support.checkpoints import private, shared


def test_only_what_tells_of_the_health_of_checkpoints_counts() -> None:
    counting = {
        reason for reason in c.AbortReason if FailurePolicy(-1).aborted(reason).failed_in_a_row
    }
    assert counting == {
        c.AbortReason.EXPIRED,
        c.AbortReason.DECLINED,
        c.AbortReason.STORE_FAILED,
        c.AbortReason.TOO_LARGE,
    }


def test_no_failure_tolerated() -> None:
    policy = FailurePolicy(0)
    assert not policy.aborted(c.AbortReason.SUBSUMED).fails_job
    assert policy.aborted(c.AbortReason.EXPIRED).fails_job


@given(st.lists(st.integers(-10_000, 10_000), min_size=1))
def test_steady_time_never_runs_backwards(wall_times: list[int]) -> None:
    time = SteadyTime()
    steady = [time.advance(wall) for wall in wall_times]
    assert steady == sorted(steady)
    assert time.wall(steady[-1]) == wall_times[-1]
    forward = sum(max(0, b - a) for a, b in itertools.pairwise(wall_times))
    assert steady[-1] - steady[0] == forward


def test_file_uses() -> None:
    uses = FileUses()
    one, two = Holder(Role.PENDING, 1), Holder(Role.COMPLETED, 1)
    uses.hold(one, ["a", "b", "a", ""])
    uses.hold(two, ["b"])
    uses.check()
    assert uses.drop(one) == ["a"]
    assert uses.in_use("b")
    assert not uses.in_use("a")
    assert uses.drop(two) == ["b"]
    assert uses.drop(two) == []
    uses.check()


def test_registry_first_location_wins_and_counts_follow() -> None:
    registry = SharedStateRegistry()
    first, second = shared("f", "p1"), shared("f", "p2")
    registry.register(1, [first, first, private("q")])
    plan = registry.plan([registry.claim(second), registry.claim(first)])
    assert plan.references == (first,)
    assert plan.replaced == ((first.key, first.location),)
    registry.register(2, plan.references)
    registry.check()
    assert first.key is not None
    assert registry.counts() == {first.key: 2, private("q").location: 1}
    registry.release(1)
    registry.release(2)
    assert registry.counts() == {}
    # A key that is not known any more lies where it is named.
    assert registry.claim(second).resolved == second.location


def test_registry_refuses_the_same_checkpoint_twice_and_other_bytes() -> None:
    registry = SharedStateRegistry()
    registry.register(1, [shared("f", "p1")])
    with pytest.raises(InvariantViolation, match="already"):
        registry.register(1, [])
    with pytest.raises(SharedFileMismatch, match="used a file name twice"):
        registry.claim(shared("f", "p2", size=11))
    claims = [registry.claim(shared("g", "x")), registry.claim(shared("g", "y", checksum=2))]
    with pytest.raises(SharedFileMismatch, match="'y'"):
        registry.plan(claims)


def test_deletions_go_in_batches_and_back_off() -> None:
    queue = DeletionQueue()
    paths = [f"f{number}" for number in range(BATCH_PATHS_MAX + 1)]
    queue.add(paths)
    assert len(queue.start(0)) == BATCH_PATHS_MAX
    assert queue.start(0) == ()
    assert queue.finished((), 0)
    assert queue.start(0) == (paths[-1],)
    now, pause = 0, FIRST_RETRY_MS
    for _ in range(12):
        assert queue.finished((paths[-1], "unknown"), now)
        queue.check()
        assert queue.due_ms(now) == now + pause
        assert queue.start(now + pause - 1) == ()
        now += pause
        assert queue.start(now) == (paths[-1],)
        pause = min(2 * pause, LAST_RETRY_MS)
    assert queue.finished((), now)
    assert not queue.finished((), now)
    assert queue.due_ms(now) is None
    assert queue.was_released("f0")
    queue.add(["g"])
    queue.start(now)
    queue.finished(("g",), now)
    assert queue.due_ms(now) == now + FIRST_RETRY_MS


def test_summary_takes_maxima_of_times_and_sums_of_bytes() -> None:
    summaries = [
        SnapshotSummary(1, 9, 2.5, 3, 10, 100, 6),
        SnapshotSummary(5, 4, 0.5, 7, 20, 200, 1),
    ]
    assert summarize(summaries) == SnapshotSummary(5, 9, 2.5, 7, 30, 300, 7)


def test_history_keeps_the_last_ones_and_all_that_are_pending() -> None:
    statistics = CheckpointStatistics()
    statistics.triggered(1, 10, 4)
    for number in range(2, 2 * HISTORY_MAX):
        statistics.triggered(number, 10, 4)
        statistics.acknowledged(number, SnapshotSummary(sync_ms=2.0, state_bytes=3))
        statistics.failed(number, "why", 20)
        statistics.check()
    records = statistics.records({3})
    assert len(records) == HISTORY_MAX
    assert records[-1].checkpoint_id == 1
    assert records[-1].status is CheckpointStatus.PENDING
    assert records[0].summary == SnapshotSummary(sync_ms=2.0, state_bytes=3)
    with pytest.raises(InvariantViolation, match="twice"):
        statistics.failed(2 * HISTORY_MAX - 1, "again", 30)
