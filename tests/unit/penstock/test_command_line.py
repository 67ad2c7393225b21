"""Aim: what commands print and refuse, where it needs no daemon.

Method: the commands in this process, on a fake client.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

import penstock as ps
from penstock.cli.context import jobmanager_addresses
from penstock.cli.main import main
from penstock.errors import JobManagerUnreachable
from penstock.local.local_cluster import LocalCluster
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


class ForsakenClient(FakeClient):
    """Whose JobManager ends before it has answered."""

    def savepoint(self, *_: object, **__: object) -> None:
        raise JobManagerUnreachable("no answer came")

    stop = savepoint


@pytest.mark.parametrize("command", ["savepoint", "stop"])
def test_who_gets_no_answer_is_told_how_to_ask_again(
    run: Any, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("penstock.cli.context.Client", ForsakenClient)
    found = run(command, "1", "--operation-id", "mine", "--jobmanager", "h:1")
    assert found.exit_code == 3
    assert "no answer came; " in found.stderr
    assert found.stderr.endswith(": penstock operation 1 mine\n")


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


class StragglingClient(FakeClient):
    """One job of one subtask, which has a rival."""

    def job(self, job_id: str) -> client_pb2.JobDetails:
        attempts = [
            client_pb2.SubtaskDetails(
                attempt=number,
                state=client_pb2.ATTEMPT_STATE_RUNNING,
                taskmanager_id=f"tm-{number}",
            )
            for number in (0, 3)
        ]
        vertex = client_pb2.VertexDetails(
            id="v0", name="read", subtasks=attempts[:1], speculative_attempts=attempts[1:]
        )
        return client_pb2.JobDetails(
            summary=client_pb2.JobSummary(job_id=job_id), vertices=[vertex]
        )


def test_a_second_attempt_is_shown_beside_the_first(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.context.Client", StragglingClient)
    lines = run("info", "j", "--jobmanager", "h:1").stdout.splitlines()
    assert [line.split()[3:] for line in lines if line.startswith("v0")] == [
        ["0", "RUNNING", "tm-0", "0", "0"],
        ["3", "RUNNING", "(speculative)", "tm-3", "0", "0"],
    ]
    (vertex,) = json.loads(run("info", "j", "--json", "--jobmanager", "h:1").stdout)["vertices"]
    (first,), (second,) = vertex["subtasks"], vertex["speculative_attempts"]
    assert first.keys() == second.keys()
    assert (first["attempt"], second["attempt"]) == (0, 3)


class FailedClient(FakeClient):
    """One job that failed twice, with more than the history keeps the second time."""

    def exceptions(self, job_id: str) -> client_pb2.ListExceptionsResponse:
        cause = client_pb2.FailureCause
        echo = cause(error_class="PartitionUnavailable", message="reset", vertex="v1")
        return client_pb2.ListExceptionsResponse(
            entries=[
                client_pb2.ExceptionEntry(
                    root_cause=cause(error_class="TaskManagerLost", message="tm-1 is silent"),
                    concurrent=[echo, echo],
                    concurrent_count=40,
                    restart_number=1,
                    ended_job=True,
                ),
                client_pb2.ExceptionEntry(
                    root_cause=cause(
                        error_class="TaskFailure",
                        message="map raised ValueError: no",
                        traceback="Traceback\n  job.py, line 7\n",
                        vertex="v0",
                        subtask_index=3,
                        attempt=2,
                        operator="map",
                        row="Row(a=7)",
                        taskmanager_id="tm-1",
                        timestamp_ms=1_000,
                        cause_chain=["TaskFailure", "ValueError"],
                    ),
                    labels={"type": "USER", "team": "ours"},
                    restarted=["v0/0..3", "v1/0"],
                    restart_number=1,
                    delay_ms=1_500,
                ),
            ]
        )


def test_failures_are_listed_with_what_came_of_them(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.context.Client", FailedClient)
    address = ("--jobmanager", "h:1")
    last, before = run("exceptions", "j", *address).stdout.split("\n\n")
    assert "the job ended" in last
    assert last.count("with it: PartitionUnavailable: reset (subtask v1/0, attempt 0)") == 2
    assert last.endswith("and 38 more")
    assert before.splitlines() == [
        "1970-01-01 00:00:01Z  TaskFailure: map raised ValueError: no",
        "  at: operator 'map', subtask v0/3, attempt 2, TaskManager tm-1",
        "  row: Row(a=7)",
        "  labels: team=ours, type=USER",
        "  restart 1 after 1500 ms: v0/0..3, v1/0",
        "  Traceback",
        "    job.py, line 7",
    ]
    listed = json.loads(run("exceptions", "j", "--json", *address).stdout)
    ended, restarted = listed["exceptions"]
    assert (ended["ended_job"], ended["delay_ms"], ended["concurrent_count"]) == (True, None, 40)
    assert (ended["root_cause"]["subtask_index"], restarted["delay_ms"]) == (-1, 1_500)
    words = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    names = (*listed, *ended, *ended["root_cause"])
    assert [name for name in names if name not in words] == []


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


def test_nobody_is_waited_for_longer_than_configured(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several JobManagers one may yet come to lead: by default a minute is waited for that."""
    monkeypatch.chdir(tmp_path)
    Path("penstock.yaml").write_text("client.timeout: 300ms\n")
    began = time.monotonic()
    ended = run("list", "--jobmanager", "127.0.0.1:1,127.0.0.1:2")
    assert ended.exit_code == 3
    assert "no JobManager answers at 127.0.0.1:1, 127.0.0.1:2" in ended.stderr
    with ps.Environment("127.0.0.1:1,127.0.0.1:2", config={"client.timeout": "300ms"}) as env:
        env.from_arrow(pa.table({"a": [1]})).print()
        with pytest.raises(ps.JobManagerUnreachable):
            env.execute("nowhere")
    assert 0.6 <= time.monotonic() - began < 60


@pytest.mark.parametrize(
    "option",
    [
        ["--claim"],
        ["--in-doubt", "commit"],
        ["--allow-non-restored-state"],
        ["-D", "execution.state-recovery.claim-mode=claim"],
    ],
)
def test_who_says_how_to_start_but_not_from_what_starts_nothing(
    run: Any, tmp_path: Path, option: list[str]
) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import penstock as ps\nenv = ps.Environment()\n"
        "env.from_rows([{'a': 1}]).discard()\nenv.submit()\n"
    )
    told = run("run", "--jobmanager", "127.0.0.1:1", *option, str(script))
    assert told.exit_code == 2
    assert "starts from nothing: name that with --from-savepoint" in told.stderr
    assert run("plan", str(script)).exit_code == 0
    assert run("plan", "--allow-non-restored-state", str(script)).exit_code == 2
    env = ps.Environment("127.0.0.1:1")
    env.from_rows([{"a": 1}]).discard()
    with pytest.raises(ps.errors.ConfigurationError, match=r"claim-mode=claim .*from_savepoint="):
        env.submit(claim=True)


@pytest.mark.parametrize("said", [["--from-savepoint"], ["-D"]])
@pytest.mark.parametrize("path", ["kept/one/", "~/kept/one"])
def test_a_relative_path_to_start_from_is_meant_from_here_however_it_is_said(
    run: Any, said: list[str], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(here))
    (here / "job.py").write_text(
        "import penstock as ps\nenv = ps.Environment()\n"
        "env.from_rows([{'a': 1}]).discard()\nenv.submit()\n"
    )
    value = path if said == ["--from-savepoint"] else f"execution.state-recovery.path={path}"
    told = run("plan", *said, value, "job.py")
    assert told.exit_code == 1
    assert f"{here}/kept/one is no directory that exists" in told.stderr


@pytest.mark.parametrize(
    "command", [["dispose", "--force"], ["savepoints"], ["state"], ["compact"], ["fsck"]]
)
@pytest.mark.parametrize("place", ["", " ", "s3://", "s3:/kept", "file:kept", "file:"])
def test_a_place_that_is_none_is_not_the_directory_one_is_in(
    run: Any, command: list[str], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "manifest",
        "state/1",
        "s3:/kept/manifest",
        "file:/manifest",
        "file:kept/manifest",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"1")
    before = sorted(tmp_path.rglob("*"))
    result = run(*command, place)
    assert result.exit_code == 2, result.output
    assert ("the path is empty" if not place.strip() else "names no") in result.output
    assert sorted(tmp_path.rglob("*")) == before


def test_commands_go_from_a_directory_that_is_closed_to_their_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of ``sudo -u penstock``, in the home of root; a directory that the user has named is not passed over."""
    closed, user = tmp_path / "closed", os.geteuid()
    closed.mkdir()
    (closed / "penstock.yaml").touch()
    monkeypatch.chdir(closed)
    monkeypatch.delenv("PENSTOCK_DIR", raising=False)
    monkeypatch.setenv("HOME", str(closed))
    closed.chmod(0)
    os.seteuid(user or 65534)
    try:
        assert jobmanager_addresses(None) == "127.0.0.1:6123"
        monkeypatch.setenv("PENSTOCK_DIR", str(closed))
        with pytest.raises(
            ps.errors.ConfigurationError, match=r"PENSTOCK_DIR is set, and .* looked at"
        ):
            jobmanager_addresses(None)
    finally:
        os.seteuid(user)
        closed.chmod(0o700)
