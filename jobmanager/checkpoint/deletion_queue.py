"""What is to be deleted, and when it is tried.

At most one ``DeleteFiles`` is under way. What could not be deleted is tried again later, after pauses
that double up to a bound; meanwhile other paths go ahead.

Paths are never used twice, so what has once been released stays released: an ack that names such a path
comes from a task that has not yet heard of a checkpoint, and cannot be accepted. That memory is bounded;
a task that refers to files released so long ago has been restarted since.

Invariants: a path is in at most one of: waiting, under way, to be tried again.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from penstock.errors import InvariantViolation

BATCH_PATHS_MAX: Final = 1_000
RELEASED_PATHS_MAX: Final = 20_000
FIRST_RETRY_MS: Final = 1_000
LAST_RETRY_MS: Final = 300_000


class DeletionQueue:
    """Paths on their way out."""

    def __init__(self) -> None:
        self._waiting: dict[str, None] = {}
        self._under_way: dict[str, None] = {}
        self._again: dict[str, None] = {}
        self._again_at_ms = 0
        self._retry_ms = FIRST_RETRY_MS
        self._released: dict[str, None] = {}

    def paths(self) -> tuple[str, ...]:
        """Paths that are not deleted yet."""
        return (*self._waiting, *self._under_way, *self._again)

    def was_released(self, path: str) -> bool:
        """Whether the path has ever been in here (as far as is remembered)."""
        return (
            path in self._released
            or path in self._waiting
            or path in self._under_way
            or path in self._again
        )

    def add(self, paths: Iterable[str]) -> None:
        """Takes over paths that nothing refers to and that were not released before."""
        for path in paths:
            self._waiting[path] = None
            self._released[path] = None
        while len(self._released) > RELEASED_PATHS_MAX:
            del self._released[next(iter(self._released))]

    def start(self, now_ms: int) -> tuple[str, ...]:
        """The paths to delete now; none where there are none or others are under way."""
        if self._under_way:
            return ()
        if self._again and now_ms >= self._again_at_ms:
            self._waiting.update(self._again)
            self._again = {}
        self._under_way = dict.fromkeys(islice(self._waiting, BATCH_PATHS_MAX))
        for path in self._under_way:
            del self._waiting[path]
        return tuple(self._under_way)

    def finished(self, left: Iterable[str], now_ms: int) -> bool:
        """What was under way has come to its end, but for ``left``; False where nothing was."""
        if not self._under_way:
            return False
        failed = dict.fromkeys(path for path in left if path in self._under_way)
        self._under_way = {}
        if failed:
            self._again.update(failed)
            self._again_at_ms = now_ms + self._retry_ms
            self._retry_ms = min(2 * self._retry_ms, LAST_RETRY_MS)
        elif not self._again:
            self._retry_ms = FIRST_RETRY_MS
        return True

    def due_ms(self, now_ms: int) -> int | None:
        """When ``start`` will have something; None = not before something else happens."""
        if self._under_way:
            return None
        if self._waiting:
            return now_ms
        return self._again_at_ms if self._again else None

    def check(self) -> None:
        """Checks the invariants.

        Raises:
            InvariantViolation: a path is in two places.
        """
        places = self.paths()
        if len(places) != len(set(places)):
            raise InvariantViolation(f"deletions: a path is listed twice in {places}")
