"""How a process ended, in the user's words."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

_TAIL_BYTES = 8192
_TAIL_LINES = 20
_CRASH_LINES = 10
_CRASH_BEGINS = "Fatal Python error"  # what faulthandler writes, the innermost call first
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """The end of a forked process.

    Attributes:
        status: exit status, minus the number of the signal, or None when it is not known.
        reason: a sentence without its full stop.
    """

    pid: int
    status: int | None
    reason: str


def describe_status(status: int) -> str:
    """ "was killed by SIGKILL" or "exited with status 3".

    Args:
        status: exit status, or minus the number of the signal.
    """
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"


def likely_cause(status: int | None, *, is_told: bool) -> str:
    """What most often ends a slot process like this, "" where nothing is to be guessed.

    Args:
        status: exit status, minus the number of the signal, or None when it is not known.
        is_told: the process has left a word on its end.
    """
    if not status:
        return ""
    if status > 0 and is_told:
        return ""
    if status > 0:
        return "did a function of the job call os._exit, or a library of it exit?"
    if -status == signal.SIGKILL:
        return "somebody killed it, or the kernel did because memory ran out"
    if -status in _CRASHES:
        return "native code that a function of the job called has crashed"
    return ""


def log_tail(log_file: Path) -> str:
    """The last lines of a log file, "" when there are none; of a crash its beginning, the culprit."""
    try:
        with log_file.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(0, size - _TAIL_BYTES))
            text = log.read(_TAIL_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return ""
    lines = text.splitlines()
    crashes = [index for index, line in enumerate(lines) if line.startswith(_CRASH_BEGINS)]
    if crashes:
        return "\n".join(lines[crashes[-1] :][:_CRASH_LINES])
    return "\n".join(lines[-_TAIL_LINES:])
