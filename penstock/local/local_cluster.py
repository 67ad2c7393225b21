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
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from pathlib import Path

import yaml

from penstock.client.addresses import format_address
from penstock.client.client import Client
from penstock.client.client_tls import ClientTls
from penstock.client.credentials import load_token, own_token_file
from penstock.client.protocol import PARENT_DEATH_VARIABLE
from penstock.config import SECRET_KEYS, Configuration, read_yaml
from penstock.errors import JobManagerUnreachable
from penstock.functions.user_code import OWN_PACKAGES
from penstock.local.daemon_processes import is_registered_daemon
from penstock.local.owned_directories import sweep_runtime_directories, sweep_work_directories
from penstock.local.started_processes import (
    START_DEADLINE_S,
    ClusterError,
    StartedDaemon,
    end_all,
    free_port,
    is_free,
    kernel_cache,
)
from penstock.storage.private_directories import make_private, replace_text

DEFAULT_PORT = 6123
_PORT_KEY = "jobmanager.rpc.port"
_CHECKPOINTS_KEY = "execution.checkpointing.dir"
_STORAGE_KEY = "high-availability.storageDir"
_SECURITY = "security."


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
class StoppedDaemon:
    """One that was alive.

    Attributes:
        was_killed: it had not ended by itself in time.
    """

    role: str
    id: str
    pid: int
    was_killed: bool


class LocalCluster:
    """The daemons of one directory, whatever it is called: links and spellings lead to the same cluster."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self._run_directory = self.directory / "run"
        self._config_file = self.directory / "penstock.yaml"
        self._children: list[subprocess.Popen[bytes]] = []
        self._security: dict[str, str] = {}

    # -- reading

    def configuration(self) -> Configuration:
        """The configuration in ``DIR/penstock.yaml``."""
        return Configuration.load(self._config_file)

    @property
    def address(self) -> str:
        """Of JobManagers that serve or stand by, then of dead ones that may be elected again; else as it is configured."""
        config, found = self.configuration(), [one.address for one in self._alive("jobmanager")]
        ports = [config.jobmanager_rpc_port]
        if config.high_availability_type != "none":
            found += [one.address for one in self.daemons() if one.role == "jobmanager"]
            ports += map(int, map(Path.read_text, sorted(self._run_directory.glob("*.port"))))
        if not found or len(ports) > 1:
            host = config.jobmanager_rpc_address
            found += [format_address(host, port) for port in ports if port or not found]
        return ",".join(dict.fromkeys(found))

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
                        alive=is_registered_daemon(
                            content["role"],
                            content["pid"],
                            content.get("start_ticks"),
                            self.directory,
                        ),
                    )
                )
        return found

    def status(self) -> dict[str, object]:
        """The cluster as ``penstock cluster status --json`` prints it."""
        daemons = self.daemons()
        leader, held = self._told_by_leader(daemons)
        return {
            "jobmanager": self.address,
            "leader": leader,
            "directory": str(self.directory),
            "daemons": [
                {**asdict(daemon), "held_partitions": held.get((daemon.role, daemon.id))}
                for daemon in daemons
            ],
        }

    def _told_by_leader(self, daemons: Sequence[Daemon]) -> tuple[str, dict[tuple[str, str], int]]:
        """Who leads, and role and id of a TaskManager -> complete partitions on its disk; nothing where nobody tells."""
        if any(daemon.role == "jobmanager" and daemon.alive for daemon in daemons):
            with contextlib.suppress(JobManagerUnreachable), self.client() as client:
                shown = client.cluster().taskmanagers
                held = {("taskmanager", one.taskmanager_id): one.held_partitions for one in shown}
                return client.leader, held
        return "", {}

    def slots(self) -> dict[str, int]:
        """The TaskManagers that have registered with the JobManager, and how many slots they have.

        Raises:
            JobManagerUnreachable: it does not serve.
        """
        with self.client() as client:
            return {one.taskmanager_id: one.slots_total for one in client.cluster().taskmanagers}

    def client(self, **timeouts_s: float) -> Client:
        """A client that has the cluster's token.

        Args:
            timeouts_s: as of ``Client``.

        Raises:
            ConfigurationError: the token's file cannot be used.
        """
        config = self.configuration().merged(self._security)
        token = load_token(config.security_token_file)
        own = own_token_file(self.directory)
        if not token and own.exists():
            token = load_token(str(own))
        return Client(self.address, token or None, tls=ClientTls.of(config), **timeouts_s)

    # -- starting

    def configure(self, values: Mapping[str, object]) -> None:
        """Keeps these values in ``DIR/penstock.yaml``, for every daemon that is started from now on.

        The JobManager's port is chosen where it is not given: 6123 when free, else a free one.

        Raises:
            ConfigurationError: a key or a value is wrong, or two values contradict each other.
            ClusterError: the file cannot be written, or the JobManager runs on another port.
        """
        before = read_yaml(self._config_file)
        Configuration.check_file(
            self._config_file, {key: value for key, value in before.items() if key not in values}
        )
        content = {**before, **values}
        if content.get("high-availability.type", "none") != "none":
            content.setdefault(_STORAGE_KEY, str(self.directory / "shared"))
        config = Configuration.from_mapping(content)
        config.check_for_daemons()
        # Others have ports of their own.
        running = [one for one in self._alive("jobmanager") if one.id == config.jobmanager_id]
        port = config.jobmanager_rpc_port
        if running:
            used = int(running[0].address.rpartition(":")[2])
            if _PORT_KEY in values and port not in (0, used):
                raise ClusterError(
                    f"the JobManager in {self.directory} runs on port {used}: stop the cluster to move "
                    f"it to port {port}"
                )
            port = used
        elif _PORT_KEY not in content:
            port = DEFAULT_PORT if is_free(DEFAULT_PORT) else 0
        content[_PORT_KEY] = port or free_port()
        if content == before:
            return
        with _told_where(self.directory):
            _make_directory(self.directory)
            mode = 0o600 if SECRET_KEYS.keys() & content else 0o666
            replace_text(self._config_file, yaml.safe_dump(content, sort_keys=True), mode)

    def start(
        self,
        *,
        taskmanagers: int,
        jobmanagers: int = 1,
        slots: int | None = None,
        overrides: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        pass_descriptors: Sequence[int] = (),
    ) -> None:
        """Starts what is missing and returns when every TaskManager has registered.

        Args:
            taskmanagers: how many there shall be; those that have died are replaced besides.
            jobmanagers: likewise; more than one need ``high-availability.type: zookeeper``.
            slots: of each; None = as configured.
            overrides: configuration of the daemons that are started now.
            environment: further variables of theirs.
            pass_descriptors: descriptors they inherit.

        Raises:
            ClusterError: a daemon ended or did not serve in time; the end of its log is in the message.
        """
        given = {**os.environ, **(environment or {})}.get("PYTHONPATH", "")
        if given:
            environment = {**(environment or {}), "PYTHONPATH": _python_path(given)}
        with _told_where(self.directory):
            _make_directory(self.directory)
            make_private(self._run_directory)
            make_private(self.directory / "logs")
        options = dict(overrides or {})
        self._security = {key: options[key] for key in options if key.startswith(_SECURITY)}
        if slots is not None:
            options["taskmanager.numberOfTaskSlots"] = str(slots)
        if _PORT_KEY not in options:
            self.configure({})
        if not self.configuration().execution_checkpointing_dir:
            options.setdefault(_CHECKPOINTS_KEY, str(self.directory / "checkpoints"))
        self._check_jobmanagers(jobmanagers, options)
        deadline = time.monotonic() + START_DEADLINE_S
        spawn = functools.partial(
            self._spawn, environment=environment, descriptors=pass_descriptors
        )
        started: list[StartedDaemon] = []
        try:
            started.extend(self._start_jobmanagers(jobmanagers, options, spawn, deadline))
            started.extend(self._start_taskmanagers(taskmanagers, options, spawn))
            for daemon in started:
                self._await_registration(daemon, deadline)
            if started:
                self._await_taskmanagers(started, deadline)
        except BaseException:
            end_all(one.process.pid for one in reversed(started) if one.process.poll() is None)
            for one in started:
                one.process.wait()
            self._remove_traces_of_dead()
            raise

    def _start_jobmanagers(
        self,
        count: int,
        options: Mapping[str, str],
        spawn: Callable[..., StartedDaemon],
        deadline: float,
    ) -> Iterator[StartedDaemon]:
        """One after the other: the first makes what the others find."""
        known = {daemon.id: daemon for daemon in self.daemons() if daemon.role == "jobmanager"}
        for number in range(1, count + 1):
            before = known.get(str(number))
            if before is not None and before.alive:
                continue
            own = {} if count == 1 else {"jobmanager.id": str(number)}
            if number > 1:
                own[_PORT_KEY] = str(self._port_of(number))
            started = spawn("jobmanager", str(number), {**options, **own})
            yield started
            self._await_registration(started, deadline)

    def _port_of(self, number: int) -> int:
        """The port of a further JobManager, by which TaskManagers know it however often it is started."""
        file = self._run_directory / f"jobmanager-{number}.port"
        port = int(file.read_text()) if file.exists() else 0
        if not port or not is_free(port):
            port = free_port()
            new = file.with_suffix(".new")  # whoever looks for addresses reads all of it or nothing
            new.write_text(str(port))
            new.replace(file)
        return port

    def _start_taskmanagers(
        self, count: int, options: Mapping[str, str], spawn: Callable[..., StartedDaemon]
    ) -> Iterator[StartedDaemon]:
        """All at once."""
        address = self.address
        running = {daemon.id for daemon in self._alive("taskmanager")}
        wanted = {f"tm-{number}" for number in range(1, count + 1)}
        wanted |= {daemon.id for daemon in self.daemons() if daemon.role == "taskmanager"}
        for daemon_id in sorted(wanted - running):
            own = {"taskmanager.id": daemon_id}
            yield spawn("taskmanager", daemon_id, {**options, **own}, address)

    def _check_jobmanagers(self, count: int, options: Mapping[str, str]) -> None:
        config = Configuration.load(self._config_file, dict(options))
        config.check_for_daemons()
        if count > 1 and config.high_availability_type == "none":
            raise ClusterError(
                f"{count} JobManagers need an election: give -D high-availability.type=zookeeper and "
                "-D high-availability.zookeeper.quorum=HOST:PORT"
            )

    def _alive(self, role: str) -> list[Daemon]:
        return [daemon for daemon in self.daemons() if daemon.alive and daemon.role == role]

    def _spawn(
        self,
        role: str,
        daemon_id: str,
        options: Mapping[str, str],
        jobmanager: str = "",
        *,
        environment: Mapping[str, str] | None,
        descriptors: Sequence[int],
    ) -> StartedDaemon:
        command = [sys.executable, "-P", "-m", role, "--dir", str(self.directory)]
        own = {name: value for name, value in os.environ.items() if name != PARENT_DEATH_VARIABLE}
        for key, value in options.items():
            if key in SECRET_KEYS:
                own[SECRET_KEYS[key]] = value  # every user of the machine sees command lines
            else:
                command += ["-D", f"{key}={value}"]
        if jobmanager:
            command += ["--jobmanager", jobmanager]
        elif "jobmanager.id" in options:
            command += ["--restart"]
        self._forget_dead(role, daemon_id)
        printed = self.directory / "logs" / f"{role}-{daemon_id}.out"
        with printed.open("ab") as output:
            output_start = output.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**kernel_cache(), **own, **(environment or {})},
                pass_fds=descriptors,
                start_new_session=True,
                cwd=self.directory,
            )
        self._children.append(process)
        return StartedDaemon(role, daemon_id, process, printed, output_start)

    def _forget_dead(self, role: str, daemon_id: str) -> None:
        """Removes a predecessor's registration: its pid may become the successor's."""
        for daemon in self.daemons():
            is_namesake = daemon.role == role and daemon.id == daemon_id
            if is_namesake and not daemon.alive:
                self._registration(daemon).unlink(missing_ok=True)

    def _registration(self, daemon: Daemon) -> Path:
        return self._run_directory / f"{daemon.role}-{daemon.id}.json"

    def _await_registration(self, started: StartedDaemon, deadline: float) -> None:
        while not any(daemon.pid == started.process.pid for daemon in self.daemons()):
            started.check_serves_by(deadline)

    def _await_taskmanagers(self, started: Sequence[StartedDaemon], deadline: float) -> None:
        """Returns when every living TaskManager has registered with the JobManager, and all that were started live.

        Those that ran before register again after a new JobManager has come.
        """
        with self.client() as client:
            while True:
                # By process, since the JobManager may still count on one that has just died.
                registered = {known.pid for known in client.cluster().taskmanagers}
                wanted = {daemon.pid for daemon in self._alive("taskmanager")}
                # One that was refused is not alive any more.
                wanted |= {one.process.pid for one in started if one.role == "taskmanager"}
                waits_for = [one for one in started if one.process.pid not in registered]
                if wanted <= registered:
                    for one in started:
                        one.check_lives(wait_s=0)
                    return
                for one in waits_for or started:
                    one.check_serves_by(deadline)

    # -- stopping

    def stop(self) -> list[StoppedDaemon]:
        """Ends every daemon; returns those that were alive.

        The JobManager first: it leaves its jobs to its successor before they lose their TaskManagers.

        Raises:
            ClusterError: a daemon did not end, or is another user's; what it has registered stays.
        """
        alive = [daemon for daemon in self.daemons() if daemon.alive]
        killed: list[int] = []
        for role in ("jobmanager", "taskmanager"):
            try:
                killed += end_all([daemon.pid for daemon in alive if daemon.role == role])
            except PermissionError as error:
                raise ClusterError(
                    f"the {role} in {self.directory} belongs to another user: stop it as that user"
                ) from error
        # Also those that nothing in the directory tells of any more.
        end_all([child.pid for child in self._children if child.poll() is None])
        self._children = [child for child in self._children if child.poll() is None]
        self._remove_traces_of_dead()
        left = {
            daemon.pid: f"{daemon.role} {daemon.id} (pid {daemon.pid})"
            for daemon in self.daemons()
            if daemon.alive and daemon in alive
        }
        for child in self._children:
            left.setdefault(child.pid, f"a daemon (pid {child.pid})")
        if left:
            told = ", ".join(left.values())
            raise ClusterError(f"not even SIGKILL has ended {told} in {self.directory}: look at it")
        return [
            StoppedDaemon(daemon.role, daemon.id, daemon.pid, daemon.pid in killed)
            for daemon in alive
        ]

    def _remove_traces_of_dead(self) -> None:
        """Removes what daemons that were killed could not remove themselves."""
        for daemon in self.daemons():
            if not daemon.alive:
                self._registration(daemon).unlink(missing_ok=True)
        sweep_runtime_directories()
        sweep_work_directories(self.directory)


def _python_path(given: str) -> str:
    """``PYTHONPATH`` for daemons: where a directory has modules called as ours are, ours come first.

    Slots give the user's modules their names back (``penstock.client.own_modules``).

    Raises:
        ClusterError: one has a module called ``penstock``, which jobs import, or such a package without
            ``__init__``, which would lose to ours in slots.
    """
    ours = Path(__file__).resolve().parents[2]
    for directory in filter(None, given.split(os.pathsep)):
        if Path(directory).resolve() == ours:
            return given
        found = {name: PathFinder.find_spec(name, [directory]) for name in sorted(OWN_PACKAGES)}
        names = [name for name, spec in found.items() if spec is not None]
        without_init = [name for name in names if getattr(found[name], "loader", None) is None]
        if "penstock" in names or without_init:
            name, remedy = "penstock", "rename it"
            if "penstock" not in names:
                name, remedy = without_init[0], "give it an __init__.py, or rename it"
            raise ClusterError(
                f"PYTHONPATH names {directory}, which has a module {name!r}, as Penstock itself has; {remedy}, or "
                "start the cluster with another PYTHONPATH"
            )
        if names:
            return f"{ours}{os.pathsep}{given}"
    return given


def _make_directory(directory: Path) -> None:
    """Private where it is made; one that is there may hold other things, and stays as it is."""
    if not directory.is_dir():
        make_private(directory)


@contextlib.contextmanager
def _told_where(directory: Path) -> Iterator[None]:
    """Turns an error of the file system into one that names the cluster's directory."""
    try:
        yield
    except OSError as error:
        raise ClusterError(
            f"the cluster's directory {directory} cannot be written: {error}; choose another with "
            "--dir or $PENSTOCK_DIR"
        ) from error
