"""The splits that a subtask has read to their end and that no completed checkpoint knows as done (pure)."""

from __future__ import annotations


class DoneNames:
    """Names in the order in which they were done; what a checkpoint has named is forgotten when it is complete.

    Example: what an aborted checkpoint has named, the next one names as well.
        >>> done = DoneNames()
        >>> done.append("a")
        >>> done.snapshot(1)
        ['a']
        >>> done.aborted(1)
        >>> done.append("b")
        >>> done.snapshot(2)
        ['a', 'b']
        >>> done.append("c")
        >>> done.completed(2)
        >>> done.snapshot(3)
        ['c']
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._forgotten = 0
        self._named: dict[int, int] = {}
        """Checkpoint under way -> how many, of all there have been, it has named or found forgotten."""

    def append(self, split_id: str) -> None:
        """A split has been read to its end."""
        self._names.append(split_id)

    def snapshot(self, checkpoint_id: int) -> list[str]:
        """What a checkpoint has to name."""
        self._named[checkpoint_id] = self._forgotten + len(self._names)
        return list(self._names)

    def completed(self, checkpoint_id: int) -> None:
        """A checkpoint counts; older ones that are under way never will."""
        named = self._named.get(checkpoint_id, 0)
        if named > self._forgotten:
            del self._names[: named - self._forgotten]
            self._forgotten = named
        for older in [one for one in self._named if one <= checkpoint_id]:
            del self._named[older]

    def aborted(self, checkpoint_id: int) -> None:
        """A checkpoint does not count."""
        self._named.pop(checkpoint_id, None)
