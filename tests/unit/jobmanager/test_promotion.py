"""Aim: what a job persists outlives it as a whole or not at all, and is found by the job that reads it.

Method: the job's machine, the table of what is promoted, and the deployment of readers, by hand; then a
JobManager in this process with fake TaskManagers.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pyarrow as pa
import pytest

from common.pb import internal_pb2
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.restart_settings import FixedDelay, RestartSettings
from jobmanager.graph.deployment import Endpoint, OutputPlan
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState
from jobmanager.graph.job_plan import EdgePlan, Exchange, JobPlan, Partitioning, VertexPlan
from jobmanager.graph.slot import Slot
from jobmanager.job.job_master import JobMaster
from jobmanager.job.job_options import JobOptions
from jobmanager.messages import job_effects, job_events
from jobmanager.messages.job_state import JobState
from jobmanager.partitions.held_partitions import HeldPartition, HeldPartitions, Holdings
from jobmanager.partitions.promoted import PromotedPart, PromotedSet, newest_named, of_job, share_of
from jobmanager.rpc.persisted_convert import add_persisted_input
from penstock.errors import JobRejected, Unrecoverable
from penstock.partition_id import PartitionId
from penstock.pb import client_pb2, graph_pb2
from penstock.rows.schema import schema_to_bytes

PLAN = JobPlan(
    (VertexPlan("v0", 2, source_uids=("src",)),),
    (EdgePlan("kept", "v0", "", Partitioning.FORWARD, Exchange.BLOCKING),),
)
SLOTS = (Slot("a-0", "a", "1"), Slot("b-0", "b", "1"))
LOST = job_events.TaskManagerGone("a", FailureCause("TaskManagerLost", "gone"))
CAUSE = FailureCause("StoreTransient", "no inodes left")


def key(index: int, attempt: int = 0) -> AttemptKey:
    return AttemptKey("v0", index, attempt)


def running(options: JobOptions | None = None) -> JobMaster:
    master = JobMaster(PLAN, options)
    master.step(job_events.JobStarted())
    if options is not None:
        master.step(job_events.StartPrepared(0))
    master.step(job_events.SlotsGranted(SLOTS))
    for call in (1, 1):
        for name in ("a", "b"):
            effects = master.step(job_events.SlotsAllocated(name, (Endpoint(f"{name}-0"),), call))
            for effect in effects:
                if isinstance(effect, job_effects.DeployTasks):
                    assert [task.outputs for task in effect.tasks] == [(OutputPlan("kept", 1),)]
    for index in (0, 1):
        master.step(job_events.AttemptReported(key(index), AttemptState.RUNNING))
    assert master.state is JobState.RUNNING
    return master


def finished(master: JobMaster) -> list[job_effects.JobEffect]:
    effects: list[job_effects.JobEffect] = []
    for index in (0, 1):
        effects = master.step(job_events.AttemptReported(key(index), AttemptState.FINISHED))
        master.check()
    return effects


def test_a_job_has_finished_when_its_partitions_are_promoted() -> None:
    master = running()
    assert finished(master) == [
        job_effects.PromotePartitions(
            (
                job_effects.PersistedPartition("a", "kept", key(0)),
                job_effects.PersistedPartition("b", "kept", key(1)),
            )
        )
    ]
    assert master.state is JobState.RUNNING
    # Nothing else decides any more: what is lost now, the promotion notices.
    for event in (
        job_events.CancelRequested(),
        job_events.SuspendRequested(),
        job_events.FailureRequested(CAUSE),
        LOST,
    ):
        assert not any(isinstance(e, job_effects.PublishState) for e in master.step(event))
    effects = master.step(job_events.PartitionsPromoted())
    assert effects[0] == job_effects.PublishState(JobState.FINISHED)
    released = [e.taskmanager_id for e in effects if isinstance(e, job_effects.ReleasePartitions)]
    assert released == ["b"]
    master.check()
    assert master.step(job_events.PartitionsPromoted()) == []


def test_a_promotion_that_fails_fails_the_job_for_good() -> None:
    restarts = JobOptions(restart=RestartSettings(FixedDelay(5, 0)))
    master = running(restarts)
    finished(master)
    effects = master.step(job_events.PartitionsNotPromoted(CAUSE))
    states = [e.state for e in effects if isinstance(e, job_effects.PublishState)]
    assert states == [JobState.FAILING, JobState.FAILED]
    assert master.failure is not None
    assert master.failure.error_class == "Unrecoverable"
    assert "could not be kept: no inodes left" in master.failure.message
    master.check()


@pytest.mark.parametrize(
    "event", [job_events.CancelRequested(), job_events.FailureRequested(CAUSE)]
)
def test_a_job_that_ends_otherwise_promotes_nothing(event: job_events.JobEvent) -> None:
    master = running()
    master.step(job_events.AttemptReported(key(0), AttemptState.FINISHED))
    effects = master.step(event)
    # The last attempt had finished before it heard of its end.
    effects += master.step(job_events.AttemptReported(key(1), AttemptState.FINISHED))
    assert not any(isinstance(effect, job_effects.PromotePartitions) for effect in effects)
    assert master.state in (JobState.CANCELED, JobState.FAILED)
    master.check()


def test_what_is_lost_before_the_end_is_made_again() -> None:
    master = running(JobOptions(restart=RestartSettings(FixedDelay(5, 0))))
    master.step(job_events.AttemptReported(key(0), AttemptState.FINISHED))
    effects = master.step(LOST)
    assert job_effects.PostLater(0, job_events.RestartDue(1)) in effects
    # The other one finishes meanwhile: that is not the end.
    effects = master.step(job_events.AttemptReported(key(1), AttemptState.FINISHED))
    assert not any(isinstance(effect, job_effects.PromotePartitions) for effect in effects)
    effects = master.step(job_events.RestartDue(1))
    assert any(isinstance(effect, job_effects.PrepareStart) for effect in effects)
    assert [a.key.attempt for a in master.graph.current()] == [1, 0]
    master.check()


# ---------------------------------------------------------------- what there is


def promoted(
    job_id: str, count: int, at_ms: int, name: str = "mine", *, confirmed: bool = True
) -> PromotedSet:
    return PromotedSet(name, job_id, b"schema", count, at_ms, confirmed)


def held(job_id: str, subtask_index: int, name: str = "mine") -> HeldPartition:
    return HeldPartition(job_id, PartitionId("kept", "v0", subtask_index, 0), 5, 50, name)


def test_the_newest_set_of_a_name_counts() -> None:
    table = HeldPartitions()
    old, new = promoted("old", 2, 1), promoted("new", 2, 2)
    table.observe("a", Holdings((held("old", 1), held("new", 0)), promoted=(old, new), version=1))
    table.observe("b", Holdings((held("old", 0),), promoted=(old,), version=1))
    with pytest.raises(JobRejected, match=r"1 of the 2 partitions that job new .* subtasks 1"):
        newest_named(table.promoted(), "mine")
    parts = of_job(table.promoted(), "mine", "old")
    assert [(p.taskmanager_id, p.subtask_index) for p in parts] == [("b", 0), ("a", 1)]
    table.observe("b", Holdings((held("old", 0), held("new", 1)), promoted=(old, new), version=3))
    assert newest_named(table.promoted(), "mine").whole == new
    # What was said before says nothing.
    table.observe("b", Holdings(version=2))
    assert newest_named(table.promoted(), "mine").whole == new
    assert of_job(table.promoted(), "mine", "old") == parts
    assert table.holders_of("mine", "new") == ["a", "b"]
    with pytest.raises(
        JobRejected, match=r"persisted as 'mime' \(did you mean 'mine'\?\); .*: 'mine'"
    ):
        newest_named(table.promoted(), "mime")
    table.lost("b")
    with pytest.raises(JobRejected, match=r"1 of the 2 partitions .* subtasks 1"):
        newest_named(table.promoted(), "mine")
    with pytest.raises(Unrecoverable, match=r"1 of the 2 partitions .* 'mine' are gone"):
        of_job(table.promoted(), "mine", "old")
    with pytest.raises(Unrecoverable, match="what job other has persisted as 'mine' is gone"):
        of_job(table.promoted(), "mine", "other")
    with pytest.raises(JobRejected, match="the names there are: none"):
        newest_named([], "mine")


def test_what_was_not_promoted_as_a_whole_is_nothing() -> None:
    table = HeldPartitions()
    begun = promoted("new", 2, 1, confirmed=False)
    table.observe("a", Holdings((held("new", 0),), promoted=(begun,), version=1))
    table.observe("b", Holdings((held("new", 1),), version=1))  # its description was not written
    assert table.promoted() == []
    assert table.unconfirmed("a", lambda job_id: job_id == "new") == ()
    for name in ("a", "b"):
        assert table.unconfirmed(name, lambda _: False) == (("mine", "new"),)
        # Found, so that what a job tries again can be cleared before.
        assert name in table.holders_of("mine", "new")
    # One TaskManager has been told that all have their part.
    told = promoted("new", 2, 1)
    table.observe("b", Holdings((held("new", 1),), promoted=(told,), version=2))
    assert newest_named(table.promoted(), "mine").missing == []
    assert table.unconfirmed("a", lambda _: False) == ()


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5])
def test_each_partition_is_read_by_one_subtask(parallelism: int) -> None:
    parts = [PromotedPart("a", PartitionId("kept", "v7", i, 4), 1, 1) for i in range(3)]
    source = graph_pb2.PersistedSource(name="mine", job_id="old", partition_count=3, schema=b"s")
    operator = graph_pb2.Operator(uid="uid", source=graph_pb2.SourceSpec(persisted=source))
    read = []
    for index in range(parallelism):
        task = internal_pb2.TaskDeployment(
            attempt=internal_pb2.AttemptId(job_id="new", subtask_index=index),
            vertex=graph_pb2.Vertex(id="v0", parallelism=parallelism, operators=[operator]),
        )
        share = share_of(parts, index, parallelism)
        add_persisted_input(
            task, share, lambda name: internal_pb2.DataEndpoint(slot_id=f"server of {name}")
        )
        (edge,) = task.inputs
        assert edge.edge_id == "uid"
        for channel in edge.channels:
            producer = channel.producer_attempt
            assert (producer.job_id, producer.vertex, producer.attempt) == ("old", "v7", 4)
            assert (channel.edge_id, channel.producer.slot_id) == ("kept", "server of a")
            read.append(producer.subtask_index)
    assert sorted(read) == [0, 1, 2]


# ---------------------------------------------------------------- a JobManager


def persisting(make_graph: Any, *, overwrite: bool = False) -> graph_pb2.JobGraph:
    """One vertex of two subtasks that persists its rows as 'mine'."""
    graph: graph_pb2.JobGraph = make_graph()
    schema = schema_to_bytes(pa.schema([("line", pa.string())]))
    del graph.vertices[1:], graph.edges[:]
    graph.vertices[0].operators.add(
        uid="persist",
        name="persist",
        input=graph_pb2.ChainInput(operator_index=0),
        input_schema=schema,
        output_schema=schema_to_bytes(pa.schema([])),
        sink=graph_pb2.SinkSpec(persist=graph_pb2.PersistSink(name="mine", overwrite=overwrite)),
    )
    graph.vertices[0].operators[0].source.bounded = True
    return graph


def run(scenario: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(limited())


def finish(taskmanager: Any) -> None:
    def end(task: internal_pb2.TaskDeployment) -> None:
        taskmanager.run_to_running(task)
        taskmanager.report_state(task.attempt, client_pb2.ATTEMPT_STATE_FINISHED)

    taskmanager.on_deploy = end


def test_all_taskmanagers_promote_or_none(cluster_of: Any, make_graph: Any) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            one, two = [await cluster.add(name, slots=1) for name in ("tm1", "tm2")]
            for taskmanager in (one, two):
                finish(taskmanager)
            two.refuse_promotion = True
            job = await cluster.submit(persisting(make_graph), "1" * 32)
            details = await cluster.wait_for(job, "FAILED")
            assert "could not be kept" in details.failure.message
            assert (one.held, two.held) == ([], [])

            two.refuse_promotion = False
            one.promotions = two.promotions = order = []
            job = await cluster.submit(persisting(make_graph), "2" * 32)
            await cluster.wait_for(job, "FINISHED")
            assert [held.promoted_as for held in (*one.held, *two.held)] == ["mine", "mine"]
            (told,) = one.promoted
            assert (told.job_id, told.partition_count) == (job, 2)
            # Nobody is told that it counts before all have their part.
            assert [confirmed for _, confirmed in order] == [False, False, True, True]
            assert {name for name, _ in order[:2]} == {"tm1", "tm2"}
            find = client_pb2.FindPersistedRequest(name="mine")
            found = await cluster.client.FindPersisted(find)
            assert (found.job_id, found.partition_count) == (job, 2)

            with pytest.raises(grpc.aio.AioRpcError, match="is persisted as 'mine' already"):
                await cluster.submit(persisting(make_graph), "3" * 32)
            later = await cluster.submit(persisting(make_graph, overwrite=True), "4" * 32)
            await cluster.wait_for(later, "FINISHED")
            assert {held.job_id for held in (*one.held, *two.held)} == {later}

    run(scenario)


def test_what_a_broken_promotion_has_left_takes_no_name_and_goes(
    cluster_of: Any, make_graph: Any
) -> None:
    """As a JobManager that died after one of two TaskManagers had promoted its part leaves it."""
    left = internal_pb2.HeldPartition(
        job_id="dead",
        partition=internal_pb2.PartitionId(edge_id="kept", vertex="v0", attempt=0),
        promoted_as="mine",
    )
    begun = internal_pb2.PromotedSet(name="mine", job_id="dead", partition_count=2)

    async def scenario() -> None:
        async with cluster_of({"heartbeat.interval": 10, "heartbeat.timeout": 500}) as cluster:
            one = await cluster.add("tm1", held=[left], promoted=[begun])
            finish(one)
            listing = client_pb2.ListPartitionsRequest()
            assert not (await cluster.client.ListPartitions(listing)).partitions
            with pytest.raises(grpc.aio.AioRpcError, match="nothing is persisted as 'mine'"):
                await cluster.client.FindPersisted(client_pb2.FindPersistedRequest(name="mine"))
            job = await cluster.submit(persisting(make_graph), "2" * 32)
            await cluster.wait_for(job, "FINISHED")
            while left in one.held:  # until TaskManagers that are not there are gone
                assert await one.beat()
                await asyncio.sleep(0.01)
            assert {held.job_id for held in one.held} == {job}
            assert [told.job_id for told in one.promoted] == [job]

    run(scenario)


def test_a_job_with_checkpoints_cannot_persist(cluster_of: Any, make_graph: Any) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            graph = persisting(make_graph)
            graph.config["execution.checkpointing.interval"] = "1s"
            graph.config["execution.checkpointing.storage"] = "jobmanager"
            with pytest.raises(
                grpc.aio.AioRpcError, match=r"set execution\.checkpointing\.interval"
            ):
                await cluster.submit(graph)

    run(scenario)
