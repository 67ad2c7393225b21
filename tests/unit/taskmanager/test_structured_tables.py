"""Aim: what tables of windows put into a segment: what has changed and nothing else, never a number of the
process; what is gone leaves it; their sizes are near the truth.

Method: tables by themselves, sealed by hand.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.aggregates.aggregate_layout import GroupColumnSpec
from penstock.rows.schema import EVENT_TIME
from penstock.storage.key_groups import key_group_of
from penstock.streams.windows import sliding
from taskmanager.kernels import AccumulatorKind, encode_keys
from taskmanager.operators.aggregation import AggregateInputs
from taskmanager.operators.custom_aggregate import object_bytes
from taskmanager.operators.operator import Operator
from taskmanager.operators.operator_progress import ArrivalCounter, WatermarkState
from taskmanager.operators.window_aggregate import window_aggregate_operator
from taskmanager.state.count_table import CountTable
from taskmanager.state.group_columns import group_column
from taskmanager.state.instances import InstanceTable
from taskmanager.state.row_table import RowDescriptor, RowTable, part_rows
from taskmanager.state.session_table import SessionTable
from taskmanager.state.value_log import GroupedLog
from tests.support.operator_harness import OperatorHarness
from tests.support.window_specs import NUMBERS, OBJECTS, batch_of, window_aggregate_spec

GROUPS = 128
EVERYTHING = 1 << 20
ROWS = RowDescriptor(pa.schema([("k", pa.int64()), ("x", pa.string())]), ("k",))


def _sessions(gap_ms: int = 10) -> SessionTable:
    return SessionTable([pa.int64()], gap_ms, GroupedLog(pa.int64()))


def _add(table: SessionTable, *rows: tuple[int, int]) -> None:
    """Rows of (key, time); the time is also what the session holds."""
    keys = table.key_indices(encode_keys([pa.array([key for key, _ in rows], pa.int64())]))
    times = np.array([time for _, time in rows], np.int64)
    update = table.add(keys, times)
    log = table.contents
    assert isinstance(log, GroupedLog)
    if len(update.source):
        log.merge(log, update.source, update.target)
        log.clear(update.source)
    log.append(update.of_row, times, pa.array(times))


def _segment(table: Any, since_version: int) -> list[tuple[Any, ...]]:
    """(is deleted, columns...) without the key-groups, which must ascend batch by batch."""
    sealed = table.seal(since_version, GROUPS)
    assert sealed.since_version == since_version
    rows = []
    for batch in sealed.batches():
        groups = batch.column(0).to_numpy()
        assert (np.diff(groups.astype(np.int64)) >= 0).all()
        keys = encode_keys([batch.column("key_0" if "key_0" in batch.schema.names else "k")])
        assert (key_group_of(keys.hashes, GROUPS) == groups).all()
        rows += [tuple(row.values())[1:] for row in batch.to_pylist()]
    return rows


def _held(*times: int) -> list[dict[str, int]]:
    return [{"sequence": time, "value": time} for time in times]


def test_a_session_is_known_by_key_and_start() -> None:
    table = _sessions()
    _add(table, (1, 0), (2, 5), (1, 100))
    assert sorted(_segment(table, 0)) == [
        (False, 1, 0, 10, False, _held(0)),
        (False, 1, 100, 110, False, _held(100)),
        (False, 2, 5, 15, False, _held(5)),
    ]
    assert not table.is_changed(1)
    _add(table, (2, 12))
    assert _segment(table, 1) == [(False, 2, 5, 22, False, _held(5, 12))]
    assert not table.is_changed(2)


def test_a_session_that_starts_earlier_or_is_taken_in_leaves_a_tombstone() -> None:
    table = _sessions()
    _add(table, (1, 0), (1, 20), (2, 20))
    _segment(table, 0)
    _add(table, (1, 10), (2, 15))
    rows = _segment(table, 1)
    assert sorted(row[:3] for row in rows if row[0]) == [(True, 1, 20), (True, 2, 20)]
    assert sorted(row for row in rows if not row[0]) == [
        (False, 1, 0, 30, False, _held(0, 10, 20)),
        (False, 2, 15, 30, False, _held(15, 20)),
    ]
    assert all(value is None for row in rows if row[0] for value in row[3:])


def test_what_no_snapshot_can_know_leaves_no_tombstone() -> None:
    table = _sessions()
    _add(table, (1, 0))
    table.remove(table.due(50))
    assert _segment(table, 0) == []
    _add(table, (1, 0))
    assert len(_segment(table, 0)) == 1
    table.remove(table.due(50))
    assert [row[:3] for row in _segment(table, 2)] == [(True, 1, 0)]
    table.forget(3)
    assert _segment(table, 3) == []


def test_the_last_row_of_a_session_counts_and_loading_is_no_change() -> None:
    table = _sessions()
    batches = []
    versions = [0]
    for rows in ([(1, 0), (2, 0)], [(1, 8)], [(1, -4), (3, 1)]):
        _add(table, *rows)
        sealed = table.seal(versions[-1], GROUPS)
        batches += list(sealed.batches())
        versions.append(sealed.version)
    table.remove(table.due(10))  # those of keys 2 and 3
    batches += list(table.seal(versions[-1], GROUPS).batches())
    restored = _sessions()
    restored.load(batches, EVERYTHING)
    assert not restored.is_changed(0)
    assert _segment(restored, 0) == [(False, 1, -4, 18, False, _held(-4, 0, 8))]
    assert len(restored) == 1
    _add(restored, (1, 18))
    assert _segment(restored, 1) == [(False, 1, -4, 28, False, _held(-4, 0, 8, 18))]


def test_count_windows_export_the_keys_that_had_rows() -> None:
    table = CountTable([pa.int64()], GroupedLog(pa.int64()))
    log = table.contents
    assert isinstance(log, GroupedLog)
    keys = table.key_indices(encode_keys([pa.array([7, 8])]))
    table.filled[keys], table.window_index[keys] = [1, 0], [4, 9]
    table.instance[keys[:1]] = table.numbers.allocate(1)
    log.append(table.instance[keys[:1]], np.array([3]), pa.array([30]))
    table.changed(keys)
    rows = _segment(table, 0)
    assert sorted(rows, key=repr) == [
        (False, 7, 1, 4, [{"sequence": 3, "value": 30}]),
        (False, 8, 0, 9, None),
    ]
    table.changed(keys[1:])
    assert [row[1] for row in _segment(table, 1)] == [8]


def test_rows_are_only_added() -> None:
    table = RowTable(ROWS)
    for i in range(3):
        batch = pa.record_batch([pa.array([i, 5]), pa.array([str(i), "s"])], schema=ROWS.schema)
        table.add(batch, np.array([2 * i, 2 * i + 1]))
        assert len(_segment(table, i)) == 2
    assert not table.is_changed(3)
    assert _segment(table, 3) == []
    assert sorted(_segment(table, 0)) == [
        (0, 0, "0"), (1, 5, "s"), (2, 1, "1"), (3, 5, "s"), (4, 2, "2"), (5, 5, "s")
    ]  # fmt: skip


def test_dictionary_columns_come_back_as_they_were() -> None:
    kind = pa.dictionary(pa.int8(), pa.string())
    descriptor = RowDescriptor(pa.schema([("k", kind)]), ("k",))
    table, restored = RowTable(descriptor), RowTable(descriptor)
    table.add(pa.record_batch([pa.array(["a", None, "a"], kind)], ["k"]), np.arange(3))
    restored.load(list(table.seal(0, GROUPS).batches()), EVERYTHING)
    assert part_rows([restored], 0, 1).schema == descriptor.schema
    assert part_rows([restored], 0, 1).to_pylist() == part_rows([table], 0, 1).to_pylist()


def test_slices_that_are_dropped_leave_the_snapshot() -> None:
    aggregates = {"n": NUMBERS["n"], "last_x": OBJECTS["last_x"]}
    spec = window_aggregate_spec(sliding(10, 5).to_proto(), ("k",), aggregates)
    harness = OperatorHarness(window_aggregate_operator(spec))
    row = {"k": 1, "x": 1, "f": 1.0, "s": "a"}
    for time in (2, 7, 12):
        harness.push(batch_of([{**row, EVENT_TIME: time}]))
    harness.snapshot()
    assert harness.state.namespaces("slices") == [0, 5, 10]
    harness.watermark(14)
    taken = harness.snapshot()
    restored = OperatorHarness(window_aggregate_operator(spec), restored=[taken])
    assert restored.state.namespaces("slices") == [10]
    restored.watermark(5)  # upstream begins anew: what was late stays late
    restored.push(batch_of([{**row, EVENT_TIME: 8}]))
    assert restored.counters.late_records == 1
    restored.push(batch_of([{**row, EVENT_TIME: 10}]))
    restored.watermark(100)
    assert [row["n"] for row in restored.take_rows()] == [2]


@pytest.mark.parametrize(
    ("items", "expected"),
    [([], -(2**63)), ([(7, 0, 127)], 7), ([(7, 0, 63), (5, 64, 127)], 5), ([(7, 0, 63)], 7)],
)
def test_a_watermark_is_the_smallest_of_those_who_had_the_key_groups(
    items: list[tuple[int, int, int]], expected: int
) -> None:
    taken = []
    for ms, first, last in items:
        harness = OperatorHarness(
            Operator(), subtask_index=first // 64, parallelism=128 // (last - first + 1)
        )
        WatermarkState(harness.context).keep(ms)
        counter = ArrivalCounter()
        counter.open(harness.context)
        counter.take(ms)
        counter.keep()
        taken.append(harness.snapshot())
    for subtask in range(2):
        harness = OperatorHarness(Operator(), restored=taken, subtask_index=subtask, parallelism=2)
        counter = ArrivalCounter()
        counter.open(harness.context)
        assert counter.take(1).tolist() == [max((ms for ms, *_ in items), default=0)]
    whole = OperatorHarness(Operator(), restored=taken)
    assert WatermarkState(whole.context).restored_ms() == expected


@pytest.mark.parametrize("count", [1, 1000, 50_000])
def test_sizes_are_near_the_truth(count: int) -> None:
    strings = pa.array([f"value {i:20}" for i in range(count)])
    numbers = np.arange(count)
    truth = strings.nbytes
    log = GroupedLog(pa.string())
    log.append(numbers, numbers, strings)
    rows = RowTable(ROWS)
    rows.add(pa.record_batch([pa.array(numbers), strings], schema=ROWS.schema), numbers)
    columns = [
        group_column(GroupColumnSpec("a", name, "x", pa.string(), kind))
        for name, kind in [
            ("first", pa.string()), ("min", pa.string()), ("count_distinct", pa.int64()),
            ("collect_list", pa.list_(pa.string())),
        ]
    ]  # fmt: skip
    for column in columns:
        column.update(numbers, numbers, strings)
        assert truth <= column.memory_bytes <= 7 * truth + 100_000
    assert truth <= log.memory_bytes() <= 3 * truth + 30_000
    assert truth <= rows.memory_bytes() <= 3 * truth
    sessions = SessionTable([pa.string()], 5, InstanceTable([AccumulatorKind.COUNT], []))
    update = sessions.add(sessions.key_indices(encode_keys([strings])), numbers)
    inputs = AggregateInputs([None], [None], [], np.empty(0, np.int64))
    sessions.contents.update(update.of_row, inputs)  # type: ignore[attr-defined]
    assert truth <= sessions.memory_bytes() <= 12 * truth + 50_000


def test_objects_are_sized_with_what_they_hold() -> None:
    large = {"values": [str(i) * 10 for i in range(10_000)]}
    expected = sum(len(text) + 49 for text in large["values"])
    assert expected / 2 < object_bytes(large) < expected * 2
    assert object_bytes([1, [1, 2], (3,)]) < 1000
