"""Where the rows of a chain come from, and how far each of these origins is (pure).

An origin is a split of a source, or an input channel behind an exchange. Watermarks are generated
per origin. Until a bounded source knows all its splits, and as long as one of them has not been
opened, the watermark is held back by it: file order can never make rows late. Where rows come in any order
(batch mode), those that are being read hold it back as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from common.elements import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS


def _nothing_waits(_origin: str) -> bool:
    return False


@dataclass(slots=True)
class Origins:
    """The origins of one subtask.

    Attributes:
        current: the origin of the batch that is being processed.
        input_index: the input of the vertex it came in by (0, or 1 for the second of two).
        open: origins that are being read.
        unread: origins that are known but not opened yet -> lower bound of their event times.
        rest: origin that is being read -> lower bound of the event times of the rest of it, where it is known.
        all_known: no origin will be added; False holds the watermark back when ``bounded``.
        bounded: the input ends.
        has_waiting: whether rows of an origin are there but have not been read yet: then it is the
            reader that is slow, and the origin is not idle.

    Example: a file that waits to be read holds the watermark just before its first row.
        >>> origins = Origins(all_known=True)
        >>> origins.add("monday.csv", 1_000)
        >>> origins.add("tuesday.csv", 2_000)
        >>> origins.start("monday.csv")
        >>> origins.hold_back_ms(), origins.proven_ms()
        (1999, 999)
    """

    current: str = ""
    input_index: int = 0
    open: set[str] = field(default_factory=set)
    unread: dict[str, int | None] = field(default_factory=dict)
    rest: dict[str, int] = field(default_factory=dict)
    all_known: bool = False
    bounded: bool = True
    has_waiting: Callable[[str], bool] = _nothing_waits

    def add(self, origin: str, min_event_time_ms: int | None) -> None:
        """An origin that will be read later."""
        self.unread[origin] = min_event_time_ms

    def start(self, origin: str) -> None:
        """The origin is opened and is the current one."""
        self.rest_is_from(origin, self.unread.pop(origin, None))
        self.open.add(origin)
        self.current = origin

    def rest_is_from(self, origin: str, min_event_time_ms: int | None) -> None:
        """No row of the origin that is to come has an event time before this; None = nothing new is known."""
        if min_event_time_ms is not None:
            self.rest[origin] = max(self.rest.get(origin, MIN_TIMESTAMP_MS), min_event_time_ms)

    def end(self, origin: str) -> None:
        """The origin has no more rows."""
        self.open.discard(origin)
        self.rest.pop(origin, None)

    def hold_back_ms(self) -> int:
        """The watermark may not pass this: no unread row can be at or below it."""
        if self.bounded and not self.all_known:
            return MIN_TIMESTAMP_MS
        return min(map(_just_before, self.unread.values()), default=MAX_TIMESTAMP_MS)

    def proven_ms(self) -> int:
        """No row that is to come can be at or below this, in whatever order rows come.

        At the end, when nothing is left to read, nothing more is said: the end of the data says it all.
        """
        if self.is_waiting:
            return MIN_TIMESTAMP_MS
        being_read = (_just_before(self.rest.get(origin)) for origin in self.open)
        return min([self.hold_back_ms(), *being_read])

    @property
    def is_waiting(self) -> bool:
        """True while no origin is open or waits to be opened."""
        return not self.open and not self.unread


def _just_before(bound: int | None) -> int:
    return MIN_TIMESTAMP_MS if bound is None else max(bound - 1, MIN_TIMESTAMP_MS)
