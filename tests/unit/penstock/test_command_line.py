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
