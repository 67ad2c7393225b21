"""How the memory of a slot's state is divided among its databases and what stands before them.

The limit is ``taskmanager.memory.managed.size``, or half of what the container may take where that is
less. Of it, nine sixteenths are for the live tables of the write-back caches: a row costs microseconds where it is read from
a block, whether that is cached or not, and a tenth of one in a table. A sixteenth is RocksDB's block cache, as much its
write buffers (only range deletions go through them), as much tells new keys from those that the database has; all of them are
shared by all databases of the slot. The rest is for what is being written: copies of records that changed while a
snapshot was exported, entries on their way into files, and an interval between two looks at the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BLOCK_CACHE_BYTES_MIN: Final = 4 << 20
WRITE_BUFFER_BYTES_MIN: Final = 1 << 20
WRITE_BUFFER_BYTES_MAX: Final = 32 << 20
CACHE_BYTES_MIN: Final = 4 << 20
_CGROUP_V1_UNLIMITED: Final = 1 << 60
"""cgroup v1 says "no limit" with a number near 2**63."""


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """Parts of the limit.

    Attributes:
        block_cache_bytes: of all databases of the slot together.
        write_buffer_bytes: of all databases of the slot together.
        cache_bytes: of the write-back caches of all databases of the slot together.
        filter_bytes: of what tells new keys, of all databases of the slot together.
    """

    block_cache_bytes: int
    write_buffer_bytes: int
    cache_bytes: int
    filter_bytes: int


def parse_cgroup_limit(text: str) -> int | None:
    """The limit of a ``memory.max`` (v2) or ``memory.limit_in_bytes`` (v1) file; None = no limit.

    Raises:
        ValueError: it is neither a number nor "max".
    """
    text = text.strip()
    if text == "max":
        return None
    limit = int(text)
    return None if limit >= _CGROUP_V1_UNLIMITED else limit


def memory_shares(limit_bytes: int, cgroup_limit_bytes: int | None) -> MemoryShares:
    """Divides what a slot may take.

    Args:
        limit_bytes: for all states of the slot.
        cgroup_limit_bytes: what the whole container may take; None = no limit.
    """
    if cgroup_limit_bytes is not None:
        limit_bytes = min(limit_bytes, cgroup_limit_bytes // 2)
    write_buffers = min(max(limit_bytes // 16, WRITE_BUFFER_BYTES_MIN), WRITE_BUFFER_BYTES_MAX)
    return MemoryShares(
        block_cache_bytes=max(limit_bytes // 16, BLOCK_CACHE_BYTES_MIN),
        write_buffer_bytes=write_buffers,
        cache_bytes=max(limit_bytes * 9 // 16, CACHE_BYTES_MIN),
        filter_bytes=limit_bytes // 16,
    )
