"""Aim: event-time windows of aggregates give what a row-by-row oracle gives, whatever the order of rows,
the watermarks between them and the cuts of the batches.

Method: random streams of batches and watermarks go through the operator and the oracle, which are
compared after every element; late rows too.
"""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock.aggregates.aggregates as agg
from penstock.config import Configuration
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME
from penstock.streams.windows import Window, session, sliding, tumbling
from taskmanager.operators import slice_tree, sliced_window
from taskmanager.operators.window_aggregate import window_aggregate_operator
from tests.support.examples import examples
from tests.support.operator_harness import OperatorHarness
from tests.support.window_oracle import MAX_TIME, WindowOracle, aggregate, key_of
from tests.support.window_specs import (
    NUMBERS,
    OBJECTS,
    SCHEMA,
    batch_of,
    window_aggregate_spec,
)

ALL = {**NUMBERS, **OBJECTS}
Element = list[dict[str, Any]] | int

ROWS = st.fixed_dictionaries(
    {
        "k": st.one_of(st.none(), st.integers(0, 3)),
        "x": st.one_of(st.none(), st.integers(-5, 5)),
        "f": st.sampled_from([None, math.nan, -1.5, 0.0, 2.25]),
        "s": st.sampled_from([None, "", "a", "bb"]),
        EVENT_TIME: st.integers(-20, 60),
    }
)
STREAMS = st.lists(
    st.one_of(st.lists(ROWS, min_size=1, max_size=12), st.integers(-25, 70)), max_size=12
)
WINDOWS = st.sampled_from(
    [
        tumbling(10),
        tumbling(10, offset=-3),
        sliding(10, 5),
        sliding(10, 4, offset=1),
        sliding(7, 7),
        sliding(24, 1),
        sliding(36, 3, offset=1),
        session(3),
        session(8),
    ]
)


@examples(200)
@mock.patch.object(slice_tree, "SLICES_MIN", 2)
@given(
    stream=STREAMS,
    window=WINDOWS,
    lateness=st.sampled_from([0, 1, 7, 1000]),
    keyed=st.booleans(),
    batch_rows=st.sampled_from([1, 3, 8192]),
    late_tag=st.sampled_from(["", "late"]),
    aggregates=st.sampled_from([ALL, NUMBERS]),
)
def test_equals_the_oracle_after_every_element(
    stream: list[Element],
    window: Window,
    lateness: int,
    keyed: bool,
    batch_rows: int,
    late_tag: str,
    aggregates: dict[str, agg.Aggregate],
) -> None:
    keys = ("k",) if keyed else ()
    spec = window.to_proto("event", lateness, late_tag)
    harness = _harness(spec, keys, batch_rows, aggregates)
    oracle = _oracle(spec, keys)
    late: list[dict[str, Any]] = []
    for element in [*stream, MAX_TIME]:
        if isinstance(element, int):
            if element < oracle.now:
                continue
            expected = oracle.watermark(element)
            harness.watermark(element)
            assert harness.controls[-1].timestamp_ms == element
        else:
            expected = oracle.push(element, lambda row: row[EVENT_TIME])
            harness.push(batch_of(element))
        late += harness.side("late")
        assert all(batch.num_rows <= batch_rows for batch in harness.batches)
        ends = [row[EVENT_TIME] for row in harness.rows(event_time=True)]
        assert ends == sorted(ends)
        assert _comparable(harness.take_rows()) == _comparable(_results(expected, keys, aggregates))
    assert harness.counters.late_records == len(oracle.late)
    if late_tag:
        assert _as_text(late) == _as_text(oracle.late)
    _assert_empty(harness)


@examples(60)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=60),
    window=WINDOWS,
    cut=st.integers(1, 20),
    keyed=st.booleans(),
)
def test_batch_cuts_change_nothing(
    rows: list[dict[str, Any]], window: Window, cut: int, keyed: bool
) -> None:
    results = []
    for size in (len(rows), cut):
        harness = _harness(window.to_proto(), ("k",) if keyed else (), 8192)
        harness.watermark(0)
        for start in range(0, len(rows), size):
            harness.push(batch_of(rows[start : start + size]))
        harness.end()
        results.append((_comparable(harness.take_rows()), harness.counters.late_records))
    assert results[0] == results[1]


@examples(40)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=60),
    window=WINDOWS,
    limit=st.integers(1, 40),
    scattered=st.integers(1, 8),
)
def test_how_long_scattered_rows_are_held_changes_nothing(
    rows: list[dict[str, Any]], window: Window, limit: int, scattered: int
) -> None:
    results = []
    for rows_max, scattered_max in ((1, 0), (limit, scattered), (10**6, 32)):
        with (
            mock.patch.object(sliced_window, "HELD_ROWS_MAX", rows_max),
            mock.patch.object(sliced_window, "SCATTERED_ROWS_MAX", scattered_max),
        ):
            harness = _harness(window.to_proto(), ("k",), 8192)
            for start in range(0, len(rows), 7):
                harness.push(batch_of(rows[start : start + 7]))
                harness.watermark(rows[start][EVENT_TIME] - 10)
            harness.end()
            results.append((_comparable(harness.take_rows()), harness.counters.late_records))
    assert results[0] == results[1] == results[2]


def test_keys_that_are_equal_are_one_group() -> None:
    schema = SCHEMA.set(0, pa.field("k", pa.float64()))
    spec = window_aggregate_spec(
        tumbling(10).to_proto(), ("k", "s"), {"n": agg.count()}, schema=schema
    )
    harness = OperatorHarness(window_aggregate_operator(spec))
    values = [math.nan, -math.nan, 0.0, -0.0, None, None, 1.0]
    rows = [{"k": k, "x": 1, "f": 1.0, "s": "a", EVENT_TIME: 1} for k in values]
    harness.push(batch_of(rows, schema))
    harness.end()
    counts = {str(row["k"]): row["n"] for row in harness.take_rows()}
    assert counts == {"nan": 2, "0.0": 2, "None": 2, "1.0": 1}


def test_dictionary_encoded_keys_stay_dictionary_encoded() -> None:
    schema = SCHEMA.set(3, pa.field("s", pa.dictionary(pa.int32(), pa.string())))
    spec = window_aggregate_spec(
        tumbling(10).to_proto(), ("s",), {"n": agg.count(), "m": agg.max("s")}, schema=schema
    )
    harness = OperatorHarness(window_aggregate_operator(spec))
    rows = [{"k": 1, "x": 1, "f": 1.0, "s": s, EVENT_TIME: 1} for s in ("b", "a", "b", None)]
    harness.push(batch_of(rows, schema))
    harness.end()
    assert harness.batches[0].schema.field("s").type == schema.field("s").type
    assert {(row["s"], row["n"], row["m"]) for row in harness.take_rows()} == {
        ("b", 2, "b"),
        ("a", 1, "a"),
        (None, 1, None),
    }


def test_event_time_of_a_result_is_the_end_of_its_window() -> None:
    harness = _harness(tumbling(10).to_proto(), ("k",), 8192)
    harness.push(batch_of([{"k": 1, "x": 1, "f": 1.0, "s": "a", EVENT_TIME: 12}]))
    harness.end()
    (row,) = harness.take_rows(event_time=True)
    assert row[EVENT_TIME] == 19
    assert (row["window_start"].timestamp(), row["window_end"].timestamp()) == (0.01, 0.02)


def test_a_time_out_of_range_is_a_bad_record() -> None:
    harness = _harness(tumbling(10).to_proto(), ("k",), 8192)
    with pytest.raises(Exception, match="out of range"):
        harness.push(batch_of([{"k": 1, "x": 1, "f": 1.0, "s": "a", EVENT_TIME: 2**63 - 1}]))


def _harness(
    window: graph_pb2.WindowSpec,
    keys: tuple[str, ...],
    batch_rows: int,
    aggregates: dict[str, agg.Aggregate] = ALL,
) -> OperatorHarness:
    operator = window_aggregate_operator(window_aggregate_spec(window, keys, aggregates))
    config = Configuration.from_mapping({}).model_copy(update={"batch_rows": batch_rows})
    return OperatorHarness(operator, config=config)


def _oracle(spec: graph_pb2.WindowSpec, keys: tuple[str, ...]) -> WindowOracle:
    return WindowOracle(
        keys,
        spec.allowed_lateness_ms,
        spec.size_ms,
        spec.slide_ms,
        spec.offset_ms,
        spec.gap_ms,
    )


def _results(
    fired: list[tuple[Any, ...]], keys: tuple[str, ...], aggregates: dict[str, agg.Aggregate]
) -> list[dict[str, Any]]:
    return [
        {
            **dict(zip(keys, key, strict=True)),
            "window_start": start,
            "window_end": end,
            **{n: aggregate(a.function, a.input_column, rows) for n, a in aggregates.items()},
        }
        for key, start, end, rows in fired
    ]


def _comparable(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows as text, sorted: NaN equals NaN, bounds are milliseconds."""
    for row in rows:
        for name in ("window_start", "window_end"):
            if not isinstance(row[name], int):
                row[name] = round(row[name].timestamp() * 1000)
    return sorted(tuple(f"{k}={v!r}" for k, v in row.items()) for row in rows)


def _as_text(rows: list[dict[str, Any]]) -> list[str]:
    return [repr(sorted(row.items())) for row in rows]


def _assert_empty(harness: OperatorHarness) -> None:
    """What came has gone: no slice, no session, no key is left."""
    assert harness.state.namespaces("slices") == []
    assert harness.state.namespaces("firing") == []
    operator: Any = harness.operator
    if hasattr(operator, "_sessions"):
        assert len(operator._sessions) == 0
        assert len(operator._sessions._keys) == 0


def test_oracle_keys_are_canonical() -> None:
    assert key_of({"k": math.nan}, ("k",)) == key_of({"k": -math.nan}, ("k",))
