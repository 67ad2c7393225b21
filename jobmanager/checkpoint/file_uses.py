"""Which files of the store are in use, and by which checkpoints; what finished tasks hold is in use as well.

A file may hold several ranges, so uses are counted per path. A holder is a checkpoint, as pending (what
its acks name, and what they may still name) or as completed.

Invariants: the count of a path is the number of holders that name it; a path is reported unused exactly
when its last holder lets go of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from penstock.errors import InvariantViolation


class Role(Enum):
    """As what a checkpoint holds files."""

    PENDING = "pending"
    COMPLETED = "completed"
    LAST_STATES = "last states"


@dataclass(frozen=True, slots=True)
class Holder:
    """A checkpoint that holds files."""

    role: Role
    checkpoint_id: int


class FileUses:
    """Holders of paths."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._held: dict[Holder, set[str]] = {}

    def hold(self, holder: Holder, paths: Iterable[str]) -> None:
        """Adds paths to what a holder holds; empty paths are no files."""
        held = self._held.setdefault(holder, set())
        for path in paths:
            if path and path not in held:
                held.add(path)
                self._counts[path] = self._counts.get(path, 0) + 1

    def drop(self, holder: Holder) -> list[str]:
        """Lets go of all a holder holds; returns what nobody holds now, sorted."""
        unused = []
        for path in self._held.pop(holder, ()):
            self._counts[path] -= 1
            if self._counts[path] == 0:
                del self._counts[path]
                unused.append(path)
        return sorted(unused)

    def in_use(self, path: str) -> bool:
        """Whether anybody holds the path."""
        return path in self._counts

    def holders(self) -> frozenset[Holder]:
        """Everybody who may hold something."""
        return frozenset(self._held)

    def check(self) -> None:
        """Checks the invariants.

        Raises:
            InvariantViolation: the counts are not those of the holders.
        """
        counts: dict[str, int] = {}
        for held in self._held.values():
            for path in held:
                counts[path] = counts.get(path, 0) + 1
        if counts != self._counts:
            raise InvariantViolation(f"uses of files: counted {self._counts}, held {counts}")
