"""What a process has asked of S3 and of stores on file systems, for its metrics. Any thread.

Daemons show what they have counted; a slot reports it to its TaskManager, which counts it with its own.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

from penstock.errors import StreamError

_Arguments = ParamSpec("_Arguments")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RequestCount:
    """Attempts of requests of one kind.

    Attributes:
        operation: as S3 calls it: ``GetObject``; on a file system as ``ObjectStore`` does: ``get``.
        outcome: ``ok``, or the code of the error: ``SlowDown``; on a file system its class.
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

    def take(self) -> tuple[tuple[RequestCount, ...], int, int]:
        """Requests, and bytes sent and received, which are counted elsewhere from here on."""
        with self._lock:
            requests = self._sorted()
            taken = requests, self._sent_bytes, self._received_bytes
            self._requests.clear()
            self._sent_bytes = self._received_bytes = 0
        return taken

    def requests(self) -> tuple[RequestCount, ...]:
        """All so far, sorted."""
        with self._lock:
            return self._sorted()

    def bytes(self) -> tuple[int, int]:
        """Sent and received so far."""
        with self._lock:
            return self._sent_bytes, self._received_bytes

    def _sorted(self) -> tuple[RequestCount, ...]:
        return tuple(RequestCount(*key, count) for key, count in sorted(self._requests.items()))


S3_REQUESTS = RequestCounts()
"""Of this process."""

FILE_REQUESTS = RequestCounts()
"""Of this process, on file systems."""


def counted_call(call: Callable[_Arguments, _T]) -> Callable[_Arguments, _T]:
    """Counts calls of a method of a store on a file system by their outcome."""

    @wraps(call)
    def counted(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _T:
        try:
            result = call(*args, **kwargs)
        except StreamError as error:
            FILE_REQUESTS.add(call.__name__, type(error).__name__)
            raise
        FILE_REQUESTS.add(call.__name__, "ok")
        return result

    return counted
