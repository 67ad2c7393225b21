"""The command line and the daemons with everything imported: no start or stop of a cluster costs imports.

A process that has imported them and has one thread is forked for each command, as slots are; the child has the
environment, directory and output of a process of its own, and runs in a session of its own. The daemons that it starts
are forked from it. Tests of what the command line does with modules, scripts, signals or terminals start it as users do
(``Site.start_penstock``).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from tests.support import forked_daemons

_REQUEST_MAX_BYTES = 1 << 20
_FORK_S = 60.0
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_ROOT = Path(__file__).resolve().parents[2]


class WarmCommandLine:
    """The process, which ends with the socket to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-m", __spec__.name, str(theirs.fileno())]
            kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            self._process = subprocess.Popen(
                [*command, forked_daemons.ROOM_FOR_COMMAND],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=_ROOT,
                env={**kept, **forked_daemons.PARENT_VARIABLES},
                start_new_session=True,
            )

    def run(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        seconds: float,
    ) -> tuple[int, str, str]:
        """Exit status and output of a command.

        Raises:
            TimeoutError: it has not ended in time.
        """
        request = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "directory": str(directory),
        }
        with (
            tempfile.TemporaryFile(dir=directory) as stdout,
            tempfile.TemporaryFile(dir=directory) as stderr,
        ):
            status = self._ask(request, [stdout.fileno(), stderr.fileno()], seconds)
            return status, _all_of(stdout), _all_of(stderr)

    def start_daemon(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """A daemon that is a child of this process, as one that ``subprocess.Popen`` starts."""
        request = {
            "daemon": list(command),
            "environment": dict(options["env"]),
            "directory": str(options["cwd"]),
            "parent": os.getpid(),
            "passed": list(options["pass_fds"]),
        }
        with open(os.devnull, "rb") as null:  # noqa: PTH123
            output = options["stdout"].fileno()
            descriptors = [null.fileno(), output, output, *options["pass_fds"]]
            pid = self._ask(request, descriptors, _FORK_S, adopts=True)
        return forked_daemons.ForkedDaemon.of(command, pid)

    def _ask(
        self, request: object, descriptors: Sequence[int], seconds: float, *, adopts: bool = False
    ) -> int:
        with self._lock:
            self._control.settimeout(seconds)
            _adopt_orphans(adopts)
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], list(descriptors))
                answer = self._control.recv(64)
            except BaseException:  # a late answer would be taken for that of the next request
                warm_command_line.cache_clear()
                self._control.close()
                self._process.kill()
                raise
            finally:
                _adopt_orphans(False)
        assert answer, "the process of the command line has ended"
        return int(answer)

    def close(self) -> None:
        """Ends the process."""
        self._control.close()
        self._process.wait(10)


@functools.cache
def warm_command_line(owner_pid: int) -> WarmCommandLine:
    """That of a process, which ends with it."""
    made = WarmCommandLine()
    atexit.register(made.close)
    return made


def start_daemon(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """In the place of ``subprocess.Popen``: a daemon that is forked, as a child of this process."""
    if not forked_daemons.can_be_forked(options["env"]):
        return subprocess.Popen(command, **options)
    return warm_command_line(os.getpid()).start_daemon(command, **options)


def _all_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _adopt_orphans(does: bool) -> None:
    """Whether descendants of this process whose parent ends become its children."""
    assert _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, int(does), 0, 0, 0) == 0


def _serve(control: socket.socket) -> None:
    from penstock.cli.main import main

    forked_daemons.import_all()
    while True:
        request, descriptors, _flags, _address = socket.recv_fds(control, _REQUEST_MAX_BYTES, 8)
        if not request:
            return
        told = json.loads(request)
        answer = _fork_daemon(told, descriptors) if "daemon" in told else None
        if answer is None:
            pid = os.fork()
            if pid == 0:
                control.close()
                _run(main, told, descriptors)
            answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(BrokenPipeError):
            control.send(str(answer).encode())


def _fork_daemon(told: Mapping[str, Any], descriptors: Sequence[int]) -> int:
    """Process id of a daemon whose parent ends at once: whoever asks adopts it."""
    numbers = (0, 1, 2, *told["passed"])
    there, here = os.pipe()
    between = os.fork()
    if between == 0:
        pid = forked_daemons.fork_daemon(
            told["daemon"],
            told["environment"],
            told["directory"],
            dict(zip(numbers, descriptors, strict=True)),
            told["parent"],
        )
        os.write(here, str(pid).encode())
        os._exit(0)
    os.close(here)
    os.waitpid(between, 0)
    with open(there) as pid_of_daemon:  # noqa: PTH123
        return int(pid_of_daemon.read(16))


def _run(main: Callable[..., object], told: Mapping[str, Any], output: Sequence[int]) -> NoReturn:
    arguments = told["arguments"]
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor, target in zip(output, (1, 2), strict=True):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.chdir(told["directory"])
        os.environ.clear()
        os.environ.update(told["environment"])
        from penstock.local import local_cluster

        forked = forked_daemons.in_place_of_subprocess(forked_daemons.ForkedDaemon)
        local_cluster.subprocess = forked  # type: ignore[assignment,attr-defined]
        sys.argv = ["penstock", *arguments]
        main(arguments, prog_name="penstock")
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as control_socket:
        _serve(control_socket)
