"""A directory for checkpoints that cannot be had is refused when the job is submitted, not found out later."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from threading import Event, current_thread, main_thread
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from jobmanager.dispatcher import submission_checks_runner
from jobmanager.job.job_description import check_checkpoint_directory
from penstock.client.grpc_errors import error_from_rpc
from penstock.errors import JobRejected
from penstock.pb import checkpoint_pb2, client_pb2
from penstock.storage.local_store import LocalStore
from penstock.storage.manifest import encode_manifest
from penstock.storage.savepoint import MANIFEST_PATH
from tests.unit.jobmanager.test_jobmanager_checkpoints import JOB, run, settings


def job(directory: Path | str) -> Any:
    graph = SimpleNamespace(name="totals")
    return cast("Any", SimpleNamespace(checkpoint_directory=str(directory), graph=graph))


def test_a_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JobRejected, match=r"'totals'.*file/x.*Not a directory.*checkpointing\.dir"):
        check_checkpoint_directory(job(tmp_path / "file" / "x"))


def test_a_directory_is_made(tmp_path: Path) -> None:
    check_checkpoint_directory(job(tmp_path / "checkpoints" / "job"))
    assert (tmp_path / "checkpoints" / "job").is_dir()
    check_checkpoint_directory(job(""))


@pytest.mark.parametrize("inside", ["job", "state/job"])
def test_a_directory_inside_of_a_savepoint_is_refused(tmp_path: Path, inside: str) -> None:
    kept = tmp_path / "kept"
    LocalStore(kept).put(MANIFEST_PATH, [encode_manifest(checkpoint_pb2.CheckpointManifest())])
    with pytest.raises(
        JobRejected, match=rf"'totals'.*inside of the savepoint {kept}.*checkpointing"
    ):
        check_checkpoint_directory(job(kept / inside))
    assert [one.name for one in kept.iterdir()] == [MANIFEST_PATH]


class Hanging:
    """A directory that answers only when it is told to."""

    def __init__(self) -> None:
        self.asked = Event()
        self.go_on = Event()

    def check_writable(self) -> None:
        assert current_thread() is not main_thread(), "the event loop is for everybody"
        self.asked.set()
        assert self.go_on.wait(20)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    hanging = Hanging()
    monkeypatch.setattr(LocalStore, "check_writable", hanging.check_writable)
    yield hanging
    hanging.go_on.set()


def test_a_directory_that_hangs_holds_up_nobody_else(
    cluster_of: Any, make_graph: Any, tmp_path: Path, hanging: Hanging
) -> None:
    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster, asyncio.TaskGroup() as tasks:
            submissions = [tasks.create_task(cluster.submit(make_graph())) for _ in range(2)]
            assert await asyncio.to_thread(hanging.asked.wait, 20)
            assert not (await cluster.client.ListJobs(client_pb2.ListJobsRequest())).jobs
            hanging.go_on.set()
            await asyncio.wait(submissions)
            [job] = (await cluster.client.ListJobs(client_pb2.ListJobsRequest())).jobs
            assert job.job_id == JOB

    run(scenario)


def test_a_job_whose_directory_does_not_answer_is_refused(
    cluster_of: Any,
    make_graph: Any,
    tmp_path: Path,
    hanging: Hanging,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submission_checks_runner, "CHECK_TIMEOUT_MS", 20)

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.submit(make_graph())
            error = error_from_rpc(caught.value)
            assert isinstance(error, JobRejected)
            assert "has not answered" in str(error)
            assert not (await cluster.client.ListJobs(client_pb2.ListJobsRequest())).jobs

    run(scenario)
