"""Whose turn it is in a slot (pure): subtasks that have something to do, one after the other.

While a checkpoint is under way, subtasks that its barrier has not passed yet go first. What a barrier waits for is
rows in front of it, and a subtask that has let it pass makes more only of what comes behind: so the slot's time
goes to what the checkpoint waits for, and what was put off is made up for behind it. Where the others have nothing
to do, or wait for other slots, those that it has passed go on as ever; every eighth turn is anybody's, so that
pipelines beside one that takes long to align do not stand still.

Invariants: a subtask stands in the line at most once; nothing is preferred once the checkpoint has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

PREFERRED_IN_A_ROW = 7

Key = TypeVar("Key", bound=Hashable)


class Turns(Generic[Key]):
    """The line of those that have something to do.

    Example: the source has let the barrier of checkpoint 7 pass; what it has sent before goes first.
        >>> turns = Turns[str]()
        >>> for name in ("source", "map", "sink"):
        ...     turns.add(name)
        >>> turns.passed("source", 7)
        >>> turns.take(), turns.take(), turns.take()
        ('map', 'sink', 'source')
    """

    def __init__(self) -> None:
        self._line: deque[Key] = deque()
        self._waiting: set[Key] = set()
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
            self._line.append(key)

    def passed(self, key: Key, checkpoint_id: int) -> None:
        """The newest barrier that has passed a subtask is of this checkpoint; 0 = none has."""
        if checkpoint_id > self._checkpoint_id:
            self._checkpoint_id, self._passed = checkpoint_id, {key}
        elif checkpoint_id == self._checkpoint_id and self._passed:
            self._passed.add(key)

    def ended(self, checkpoint_id: int) -> None:
        """A checkpoint is complete, or has been given up."""
        if checkpoint_id >= self._checkpoint_id:
            self._checkpoint_id = checkpoint_id
            self._passed.clear()

    def take(self) -> Key:
        """Who is next; somebody stands in the line."""
        index = self._preferred()
        self._preferred_in_a_row = self._preferred_in_a_row + 1 if index else 0
        key = self._line[index]
        del self._line[index]
        self._waiting.discard(key)
        return key

    def _preferred(self) -> int:
        """The place in the line of the first that goes first."""
        passed = self._passed
        if not passed or self._preferred_in_a_row >= PREFERRED_IN_A_ROW:
            return 0
        return next((index for index, key in enumerate(self._line) if key not in passed), 0)
