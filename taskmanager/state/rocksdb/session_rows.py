"""Open sessions in the database, with those of the keys that were in use lately in memory.

The table in memory is that of every backend. A batch first brings all sessions of the keys that it has and
memory has not in; when memory is short, all is written and everything is forgotten. Both happen where
nobody holds numbers of sessions: before a batch looks at its keys, and before sessions that are over are
asked for.

When sessions end is written besides, as entries in the order of their ends (``timer_entries``): of those
up to the watermark the keys are brought into memory, which then knows what is over. An entry whose session
has grown meanwhile, or is no more, only makes a key be read. Entries that have been looked at are dropped:
those before the end up to which sessions have fired, or have expired where they outlive their firing.

Invariants: what is in memory of a key is right whatever the database says, and what is not in memory is
right in the database but for keys without sessions whose removal is not written yet (``_removed``); a
session that is in the database alone has an entry of its end behind the places up to which they have been
looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.storage.entries.byte_strings import SstEntries
from penstock.storage.entries.entry_keys import partition_bounds
from penstock.storage.entries.timer_entries import decoded_timers, timer_place
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import Int64Array
from taskmanager.kernels import encode_keys
from taskmanager.state.instances import InstanceState
from taskmanager.state.rocksdb.cache_host import TableHome
from taskmanager.state.rocksdb.partitions import Partition
from taskmanager.state.rocksdb.run_entries import Sessions
from taskmanager.state.rocksdb.spilled_table import RemovedKeys, SpilledKeyedTable
from taskmanager.state.rocksdb.write_queue_runner import FrozenPart
from taskmanager.state.session_table import SessionTable

PART_ROWS: Final = 1 << 13
"""About so many ends are looked at at once."""
_NEVER: Final = 2**63 - 1


@dataclass(slots=True)
class _Ends:
    """How far the stored ends have been looked at for one purpose.

    Attributes:
        read_from: the next entry.
        first: no end from there on is before it; None = not known.
    """

    read_from: bytes
    first: int | None


class StoredSessionTable(SpilledKeyedTable, SessionTable):
    """See ``SessionTable``.

    Args:
        end_partition: of their ends.
        new_contents: makes the contents of a table without sessions.
    """

    with_numbers = True

    def __init__(
        self,
        found: Partition,
        home: TableHome,
        end_partition: int,
        key_types: Sequence[pa.DataType],
        gap_ms: int,
        new_contents: Callable[[], InstanceState],
    ) -> None:
        SessionTable.__init__(self, key_types, gap_ms, new_contents())
        self._spill(found, home, new_contents)
        self.end_partition = end_partition
        begin = partition_bounds(end_partition)[0]
        self._fire = _Ends(begin, _NEVER if self._is_complete else None)
        self._expire = _Ends(begin, _NEVER if self._is_complete else None)
        self._dropped_to = begin
        self._removed = RemovedKeys(self._plain_types)
        """Keys that have no session any more."""
        self._outlive_firing = False

    @override
    def due(self, watermark_ms: int) -> Int64Array:
        """Some of the sessions that are over; none = there are no more."""
        self._make_room()
        while True:
            found = super().due(watermark_ms)
            if len(found) or not self._load_ended(self._fire, watermark_ms + 1):
                return found

    @override
    def expired(self, watermark_ms: int, lateness_ms: int) -> Int64Array:
        """Some of the fired sessions that take no rows any more; none = there are no more."""
        self._make_room()
        while True:
            found = super().expired(watermark_ms, lateness_ms)
            if len(found) or not self._load_ended(self._expire, watermark_ms - lateness_ms + 1):
                return found

    @override
    def mark_fired(self, sessions: Int64Array) -> None:
        self._outlive_firing = True
        super().mark_fired(sessions)

    @override
    def remove(self, sessions: Int64Array) -> None:
        if len(sessions) and not self._is_complete:
            latest = sessions[self._later[sessions] < 0]
            self._removed.add(self._version, encode_keys(self.keys(latest)))
        super().remove(sessions)

    @override
    def memory_bytes(self) -> int:
        return super().memory_bytes() + self._removed.memory_bytes()

    @override
    def next_end(self) -> int | None:
        in_memory = super().next_end()
        stored = self._first_stored(self._fire)
        first = stored if in_memory is None else min(in_memory, stored)
        return None if first == _NEVER else first

    @override
    def load(self, batches: Iterable[pa.RecordBatch], rows_max: int) -> None:
        super().load(batches, rows_max)
        self._outlive_firing = self._outlive_firing or bool(self._fired.any())

    @override
    def freeze(self) -> FrozenPart | None:
        frozen = super().freeze()
        seen = self._expire if self._outlive_firing else self._fire
        if seen.read_from == self._dropped_to:
            return frozen
        self._dropped_to = seen.read_from
        dropped = partition_bounds(self.end_partition)[0], self._dropped_to
        frozen = frozen or FrozenPart(self.partition, list, lambda: None)
        return replace(frozen, dropped_range=dropped)

    @override
    def _entries(self, batches: list[pa.RecordBatch]) -> list[SstEntries]:
        """Sessions, and when they end."""
        assert isinstance(self._run_entries, Sessions)
        ends = self._run_entries.ends(self.end_partition, batches)
        return [*super()._entries(batches), ends]

    @override
    def close(self) -> list[int]:
        return [*super().close(), self.end_partition] if self.is_stored else super().close()

    @override
    def _forget(self) -> None:
        for ends, first in (
            (self._fire, self._first_end_to_fire),
            (self._expire, self._first_end_to_expire),
        ):
            ends.first = None if ends.first is None else min(ends.first, first)
        super()._forget()

    def _first_stored(self, ends: _Ends) -> int:
        """No stored end that has not been looked at is before it."""
        if ends.first is None:
            bound = partition_bounds(self.end_partition)[1]
            part = next(self._home.reader.scan(ends.read_from, bound, 1), None)
            ends.first = _NEVER if part is None else timer_place(part[0][0])[0]
        return ends.first

    def _load_ended(self, ends: _Ends, last_end: int) -> bool:
        """Brings the keys of the next sessions that end up to then into memory; False = there are none."""
        if self._is_complete or self._first_stored(ends) > last_end:
            return False
        bound = partition_bounds(self.end_partition)[1]
        part = next(self._home.reader.scan(ends.read_from, bound, PART_ROWS), None)
        if part is None:
            ends.first = _NEVER
            return False
        keys, times = decoded_timers(self._plain_types, part[0])
        count = int(np.searchsorted(times, last_end, side="right"))
        ends.first = int(times[count]) if count < len(times) else None
        if not count:
            return False
        ends.read_from = part[0][count - 1] + b"\0"
        self._load(keys.slice(0, count))
        return True

    @override
    def _missing(self, keys: KeyBatch) -> KeyBatch:
        missing = super()._missing(keys)
        return missing.take(self._removed.others(missing, self._written_version))
