"""Aim: what a user has asked of a job under an id is known to the next JobManager, which brings it to its end.

Method: over real gRPC with a TaskManager that only pretends; a JobManager is "killed" by putting its job's record back
as it was in the middle of an operation.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.pb import internal_pb2
from jobmanager.checkpoint.savepoint_store_runner import SavepointStoreRunner
from jobmanager.dispatcher import ended_jobs_runner
from jobmanager.dispatcher.asked_operations_runner import AskedOperationsRunner
from jobmanager.dispatcher.known_jobs import KnownJob, KnownJobs
from jobmanager.job.job_operation import JobOperation, OperationKind, OperationStatus
from jobmanager.job.job_record import JobRecord
from jobmanager.job.kept_operations import encode_operations
from jobmanager.job.operations_runner import OperationsRunner
from jobmanager.messages.job_state import JobState
from jobmanager.stores.job_store import JobStore
from penstock.errors import JobRejected, NotLeader, StoreTransient, StreamError
from penstock.graph.output_in_doubt import IN_DOUBT_KEY
from penstock.pb import checkpoint_pb2, client_pb2
from penstock.storage.head import HEAD_PATH, HeadStore
from penstock.storage.kept_state import dispose
from penstock.storage.local_store import LocalStore
from penstock.storage.output_claim import OutputClaim, OutputUse, make_claim
from penstock.storage.restore_point import remove_savepoint
from tests.support.job_records import JobRecords
from tests.support.jobs import DEADLINE_S
from tests.support.savepoint_marks import marks_beside
from tests.unit.jobmanager.test_jobmanager_checkpoints import (
    JOB,
    Checkpointed,
    run,
    settings,
    take_checkpoint,
)

ID = "mine"
OTHER = OutputClaim(OutputUse.COMMITS, "1" * 32)


class Holding(Checkpointed):
    """Acknowledges the first so many checkpoints only."""

    left = 10**9

    def held(self) -> list[internal_pb2.HeldAttempt]:
        """What it tells the next JobManager: all that was deployed on it runs on."""
        sources = [task.attempt for task in self.restored if task.attempt.vertex == "v0"]
        return [
            internal_pb2.HeldAttempt(
                attempt=task.attempt,
                endpoint=internal_pb2.DataEndpoint(slot_id=task.slot_id, host_id="h"),
                leader_epoch=self.taskmanager.leader_epoch,
                state=client_pb2.ATTEMPT_STATE_RUNNING,
                reads=[
                    internal_pb2.PartitionId(
                        edge_id="e0",
                        vertex="v0",
                        subtask_index=source.subtask_index,
                        attempt=source.attempt,
                    )
                    for source in sources
                    if task.attempt.vertex == "v1"
                ],
            )
            for task in self.restored
        ]

    def deploy(self, task: Any) -> None:
        super().deploy(task)
        if task.restore.stopped:  # it commits, and ends
            self.taskmanager.report_state(task.attempt, client_pb2.ATTEMPT_STATE_FINISHED)

    def obey(self, command: Any) -> None:
        is_trigger = command.WhichOneof("command") == "trigger_checkpoint"
        if is_trigger and command.attempt.subtask_index == 0:
            if not self.left:
                return
            self.left -= 1
        super().obey(command)


class Takeover:
    """One JobManager that is killed in the middle of an operation, and its successor."""

    def __init__(self, cluster_of: Any, graph: Any, tmp_path: Path) -> None:
        self._cluster_of, self._graph, self.path = cluster_of, graph, tmp_path
        self.jobs = JobRecords(tmp_path)
        self.savepoints = tmp_path / "savepoints"
        self._held: list[internal_pb2.HeldAttempt] = []
        self._attempts: dict[tuple[str, int], Any] = {}

    async def first(
        self,
        ask: Callable[[Any], Awaitable[Any]],
        acknowledged: int,
        is_there: Callable[[], bool],
        *,
        behind: int = 1,
    ) -> None:
        """Asks behind so many checkpoints, and is killed once something is there."""
        async with self._cluster_of(settings(self.path)) as cluster:
            fake = Holding(await cluster.add("tm1"))
            await cluster.submit(self._graph)
            await cluster.wait_for(JOB, "RUNNING")
            for number in range(1, behind + 1):
                assert await take_checkpoint(cluster) == number
            fake.left = acknowledged
            asked = asyncio.ensure_future(ask(cluster))
            while not is_there():  # noqa: ASYNC110 - a thread writes it
                await asyncio.sleep(0.01)
            kept = self.jobs.copy()
            self._held, self._attempts = fake.held(), fake.attempts
        # Either end of the connection may be the first to go.
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)) as told:
            await asked
        assert "has ended" not in str(told.value), (
            "the job goes on, and who hears this asks no more"
        )
        self.jobs.put_back(kept)

    @asynccontextmanager
    async def second(self) -> AsyncIterator[Any]:
        """Goes on."""
        async with self._cluster_of(settings(self.path)) as cluster:
            fake = Holding(await cluster.add("tm2"))
            fake.finish_on_completion = False
            await cluster.wait_for(JOB, "RUNNING", "FINISHED", "FAILED")
            yield cluster

    @asynccontextmanager
    async def second_with_its_tasks(
        self, before: Callable[[Any], Awaitable[None]] | None = None
    ) -> AsyncIterator[Any]:
        """Goes on, and so do the tasks: their TaskManager is there, and registers.

        Args:
            before: what happens before any task is heard of.
        """
        async with AsyncExitStack() as stack:
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = listening.getsockname()[1]
            self.jobs.change(JOB, lambda one: one.taskmanagers.update({"tm1": f"127.0.0.1:{port}"}))
            cluster = await stack.enter_async_context(self._cluster_of(settings(self.path)))
            if before is not None:
                await before(cluster)
            taskmanager = await cluster.add("tm1", held_attempts=self._held)
            fake = Holding(taskmanager)
            fake.attempts = self._attempts
            taskmanager.allocated += {one.endpoint.slot_id for one in self._held}
            await cluster.wait_for(JOB, "RUNNING")
            yield cluster
            assert not fake.restored, "no task has begun again"

    def mark(self, name: str) -> list[Path]:
        """The savepoints beside whose manifest this is said, or which have an object of this name."""
        found = self.savepoints.glob("*")
        return [
            one for one in found if name in marks_beside(LocalStore(one)) or (one / name).exists()
        ]


async def ended(cluster: Any) -> Any:
    """The operation, once it has ended."""
    request = client_pb2.GetOperationRequest(job_id=JOB, operation_id=ID)
    while True:
        found = await cluster.client.GetOperation(request, timeout=DEADLINE_S)
        if found.status != client_pb2.OPERATION_STATUS_IN_PROGRESS:
            return found
        await asyncio.sleep(0.02)


@pytest.fixture
def takeover(cluster_of: Any, make_graph: Any, tmp_path: Path) -> Takeover:
    return Takeover(cluster_of, make_graph(), tmp_path)


def savepoint(takeover: Takeover) -> Callable[[Any], Awaitable[Any]]:
    request = client_pb2.TriggerSavepointRequest(
        job_id=JOB, operation_id=ID, directory=str(takeover.savepoints)
    )
    return lambda cluster: cluster.client.TriggerSavepoint(request)


def apart(takeover: Takeover) -> Callable[[Any], Awaitable[Any]]:
    """A savepoint that is no checkpoint of the job."""
    request = client_pb2.TriggerSavepointRequest(
        job_id=JOB,
        operation_id=ID,
        directory=str(takeover.savepoints),
        format=checkpoint_pb2.SAVEPOINT_FORMAT_CANONICAL,
    )
    return lambda cluster: cluster.client.TriggerSavepoint(request)


def stop(takeover: Takeover) -> Callable[[Any], Awaitable[Any]]:
    request = client_pb2.StopJobRequest(
        job_id=JOB, operation_id=ID, directory=str(takeover.savepoints)
    )
    return lambda cluster: cluster.client.StopJob(request)


def checkpoint(_: Takeover) -> Callable[[Any], Awaitable[Any]]:
    request = client_pb2.TriggerCheckpointRequest(job_id=JOB, operation_id=ID)
    return lambda cluster: cluster.client.TriggerCheckpoint(request)


def is_kept(takeover: Takeover, operation_id: str = ID) -> bool:
    record = takeover.jobs.all().get(JOB)
    return record is not None and operation_id.encode() in record.operations


def test_a_checkpoint_that_was_asked_for_is_taken_by_the_next(takeover: Takeover) -> None:
    async def scenario() -> None:
        await takeover.first(checkpoint(takeover), 0, lambda: is_kept(takeover))
        async with takeover.second() as cluster:
            found = await ended(cluster)
            assert found.status == client_pb2.OPERATION_STATUS_COMPLETED, found.message
            assert found.checkpoint_id > 1
        async with takeover.second() as cluster:  # and is known to all that come
            assert await ended(cluster) == found

    run(scenario)


def test_a_savepoint_that_had_begun_is_taken_by_the_next(takeover: Takeover) -> None:
    async def scenario() -> None:
        await takeover.first(savepoint(takeover), 0, lambda: is_kept(takeover))
        async with takeover.second() as cluster:
            found = await ended(cluster)
            assert found.status == client_pb2.OPERATION_STATUS_COMPLETED, found.message
            assert takeover.mark("committed")
            assert (await savepoint(takeover)(cluster)).checkpoint_id == found.checkpoint_id

    run(scenario)


@pytest.mark.parametrize("silent", ["directory", "record"])
def test_a_savepoint_that_had_begun_is_taken_by_the_next_whose_storage_is_slow_at_first(
    takeover: Takeover, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    begin, keep, failures = SavepointStoreRunner.begin, OperationsRunner.keep, []

    def slow_begin(self: SavepointStoreRunner) -> Any:
        if not failures:
            failures.append("begin")
            raise StoreTransient("no answer")
        return begin(self)

    async def slow_keep(self: OperationsRunner) -> None:
        if not failures:
            failures.append("keep")
            raise StoreTransient("no answer")
        await keep(self)

    async def scenario() -> None:
        await takeover.first(savepoint(takeover), 0, lambda: is_kept(takeover))
        if silent == "directory":
            monkeypatch.setattr(SavepointStoreRunner, "begin", slow_begin)
        else:
            monkeypatch.setattr(OperationsRunner, "keep", slow_keep)
        async with takeover.second() as cluster:
            found = await ended(cluster)
            assert found.status == client_pb2.OPERATION_STATUS_COMPLETED, found.message
            assert takeover.mark("manifest")
        assert failures

    run(scenario)


@pytest.mark.parametrize("behind", [0, 1])
def test_the_output_of_a_savepoint_is_taken_back_where_the_next_begins_before_it(
    takeover: Takeover, behind: int
) -> None:
    async def scenario() -> None:
        is_there = lambda: bool(takeover.mark("manifest"))  # noqa: E731
        await takeover.first(apart(takeover), 1, is_there, behind=behind)
        async with takeover.second() as cluster:
            found = await ended(cluster)
            assert found.status == client_pb2.OPERATION_STATUS_FAILED
            assert "--in-doubt leave" in found.message
            assert takeover.mark("taken-back")
            assert not takeover.mark("committed")

    run(scenario)


@pytest.mark.parametrize("is_removed", [False, True])
def test_output_that_a_job_of_another_cluster_commits_is_not_produced_again(
    takeover: Takeover, monkeypatch: pytest.MonkeyPatch, is_removed: bool
) -> None:
    """The cluster was away meanwhile; the other job may have claimed the savepoint, and have removed it."""
    has_output = "jobmanager.checkpoint.checkpoint_store_runner.has_prepared_output"
    monkeypatch.setattr(has_output, lambda _: True)

    async def scenario() -> None:
        await takeover.first(apart(takeover), 1, lambda: bool(takeover.mark("manifest")))
        (path,) = takeover.mark("manifest")
        store = LocalStore(path)
        assert make_claim(store, OTHER) == OTHER
        if is_removed:
            remove_savepoint(store)
        async with takeover.second() as cluster:
            failed = asyncio.ensure_future(cluster.wait_for(JOB, "FAILED"))
            if is_removed:  # nobody looks before that
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await take_checkpoint(cluster)
            told = (await failed).failure.message
            for look_again in (False, True):  # as it is known, and as it is looked up
                await cluster.client.ListJobs(client_pb2.ListJobsRequest(look_again=look_again))
                details = await cluster.client.GetJob(client_pb2.GetJobRequest(job_id=JOB))
                again = details.start_again
                assert (not again) == is_removed
                assert is_removed or again.endswith(f"{str(path)!r}) with {IN_DOUBT_KEY}: leave")
            assert f"savepoint {path} was taken behind it" in told
            assert f"is committed by job {OTHER.job_id}" in told
            assert f"start from {path} with --in-doubt leave" in told
            listed = await cluster.client.ListCheckpoints(
                client_pb2.ListCheckpointsRequest(job_id=JOB)
            )
            assert listed.completed_count == 0, "nothing was published"

    run(scenario)


def test_a_savepoint_without_output_is_not_in_head(takeover: Takeover) -> None:
    async def scenario() -> None:
        await takeover.first(apart(takeover), 1, lambda: bool(takeover.mark("manifest")))

    run(scenario)
    (place,) = takeover.path.rglob(HEAD_PATH)
    head = HeadStore(LocalStore(place.parent)).read()
    assert head is not None
    assert not head.open_savepoints


@pytest.mark.parametrize("killed", ["before its manifest", "behind its manifest"])
def test_one_whose_checkpoint_head_names_is_completed_by_the_next(
    takeover: Takeover, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    """Made of a checkpoint, its output is never in doubt; without a manifest it is taken again."""
    tried = asyncio.Event()
    loop_of: list[asyncio.AbstractEventLoop] = []

    def fails(*_: object) -> Any:
        loop_of[0].call_soon_threadsafe(tried.set)
        raise StoreTransient("no answer")

    async def scenario() -> None:
        loop_of.append(asyncio.get_running_loop())
        at = "write" if killed == "before its manifest" else "mark_committed"
        with monkeypatch.context() as patch:
            patch.setattr(SavepointStoreRunner, at, fails)
            await takeover.first(savepoint(takeover), 10, tried.is_set)
        assert bool(takeover.mark("manifest")) == (killed == "behind its manifest")
        assert not takeover.mark("committed")
        async with takeover.second() as cluster:
            found = await ended(cluster)
            assert found.status == client_pb2.OPERATION_STATUS_COMPLETED, found.message
            assert takeover.mark("manifest")
            assert takeover.mark("committed")
            assert not takeover.mark("taken-back")

    run(scenario)


@pytest.fixture
def going_on(cluster_of: Any, make_graph: Any, tmp_path: Path) -> Takeover:
    """Its job's tasks can go on under the second."""
    graph = make_graph()
    graph.vertices[1].operators[0].sink.discard.SetInParent()
    return Takeover(cluster_of, graph, tmp_path)


@pytest.mark.parametrize("ask", [savepoint, stop, checkpoint])
def test_what_is_asked_of_the_next_waits_until_it_has_the_job(going_on: Takeover, ask: Any) -> None:
    async def other(cluster: Any) -> Any:
        request = client_pb2.TriggerCheckpointRequest(job_id=JOB, operation_id="other")
        return await cluster.client.TriggerCheckpoint(request)

    async def scenario() -> None:
        # Nothing of the first may write its record any more when that is put back.
        await going_on.first(other, 0, lambda: is_kept(going_on, "other"))
        asked: list[Any] = []

        async def before(cluster: Any) -> None:
            asked.append(asyncio.ensure_future(ask(going_on)(cluster)))
            while not is_kept(going_on):  # noqa: ASYNC110 - a thread writes it
                await asyncio.sleep(0.01)

        async with going_on.second_with_its_tasks(before):
            assert (await asked[0]).checkpoint_id > 1

    run(scenario)


def test_the_output_of_a_savepoint_is_committed_by_the_next_where_its_tasks_go_on(
    going_on: Takeover,
) -> None:
    async def scenario() -> None:
        await going_on.first(apart(going_on), 1, lambda: bool(going_on.mark("manifest")))
        async with going_on.second_with_its_tasks() as cluster:
            found = await ended(cluster)
            assert found.status == client_pb2.OPERATION_STATUS_COMPLETED, found.message
            assert going_on.mark("committed")
            assert not going_on.mark("taken-back")

    run(scenario)


@pytest.mark.parametrize("ask", [savepoint, stop])
def test_output_that_was_committed_is_marked_so_by_the_next(
    takeover: Takeover, monkeypatch: pytest.MonkeyPatch, ask: Any
) -> None:
    tried = asyncio.Event()

    def fails(_: SavepointStoreRunner) -> None:
        tried.set()
        raise StoreTransient("no answer")

    async def scenario() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(SavepointStoreRunner, "mark_committed", fails)
            await takeover.first(ask(takeover), 10, tried.is_set)
        assert not takeover.mark("committed")
        async with takeover.second() as cluster:
            found = await ended(cluster)
            assert found.status == client_pb2.OPERATION_STATUS_COMPLETED, found.message
            assert takeover.mark("committed")

    run(scenario)


@pytest.mark.parametrize("end", ["FAILED", "CANCELED"])
def test_what_an_ended_job_can_be_started_from_is_known_to_the_next(
    cluster_of: Any,
    make_graph: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
) -> None:
    retention = "execution.checkpointing.externalized-checkpoint-retention"
    more = {retention: "RETAIN_ON_CANCELLATION", "restart-strategy.type": "none"}
    look, looks = ended_jobs_runner.restorable_from, 0

    def counted(directory: str, job_id: str) -> str:
        nonlocal looks
        try:
            return look(directory, job_id)
        finally:
            looks += 1

    monkeypatch.setattr(ended_jobs_runner, "restorable_from", counted)

    async def listed() -> Any:
        before = looks
        async with cluster_of(settings(tmp_path, **more)) as cluster:
            request = client_pb2.GetJobRequest(job_id=JOB)
            while looks == before:  # noqa: ASYNC110 - a thread looks
                await asyncio.sleep(0.01)
            return await cluster.client.GetJob(request)

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path, **more)) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            await take_checkpoint(cluster)
            if end == "FAILED":
                fake.fail()
            else:
                await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
            before = await cluster.wait_for(JOB, end)
        assert before.summary.restorable_from.endswith("/chk-1")
        for _ in range(2):
            after = await listed()
            assert after.summary.state == before.summary.state
            assert after.summary.restorable_from == before.summary.restorable_from
            assert after.failure.message == before.failure.message
            assert after.start_again == before.start_again
        head = tmp_path / "checkpoints" / JOB / "HEAD"
        content = head.read_bytes()
        head.write_bytes(b"damaged")
        after = await listed()
        assert after.summary.state == before.summary.state
        assert not after.summary.restorable_from
        assert not after.summary.problem, "its record is not damaged"
        head.write_bytes(content)
        dispose(str(tmp_path / "checkpoints" / JOB), lambda job_id: None, lambda: None)
        assert not (await listed()).summary.restorable_from

    run(scenario)


@pytest.mark.parametrize("ask", [savepoint, stop, checkpoint])
def test_what_was_asked_for_is_told_again_when_the_job_has_ended(
    cluster_of: Any, make_graph: Any, takeover: Takeover, tmp_path: Path, ask: Any
) -> None:
    """Who has not heard the first answer asks again under the same id."""

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            first = await ask(takeover)(cluster)
            await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
            await cluster.wait_for(JOB, "CANCELED", "FINISHED")
            assert await ask(takeover)(cluster) == first
            with pytest.raises(
                grpc.aio.AioRpcError, match=f"operation {ID} .* is a .* no savepoint"
            ):
                await apart(takeover)(cluster)

    run(scenario)


def test_a_stop_has_ended_for_the_next_where_its_job_has(
    cluster_of: Any,
    make_graph: Any,
    takeover: Takeover,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The JobManager is killed once it has stored the end of the job, and no later."""
    mark, note = SavepointStoreRunner.mark_committed, JobStore.note_end
    is_noted, left = threading.Event(), list[dict[Path, bytes]]()

    def slow_mark(self: SavepointStoreRunner) -> None:
        is_noted.wait(0.2)
        mark(self)

    def noted(self: JobStore, *args: Any) -> None:
        note(self, *args)
        left.append(takeover.jobs.copy())
        is_noted.set()

    monkeypatch.setattr(SavepointStoreRunner, "mark_committed", slow_mark)
    monkeypatch.setattr(JobStore, "note_end", noted)

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            fake.finish_on_completion = True
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            await stop(takeover)(cluster)
            await cluster.wait_for(JOB, "FINISHED")
        takeover.jobs.put_back(left[0])
        async with cluster_of(settings(tmp_path)) as cluster:
            found = await ended(cluster)
            assert found.status == client_pb2.OPERATION_STATUS_COMPLETED, found.message

    run(scenario)


def test_an_id_stands_for_what_was_asked_for_under_it_and_for_nothing_else(
    cluster_of: Any, make_graph: Any, tmp_path: Path
) -> None:
    def ask(cluster: Any, format: Any) -> Any:
        request = client_pb2.TriggerSavepointRequest(
            job_id=JOB, operation_id=ID, directory=str(tmp_path / "savepoints"), format=format
        )
        return cluster.client.TriggerSavepoint(request)

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            first = await ask(cluster, checkpoint_pb2.SAVEPOINT_FORMAT_NATIVE)
            assert await ask(cluster, checkpoint_pb2.SAVEPOINT_FORMAT_NATIVE) == first
            with pytest.raises(grpc.aio.AioRpcError, match=r"is a savepoint .* \(native\)"):
                await ask(cluster, checkpoint_pb2.SAVEPOINT_FORMAT_CANONICAL)

    run(scenario)


@pytest.mark.parametrize(
    ("otherwise", "said"),
    [
        (
            {"path": "/other"},
            r"is a stop /kept \(hold, native\), and no stop /other \(hold, native\)",
        ),
        ({"wanted": "DRAIN"}, r"and no stop /kept \(drain, native\)"),
        ({"format": "CANONICAL"}, r"and no stop /kept \(hold, canonical\)"),
        ({"kind": OperationKind.SAVEPOINT}, "and no savepoint /kept"),
    ],
)
def test_a_stop_is_not_asked_for_otherwise_under_the_same_id(
    otherwise: dict[str, Any], said: str
) -> None:
    async def never(_operation: JobOperation) -> None:
        raise AssertionError("it is not done again")

    asked: dict[str, Any] = {
        "kind": OperationKind.STOP,
        "path": "/kept",
        "wanted": "HOLD",
        "format": "NATIVE",
    }
    first = JobOperation(ID, **asked)
    kept = encode_operations([first])
    operations = OperationsRunner("job 1", kept=kept)
    assert operations.begin(JobOperation(ID, **asked), never).operation_id == ID
    with pytest.raises(JobRejected, match=said):
        operations.begin(JobOperation(ID, **(asked | otherwise)), never)
    # Of one that an earlier version has kept, the format is not known.
    older = OperationsRunner("job 1", kept=kept.replace(b'"format": "NATIVE", ', b""))
    older.begin(JobOperation(ID, **(asked | {"format": "CANONICAL"})), never)


def test_what_a_bug_has_ended_is_not_told_as_done() -> None:
    async def scenario() -> None:
        begun: list[Callable[[], Awaitable[None]]] = []
        operations = OperationsRunner("job 1", lambda _lane, action: begun.append(action))

        async def broken(_operation: JobOperation) -> None:
            raise ZeroDivisionError("a bug")

        operation = operations.begin(JobOperation(ID, OperationKind.SAVEPOINT, "/kept"), broken)
        with pytest.raises(ZeroDivisionError):  # which ends the job
            await begun[0]()
        with pytest.raises(StreamError, match="job 1 has ended"):
            await operation.result()
        assert operation.status is OperationStatus.FAILED

    asyncio.run(scenario())


def test_what_is_asked_of_a_jobmanager_that_ends_is_for_its_successor(make_graph: Any) -> None:
    async def scenario() -> None:
        jobs = KnownJobs(1)
        jobs[JOB] = KnownJob(JobRecord(JOB, make_graph(), None, 0), None)
        jobs[JOB].record.state = JobState.SUSPENDED
        with pytest.raises(NotLeader, match="its successor goes on with it"):
            await AskedOperationsRunner(jobs).checkpoint(JOB, ID)

    asyncio.run(scenario())


def test_a_stop_that_had_not_happened_leaves_the_job_running(takeover: Takeover) -> None:
    async def scenario() -> None:
        await takeover.first(stop(takeover), 0, lambda: is_kept(takeover))
        async with takeover.second() as cluster:
            found = await ended(cluster)
            assert found.status == client_pb2.OPERATION_STATUS_FAILED
            assert "was not stopped, and runs on" in found.message
            assert not takeover.mark("manifest")
            assert await take_checkpoint(cluster) > 1

    run(scenario)
