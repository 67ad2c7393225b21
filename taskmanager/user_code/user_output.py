"""Captures what user code prints, per attempt.

One slot process runs many subtasks, so ``sys.stdout`` and ``sys.stderr`` are replaced by a stream
that writes to the log of the attempt whose step is running. Writes from other threads, and outside
any step, go to the slot's own log (file descriptor 1). On an embedded cluster whole lines of attempts also go to
the terminal of the user.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TextIO

from typing_extensions import override

from taskmanager.processes.fork_child import TERMINAL_VARIABLE

_LINE_MAX = 64 * 1024


class AttemptOutput(io.TextIOBase):
    """A text stream whose destination follows the running attempt.

    Args:
        fallback: the slot's own log.
        terminal: descriptor that takes what attempts write as well, None = there is none.
    """

    def __init__(self, fallback: TextIO, terminal: int | None = None) -> None:
        self._fallback = fallback
        self._current: TextIO | None = None
        self._terminal = terminal
        self._line = ""

    def switch_to(self, log: TextIO | None) -> None:
        """From now on writes go to ``log``; None = the slot's own log."""
        self._show_rest()
        self._current = log

    @override
    def write(self, text: str, /) -> int:
        if self._terminal is not None and self._current is not None:
            self._show(text)
        return (self._current or self._fallback).write(text)

    @override
    def flush(self) -> None:
        self._show_rest()
        (self._current or self._fallback).flush()

    def _show(self, text: str) -> None:
        """Puts whole lines on the terminal, so that those of several slots do not mix."""
        lines, end, rest = (self._line + text).rpartition("\n")
        self._line = rest
        if end:
            self._write_to_terminal(lines + end)
        if len(self._line) > _LINE_MAX:
            self._show_rest()

    def _show_rest(self) -> None:
        rest, self._line = self._line, ""
        if rest:
            self._write_to_terminal(rest)

    def _write_to_terminal(self, text: str) -> None:
        data = memoryview(text.encode(errors="backslashreplace"))
        while data and self._terminal is not None:
            try:
                data = data[os.write(self._terminal, data) :]
            except OSError:
                # Whoever looked on has gone, and the log has it all.
                self._terminal = None

    @override
    def writable(self) -> bool:
        return True

    @override
    def fileno(self) -> int:
        return self._fallback.fileno()


def capture() -> AttemptOutput:
    """Replaces ``sys.stdout`` and ``sys.stderr`` of this process."""
    terminal = os.environ.get(TERMINAL_VARIABLE)
    output = AttemptOutput(sys.stdout, int(terminal) if terminal else None)
    sys.stdout = output
    sys.stderr = output
    return output


def open_log(directory: Path, vertex: str, subtask_index: int, attempt: int) -> TextIO:
    """The log of an attempt, line buffered."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{vertex}-{subtask_index}-{attempt}.log"
    return path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
