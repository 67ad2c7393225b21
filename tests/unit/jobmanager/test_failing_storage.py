"""A JobManager whose checkpoint storage fails, hangs, and does not say what it has done.

Over real gRPC, with TaskManagers that only pretend; the store is a directory whose calls a test can break.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest
import structlog
from typing_extensions import override

from jobmanager.checkpoint import claimed_head_store
from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_store_runner import CheckpointStoreRunner
from jobmanager.dispatcher.dispatcher_runner import DispatcherRunner
from jobmanager.job import job_calls_runner
from jobmanager.job.job_description import JobDescription
from jobmanager.metrics import build_registry
from penstock.client.grpc_errors import error_from_rpc
from penstock.errors import StoreTransient
from penstock.pb import client_pb2
from penstock.storage.head import HeadStore
from penstock.storage.local_store import LocalStore
from penstock.storage.object_store import ObjectInfo
from penstock.storage.snapshot_files import snapshot_file_name
from tests.support.job_records import JobRecords
from tests.support.jobs import DEADLINE_S
from tests.unit.jobmanager.test_jobmanager_checkpoints import (
    JOB,
    STATES,
    Checkpointed,
    restarted,
    run,
    settings,
    take_checkpoint,
)


class Breakable(LocalStore):
    """A directory; ``broken`` names calls that fail, ``lost`` those whose answer is lost, ``hangs`` those
    that wait for ``go_on``."""

    broken: ClassVar[set[str]] = set()
    lost: ClassVar[set[str]] = set()
    hangs: ClassVar[set[str]] = set()
    go_on = threading.Event()
    hanging_calls: ClassVar[list[str]] = []
    written: ClassVar[list[str]] = []
    """What hung first, and went on."""

    def _enter(self, call: str) -> None:
        if call in self.hangs:
            self.hanging_calls.append(call)
            assert self.go_on.wait(20)
        if call in self.broken:
            raise StoreTransient(f"{call}: no answer")

    @override
    def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        is_late = "put" in self.hangs
        self._enter("put")
        if is_late:
            self.written.append(path)
        return super().put(path, chunks)

    @override
    def get(self, path: str) -> bytes:
        self._enter("get")
        return super().get(path)

    @override
    def sizes(self, paths: Iterable[str]) -> Mapping[str, int]:
        self._enter("sizes")
        return super().sizes(paths)

    @override
    def list(self, prefix: str) -> list[ObjectInfo]:
        self._enter("list")
        return super().list(prefix)

    @override
    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        self._enter("swap")
        swapped = super().compare_and_swap(path, expected, new)
        self._enter("swapped")
        if "swap" in self.lost:
            raise StoreTransient("swap: the answer is lost")
        return swapped


class Stopping(Checkpointed):
    """What begins from the checkpoint with which its job is stopped commits, and ends."""

    @override
    def deploy(self, task: Any) -> None:
        super().deploy(task)
        if task.restore.stopped:
            self.taskmanager.report_state(task.attempt, STATES.ATTEMPT_STATE_FINISHED)


@pytest.fixture
def broken_store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of all stores: what is set on it holds for each."""
    for name in ("broken", "lost", "hangs"):
        monkeypatch.setattr(Breakable, name, set())
    for name in ("hanging_calls", "written"):
        monkeypatch.setattr(Breakable, name, [])
    monkeypatch.setattr(Breakable, "go_on", threading.Event())
    monkeypatch.setattr(claimed_head_store, "_SWAP_PAUSE_S", 0.001)
    monkeypatch.setattr(
        JobDescription,
        "checkpoint_store",
        lambda job: Breakable(Path(job.checkpoint_directory)),
    )
    yield Breakable
    Breakable.go_on.set()


async def refused(cluster: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await take_checkpoint(cluster)
    return str(error_from_rpc(caught.value))


async def eventually(cluster: Any) -> int:
    """The next checkpoint that completes."""
    while True:
        try:
            return await take_checkpoint(cluster)
        except grpc.aio.AioRpcError as error:
            told = str(error_from_rpc(error))
            if "not known yet" not in told and "have not acknowledged it" not in told:
                raise  # a machine that is busy may be too slow for 300 ms
            await asyncio.sleep(0.02)


async def has_restarted(cluster: Any, times: int) -> Any:
    """Waits until the job has begun so many restarts, whatever comes of them."""
    request = client_pb2.WatchJobRequest(job_id=JOB, interval_ms=20)
    async for details in cluster.client.WatchJob(request, timeout=DEADLINE_S):
        if details.summary.restarts >= times:
            return details
    raise AssertionError("the job has ended")


def sample(cluster: Any, name: str) -> float | None:
    registry = build_registry(cluster.jobmanager.dispatcher, cluster.jobmanager.cluster)
    return registry.get_sample_value(name, {"job_id": JOB, "job_name": "test"})


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_swap_of_unknown_outcome_is_settled_while_the_job_runs_on(
    cluster_of: Any, make_graph: Any, tmp_path: Path, broken_store: Any, is_stored: bool
) -> None:
    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            assert await take_checkpoint(cluster) == 1
            broken_store.broken |= {"get"}
            (broken_store.lost if is_stored else broken_store.broken).add("swap")
            assert "whether checkpoint 2 is stored is not known yet" in await refused(cluster)
            # Who asks meanwhile is told so at once.
            assert "not known yet" in await refused(cluster)
            while len(unsettled()) < 2:  # noqa: ASYNC110 - a thread tries
                await asyncio.sleep(0.01)
            for calls in (broken_store.broken, broken_store.lost):
                calls.clear()
            assert await eventually(cluster) == 3
            assert (2 in fake.completed) == is_stored
            details = (await cluster.client.GetJob(client_pb2.GetJobRequest(job_id=JOB))).summary
            assert details.state == client_pb2.JOB_STATE_RUNNING
            assert details.restarts == 0

    with structlog.testing.capture_logs() as logs:

        def unsettled() -> list[str]:
            """How loudly each try is told of."""
            return [one["log_level"] for one in logs if one["event"] == "checkpoint.not_settled"]

        run(scenario)
    assert unsettled().count("warning") == 1
    assert [one for one in logs if one["event"] == "checkpoint.settled_again"]


def test_checkpoints_go_on_where_a_start_failed_after_an_unknown_outcome(
    cluster_of: Any, make_graph: Any, tmp_path: Path, broken_store: Any
) -> None:
    """HEAD is claimed again, looking at files fails, and what waits for the outcome hears of it all the same."""

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            fake.finish_on_completion = True
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            broken_store.lost.add("swap")
            broken_store.broken |= {"get"}
            assert "not known yet" in await refused(cluster)
            fake.fail()
            broken_store.lost.clear()
            broken_store.broken.clear()
            broken_store.broken.add("sizes")
            await has_restarted(cluster, 2)
            broken_store.broken.clear()
            await restarted(cluster, 2)
            fake.report_end_of_data()
            await cluster.wait_for(JOB, "FINISHED")

    run(scenario)


def test_a_stop_that_all_tasks_go_on_from_before_it_is_settled_is_done(
    cluster_of: Any,
    make_graph: Any,
    tmp_path: Path,
    broken_store: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The start finds that HEAD names its checkpoint: the job ends with it, and so does who asked for the stop."""
    monkeypatch.setattr(
        job_calls_runner, "_FIRST_PAUSE_S", DEADLINE_S
    )  # before it is settled again

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            fake = Stopping(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            broken_store.lost.add("swap")
            broken_store.broken.add("get")
            request = client_pb2.StopJobRequest(
                job_id=JOB, operation_id="stop", directory=str(tmp_path / "savepoints")
            )
            stop = asyncio.ensure_future(cluster.client.StopJob(request, timeout=DEADLINE_S))
            while not any(  # noqa: ASYNC110 - a thread tries
                one["event"] == "checkpoint.not_settled" for one in logs
            ):
                await asyncio.sleep(0.01)
            for calls in (broken_store.broken, broken_store.lost):
                calls.clear()
            fake.fail()
            await cluster.wait_for(JOB, "FINISHED")
            assert (await stop).checkpoint_id == 1
            [savepoint] = (tmp_path / "savepoints").iterdir()
            assert (savepoint / "committed").exists()

    with structlog.testing.capture_logs() as logs:
        run(scenario)


def test_what_a_failing_store_did_not_let_go_is_swept_without_another_restart(
    cluster_of: Any, make_graph: Any, tmp_path: Path, broken_store: Any
) -> None:
    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            assert await take_checkpoint(cluster) == 1
            store = LocalStore(tmp_path / "checkpoints" / JOB)
            store.put(f"shared/{snapshot_file_name(1, 'v1', 0, 0, 'u')}", [b"x"])
            broken_store.broken.add("list")
            fake.fail()
            await restarted(cluster, 1)
            assert await take_checkpoint(cluster) == 2
            assert store.list("shared/")
            broken_store.broken.clear()
            while store.list("shared/"):  # noqa: ASYNC110 - a thread removes it
                await asyncio.sleep(0.01)
            details = await cluster.client.GetJob(client_pb2.GetJobRequest(job_id=JOB))
            assert details.summary.restarts == 1

    run(scenario)


@pytest.mark.parametrize("call", ["put", "swap", "sizes", "list"])
def test_a_store_call_that_hangs_stops_neither_answers_nor_restarts(
    cluster_of: Any, make_graph: Any, tmp_path: Path, broken_store: Any, call: str
) -> None:
    async def scenario() -> None:
        config = settings(tmp_path, **{"execution.checkpointing.timeout": "1s"})
        async with cluster_of(config) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            assert await take_checkpoint(cluster) == 1
            broken_store.hangs.add(call)
            if call == "sizes":
                fake.fail()
                await has_restarted(cluster, 2)
            elif call == "list":  # behind a start, which does not wait for it
                fake.fail()
                await restarted(cluster, 1)
                while not sample(cluster, "penstock_job_store_calls_hanging"):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            else:
                assert "not complete after 1000 ms" in await refused(cluster)
                assert "not known yet" in await refused(cluster)
            assert (sample(cluster, "penstock_job_store_calls_given_up_total") or 0) >= 1
            assert (sample(cluster, "penstock_job_store_calls_hanging") or 0) >= 1
            # What hangs goes on hanging; other calls are answered.
            go_on, broken_store.go_on = broken_store.go_on, threading.Event()
            broken_store.hangs.clear()
            fake.fail()
            await restarted(cluster, 2 if call == "list" else 1)
            assert await eventually(cluster) > 1
            # What was given up on comes to itself, and changes nothing.
            before = HeadStore(LocalStore(tmp_path / "checkpoints" / JOB)).read()
            go_on.set()
            while sample(cluster, "penstock_job_store_calls_hanging"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert HeadStore(LocalStore(tmp_path / "checkpoints" / JOB)).read() == before
            assert await take_checkpoint(cluster) > 2

    run(scenario)


def test_a_checkpoint_whose_deadline_comes_before_its_store_call_begins_is_not_stored(
    cluster_of: Any,
    make_graph: Any,
    tmp_path: Path,
    broken_store: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What begins to store it late must not have HEAD name files that are deleted by then."""
    may_begin, began = threading.Event(), threading.Event()
    store = CheckpointStoreRunner.store

    def late(self: CheckpointStoreRunner, wanted: c.StoreCheckpoint, *args: Any) -> Any:
        assert wanted.checkpoint_id != 2 or may_begin.wait(DEADLINE_S)
        try:
            return store(self, wanted, *args)
        finally:
            if wanted.checkpoint_id == 2:
                began.set()

    monkeypatch.setattr(CheckpointStoreRunner, "store", late)

    async def scenario() -> None:
        config = settings(tmp_path, **{"execution.checkpointing.timeout": "1s"})
        async with cluster_of(config) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            assert await take_checkpoint(cluster) == 1
            assert "not complete after 1000 ms" in await refused(cluster)
            while 2 not in fake.aborted:  # noqa: ASYNC110 - it is settled
                await asyncio.sleep(0.01)
            may_begin.set()
            assert await asyncio.to_thread(began.wait, DEADLINE_S)
            head = HeadStore(LocalStore(tmp_path / "checkpoints" / JOB)).read()
            assert head is not None
            assert [retained.checkpoint_id for retained in head.retained] == [1]
            assert await eventually(cluster) >= 3
            fake.fail()
            await restarted(cluster, 1)

    run(scenario)


def test_threads_that_hang_are_bounded(
    cluster_of: Any, make_graph: Any, tmp_path: Path, broken_store: Any
) -> None:
    async def scenario() -> None:
        config = settings(
            tmp_path,
            **{
                "execution.checkpointing.timeout": "20ms",
                "restart-strategy.exponential-delay.max-backoff": "10ms",
            },
        )
        async with cluster_of(config) as cluster:
            broken_store.hangs.add("get")
            await cluster.add("tm1")
            await cluster.submit(make_graph())
            details = await has_restarted(cluster, 20)
            assert sample(cluster, "penstock_job_store_calls_given_up_total") == 8
            assert "calls to the storage" in details.failure.message
            broken_store.hangs.clear()
            broken_store.go_on.set()
            await cluster.wait_for(JOB, "RUNNING")

    run(scenario)


def test_a_checkpoint_that_is_being_stored_when_its_job_ends_leaves_nothing(
    cluster_of: Any, make_graph: Any, tmp_path: Path, broken_store: Any
) -> None:
    """What the job had before is deleted while the call hangs, which makes nothing of it again."""

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster, asyncio.TaskGroup() as tasks:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            assert await take_checkpoint(cluster) == 1
            broken_store.hangs.add("put")
            asked = tasks.create_task(refused(cluster))
            while not broken_store.hanging_calls:  # noqa: ASYNC110 - a thread begins to hang
                await asyncio.sleep(0.01)
            for attempt in fake.attempts.values():
                fake.taskmanager.report_state(attempt, STATES.ATTEMPT_STATE_FINISHED)
            await cluster.wait_for(JOB, "FINISHED")
            await asked
            directory = tmp_path / "checkpoints" / JOB
            while directory.exists():  # noqa: ASYNC110 - a thread removes it
                await asyncio.sleep(0.01)
            broken_store.go_on.set()
            await JobRecords(tmp_path).until_clean()
            assert broken_store.written == ["chk-2/manifest-1"]
            assert not directory.exists()

    run(scenario)


@pytest.mark.parametrize("end", ["FAILED", "CANCELED"])
def test_a_job_that_ended_while_a_checkpoint_was_stored_is_listed_with_that(
    cluster_of: Any, make_graph: Any, tmp_path: Path, broken_store: Any, end: str
) -> None:
    """HEAD names the new one already, and its end came before anybody had heard of that."""
    more = {
        "restart-strategy.type": "none",
        "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
    }

    async def scenario() -> None:
        config = settings(tmp_path, **more)
        async with cluster_of(config) as cluster, asyncio.TaskGroup() as tasks:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            assert await take_checkpoint(cluster) == 1
            broken_store.hangs.add("swapped")
            asked = tasks.create_task(refused(cluster))
            while "swapped" not in broken_store.hanging_calls:  # noqa: ASYNC110 - in a thread
                await asyncio.sleep(0.01)
            if end == "FAILED":
                fake.fail()
            else:
                await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
            await cluster.wait_for(JOB, end)
            broken_store.go_on.set()
            await asked
            request = client_pb2.ListJobsRequest(look_again=True)
            [summary] = (await cluster.client.ListJobs(request)).jobs
            assert Path(summary.restorable_from).name == "chk-2"

    run(scenario)


@pytest.mark.parametrize("end", ["FINISHED", "CANCELED"])
@pytest.mark.parametrize("is_lost", [False, True])
def test_an_upload_that_ends_after_its_job_is_deleted(
    cluster_of: Any,
    make_graph: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
    is_lost: bool,
) -> None:
    """Slot processes write until they have ended; of those that cannot be asked, nobody knows when."""
    monkeypatch.setattr(DispatcherRunner, "_slots_end_s", 0.5)

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            assert await take_checkpoint(cluster) == 1
            directory = tmp_path / "checkpoints" / JOB
            may_end = asyncio.Event()

            async def end_slots() -> None:
                await may_end.wait()
                LocalStore(directory).put("shared/late", [b"x"])
                if is_lost:
                    raise RuntimeError("no answer")

            fake.taskmanager.on_free = end_slots
            if end == "CANCELED":
                await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
            else:
                for attempt in fake.attempts.values():
                    fake.taskmanager.report_state(attempt, STATES.ATTEMPT_STATE_FINISHED)
            await cluster.wait_for(JOB, end)
            may_end.set()
            if is_lost:
                while directory.exists():  # noqa: ASYNC110 - a thread removes it
                    await asyncio.sleep(0.01)
                LocalStore(directory).put("shared/later", [b"x"])
            await JobRecords(tmp_path).until_clean()
            assert not directory.exists()

    run(scenario)
