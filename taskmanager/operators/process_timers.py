"""The timers of one domain of one function: from what the function asked for to the backend's table.

Within a bundle timers are known by slot; at its end they become part of the table, by key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from penstock.processing.process_context import TimerChanges
from penstock.storage.key_encoding import KeyBatch, concatenated_keys
from penstock.storage.key_types import Int64Array
from taskmanager.state.backend import KeyedStateBackend, TimerTable

_LATEST_MS = 2**63 - 1


class TimerService:
    """Timers of one domain."""

    def __init__(
        self,
        state: KeyedStateBackend,
        name: str,
        key_types: Sequence[pa.DataType],
        changes: TimerChanges,
    ) -> None:
        self._table: TimerTable = state.timer_table(name, key_types)
        self.changes = changes

    def next_time(self) -> int | None:
        """A time that no timer is before, None = no timers; see ``TimerTable.next_time``."""
        return self._table.next_time()

    def take_due(self, up_to_ms: int, limit: int) -> tuple[KeyBatch, Int64Array] | None:
        """Takes the earliest timers with time <= ``up_to_ms`` out of the table; None = none."""
        return self._table.take_due(up_to_ms, limit)

    def all(self) -> tuple[KeyBatch, Int64Array] | None:
        """All timers, for tools; None = there are none. Not between two rows of a bundle."""
        found = []
        while (due := self._table.take_due(_LATEST_MS, max(len(self._table), 1))) is not None:
            found.append(due)  # fewer than there are, where some had been deleted among them
        if not found:
            return None
        keys = concatenated_keys([keys for keys, _ in found])
        times = np.concatenate([times for _, times in found])
        self._table.register(keys, times)
        return keys, times

    def put_back(self, keys: KeyBatch, times: Int64Array) -> None:
        """Timers that were taken and have not fired."""
        if len(times):
            self._table.register(keys, times)

    def flush(self, keys: KeyBatch) -> bool:
        """Makes what the function asked for in a bundle part of the table.

        Returns:
            True where timers were added.
        """
        added, deleted = self.changes.added, self.changes.deleted
        if deleted:
            self._table.delete(*_timers(keys, deleted))
        if added:
            self._table.register(*_timers(keys, added))
        self.changes.reset()
        return bool(added)


def _timers(keys: KeyBatch, wanted: dict[tuple[int, int], int]) -> tuple[KeyBatch, Int64Array]:
    rows = np.fromiter(wanted.values(), np.int64, len(wanted))
    times = np.fromiter((time_ms for _, time_ms in wanted), np.int64, len(wanted))
    return keys.take(rows), times
