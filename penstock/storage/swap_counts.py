"""How often a process has swapped the small objects that only their owners replace, for its metrics. Any thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from enum import Enum


class SwappedKind(Enum):
    """What is swapped."""

    LEADER = "LEADER"
    HEAD = "HEAD"
    RECORD = "record"
    DRAINS = "drains"


class SwapOutcome(Enum):
    """What came of it."""

    OK = "ok"
    REFUSED = "refused"
    """It is another's, or gone."""
    FAILED = "failed"
    """The storage has failed; nothing has changed."""
    UNKNOWN = "unknown"
    """The storage has failed; it may have happened."""


class SwapCounts:
    """Swaps of one process by kind and outcome.

    Example: all there are is shown, also what has not happened yet.
        >>> counts = SwapCounts()
        >>> counts.add(SwappedKind.HEAD, SwapOutcome.OK)
        >>> counts.all()[SwappedKind.HEAD, SwapOutcome.OK], len(counts.all())
        (1, 16)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[SwappedKind, SwapOutcome]] = Counter()

    def add(self, kind: SwappedKind, outcome: SwapOutcome) -> None:
        """A swap has ended."""
        with self._lock:
            self._counts[kind, outcome] += 1

    def all(self) -> Mapping[tuple[SwappedKind, SwapOutcome], int]:
        """All so far, zeros included."""
        with self._lock:
            return {
                (kind, outcome): self._counts[kind, outcome]
                for kind in SwappedKind
                for outcome in SwapOutcome
            }


SWAPS = SwapCounts()
"""Of this process."""
