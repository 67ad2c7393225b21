"""Hidden output of a job that was cancelled for good: asked for again where a TaskManager could not remove it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from common.pb import internal_pb2
from jobmanager.job import job_master_runner
from penstock.pb import client_pb2, graph_pb2
from tests.unit.jobmanager.test_jobmanager_checkpoints import (
    JOB,
    Checkpointed,
    restarted,
    run,
    settings,
)


@pytest.mark.parametrize("failures", [0, 2, 100])
def test_a_sweep_that_fails_is_tried_again_so_often(
    cluster_of: Any,
    make_graph: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failures: int,
) -> None:
    monkeypatch.setattr(job_master_runner, "_SWEEP_PAUSES_S", (0.01, 0.01, 0.01, 0.01))
    asked: list[internal_pb2.SweepOutputRequest] = []
    graph = make_graph()
    files = graph_pb2.FileSink(directory=str(tmp_path / "out"))
    graph.vertices[1].operators[0].sink.CopyFrom(graph_pb2.SinkSpec(files=files))

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            taskmanager = await cluster.add("tm1")

            async def sweep(request: Any, context: Any) -> Any:
                asked.append(request)
                if len(asked) <= failures:
                    raise RuntimeError("the disk is read-only")
                return internal_pb2.SweepOutputResponse(file_count=1)

            monkeypatch.setattr(taskmanager, "on_sweep", sweep)
            fake = Checkpointed(taskmanager)
            await cluster.submit(graph)
            await cluster.wait_for(JOB, "RUNNING")
            fake.fail()
            await restarted(cluster, 1)
            await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
            await cluster.wait_for(JOB, "CANCELED")
            while list((tmp_path / "jobmanager" / "jobs").iterdir()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    run(scenario)
    assert len(asked) == min(failures + 1, 5)
    [sink] = asked[-1].sinks
    assert (asked[-1].job_id, sink.operator_uid) == (JOB, "snk")
    assert sink.directory == str(tmp_path / "out")
