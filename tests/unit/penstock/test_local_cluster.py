"""Aim: a local cluster touches nothing that is not its own, whatever pids and variables say.

Method: registrations, locks and markers made by hand; processes that only look like daemons.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from common.process import owned_by_parent
from penstock.cli import cluster as cluster_commands
from penstock.cli.main import main
from penstock.client.protocol import EMBEDDED_MARKER, PARENT_DEATH_VARIABLE, PROTOCOL_VERSION
from penstock.config import Configuration
from penstock.errors import ConfigurationError
from penstock.local import local_cluster, started_processes
from penstock.local.daemon_processes import start_ticks
from penstock.local.embedded_cluster import EmbeddedCluster
from penstock.local.local_cluster import LocalCluster
from penstock.local.owned_directories import OwnedDirectory, create_runtime_directory
from penstock.local.started_processes import ClusterError
from penstock.pb import client_pb2, client_pb2_grpc
from tests.support.thread_server import grpc_server

DEAD_PID = 1 << 30
"""Larger than any pid."""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory with a short path, set up after pytest's own."""
    with tempfile.TemporaryDirectory(prefix="pst-", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@contextmanager
def process(*arguments: str) -> Iterator[int]:
    """A process with these arguments that lives until the end of the block."""
    command = [sys.executable, "-c", "print(flush=True); input()", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as running:
        assert running.stdout is not None
        running.stdout.readline()
        yield running.pid
        running.kill()


def register(directory: Path, role: str, daemon_id: str, pid: int) -> Path:
    path = directory / "run" / f"{role}-{daemon_id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"role": role, "id": daemon_id, "pid": pid, "address": "h:1"}))
    return path


def test_values_that_contradict_each_other_are_not_kept(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "cluster")
    with pytest.raises(ConfigurationError, match="max-backoff"):
        cluster.configure({"restart-strategy.exponential-delay.max-backoff": "1ms"})
    assert not cluster.directory.exists()


def test_what_lies_beside_the_configuration_stays(tmp_path: Path) -> None:
    other, link = tmp_path / "other", tmp_path / "penstock.tmp"
    link.symlink_to(other)
    LocalCluster(tmp_path).configure({"taskmanager.numberOfTaskSlots": 2})
    assert (link.is_symlink(), other.exists()) == (True, False)
    assert {file.name for file in tmp_path.iterdir()} == {"penstock.tmp", "penstock.yaml"}


def test_only_the_daemon_itself_counts_as_alive(tmp_path: Path) -> None:
    cluster, where = LocalCluster(tmp_path), str(tmp_path)
    for arguments, alive in (
        (["-m", "taskmanager", "--dir", where], True),
        (["-P", "-m", "taskmanager", "--dir", where, "-D", "a=b"], True),
        (["-m", "jobmanager", "--dir", where], False),
        (["-m", "taskmanager", "--dir", where + "x"], False),
        (["ls", where], False),
        (["--dir", where], False),
        (["-m", "--dir", "taskmanager", where], False),
    ):
        with process(*arguments) as pid:
            register(tmp_path, "taskmanager", "tm-1", pid)
            (daemon,) = cluster.daemons()
            assert daemon.alive is alive, arguments
    register(tmp_path, "taskmanager", "tm-1", DEAD_PID)
    assert not cluster.daemons()[0].alive


@pytest.mark.parametrize("spelling", ["link", "real/../link/.", "real/", "real/inner/.."])
@pytest.mark.parametrize("started_as", ["link", "real", "real/inner/../../link"])
def test_a_directory_is_one_cluster_whatever_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str, started_as: str
) -> None:
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    # A relative one too: it counts from where the daemon was started.
    for directory in (started_as, str(tmp_path / started_as)):
        with process("-m", "taskmanager", "--dir", directory) as pid:
            record = register(tmp_path / "real", "taskmanager", "tm-1", pid)
            cluster = LocalCluster(Path(spelling))
            assert cluster.directory == tmp_path / "real"
            assert [daemon.alive for daemon in cluster.daemons()] == [True]
            cluster._remove_traces_of_dead()
            assert record.exists()


def test_a_daemon_is_known_by_when_it_began(tmp_path: Path) -> None:
    with process("-m", "taskmanager", "--dir", str(tmp_path / "renamed since")) as pid:
        record = register(tmp_path, "taskmanager", "tm-1", pid)
        content = json.loads(record.read_text())
        for ticks, alive in ((start_ticks(pid), True), ((start_ticks(pid) or 0) - 1, False)):
            record.write_text(json.dumps({**content, "start_ticks": ticks}))
            assert LocalCluster(tmp_path).daemons()[0].alive is alive
    assert start_ticks(DEAD_PID) is None


def test_stop_removes_what_dead_daemons_left_and_nothing_else(
    tmp_path: Path, temporary: Path
) -> None:
    stale = register(tmp_path, "taskmanager", "tm-1", os.getpid())  # the pid is another's by now
    living = create_runtime_directory(f"{os.getpid()}-living")
    dead = create_runtime_directory("4711-dead")
    work = OwnedDirectory.create(tmp_path / "taskmanager-tm-1")
    for left in (dead, work):
        os.close(left._lock)
    assert LocalCluster(tmp_path).stop() == []
    assert not stale.exists()
    assert (dead.path.exists(), work.path.exists()) == (False, False)
    assert living.path.exists()
    assert living.path.parent == temporary
    living.remove()


def test_a_daemon_that_does_not_end_is_killed_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(started_processes, "STOP_DEADLINE_S", 0.2)
    where = str(tmp_path)
    with (
        process("-m", "jobmanager", "--dir", where) as obedient,
        process("-m", "taskmanager", "--dir", where) as stuck,
    ):
        register(tmp_path, "jobmanager", "1", obedient)
        register(tmp_path, "taskmanager", "tm-1", stuck)
        os.kill(stuck, signal.SIGSTOP)
        ended = CliRunner().invoke(main, ["cluster", "stop", "--dir", where])
    assert ended.exit_code == 0
    assert ended.stdout == f"stopped 2 daemons in {where}\n"
    (told,) = ended.stderr.splitlines()
    assert told.startswith(f"penstock: the taskmanager tm-1 (pid {stuck}) had not ended after")


def test_a_daemon_is_ended_though_nothing_in_the_directory_tells_of_it(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        cluster._children.append(child)
        assert cluster.stop() == []
        assert child.returncode == -signal.SIGTERM


class Leader(client_pb2_grpc.JobManagerServicer):
    """Has three jobs, one of which has ended."""

    def Hello(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        return client_pb2.HelloResponse(protocol_version=PROTOCOL_VERSION)

    def ListJobs(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        ended = client_pb2.JobSummary(job_id="c", ended_at_ms=1)
        running = [client_pb2.JobSummary(job_id=name) for name in "ab"]
        return client_pb2.ListJobsResponse(jobs=[*running, ended])

    def GetJob(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        name, state = f"job {request.job_id}", client_pb2.JOB_STATE_RUNNING
        checkpoint_id = 7 if request.job_id == "b" else 0
        return client_pb2.JobDetails(
            summary=client_pb2.JobSummary(job_id=request.job_id, name=name, state=state),
            last_checkpoint_id=checkpoint_id,
            last_checkpoint_at_ms=1_000 * checkpoint_id,
        )


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_stop_says_what_becomes_of_the_jobs_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_frozen: bool
) -> None:
    monkeypatch.setattr(cluster_commands, "_ASK_TIMEOUT_S", 0.2 if is_frozen else 10.0)
    where = str(tmp_path)
    silent = socket.create_server(("127.0.0.1", 0))  # takes connections, and says nothing

    def add(server: grpc.Server) -> None:
        client_pb2_grpc.add_JobManagerServicer_to_server(Leader(), server)

    with silent, grpc_server(add) as address, process("-m", "jobmanager", "--dir", where) as pid:
        record = register(tmp_path, "jobmanager", "1", pid)
        told = f"127.0.0.1:{silent.getsockname()[1]}" if is_frozen else address
        record.write_text(json.dumps({**json.loads(record.read_text()), "address": told}))
        ended = CliRunner().invoke(main, ["cluster", "stop", "--dir", where])
    assert ended.exit_code == 0
    jobs = [
        "job job a (a) was RUNNING and had completed no checkpoint: what it has done is lost",
        "job job b (b) was RUNNING: it goes on from checkpoint 7, 1970-01-01 00:00:07Z, when the cluster is started again",
    ]
    assert ended.stdout.splitlines() == [
        *([] if is_frozen else jobs),
        f"stopped 1 daemons in {where}",
    ]


class Spawned:
    """What ``subprocess.Popen`` was asked for; the process ends at once."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self.command, self.env = command, options["env"]
        terminal = self.env.get("PENSTOCK_TERMINAL_FD")
        self.prints_to = (
            "" if terminal is None else str(Path(f"/proc/self/fd/{terminal}").readlink())
        )
        os.write(options["stdout"].fileno(), f"words of {command[3]}\n".encode())
        self.pid, self.returncode = DEAD_PID, 3

    def wait(self, timeout: float | None = None) -> int:
        return self.returncode

    def poll(self) -> int:
        return self.returncode


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[Spawned]:
    found: list[Spawned] = []

    def popen(command: list[str], **options: Any) -> Spawned:
        found.append(Spawned(command, **options))
        return found[-1]

    monkeypatch.setattr(local_cluster.subprocess, "Popen", popen)
    return found


def test_daemons_do_not_inherit_what_was_meant_for_another(
    tmp_path: Path, spawned: list[Spawned], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PARENT_DEATH_VARIABLE, "1")
    with pytest.raises(ClusterError):
        LocalCluster(tmp_path).start(taskmanagers=1)
    with pytest.raises(ClusterError):
        EmbeddedCluster(Configuration(), 1)
    assert [PARENT_DEATH_VARIABLE in one.env for one in spawned] == [False, True]


def test_a_start_forgets_the_dead_and_keeps_what_they_said(
    tmp_path: Path, spawned: list[Spawned]
) -> None:
    stale = register(tmp_path, "jobmanager", "1", DEAD_PID)
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "jobmanager-1.out"
    log.write_text("words of an earlier one\n")
    with pytest.raises(ClusterError, match="status 3") as raised:
        LocalCluster(tmp_path).start(taskmanagers=1)
    assert not stale.exists()
    assert log.read_text() == "words of an earlier one\nwords of jobmanager\n"
    assert "words of jobmanager" in str(raised.value)
    assert "earlier" not in str(raised.value)


def test_what_does_not_serve_in_time_is_quoted(
    spawned: list[Spawned], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory of an embedded cluster, logs included, goes with the error."""

    def wait(self: Spawned, timeout: float | None = None) -> int:
        if timeout is not None and timeout < 1:  # as it is asked for while it starts
            raise subprocess.TimeoutExpired("daemon", timeout)
        return self.returncode

    monkeypatch.setattr(Spawned, "wait", wait)
    monkeypatch.setattr(local_cluster, "START_DEADLINE_S", 0.0)
    with pytest.raises(ClusterError, match=r"does not serve after .*start again(?s:.*)words of"):
        EmbeddedCluster(Configuration(), 1)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("stdout", ["closed", "closed later"])
def test_an_embedded_cluster_needs_no_stdout(
    spawned: list[Spawned], temporary: Path, monkeypatch: pytest.MonkeyPatch, stdout: str
) -> None:
    def dup(descriptor: int) -> int:
        raise OSError(9, "Bad file descriptor")

    if stdout == "closed":
        monkeypatch.setattr(sys, "__stdout__", None)
    else:
        monkeypatch.setattr(os, "dup", dup)
    with pytest.raises(ClusterError, match="status 3"):
        EmbeddedCluster(Configuration(), 1)
    assert [one.prints_to for one in spawned] == [os.devnull]
    assert list(temporary.iterdir()) == []


def test_only_a_directory_made_for_the_parent_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = iter([1, 1, 1, 2, 1, 2])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    for has_marker, is_left in ((True, True), (False, True), (True, False)):
        directory = tmp_path / str(has_marker)
        directory.mkdir(exist_ok=True)
        if has_marker:
            (directory / EMBEDDED_MARKER).touch()
        with owned_by_parent(directory):
            pass
        assert directory.exists() is is_left


def test_a_user_whose_cache_cannot_be_written_starts_clusters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each daemon keeps kernels of its own then; ``cluster start`` said that the cluster's directory cannot be written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = tmp_path / "penstock" / "kernels"
    assert started_processes.kernel_cache() == {"NUMBA_CACHE_DIR": str(kept)}
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert started_processes.kernel_cache() == {}
