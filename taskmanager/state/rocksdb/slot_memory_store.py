"""What all databases of a slot share: block cache, write buffers, and the budget of their caches."""

from __future__ import annotations

import weakref
from threading import Lock
from typing import Any, Final

from rocksdict import Cache, WriteBufferManager

from taskmanager.state.memory import ManagedMemory
from taskmanager.state.rocksdb.cgroup_client import cgroup_memory_limit
from taskmanager.state.rocksdb.memory_shares import memory_shares


class SlotMemory:
    """The memory of the databases of one slot. Used by the mailbox thread and those that open state.

    Attributes:
        block_cache: shared by the databases.
        block_cache_bytes: what it may take.
        write_buffers: shared by the databases.
    """

    def __init__(self, memory: ManagedMemory) -> None:
        shares = memory_shares(memory.limit_bytes, cgroup_memory_limit())
        self.block_cache: Any = Cache(shares.block_cache_bytes)
        self.block_cache_bytes = shares.block_cache_bytes
        self.write_buffers: Any = WriteBufferManager(shares.write_buffer_bytes, False)
        self.write_buffer_bytes = shares.write_buffer_bytes
        self._cache_bytes = shares.cache_bytes
        self._filter_bytes = shares.filter_bytes
        self._lock = Lock()
        self._users = 0

    def join(self) -> None:
        """One more database."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """One database less."""
        with self._lock:
            self._users -= 1

    @property
    def cache_bytes(self) -> int:
        """What the write-back cache of one database may take now."""
        return self._cache_bytes // max(1, self._users)

    def filter_bytes(self) -> int:
        """What tells the new keys of one database may take now."""
        return self._filter_bytes // max(1, self._users)

    @property
    def database_bytes(self) -> int:
        """One database's share of what RocksDB takes now (block cache and write buffers)."""
        used = self.block_cache.get_usage() + self.write_buffers.get_usage()
        return int(used) // max(1, self._users)


_SLOTS: Final[weakref.WeakKeyDictionary[ManagedMemory, SlotMemory]] = weakref.WeakKeyDictionary()
_SLOTS_LOCK: Final = Lock()


def slot_memory(memory: ManagedMemory) -> SlotMemory:
    """The one ``SlotMemory`` that belongs to a ledger."""
    with _SLOTS_LOCK:
        found = _SLOTS.get(memory)
        if found is None:
            found = _SLOTS[memory] = SlotMemory(memory)
        return found
