"""Hidden output that nobody will commit, of a job that was cancelled for good, or has failed: asked for again where a TaskManager could not remove it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.pb import internal_pb2
from jobmanager.checkpoint.checkpoint_starts_runner import CheckpointStartsRunner
from jobmanager.checkpoint.prepared_checkpoints import PreparedCheckpoints
from jobmanager.dispatcher.dispatcher_runner import DispatcherRunner
from jobmanager.job import ended_checkpoints_runner, swept_output_runner
from penstock.pb import client_pb2, graph_pb2
from penstock.storage.snapshot_files import snapshot_file_name
from tests.support.job_records import JobRecords
from tests.unit.jobmanager.test_jobmanager_checkpoints import (
    JOB,
    Checkpointed,
    restarted,
    run,
    settings,
    take_checkpoint,
)


class Prepared(Checkpointed):
    """Its sink has a file to be committed with each checkpoint."""

    def sink_state(self, checkpoint_id: int) -> tuple[str, bytes]:
        names = {"pending": f"/out/.part-{checkpoint_id}.pending", "final": "/out/part"}
        return "committables", bytes(4) + json.dumps(names).encode()


class Sweeps:
    """What a TaskManager is asked to remove; the first few times it cannot."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, taskmanager: Any, failures: int = 0
    ) -> None:
        self.asked: list[internal_pb2.SweepOutputRequest] = []

        async def sweep(request: Any, context: Any) -> Any:
            self.asked.append(request)
            if len(self.asked) <= failures:
                raise RuntimeError("the disk is read-only")
            return internal_pb2.SweepOutputResponse(file_count=1)

        monkeypatch.setattr(taskmanager, "on_sweep", sweep)


async def _refused(request: Any, context: Any) -> Any:
    raise RuntimeError("the disk is read-only")


def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swept_output_runner, "_PAUSES_S", (0.01, 0.01, 0.01, 0.01))
    monkeypatch.setattr(ended_checkpoints_runner, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(ended_checkpoints_runner, "_LAST_PAUSE_S", 0.02)
    monkeypatch.setattr(DispatcherRunner, "_slots_end_s", 0.02)


def _writing(graph: Any, tmp_path: Path) -> Any:
    files = graph_pb2.FileSink(directory=str(tmp_path / "out"))
    graph.vertices[1].operators[0].sink.CopyFrom(graph_pb2.SinkSpec(files=files))
    return graph


@pytest.mark.parametrize("failures", [0, 2, 12])
def test_a_sweep_that_fails_is_tried_again(
    cluster_of: Any,
    make_graph: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failures: int,
) -> None:
    _hurry(monkeypatch)
    asked: list[internal_pb2.SweepOutputRequest] = []
    graph = _writing(make_graph(), tmp_path)

    async def scenario() -> None:
        nonlocal asked
        async with cluster_of(settings(tmp_path)) as cluster:
            taskmanager = await cluster.add("tm1")

            asked = Sweeps(monkeypatch, taskmanager, failures).asked
            fake = Checkpointed(taskmanager)
            await cluster.submit(graph)
            await cluster.wait_for(JOB, "RUNNING")
            fake.fail()
            await restarted(cluster, 1)
            await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
            await cluster.wait_for(JOB, "CANCELED")
            await JobRecords(tmp_path).until_clean()

    run(scenario)
    assert len(asked) == failures + 1
    [sink] = asked[-1].sinks
    assert (asked[-1].job_id, sink.operator_uid) == (JOB, "snk")
    assert sink.directory == str(tmp_path / "out")


async def _swept_by_successor(
    cluster_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **more: object
) -> internal_pb2.SweepOutputRequest:
    """The next JobManager, to which the TaskManager comes late, has the output removed."""
    async with cluster_of(settings(tmp_path, **more)) as cluster:
        taskmanager = await cluster.add("tm1")

        asked = Sweeps(monkeypatch, taskmanager).asked
        await JobRecords(tmp_path).until_clean()
    return asked[-1]


async def _run_and_fail_once(cluster: Any, graph: Any) -> Any:
    taskmanager = await cluster.add("tm1")
    fake = Checkpointed(taskmanager)
    await cluster.submit(graph)
    await cluster.wait_for(JOB, "RUNNING")
    fake.fail()
    await restarted(cluster, 1)
    return taskmanager


def test_a_sweep_that_fails_is_tried_again_by_the_next_jobmanager(
    cluster_of: Any, make_graph: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _hurry(monkeypatch)

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            taskmanager = await _run_and_fail_once(cluster, _writing(make_graph(), tmp_path))
            monkeypatch.setattr(taskmanager, "on_sweep", _refused)
            await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
            await cluster.wait_for(JOB, "CANCELED")
        assert list((tmp_path / "jobmanager" / "jobs").iterdir())
        request = await _swept_by_successor(cluster_of, tmp_path, monkeypatch)
        assert request.job_id == JOB

    run(scenario)


def test_a_sweep_of_a_job_that_failed_without_checkpoints_is_tried_again_by_the_next_jobmanager(
    cluster_of: Any, make_graph: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _hurry(monkeypatch)

    async def scenario() -> None:
        config = {"restart-strategy.type": "none", "execution.checkpointing.interval": "none"}
        async with cluster_of(settings(tmp_path, **config)) as cluster:
            taskmanager = await cluster.add("tm1")
            fake = Checkpointed(taskmanager)
            monkeypatch.setattr(taskmanager, "on_sweep", _refused)
            await cluster.submit(_writing(make_graph(), tmp_path))
            await cluster.wait_for(JOB, "RUNNING")
            fake.fail()
            await cluster.wait_for(JOB, "FAILED")
        request = await _swept_by_successor(cluster_of, tmp_path, monkeypatch, **config)
        assert request.job_id == JOB

    run(scenario)


def test_what_checkpoints_name_stays_where_the_next_jobmanager_is_to_take_none(
    cluster_of: Any, make_graph: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interval that it was given is another one: the job that has failed can be started again all the same."""
    _hurry(monkeypatch)
    records = JobRecords(tmp_path)
    asked: list[internal_pb2.SweepOutputRequest] = []

    async def scenario() -> None:
        nonlocal asked
        async with cluster_of(settings(tmp_path, **{"restart-strategy.type": "none"})) as cluster:
            fake = Prepared(await cluster.add("tm1"))
            await cluster.submit(_writing(make_graph(), tmp_path))
            await cluster.wait_for(JOB, "RUNNING")
            await take_checkpoint(cluster)
            fake.fail()
            await cluster.wait_for(JOB, "FAILED")
            await records.until_clean()
        records.change(JOB, lambda record: setattr(record.end, "is_clean", False))
        none = {"execution.checkpointing.interval": "none"}
        async with cluster_of(settings(tmp_path, **none)) as cluster:
            asked = Sweeps(monkeypatch, await cluster.add("tm1")).asked
            await records.until_clean()

    run(scenario)
    assert asked == []


def test_output_of_a_job_that_was_cancelled_while_it_could_not_be_read_is_swept(
    cluster_of: Any, make_graph: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _hurry(monkeypatch)

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            await _run_and_fail_once(cluster, _writing(make_graph(), tmp_path))
        [graph] = JobRecords(tmp_path).path(JOB).parent.glob("graph-*")
        kept = graph.read_bytes()
        graph.write_bytes(b"\xff")
        async with cluster_of(settings(tmp_path)) as cluster:
            await cluster.wait_for(JOB, "RESTARTING")
            await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
        graph.write_bytes(kept)
        request = await _swept_by_successor(cluster_of, tmp_path, monkeypatch)
        assert request.job_id == JOB

    run(scenario)


@pytest.mark.parametrize("failures", [0, 2])
def test_of_a_job_that_has_failed_all_goes_that_none_of_its_checkpoints_names(
    cluster_of: Any,
    make_graph: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failures: int,
) -> None:
    _hurry(monkeypatch)
    asked: list[internal_pb2.SweepOutputRequest] = []

    async def scenario() -> None:
        nonlocal asked
        async with cluster_of(settings(tmp_path, **{"restart-strategy.type": "none"})) as cluster:
            taskmanager = await cluster.add("tm1")

            asked = Sweeps(monkeypatch, taskmanager, failures).asked
            fake = Prepared(taskmanager)
            await cluster.submit(_writing(make_graph(), tmp_path))
            await cluster.wait_for(JOB, "RUNNING")
            checkpoint_id = await take_checkpoint(cluster)
            late = tmp_path / "checkpoints" / JOB / "shared"
            late.mkdir(exist_ok=True)
            (late / snapshot_file_name(checkpoint_id + 1, "v1", 0, 0, "u")).write_bytes(b"x")
            fake.fail()
            await cluster.wait_for(JOB, "FAILED")
            await JobRecords(tmp_path).until_clean()
            assert not list(late.glob("*"))

    run(scenario)
    assert len(asked) == failures + 1
    [sink] = asked[-1].sinks
    assert list(sink.kept) == [".part-1.pending"]


_prepare = CheckpointStartsRunner.prepare


def with_open_savepoint(*args: Any, **options: Any) -> PreparedCheckpoints:
    """What is found where HEAD names a savepoint behind the newest checkpoint."""
    return replace(_prepare(*args, **options), open_savepoints=frozenset({9}))


@pytest.mark.parametrize("why", ["a checkpoint cannot be read", "a savepoint is open"])
def test_where_others_may_name_output_nothing_goes(
    cluster_of: Any, make_graph: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Who is started from a savepoint that no checkpoint has followed may be asked to commit what that names."""
    _hurry(monkeypatch)
    asked: list[internal_pb2.SweepOutputRequest] = []

    async def scenario() -> None:
        nonlocal asked
        async with cluster_of(settings(tmp_path, **{"restart-strategy.type": "none"})) as cluster:
            taskmanager = await cluster.add("tm1")

            asked = Sweeps(monkeypatch, taskmanager).asked
            fake = Prepared(taskmanager)
            await cluster.submit(_writing(make_graph(), tmp_path))
            await cluster.wait_for(JOB, "RUNNING")
            await take_checkpoint(cluster)
            if why == "a savepoint is open":
                monkeypatch.setattr(CheckpointStartsRunner, "prepare", with_open_savepoint)
            else:
                [manifest] = (tmp_path / "checkpoints" / JOB).glob("chk-*/manifest*")
                manifest.write_bytes(b"altered")
            fake.fail()
            await cluster.wait_for(JOB, "FAILED")
            await JobRecords(tmp_path).until_clean()

    run(scenario)
    assert asked == []
