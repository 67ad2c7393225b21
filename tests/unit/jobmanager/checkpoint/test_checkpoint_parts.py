"""Aim: the small parts of the coordinator that have rules of their own.

Method: each alone.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_ids import IDS_RESERVED_AT_ONCE
from jobmanager.checkpoint.checkpoints_under_way import CheckpointsUnderWay
from jobmanager.checkpoint.completed_checkpoint import SnapshotSummary
from jobmanager.checkpoint.deletion_queue import (
    BATCH_PATHS_MAX,
    FIRST_RETRY_MS,
    LAST_RETRY_MS,
    DeletionQueue,
)
from jobmanager.checkpoint.failure_policy import FailurePolicy
from jobmanager.checkpoint.file_uses import FileUses, Holder, Role
from jobmanager.checkpoint.manifest_composer import ManifestComposer, as_savepoint
from jobmanager.checkpoint.next_head import head_emptied, head_started, head_with
from jobmanager.checkpoint.participating_tasks import ParticipatingTasks
from jobmanager.checkpoint.pending import Ack, CheckpointPhase, PendingCheckpoint, summarize
from jobmanager.checkpoint.shared_state_registry import SharedFileMismatch, SharedStateRegistry
from jobmanager.checkpoint.statistics import HISTORY_MAX, CheckpointStatistics, CheckpointStatus
from jobmanager.checkpoint.steady_time import SteadyTime
from jobmanager.checkpoint.trigger_policy import PERIODIC
from jobmanager.graph.execution_attempt import AttemptKey
from penstock.errors import InvariantViolation
from penstock.pb import checkpoint_pb2, graph_pb2
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
    assert plan.replaced == ((first.identity, first.location),)
    registry.register(2, plan.references)
    registry.check()
    assert first.identity is not None
    assert registry.counts() == {first.identity: 2, private("q").location: 1}
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


READER, COUNTER, SINK = (AttemptKey(name, 0, 0) for name in ("read", "count", "sink"))


def wanted(checkpoint_id: int, retained: tuple[int, ...], **options: object) -> c.StoreCheckpoint:
    return c.StoreCheckpoint(
        checkpoint_id=checkpoint_id,
        triggered_at_ms=10,
        replaced=(),
        retained=retained,
        next_checkpoint_id=checkpoint_id + 1 + IDS_RESERVED_AT_ONCE,
        state_bytes=5,
        **{"snapshots": (), "finished": (), **options},  # type: ignore[arg-type]
    )


def test_tasks_that_are_left_begin_where_their_producers_have_finished() -> None:
    tasks = ParticipatingTasks()
    chain = [c.TaskView(READER, ()), c.TaskView(COUNTER, (READER,)), c.TaskView(SINK, (COUNTER,))]
    tasks.start(chain)
    assert tasks.finish(COUNTER, c.LastState("rows", (private("x"),)))
    assert tasks.beginning() == (READER, SINK)
    assert not tasks.finish(COUNTER, None)  # twice
    assert not tasks.finish(AttemptKey("count", 0, 1), None)  # nobody knows it
    assert (tasks.running(), tasks.finished()) == ([READER, SINK], (COUNTER,))
    assert tasks.last_states([COUNTER, SINK]) == ((COUNTER, "rows"),)
    assert tasks.last_references() == tasks.last_references([COUNTER]) == [private("x")]
    assert tasks.last_references([SINK]) == []
    assert tasks.beginning_behind(COUNTER, lambda _: True) == (SINK,)
    assert tasks.beginning_behind(COUNTER, lambda key: key != SINK) == ()
    tasks.start(chain)
    assert tasks.running_of([SINK, COUNTER]) == (SINK, COUNTER)
    with pytest.raises(InvariantViolation, match="is fed by read/0"):
        tasks.start(chain[1:])


def test_a_task_that_finishes_while_it_loads_holds_nothing_up() -> None:
    tasks = ParticipatingTasks()
    tasks.start([c.TaskView(READER, (), is_loading=True), c.TaskView(SINK, (), is_loading=True)])
    assert (tasks.are_loading, tasks.loading_named()) == (True, f"{READER}, {SINK}")
    tasks.loaded(SINK)
    assert tasks.finish(READER, None)
    assert not tasks.are_loading


def test_what_is_ready_is_stored_in_the_order_in_which_it_became_so() -> None:
    under_way = CheckpointsUnderWay()
    for checkpoint_id in (1, 2, 3):
        pending = PendingCheckpoint(
            checkpoint_id,
            PERIODIC,
            triggered_at_ms=0,
            started_ms=0,
            deadline_ms=100,
            participants=[READER],
            finished=(),
        )
        under_way.add(pending)
        pending.acknowledge(READER, Ack("", (), SnapshotSummary()))
    for checkpoint_id in (2, 1, 3):
        under_way.add_ready(checkpoint_id)
    under_way.check(newest_kept=0, next_id=4)
    first = under_way.next_to_store()
    assert first is not None
    assert first.checkpoint_id == 2
    first.become(CheckpointPhase.STORING)
    under_way.storing = 2
    under_way.check(newest_kept=0, next_id=4)
    assert under_way.next_to_store() is None
    assert under_way.stored(1) is None  # nobody asked
    assert under_way.unsettled is None
    first.become(CheckpointPhase.UNSETTLED)
    assert under_way.unsettled is first
    assert under_way.stored(2) is first
    under_way.end(first)
    third = under_way.find(3)
    assert third is not None
    under_way.end(third)  # what has ended is not ready any more
    assert [one.checkpoint_id for one in under_way] == [1]
    under_way.check(newest_kept=0, next_id=4)
    with pytest.raises(InvariantViolation, match="too old"):
        under_way.check(newest_kept=2, next_id=4)


def test_head_names_what_is_kept_and_says_once_since_when_the_job_is_on_its_own() -> None:
    started = checkpoint_pb2.StartedFrom(path="file:///saved", checkpoint_id=40)
    head = head_started(checkpoint_pb2.CheckpointHead(next_checkpoint_id=17), started)
    assert head.next_checkpoint_id == 41 + IDS_RESERVED_AT_ONCE
    assert head_started(head, started) == head
    one = head_with(head, wanted(41, (41,)), "chk-41", now_ms=20)
    two = head_with(one, wanted(42, (41, 42)), "chk-42", now_ms=30)
    again = head_with(two, wanted(42, (42,)), "chk-42-again", now_ms=40)
    assert [kept.manifest_path for kept in one.retained] == ["chk-41"]
    assert [kept.manifest_path for kept in two.retained] == ["chk-41", "chk-42"]
    assert [kept.manifest_path for kept in again.retained] == ["chk-42-again"]
    assert two.next_checkpoint_id == 43 + IDS_RESERVED_AT_ONCE
    since = two.started_from
    assert (since.independent_since_checkpoint_id, since.independent_since_ms) == (41, 20)
    assert not head.retained  # what was there is not changed
    empty = head_emptied(two)
    assert not empty.retained
    assert empty.next_checkpoint_id == two.next_checkpoint_id


def test_a_manifest_has_its_subtasks_in_order_and_a_savepoint_no_positions() -> None:
    graph = graph_pb2.JobGraph(name="counts")
    for name in ("count", "read"):
        graph.vertices.add(id=name, parallelism=2, max_parallelism=8)
    edge = graph.edges.add(id="e", source_vertex="read", target_vertex="count")
    edge.partition_type = graph_pb2.RESULT_PARTITION_TYPE_BLOCKING
    snapshots = []
    for key in (AttemptKey("read", 1, 0), AttemptKey("count", 1, 3), AttemptKey("count", 0, 3)):
        snapshot = checkpoint_pb2.SubtaskSnapshot(
            vertex=key.vertex, subtask_index=key.subtask_index
        )
        snapshot.outputs.add()
        snapshots.append((key, snapshot))
    order = wanted(7, (7,), snapshots=tuple(snapshots), finished=(AttemptKey("read", 0, 0),))
    manifest = ManifestComposer("job", graph, 3, "1.0", None).compose(
        order, [(AttemptKey("read", 0, 0), "src", ("a", "b"))], {}, now_ms=99
    )
    assert [(one.vertex, one.subtask_index, one.finished) for one in manifest.subtasks] == [
        ("count", 0, False),
        ("count", 1, False),
        ("read", 0, True),
        ("read", 1, False),
    ]
    assert [split.id for split in manifest.subtasks[2].operators[0].splits] == ["a", "b"]
    assert [vertex.id for vertex in manifest.vertices] == ["count", "read"]
    assert [edge.blocking for edge in manifest.edges] == [True]
    assert (manifest.leader_epoch, manifest.completed_at_ms) == (3, 99)
    saved = as_savepoint(manifest)
    assert not any(one.outputs for one in saved.subtasks)
    assert manifest.subtasks[0].outputs  # what was there is not changed
    assert saved.properties.kind == checkpoint_pb2.CHECKPOINT_KIND_SAVEPOINT
