"""Aim: PARTIAL in front of FINAL gives what COMPLETE gives, for windows and running aggregates, whatever
the mix of rows and partial rows; and the partial phase gives up where it does not shrink batches.

Method: random batches go through both ways; results are compared as sets of rows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.aggregates as agg
from common.elements import CheckpointBarrier
from penstock.errors import BadRecord
from penstock.pb import graph_pb2
from penstock.schema import EVENT_TIME
from penstock.window_schemas import can_pre_aggregate, is_partial, partial_schema
from penstock.windows import count_window, session, sliding, tumbling
from taskmanager.operators.pre_aggregate import ReductionGauge
from taskmanager.operators.running_aggregate import running_aggregate_operator
from taskmanager.operators.window_aggregate import window_aggregate_operator
from tests.support.operator_harness import OperatorHarness
from tests.support.window_oracle import aggregate, key_of
from tests.support.window_specs import (
    NUMBERS,
    OBJECTS,
    SCHEMA,
    batch_of,
    running_aggregate_spec,
    window_aggregate_spec,
)

PARTIAL = graph_pb2.AGGREGATION_PHASE_PARTIAL
FINAL = graph_pb2.AGGREGATION_PHASE_FINAL

ROWS = st.fixed_dictionaries(
    {
        "k": st.one_of(st.none(), st.integers(0, 2)),
        "x": st.one_of(st.none(), st.integers(-5, 5)),
        "f": st.sampled_from([None, math.nan, -1.5, 2.25]),
        "s": st.sampled_from([None, "a"]),
        EVENT_TIME: st.integers(-20, 60),
    }
)
BATCHES = st.lists(
    st.tuples(st.lists(ROWS, min_size=1, max_size=12), st.booleans()), min_size=1, max_size=10
)


@settings(max_examples=150, deadline=None)
@given(
    batches=BATCHES,
    window=st.sampled_from([tumbling(10), sliding(10, 5), sliding(10, 4, offset=1)]),
    lateness=st.sampled_from([0, 7]),
    watermark=st.integers(-30, 60),
    keys=st.sampled_from([("k",), ("k", "s")]),
)
def test_windows_partial_then_final_is_complete(
    batches: list[tuple[list[dict[str, Any]], bool]],
    window: Any,
    lateness: int,
    watermark: int,
    keys: tuple[str, ...],
) -> None:
    spec = window.to_proto("event", lateness)
    complete = _window_harness(spec, keys)
    partial = _window_harness(spec, keys, PARTIAL)
    final = _window_harness(spec, keys, FINAL)
    for i, (rows, pre_aggregated) in enumerate(batches):
        if i == len(batches) // 2:
            complete.watermark(watermark)
            partial.watermark(watermark)
            for batch in partial.batches:
                final.push(batch)
            partial.emitted.clear()
            final.watermark(watermark)
        complete.push(batch_of(rows))
        if pre_aggregated:
            partial.push(batch_of(rows))
        else:
            partial.idle()
            partial.emitted.append(batch_of(rows))
        for batch in partial.batches:
            final.push(batch)
        partial.emitted.clear()
    complete.end()
    partial.end()
    for batch in partial.batches:
        final.push(batch)
    final.end()
    assert _newest(final.take_rows(), keys) == _newest(complete.take_rows(), keys)
    assert final.counters.late_records == complete.counters.late_records


@settings(max_examples=80, deadline=None)
@given(batches=BATCHES)
def test_running_aggregates_in_both_phases_equal_the_oracle(
    batches: list[tuple[list[dict[str, Any]], bool]],
) -> None:
    complete = _running_harness({**NUMBERS, **OBJECTS})
    partial, final = _running_harness(NUMBERS, PARTIAL), _running_harness(NUMBERS, FINAL)
    seen: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for rows, pre_aggregated in batches:
        last: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in rows:
            key = key_of(row, ("k",))
            seen.setdefault(key, []).append(row)
            last.pop(key, None)
            last[key] = row
        expected = [
            {
                "k": row["k"],
                **{
                    n: aggregate(a.function, a.input_column, seen[key])
                    for n, a in {**NUMBERS, **OBJECTS}.items()
                },
                EVENT_TIME: row[EVENT_TIME],
            }
            for key, row in last.items()
        ]
        complete.push(batch_of(rows))
        found = complete.take_rows(event_time=True)
        assert [repr(row) for row in found] == [repr(row) for row in expected]
        if pre_aggregated:
            partial.push(batch_of(rows))
            for batch in partial.batches:
                final.push(batch)
            partial.emitted.clear()
        else:
            final.push(batch_of(rows))
        numbers = [{k: v for k, v in row.items() if k not in OBJECTS} for row in expected]
        assert _text(final.take_rows(event_time=True)) == _text(numbers)


def test_a_partial_batch_is_smaller_and_has_the_announced_schema() -> None:
    spec = tumbling(10).to_proto()
    harness = _window_harness(spec, ("k",), PARTIAL)
    rows = [{"k": i % 2, "x": i, "f": None, "s": None, EVENT_TIME: 3 + i % 4} for i in range(100)]
    for start in range(0, 100, 10):
        harness.push(batch_of(rows[start : start + 10]))
    assert harness.batches == []
    harness.idle()
    (batch,) = harness.batches
    assert batch.num_rows == 2
    assert is_partial(batch.schema)
    assert batch.schema == partial_schema(SCHEMA, ("k",), NUMBERS, spec)


def test_batches_that_do_not_shrink_pass_unchanged_and_rest_grows() -> None:
    harness = _window_harness(tumbling(10).to_proto(), ("k",), PARTIAL)
    arrays = [
        pa.array(np.arange(4000)),
        pa.array(np.arange(4000)),
        pa.nulls(4000, pa.float64()),
        pa.nulls(4000, pa.string()),
        pa.array(np.zeros(4000, np.int64)),
    ]
    batch = pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
    for _ in range(5):
        harness.push(batch)
    assert all(out.equals(batch) for out in harness.batches)

    gauge, tries = ReductionGauge(), []
    for i in range(200):
        if gauge.should_try():
            tries.append(i)
            gauge.tried(100, 90)
    assert tries == [0, 17, 50, 115]
    gauge = ReductionGauge()
    assert all(gauge.should_try() and gauge.tried(100, 10) for _ in range(5))


def test_overflow_in_the_partial_phase_names_key_and_aggregate() -> None:
    harness = _window_harness(tumbling(10).to_proto(), ("k",), PARTIAL)
    row = {"k": 7, "x": 2**62, "f": None, "s": None, EVENT_TIME: 1}
    with pytest.raises(BadRecord, match=r"sum_x.*k=7"):
        harness.push(batch_of([row, row, row]))


def test_what_can_be_pre_aggregated() -> None:
    event = tumbling(10).to_proto()
    assert can_pre_aggregate(NUMBERS, SCHEMA, ("k",), event)
    assert can_pre_aggregate(NUMBERS, SCHEMA, ("k",))
    assert not can_pre_aggregate({"l": agg.last("x")}, SCHEMA, ("k",), event)
    assert not can_pre_aggregate({"m": agg.min("s")}, SCHEMA, ("k",), event)
    assert not can_pre_aggregate(NUMBERS, SCHEMA, (), event)
    assert not can_pre_aggregate(NUMBERS, SCHEMA, ("k",), tumbling(10).to_proto("processing"))
    assert not can_pre_aggregate(NUMBERS, SCHEMA, ("k",), tumbling(10).to_proto(late_tag="l"))
    assert not can_pre_aggregate(NUMBERS, SCHEMA, ("k",), session(10).to_proto())
    assert not can_pre_aggregate(NUMBERS, SCHEMA, ("k",), count_window(10).to_proto())


def _window_harness(
    spec: graph_pb2.WindowSpec,
    keys: tuple[str, ...],
    phase: graph_pb2.AggregationPhase.ValueType = graph_pb2.AGGREGATION_PHASE_COMPLETE,
) -> OperatorHarness:
    operator = window_aggregate_spec(spec, keys, NUMBERS, phase=phase)
    return OperatorHarness(window_aggregate_operator(operator))


def _running_harness(
    aggregates: dict[str, agg.Aggregate],
    phase: graph_pb2.AggregationPhase.ValueType = graph_pb2.AGGREGATION_PHASE_COMPLETE,
) -> OperatorHarness:
    operator = running_aggregate_spec(("k",), aggregates, phase=phase)
    return OperatorHarness(running_aggregate_operator(operator))


def _newest(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> dict[str, str]:
    """The last result of each window: late rows of one bundle give one update, not one per batch."""
    return {repr([row[name] for name in (*keys, "window_start")]): repr(row) for row in rows}


def _text(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(repr(row) for row in rows)


def test_a_bundle_leaves_ahead_of_the_barrier() -> None:
    aggregates = {"n": NUMBERS["n"], "sum_x": NUMBERS["sum_x"]}
    spec = window_aggregate_spec(tumbling(10).to_proto(), ("k",), aggregates, phase=PARTIAL)
    harness = OperatorHarness(window_aggregate_operator(spec))
    row = {"k": 1, "x": 2, "f": 1.0, "s": "a", EVENT_TIME: 3}
    harness.push(batch_of([row] * 10))
    harness.push(batch_of([row] * 10))
    assert harness.emitted == []
    with pytest.raises(AssertionError, match="ahead of the barrier"):
        harness.operator.prepare_snapshot(1)
    harness.snapshot()
    partial, barrier = harness.emitted
    assert isinstance(partial, pa.RecordBatch)
    assert is_partial(partial.schema)
    assert isinstance(barrier, CheckpointBarrier)
    harness.end()
    assert len(harness.batches) == 1
