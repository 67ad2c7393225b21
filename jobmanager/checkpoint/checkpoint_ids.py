"""Which ids the checkpoints of a job get: never one that another leader of the job may have used.

HEAD says which ids are reserved. Whoever claims it reserves a block; each checkpoint that is stored
reserves the next one, with the same swap. Only where a whole block of them has failed must ids be asked
for by themselves.

Invariants: ids grow; each is given once, and only after HEAD has reserved it; one reservation is asked
for at a time.
"""

from __future__ import annotations

from typing import Final

from penstock.errors import require_invariant

IDS_RESERVED_AT_ONCE: Final = 16
_PAUSE_MS: Final = 1_000
"""Between a reservation that has failed and the next."""


class CheckpointIds:
    """The ids that one leader gives.

    Args:
        next_id: the first of the block that was reserved as HEAD was claimed.

    Example: sixteen ids, then none; a checkpoint that is stored brings sixteen new ones.
        >>> ids = CheckpointIds(1)
        >>> [ids.take() for _ in range(16)][-1], ids.are_left
        (16, False)
        >>> ids.end_with_next_store()
        33
        >>> ids.stored()
        >>> ids.are_left, ids.take()
        (True, 17)
    """

    def __init__(self, next_id: int) -> None:
        self.next_id = next_id
        self.is_asked = False
        """A reservation has been asked for and not been answered."""
        self._end = next_id + IDS_RESERVED_AT_ONCE
        self._end_with_store = self._end
        self._not_before_ms = 0

    @property
    def are_left(self) -> bool:
        """Whether there is an id for another checkpoint."""
        return self.next_id < self._end

    def take(self) -> int:
        """The next id."""
        require_invariant(self.are_left, "a checkpoint id is used that is not reserved")
        self.next_id += 1
        return self.next_id - 1

    def end_with_next_store(self) -> int:
        """The end of what the checkpoint that is stored now reserves."""
        self._end_with_store = self.next_id + IDS_RESERVED_AT_ONCE
        return self._end_with_store

    def stored(self) -> None:
        """The checkpoint that was to be stored last is."""
        self._end = max(self._end, self._end_with_store)

    def due_ms(self) -> int | None:
        """When to ask for a reservation; None = not now."""
        return None if self.are_left or self.is_asked else self._not_before_ms

    def reserved(self, end: int) -> None:
        """Ids below ``end`` are reserved."""
        self.is_asked = False
        self._end = max(self._end, end)

    def not_reserved(self, now_ms: int) -> None:
        """The reservation has failed."""
        self.is_asked = False
        self._not_before_ms = now_ms + _PAUSE_MS
