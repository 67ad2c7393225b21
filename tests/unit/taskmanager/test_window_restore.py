"""Aim: windows and running aggregates go on from a checkpoint as if nothing had happened, whenever it was
taken, however often, through aborted checkpoints, and at another parallelism.

Method: random streams and random checkpoints, crashes and rescales; the output of every element must be
that of an operator that nothing happens to (which other tests compare with the row-by-row oracle).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

import penstock.aggregates.aggregates as agg
from penstock.functions.functions import Collector, WindowFunction, WindowInfo
from penstock.rows.schema import EVENT_TIME
from penstock.streams.windows import Window, count_window, session, sliding, tumbling
from taskmanager.operators.operator import Operator
from taskmanager.operators.running_aggregate import running_aggregate_operator
from taskmanager.operators.window_aggregate import window_aggregate_operator
from taskmanager.operators.window_function import window_function_operator
from taskmanager.state import distinct_count, slot_column, slot_keys, value_log
from tests.support.examples import examples
from tests.support.restoring_driver import Event, RestoringDriver, uninterrupted
from tests.support.window_oracle import MAX_TIME, WindowOracle
from tests.support.window_specs import (
    NUMBERS,
    OBJECTS,
    batch_of,
    running_aggregate_spec,
    window_aggregate_spec,
    window_function_spec,
)


class Spread(agg.AggregateFunction):
    """Largest minus smallest, by way of a list and a dict."""

    @override
    def create_accumulator(self) -> Any:
        return {"values": [], "at": (0, None)}

    @override
    def add(self, accumulator: Any, value: Any) -> Any:
        accumulator["values"].append(value)
        accumulator["at"] = (accumulator["at"][0] + 1, value)
        return accumulator

    @override
    def merge(self, accumulator: Any, other: Any) -> Any:
        return {
            "values": accumulator["values"] + other["values"],
            "at": (accumulator["at"][0] + other["at"][0], None),
        }

    @override
    def result(self, accumulator: Any) -> int:
        values = [value for value in accumulator["values"] if value is not None]
        return max(values, default=0) - min(values, default=0) + 100 * accumulator["at"][0]


class ListRows(WindowFunction):
    @override
    def process(self, key: Any, window: WindowInfo, rows: Any, out: Collector) -> None:
        xs = [row.x for row in rows]
        out.emit(key=repr(key), start=window.start_ms, end=window.end_ms, xs=xs)


def concatenate(a: Any, b: Any) -> Any:
    return {**a, "x": b.x, "s": (a.s or "") + (b.s or "")}


LISTED = pa.schema(
    [
        ("key", pa.string()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("xs", pa.list_(pa.int64())),
    ]
)
ALL = {**NUMBERS, **OBJECTS, "spread": agg.aggregate(Spread(), "x", type="int64")}
ROWS = st.fixed_dictionaries(
    {
        "k": st.one_of(st.none(), st.integers(0, 3)),
        "x": st.one_of(st.none(), st.integers(-5, 5)),
        "f": st.sampled_from([None, -1.5, 0.0, 2.25]),
        "s": st.sampled_from([None, "", "a", "bb"]),
        EVENT_TIME: st.integers(-20, 60),
    }
)
STREAMS = st.lists(
    st.one_of(st.lists(ROWS, min_size=1, max_size=8), st.integers(-25, 70)), max_size=12
)
EVENTS = st.dictionaries(
    st.integers(0, 11),
    st.lists(
        st.builds(
            Event,
            st.sampled_from(["take", "slow", "slow", "abort", "crash", "rescale"]),
            st.integers(1, 3),
        ),
        min_size=1,
        max_size=2,
    ),
    max_size=6,
)
KEYS = st.sampled_from([(), ("k",), ("k", "s")])


@pytest.fixture(autouse=True)
def compact_early(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (distinct_count, slot_column, slot_keys, value_log):
        monkeypatch.setattr(module, "_COMPACT_ABOVE", 3)


def _elements(stream: list[Any]) -> list[Any]:
    """Batches, and times that only go forward."""
    elements: list[Any] = []
    now = -(2**63)
    for element in stream:
        if isinstance(element, int):
            now = max(now, element)
            elements.append(now)
        else:
            elements.append(batch_of(element))
    return elements


def _check(
    make: Callable[[], Operator],
    keys: tuple[str, ...],
    elements: list[Any],
    events: dict[int, list[Event]],
    **options: Any,
) -> None:
    expected = uninterrupted(make, elements, **options)
    assert RestoringDriver(make, keys, **options).run(elements, events) == expected


@examples(60)
@given(
    stream=STREAMS,
    events=EVENTS,
    window=st.sampled_from([tumbling(10), sliding(10, 5), sliding(10, 4), session(4)]),
    lateness=st.sampled_from([0, 7]),
    keys=KEYS,
    aggregates=st.sampled_from([NUMBERS, OBJECTS, ALL]),
)
def test_aggregates_in_event_time(
    stream: list[Any],
    events: dict[int, list[Event]],
    window: Window,
    lateness: int,
    keys: tuple[str, ...],
    aggregates: dict[str, agg.Aggregate],
) -> None:
    window_spec = window.to_proto("event", lateness)
    window_spec.late_tag = "late"
    spec = window_aggregate_spec(window_spec, keys, aggregates)
    _check(lambda: window_aggregate_operator(spec), keys, _elements(stream), events)


@examples(60)
@given(
    stream=STREAMS,
    events=EVENTS,
    window=st.sampled_from([tumbling(10), sliding(10, 4), session(4), count_window(3)]),
    lateness=st.sampled_from([0, 7]),
    keys=KEYS,
    reduce=st.booleans(),
)
def test_functions_in_event_time(
    stream: list[Any],
    events: dict[int, list[Event]],
    window: Window,
    lateness: int,
    keys: tuple[str, ...],
    reduce: bool,
) -> None:
    is_count = window == count_window(3)
    window_spec = window.to_proto() if is_count else window.to_proto("event", lateness)
    function: Any = concatenate if reduce else ListRows()
    spec = window_function_spec(window_spec, keys, function, declared=None if reduce else LISTED)
    _check(lambda: window_function_operator(spec), keys, _elements(stream), events)


@examples(40)
@given(stream=STREAMS, events=EVENTS, size=st.integers(1, 5), keys=KEYS)
def test_count_windows(
    stream: list[Any], events: dict[int, list[Event]], size: int, keys: tuple[str, ...]
) -> None:
    spec = window_aggregate_spec(count_window(size).to_proto(), keys, ALL)
    _check(lambda: window_aggregate_operator(spec), keys, _elements(stream), events)


@examples(40)
@given(
    stream=STREAMS, events=EVENTS, keys=KEYS, aggregates=st.sampled_from([NUMBERS, OBJECTS, ALL])
)
def test_running_aggregates(
    stream: list[Any],
    events: dict[int, list[Event]],
    keys: tuple[str, ...],
    aggregates: dict[str, agg.Aggregate],
) -> None:
    spec = running_aggregate_spec(keys, aggregates)
    _check(lambda: running_aggregate_operator(spec), keys, _elements(stream), events)


@examples(40)
@given(
    stream=STREAMS,
    events=EVENTS,
    window=st.sampled_from([tumbling(10), sliding(10, 4), session(5)]),
    keys=KEYS,
    as_function=st.booleans(),
)
def test_processing_time(
    stream: list[Any],
    events: dict[int, list[Event]],
    window: Window,
    keys: tuple[str, ...],
    as_function: bool,
) -> None:
    window_spec = window.to_proto("processing")
    if as_function:
        function_spec = window_function_spec(window_spec, keys, ListRows(), declared=LISTED)
        make = lambda: window_function_operator(function_spec)  # noqa: E731
    else:
        spec = window_aggregate_spec(window_spec, keys, ALL)
        make = lambda: window_aggregate_operator(spec)  # noqa: E731
    elements = [e if isinstance(e, pa.RecordBatch) else max(e, 0) for e in _elements(stream)]
    _check(make, keys, elements, events, is_processing_time=True)


@examples(60)
@given(
    stream=STREAMS,
    events=EVENTS,
    window=st.sampled_from([tumbling(10), sliding(10, 5), sliding(10, 4), session(4)]),
    lateness=st.sampled_from([0, 7]),
    keys=KEYS,
)
def test_equals_the_oracle(
    stream: list[Any],
    events: dict[int, list[Event]],
    window: Window,
    lateness: int,
    keys: tuple[str, ...],
) -> None:
    window_spec = window.to_proto("event", lateness)
    aggregates = {"n": NUMBERS["n"], "xs": OBJECTS["list_x"], "low": NUMBERS["min_x"]}
    spec = window_aggregate_spec(window_spec, keys, aggregates)
    oracle = WindowOracle(
        keys,
        lateness,
        window_spec.size_ms,
        window_spec.slide_ms,
        window_spec.offset_ms,
        window_spec.gap_ms,
    )
    expected = []
    for element in [*_elements(stream), MAX_TIME]:
        if isinstance(element, int):
            fired = oracle.watermark(element)
        else:
            rows = element.to_pylist()
            fired = oracle.push(rows, lambda row: row[EVENT_TIME])
        expected.append(sorted(repr(_expected(*window)) for window in fired))

    def shown(row: dict[str, Any]) -> str:
        start, end = (
            round(row[name].timestamp() * 1000) for name in ("window_start", "window_end")
        )
        key = tuple(row[name] for name in keys)
        return repr((key, start, end, row["n"], row["xs"], row["low"]))

    driver = RestoringDriver(lambda: window_aggregate_operator(spec), keys, show=shown)
    assert driver.run(_elements(stream), events) == expected


def _expected(key: Any, start: int, end: int, rows: list[dict[str, Any]]) -> tuple[Any, ...]:
    xs = [row["x"] for row in rows if row["x"] is not None]
    return key, start, end, len(rows), xs, min(xs, default=None)
