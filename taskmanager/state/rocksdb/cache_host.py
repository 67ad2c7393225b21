"""What tables of the database share: where they read, who owns their budget, what is asked of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from taskmanager.state.rocksdb.database_store import Database
from taskmanager.state.rocksdb.key_filter import KeyFilter
from taskmanager.state.rocksdb.write_queue_runner import FrozenPart


class CacheHost(Protocol):
    """What a table tells the owner of the cache's budget."""

    def cache_resized(self, difference_bytes: int) -> None:
        """A cache takes more or less than before; it may be asked to shrink before this returns."""

    @property
    def cache_room_bytes(self) -> int:
        """What caches may take beyond what they do."""


class CacheAccount:
    """What one cache takes, as its host knows it."""

    def __init__(self, host: CacheHost) -> None:
        self._host = host
        self._size_bytes = 0

    def resize(self, size_bytes: int) -> None:
        """The cache takes so much now; it may be asked to shrink before this returns."""
        difference = size_bytes - self._size_bytes
        if difference:
            self._size_bytes = size_bytes
            self._host.cache_resized(difference)


@dataclass(frozen=True, slots=True)
class TableHome:
    """Where tables of an operator are.

    Attributes:
        host: owns the budget.
        stored_keys: those that are not in memory alone.
    """

    reader: Database
    host: CacheHost
    stored_keys: KeyFilter
    key_groups: range
    max_parallelism: int


class StoredTable(Protocol):
    """A table of the database behind its cache, as the backend sees it."""

    @property
    def known_row_count(self) -> int | None:
        """Number of rows where it is known without reading."""

    def memory_bytes(self) -> int:
        """Approximate size of what is in memory."""

    def freeze(self) -> FrozenPart | None:
        """Ends a version: what the database must be given; None = nothing."""

    def evict(self, *, everything: bool) -> None:
        """Forgets about half of what is in memory, or all; all changes have been written."""

    def close(self) -> list[int]:
        """The table is not used any more; the partitions whose entries may go."""
