"""Events for the JobManager, in order, until it has acknowledged them (pure).

Invariants: events leave in the order they came; one is dropped only when it was acknowledged, or
when the JobManager it was meant for is given up; never more than ``events_max`` are kept.
"""

from __future__ import annotations

from collections import deque

from common.pb import internal_pb2

EVENTS_MAX = 100_000
_BATCH_EVENTS_MAX = 1_000
_BATCH_SIZE_MAX_BYTES = 8 << 20


class EventOutbox:
    """The queue between slots and the JobManager.

    Args:
        events_max: when more wait, ``is_overfull`` asks for giving the JobManager up: it has not
            answered for that long.

    Example: what was not acknowledged is sent again.
        >>> outbox = EventOutbox()
        >>> for _ in range(3):
        ...     outbox.append(internal_pb2.TaskEvent())
        >>> outbox.acknowledge(2)
        >>> len(outbox.next_batch())
        1
    """

    def __init__(self, events_max: int = EVENTS_MAX) -> None:
        self._events: deque[internal_pb2.TaskEvent] = deque()
        self._events_max = events_max
        self.is_overfull = False
        self.dropped_count = 0

    def __len__(self) -> int:
        return len(self._events)

    def append(self, event: internal_pb2.TaskEvent) -> None:
        """Adds an event; when the queue is full it is dropped and ``is_overfull`` is set."""
        if len(self._events) >= self._events_max:
            self.is_overfull = True
            self.dropped_count += 1
            return
        self._events.append(event)

    def next_batch(self) -> list[internal_pb2.TaskEvent]:
        """The first events, as many as one call may carry; at least one when there is one."""
        batch: list[internal_pb2.TaskEvent] = []
        size_bytes = 0
        for event in self._events:
            size_bytes += event.ByteSize()
            if batch and (size_bytes > _BATCH_SIZE_MAX_BYTES or len(batch) >= _BATCH_EVENTS_MAX):
                break
            batch.append(event)
        return batch

    def acknowledge(self, count: int) -> None:
        """The first ``count`` events have arrived."""
        assert count <= len(self._events), "more events are acknowledged than were sent"
        for _ in range(count):
            self._events.popleft()

    def clear(self) -> None:
        """Nobody wants them any more."""
        self._events.clear()
        self.is_overfull = False
