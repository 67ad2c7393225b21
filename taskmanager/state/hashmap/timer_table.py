"""Timers in memory: which there are, and the order in which they are due.

The set of timers is a record table, which is also what is snapshotted. Their order is kept in *runs*,
sorted by time and then key, each with the place up to which it has been taken; runs of similar size are
merged. A deleted timer stays in its run until it would be due: what is not in the set does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import value_type
from taskmanager.kernels import RecordTable, Rows, distinct, encode_keys
from taskmanager.state.key_batches import concatenated_keys, retyped
from taskmanager.state.keyed_rows import keyed_schema
from taskmanager.state.run_format import key_fields, split_tombstones
from taskmanager.state.sealed_records import SealedRecords
from taskmanager.state.snapshot_table import RestoredPart

Int64Array = npt.NDArray[np.int64]

_SLACK: Final = 1 << 12
"""That many deleted timers may stay in the runs in any case."""


@dataclass(slots=True)
class _Run:
    """Timers by time and key, those from ``head`` on not taken yet."""

    times: Int64Array
    keys: KeyBatch
    head: int = 0

    def __len__(self) -> int:
        return len(self.times) - self.head

    def rest(self) -> tuple[Int64Array, KeyBatch]:
        return self.times[self.head :], self.keys.slice(self.head, len(self.times))


class HashMapTimerTable:
    """See ``taskmanager.state.backend.TimerTable``.

    Args:
        key_types: types of the key columns.
    """

    kind = "timers"

    def __init__(self, key_types: Sequence[pa.DataType]) -> None:
        self._types = tuple(key_types)
        self._plain_types = tuple(value_type(kind) for kind in key_types)
        self._timers = RecordTable([*self._plain_types, pa.int64()], [], with_versions=True)
        self._runs: list[_Run] = []
        time = pa.field("time", pa.int64(), nullable=False)
        self._schema = keyed_schema([*key_fields(key_types), time.with_nullable(True)], [])

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
        self._add_run(times[new], keys.take(new))

    def delete(self, keys: KeyBatch, times: Int64Array) -> None:
        """Removes timers; those that are not there are ignored."""
        self._timers.remove(self._encoded(keys, times))
        if sum(map(len, self._runs)) > 2 * len(self._timers) + _SLACK:
            runs, self._runs = self._runs, []
            for run in runs:
                run_times, run_keys = run.rest()
                self._add_live(run_times, run_keys)

    def next_time(self) -> int | None:
        """A lower bound of the smallest time, None = no timers: deleted timers stay in their runs."""
        if not len(self._timers):
            self._runs = []
            return None
        return min(int(run.times[run.head]) for run in self._runs)

    def take_due(self, up_to_ms: int, limit: int) -> tuple[KeyBatch, Int64Array] | None:
        """Removes and returns the earliest timers with time <= ``up_to_ms``, at most ``limit``."""
        while True:
            counts = [
                min(int(np.searchsorted(run.times[run.head :], up_to_ms, "right")), limit)
                for run in self._runs
            ]
            if not any(counts):
                return None
            times, keys = self._earliest(counts, limit)
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
        runs = sum(
            run.times.nbytes + (run.keys.fixed if run.keys.fixed is not None else _data(run)).nbytes
            for run in self._runs
        )
        return self._timers.memory_bytes() + runs

    def schema(self) -> pa.Schema:
        """Schema of the exported rows."""
        return self._schema

    def is_changed(self, since_version: int) -> bool:
        """Timers were added or removed after that version."""
        return self._timers.versions.is_changed(since_version)

    def seal(self, since_version: int, max_parallelism: int) -> SealedRecords:
        """Freezes the changes after ``since_version``."""
        return SealedRecords(
            self._timers,
            self._timers.seal(since_version),
            self._schema,
            len(self._types),
            max_parallelism,
            lambda _: [],
        )

    def forget(self, version: int) -> None:
        """Tombstones up to the version may go."""
        self._timers.versions.forget(version)

    def load(self, batches: Iterable[pa.RecordBatch], part: RestoredPart) -> None:
        """Adds restored timers."""
        self._timers.reserve(len(self._timers) + part.rows_max)
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

    def _add_live(self, times: Int64Array, keys: KeyBatch) -> None:
        live = np.flatnonzero(self._timers.contains(self._encoded(keys, times)))
        if len(live):
            self._add_run(times[live], keys.take(live))

    def _add_run(self, times: Int64Array, keys: KeyBatch) -> None:
        self._runs = [run for run in self._runs if len(run)]
        merged = [(times, keys)]
        count = len(times)
        while self._runs and len(self._runs[-1]) <= 2 * count:
            merged.append(self._runs.pop().rest())
            count += len(merged[-1][0])
        all_times = np.concatenate([part for part, _ in merged])
        all_keys = concatenated_keys([part for _, part in merged])
        order = _firing_order(all_times, all_keys)
        self._runs.append(_Run(all_times[order], all_keys.take(order)))

    def _earliest(self, counts: list[int], limit: int) -> tuple[Int64Array, KeyBatch]:
        """Takes the first ``limit`` of the first ``counts`` timers of the runs out of them."""
        chosen = [(run, count) for run, count in zip(self._runs, counts, strict=True) if count]
        times = np.concatenate([run.times[run.head : run.head + count] for run, count in chosen])
        keys = concatenated_keys(
            [run.keys.slice(run.head, run.head + count) for run, count in chosen]
        )
        source = np.repeat(np.arange(len(chosen)), [count for _, count in chosen])
        order = _firing_order(times, keys)[:limit]
        taken = np.bincount(source[order], minlength=len(chosen))
        for (run, _), count in zip(chosen, taken.tolist(), strict=True):
            run.head += count
        self._runs = [run for run in self._runs if len(run)]
        return times[order], keys.take(order)


def _firing_order(times: Int64Array, keys: KeyBatch) -> Int64Array:
    """By time, then by the keys' hashes, then by their bytes: the same for the same timers."""
    order = np.lexsort((keys.hashes, times))
    hashes = keys.hashes[order]
    same = np.flatnonzero((np.diff(times[order]) == 0) & (hashes[1:] == hashes[:-1]))
    if len(same):
        # The same timer twice (deleted and back), or keys whose hashes collide.
        starts = same[np.diff(same, prepend=-2) > 1]
        stops = same[np.diff(same, append=len(order) + 1) > 1] + 2
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            order[start:stop] = sorted(order[start:stop].tolist(), key=keys.to_bytes)
    return order


def _data(run: _Run) -> npt.NDArray[np.uint8]:
    assert run.keys.data is not None
    return run.keys.data
