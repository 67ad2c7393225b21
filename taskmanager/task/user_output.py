"""Captures what user code prints, per attempt.

One slot process runs many subtasks, so ``sys.stdout`` and ``sys.stderr`` are replaced by a stream
that writes to the log of the attempt whose step is running. Writes from other threads, and outside
any step, go to the slot's own log (file descriptor 1).
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TextIO

from typing_extensions import override


class AttemptOutput(io.TextIOBase):
    """A text stream whose destination follows the running attempt."""

    def __init__(self, fallback: TextIO) -> None:
        self._fallback = fallback
        self._current: TextIO | None = None

    def switch_to(self, log: TextIO | None) -> None:
        """From now on writes go to ``log``; None = the slot's own log."""
        self._current = log

    @override
    def write(self, text: str, /) -> int:
        return (self._current or self._fallback).write(text)

    @override
    def flush(self) -> None:
        (self._current or self._fallback).flush()

    @override
    def writable(self) -> bool:
        return True

    @override
    def fileno(self) -> int:
        return self._fallback.fileno()


def capture() -> AttemptOutput:
    """Replaces ``sys.stdout`` and ``sys.stderr`` of this process."""
    output = AttemptOutput(sys.stdout)
    sys.stdout = output
    sys.stderr = output
    return output


def open_log(directory: Path, vertex: str, subtask_index: int, attempt: int) -> TextIO:
    """The log of an attempt, line buffered."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{vertex}-{subtask_index}-{attempt}.log"
    return path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
