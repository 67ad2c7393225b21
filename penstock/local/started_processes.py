"""Processes of daemons: how they end, which ports are free, what they printed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path

_STOP_DEADLINE_S = 10.0
START_DEADLINE_S = 75.0
"""Longer than a TaskManager waits for its forkserver: why that does not come is its own last word."""

KERNEL_CACHE = {
    # Kernels that any cluster of this user has compiled serve all of them.
    "NUMBA_CACHE_DIR": str(
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "kernels"
    )
}
"""Environment of daemons on this machine; their own goes before it."""


def end_all(pids: Iterable[int]) -> None:
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
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                _has_ended(handle, 1.0)
    finally:
        for handle in handles:
            os.close(handle)


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


def tail_of(path: Path, start: int, lines: int = 15) -> str:
    """The end of a daemon's output for people: of its log lines the errors only.

    Args:
        start: where the output of this very daemon begins.
    """
    try:
        output = path.read_bytes()[start:].decode(errors="replace")
    except FileNotFoundError:
        output = ""
    told = [_plain(line) for line in output.splitlines()]
    return "\n".join([line for line in told if line][-lines:]) or f"(nothing was printed; {path})"


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
