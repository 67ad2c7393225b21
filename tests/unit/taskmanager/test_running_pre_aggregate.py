"""Aim: PARTIAL in front of FINAL gives what COMPLETE gives for running aggregates, whatever the mix of rows and
partial rows, in the same order; and the partial phase gives up where it does not shrink batches.

Method: random batches go through both ways; results are compared row by row.
"""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import penstock.aggregates.aggregates as agg
from penstock.graph.window_schemas import can_pre_aggregate
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME
from penstock.streams.windows import count_window, session, tumbling
from taskmanager.operators.pre_aggregate import ReductionGauge
from taskmanager.operators.running_aggregate import running_aggregate_operator
from tests.support.examples import examples
from tests.support.operator_harness import OperatorHarness
from tests.support.window_oracle import aggregate, key_of
from tests.support.window_specs import (
    COUNTED,
    NUMBERS,
    OBJECTS,
    SCHEMA,
    batch_of,
    running_aggregate_spec,
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
PARTS = {**NUMBERS, **COUNTED}
ALL = {**PARTS, **OBJECTS}
BATCHES = st.lists(
    st.tuples(st.lists(ROWS, min_size=1, max_size=12), st.booleans()), min_size=1, max_size=10
)


@examples(80)
@given(batches=BATCHES)
def test_running_aggregates_in_both_phases_equal_the_oracle(
    batches: list[tuple[list[dict[str, Any]], bool]],
) -> None:
    complete = _running_harness(ALL)
    partial, final = _running_harness(PARTS, PARTIAL), _running_harness(PARTS, FINAL)
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
                **{n: aggregate(a.function, a.input_column, seen[key]) for n, a in ALL.items()},
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
        whole = ALL.keys() - PARTS.keys()
        parts = [{k: v for k, v in row.items() if k not in whole} for row in expected]
        assert [repr(row) for row in final.take_rows(event_time=True)] == [
            repr(row) for row in parts
        ]


def test_a_gauge_of_batches_rests_longer_after_each_failure() -> None:
    gauge, tries = ReductionGauge(), []
    for i in range(200):
        if gauge.should_try():
            tries.append(i)
            gauge.tried(100, 90)
    assert tries == [0, 17, 50, 115]
    gauge = ReductionGauge()
    assert all(gauge.should_try() and gauge.tried(100, 10) for _ in range(5))


def test_what_can_be_pre_aggregated() -> None:
    event = tumbling(10).to_proto()
    assert can_pre_aggregate(NUMBERS, SCHEMA, ("k",), event)
    assert can_pre_aggregate(NUMBERS, SCHEMA, ("k",))
    assert can_pre_aggregate({"s": agg.count_distinct("s"), **NUMBERS}, SCHEMA, ("k",), event)
    assert not can_pre_aggregate({"l": agg.last("x")}, SCHEMA, ("k",), event)
    assert not can_pre_aggregate({"m": agg.min("s")}, SCHEMA, ("k",), event)
    assert not can_pre_aggregate(NUMBERS, SCHEMA, (), event)
    assert not can_pre_aggregate(NUMBERS, SCHEMA, ("k",), tumbling(10).to_proto("processing"))
    assert not can_pre_aggregate(NUMBERS, SCHEMA, ("k",), tumbling(10).to_proto(late_tag="l"))
    assert not can_pre_aggregate(NUMBERS, SCHEMA, ("k",), session(10).to_proto())
    assert not can_pre_aggregate(NUMBERS, SCHEMA, ("k",), count_window(10).to_proto())


def _running_harness(
    aggregates: dict[str, agg.Aggregate],
    phase: graph_pb2.AggregationPhase.ValueType = graph_pb2.AGGREGATION_PHASE_COMPLETE,
) -> OperatorHarness:
    operator = running_aggregate_spec(("k",), aggregates, phase=phase)
    return OperatorHarness(running_aggregate_operator(operator))
