"""Aim: count windows and windows of processing time, keyed and not, with aggregates of every kind.

Method: the same row-by-row oracle; in processing time the clock's time stands in for the rows' own.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rows.schema import EVENT_TIME
from penstock.streams.windows import Window, count_window, session, sliding, tumbling
from taskmanager.operators.window_aggregate import window_aggregate_operator
from tests.support.examples import examples
from tests.support.operator_harness import OperatorHarness
from tests.support.window_oracle import MAX_TIME, WindowOracle, aggregate, key_of
from tests.support.window_specs import NUMBERS, OBJECTS, batch_of, window_aggregate_spec

ALL = {**NUMBERS, **OBJECTS}
ROWS = st.fixed_dictionaries(
    {
        "k": st.one_of(st.none(), st.integers(0, 3)),
        "x": st.one_of(st.none(), st.integers(-5, 5)),
        "f": st.sampled_from([None, -1.5, 0.0, 2.25]),
        "s": st.sampled_from([None, "", "a", "bb"]),
        EVENT_TIME: st.integers(0, 60),
    }
)
BATCHES = st.lists(st.lists(ROWS, min_size=1, max_size=12), max_size=10)


@examples(80)
@given(batches=BATCHES, size=st.integers(1, 5), keyed=st.booleans())
def test_count_windows(batches: list[list[dict[str, Any]]], size: int, keyed: bool) -> None:
    keys = ("k",) if keyed else ()
    spec = window_aggregate_spec(count_window(size).to_proto(), keys, ALL)
    harness = OperatorHarness(window_aggregate_operator(spec))
    filled: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    windows: dict[tuple[Any, ...], int] = {}
    for rows in batches:
        expected = []
        for row in rows:
            key = key_of(row, keys)
            held = filled.setdefault(key, [])
            held.append(row)
            if len(held) == size:
                expected.append(
                    {
                        **dict(zip(keys, key, strict=True)),
                        "window_index": windows.get(key, 0),
                        **_aggregates(held),
                        EVENT_TIME: row[EVENT_TIME],
                    }
                )
                windows[key] = windows.get(key, 0) + 1
                filled[key] = []
        harness.push(batch_of(rows))
        assert [repr(row) for row in harness.take_rows(event_time=True)] == [
            repr(row) for row in expected
        ]
    harness.end()
    assert harness.take_rows() == []


STEPS = st.lists(st.tuples(st.integers(0, 15), st.lists(ROWS, min_size=1, max_size=6)), max_size=10)


@examples(80)
@given(
    steps=STEPS,
    window=st.sampled_from([tumbling(10), sliding(10, 4), session(5)]),
    keyed=st.booleans(),
)
def test_processing_time(
    steps: list[tuple[int, list[dict[str, Any]]]], window: Window, keyed: bool
) -> None:
    keys = ("k",) if keyed else ()
    spec = window.to_proto("processing")
    harness = OperatorHarness(
        window_aggregate_operator(window_aggregate_spec(spec, keys, ALL)), now_ms=100
    )
    oracle = WindowOracle(keys, 0, spec.size_ms, spec.slide_ms, spec.offset_ms, spec.gap_ms)
    now, expected = 100, []
    for elapsed, rows in steps:
        now += elapsed
        expected += oracle.watermark(now - 1)
        harness.advance_clock(now)
        expected += oracle.push(rows, lambda _row, at=now: at)  # type: ignore[misc]
        harness.push(batch_of(rows))
    harness.watermark(MAX_TIME)
    before_end = len(harness.rows())
    expected_before_end = len(expected)
    assert before_end == expected_before_end  # watermarks close no window of processing time
    expected += oracle.watermark(MAX_TIME)
    harness.end()
    found = sorted(
        repr(
            {**row, "window_start": _ms(row["window_start"]), "window_end": _ms(row["window_end"])}
        )
        for row in harness.rows()
    )
    assert found == sorted(
        repr(
            {
                **dict(zip(keys, key, strict=True)),
                "window_start": start,
                "window_end": end,
                **_aggregates(rows),
            }
        )
        for key, start, end, rows in expected
    )


@pytest.mark.parametrize("window", [tumbling(10), session(10)])
def test_a_clock_that_goes_back_does_not_open_windows_that_have_fired(window: Window) -> None:
    spec = window_aggregate_spec(window.to_proto("processing"), ("k",), {"n": ALL["n"]})
    harness = OperatorHarness(window_aggregate_operator(spec), now_ms=5)
    row = {"k": 1, "x": 1, "f": 1.0, "s": "a", EVENT_TIME: 0}
    harness.push(batch_of([row]))
    harness.advance_clock(30)
    assert [r["n"] for r in harness.take_rows()] == [1]
    harness.clock.time_ms = 2
    harness.push(batch_of([row]))
    harness.advance_clock(60)
    assert [r["n"] for r in harness.take_rows()] == [1]


@pytest.mark.parametrize("window", [tumbling(10), sliding(10, 5), session(10)])
def test_windows_that_have_seen_the_end_of_data_go_on_with_the_clock(window: Window) -> None:
    """As behind a savepoint of ``stop --drain``."""
    spec = window_aggregate_spec(window.to_proto("processing"), ("k",), {"n": ALL["n"]})
    row = {"k": 1, "x": 1, "f": 1.0, "s": "a", EVENT_TIME: 0}
    drained = OperatorHarness(window_aggregate_operator(spec), now_ms=5)
    drained.push(batch_of([row]))
    drained.end()
    fired = len(drained.take_rows())
    assert fired
    resumed = OperatorHarness(
        window_aggregate_operator(spec), now_ms=1_005, restored=[drained.snapshot()]
    )
    resumed.push(batch_of([row]))
    resumed.advance_clock(1_040)
    assert len(resumed.take_rows()) == fired


def _aggregates(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {n: aggregate(a.function, a.input_column, rows) for n, a in ALL.items()}


def _ms(value: Any) -> int:
    return round(value.timestamp() * 1000)
