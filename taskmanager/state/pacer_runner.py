"""Slows down what is done for a checkpoint, so that the operators go on beside it."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Event, get_ident, main_thread
from typing import Final

from common.clock import Clock
from taskmanager.state.pacing import FREE_SECONDS, SPAN_SECONDS_MAX, pause_seconds

_PAUSE_SECONDS_MAX: Final = 2.0
_WORK_SECONDS_MIN: Final = 0.002
"""So much is done between two pauses: waking up costs too."""
_SCHEDULED: Final = Path("/proc/self/schedstat")
"""Of the process's first thread: nanoseconds that it ran, and that it waited for a core."""


class Pacer:
    """Pauses the thread that writes a snapshot.

    Args:
        clock: tells how old a freeze is.

    Attributes:
        span_seconds: after how long there are no pauses any more.
    """

    def __init__(self, clock: Clock, span_seconds: float = SPAN_SECONDS_MAX) -> None:
        self.span_seconds = span_seconds
        self._clock = clock
        self._is_urgent = Event()
        self._thread = 0
        self._free_seconds = FREE_SECONDS
        self._began = _Measures()

    def hurry(self) -> None:
        """Somebody waits: no pauses until ``relax``."""
        self._is_urgent.set()

    def relax(self) -> None:
        """Nobody waits any more."""
        self._is_urgent.clear()

    def pause(self, frozen_at_ms: int) -> None:
        """Called now and then by the thread that works.

        Args:
            frozen_at_ms: wall-clock time of the freeze that is being written.
        """
        if get_ident() == main_thread().ident:  # nobody is beside it
            return
        if self._thread != get_ident():
            self._thread, self._free_seconds = get_ident(), FREE_SECONDS
            self._began = _Measures()
            return
        worked = time.thread_time() - self._began.worked - self._free_seconds
        if worked < _WORK_SECONDS_MIN:
            return
        self._free_seconds = 0.0
        now = _Measures()
        took = now.at - self._began.at
        wanted, others = now.wanted - self._began.wanted, now.others - self._began.others
        age_seconds = (self._clock.now_ms() - frozen_at_ms) / 1000
        seconds = pause_seconds(
            worked, wanted / took, others / took, age_seconds, self.span_seconds
        )
        self._began = now
        if seconds:
            self._is_urgent.wait(min(seconds, _PAUSE_SECONDS_MAX))


class _Measures:
    """Of the thread that asks and of its process, in seconds.

    Attributes:
        at: the time.
        worked: CPU time of this thread.
        others: CPU time of the other threads.
        wanted: for so long the first thread of the process, which processes rows in a slot, has run or waited for a core.
    """

    __slots__ = ("at", "others", "wanted", "worked")

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.worked = time.thread_time()
        self.others = time.process_time() - self.worked
        try:
            ran, waited, _ = _SCHEDULED.read_text().split()
            self.wanted = (int(ran) + int(waited)) / 1e9
        except (OSError, ValueError):  # the kernel does not tell
            self.wanted = self.others
