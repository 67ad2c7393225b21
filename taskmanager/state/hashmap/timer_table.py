"""Timers in memory: which there are, and the order in which they are due.

The set of timers is a record table, which is also what is snapshotted. A deleted timer stays in the order
until it would be due: what is not in the set does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.storage.entries.firing_order import Place
from penstock.storage.key_encoding import KeyBatch, retyped
from penstock.storage.key_types import BoolArray, Int64Array, value_type
from penstock.storage.run_columns import TIMER_KIND
from taskmanager.kernels import RecordTable, Rows, distinct, encode_keys
from taskmanager.kernels.tombstones import FIRST_VERSION
from taskmanager.state.run_format import split_tombstones
from taskmanager.state.sealed_records import record_batches
from taskmanager.state.snapshot_table import SealedTable
from taskmanager.state.timer_order import TimerOrder, timer_schema

_SLACK: Final = 1 << 12
"""That many deleted timers may stay in the order in any case."""


class HashMapTimerTable:
    """See ``taskmanager.state.backend.TimerTable``."""

    kind = TIMER_KIND

    def __init__(self, key_types: Sequence[pa.DataType]) -> None:
        self._types = tuple(key_types)
        self._plain_types = tuple(value_type(kind) for kind in key_types)
        self._schema = timer_schema(key_types)
        self._begin(FIRST_VERSION)

    def _begin(self, version: int) -> None:
        """There are no timers in memory."""
        self._order = TimerOrder()
        self._timers = RecordTable([*self._plain_types, pa.int64()], [], with_versions=True)
        self._timers.versions.current = version
        self._timers.versions.are_written_once = True

    def __len__(self) -> int:
        return len(self._timers)

    def register(self, keys: KeyBatch, times: Int64Array) -> None:
        """Adds n timers; one that is there already stays one."""
        timers = self._encoded(keys, times)
        new = np.flatnonzero(~self._timers.contains(timers))
        if not len(new):
            return
        first, _ = distinct(timers.take(new))
        new = new[first]
        self._timers.accumulate(timers.take(new), [], [])
        self._order.add(times[new], keys.take(new))

    def delete(self, keys: KeyBatch, times: Int64Array) -> None:
        """Removes timers; those that are not there are ignored."""
        self._timers.remove(self._encoded(keys, times))
        if len(self._order) > 2 * len(self._timers) + _SLACK:
            self._order.keep(self._is_live)

    def next_time(self) -> int | None:
        """A lower bound of the smallest time, None = no timers: deleted ones stay in the order."""
        if not len(self._timers):
            self._order.clear()
        return self._order.first_time()

    def take_due(self, up_to_ms: int, limit: int) -> tuple[KeyBatch, Int64Array] | None:
        """Removes and returns the earliest timers with time <= ``up_to_ms``, at most ``limit``."""
        return self._take(up_to_ms, limit, None)

    def _take(
        self, up_to_ms: int, limit: int, before: Place | None
    ) -> tuple[KeyBatch, Int64Array] | None:
        """The same, of those before a place."""
        while True:
            found = self._order.take(up_to_ms, limit, before)
            if found is None:
                return None
            times, keys = found
            timers = self._encoded(keys, times)
            live = np.flatnonzero(self._timers.contains(timers))
            if not len(live):
                continue
            first, _ = distinct(timers.take(live))
            live = live[first]
            self._timers.remove(timers.take(live))
            return retyped(keys.take(live), self._types), times[live]

    def memory_bytes(self) -> int:
        """Approximate size."""
        return self._timers.memory_bytes() + self._order.memory_bytes()

    def schema(self) -> pa.Schema:
        """Schema of the exported rows."""
        return self._schema

    def is_changed(self, since_version: int) -> bool:
        """Timers were added or removed after that version."""
        return self._timers.versions.is_changed(since_version)

    def seal(self, since_version: int, max_parallelism: int) -> SealedTable:
        """Freezes the changes after ``since_version``."""
        export = self._timers.seal(since_version)
        read = partial(
            record_batches,
            self._timers,
            export,
            self._schema,
            len(self._types),
            max_parallelism,
            lambda _: [],
        )
        return SealedTable(export.since_version, export.version, read, export.release)

    def forget(self, version: int) -> None:
        """Tombstones up to the version may go."""
        self._timers.versions.forget(version)

    def load(self, batches: Iterable[pa.RecordBatch], rows_max: int) -> None:
        """Adds restored timers."""
        self._timers.reserve(len(self._timers) + rows_max)
        identity_count = len(self._types) + 1
        loaded: list[pa.RecordBatch] = []
        for batch in batches:
            removed, rows = split_tombstones(batch, identity_count)
            if removed is not None:
                self._timers.discard(removed)
            if rows is not None:
                self._timers.put(Rows(encode_keys(rows.columns[2:]), [], []))
                loaded.append(rows)
        for rows in loaded:
            # What was removed later is no timer; what is in several rows is taken once.
            self._add_live(rows.columns[-1].to_numpy(), encode_keys(rows.columns[2:-1]))

    def _encoded(self, keys: KeyBatch, times: Int64Array) -> KeyBatch:
        columns = retyped(keys, self._plain_types).to_arrays()
        return encode_keys([*columns, pa.array(times, pa.int64())])

    def _is_live(self, keys: KeyBatch, times: Int64Array) -> BoolArray:
        return self._timers.contains(self._encoded(keys, times))

    def _add_live(self, times: Int64Array, keys: KeyBatch) -> None:
        live = np.flatnonzero(self._is_live(keys, times))
        if len(live):
            self._order.add(times[live], keys.take(live))
