"""Producer side alone: coalescing, order, watermarks that do not cut batches, back-pressure."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.elements import (
    EndOfData,
    EndOfPartition,
    StreamStatus,
    Watermark,
)
from penstock.partition_id import PartitionId
from penstock.rows.schema import EVENT_TIME
from taskmanager.network import result_partition
from taskmanager.network.batch_builder import BatchBuilder, keeps_lateness
from taskmanager.network.partitioner import HashPartitioner
from taskmanager.network.pipelined import PartitionLoad, PipelinedSubpartition
from taskmanager.network.result_partition import PartitionContext, ResultPartition
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.partitions.exchange_cache import ExchangeCache
from taskmanager.partitions.kept_partition import KeptPartition, NoFiles
from taskmanager.partitions.retention import Retention
from tests.support.exchange_slots import numbers, rows_of
from tests.support.subpartition_readers import RecordingReader


class Case:
    def __init__(self, credit: int = 1000, batch_rows: int = 10) -> None:
        self.sent_bytes = 0
        self.unblocked = 0
        self.subpartition = PipelinedSubpartition(
            0, batch_rows, 1 << 20, PartitionLoad(), self._sent, self._unblocked
        )
        self.reader = RecordingReader(credit)
        self.subpartition.attach(self.reader)

    def _sent(self, size_bytes: int) -> None:
        self.sent_bytes += size_bytes

    def _unblocked(self) -> None:
        self.unblocked += 1

    def add(self, start: int, count: int) -> None:
        self.subpartition.add(numbers(start, count), count * 8)

    def shapes(self) -> list[Any]:
        return [e.num_rows if isinstance(e, pa.RecordBatch) else e for e in self.reader.got]


def timed(times: list[int]) -> pa.RecordBatch:
    return pa.record_batch({"x": times, EVENT_TIME: pa.array(times, pa.int64())})


def test_slices_are_collected_to_full_batches() -> None:
    case = Case()
    for start in range(0, 30, 3):
        case.add(start, 3)
    case.subpartition.flush()
    assert case.shapes() == [9, 9, 9, 3]
    assert case.reader.offsets == [0, 9, 18, 27]
    assert rows_of(case.reader.got) == list(range(30))
    assert case.sent_bytes == 240


def test_wide_rows_are_cut_by_size() -> None:
    case = Case()
    case.subpartition.add(numbers(0, 1), 1 << 20)
    assert case.shapes() == [1]


def test_other_control_elements_cut_the_batch_and_keep_their_place() -> None:
    case = Case()
    case.add(0, 3)
    case.subpartition.add_control(StreamStatus(active=False))
    case.add(3, 2)
    case.subpartition.add_control(EndOfData())
    case.subpartition.add_control(EndOfPartition())
    assert case.shapes() == [3, StreamStatus(active=False), 2, EndOfData(), EndOfPartition()]
    with pytest.raises(AssertionError, match="after the end"):
        case.add(5, 1)


def test_a_watermark_leaves_behind_younger_rows_without_cutting_the_batch() -> None:
    case = Case()
    case.subpartition.add_control(Watermark(1))  # nothing is collected: it goes at once
    case.subpartition.add(timed([5, 6]), 32)
    case.subpartition.add_control(Watermark(5))
    case.subpartition.add(timed([7, 8]), 32)
    case.subpartition.add_control(Watermark(7))
    assert case.shapes() == [Watermark(1)]
    case.subpartition.add(timed([7, 9]), 32)  # 7 may be late: what is collected goes first
    case.subpartition.flush()
    assert case.shapes() == [Watermark(1), 4, Watermark(7), 2]


def test_what_keeps_lateness() -> None:
    assert keeps_lateness(numbers(0, 1), Watermark(10**9))  # no event time, no lateness
    assert keeps_lateness(timed([11]), Watermark(10))
    assert not keeps_lateness(timed([12, 10]), Watermark(10))
    partial = pa.record_batch({"k": [1], "__slice": pa.array([0], pa.int64())})
    assert not keeps_lateness(partial, Watermark(-1))
    partial = partial.replace_schema_metadata({b"penstock.slice_ms": b"1000"})
    assert keeps_lateness(partial, Watermark(998))
    assert not keeps_lateness(partial, Watermark(999))


def test_batches_of_different_schemas_are_not_merged() -> None:
    case = Case()
    case.add(0, 2)
    marked = numbers(2, 2).replace_schema_metadata({b"penstock.partial": b"1"})
    case.subpartition.add(marked, 16)
    case.add(4, 2)
    case.subpartition.flush()
    assert case.shapes() == [2, 2, 2]
    assert case.reader.got[1].schema.metadata == {b"penstock.partial": b"1"}


def test_without_credit_it_blocks_and_collects() -> None:
    case = Case(credit=0)
    case.add(0, 10)
    assert case.subpartition.is_blocked
    case.add(10, 2)
    case.subpartition.flush()  # blocked: goes on collecting
    case.add(12, 2)
    assert case.shapes() == []
    case.reader.credit = 5
    case.subpartition.pump()
    assert case.shapes() == [10, 4]
    assert not case.subpartition.is_blocked
    assert case.unblocked == 1


def test_queued_watermarks_are_merged() -> None:
    case = Case(credit=0)
    case.add(0, 10)
    for timestamp in range(5):
        case.subpartition.add_control(Watermark(timestamp))
    case.reader.credit = 1
    case.subpartition.pump()
    assert case.shapes() == [10, Watermark(4)]


def test_a_reader_that_comes_late_gets_everything() -> None:
    case = Case()
    case.subpartition.detach(is_complete=False)
    case.add(0, 10)
    case.subpartition.add_control(EndOfData())
    assert case.subpartition.is_blocked
    reader = RecordingReader(3)
    case.subpartition.attach(reader)
    assert [type(element) for element in reader.got] == [pa.RecordBatch, EndOfData]
    assert case.unblocked == 1


def test_release_tells_the_reader() -> None:
    case = Case(credit=0)
    case.add(0, 10)
    case.subpartition.release()
    assert case.reader.got == ["released"]
    assert not case.subpartition.is_blocked


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("rows"), st.integers(1, 25)),
            st.tuples(st.just("watermark"), st.integers(0, 20)),
            st.tuples(st.sampled_from(["status", "flush", "credit"]), st.just(1)),
        ),
        max_size=50,
    )
)
def test_nothing_is_lost_doubled_or_reordered(steps: list[tuple[str, int]]) -> None:
    case = Case(credit=1, batch_rows=12)
    expected: list[Any] = []
    clock = 0
    for kind, value in steps:
        if kind == "rows":
            # event times around the last watermark: some rows are late, some are not
            times = [clock + (7 * index) % 5 - 1 for index in range(value)]
            case.subpartition.add(timed(times), value * 16)
            expected += [("row", time) for time in times]
        elif kind == "watermark":
            clock += value
            case.subpartition.add_control(Watermark(clock))
            expected.append(("watermark", clock))
        elif kind == "status":
            case.subpartition.add_control(StreamStatus(active=True))
            expected.append(("status", True))
        elif kind == "flush":
            case.subpartition.flush()
        else:
            case.reader.credit += 1
            case.subpartition.pump()
    case.reader.credit = 10**6
    case.subpartition.add_control(EndOfData())
    case.subpartition.pump()
    got: list[Any] = []
    for element in case.reader.got[:-1]:
        if isinstance(element, pa.RecordBatch):
            got += [("row", value) for value in rows_of([element])]
        elif isinstance(element, Watermark):
            got.append(("watermark", element.timestamp_ms))
        else:
            got.append(("status", element.active))
    assert [e for e in got if e[0] == "row"] == [e for e in expected if e[0] == "row"]
    assert _lateness(got) == _lateness(expected)


def _lateness(events: list[tuple[str, Any]]) -> list[bool]:
    """Of each row, in order: was it late when it came?"""
    watermark, late = -1, []
    for kind, value in events:
        if kind == "watermark":
            watermark = max(watermark, value)
        elif kind == "row":
            late.append(value <= watermark)
    return late


def test_one_that_waits_for_its_reader_is_blocked_until_then() -> None:
    unblocked: list[int] = []
    load = PartitionLoad()
    subpartition = PipelinedSubpartition(
        0, 10, 1 << 20, load, unblocked.append, lambda: unblocked.append(0), waits_for_reader=True
    )
    assert subpartition.is_blocked
    assert load.waiting_batches == 1
    subpartition.add(numbers(0, 3), 24)
    subpartition.flush()
    subpartition.add_control(EndOfData())
    reader = RecordingReader(1000)
    subpartition.attach(reader)
    assert not subpartition.is_blocked
    assert load.waiting_batches == 0
    assert unblocked[-1] == 0
    assert rows_of([e for e in reader.got if isinstance(e, pa.RecordBatch)]) == [0, 1, 2]
    assert reader.got[-1] == EndOfData()


def test_one_that_waits_for_its_reader_in_vain_lets_go_of_its_partition() -> None:
    load = PartitionLoad()
    subpartition = PipelinedSubpartition(
        0, 10, 1 << 20, load, lambda _: None, lambda: None, waits_for_reader=True
    )
    subpartition.release()
    assert load.waiting_batches == 0


@pytest.mark.parametrize("is_kept", [False, True])
def test_few_rows_of_each_batch_do_not_keep_all_batches_in_memory(
    monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    """One consumer gets a row of each: it is a part of what the batch was sorted into for all of them."""
    monkeypatch.setattr(result_partition, "CUT_BYTES_MAX", 1 << 20)
    partitioner = HashPartitioner("e", ["k"], 2, 128)
    of_consumer = {
        partitioner.partition(pa.record_batch({"k": [k]}))[0][0]: k for k in reversed(range(99))
    }
    context = PartitionContext(
        PartitionId("e", "v", 0, 0),
        partitioner,
        subpartition_count=2,
        batch_rows=8192,
        batch_bytes_max=16 << 20,
        buffer_timeout_ms=1000,
        counters=SubtaskCounters(),
        now_ns=lambda: 0,
        on_available=lambda: None,
        on_error=_fail,
        on_release=lambda: None,
    )
    readers = [RecordingReader(10_000) for _ in range(2)]
    partition = ResultPartition(context)
    if is_kept:
        cache = ExchangeCache(1 << 20, can_spill=False)
        partition = KeptPartition(context, Retention.CACHING, cache, NoFiles(), first_rows={})
    for index, reader in enumerate(readers):
        partition.view(index, 0, _fail).attach(reader)
    keys = pa.array(of_consumer[row == 5_000] for row in range(8192))
    numbers = pa.array(range(8192 + 100))
    before = pa.total_allocated_bytes()
    for start in range(100):
        partition.emit(pa.record_batch({"k": keys, "x": numbers.slice(start, 8192)}))
        readers[0].got.clear()
        assert pa.total_allocated_bytes() - before < 5 << 20, f"{start} batches are in memory"
    partition.flush()
    assert readers[1].rows() == list(range(5_000, 5_100))


def _fail(error: Exception) -> None:
    raise error


def test_what_waits_for_a_batch_keeps_no_words_of_the_batches_it_was_cut_out_of() -> None:
    left: list[pa.RecordBatch] = []
    builder = BatchBuilder(10_000, 1 << 40, lambda batch, _: left.append(batch), lambda _: None)
    kind = pa.dictionary(pa.int16(), pa.string(), ordered=True)
    schema = pa.schema([pa.field("word", kind), ("n", pa.int64())], {"key": "value"})
    expected: list[dict[str, object]] = []
    for number in range(3):
        words = pa.array([f"{number}-{index:05}" for index in range(5_000)])
        indices = pa.array([*range(4_999), None], pa.int16())
        coded = pa.DictionaryArray.from_arrays(indices, words, ordered=True)
        part = pa.record_batch([coded, pa.array(range(5_000))], schema).slice(4_990)
        expected += part.to_pylist()
        builder.add(part, 100)
        builder.let_go()
    builder.cut()
    (batch,) = left
    assert batch.to_pylist() == expected
    assert batch.schema.equals(schema, check_metadata=True)
    assert len(batch.column("word").dictionary) == 3 * 9
