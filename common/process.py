"""What a daemon is to the machine: its arguments, its registration file, its signals, its parent.

Invariants: a registration file exists only while its daemon serves (``DaemonRegistration``); a
process that called ``die_with_parent`` does not outlive its parent, whatever killed that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.client.addresses import format_address, parse_addresses
from penstock.client.protocol import EMBEDDED_MARKER, PARENT_DEATH_VARIABLE
from penstock.config import Configuration, parse_override
from penstock.errors import ConfigurationError
from penstock.local.daemon_processes import start_ticks
from penstock.storage.private_directories import make_private

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_STOP_DEADLINE_S = 5


# ---------------------------------------------------------------- arguments


@dataclass(frozen=True, slots=True)
class DaemonArguments:
    """The command line of a daemon."""

    directory: Path
    overrides: Mapping[str, str]
    jobmanagers: tuple[str, ...]
    restarts_itself: bool = False

    def load_configuration(self) -> Configuration:
        """``DIR/penstock.yaml`` with the command line's values on top.

        Raises:
            ConfigurationError: the file, a key or a value is wrong, or two values contradict each other.
        """
        file = self.directory / "penstock.yaml"
        config = Configuration.load(file, dict(self.overrides))
        try:
            config.check_for_daemons()
        except ConfigurationError as error:
            where = f"{file}, with what -D says: " if file.exists() else ""
            raise ConfigurationError(f"{where}{error}") from error
        return config

    def jobmanager_addresses(self, config: Configuration) -> tuple[str, ...]:
        """Where JobManagers are: ``--jobmanager``, else the configuration's address."""
        if self.jobmanagers:
            return self.jobmanagers
        return (format_address(config.jobmanager_rpc_address, config.jobmanager_rpc_port),)


def parse_daemon_arguments(role: str, argv: Sequence[str]) -> DaemonArguments:
    """Parses ``--dir DIR [-D key=value ...] [--jobmanager HOST:PORT[,...]] [--restart]``.

    Args:
        role: "jobmanager" or "taskmanager"; only the latter takes ``--jobmanager``, only the former ``--restart``.
        argv: the arguments after the program's name.

    Raises:
        ConfigurationError: an override or an address is malformed.
        SystemExit: wrong use (status 2) or ``--help``.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -P -m {role}",
        description=f"The {role} daemon of Penstock.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--dir",
        required=True,
        type=Path,
        help="the daemon's directory: penstock.yaml is read there, logs and run files are written",
    )
    parser.add_argument(
        "-D",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a configuration value; wins over penstock.yaml",
    )
    if role == "taskmanager":
        parser.add_argument(
            "--jobmanager",
            metavar="HOST:PORT[,HOST:PORT]",
            help="JobManagers to register with; by default jobmanager.rpc.address and .port",
        )
    else:
        parser.add_argument(
            "--restart",
            action="store_true",
            help="where its part in an election is over, execute anew and not exit for a supervisor",
        )
    parsed = parser.parse_args(argv)
    jobmanagers = getattr(parsed, "jobmanager", None)
    return DaemonArguments(
        directory=parsed.dir.resolve(),
        overrides=dict(parse_override(text) for text in parsed.overrides),
        jobmanagers=() if jobmanagers is None else parse_addresses(jobmanagers),
        restarts_itself=getattr(parsed, "restart", False),
    )


# ---------------------------------------------------------------- who may look

_OWN_DIRECTORIES = (
    "run", "logs", "logs/jobs", "jobmanager", "artifacts", "checkpoints", "local-state", "cache"
)  # fmt: skip


def keep_private(directory: Path) -> int:
    """Lets no other user into what this daemon makes, and into what one has made in its directory before.

    Args:
        directory: of the daemon. It may be there for other things too, and keeps its mode where it is.

    Returns:
        The umask as it was: what user code writes is the user's to give away.

    Raises:
        ConfigurationError: the directory is not this user's to write.
    """
    umask = os.umask(0o077)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in _OWN_DIRECTORIES:
            if (directory / name).is_dir():
                make_private(directory / name)
    except OSError as error:
        raise ConfigurationError(f"the directory {directory} cannot be written: {error}") from error
    return umask


# ---------------------------------------------------------------- registration


class DaemonRegistration:
    """The file ``DIR/run/<role>-<id>.json`` that says where a daemon serves."""

    def __init__(self, directory: Path, role: str, daemon_id: str) -> None:
        self._role = role
        self._id = daemon_id
        self.path = directory / "run" / f"{role}-{daemon_id}.json"

    def write(self, address: str, metrics_address: str) -> None:
        """Makes the file appear, complete, replacing a dead predecessor's.

        Args:
            address: host:port of the daemon's gRPC server.
            metrics_address: host:port of its Prometheus endpoint, "" when it is off.
        """
        content = {
            "role": self._role,
            "id": self._id,
            "pid": os.getpid(),
            "start_ticks": start_ticks(os.getpid()),
            "address": address,
            "metrics_address": metrics_address,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
        temporary.replace(self.path)

    def remove(self) -> None:
        """Removes the file, unless another daemon of the same id has replaced it."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        if content.get("pid") == os.getpid():
            self.path.unlink(missing_ok=True)


# ---------------------------------------------------------------- identity of the host


def host_id(advertised_host: str, socket_directory: Path) -> str:
    """Identifies the host for the choice between Unix socket and TCP.

    Two processes have the same id only when they run on the same kernel, advertise the same address
    and see the same directory for sockets: a container that shares the machine but neither its
    network nor its files is another host.

    Args:
        advertised_host: host under which others reach this process.
        socket_directory: an existing directory shared by all processes of the host.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    sockets = socket_directory.stat()
    text = f"{boot_id}|{advertised_host}|{sockets.st_dev}|{sockets.st_ino}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---------------------------------------------------------------- parents and signals


@contextlib.contextmanager
def owned_by_parent(directory: Path) -> Iterator[None]:
    """Removes an embedded cluster's directory at the end of the block, where its parent can no longer.

    Only a directory that was made for the parent is removed: one that holds the marker. Every daemon of the directory does it as the last thing in its life, so that the last one finds
    nobody who still writes there.
    """
    parent = os.getppid()
    try:
        yield
    finally:
        if os.getppid() != parent and (directory / EMBEDDED_MARKER).is_file():
            shutil.rmtree(directory, ignore_errors=True)


def die_with_parent(expected_parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel to send this process a signal when its parent ends.

    The kernel watches the *thread* that started this process: only processes with one thread, or
    whose starting thread lives as long as they do, may be such a parent. A parent that ended before
    the call is noticed, too.

    Raises:
        SystemExit: the parent is gone already.
        OSError: the kernel refuses.
    """
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, number)
    if os.getppid() != expected_parent_pid:
        raise SystemExit(1)


def adopt_orphans() -> None:
    """Asks the kernel for the descendants of this process whose parent ends: they become its children.

    That holds for this process alone, not for those it forks.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def adopts_orphans() -> bool:
    """Whether this process has called ``adopt_orphans``."""
    answer = ctypes.c_int()
    _prctl("PR_GET_CHILD_SUBREAPER", _PR_GET_CHILD_SUBREAPER, ctypes.addressof(answer))
    return answer.value != 0


def _prctl(name: str, option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    unused = ctypes.c_ulong(0)
    if libc.prctl(option, ctypes.c_ulong(argument), unused, unused, unused) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({name}): {os.strerror(error)}")


@contextlib.contextmanager
def stop_requests(environment: Mapping[str, str] | None = None) -> Iterator[asyncio.Event]:
    """An event that is set when this daemon shall end; to be used inside the running loop.

    Set by SIGTERM, by SIGINT and, where ``PENSTOCK_PARENT_DEATH=1``, by the end of the parent
    process (noticed through a pidfd, so that the daemon still cleans up; whatever thread started
    it may end). After the first request the daemon has a few seconds, then the kernel ends it; a
    second signal ends it at once.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def request() -> None:
        if stop.is_set():
            os._exit(128 + signal.SIGTERM)
        stop.set()
        signal.alarm(_STOP_DEADLINE_S)

    variables = os.environ if environment is None else environment
    watched = _open_parent(variables)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, request)
    try:
        if watched is not None:

            def parent_ended() -> None:
                loop.remove_reader(watched)
                if not stop.is_set():
                    request()

            loop.add_reader(watched, parent_ended)
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        if watched is not None:
            loop.remove_reader(watched)
            os.close(watched)
        signal.alarm(0)


def _open_parent(environment: Mapping[str, str]) -> int | None:
    """A pidfd of the parent where the daemon shall end with it, else None."""
    value = environment.get(PARENT_DEATH_VARIABLE, "")
    if value in ("", "0"):
        return None
    if value != "1":
        raise ConfigurationError(f"{PARENT_DEATH_VARIABLE}={value}: set it to 1 or leave it out")
    parent = os.getppid()
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError as error:
        raise ConfigurationError("the process that started this daemon has ended") from error
    if os.getppid() != parent:
        os.close(descriptor)
        raise ConfigurationError("the process that started this daemon has ended")
    return descriptor
