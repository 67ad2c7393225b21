"""Aim: what the partial phase of windows sends is a function of the sequence of its rows, and behind it windows come
to what they come to without it, late rows included.

Method: random rows go through the operator cut in several ways, with watermarks that the generator may send,
barriers, restores, idleness; what comes out is compared by the checksum of exchanges and with a
twin that takes row by row. Two such producers in front of one window are compared with the same without partial phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock.aggregates.aggregates as agg
from common.elements import CheckpointBarrier, StreamStatus, Watermark
from penstock.aggregates.aggregate_layout import aggregate_layout
from penstock.aggregates.aggregates import Aggregate
from penstock.errors import BadRecord
from penstock.graph.window_schemas import ROWS as ROW_COUNT
from penstock.graph.window_schemas import SLICE, is_partial, partial_schema
from penstock.graph.window_spec import slice_ms
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.rows.schema import EVENT_TIME
from penstock.storage.checkpoint_properties import (
    BehindBarrier,
    CheckpointKind,
    CheckpointProperties,
)
from penstock.streams.windows import sliding, tumbling
from taskmanager.alignment.watermark_merger import WatermarkMerger
from taskmanager.kernels import rows_checksum
from taskmanager.operators.bundle_gauge import BundleGauge
from taskmanager.operators.window_aggregate import window_aggregate_operator
from taskmanager.operators.window_pre_aggregate import WindowPreAggregateOperator
from tests.support.examples import examples
from tests.support.operator_harness import HarnessSnapshot, OperatorHarness
from tests.support.window_specs import COUNTED, NUMBERS, SCHEMA, batch_of, window_aggregate_spec

PARTIAL = graph_pb2.AGGREGATION_PHASE_PARTIAL
FINAL = graph_pb2.AGGREGATION_PHASE_FINAL
COMPLETE = graph_pb2.AGGREGATION_PHASE_COMPLETE

Row = dict[str, Any]
Make = Callable[..., OperatorHarness]

ROW = st.fixed_dictionaries(
    {
        "k": st.one_of(st.none(), st.integers(0, 2), st.integers(0, 1000)),
        "x": st.one_of(st.none(), st.integers(-5, 5)),
        "f": st.sampled_from([None, math.nan, math.inf, -math.inf, 0.0, -0.0, 0.1, 0.7, 1e17, -1e17]),
        "s": st.sampled_from([None, "a", "bc"]),
        EVENT_TIME: st.one_of(st.integers(-20, 60), st.integers(-20, 2000)),
    }
)  # fmt: skip
STEADY = st.lists(ROW, max_size=60).map(
    lambda rows: [{**row, EVENT_TIME: 3 * i + row[EVENT_TIME] % 40} for i, row in enumerate(rows)]
)
SEQUENCES = st.one_of(st.lists(ROW, min_size=1, max_size=60), STEADY)
WINDOWS = st.sampled_from([tumbling(10), sliding(10, 5), sliding(10, 4, offset=1), tumbling(1000)])
GAUGES = st.sampled_from(
    [
        (16, 4, 3),
        (20, 20, 64),
        (7, 1, 2),
        (1 << 16, 1 << 13, 64),
        (8, 4, 1),
        (16, 4, 3, 40),
        (20, 5, 9, 11),
    ]
)


def maker(
    window: graph_pb2.WindowSpec,
    keys: tuple[str, ...],
    bound_ms: int | None,
    sizes: tuple[int, ...] = (1 << 16, 1 << 13, 64),
    aggregates: Mapping[str, Aggregate] = NUMBERS,
) -> Make:
    """Makes harnesses of partial phases that are all alike."""
    spec = window_aggregate_spec(window, keys, dict(aggregates), phase=PARTIAL)

    def make(restored: tuple[HarnessSnapshot, ...] = ()) -> OperatorHarness:
        operator = WindowPreAggregateOperator(
            spec,
            list(keys),
            list(spec.window_aggregate.aggregates),
            window,
            bound_ms,
            BundleGauge(*sizes),
        )
        return OperatorHarness(operator, restored=restored)

    return make


# ---------------------------------------------------------------- the same rows, whatever comes between them


@dataclass
class Run:
    """A partial phase on its way through a sequence of rows, which is cut as ``draw`` says."""

    make: Make
    bound_ms: int
    draw: Callable[[st.SearchStrategy[Any]], Any]
    sent: list[pa.RecordBatch] = field(default_factory=list)

    def over(self, rows: list[Row], ends: set[int]) -> list[pa.RecordBatch]:
        """What it sends.

        Args:
            ends: splits end behind so many rows.
        """
        harness, begin = self.make(), 0
        while begin < len(rows):
            stop = min([end for end in {*ends, len(rows)} if end > begin])
            count = self.draw(st.integers(1, stop - begin))
            harness.push(batch_of(rows[begin : begin + count]))
            begin += count
            largest = max(row[EVENT_TIME] for row in rows[:begin])
            harness = self._between(harness, largest - self.bound_ms - 1)
            if begin in ends:
                if self.draw(st.booleans()):
                    harness.status(active=False)
                harness.origin_ended()
                harness.status(active=True)
        harness.end()
        return [*self.sent, *harness.batches]

    def _between(self, harness: OperatorHarness, watermark_ms: int) -> OperatorHarness:
        for event in self.draw(st.lists(st.sampled_from("wwbri"), max_size=3)):
            match event:
                case "w":
                    harness.watermark(watermark_ms - self.draw(st.integers(0, 12)))
                case "i":
                    harness.idle()
                case "b":
                    harness.snapshot()
                case _:
                    taken = harness.snapshot()
                    self.sent += harness.batches
                    harness = self.make((taken,))
        return harness


def checksum(batches: list[pa.RecordBatch]) -> int:
    """That of an exchange over all rows; partial rows and rows are told apart by their columns."""
    total = offset = 0
    for batch in batches:
        total += rows_checksum(batch, offset) * (3 if is_partial(batch.schema) else 1)
        offset += batch.num_rows
    return total % 2**64


def texts(batches: list[pa.RecordBatch]) -> list[str]:
    return [repr(row) for batch in batches for row in batch.to_pylist()]


@examples(150)
@given(
    rows=SEQUENCES,
    window=WINDOWS,
    sizes=GAUGES,
    bound_ms=st.sampled_from([0, 1, 7, 40]),
    keys=st.sampled_from([("k",), ("k", "s")]),
    ends=st.sets(st.integers(1, 60), max_size=2),
    aggregates=st.sampled_from([NUMBERS, COUNTED]),
    data=st.data(),
)
def test_what_leaves_depends_on_the_sequence_of_rows_alone(
    rows: list[Row],
    window: Any,
    sizes: tuple[int, ...],
    bound_ms: int,
    keys: tuple[str, ...],
    ends: set[int],
    aggregates: Mapping[str, Aggregate],
    data: st.DataObject,
) -> None:
    make = maker(window.to_proto(), keys, bound_ms, sizes, aggregates)
    one = Run(make, bound_ms, data.draw).over(rows, ends)
    other = Run(make, bound_ms, data.draw).over(rows, ends)
    assert texts(one) == texts(other)
    assert checksum(one) == checksum(other)


@dataclass
class Twin:
    """The rules of the partial phase, row by row: what leaves, as rows or (slice, key, count of rows)."""

    slice_ms: int
    offset_ms: int
    bound_ms: int
    sizes: tuple[int, ...]
    pending: dict[int, dict[Any, int]] = field(default_factory=dict)
    largest: int = -(2**62)
    rest: int = 0
    next_rest: int = 1
    rows: int = 0
    slices: int = 0
    sent: int = 0

    def _start(self, time_ms: int) -> int:
        return (time_ms - self.offset_ms) // self.slice_ms * self.slice_ms + self.offset_ms

    def _leave(self, before: int | None = None) -> Iterator[tuple[int, Any, int]]:
        for start in sorted(self.pending):
            if before is None or start < before:
                for key, count in self.pending.pop(start).items():
                    self.sent += 1
                    yield start, key, count

    def _end(self) -> Iterator[Any]:
        yield from self._leave()
        if self.rows >= self.sizes[1] and 2 * self.sent <= self.rows:
            self.next_rest = 1
        else:
            self.rest, self.next_rest = self.next_rest * self.sizes[0], min(64, 2 * self.next_rest)
        self.rows = self.slices = self.sent = 0

    def row(self, row: Row, key: Any) -> Iterator[Any]:
        """A row comes."""
        time = row[EVENT_TIME]
        if self.rest:
            self.rest -= 1
            self.largest = max(self.largest, time)
            yield sorted(row.items())
            return
        start, before = self._start(time), self.largest - self.bound_ms
        is_late = start + self.slice_ms <= before
        yield from self._leave(self._start(max(self.largest, time) - self.bound_ms))
        is_new = not is_late and start not in self.pending
        if is_new and self.slices == self.sizes[2]:
            yield from self._end()
            yield from self.row(row, key)
            return
        self.largest = max(self.largest, time)
        self.rows += 1
        if is_late:
            self.sent += 1
            yield sorted(row.items())
        else:
            self.slices += is_new
            counts = self.pending.setdefault(start, {})
            counts[key] = counts.get(key, 0) + 1
        groups = self.sent + sum(map(len, self.pending.values()))
        if self.rows == self.sizes[0] or (self.rows == self.sizes[1] and groups > 0.95 * self.rows):
            yield from self._end()


@examples(150)
@given(
    rows=SEQUENCES,
    window=WINDOWS,
    sizes=GAUGES,
    bound_ms=st.sampled_from([0, 1, 7, 40]),
    cut=st.integers(1, 60),
    counted=st.sampled_from([(), ("s",), ("s", "x")]),
)
def test_what_leaves_is_what_a_twin_says_that_takes_row_by_row(
    rows: list[Row],
    window: Any,
    sizes: tuple[int, ...],
    bound_ms: int,
    cut: int,
    counted: tuple[str, ...],
) -> None:
    spec, told_apart = window.to_proto(), ("k", *counted)
    sizes = sizes[:3] if counted else sizes  # the twin has no room for bytes of keys
    aggregates = {f"of_{name}": agg.count_distinct(name) for name in counted}
    harness = maker(spec, ("k",), bound_ms, sizes, aggregates or NUMBERS)()
    for begin in range(0, len(rows), cut):
        harness.push(batch_of(rows[begin : begin + cut]))
    harness.end()
    twin = Twin(slice_ms(spec), spec.offset_ms % slice_ms(spec), bound_ms, sizes)
    expected = [
        left for row in rows for left in twin.row(row, tuple(row[name] for name in told_apart))
    ]
    expected += twin._leave()
    found = [
        (row[SLICE], tuple(list(row.values())[: len(told_apart)]), row[ROW_COUNT])
        if SLICE in row
        else sorted(row.items())
        for batch in harness.batches
        for row in batch.to_pylist()
    ]
    assert [repr(each) for each in found] == [repr(each) for each in expected]


# ---------------------------------------------------------------- windows behind it


@dataclass
class Producer:
    """One channel of a window: rows and watermarks, with a partial phase or without."""

    partial: OperatorHarness | None
    bound_ms: int
    largest: int = -(2**62)

    def give(self, act: Callable[[OperatorHarness], None], plain: list[Any]) -> list[Any]:
        """What leaves when something is done to the partial phase; without one, ``plain``."""
        if self.partial is None:
            return plain
        self.partial.emitted.clear()
        act(self.partial)
        return list(self.partial.emitted)


class Windows:
    """A window that reads several channels."""

    def __init__(
        self,
        window: graph_pb2.WindowSpec,
        keys: tuple[str, ...],
        channels: int,
        aggregates: Mapping[str, Aggregate],
    ) -> None:
        spec = window_aggregate_spec(window, keys, dict(aggregates), phase=FINAL)
        self.harness = OperatorHarness(window_aggregate_operator(spec))
        self._merger = WatermarkMerger(channels)

    def take(self, channel: int, elements: list[Any]) -> None:
        """What a channel delivers."""
        for element in elements:
            if isinstance(element, pa.RecordBatch):
                self.harness.push(element)
            elif isinstance(element, Watermark):
                self._merged(self._merger.on_watermark(channel, element.timestamp_ms))
            elif isinstance(element, StreamStatus):
                self._merged(self._merger.on_status(channel, active=element.active))

    def _merged(self, changes: list[Any]) -> None:
        for change in changes:
            if isinstance(change, Watermark):
                self.harness.watermark(change.timestamp_ms)
            else:
                self.harness.status(active=change.active)


EXACT = ROW.map(lambda row: {**row, "f": None if row["f"] is None else (row["x"] or 0) * 0.25})
STEPS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 1), st.just("rows"), st.lists(EXACT, min_size=1, max_size=12)),
        st.tuples(st.integers(0, 1), st.just("watermark"), st.integers(0, 12)),
        st.tuples(st.integers(0, 1), st.sampled_from(["idle", "flush", "barrier"]), st.none()),
    ),
    min_size=1,
    max_size=30,
)


@examples(150)
@given(
    steps=STEPS,
    window=WINDOWS,
    lateness=st.sampled_from([0, 7]),
    bound_ms=st.sampled_from([0, 1, 7, 40]),
    is_bound_known=st.booleans(),
    sizes=GAUGES,
    aggregates=st.sampled_from([NUMBERS, COUNTED]),
)
def test_windows_and_late_rows_are_those_without_the_partial_phase(
    steps: list[tuple[int, str, Any]],
    window: Any,
    lateness: int,
    bound_ms: int,
    is_bound_known: bool,
    sizes: tuple[int, ...],
    aggregates: Mapping[str, Aggregate],
) -> None:
    spec = window.to_proto("event", lateness)
    make = maker(spec, ("k",), bound_ms if is_bound_known else None, sizes, aggregates)
    sides = [
        (
            Windows(spec, ("k",), 2, aggregates),
            [Producer(make() if is_partial else None, bound_ms) for _ in (0, 1)],
        )
        for is_partial in (False, True)
    ]
    for channel, what, content in steps:
        for windows, producers in sides:
            windows.take(channel, _step(producers[channel], what, content))
    for channel in (0, 1):
        for windows, producers in sides:
            last = Watermark(2**63 - 1)
            windows.take(channel, producers[channel].give(OperatorHarness.end, [last]))
    (plain, _), (partial, _) = sides
    assert partial.harness.counters.late_records == plain.harness.counters.late_records
    assert _newest(partial.harness.take_rows()) == _newest(plain.harness.take_rows())


def _step(producer: Producer, what: str, content: Any) -> list[Any]:
    match what:
        case "rows":
            producer.largest = max(producer.largest, *(row[EVENT_TIME] for row in content))
            batch = batch_of(content)
            active = producer.give(lambda h: h.status(active=True), [StreamStatus(active=True)])
            return [*active, *producer.give(lambda h: h.push(batch), [batch])]
        case "watermark":
            watermark_ms = producer.largest - producer.bound_ms - 1 - content
            return producer.give(lambda h: h.watermark(watermark_ms), [Watermark(watermark_ms)])
        case "idle":
            return producer.give(lambda h: h.status(active=False), [StreamStatus(active=False)])
        case "flush":
            return producer.give(lambda h: h.idle(), [])
        case _:
            found = producer.give(lambda h: (h.snapshot(), None)[1], [])
            return [element for element in found if not isinstance(element, CheckpointBarrier)]


def _newest(rows: list[Row]) -> dict[str, str]:
    """The last result of each window: late rows of one batch give one update."""
    return {repr((row["k"], row["window_start"])): repr(row) for row in rows}


# ---------------------------------------------------------------- single rules


def rows_at(times: list[int], keys: list[int] | None = None) -> pa.RecordBatch:
    keys = keys or [0] * len(times)
    return batch_of(
        [{"k": k, "x": 1, "f": None, "s": None, EVENT_TIME: t} for k, t in zip(keys, times, strict=True)]
    )  # fmt: skip


def test_a_slice_leaves_ahead_of_the_row_that_ends_it_and_rows_behind_it_at_once() -> None:
    """The bound is 5 and slices are of 10: a row at 14 leaves the first open, one at 15 ends it."""
    harness = maker(tumbling(10).to_proto(), ("k",), 5)()
    harness.push(rows_at([3, 14, 9]))
    harness.watermark(8)
    harness.idle()
    harness.snapshot()
    assert harness.batches == []
    harness.push(rows_at([4, 15, 9, 12]))
    partial, row = harness.batches
    assert [(r[SLICE], r[ROW_COUNT]) for r in partial.to_pylist()] == [(0, 3)]
    assert row.column(EVENT_TIME).to_pylist() == [9]
    harness.watermark(9)
    assert len(harness.batches) == 2
    harness.end()
    assert harness.batches[-1].column(ROW_COUNT).to_pylist() == [3]


def test_without_a_bound_watermarks_end_slices() -> None:
    harness = maker(tumbling(10).to_proto(), ("k",), None)()
    harness.push(rows_at([3, 500, 9]))
    harness.watermark(8)
    assert harness.batches == []
    harness.watermark(9)
    assert [type(each) for each in harness.emitted] == [Watermark, pa.RecordBatch, Watermark]
    harness.push(rows_at([9, 10]))
    assert harness.batches[-1].schema == SCHEMA
    harness.status(active=False)
    assert isinstance(harness.emitted[-1], StreamStatus)
    assert [batch.column(SLICE).to_pylist() for batch in harness.batches[-2:]] == [[10], [500]]


def test_a_partial_batch_is_smaller_and_has_the_announced_schema() -> None:
    spec = tumbling(10).to_proto()
    harness = maker(spec, ("k",), None)()
    for _ in range(10):
        harness.push(rows_at([3, 4, 5, 6] * 5, [7, 1] * 10))
    harness.end()
    (batch,) = harness.batches
    assert batch.column("k").to_pylist() == [7, 1]
    layout = aggregate_layout(NUMBERS, SCHEMA)
    assert batch.schema == partial_schema(layout, SCHEMA, ("k",), is_window=True)


def test_bundles_that_do_not_shrink_are_given_up_for_longer_and_longer() -> None:
    gauge, tried, row = BundleGauge(100, 10, 3), [], 0
    while row < 100 * 200:
        if gauge.rest_rows:
            row += gauge.rest_rows
            gauge.rested(gauge.rest_rows)
            continue
        tried.append(row)
        row += gauge.room
        gauge.added(gauge.room, 1)
        assert gauge.is_over(pending=10)
        gauge.sent(10)
        gauge.end()
    rests = np.diff(tried) - 10
    assert (rests // 100).tolist() == [1, 2, 4, 8, 16, 32, 64, 64]
    for _ in range(3):
        gauge = BundleGauge(100, 10, 3)
        gauge.added(10, 1)
        assert not gauge.is_over(pending=9)
        gauge.added(90, 1)
        assert gauge.is_over(pending=9)
        gauge.sent(50)
        gauge.end()
        assert gauge.rest_rows == 0


def test_a_bundle_opens_no_more_slices_than_it_may() -> None:
    harness = maker(tumbling(10).to_proto(), ("k",), None, (100, 4, 2))()
    harness.push(rows_at([0, 0, 10, 1, 2, 20, 30, 31, 21]))
    assert [batch.column(SLICE).to_pylist() for batch in harness.batches] == [[0], [10]]
    harness.end()
    assert [batch.column(ROW_COUNT).to_pylist() for batch in harness.batches] == [
        [4],
        [1],
        [2],
        [2],
    ]


def test_a_bundle_holds_no_more_bytes_of_keys_than_it_may() -> None:
    harness = maker(tumbling(10).to_proto(), ("s",), None, (100, 2, 5, 100))()
    rows = [
        {"k": 0, "x": 1, "f": 0.5, "s": text, EVENT_TIME: 3}
        for text in ("ab" * 15, "b" * 30, "c" * 30)
    ]
    harness.push(batch_of(rows))
    partial, rest = harness.batches
    assert (partial.num_rows, rest.num_rows) == (2, 1), "35 bytes each: the third is too much"
    assert is_partial(partial.schema)
    assert not is_partial(rest.schema)
    long = {**rows[0], "s": "d" * 1000}
    harness = maker(tumbling(10).to_proto(), ("s",), None, (100, 2, 5, 100))()
    harness.push(batch_of([long]))
    assert not harness.batches, "a key that is longer than a bundle is alone in one"
    harness.push(batch_of(rows[:1]))
    assert [batch.num_rows for batch in harness.batches] == [1, 1], "the next one goes as it is"


def test_wide_rows_make_short_bundles() -> None:
    gauge = BundleGauge.of_rows(8 * 1000)
    assert gauge.room * 8 * 1000 <= 16 << 20
    assert BundleGauge.of_rows(40).room == BundleGauge().room


def test_bundles_of_several_subtasks_are_taken_over_by_one() -> None:
    make = maker(tumbling(10).to_proto(), ("k",), 5, (16, 4, 3))
    snapshots = []
    for times in ([1, 2, 3], [5, 12, 13], [1, 9, 40]):
        harness = make()
        harness.push(rows_at(times))
        snapshots.append(harness.snapshot())
        assert len(harness.batches) == (1 if times[-1] == 40 else 0)
    lists: dict[str, checkpoint_pb2.OperatorStateSnapshot] = {}
    for data in (data for taken in snapshots for data in taken.lists):
        own = checkpoint_pb2.OperatorStateSnapshot.FromString(data)
        if own.name in lists:
            lists[own.name].items.extend(own.items)
        else:
            lists[own.name] = own
    together = tuple(held.SerializeToString() for held in lists.values())
    harness = make((HarnessSnapshot(snapshots[0].keyed, together),))
    harness.push(rows_at([41]))
    harness.watermark(35)
    harness.end()
    assert [(row[SLICE], row[ROW_COUNT]) for row in harness.rows() if SLICE in row] == [
        (0, 4),
        (10, 2),
        (40, 1),
        (40, 1),
    ]


def test_a_bundle_goes_on_with_other_values_to_count() -> None:
    kinds = {"of_s": agg.count_distinct("s"), "of_x": agg.count_distinct("x")}
    total = {"total": agg.sum("x")}
    window = tumbling(10).to_proto()

    def make(aggregates: Mapping[str, Aggregate]) -> Make:
        return maker(window, ("k",), 5, aggregates=aggregates)

    def rows(harness: OperatorHarness) -> list[list[Any]]:
        harness.end()
        return [list(row.values()) for row in harness.rows()]

    given = batch_of(
        [{"k": 0, "x": x, "f": None, "s": s, EVENT_TIME: 1} for x, s in [(1, "a"), (2, "a"), (1, "b")]]
    )  # fmt: skip
    harness = make({**total, **kinds})()
    harness.push(given)
    snapshot = harness.snapshot()
    swapped = {"of_x": kinds["of_x"], **total, "of_s": kinds["of_s"]}
    assert rows(make(swapped)((snapshot,))) == [
        [0, 1, "a", 0, 1, 1], [0, 2, "a", 0, 1, 2], [0, 1, "b", 0, 1, 1],
    ]  # fmt: skip
    assert rows(make({"of_s": kinds["of_s"], **total})((snapshot,))) == [
        [0, "a", 0, 2, 3], [0, "b", 0, 1, 1],
    ]  # fmt: skip
    assert rows(make(total)((snapshot,))) == [[0, 0, 3, 4]]
    harness = make(total)()
    harness.push(given)
    added = make({**total, **kinds})((harness.snapshot(),))
    added.push(given)
    assert rows(added)[0] == [0, None, None, 0, 3, 4]


def test_overflow_in_the_partial_phase_names_key_and_aggregate() -> None:
    row = {"k": 7, "x": 2**62, "f": None, "s": None, EVENT_TIME: 1}
    for aggregates in (NUMBERS, COUNTED):
        harness = maker(tumbling(10).to_proto(), ("k",), 0, aggregates=aggregates)()
        with pytest.raises(BadRecord, match=r"sum_x.*key k=7, all of it"):
            harness.push(batch_of([row, row, row]))


@pytest.mark.parametrize("behind", [BehindBarrier.GO_ON, BehindBarrier.HOLD])
def test_everything_leaves_ahead_of_the_barrier_of_a_savepoint(behind: BehindBarrier) -> None:
    kind = CheckpointKind.CHECKPOINT if behind.value else CheckpointKind.SAVEPOINT
    properties = CheckpointProperties(kind, "/kept/s", behind=behind)
    harness = maker(tumbling(10).to_proto(), ("k",), bound_ms=100)()
    rows = [{"k": 1, "x": 1, "f": 1.0, "s": "a", EVENT_TIME: time} for time in range(4)]
    harness.push(batch_of(rows))
    assert not harness.batches
    barrier = CheckpointBarrier(7, 0, properties=properties)
    harness.emitted += harness.operator.on_control(barrier)
    assert sum(batch.num_rows for batch in harness.batches) == 1
    assert harness.emitted[-1] == barrier
    harness.operator.prepare_snapshot(7)
    held = {one.name: len(one.items) for one in harness.operator_state.snapshot()}
    assert not held.get("bundle")
