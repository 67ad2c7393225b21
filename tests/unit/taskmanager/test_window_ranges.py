"""Aim: where key-groups meet whose subtasks had come further and less far, each key's rows are late by its own, and no
window fires twice for a key.

Method: two subtasks get watermarks that differ, and are restored as one; what all of them give is looked at key by key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pytest
from typing_extensions import override

from penstock.functions.functions import Collector, WindowFunction, WindowInfo
from penstock.rows.schema import EVENT_TIME
from penstock.storage.key_groups import key_group_of, owner
from penstock.streams.windows import session, sliding, tumbling
from taskmanager.kernels import encode_keys
from taskmanager.operators.join_interval import IntervalJoinOperator
from taskmanager.operators.operator import Operator
from taskmanager.operators.operator_progress import RangeWatermarks
from taskmanager.operators.window_aggregate import window_aggregate_operator
from taskmanager.operators.window_function import window_function_operator
from tests.support.operator_harness import OperatorHarness
from tests.support.window_specs import (
    NUMBERS,
    batch_of,
    window_aggregate_spec,
    window_function_spec,
)
from tests.unit.taskmanager.test_joins import batch_of as side_batch
from tests.unit.taskmanager.test_joins import join_spec

KEYS = range(8)


class Listed(WindowFunction):
    @override
    def process(self, key: Any, window: WindowInfo, rows: Any, out: Collector) -> None:
        out.emit(k=rows[0].k, start=window.start_ms, count=len(rows))


def subtask_of(key: int) -> int:
    group = key_group_of(encode_keys([pa.array([key], pa.int64())]).hashes, 128)
    return owner(int(group[0]), 2, 128)


def aggregated(window: Any) -> Operator:
    return window_aggregate_operator(
        window_aggregate_spec(window.to_proto(), ("k",), {"count": NUMBERS["n"]})
    )


def listed(window: Any) -> Operator:
    schema = pa.schema([("k", pa.int64()), ("start", pa.int64()), ("count", pa.int64())])
    return window_function_operator(
        window_function_spec(window.to_proto(), ("k",), Listed(), declared=schema)
    )


def row(key: int, time: int) -> dict[str, Any]:
    return {"k": key, "x": 1, "f": None, "s": None, EVENT_TIME: time}


def fired(harness: OperatorHarness) -> list[tuple[int, int, int]]:
    """(key, start of the window, rows in it)."""
    found = []
    for each in harness.take_rows():
        start = each.get("start", each.get("window_start"))
        start = start if isinstance(start, int) else int(start.timestamp() * 1000)
        found.append((each["k"], start, each["count"]))
    return found


@pytest.mark.parametrize("make", [aggregated, listed])
@pytest.mark.parametrize("again", [False, True])
def test_no_window_fires_twice_where_ranges_meet(
    make: Callable[[Any], Operator], again: bool
) -> None:
    window = sliding(20, 10)
    assert {subtask_of(key) for key in KEYS} == {0, 1}
    subtasks = [OperatorHarness(make(window), subtask_index=i, parallelism=2) for i in range(2)]
    for key in KEYS:
        subtasks[subtask_of(key)].push(batch_of([row(key, 5), row(key, 15)]))
    subtasks[0].watermark(19)
    before = [one for harness in subtasks for one in fired(harness)]
    assert {start for _, start, _ in before} == {-10, 0}
    one = OperatorHarness(make(window), restored=[each.snapshot() for each in subtasks])
    if again:  # what is restored once more before the stream has come so far says the same
        one = OperatorHarness(make(window), restored=[one.snapshot()])
    one.push(batch_of([row(key, 6) for key in KEYS]))  # late where the window has fired
    one.push(batch_of([row(key, 25) for key in KEYS]))  # in time everywhere
    one.watermark(100)
    after = fired(one)
    wanted = {}
    for key in KEYS:
        more = int(subtask_of(key) == 1)
        wanted |= {(key, -10): 1 + more, (key, 0): 2 + more, (key, 10): 2, (key, 20): 1}
    assert Counter((key, start) for key, start, _ in before + after).most_common(1)[0][1] == 1
    assert {(key, start): count for key, start, count in before + after} == wanted


def test_rows_are_late_by_the_watermark_of_their_own_range() -> None:
    window = tumbling(10)
    subtasks = [
        OperatorHarness(aggregated(window), subtask_index=i, parallelism=2) for i in range(2)
    ]
    subtasks[0].watermark(19)
    one = OperatorHarness(aggregated(window), restored=[each.snapshot() for each in subtasks])
    one.push(batch_of([row(key, 5) for key in KEYS]))
    late = sum(subtask_of(key) == 0 for key in KEYS)
    assert one.counters.late_records == late
    one.watermark(19)
    assert {key for key, _, _ in fired(one)} == {key for key in KEYS if subtask_of(key) == 1}


def test_ranges_are_kept_until_the_stream_has_passed_them() -> None:
    ranges = RangeWatermarks([(9, 0, 63), (5, 64, 127)], range(128), 128)
    assert ranges.are_ahead(8)
    assert not ranges.are_ahead(9)
    assert ranges.after(7) == [(9, 0, 63), (7, 64, 127)]
    assert ranges.after(9) == [(9, 0, 127)]


def with_lateness(window: Any, lateness_ms: int) -> Operator:
    spec = window.to_proto("event", lateness_ms)
    return window_aggregate_operator(window_aggregate_spec(spec, ("k",), {"count": NUMBERS["n"]}))


def met(make: Callable[[], Operator], *, again: bool) -> tuple[OperatorHarness, list[Any]]:
    """One subtask of two, of which the first had come to 19; what both had fired before."""
    subtasks = [OperatorHarness(make(), subtask_index=i, parallelism=2) for i in range(2)]
    for key in KEYS:
        subtasks[subtask_of(key)].push(batch_of([row(key, 5)]))
    subtasks[0].watermark(19)
    before = [one for harness in subtasks for one in fired(harness)]
    one = OperatorHarness(make(), restored=[each.snapshot() for each in subtasks])
    if again:
        one = OperatorHarness(make(), restored=[one.snapshot()])
    return one, before


@pytest.mark.parametrize("again", [False, True])
def test_with_lateness_a_window_fires_again_for_new_rows_only(again: bool) -> None:
    one, before = met(lambda: with_lateness(tumbling(10), 100), again=again)
    ahead = {key for key in KEYS if subtask_of(key) == 0}
    assert {key for key, _, _ in before} == ahead
    one.push(batch_of([row(key, 6) for key in (min(ahead), *sorted(set(KEYS) - ahead))]))
    assert fired(one) == [(min(ahead), 0, 2)]
    one.watermark(19)
    assert sorted(fired(one)) == [(key, 0, 2) for key in sorted(set(KEYS) - ahead)]


@pytest.mark.parametrize("again", [False, True])
def test_no_session_begins_again_where_ranges_meet(again: bool) -> None:
    one, before = met(lambda: aggregated(session(5)), again=again)
    ahead = {key for key in KEYS if subtask_of(key) == 0}
    assert {key for key, _, _ in before} == ahead
    one.push(batch_of([row(key, 6) for key in KEYS]))
    assert one.counters.late_records == len(ahead)
    one.watermark(100)
    assert sorted(fired(one)) == [(key, 5, 2) for key in sorted(set(KEYS) - ahead)]


@pytest.mark.parametrize("again", [False, True])
def test_an_interval_join_joins_what_it_would_have_joined(again: bool) -> None:
    spec = join_spec([pa.field("k", pa.int64())], within=(0, 10))

    def side(index: int, time: int, keys: Iterable[int]) -> pa.RecordBatch:
        rows = [{"k": key, "x": 1, "v": "", "w": 1.0, EVENT_TIME: time} for key in keys]
        return side_batch(spec, index, rows)

    subtasks = [
        OperatorHarness(IntervalJoinOperator(spec), subtask_index=i, parallelism=2)
        for i in range(2)
    ]
    for key in KEYS:
        subtasks[subtask_of(key)].push(side(0, 5, [key]), 0)
    subtasks[0].watermark(19)
    one = OperatorHarness(
        IntervalJoinOperator(spec), restored=[each.snapshot() for each in subtasks]
    )
    if again:
        one = OperatorHarness(IntervalJoinOperator(spec), restored=[one.snapshot()])
    one.push(side(1, 8, KEYS), 1)
    ahead = {key for key in KEYS if subtask_of(key) == 0}
    assert {each["k"] for each in one.take_rows()} == set(KEYS) - ahead
    assert one.counters.late_records == len(ahead)
