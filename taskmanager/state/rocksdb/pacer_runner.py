"""Slows down what a checkpoint does under the interpreter lock, so that the operator goes on beside it."""

from __future__ import annotations

import time
from threading import Event
from typing import Final

from common.clock import Clock
from taskmanager.state.rocksdb.pacing import pause_seconds

_PAUSE_SECONDS_MAX: Final = 0.25


class Pacer:
    """Pauses the thread that encodes values.

    Args:
        clock: tells how old a freeze is.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._worked_seconds = 0.0
        self._is_urgent = Event()

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
        now = time.thread_time()
        worked, self._worked_seconds = now - self._worked_seconds, now
        age_seconds = (self._clock.now_ms() - frozen_at_ms) / 1000
        # The first measure of a thread is of all it has ever done.
        seconds = min(pause_seconds(worked, age_seconds), _PAUSE_SECONDS_MAX)
        if seconds:
            self._is_urgent.wait(seconds)
