"""A system outside of the cluster that sinks write to: it survives every process of a simulation.

It keeps what was prepared apart from what was committed, and knows both by the names the sinks gave them.
User code travels by value, so this is a module of its own that user code imports when it runs.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from typing import Any

Row = tuple[Any, ...]
Rows = collections.Counter[Row]

_worlds: dict[str, World] = {}


class World:
    """What sinks have made visible.

    Attributes:
        on_commit: called before and after each commit; may raise.
        on_processing: called for each row that a function processes; may raise.
        breaches: what functions have seen that they must never see, whether or not it becomes visible.
        sent: of each value what a function in front of an exchange has said of it last.
        heard: of each value all that functions behind an exchange were ever told of it.
        generation: how many jobs have written here before this one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.prepared: dict[str, list[Row]] = {}
        self.committed: dict[str, list[Row]] = {}
        self.generation = 0
        self.on_commit: Callable[[], None] = lambda: None
        self.on_processing: Callable[[], None] = lambda: None
        self.breaches: list[str] = []
        self.sent: dict[int, int] = {}
        self.heard: dict[int, set[int]] = {}
        self._processed = 0
        _worlds[name] = self

    @staticmethod
    def of(name: str) -> World:
        """The world of this name."""
        return _worlds[name]

    def copy(self) -> World:
        """One with the same rows, for the next job; it takes the name when that begins."""
        made = World(self._name)
        _worlds[self._name] = self
        made.prepared, made.committed = dict(self.prepared), dict(self.committed)
        made.generation = self.generation + 1
        return made

    def begin(self) -> None:
        """Whoever asks for the name gets this one."""
        _worlds[self._name] = self

    def processing(self) -> int:
        """A function processes a row; returns how many have been before, repetitions included."""
        self.on_processing()
        self._processed += 1
        return self._processed

    def breach(self, what: str) -> None:
        """A function has seen what it must never see."""
        self.breaches.append(what)

    def prepare(self, name: str, rows: list[Row]) -> None:
        """Keeps rows safe without showing them."""
        assert name not in self.prepared, f"{name} is prepared twice"
        self.prepared[name] = rows

    def commit(self, name: str) -> None:
        """Shows rows; repeatable."""
        self.on_commit()
        assert name in self.prepared, f"{name} is committed, but nobody had prepared it"
        self.committed[name] = self.prepared[name]
        self.on_commit()

    def visible(self) -> Rows:
        """All rows that are visible."""
        return collections.Counter(itertools.chain.from_iterable(self.committed.values()))
