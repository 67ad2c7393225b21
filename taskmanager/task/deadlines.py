"""When each subtask of a slot is to be called without anything coming for it (pure).

The loop of a slot asks between all turns whether anybody's time has come. So the earliest time is known without a look at
each of them; it is looked for again only when it has come, and may be too early, where whoever had it has another since.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Deadlines(Generic[Key]):
    """One time each at most.

    Example: what is due is forgotten; a later time takes the place of an earlier one.
        >>> deadlines = Deadlines[str]()
        >>> deadlines.put("source", 20)
        >>> deadlines.put("window", 50)
        >>> deadlines.put("source", 70)
        >>> deadlines.take_due(49), deadlines.next_ns()
        ([], 50)
        >>> deadlines.take_due(50), deadlines.next_ns()
        (['window'], 70)
        >>> deadlines.put("source", None)
        >>> deadlines.take_due(100), deadlines.next_ns()
        ([], None)
    """

    def __init__(self) -> None:
        self._at_ns: dict[Key, int] = {}
        self._not_before_ns: int | None = None
        """Nobody's time comes sooner; None = there is none."""

    def put(self, key: Key, at_ns: int | None) -> None:
        """Somebody is to be called at this time, and at no other; None = not at all."""
        if at_ns is None:
            self._at_ns.pop(key, None)
            return
        self._at_ns[key] = at_ns
        if self._not_before_ns is None or at_ns < self._not_before_ns:
            self._not_before_ns = at_ns

    def take_due(self, now_ns: int) -> list[Key]:
        """Whose time has come; they are forgotten."""
        if self._not_before_ns is None or now_ns < self._not_before_ns:
            return []
        due = [key for key, at_ns in self._at_ns.items() if at_ns <= now_ns]
        for key in due:
            del self._at_ns[key]
        self.next_ns()
        return due

    def next_ns(self) -> int | None:
        """The earliest time; None = there is none."""
        self._not_before_ns = min(self._at_ns.values(), default=None)
        return self._not_before_ns
