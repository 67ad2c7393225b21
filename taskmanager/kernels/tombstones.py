"""What was removed from a table, until its snapshots have been told."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

T = TypeVar("T")

FIRST_VERSION: Final = 1


class Tombstones(Generic[T]):
    """Removed things, in batches, by the version in which they were removed.

    In the first version nothing is kept: no snapshot can hold what was there before it.

    Attributes:
        floor: who asks for changes after a version below gets everything, and needs no tombstones.
        size: of all that is kept, in whatever unit ``bury`` is told.
    """

    def __init__(self) -> None:
        self.floor = 0
        self.size = 0
        self._batches: dict[int, list[tuple[T, int]]] = {}

    def are_kept(self, version: int) -> bool:
        """What is removed in a version must be told to snapshots."""
        return version > FIRST_VERSION and version > self.floor

    def bury(self, version: int, batch: T, size: int, size_max: int | None = None) -> None:
        """Keeps what is removed in a version where that is needed.

        Args:
            size_max: when more is kept, all is given up, and the next snapshot is a full one; None = there
                is no bound.
        """
        if not size or not self.are_kept(version):
            return
        self._batches.setdefault(version, []).append((batch, size))
        self.size += size
        if size_max is not None and self.size > size_max:
            self.restart(version)

    def since(self, version: int) -> int:
        """After which version changes are known, where those after ``version`` are asked for."""
        return version if version >= self.floor else 0

    def after(self, version: int) -> list[T]:
        """What was removed after a version; some may be back."""
        return [
            batch for of, batches in self._batches.items() if of > version for batch, _ in batches
        ]

    def forget(self, version: int) -> None:
        """What was removed up to a version is not needed any more."""
        for told in [told for told in self._batches if told <= version]:
            self.size -= sum(size for _, size in self._batches.pop(told))

    def restart(self, floor: int) -> None:
        """Keeps nothing."""
        self.floor, self.size, self._batches = floor, 0, {}
