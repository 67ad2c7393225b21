"""Whose turn it is in a slot (pure): subtasks that have something to do, in the order in which rows pass them.

Turns go down the pipelines of the slot and begin again at their head. What a subtask sends is taken by the next one in
the same round, and so are rows and barriers of other slots that have come meanwhile: they pass all that a slot has of a
chain in one round, however long it is, and not one subtask of it in each. Who comes waits for one round at most.

While a checkpoint is under way, subtasks that its barrier has not passed yet go first, and of those the one that is
furthest up: that is where the barrier is. What a barrier waits for is rows in front of it, and a subtask that has let it
pass makes more only of what comes behind: so the slot's time goes to what the checkpoint waits for, and what was put off
is made up for behind it. Where the others have nothing to do, or wait for other slots, those that it has passed go on as
ever; every eighth turn is the round's, so that pipelines beside one that takes long to align do not stand still.

Invariants: a subtask stands in the line at most once; nothing is preferred once the checkpoint has ended.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Any, Generic, Protocol, TypeVar

from typing_extensions import override

PREFERRED_IN_A_ROW = 7


class PipelinePlace(Protocol):
    """Where a subtask stands in its pipeline: what sends rows is less than what they are sent to."""

    def __lt__(self, other: Any, /) -> bool:
        """Whether it is further up."""

    @override
    def __hash__(self) -> int:
        """Equal places are the same subtask."""


Key = TypeVar("Key", bound=PipelinePlace)


class Turns(Generic[Key]):
    """The line of those that have something to do.

    Example: a round goes down the pipeline, whoever came first.
        >>> turns = Turns[str]()
        >>> for name in ("3 sink", "1 source"):
        ...     turns.add(name)
        >>> turns.take()
        '1 source'
        >>> turns.add("1 source")  # it has more
        >>> turns.add("2 map")  # has got what it sent
        >>> turns.take(), turns.take(), turns.take()
        ('2 map', '3 sink', '1 source')

    Example: the source has let the barrier of checkpoint 7 pass; what it has sent before goes first.
        >>> turns = Turns[str]()
        >>> for name in ("1 source", "2 map", "3 sink"):
        ...     turns.add(name)
        >>> turns.passed("1 source", 7)
        >>> turns.take(), turns.take(), turns.take()
        ('2 map', '3 sink', '1 source')
    """

    def __init__(self) -> None:
        self._line: list[Key] = []
        """In order."""
        self._waiting: set[Key] = set()
        self._last: Key | None = None
        """How far the round is."""
        self._checkpoint_id = 0
        """The newest whose barrier has passed anybody."""
        self._passed: set[Key] = set()
        """Whom it has passed; empty = it is not under way any more."""
        self._preferred_in_a_row = 0

    def __bool__(self) -> bool:
        """True while anybody has something to do."""
        return bool(self._line)

    def __contains__(self, key: Key) -> bool:
        """Whether a subtask stands in the line."""
        return key in self._waiting

    def add(self, key: Key) -> None:
        """A subtask has something to do."""
        if key not in self._waiting:
            self._waiting.add(key)
            insort(self._line, key)

    def passed(self, key: Key, checkpoint_id: int) -> None:
        """The newest barrier that has passed a subtask is of this checkpoint; 0 = none has."""
        if checkpoint_id > self._checkpoint_id:
            self._checkpoint_id, self._passed = checkpoint_id, {key}
        elif checkpoint_id == self._checkpoint_id and self._passed:
            self._passed.add(key)

    def gone(self, key: Key) -> None:
        """A subtask has ended: who takes its place is not behind it."""
        self._passed.discard(key)

    def ended(self, checkpoint_id: int) -> None:
        """A checkpoint is complete, or has been given up."""
        if checkpoint_id >= self._checkpoint_id:
            self._checkpoint_id = checkpoint_id
            self._passed.clear()

    def take(self) -> Key:
        """Who is next; somebody stands in the line."""
        key = self._preferred()
        if key is None:
            key = self._last = self._next_in_round()
            self._preferred_in_a_row = 0
        else:
            self._preferred_in_a_row += 1
        del self._line[bisect_left(self._line, key)]
        self._waiting.discard(key)
        return key

    def _next_in_round(self) -> Key:
        index = 0 if self._last is None else bisect_right(self._line, self._last)
        return self._line[index % len(self._line)]

    def _preferred(self) -> Key | None:
        """Who goes first whatever the round says; None = nobody does."""
        passed = self._passed
        if not passed or self._preferred_in_a_row >= PREFERRED_IN_A_ROW:
            return None
        return next((key for key in self._line if key not in passed), None)
