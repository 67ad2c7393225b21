"""Daemons that are forked from a process which has imported everything: a cluster starts without seconds of imports.

Each has the command line, environment, directory, descriptors and parent of one that is started as usual. The first
forkserver of a TaskManager is forked before anything else of its daemon runs, as no thread may live then; one that is
started again has the usual way. Scripts, services and containers of tests start daemons as users do.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

ROLES = ("jobmanager", "taskmanager")
MARK_VARIABLE = "PENSTOCK_TEST_SITE"
"""By which tests know their processes: among the variables that a process was started with."""
_MARK_BYTES = 32
_ROOM_FOR_COMMAND_BYTES = 4096
_DESCRIPTORS_FROM = 512
_ADOPTED_S = 60.0
_MESSAGE_MAX_BYTES = 1 << 20
_STAT_FIELDS_BEFORE_STATE = 3
_ARGUMENTS, _ENVIRONMENT = 48, 50
"""Fields of ``/proc/self/stat``: where in memory each begins; the next says where it ends."""

_KERNELS = os.environ.get("NUMBA_CACHE_DIR")

PARENT_VARIABLES = {
    MARK_VARIABLE: "-" * _MARK_BYTES,
    # Threads would not survive a fork.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
ROOM_FOR_COMMAND = "-" * _ROOM_FOR_COMMAND_BYTES
"""An argument of the process that forks daemons: their command lines stand where its own did."""


def import_all() -> None:
    """Imports what daemons and slots do, in the process that is forked."""
    from common.lasting_imports import lasting_imports

    with lasting_imports():
        for role in ROLES:
            importlib.import_module(f"{role}.main")
        from taskmanager.processes.forkserver import PRELOADED_MODULES

        for module in (*PRELOADED_MODULES, "taskmanager.task.slot_process"):
            importlib.import_module(module)
        from taskmanager.kernels import warm_up

        warm_up()


def can_be_forked(environment: Mapping[str, str]) -> bool:
    """Whether it would have imported the same: modules from nowhere else, and numba, which looks for its kernels."""
    return not environment.get("PYTHONPATH") and environment.get("NUMBA_CACHE_DIR") == _KERNELS


class ForkedDaemon(subprocess.Popen[bytes]):
    """In the place of ``subprocess.Popen``, in a process that has imported all: a child that is a daemon."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        has_threads = len(os.listdir("/proc/self/task")) > 1  # noqa: PTH208
        if has_threads or not can_be_forked(options["env"]):
            super().__init__(command, **options)
            return
        with open(os.devnull, "rb") as null:  # noqa: PTH123
            output = options["stdout"].fileno()
            kept = {0: null.fileno(), 1: output, 2: output}
            kept |= {descriptor: descriptor for descriptor in options["pass_fds"]}
            self._forked(command, fork_daemon(command, options["env"], options["cwd"], kept))

    @classmethod
    def of(cls, command: Sequence[str], pid: int) -> ForkedDaemon:
        """What stands for a child of this process that was forked elsewhere."""
        made = cls.__new__(cls)
        made._forked(command, pid)
        return made

    def _forked(self, command: Sequence[str], pid: int) -> None:
        self.args, self.pid, self.returncode = command, pid, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock = True, threading.Lock()


def in_place_of_subprocess(popen: Callable[..., Any]) -> SimpleNamespace:
    """The module ``subprocess`` with another ``Popen``."""
    return SimpleNamespace(**{**vars(subprocess), "Popen": popen})


def fork_daemon(
    command: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    descriptors: Mapping[int, int],
    parent_pid: int = 0,
) -> int:
    """Process id of a new child that becomes the daemon of a command.

    Args:
        command: Python, ``-P``, ``-m``, role and arguments.
        descriptors: number in the daemon -> number here.
        parent_pid: whose child it is to become before it does anything; 0 = this process's.
    """
    pid = os.fork()
    if pid == 0:
        _run(lambda: _serve(command, environment, directory, descriptors, parent_pid))
    return pid


def _run(what: Callable[[], object]) -> NoReturn:
    """Runs what a forked process is for and ends it as Python ends a process."""
    status: object = 1
    try:
        status = what()
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


def _serve(
    command: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    descriptors: Mapping[int, int],
    parent_pid: int,
) -> None:
    if parent_pid:
        _wait_for_the_end_of(os.getppid(), unless=parent_pid)
        assert os.getppid() == parent_pid, "nobody has adopted this daemon"
    role = command[3]
    os.setsid()
    _keep_only(descriptors)
    os.chdir(directory)
    _become(command, environment)
    if role == "taskmanager":
        _fork_forkserver()
    _forget("tests", *(other for other in ROLES if other != role))
    runpy.run_module(role, run_name="__main__", alter_sys=True)


def _wait_for_the_end_of(pid: int, *, unless: int) -> None:
    """Children of a process have another parent before its end can be seen."""
    if pid == unless:
        return
    with contextlib.suppress(ProcessLookupError):
        ended = os.pidfd_open(pid)
        select.select([ended], [], [], _ADOPTED_S)
        os.close(ended)


def _become(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """What else of a process comes from how it was started."""
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    _show(_ARGUMENTS, b"\0".join(map(os.fsencode, command)), fills=True)
    if mark := environment.get(MARK_VARIABLE, ""):
        _show(_ENVIRONMENT, f"{MARK_VARIABLE}={mark}".encode(), fills=False)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.orig_argv = [command[3], *command[4:]], list(command)
    tempfile.tempdir = None
    importlib.invalidate_caches()


def _forget(*packages: str) -> None:
    """Lets modules be as if they had not been imported."""
    for name in [name for name in sys.modules if name.split(".")[0] in packages]:
        del sys.modules[name]


def _show(field: int, text: bytes, *, fills: bool) -> None:
    """Writes over what others see of the command line or of the first variables of this process."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(stat[field - _STAT_FIELDS_BEFORE_STATE + more]) for more in (0, 1))
    if fills:
        room = end - start
        ctypes.memmove(start, text[: room - 1].ljust(room, b"\0"), room)
    else:
        name = text.partition(b"=")[0] + b"="
        ctypes.memmove(start + ctypes.string_at(start, end - start).index(name), text, len(text))


def _keep_only(descriptors: Mapping[int, int]) -> None:
    """Keeps these, by the numbers that they are to have, and closes all others."""
    copies = {
        target: fcntl.fcntl(source, fcntl.F_DUPFD, _DESCRIPTORS_FROM)
        for target, source in descriptors.items()
    }
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208
        if descriptor not in copies.values():
            with contextlib.suppress(OSError):  # the listing held its own
                os.close(descriptor)
    for target, copy in copies.items():
        os.dup2(copy, target)
        os.close(copy)


# ---------------------------------------------------------------- forkservers


def _fork_forkserver() -> None:
    """The first forkserver of this daemon is a child that waits for what it is started with."""
    from taskmanager.processes import forkserver_runner

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _run(lambda: _become_forkserver(theirs))
    theirs.close()

    def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        forkserver_runner.subprocess = subprocess  # type: ignore[attr-defined]
        told = json.dumps([list(command), options["env"], options["umask"]]).encode()
        with ours:
            socket.send_fds(ours, [told], [options["stdout"].fileno(), *options["pass_fds"]])
        return ForkedDaemon.of(command, pid)

    forkserver_runner.subprocess = in_place_of_subprocess(start)  # type: ignore[assignment,attr-defined]


def _become_forkserver(told_by: socket.socket) -> object:
    message, descriptors, _flags, _address = socket.recv_fds(told_by, _MESSAGE_MAX_BYTES, 2)
    if not message:
        return 0  # the daemon has ended before
    command, environment, umask = json.loads(message)
    log, control = descriptors
    null = os.open(os.devnull, os.O_RDONLY)
    number = int(command[command.index("--control-fd") + 1])
    told_by.detach()
    _keep_only({0: null, 1: log, 2: log, number: control})
    if umask >= 0:
        os.umask(umask)
    _become(command, environment)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        # As PYTHONUNBUFFERED has them.
        raw = io.FileIO(descriptor, "wb", closefd=False)
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True))
        setattr(sys, f"__{name}__", getattr(sys, name))
    from taskmanager.processes import forkserver

    _forget("tests", "jobmanager")
    return forkserver.main(command[4:])
