"""What waits for the actor of one job.

Reports from TaskManagers wait at a bounded inbox, so a flood of them slows down the reporter; the
results of the actor's own effects, grants and losses never wait.
"""

from __future__ import annotations

import asyncio
from collections import deque

from jobmanager.messages import job_events

_REPORTS_MAX = 1024


class Inbox:
    """Events of one job: own ones never wait, reports wait while too many are unread."""

    def __init__(self, reports_max: int = _REPORTS_MAX) -> None:
        self._events: deque[job_events.JobEvent] = deque()
        self._reports_max = reports_max
        self._not_empty = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False
        self.dropped_events = 0
        """What came after the actor's end."""

    def __len__(self) -> int:
        return len(self._events)

    def post(self, event: job_events.JobEvent) -> None:
        """Takes an event of the actor's own; never waits."""
        if self._closed:
            self.dropped_events += 1
            return
        self._events.append(event)
        self._not_empty.set()
        if len(self._events) >= self._reports_max:
            self._room.clear()

    async def report(self, event: job_events.JobEvent) -> None:
        """Takes an event from outside; waits while there is no room for it."""
        await self._room.wait()
        self.post(event)

    def close(self) -> None:
        """Nobody reads any more: what comes is dropped, and who waits for room waits no longer."""
        self._closed = True
        self._room.set()

    async def get(self) -> job_events.JobEvent:
        """The next event."""
        await self._not_empty.wait()
        event = self._events.popleft()
        if not self._events:
            self._not_empty.clear()
        if len(self._events) < self._reports_max:
            self._room.set()
        return event
