"""A broken invariant, which is a bug of ours, ends the job that it concerns, and nothing else.

Aim: in production each step of a machine checks what costs nothing; where that does not hold the job fails, its
checkpoints stay, the log has the story, and other jobs run on. Method: a machine of a running job is damaged.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

from common.elements import CheckpointBarrier
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.regions import KeptOutput, RegionGraph
from jobmanager.failover.restart_settings import FixedDelay, RestartSettings
from jobmanager.failover.restart_strategy import RestartStrategy
from jobmanager.graph.execution_attempt import (
    AttemptKey,
    AttemptState,
    ExecutionAttempt,
    SubtaskId,
)
from jobmanager.graph.execution_graph import ExecutionGraph
from jobmanager.graph.job_plan import EdgePlan, Exchange, JobPlan, Partitioning, VertexPlan
from jobmanager.messages.job_state import JobState
from jobmanager.metrics import build_registry
from jobmanager.partitions.partition_tracker import PartitionTracker
from jobmanager.scheduler import slots as s
from penstock.errors import InvariantViolation
from penstock.storage.head import HeadStore
from penstock.storage.local_store import LocalStore
from taskmanager.alignment.barrier_aligner import BarrierAligner
from taskmanager.slots.slot_table import SlotTable
from tests.unit.jobmanager.test_jobmanager_checkpoints import (
    JOB,
    Checkpointed,
    run,
    settings,
    take_checkpoint,
)

OTHER = "1" * 32


def damage_job(master: Any) -> None:
    """It is over, if only in name."""
    master.state = JobState.FINISHED


def damage_checkpoints(master: Any) -> None:
    master.coordinator._under_way.storing = 77


def damage_graph(master: Any) -> None:
    """Its attempts have numbers that were never given out."""
    master.graph.attempt = -1


@pytest.mark.parametrize("damage", [damage_job, damage_checkpoints, damage_graph])
def test_a_broken_invariant_fails_its_job_and_keeps_its_state(
    cluster_of: Any, make_graph: Any, tmp_path: Path, damage: Any
) -> None:
    async def scenario() -> None:
        with structlog.testing.capture_logs() as logs:
            async with cluster_of(settings(tmp_path)) as cluster:
                Checkpointed(await cluster.add("tm1"))
                await cluster.submit(make_graph())
                await cluster.wait_for(JOB, "RUNNING")
                assert await take_checkpoint(cluster) == 1
                dispatcher = cluster.jobmanager.dispatcher
                job = dispatcher.jobs[JOB]
                damage(job.runner.master)
                request = asyncio.ensure_future(take_checkpoint(cluster))
                details = await cluster.wait_for(JOB, "FAILED")
                assert "error of its own" in str(details)
                await asyncio.wait([request])
                assert request.exception() is not None
                # The cluster goes on.
                await cluster.submit(make_graph(), OTHER)
                await cluster.wait_for(OTHER, "RUNNING")
        (told,) = [entry for entry in logs if entry["event"] == "job.quarantined"]
        assert any("AckReceived" in line for line in told["story"])
        head = HeadStore(LocalStore(tmp_path / "checkpoints" / JOB)).read()
        assert head is not None
        assert [kept.checkpoint_id for kept in head.retained] == [1]

    run(scenario)


def test_a_wrong_account_of_slots_fails_who_it_concerns(cluster_of: Any, make_graph: Any) -> None:
    async def scenario() -> None:
        async with cluster_of({}) as cluster:
            await cluster.add("tm1")
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            runner = cluster.jobmanager.cluster
            runner._pool._queue["other", 0] = s.SlotsRequested("other", 0, 1 << 40)
            runner._pool._grant = list  # which forgets whom it could serve
            runner._step(s.SlotsFreed(JOB, ()))
            details = await cluster.wait_for(JOB, "FAILED")
            assert "account of the slots" in str(details)

    run(scenario)


def test_what_is_dropped_is_shown(cluster_of: Any, make_graph: Any) -> None:
    async def scenario() -> None:
        async with cluster_of({}) as cluster:
            await cluster.add("tm1")
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            dispatcher, of_slots = cluster.jobmanager.dispatcher, cluster.jobmanager.cluster
            dispatcher.jobs[JOB].runner.master.dropped_events = 3
            dispatcher.dropped_reports = 4
            of_slots._step(s.RequestWithdrawn(JOB))
            value = build_registry(dispatcher, of_slots).get_sample_value
            labels = {"job_id": JOB, "job_name": "test", "part": "job"}
            assert value("penstock_job_dropped_events_total", labels) == 3
            name = "penstock_jobmanager_dropped_events_total"
            assert value(name, {"part": "reports"}) == 4
            assert value(name, {"part": "slots"}) == 1

    run(scenario)


def test_partitions_that_are_held_although_they_were_released_are_noticed() -> None:
    plan = JobPlan(
        (VertexPlan("v0", 1), VertexPlan("v1", 1)),
        (EdgePlan("e0", "v0", "v1", Partitioning.HASH, Exchange.BLOCKING),),
    )
    graph = ExecutionGraph(plan)
    tracker = PartitionTracker(RegionGraph(plan), graph, keeps_all=False)
    producer = SubtaskId("v0", 0)
    attempt = ExecutionAttempt(
        AttemptKey(producer.vertex, producer.subtask_index, 0), AttemptState.FINISHED, "tm1"
    )
    graph.adopt(attempt)
    tracker.produced(attempt)
    tracker.check()
    kept = KeptOutput("e0", producer)
    tracker._released.add((kept, 0))
    with pytest.raises(InvariantViolation, match="lost or released is not held"):
        tracker.adopt(attempt, {kept: "tm1"})


def test_slots_that_are_counted_wrongly_are_noticed() -> None:
    pool = s.SlotPool()
    pool.step(s.TaskManagerAdded("tm1", "i", 2))
    pool.free = 3
    with pytest.raises(
        InvariantViolation, match="as many slots are free as there are, or fewer, after TimePassed"
    ):
        pool.step(s.TimePassed(0))


def test_machines_of_taskmanagers_check_themselves() -> None:
    table = SlotTable(1)
    table.allocate("j", ["s0"], 1)
    table._capacity = 0
    with pytest.raises(InvariantViolation, match="1 slots are held"):
        table.check_step()
    aligner = BarrierAligner([0, 1], is_exactly_once=False)
    aligner._blocked.add(1)
    with pytest.raises(InvariantViolation, match="blocks no channel"):
        aligner.barrier_arrived(0, CheckpointBarrier(1, 0), 0, 0)


def test_no_restart_mends_a_broken_invariant() -> None:
    strategy = RestartStrategy(RestartSettings(FixedDelay(10, 0)), jitter=lambda: 0.0)
    cause = FailureCause("InvariantViolation", "two alignments at once")
    assert strategy.failed(cause, frozenset(), 0).delay_ms is None
