"""Live progress of a job for people: rows per second, watermark, last checkpoint, restarts, and what holds
it up: slots that it waits for, its last failure.

On a terminal one line is redrawn; elsewhere a line is written at every change of the job's state and
every few seconds.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock.client.job import TERMINAL_STATES
from penstock.pb import client_pb2
from penstock.printable import in_one_line

REFRESH_MS = 250
_LINE_INTERVAL_S = 2.0
_UNHEARD_S = 5.0
"""A JobManager that takes over hears of all rows within some heartbeats."""
_FAILURE_MAX_CHARS = 120
_REAL_WATERMARKS = range(-(2**62), 2**62)


class ProgressDisplay:
    """Shows each ``JobDetails`` it is called with; use as a context manager."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream, stderr=stream is None, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._last_line_at_s = 0.0
        self._begin("")

    def _begin(self, job_id: str) -> None:
        """What follows is another job's."""
        self._job_id = job_id
        self._last_rows: int | None = None
        """None = what comes next was read before: whoever leads now has not heard of it yet."""
        self._last_at_s = self._known_at_s = time.monotonic()
        self._known_rows, self._restarts = 0, 0
        self._last_state = -1
        self._rate = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def __call__(self, details: client_pb2.JobDetails) -> None:
        """Shows the newest details; the job's id first of all."""
        summary = details.summary
        if self._job_id != summary.job_id:
            self._begin(summary.job_id)
            self._last_rows = rows_read(details)
            self._console.print(
                Text(in_one_line(f"{summary.name}: job {summary.job_id}")), soft_wrap=True
            )
        line = self._line(details)
        is_new, self._last_state = (
            details.summary.state != self._last_state,
            details.summary.state,
        )
        if self._console.is_terminal:
            self._live.update(Text(line), refresh=True)
        elif is_new or time.monotonic() - self._last_line_at_s >= _LINE_INTERVAL_S:
            self._last_line_at_s = time.monotonic()
            self._console.print(Text(line), soft_wrap=True)

    def _line(self, details: client_pb2.JobDetails) -> str:
        now_s = time.monotonic()
        rows = self._known(details, now_s)
        elapsed_s = now_s - self._last_at_s
        if self._last_rows is None:
            self._last_rows, self._last_at_s = rows or None, now_s
        elif rows < self._last_rows:
            # They have begun again, or another JobManager has not heard of them yet.
            self._last_rows, self._last_at_s, self._rate = rows or None, now_s, 0.0
        elif elapsed_s >= REFRESH_MS / 2000 and rows != self._last_rows:
            self._rate = (rows - self._last_rows) / elapsed_s
            self._last_rows, self._last_at_s = rows, now_s
        state = client_pb2.JobState.Name(details.summary.state).removeprefix("JOB_STATE_")
        parts = [
            f"{details.summary.name}: {state}",
            f"{rows:,} rows read",
            f"{self._rate:,.0f} rows/s",
        ]
        watermark_ms = lowest_watermark_ms(details)
        if watermark_ms is not None:
            clock = time.gmtime(watermark_ms / 1000)
            parts.append(f"watermark {time.strftime('%Y-%m-%d %H:%M:%S', clock)}")
        if details.last_checkpoint_id:
            completed = _time_of_day(details.last_checkpoint_at_ms)
            parts.append(f"checkpoint {details.last_checkpoint_id} at {completed}")
        if details.summary.restarts:
            parts.append(f"{details.summary.restarts} restarts")
        if details.HasField("slot_wait"):
            parts.append(slot_wait_text(details.slot_wait))
        # How it ended is told in full when it has.
        if details.HasField("failure") and details.summary.state not in TERMINAL_STATES:
            parts.append(_last_failure(details.failure))
        return in_one_line("  ".join(parts))

    def _known(self, details: client_pb2.JobDetails, now_s: float) -> int:
        """Rows read; without a restart they become fewer only where another JobManager has not heard of all of them yet."""
        rows, restarts = rows_read(details), details.summary.restarts
        is_news = rows >= self._known_rows or restarts != self._restarts
        if is_news or now_s - self._known_at_s > _UNHEARD_S:
            self._known_rows, self._restarts, self._known_at_s = rows, restarts, now_s
        return self._known_rows


def _last_failure(failure: client_pb2.FailureCause) -> str:
    text = f"{failure.error_class}: {' '.join(failure.message.split())}"
    if len(text) > _FAILURE_MAX_CHARS:
        text = f"{text[: _FAILURE_MAX_CHARS - 3]}..."
    return f"last failure at {_time_of_day(failure.timestamp_ms)}: {text}"


def _time_of_day(timestamp_ms: int) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(timestamp_ms / 1000))


def slot_wait_text(wait: client_pb2.SlotWait) -> str:
    """What a job waits for, and how long already: "waits for 8 slots, 2 of 4 are free (12 s of 60 s)"."""
    drained = wait.drained_taskmanagers
    are_drained = f", {drained} {'TaskManager is' if drained == 1 else 'TaskManagers are'} drained"
    return (
        f"waits for {wait.needed} slots, {wait.free} of {wait.total} are free{are_drained if drained else ''} "
        f"({wait.waited_ms // 1000} s of {wait.timeout_ms / 1000:g} s)"
    )


def rows_read(details: client_pb2.JobDetails) -> int:
    """Rows that all sources have read."""
    return sum(
        subtask.metrics.records_in
        for vertex in details.vertices
        if vertex.is_source
        for subtask in vertex.subtasks
    )


def lowest_watermark_ms(details: client_pb2.JobDetails) -> int | None:
    """The event time that every subtask has passed, None before there is one and at the end."""
    marks = [
        subtask.metrics.watermark_ms for vertex in details.vertices for subtask in vertex.subtasks
    ]
    marks = [mark for mark in marks if mark in _REAL_WATERMARKS and mark != 0]
    return min(marks, default=None)
