"""The order in which timers are due: by time, then by the hash of the key, then by its bytes.

Timers are kept in *runs* that are sorted, each with the place up to which it has been taken; runs of
similar size are merged, so that each timer is sorted a logarithmic number of times. What is in a run and
is no timer any more (it was deleted) is for the owner to sort out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from penstock.storage.entries.firing_order import Place, firing_order
from penstock.storage.key_encoding import KeyBatch, concatenated_keys
from penstock.storage.key_types import BoolArray, Int64Array
from penstock.storage.run_columns import key_fields, keyed_schema


def timer_schema(key_types: Sequence[pa.DataType]) -> pa.Schema:
    """What timers are in snapshots."""
    return keyed_schema([*key_fields(key_types), pa.field("time", pa.int64())], [])


@dataclass(slots=True)
class _Run:
    """Timers in their order, those from ``head`` on not taken yet."""

    times: Int64Array
    keys: KeyBatch
    head: int = 0

    def __len__(self) -> int:
        return len(self.times) - self.head

    def rest(self) -> tuple[Int64Array, KeyBatch]:
        return self.times[self.head :], self.keys.slice(self.head, len(self.times))

    def count(self, up_to_ms: int, before: Place | None) -> int:
        """How many from ``head`` on are due, and before a place."""
        stop = int(np.searchsorted(self.times, up_to_ms, "right"))
        if before is not None and before[0] <= up_to_ms:
            first = int(np.searchsorted(self.times, before[0], "left"))
            last = int(np.searchsorted(self.times, before[0], "right"))
            hashes = self.keys.hashes[first:last]
            stop = first + int(np.searchsorted(hashes, np.uint64(before[1]), "left"))
        return max(stop - self.head, 0)


class TimerOrder:
    """Timers by the order in which they are due; one may be there several times."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def memory_bytes(self) -> int:
        """Approximate size."""
        return sum(run.times.nbytes + _key_bytes(run.keys) for run in self._runs)

    def clear(self) -> None:
        """Forgets all timers."""
        self._runs = []

    def add(self, times: Int64Array, keys: KeyBatch) -> None:
        """Adds at least one timer."""
        self._runs = [run for run in self._runs if len(run)]
        merged = [(times, keys)]
        count = len(times)
        while self._runs and len(self._runs[-1]) <= 2 * count:
            merged.append(self._runs.pop().rest())
            count += len(merged[-1][0])
        all_times = np.concatenate([part for part, _ in merged])
        all_keys = concatenated_keys([part for _, part in merged])
        order = firing_order(all_times, all_keys)
        self._runs.append(_Run(all_times[order], all_keys.take(order)))

    def keep(self, is_live: Callable[[KeyBatch, Int64Array], BoolArray]) -> None:
        """Forgets the timers that are none any more."""
        runs, self._runs = self._runs, []
        for run in runs:
            times, keys = run.rest()
            live = np.flatnonzero(is_live(keys, times)) if len(times) else times
            if len(live):
                self.add(times[live], keys.take(live))

    def first_time(self) -> int | None:
        """The smallest time; None = there are no timers."""
        return min((int(run.times[run.head]) for run in self._runs if len(run)), default=None)

    def count(self, up_to_ms: int, before: Place | None = None) -> int:
        """How many timers have a time <= ``up_to_ms`` and come before a place."""
        return sum(run.count(up_to_ms, before) for run in self._runs)

    def take(
        self, up_to_ms: int, limit: int, before: Place | None = None
    ) -> tuple[Int64Array, KeyBatch] | None:
        """Takes the earliest of ``count`` timers out, at most ``limit``; None = there are none."""
        counts = [min(run.count(up_to_ms, before), limit) for run in self._runs]
        if not any(counts):
            return None
        chosen = [(run, count) for run, count in zip(self._runs, counts, strict=True) if count]
        times = np.concatenate([run.times[run.head : run.head + count] for run, count in chosen])
        keys = concatenated_keys(
            [run.keys.slice(run.head, run.head + count) for run, count in chosen]
        )
        source = np.repeat(np.arange(len(chosen)), [count for _, count in chosen])
        order = firing_order(times, keys)[:limit]
        taken = np.bincount(source[order], minlength=len(chosen))
        for (run, _), count in zip(chosen, taken.tolist(), strict=True):
            run.head += count
        self._runs = [run for run in self._runs if len(run)]
        return times[order], keys.take(order)


def _key_bytes(keys: KeyBatch) -> int:
    if keys.fixed is not None:
        return keys.fixed.nbytes
    assert keys.data is not None
    return keys.data.nbytes
