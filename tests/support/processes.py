"""Real processes in tests: started, waited for with a deadline, and checked to have left nothing.

Nothing here sleeps. What is waited for is a descriptor that becomes readable (a pidfd, a pipe, a
fifo, a change of a directory) or a call that returns.

A ``Site`` is the place one test's processes live in: every process that is started there carries
the site's mark in its environment, whatever becomes of its parent, and has its temporary files in
the site's own directory. So ``Site.assert_nothing_left`` sees what others would miss: slot processes
without a parent, sockets, directories.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from penstock.local.local_cluster import LocalCluster
from taskmanager.processes.fork_protocol import GATEWAY_NAME, PARTITION_SERVER_NAME
from tests.support.forked_daemons import MARK_VARIABLE
from tests.support.warm_command_line import warm_command_line

_COMMAND_LINE: tuple[str, ...] = ("-P", "-m", "penstock.cli.main")
DEADLINE_S = 90.0
_START_S = 90.0

_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE, _IN_DELETE_SELF = 0x2, 0x80, 0x100, 0x200, 0x400
_LIBC = ctypes.CDLL(None, use_errno=True)


# ---------------------------------------------------------------- waiting


class Deadline:
    """Time that is left; ``left()`` fails the test when there is none."""

    def __init__(self, what: str, seconds: float = DEADLINE_S) -> None:
        self._what = what
        self._seconds = seconds
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        left = self._at - time.monotonic()
        assert left > 0, f"{self._what}: not within {self._seconds:g} s"
        return left


def wait_any_readable(descriptors: Sequence[int], deadline: Deadline) -> list[int]:
    """Blocks until one of the descriptors is readable; returns those that are."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    while not (ready := poll.poll(deadline.left() * 1000)):
        deadline.left()
    return [descriptor for descriptor, _ in ready]


def wait_readable(descriptor: int, deadline: Deadline) -> None:
    """Blocks until the descriptor is readable."""
    wait_any_readable([descriptor], deadline)


def wait_ended(pid: int, seconds: float = DEADLINE_S) -> None:
    """Blocks until the process has ended; one that is gone already has."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        wait_readable(handle, Deadline(f"the end of process {pid}", seconds))
    finally:
        os.close(handle)


def wait_in_directory(
    directory: Path, condition: Callable[[], Any], what: str, seconds: float = DEADLINE_S
) -> Any:
    """Blocks until the condition holds; asked again whenever something changes in the directory.

    Returns:
        What the condition returned.
    """
    deadline = Deadline(what, seconds)
    watch = _LIBC.inotify_init1(os.O_CLOEXEC)
    assert watch >= 0
    try:
        mask = _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE
        assert _LIBC.inotify_add_watch(watch, os.fsencode(directory), mask) >= 0, directory
        while not (result := condition()):
            wait_readable(watch, deadline)
            os.read(watch, 1 << 16)
        return result
    finally:
        os.close(watch)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has just ended may still wait to be reaped."""
    with contextlib.suppress(psutil.NoSuchProcess):
        status: str = psutil.Process(pid).status()
        return status != psutil.STATUS_ZOMBIE
    return False


def wait_gone(path: Path, deadline: Deadline) -> None:
    """Blocks until there is no such file or directory."""
    watch = _LIBC.inotify_init1(os.O_CLOEXEC)
    try:
        if _LIBC.inotify_add_watch(watch, os.fsencode(path), _IN_DELETE_SELF) >= 0:
            wait_readable(watch, deadline)
    finally:
        os.close(watch)


def tell(path: str, text: object) -> None:
    """What user code calls to write a line to the beacon with this path."""
    with Path(path).open("w") as fifo:
        fifo.write(f"{text}\n")


class Beacon:
    """A fifo by which user code says that it has come somewhere: ``tell(beacon.path, text)``."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        # Open for writing, too: no end of file between two writers.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._seen = b""

    def wait(self, seconds: float = DEADLINE_S, program: Program | None = None) -> str:
        """The next line that was told.

        Args:
            program: whose end ends the waiting, too.
        """
        deadline = Deadline(f"a line in {self.path}", seconds)
        watched = [self._descriptor]
        if program is not None:
            watched.append(os.pidfd_open(program.pid))
        try:
            while b"\n" not in self._seen:
                if self._descriptor in wait_any_readable(watched, deadline):
                    self._seen += os.read(self._descriptor, 4096)
                elif program is not None:
                    raise AssertionError(f"it ended: {program.stdout}\n{program.stderr}")
        finally:
            for handle in watched[1:]:
                os.close(handle)
        line, _, self._seen = self._seen.partition(b"\n")
        return line.decode()

    def close(self) -> None:
        os.close(self._descriptor)


# ---------------------------------------------------------------- processes


@dataclass(frozen=True)
class Ended:
    """A program that has ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


class Program:
    """A program that runs, in a process group of its own; its output is kept in files."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], directory: Path, output: Path
    ) -> None:
        output.mkdir(parents=True)
        self._output = output
        with (output / "stdout").open("wb") as stdout, (output / "stderr").open("wb") as stderr:
            self.process = subprocess.Popen(
                # Whoever runs the tests in the background may have Ctrl-C ignored, which is inherited.
                ["env", "--default-signal=INT", *command],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=dict(environment),
                cwd=directory,
                start_new_session=True,
            )
        self.pid = self.process.pid

    @property
    def stdout(self) -> str:
        return (self._output / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self._output / "stderr").read_text(errors="replace")

    def send(self, number: signal.Signals) -> None:
        """A signal to the process alone."""
        os.kill(self.pid, number)

    def send_to_group(self, number: signal.Signals) -> None:
        """A signal to the whole process group, as a terminal's Ctrl-C."""
        os.killpg(self.pid, number)

    def wait_for_line(self, text: str, seconds: float = DEADLINE_S) -> None:
        """Blocks until the text was printed."""
        wait_in_directory(
            self._output,
            lambda: text in self.stdout + self.stderr or self.process.poll() is not None,
            f"{text!r} in the output",
            seconds,
        )
        assert text in self.stdout + self.stderr, self.stdout + self.stderr

    def wait(self, seconds: float = DEADLINE_S) -> Ended:
        """Blocks until it has ended."""
        wait_ended(self.pid, seconds)
        return Ended(self.process.wait(), self.stdout, self.stderr)


@dataclass(frozen=True)
class Living:
    """A process that lived when it was looked for."""

    pid: int
    parent_pid: int
    command: tuple[str, ...]


class Site:
    """Where the processes of a test live.

    Attributes:
        directory: for the test's files and clusters.
        temporary: the ``TMPDIR`` of the processes; short, so that sockets fit in it.
        environment: of the processes.
        command_line: what ``start_penstock`` and clusters run with this Python.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.command_line = _COMMAND_LINE
        self.mark = uuid.uuid4().hex
        self.temporary = Path(tempfile.mkdtemp(prefix="ps", dir="/tmp"))
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PENSTOCK_", "PYTEST_", "GRPC_"))
        }
        self.environment = {
            **kept,
            MARK_VARIABLE: self.mark,
            "TMPDIR": str(self.temporary),
            "PENSTOCK_DIR": str(directory / "default-cluster"),
            "COLUMNS": "200",
        }
        self._programs: list[Program] = []

    def start(
        self,
        *command: str,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> Program:
        """Starts a program."""
        output = self.directory / "output" / str(len(self._programs))
        program = Program(
            command,
            {**self.environment, **(environment or {})},
            directory or self.directory,
            output,
        )
        self._programs.append(program)
        return program

    def start_python(self, *arguments: str, **options: Any) -> Program:
        """Starts this Python."""
        return self.start(sys.executable, *arguments, **options)

    def start_penstock(self, *arguments: str, **options: Any) -> Program:
        """Starts the command line."""
        return self.start(sys.executable, *self.command_line, *arguments, **options)

    def penstock(self, *arguments: str, seconds: float = DEADLINE_S, **options: Any) -> Ended:
        """Runs the command line to its end."""
        return self.start_penstock(*arguments, **options).wait(seconds)

    def manage(self, *arguments: str, seconds: float = DEADLINE_S) -> Ended:
        """Runs the command line to its end, for tests that are not about how it starts."""
        if self.command_line != _COMMAND_LINE:
            return self.penstock(*arguments, seconds=seconds)
        self.directory.mkdir(parents=True, exist_ok=True)
        return Ended(
            *warm_command_line(os.getpid()).run(
                arguments, self.environment, self.directory, seconds
            )
        )

    def processes(self) -> list[Living]:
        """Every living process of the site, zombies left out."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get(MARK_VARIABLE) == self.mark:
                    found.append(Living(process.pid, process.ppid(), tuple(process.cmdline())))
        return found

    def wait_for_no_process(self, seconds: float = DEADLINE_S) -> None:
        """Blocks until no process of the site lives."""
        deadline = Deadline("the end of all processes", seconds)
        while alive := self.processes():
            told = [f"{process.pid}: {' '.join(process.command[:8])}" for process in alive]
            deadline = Deadline(f"the end of {told}", deadline.left())
            wait_ended(alive[0].pid, deadline.left())

    def assert_nothing_left(self) -> None:
        """No process lives on, no temporary file or socket is there."""
        self.wait_for_no_process()
        left = sorted(str(path) for path in self.temporary.rglob("*"))
        assert left == [], left

    def close(self) -> None:
        """Ends what a failed test has left."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self.wait_for_no_process()
        for program in self._programs:
            program.process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)


@contextmanager
def site(directory: Path) -> Iterator[Site]:
    """A site for the time of the block."""
    place = Site(directory)
    try:
        yield place
    finally:
        place.close()


# ---------------------------------------------------------------- clusters


def logged_at(entry: Mapping[str, Any]) -> float:
    """When a line of a log was written, as ``time.time()`` tells it."""
    return datetime.fromisoformat(entry["timestamp"]).timestamp()


_HELPERS = (PARTITION_SERVER_NAME, GATEWAY_NAME)
"""Processes of a TaskManager that run no user code."""


def slot_pids(taskmanager_pid: int) -> list[int]:
    """The slot processes of a TaskManager."""
    found = []
    for process in psutil.Process(taskmanager_pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            is_forkserver = process.ppid() == taskmanager_pid
            is_slot = not is_forkserver and process.name() not in _HELPERS
            if is_slot and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _pids_named(name: str, taskmanager_pid: int) -> list[int]:
    found = []
    for process in psutil.Process(taskmanager_pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a slot may end while it is looked at
            if process.name() == name:
                found.append(process.pid)
    return found


def kill_all(pids: Iterable[int]) -> None:
    """SIGKILL to each; one may be gone already, as slots whose job fails with the first of them are."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class DaemonCluster:
    """A local cluster of real daemons, started and stopped by the command line."""

    def __init__(self, place: Site, name: str = "cluster") -> None:
        self.site = place
        self.directory = place.directory / name
        self.jobmanager = ""

    def start(
        self,
        *options: str,
        taskmanagers: int = 1,
        slots: int | None = None,
        without_privileges: bool = False,
        **settings: str,
    ) -> None:
        """Starts what is missing.

        Args:
            without_privileges: root's daemons may then read and write only what its owner may.
            settings: configuration; ``heartbeat_timeout="2s"`` is ``heartbeat.timeout``.
        """
        command = ["cluster", "start", "--json", "--dir", str(self.directory)]
        command += ["--taskmanagers", str(taskmanagers), *options]
        if slots is not None:
            command += ["--slots", str(slots)]
        for key, value in settings.items():
            command += ["-D", f"{key.replace('__', '-').replace('_', '.')}={value}"]
        if not (self.directory / "penstock.yaml").exists():
            command += ["-D", "jobmanager.rpc.port=0"]
        if without_privileges and os.getuid() == 0:
            dropped = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--")
            program = (*dropped, sys.executable, *self.site.command_line)
            ended = self.site.start(*program, *command).wait(_START_S)
        else:
            ended = self.site.manage(*command, seconds=_START_S)
        assert ended.status == 0, ended.stderr
        self.jobmanager = ended.json["jobmanager"]

    def daemons(self, role: str = "") -> list[dict[str, Any]]:
        """What the registration files say, by id; one that goes meanwhile has ended."""
        found = []
        for path in sorted((self.directory / "run").glob("*.json")):
            with contextlib.suppress(FileNotFoundError):
                found.append(json.loads(path.read_text()))
        return [daemon for daemon in found if role in ("", daemon["role"])]

    def pid(self, role: str, index: int = 0) -> int:
        """Process id of a daemon."""
        return int(self.daemons(role)[index]["pid"])

    def slot_pids(self, taskmanager_pid: int) -> list[int]:
        """The slot processes of a TaskManager."""
        return slot_pids(taskmanager_pid)

    def partition_server_pids(self, taskmanager_pid: int) -> list[int]:
        """The process of a TaskManager that serves its complete partitions; [] while there is none."""
        return _pids_named(PARTITION_SERVER_NAME, taskmanager_pid)

    def gateway_pids(self, taskmanager_pid: int) -> list[int]:
        """The process of a TaskManager that speaks TLS for its slots; [] while there is none."""
        return _pids_named(GATEWAY_NAME, taskmanager_pid)

    def wait_for_no_spilled_rows(self, seconds: float = DEADLINE_S) -> None:
        """Blocks until no living TaskManager has rows of exchanges on its disk.

        What one has left that was killed, the next removes that starts.
        """
        configured = LocalCluster(self.directory).configuration().taskmanager_spill_dir
        for daemon in self.daemons("taskmanager"):
            directory = (
                Path(configured) / f"spill-{daemon['id']}"
                if configured
                else self.directory / f"taskmanager-{daemon['id']}" / "spill"
            )
            deadline = Deadline(f"the end of all rows in {directory}", seconds)
            # Not by Path.glob, which fails where a directory goes while it is looked into.
            while is_alive(daemon["pid"]) and (left := glob.glob(f"{directory}/*/*/part=*")):  # noqa: PTH207
                deadline = Deadline(f"the end of {left}", deadline.left())
                wait_gone(Path(left[0]), deadline)

    def assert_slots_ended(self) -> None:
        """No slot process of a living TaskManager lives on."""
        for daemon in self.daemons("taskmanager"):
            with contextlib.suppress(psutil.NoSuchProcess):
                for pid in self.slot_pids(daemon["pid"]):
                    wait_ended(pid)

    def wait_for_log(
        self,
        role: str,
        event: str,
        seconds: float = DEADLINE_S,
        *,
        since: float = 0,
        **fields: object,
    ) -> dict[str, Any]:
        """Blocks until a daemon of the role has logged the event with these fields.

        Args:
            since: ``time.time()`` before which it does not count.
        """
        logs = self.directory / "logs"

        def find() -> dict[str, Any] | None:
            for path in sorted(logs.glob(f"{role}-*.log")):
                # What stands behind the last end of a line is being written.
                for line in path.read_text(errors="replace").split("\n")[:-1]:
                    if f'"{event}"' not in line:
                        continue
                    entry: dict[str, Any] = json.loads(line)
                    is_same = all(entry.get(key) == value for key, value in fields.items())
                    if entry.get("event") == event and is_same and logged_at(entry) >= since:
                        return entry
            return None

        found = wait_in_directory(logs, find, f"{event} in the logs of {role}", seconds)
        assert isinstance(found, dict)
        return found

    def stop(self) -> Ended:
        """Stops all daemons."""
        ended = self.site.manage("cluster", "stop", "--json", "--dir", str(self.directory))
        assert ended.status == 0, ended.stderr
        return ended

    def assert_nothing_left(self) -> None:
        """No registration, no work directory, no socket."""
        # A second JobManager's port stays its own over stops.
        left = [path.name for path in (self.directory / "run").iterdir() if path.suffix != ".port"]
        assert left == []
        assert list(self.directory.glob("taskmanager-*")) == []
        assert [p for p in self.directory.rglob("*") if p.is_socket() or p.name == ".lock"] == []


@contextlib.contextmanager
def own_cluster(directory: Path, *options: str, **settings: Any) -> Iterator[DaemonCluster]:
    """A cluster that is started so, for the time of the block; nothing may be left of it."""
    with site(directory) as place:
        cluster = DaemonCluster(place)
        cluster.start(*options, **settings)
        yield cluster
        cluster.stop()
        cluster.assert_nothing_left()
        place.assert_nothing_left()
