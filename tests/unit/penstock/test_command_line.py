"""Aim: what commands print and refuse, where it needs no daemon.

Method: the commands in this process, on a fake client.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli.main import main
from penstock.local_cluster import LocalCluster
from penstock.pb import client_pb2


class FakeClient:
    """One job whose logs come in pieces that cut a character."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def job(self, job_id: str) -> client_pb2.JobDetails:
        return client_pb2.JobDetails(summary=client_pb2.JobSummary(job_id=job_id))

    def logs(self, *_: object) -> list[client_pb2.LogChunk]:
        data = "aé\n".encode()
        return [
            client_pb2.LogChunk(vertex="v0", subtask_index=subtask, data=piece)
            for subtask in range(2)
            for piece in (data[:2], data[2:])
        ]

    def close(self) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PENSTOCK_DIR", str(tmp_path))
    return lambda *arguments: CliRunner().invoke(main, arguments)


def test_logs_are_put_together_per_attempt(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.context.Client", FakeClient)
    text = run("logs", "1", "--jobmanager", "h:1").stdout
    assert text == "==> v0/0 attempt 0 <==\naé\n==> v0/1 attempt 0 <==\naé\n"
    logs = json.loads(run("logs", "1", "--json", "--jobmanager", "h:1").stdout)["logs"]
    assert [(one["subtask_index"], one["text"]) for one in logs] == [(0, "aé\n"), (1, "aé\n")]


class CheckpointedClient(FakeClient):
    """One job with a checkpoint of each kind."""

    def checkpoint(self, job_id: str) -> int:
        return 4

    def checkpoints(self, job_id: str) -> client_pb2.ListCheckpointsResponse:
        details = client_pb2.CheckpointDetails
        return client_pb2.ListCheckpointsResponse(
            checkpoints=[
                details(checkpoint_id=3, triggered_at_ms=9_000, total_subtasks=2),
                details(
                    checkpoint_id=2,
                    status=client_pb2.CHECKPOINT_STATUS_FAILED,
                    triggered_at_ms=5_000,
                    ended_at_ms=6_000,
                    failure="a subtask declined it",
                ),
                details(
                    checkpoint_id=1,
                    status=client_pb2.CHECKPOINT_STATUS_COMPLETED,
                    triggered_at_ms=1_000,
                    ended_at_ms=1_250,
                    acknowledged_subtasks=2,
                    total_subtasks=2,
                    state_bytes=3_000_000,
                    uploaded_bytes=700,
                    path="/c/chk-1/manifest",
                    retained=True,
                ),
            ],
            completed_count=1,
            failed_count=1,
        )


def test_checkpoints_are_taken_and_listed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.context.Client", CheckpointedClient)
    address = ("--jobmanager", "h:1")
    assert run("checkpoint", "j", *address).stdout == "j checkpoint 4 completed\n"
    taken = json.loads(run("checkpoint", "j", "--json", *address).stdout)
    assert taken == {"job_id": "j", "checkpoint_id": 4}
    text = run("checkpoints", "j", *address).stdout
    assert "2.9 MB" in text
    assert "700 B" in text
    assert "checkpoint 2 failed: a subtask declined it" in text
    listed = json.loads(run("checkpoints", "j", "--json", *address).stdout)
    assert (listed["completed_count"], listed["restored_checkpoint_id"]) == (1, None)
    pending, _, completed = listed["checkpoints"]
    assert (pending["status"], pending["ended_at_ms"], pending["duration_ms"]) == (
        "PENDING",
        None,
        None,
    )
    assert (completed["id"], completed["duration_ms"], completed["retained"]) == (1, 250, True)
    words = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    assert [name for name in (*listed, *completed) if name not in words] == []


@pytest.mark.parametrize("addresses", [",", "foo:bar", "", "host"])
def test_malformed_addresses_are_wrong_use(run: Any, tmp_path: Path, addresses: str) -> None:
    (tmp_path / "job.py").write_text("raise SystemExit(7)")
    for command in (["list"], ["run", str(tmp_path / "job.py")]):
        ended = run(*command, "--jobmanager", addresses)
        assert ended.exit_code == 2, ended.output
        assert "HOST:PORT" in ended.stderr


def test_slots_of_taskmanagers_that_run_already_stay_and_it_says_so(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalCluster, "start", lambda *_, **__: None)
    monkeypatch.setattr(LocalCluster, "slots", lambda _: {"tm-1": 2, "tm-2": 8})
    ended = run("cluster", "start", "--slots", "8")
    assert ended.exit_code == 0
    assert "tm-1 with 2 slots" in ended.stderr
    assert "tm-2" not in ended.stderr
    assert run("cluster", "start").stderr == ""
