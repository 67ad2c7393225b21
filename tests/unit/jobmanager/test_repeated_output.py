"""After a damaged checkpoint a job goes on from an older one: what may be there twice is said, file by file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from common.pb import internal_pb2
from jobmanager.checkpoint import repeated_output
from jobmanager.metrics import build_registry
from penstock.cli.main import main
from penstock.pb import checkpoint_pb2, client_pb2
from penstock.storage.head import HeadStore
from penstock.storage.local_store import LocalStore
from tests.unit.jobmanager.test_jobmanager_checkpoints import (
    JOB,
    Checkpointed,
    restarted,
    run,
    settings,
    take_checkpoint,
)


class WithFiles(Checkpointed):
    """Each subtask of the sink has prepared a file per checkpoint; the last one is not committed yet when the
    next checkpoint is taken."""

    def __init__(self, taskmanager: Any, store: LocalStore) -> None:
        super().__init__(taskmanager)
        self.store = store

    def acknowledge(self, attempt: Any, checkpoint_id: int) -> None:
        snapshot = checkpoint_pb2.SubtaskSnapshot(
            vertex=attempt.vertex, subtask_index=attempt.subtask_index
        )
        if attempt.vertex == "v1":
            path = f"shared/state-{checkpoint_id}"
            self.store.put(path, [b"0123"])
            state = snapshot.operators.add(operator_uid="snk")
            own = state.lists.add(name="other")
            own.handle.path, own.handle.size_bytes = path, 4
            held = state.lists.add(name="committables")
            held.items.extend(
                b"\0\0\0\0"
                + json.dumps(
                    {"pending": "p", "final": f"/out/part-{attempt.subtask_index}-{number}"}
                ).encode()
                for number in (checkpoint_id - 1, checkpoint_id)
                if number
            )
        acked = internal_pb2.CheckpointAcknowledged(
            checkpoint_id=checkpoint_id,
            snapshot=snapshot,
            leader_epoch=self.triggered_by,
        )
        self.taskmanager.report(
            internal_pb2.TaskEvent(attempt=attempt, checkpoint_acknowledged=acked)
        )


@pytest.mark.parametrize("damage", ["state", "manifest", "manifest of many files"])
def test_output_that_may_be_there_twice_is_named(
    cluster_of: Any,
    make_graph: Any,
    tmp_path: Path,
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if damage == "manifest of many files":
        monkeypatch.setattr(repeated_output, "HEAD_FILES_MAX", 2)
    more = {"execution.checkpointing.num-retained": 3}
    store = LocalStore(tmp_path / "checkpoints" / JOB)

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path, **more)) as cluster:
            fake = WithFiles(await cluster.add("tm1"), store)
            graph = make_graph()
            sink = graph.vertices[1].operators[0].sink
            sink.ClearField("collect")
            sink.files.directory = "/out"
            await cluster.submit(graph)
            await cluster.wait_for(JOB, "RUNNING")
            for expected in (1, 2, 3):
                assert await take_checkpoint(cluster) == expected
            head = HeadStore(store).read()
            assert head is not None
            for retained in head.retained[1:]:
                if damage == "state":
                    store.delete(f"shared/state-{retained.checkpoint_id}")
                else:
                    store.put(retained.manifest_path, [b"junk"])
            fake.fail()
            details = await restarted(cluster, 1)
            [repeated] = details.repeated_output
            assert (repeated.from_checkpoint_id, repeated.to_checkpoint_id) == (1, 3)
            named = [f"/out/part-{subtask}-{number}" for subtask in (0, 1) for number in (2, 3)]
            if damage == "manifest of many files":
                assert set(repeated.files) < set(named)
                assert list(repeated.places) == ["sink 'snk' in /out"]
            else:
                assert list(repeated.files) == named
                assert not repeated.places
            # Another restart from the same checkpoint commits nothing more.
            fake.fail()
            details = await restarted(cluster, 2)
            assert len(details.repeated_output) == 1
            listed = await cluster.client.ListExceptions(
                client_pb2.ListExceptionsRequest(job_id=JOB)
            )
            assert list(listed.repeated_output) == [repeated]
            registry = build_registry(cluster.jobmanager.dispatcher, cluster.jobmanager.cluster)
            labels = {"job_id": JOB, "job_name": "test"}
            assert registry.get_sample_value("penstock_job_output_repeated_total", labels) == 1.0
            for command in ("info", "exceptions"):
                await check_command(cluster, command, repeated)

    run(scenario)


async def check_command(cluster: Any, command: str, repeated: client_pb2.RepeatedOutput) -> None:
    def call(*options: str) -> str:
        arguments = [
            command,
            JOB,
            "--jobmanager",
            f"127.0.0.1:{cluster.jobmanager.ports.port}",
            *options,
        ]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        return result.output

    text = await asyncio.to_thread(call)
    assert "output committed from checkpoint 1 to checkpoint 3 may be there twice" in text
    for name in (*repeated.files, *repeated.places):
        assert name in text
    [shown] = json.loads(await asyncio.to_thread(call, "--json"))["repeated_output"]
    assert (shown["from_checkpoint_id"], shown["to_checkpoint_id"]) == (1, 3)
    assert shown["files"] == list(repeated.files)
    assert shown["places"] == list(repeated.places)


def test_a_healthy_restart_says_nothing(cluster_of: Any, make_graph: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            await take_checkpoint(cluster)
            fake.fail()
            assert not (await restarted(cluster, 1)).repeated_output

    run(scenario)
