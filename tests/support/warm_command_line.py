"""The command line with everything imported: starts and stops of clusters without 0.6 CPU s of imports each.

A process that has imported it and has one thread is forked for each command, as slots are; the child has the
environment, directory and output of a process of its own, and runs in a session of its own. Tests of what the command
line does with modules, scripts, signals or terminals start it as users do (``Site.start_penstock``).
"""

from __future__ import annotations

import atexit
import contextlib
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
from typing import IO, NoReturn

_REQUEST_MAX_BYTES = 1 << 20
_ROOT = Path(__file__).resolve().parents[2]


class WarmCommandLine:
    """The process, which ends with the socket to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __spec__.name, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=_ROOT,
                # Threads would not survive a fork.
                env={**os.environ, "PYTHONPATH": str(_ROOT), "OPENBLAS_NUM_THREADS": "1"},
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
        request = [list(arguments), dict(environment), str(directory)]
        with (
            self._lock,
            tempfile.TemporaryFile(dir=directory) as stdout,
            tempfile.TemporaryFile(dir=directory) as stderr,
        ):
            self._control.settimeout(seconds)
            descriptors = [stdout.fileno(), stderr.fileno()]
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            answer = self._control.recv(64)
            assert answer, "the process of the command line has ended"
            return int(answer), _all_of(stdout), _all_of(stderr)

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


def _all_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _serve(control: socket.socket) -> None:
    from penstock.cli.main import main

    while True:
        request, output, _flags, _address = socket.recv_fds(control, _REQUEST_MAX_BYTES, 2)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            arguments, environment, directory = json.loads(request)
            _run(main, arguments, environment, directory, output)
        for descriptor in output:
            os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):
            control.send(str(os.waitstatus_to_exitcode(status)).encode())


def _run(
    main: Callable[..., object],
    arguments: list[str],
    environment: dict[str, str],
    directory: str,
    output: Sequence[int],
) -> NoReturn:
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor, target in zip(output, (1, 2), strict=True):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
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
