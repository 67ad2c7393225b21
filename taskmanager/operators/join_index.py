"""Finds rows of one side of an interval join by key and time (pure).

One index holds the rows of one time bucket. They are found in *runs*: parts of the rows sorted by hash and
time, so that the partners of a row are one range of a run. Small runs are merged with their neighbours, each
row a logarithmic number of times, so there are few. The rows themselves are kept column by column (``join_columns``).

An index is no state: it is made anew from the rows of the bucket, which are. Where these are not all in
memory, the index has those that are, and the others of the keys that somebody has looked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.storage.key_types import Int64Array, UInt64Array
from taskmanager.kernels.backend import kernels as process_kernels
from taskmanager.operators.join_columns import BucketColumn, Places, grown
from taskmanager.state.wide_columns import widest_row_bytes

_ROWS_AT_HAND: Final = 1 << 15
_ROWS_EACH: Final = 16
"""About so many rows of a run are behind each place in its directory."""
ANYWHERE: Final = np.zeros(2, np.int64)
"""The directory of a run that is searched from its beginning, or from where the hash before was found."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Rows that look for partners, by ascending hash: neighbours look in the same places.

    Attributes:
        rows: int64[n] their numbers.
        hashes: uint64[n] of their keys.
        first: int64[n] the earliest event time a partner has.
        last: int64[n] the latest.
    """

    rows: Int64Array
    hashes: UInt64Array
    first: Int64Array
    last: Int64Array

    def select(self, indices: Int64Array) -> Probe:
        """Some of the rows."""
        return Probe(
            self.rows[indices], self.hashes[indices], self.first[indices], self.last[indices]
        )


@dataclass(frozen=True, slots=True)
class Run:
    """Rows by hash and time.

    Attributes:
        hashes: uint64[m] ascending.
        times: int64[m] event times, ascending where hashes are equal.
        positions: int64[m] the rows' numbers within their bucket; where hash and time are equal, ascending.
        directory: says where to begin to look for a hash (``compiled_runs.find_ranges``).
    """

    hashes: UInt64Array
    times: Int64Array
    positions: Int64Array
    directory: Int64Array

    @classmethod
    def of(cls, hashes: UInt64Array, times: Int64Array, positions: Int64Array) -> Run:
        """A run, with a directory where it is larger than what the processor has at hand."""
        bits = (len(hashes) // _ROWS_EACH).bit_length()
        directory = ANYWHERE if len(hashes) < _ROWS_AT_HAND else directory_of(hashes, bits)
        return cls(hashes, times, positions, directory)

    def __len__(self) -> int:
        return len(self.hashes)

    def memory_bytes(self) -> int:
        """What it takes."""
        arrays = self.hashes, self.times, self.positions, self.directory
        return sum(array.nbytes for array in arrays)

    def find(self, probe: Probe) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Where the rows with each hash and a time from ``first`` to ``last`` are.

        Returns:
            The numbers of the probing rows that have some, by hash, and where theirs start and how
            many they are: int64[k] each.
        """
        starts, counts = np.empty((2, len(probe.rows)), np.int64)
        found = starts, counts
        wanted = probe.hashes, probe.first, probe.last
        process_kernels().find_ranges(self.hashes, self.times, self.directory, *wanted, *found)
        hits = np.flatnonzero(counts)
        return probe.rows[hits], starts[hits], counts[hits]

    def merged(self, later: Run) -> Run:
        """One run of both; the rows of ``later`` have higher positions."""
        count = len(self) + len(later)
        both = np.empty(count, np.uint64), *np.empty((2, count), np.int64)
        runs = [(run.hashes, run.times, run.positions) for run in (self, later)]
        process_kernels().merge_runs(*runs[0], *runs[1], *both)
        return Run.of(*both)


class BucketIndex:
    """The rows of a bucket.

    Args:
        epoch: of the table whose rows these are (``RowTable.epoch``).

    Attributes:
        widest_row_bytes: see there, of all its rows.
        schema: of its rows; that of some columns may be wider.
        columns: of its rows by position.
    """

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.runs: list[Run] = []
        self.widest_row_bytes = 0
        self._loaded = np.empty(0, np.uint64)
        self._sequence = np.empty(64, np.int64)
        self.schema = pa.schema([])
        self.columns: list[BucketColumn] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def memory_bytes(self) -> int:
        """What it takes, the rows included."""
        runs = sum(run.memory_bytes() for run in self.runs)
        columns = sum(column.memory_bytes() for column in self.columns)
        return runs + columns + self._sequence.nbytes + self._loaded.nbytes

    def unknown(self, hashes: UInt64Array) -> UInt64Array:
        """The different hashes that nobody has looked for; from now on somebody has."""
        hashes = np.unique(hashes)
        places = np.searchsorted(self._loaded, hashes)
        known = np.zeros(len(hashes), np.bool_)
        inside = places < len(self._loaded)
        known[inside] = self._loaded[places[inside]] == hashes[inside]
        self._loaded = np.insert(self._loaded, places[~known], hashes[~known])
        return hashes[~known]

    def sequence_of(self, positions: Int64Array) -> Int64Array:
        """The places of n rows in the order of arrival."""
        return self._sequence[positions]

    def add(
        self,
        batch: pa.RecordBatch,
        hashes: UInt64Array,
        times: Int64Array,
        sequence: Int64Array,
    ) -> None:
        """Adds n rows, at least one; the first gets the next position."""
        stop = self._length + batch.num_rows
        self._sequence = grown(self._sequence, stop)
        self._sequence[self._length : stop] = sequence
        order = _by_hash_and_time(hashes, times)
        self.runs.append(Run.of(hashes[order], times[order], self._length + order))
        self.widest_row_bytes = max(self.widest_row_bytes, widest_row_bytes(batch))
        if not self.columns:
            self.schema = batch.schema
            self.columns = [BucketColumn(field.type) for field in batch.schema]
        for column, values in zip(self.columns, batch.columns, strict=True):
            column.add(values)
        self._length = stop
        self._merge_runs()

    def _merge_runs(self) -> None:
        runs = self.runs
        while len(runs) > 1 and len(runs[-2]) <= 2 * len(runs[-1]):
            runs[-2:] = [runs[-2].merged(runs[-1])]


def rows_of(
    buckets: Sequence[BucketIndex],
    bucket_of: Int64Array,
    positions: Int64Array,
    known: Mapping[str, pa.Array],
) -> pa.RecordBatch:
    """Rows of several buckets, together not more than 32-bit offsets reach.

    Args:
        buckets: at least one, with rows of one schema.
        bucket_of: int64[n] in which of them each row is.
        positions: int64[n] where it is in there.
        known: columns that need not be looked up, of n values.
    """
    schema = buckets[0].schema
    places = Places(list(map(len, buckets)), bucket_of, positions)
    arrays = [
        known[name] if name in known else places.taken([bucket.columns[i] for bucket in buckets])
        for i, name in enumerate(schema.names)
    ]
    fields = [field.with_type(array.type) for field, array in zip(schema, arrays, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def directory_of(hashes: UInt64Array, bits: int) -> Int64Array:
    """For each value of the highest bits the place of the first row that has a hash with it, or with a higher one.

    >>> directory_of(np.array([1, 2, 3 << 62], np.uint64), 2).tolist()
    [0, 2, 2, 2]
    """
    lowest = np.arange(1 << bits, dtype=np.uint64) << np.uint64(64 - bits)
    return np.searchsorted(hashes, lowest)


def _by_hash_and_time(hashes: UInt64Array, times: Int64Array) -> Int64Array:
    """The order of rows by hash, time and place; those of equal hash, often few, are sorted once more."""
    order = np.argsort(hashes)
    is_same = hashes[order[1:]] == hashes[order[:-1]]
    shared = np.flatnonzero(np.append(is_same, False) | np.append(False, is_same))
    rows = order[shared]
    order[shared] = rows[np.lexsort((rows, times[rows], hashes[rows]))]
    return order
