"""A cluster of real daemons on this machine, described by one directory.

``DIR/penstock.yaml`` holds its configuration, ``DIR/run/<role>-<id>.json`` says which daemons serve,
``DIR/logs`` holds their logs. Everything is read from there, so any process can look at a cluster
and stop it, whoever started it. Starting is idempotent: only what is missing is started.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from penstock.client import Client
from penstock.config import Configuration, read_yaml
from penstock.credentials import load_token
from penstock.errors import StreamError

DEFAULT_PORT = 6123
_START_DEADLINE_S = 60.0
_STOP_DEADLINE_S = 10.0
_POLL_S = 0.02
_KERNEL_CACHE = {
    # Kernels that any cluster of this user has compiled serve all of them.
    "NUMBA_CACHE_DIR": str(
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "kernels"
    )
}


class ClusterError(StreamError):
    """A local cluster could not be started or stopped."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """A daemon that has registered in the cluster's directory."""

    role: str
    id: str
    pid: int
    address: str
    metrics_address: str
    alive: bool


@dataclass(frozen=True, slots=True)
class _Started:
    """A daemon that is being started."""

    role: str
    id: str
    process: subprocess.Popen[bytes]


class LocalCluster:
    """The daemons of one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self._run_directory = self.directory / "run"
        self._config_file = self.directory / "penstock.yaml"
        self._children: list[subprocess.Popen[bytes]] = []

    # -- reading

    def configuration(self) -> Configuration:
        """The configuration in ``DIR/penstock.yaml``."""
        return Configuration.load(self._config_file)

    @property
    def address(self) -> str:
        """Where the JobManager is: the one that serves, else the one that is configured."""
        serving = self._alive("jobmanager")
        if serving:
            return serving[0].address
        config = self.configuration()
        return f"{config.jobmanager_rpc_address}:{config.jobmanager_rpc_port}"

    def daemons(self) -> list[Daemon]:
        """Every daemon that has registered, dead ones included."""
        found = []
        for path in sorted(self._run_directory.glob("*.json")):
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                content = json.loads(path.read_text())
                found.append(
                    Daemon(
                        role=content["role"],
                        id=content["id"],
                        pid=content["pid"],
                        address=content["address"],
                        metrics_address=content.get("metrics_address", ""),
                        alive=self._is_alive(content["pid"]),
                    )
                )
        return found

    def status(self) -> dict[str, object]:
        """The cluster as ``penstock cluster status --json`` prints it."""
        return {
            "jobmanager": self.address,
            "directory": str(self.directory),
            "daemons": [asdict(daemon) for daemon in self.daemons()],
        }

    def _is_alive(self, pid: int) -> bool:
        try:
            command_line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            return False
        return os.fsencode(self.directory) in command_line

    # -- starting

    def start(
        self,
        *,
        taskmanagers: int,
        slots: int,
        overrides: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        pass_descriptors: Sequence[int] = (),
    ) -> None:
        """Starts what is missing and returns when every TaskManager has registered.

        Raises:
            ClusterError: a daemon ended or did not serve in time; the end of its log is in the message.
        """
        self._run_directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "logs").mkdir(exist_ok=True)
        options = dict(overrides or {})
        if "jobmanager.rpc.port" not in options:
            self._choose_port()
        deadline = time.monotonic() + _START_DEADLINE_S
        spawn = functools.partial(
            self._spawn, environment=environment, descriptors=pass_descriptors
        )
        started: list[_Started] = []
        try:
            if not self._alive("jobmanager"):
                started.append(spawn("jobmanager", "jm-1", options))
                self._await_registration(started[0], deadline)
            address = self.address
            running = {daemon.id for daemon in self._alive("taskmanager")}
            for daemon_id in (f"tm-{number}" for number in range(1, taskmanagers + 1)):
                if daemon_id in running:
                    continue
                own = {"taskmanager.id": daemon_id, "taskmanager.numberOfTaskSlots": str(slots)}
                started.append(spawn("taskmanager", daemon_id, {**options, **own}, address))
            for daemon in started:
                self._await_registration(daemon, deadline)
            if started:
                self._await_taskmanagers(address, taskmanagers, started[-1], deadline)
        except BaseException:
            for daemon in started:
                daemon.process.kill()
                daemon.process.wait()
            raise

    def _alive(self, role: str) -> list[Daemon]:
        return [daemon for daemon in self.daemons() if daemon.alive and daemon.role == role]

    def _choose_port(self) -> None:
        """Keeps the configured port, else takes 6123 when free, else a free one."""
        content = read_yaml(self._config_file) if self._config_file.exists() else {}
        if "jobmanager.rpc.port" in content:
            return
        content["jobmanager.rpc.port"] = DEFAULT_PORT if _is_free(DEFAULT_PORT) else _free_port()
        temporary = self._config_file.with_suffix(".tmp")
        temporary.write_text(yaml.safe_dump(content, sort_keys=True))
        temporary.replace(self._config_file)

    def _spawn(
        self,
        role: str,
        daemon_id: str,
        options: Mapping[str, str],
        jobmanager: str = "",
        *,
        environment: Mapping[str, str] | None,
        descriptors: Sequence[int],
    ) -> _Started:
        command = [sys.executable, "-P", "-m", role, "--dir", str(self.directory)]
        for key, value in options.items():
            command += ["-D", f"{key}={value}"]
        if jobmanager:
            command += ["--jobmanager", jobmanager]
        with self._output_path(role, daemon_id).open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**_KERNEL_CACHE, **os.environ, **(environment or {})},
                pass_fds=descriptors,
                start_new_session=True,
                cwd=self.directory,
            )
        self._children.append(process)
        return _Started(role, daemon_id, process)

    def _output_path(self, role: str, daemon_id: str) -> Path:
        return self.directory / "logs" / f"{role}-{daemon_id}.out"

    def _await_registration(self, started: _Started, deadline: float) -> None:
        while not any(daemon.pid == started.process.pid for daemon in self.daemons()):
            self._check_started(started, deadline)

    def _check_started(self, started: _Started, deadline: float) -> None:
        """Waits a moment; raises when the process has ended or the deadline is over."""
        log = self._output_path(started.role, started.id)
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = started.process.wait(timeout=_POLL_S)
            raise ClusterError(
                f"the {started.role} {started.id} ended with status {status} while starting:\n"
                f"{_tail(log)}"
            )
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the {started.role} {started.id} (pid {started.process.pid}) does not serve after"
                f" {_START_DEADLINE_S:.0f} s; its log: {log}"
            )

    def _await_taskmanagers(
        self, address: str, count: int, last: _Started, deadline: float
    ) -> None:
        token = load_token(self.configuration().security_token_file)
        with contextlib.closing(Client(address, token=token)) as client:
            while len(client.cluster().taskmanagers) < count:
                self._check_started(last, deadline)

    # -- stopping

    def stop(self) -> list[Daemon]:
        """Ends every daemon, TaskManagers first; returns those that were alive."""
        alive = [daemon for daemon in self.daemons() if daemon.alive]
        for role in ("taskmanager", "jobmanager"):
            _end([daemon.pid for daemon in alive if daemon.role == role])
        for child in self._children:
            child.wait(_STOP_DEADLINE_S)
        self._children.clear()
        for daemon in self.daemons():
            if not daemon.alive:
                (self._run_directory / f"{daemon.role}-{daemon.id}.json").unlink(missing_ok=True)
        return alive


class EmbeddedCluster:
    """A cluster of child processes for one client; it ends with the client, whatever ends that."""

    def __init__(self, config: Configuration, slots: int) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="penstock-"))
        self._cluster = LocalCluster(self._directory)
        overrides = {
            **config.to_mapping(),
            "jobmanager.rpc.address": "127.0.0.1",
            "jobmanager.bind-host": "127.0.0.1",
            "jobmanager.rpc.port": "0",
            "jobmanager.metrics.port": "-1",
            "taskmanager.metrics.port": "-1",
            "taskmanager.print-to-terminal": "true",
        }
        terminal = os.dup(1)
        try:
            self._cluster.start(
                taskmanagers=1,
                slots=slots,
                overrides=overrides,
                environment={
                    "PENSTOCK_PARENT_DEATH": "1",
                    "PENSTOCK_TERMINAL_FD": str(terminal),
                },
                pass_descriptors=(terminal,),
            )
        except BaseException:
            self.close()
            raise
        finally:
            os.close(terminal)

    @property
    def address(self) -> str:
        """Where its JobManager is."""
        return self._cluster.address

    def close(self) -> None:
        """Ends the daemons and removes their directory."""
        self._cluster.stop()
        shutil.rmtree(self._directory, ignore_errors=True)


def _end(pids: Iterable[int]) -> None:
    """Asks processes to end, and kills those that have not after the deadline."""
    handles = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    try:
        for handle in handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_DEADLINE_S
        for handle in handles:
            if not _has_ended(handle, max(0.0, deadline - time.monotonic())):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                _has_ended(handle, 1.0)
    finally:
        for handle in handles:
            os.close(handle)


def _has_ended(handle: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(path: Path, lines: int = 15) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return "(no output)"
