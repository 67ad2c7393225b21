"""Interval join: pairs of rows with equal keys whose event times are at most so far apart.

A right row fits a left one where ``left + lower <= right <= left + upper``. Each row is joined with the
rows of the other side that came before it and is kept for those that come after it.

Invariants, with the watermark W:
- a left row is *live* while ``time > W - upper``, a right row while ``time > W + lower``: after that no
  row of the other side that is in time can fit. Rows are joined with live rows only;
- a row is late, and dropped, when it is neither live nor above the watermark. A row that is in time meets
  all its partners; one that is behind the watermark and live meets those that are still live;
- rows lie in buckets of time, which go as a whole when none of their rows is live. So what a row meets
  does not depend on buckets, batches or restores;
- buckets only ever get longer: none is longer than ``_bucket_ms``, which is all that finding and dropping
  ask for. In batch mode, where rows may come in any order, they are so long that a batch lies in few.

Output, per batch: for each row in order of arrival its partners by time, then in order of arrival. As in
SQL a null key equals nothing: such rows are dropped.

Source: Flink's IntervalJoinOperator, which drops every row behind the watermark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from typing_extensions import override

from common.elements import (
    MAX_TIMESTAMP_MS,
    MIN_TIMESTAMP_MS,
    TIME_LIMIT_MS,
    OperatorOutput,
    Watermark,
)
from penstock.errors import BadRecord
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME
from penstock.storage.key_encoding import bounds_of
from penstock.storage.key_types import (
    BoolArray,
    Int64Array,
    KeyKind,
    UInt64Array,
    fixed_values,
    key_kind,
)
from taskmanager.kernels import split_by_slice, time_bounds
from taskmanager.kernels.backend import kernels as process_kernels
from taskmanager.operators.join_index import BucketIndex, Probe, Run, rows_of
from taskmanager.operators.join_pairs import pieces
from taskmanager.operators.joined_rows import JoinedRows, JoinSide
from taskmanager.operators.key_columns import KeyColumns
from taskmanager.operators.operator import Operator, OperatorContext
from taskmanager.operators.operator_progress import ArrivalCounter, WatermarkState
from taskmanager.state.backend import KeyedStateBackend
from taskmanager.state.memory import MemoryUser
from taskmanager.state.operator_state import UNION
from taskmanager.state.row_table import RowDescriptor, RowPiece, RowTable, concatenated
from taskmanager.state.wide_columns import widest_row_bytes

_NAMES = ("left", "right")
_BUCKET_MIN_MS = 1000
_BATCH_BUCKETS_MAX = 32
"""Buckets that the rows of one batch lie in, in batch mode."""


@dataclass(frozen=True, slots=True)
class _Arrived:
    """Rows of one input that are in time and have a key.

    Attributes:
        ahead_ms: int64[n] how far their keys were before a restore; None = not further than the operator is.
    """

    batch: pa.RecordBatch
    times: Int64Array
    hashes: UInt64Array
    ahead_ms: Int64Array | None

    def select(self, rows: Int64Array) -> _Arrived:
        """Some of the rows."""
        ahead_ms = None if self.ahead_ms is None else self.ahead_ms[rows]
        batch = self.batch.take(pa.array(rows))
        return _Arrived(batch, self.times[rows], self.hashes[rows], ahead_ms)


class IntervalJoinOperator(Operator):
    """Joins two inputs by key and distance in time."""

    def __init__(self, spec: graph_pb2.Operator) -> None:
        self._name = spec.name
        self._joined = JoinedRows(spec)
        lower, upper = spec.join.lower_ms, spec.join.upper_ms
        # Seen from a row of a side: when its partners are, and how long it may have some to come.
        self._bounds = ((lower, upper), (-upper, -lower))
        self._hash_tells_key = _are_told_by_hashes(*(self._joined.side(i).keys for i in range(2)))
        self._kept_ms = (upper, -lower)
        self._bucket_ms = max(upper - lower, _BUCKET_MIN_MS)
        self._sides = [_Side(name, self._joined.side(i)) for i, name in enumerate(_NAMES)]
        self._arrivals = ArrivalCounter()
        self._watermark_ms = MIN_TIMESTAMP_MS
        self._memory_user: MemoryUser | None = None

    @override
    def restore(self, context: OperatorContext) -> None:
        for side in self._sides:
            side.restore(context.state)

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._batch_rows = context.config.batch_rows
        self._in_any_order = context.config.runtime_mode == "batch"
        self._watermark = WatermarkState(context)
        self._watermark_ms = self._watermark.restored_ms()
        self._ranges = self._watermark.ranges()
        # Restored rows lie in buckets as long as they were when these were made, in each subtask.
        self._lengths = context.operator_state.list("bucket_ms", UNION)
        self._lengths.codec = "decimal/1"
        if self._lengths.items:
            self._bucket_ms = max(map(int, self._lengths.items))
        self._arrivals.open(context)
        for side in self._sides:
            side.open(context)
        if context.config.state_backend_type == "hashmap":
            self._memory_user = context.memory.register(
                f"{context.operator_name}: index",
                lambda: sum(side.memory_bytes() for side in self._sides),
            )

    @override
    def close(self) -> None:
        if self._memory_user is not None:
            self.context.memory.unregister(self._memory_user)

    @override
    def prepare_snapshot(self, checkpoint_id: int) -> None:
        self._watermark.keep(self._watermark_ms, self._ranges)
        self._arrivals.keep()
        self._lengths.items = [b"%d" % self._bucket_ms]

    @override
    def process(self, batch: pa.RecordBatch) -> Iterator[OperatorOutput]:
        index = self.context.origins.input_index
        arrived = self._in_time(index, batch)
        if not len(arrived.times):
            return
        self._keep(index, arrived)
        yield from self._join(index, arrived)

    @override
    def on_watermark(self, watermark: Watermark) -> Iterator[OperatorOutput]:
        self._watermark_ms = max(self._watermark_ms, watermark.timestamp_ms)
        for side, kept_ms in zip(self._sides, self._kept_ms, strict=True):
            side.drop_until(self._watermark_ms - kept_ms, self._bucket_ms)
        yield watermark

    # ------------------------------------------------------------ a batch comes in

    def _in_time(self, index: int, batch: pa.RecordBatch) -> _Arrived:
        """The rows that are not late and have a key."""
        times: Int64Array = batch.column(EVENT_TIME).to_numpy()
        smallest, largest = time_bounds(times)
        if smallest < -TIME_LIMIT_MS or largest > TIME_LIMIT_MS:
            raise BadRecord(
                f"an event time of {smallest if smallest < 0 else largest} ms is out of range",
                operator=self._name,
            )
        side = self._joined.side(index)
        wanted = side.has_key(batch)
        over_ms = self._watermark_ms - max(self._kept_ms[index], 0)
        in_time = times > over_ms if smallest <= over_ms else None
        ahead_ms = None
        if self._ranges.are_ahead(self._watermark_ms):
            ahead_ms = np.minimum(self._ranges.of_keys(side.keys.encode(batch)), TIME_LIMIT_MS)
            is_over = _is_over(times, ahead_ms, max(self._kept_ms[index], 0))
            in_time = ~is_over if in_time is None else in_time & ~is_over
        if in_time is not None:
            self.context.counters.late_records += int(len(times) - in_time.sum())
            wanted &= in_time
        if not wanted.all():
            batch, times = batch.filter(pa.array(wanted)), times[wanted]
            ahead_ms = None if ahead_ms is None else ahead_ms[wanted]
        return _Arrived(batch, times, side.keys.encode(batch).hashes, ahead_ms)

    def _keep(self, index: int, arrived: _Arrived) -> None:
        """Makes rows part of the state that rows to come can fit."""
        side, over_ms = self._sides[index], self._watermark_ms - self._kept_ms[index]
        sequence = self._arrivals.take(len(arrived.times))
        if self._in_any_order:
            self._lengthen(arrived.times)
        split = split_by_slice(arrived.times, self._bucket_ms, 0)
        for i, start in enumerate(split.starts.tolist()):
            if start + self._bucket_ms - 1 <= over_ms:
                continue  # nothing to come can fit them
            if split.order is None:
                side.add(start, arrived, sequence)
                continue
            rows = split.order[split.bounds[i] : split.bounds[i + 1]]
            side.add(start, arrived.select(rows), sequence[rows])

    def _lengthen(self, times: Int64Array) -> None:
        """Makes the buckets to come so long that rows of these times lie in few."""
        buckets = times // self._bucket_ms
        while len(buckets := np.unique(buckets)) > _BATCH_BUCKETS_MAX:
            self._bucket_ms *= 2
            buckets //= 2

    def _join(self, index: int, arrived: _Arrived) -> Iterator[pa.RecordBatch]:
        other, (lower, upper) = self._sides[1 - index], self._bounds[index]
        over_ms = max(self._watermark_ms - self._kept_ms[1 - index], MIN_TIMESTAMP_MS)
        first = np.maximum(arrived.times + lower, min(over_ms, MAX_TIMESTAMP_MS - 1) + 1)
        if arrived.ahead_ms is not None:
            has_come = arrived.ahead_ms > MIN_TIMESTAMP_MS
            live_from = arrived.ahead_ms - self._kept_ms[1 - index] + 1
            first = np.where(has_come, np.maximum(first, live_from), first)
        order = np.argsort(arrived.hashes)
        probe = Probe(order, arrived.hashes[order], first[order], (arrived.times + upper)[order])
        found = other.find(probe, self._bucket_ms)
        if not found:
            return
        counts, run_counts = np.zeros((2, len(order)), np.int64)
        for each in found:
            counts[each.rows] += each.counts
            run_counts[each.rows] += 1
        of_partner = max(each.bucket.widest_row_bytes for each in found)
        rows_max = self._joined.rows_max(
            widest_row_bytes(arrived.batch), of_partner, self._batch_rows
        )
        for start, stop in pieces(counts, self._batch_rows):
            some = slice(start, stop)
            rows, partners = _partners(found, start, counts[some], run_counts[some] > 1)
            for at in range(0, len(rows), rows_max):
                few = slice(at, at + rows_max)
                output = self._output(index, arrived, rows[few], partners.take(few))
                if output.num_rows:
                    yield output

    def _output(
        self, index: int, arrived: _Arrived, rows: Int64Array, partners: _Partners
    ) -> pa.RecordBatch:
        side, other = self._joined.side(index), self._joined.side(1 - index)
        mine = arrived.batch.take(pa.array(rows))
        known = {EVENT_TIME: pa.array(partners.times)}
        if self._hash_tells_key:
            known[other.keys.names[0]] = mine.column(side.keys.names[0])
        others = partners.rows(known)
        sides = (others, mine) if index else (mine, others)
        times = np.maximum(*(batch.column(EVENT_TIME).to_numpy() for batch in sides))
        pairs = None
        if not self._hash_tells_key:
            is_same = _same_keys(side, mine, other, others)
            if not is_same.all():
                pairs = np.flatnonzero(is_same)
                times = times[pairs]
        return self._joined.build(sides[0], pairs, sides[1], pairs, (), times)


@dataclass(frozen=True, slots=True)
class _Found:
    """Where the partners of rows are in one run of a bucket.

    Attributes:
        rows: int64[k] the rows that have some, by hash.
        starts: int64[k] first place in the run.
        counts: int64[k] how many.
    """

    bucket: BucketIndex
    run: Run
    rows: Int64Array
    starts: Int64Array
    counts: Int64Array


@dataclass(frozen=True, slots=True)
class _Partners:
    """Rows of several buckets.

    Attributes:
        buckets: that they lie in.
        bucket_of: int64[n] index into ``buckets``.
        positions: int64[n] within the bucket.
        times: int64[n] their event times.
    """

    buckets: list[BucketIndex]
    bucket_of: Int64Array
    positions: Int64Array
    times: Int64Array

    def take(self, rows: slice | Int64Array) -> _Partners:
        """Some of them."""
        positions, times = self.positions[rows], self.times[rows]
        return _Partners(self.buckets, self.bucket_of[rows], positions, times)

    def rows(self, known: Mapping[str, pa.Array]) -> pa.RecordBatch:
        """The rows, at least one, of which some columns are known."""
        return rows_of(self.buckets, self.bucket_of, self.positions, known)


class _Side:
    """The kept rows of one input: in the backend, by bucket, and an index of each bucket.

    Where a bucket is larger than memory, the rows of a key are read when somebody looks for them.
    """

    def __init__(self, name: str, side: JoinSide) -> None:
        self._name = name
        self._side = side
        self._descriptor = RowDescriptor(side.schema, side.keys.names)
        self._indexes: dict[int, BucketIndex] = {}

    def restore(self, state: KeyedStateBackend) -> None:
        """Brings all buckets into memory, before ``open``; any thread."""
        for start in state.namespaces(self._name):
            state.row_table(self._name, start, self._descriptor)

    def open(self, context: OperatorContext) -> None:
        """Called once before anything else."""
        self._state = context.state

    def memory_bytes(self) -> int:
        """What the indexes take."""
        return sum(index.memory_bytes() for index in self._indexes.values())

    def add(self, start: int, arrived: _Arrived, sequence: Int64Array) -> None:
        """Keeps rows of the bucket that starts there."""
        table = self._table(start)
        index = self._index(start, table)
        table.add(arrived.batch, sequence)
        index.add(arrived.batch, arrived.hashes, arrived.times, sequence)

    def find(self, probe: Probe, bucket_ms: int) -> list[_Found]:
        """Where the partners of n rows are, some of which may have equal hashes only."""
        found = []
        earliest, latest = int(probe.first.min()), int(probe.last.max())
        for start in self._state.namespaces(self._name):
            if start + bucket_ms <= earliest or start > latest:
                continue
            near = np.flatnonzero((probe.first < start + bucket_ms) & (probe.last >= start))
            part = probe.select(near)
            bucket = self._index_with(start, part.hashes)
            for run in bucket.runs:
                rows, starts, counts = run.find(part)
                if len(rows):
                    found.append(_Found(bucket, run, rows, starts, counts))
        return found

    def drop_until(self, time_ms: int, bucket_ms: int) -> None:
        """Forgets the buckets that have no rows after a time."""
        for start in self._state.namespaces(self._name):
            if start + bucket_ms - 1 > time_ms:
                return
            self._state.drop(self._name, start)
            self._indexes.pop(start, None)

    def _table(self, start: int) -> RowTable:
        return self._state.row_table(self._name, start, self._descriptor)

    def _index(self, start: int, table: RowTable) -> BucketIndex:
        """The index of a bucket, with the rows that are in memory."""
        index = self._indexes.get(start)
        if index is None or index.epoch != table.epoch:
            index = self._indexes[start] = BucketIndex(table.epoch)
            self._add_rows(index, table.in_memory())
        return index

    def _index_with(self, start: int, hashes: UInt64Array) -> BucketIndex:
        """The index of a bucket, with all rows of some keys."""
        table = self._table(start)
        index = self._index(start, table)
        if not table.is_in_memory:
            self._add_rows(index, table.find(index.unknown(hashes)))
        return index

    def _add_rows(self, index: BucketIndex, rows: RowPiece) -> None:
        if rows.batches:
            batch, sequence = concatenated(rows.batches), np.concatenate(rows.sequences)
            times = batch.column(EVENT_TIME).to_numpy()
            index.add(batch, self._side.keys.encode(batch).hashes, times, sequence)


def _is_over(times: Int64Array, watermarks: Int64Array, kept_ms: int) -> BoolArray:
    """bool[n]: which rows were late by the watermark that their key had."""
    return (watermarks > MIN_TIMESTAMP_MS) & (times <= watermarks - kept_ms)


def _partners(
    found: list[_Found], first_row: int, counts: Int64Array, is_shared: BoolArray
) -> tuple[Int64Array, _Partners]:
    """The pairs of n rows, row by row, partners by time and then arrival.

    Args:
        first_row: the number of the first of them.
        counts: int64[n] partners of each.
        is_shared: bool[n] some are in several runs, each of which has its own in order.
    """
    buckets = list({id(each.bucket): each.bucket for each in found}.values())
    number_of = {id(bucket): number for number, bucket in enumerate(buckets)}
    bounds = bounds_of(counts)
    places = bounds[:-1].copy()
    times, positions, bucket_of = np.empty((3, int(bounds[-1])), np.int64)
    for each in found:
        process_kernels().spread_ranges(
            *(each.rows, each.starts, each.counts, first_row, places),
            *(each.run.times, each.run.positions, number_of[id(each.bucket)]),
            *(times, positions, bucket_of),
        )
    rows = np.repeat(np.arange(first_row, first_row + len(counts)), counts)
    if is_shared.any():
        again = np.flatnonzero(is_shared[rows - first_row])
        sequence = np.empty(len(again), np.int64)
        for number, bucket in enumerate(buckets):
            here = np.flatnonzero(bucket_of[again] == number)
            sequence[here] = bucket.sequence_of(positions[again[here]])
        order = again[np.lexsort((sequence, times[again], rows[again]))]
        for column in (times, positions, bucket_of):
            column[again] = column[order]
    return rows, _Partners(buckets, bucket_of, positions, times)


def _are_told_by_hashes(first: KeyColumns, second: KeyColumns) -> bool:
    """Whether keys with equal hashes are equal, to the bit: single integers, each of which has a hash of its own."""
    fields = [*first.fields, *second.fields]
    return len(fields) == 2 and fields[0].type == fields[1].type and pt.is_integer(fields[0].type)


def _same_keys(
    first: JoinSide, mine: pa.RecordBatch, second: JoinSide, others: pa.RecordBatch
) -> BoolArray:
    """Which of n pairs have equal keys; none of them is null."""
    is_same = np.ones(mine.num_rows, np.bool_)
    for left, right in zip(first.keys.arrays(mine), second.keys.arrays(others), strict=True):
        if key_kind(left.type) is KeyKind.FIXED:
            is_same &= fixed_values(left) == fixed_values(right)
        else:
            is_same &= pc.equal(left, right).to_numpy(zero_copy_only=False)
    return is_same
