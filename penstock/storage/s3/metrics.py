"""What a process has asked of S3, for its metrics. Counts only grow; any thread."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestCount:
    """Attempts of requests of one kind.

    Attributes:
        operation: as S3 calls it: ``GetObject``.
        outcome: ``ok``, or the code of the error: ``SlowDown``.
    """

    operation: str
    outcome: str
    count: int


class RequestCounts:
    """Requests by kind and outcome, and bytes of objects, of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str]] = Counter()
        self._sent_bytes = 0
        self._received_bytes = 0

    def add(self, operation: str, outcome: str, count: int = 1) -> None:
        """Attempts that have ended."""
        with self._lock:
            self._requests[operation, outcome] += count

    def add_bytes(self, sent: int = 0, received: int = 0) -> None:
        """Content of objects that has gone one way or the other."""
        with self._lock:
            self._sent_bytes += sent
            self._received_bytes += received

    def requests(self) -> tuple[RequestCount, ...]:
        """All so far, sorted."""
        with self._lock:
            return tuple(RequestCount(*key, count) for key, count in sorted(self._requests.items()))

    def bytes(self) -> tuple[int, int]:
        """Sent and received so far."""
        with self._lock:
            return self._sent_bytes, self._received_bytes


REQUESTS = RequestCounts()
"""Of this process."""
