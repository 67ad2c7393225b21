"""Processes of daemons: whether they have come up, how they end, which ports are free, what they printed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import StreamError
from penstock.loops.kept_code import user_cache
from penstock.storage.private_directories import make_private

STOP_DEADLINE_S = 10.0
_POLL_S = 0.02
START_DEADLINE_S = 75.0
"""Longer than a TaskManager waits for its forkserver: why that does not come is its own last word."""


class ClusterError(StreamError):
    """A local cluster could not be started or stopped."""


def kernel_cache() -> dict[str, str]:
    """Environment of daemons on this machine: kernels that any cluster of this user has compiled serve all of them.

    Their own environment goes before it. Empty where this user has no such directory: each daemon has one of its own then.
    """
    directory = user_cache("kernels")
    try:
        make_private(directory)
    except OSError:
        return {}
    return {"NUMBA_CACHE_DIR": str(directory)} if os.access(directory, os.W_OK | os.X_OK) else {}


@dataclass(frozen=True, slots=True)
class StartedDaemon:
    """A daemon that is being started.

    Attributes:
        output: the file that it prints to.
        output_start: where in it the output of this very daemon begins.
    """

    role: str
    id: str
    process: subprocess.Popen[bytes]
    output: Path
    output_start: int

    def check_serves_by(self, deadline: float) -> None:
        """Waits a moment for a daemon that does not serve yet.

        Raises:
            ClusterError: it has ended, or the deadline, of the monotonic clock, is over.
        """
        self.check_lives(wait_s=_POLL_S)
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the {self.role} {self.id} (pid {self.process.pid}) does not serve after"
                f" {START_DEADLINE_S:.0f} s; a first start compiles, which takes long on a busy machine: start again. It said:\n"
                f"{tail_of(self.output, self.output_start)}"
            )

    def check_lives(self, *, wait_s: float) -> None:
        """Checks that it has not ended.

        Raises:
            ClusterError: it has, or does within this time.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(timeout=wait_s)
            raise ClusterError(
                f"the {self.role} {self.id} ended with status {status} while starting:\n"
                f"{tail_of(self.output, self.output_start)}"
            )


def end_all(pids: Iterable[int]) -> list[int]:
    """Asks processes to end, and kills those that have not after the deadline; returns these."""
    handles, killed = {}, []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handles[os.pidfd_open(pid)] = pid
    try:
        for handle in handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGTERM)
        deadline = time.monotonic() + STOP_DEADLINE_S
        for handle, pid in handles.items():
            if not _has_ended(handle, max(0.0, deadline - time.monotonic())):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                _has_ended(handle, 1.0)
                killed.append(pid)
    finally:
        for handle in handles:
            os.close(handle)
    return killed


def _has_ended(handle: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def is_free(port: int) -> bool:
    """Whether a server can listen on a port of loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail_of(path: Path, start: int) -> str:
    """The end of a daemon's output for people: of its log lines the errors only.

    Args:
        start: where the output of this very daemon begins.
    """
    try:
        output = path.read_bytes()[start:].decode(errors="replace")
    except FileNotFoundError:
        output = ""
    told = [_plain(line) for line in output.splitlines()]
    return "\n".join([line for line in told if line][-15:]) or f"(nothing was printed; {path})"


def _plain(line: str) -> str:
    """A line of output; of a log entry its reason, "" where that is no error."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return line
    if not isinstance(entry, dict):
        return line
    if entry.get("level") not in ("error", "critical"):
        return ""
    return str(entry.get("reason") or entry.get("exception") or entry.get("event"))
