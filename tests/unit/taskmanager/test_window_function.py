"""Aim: ``reduce`` and ``process`` see each window's rows in order of arrival, for every kind of window,
and what the user's code does wrong is told with operator, row and traceback.

Method: a process function that lists its rows, and a reduce that concatenates them, against the oracle. The parts of
which sliding windows and sessions are made are reduced each for itself: there it is all rows, and the first one first.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from penstock.errors import TaskFailure
from penstock.functions.functions import Collector, WindowFunction, WindowInfo
from penstock.rows.schema import EVENT_TIME
from penstock.streams.windows import Window, count_window, session, sliding, tumbling
from taskmanager.operators.window_function import window_function_operator
from taskmanager.state import slot_column
from tests.support.examples import examples
from tests.support.operator_harness import OperatorHarness
from tests.support.window_oracle import MAX_TIME, WindowOracle
from tests.support.window_specs import SCHEMA, batch_of, window_function_spec

LISTED = pa.schema(
    [
        ("key", pa.string()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("xs", pa.list_(pa.int64())),
    ]
)
ROWS = st.fixed_dictionaries(
    {
        "k": st.one_of(st.none(), st.integers(0, 3)),
        "x": st.integers(-5, 5),
        "f": st.just(1.0),
        "s": st.sampled_from(["a", "b"]),
        EVENT_TIME: st.integers(-20, 60),
    }
)
STREAMS = st.lists(
    st.one_of(st.lists(ROWS, min_size=1, max_size=12), st.integers(-25, 70)), max_size=10
)


class ListRows(WindowFunction):
    @override
    def process(self, key: Any, window: WindowInfo, rows: Any, out: Collector) -> None:
        xs = [row.x for row in rows]
        out.emit(key=repr(key), start=window.start_ms, end=window.end_ms, xs=xs)


def concatenate(a: Any, b: Any) -> Any:
    return {**a, "x": b.x, "s": a.s + b.s}


@examples(120)
@given(
    stream=STREAMS,
    window=st.sampled_from([tumbling(10), sliding(10, 5), sliding(10, 4), session(4)]),
    lateness=st.sampled_from([0, 7]),
    keys=st.sampled_from([(), ("k",), ("k", "s")]),
    reduce=st.booleans(),
)
def test_equals_the_oracle(
    stream: list[Any], window: Window, lateness: int, keys: tuple[str, ...], reduce: bool
) -> None:
    spec = window.to_proto("event", lateness)
    function: Any = concatenate if reduce else ListRows()
    declared = None if reduce else LISTED
    operator = window_function_operator(
        window_function_spec(spec, keys, function, declared=declared)
    )
    harness = OperatorHarness(operator)
    oracle = WindowOracle(keys, lateness, spec.size_ms, spec.slide_ms, spec.offset_ms, spec.gap_ms)
    for element in [*stream, MAX_TIME]:
        if isinstance(element, int):
            if element < oracle.now:
                continue
            fired = oracle.watermark(element)
            harness.watermark(element)
        else:
            fired = oracle.push(element, lambda row: row[EVENT_TIME])
            harness.push(batch_of(element))
        found = harness.take_rows(event_time=True)
        expected = _reduced(fired, keys) if reduce else _listed(fired, keys)
        if reduce and spec.size_ms != spec.slide_ms:
            found, expected = map(_in_any_order, (found, expected))
        assert sorted(map(_text, found)) == sorted(map(_text, expected))
    assert harness.counters.late_records == len(oracle.late)
    harness.close()


def _listed(fired: list[tuple[Any, ...]], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {
            "key": repr(None if not keys else key[0] if len(keys) == 1 else key),
            "start": start,
            "end": end,
            "xs": [row["x"] for row in rows],
            EVENT_TIME: end - 1,
        }
        for key, start, end, rows in fired
    ]


def _reduced(fired: list[tuple[Any, ...]], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    results = []
    for key, start, end, rows in fired:
        rest = {**rows[0], "x": rows[-1]["x"], "s": "".join(row["s"] for row in rows)}
        results.append(
            {
                **dict(zip(keys, key, strict=True)),
                "window_start": start,
                "window_end": end,
                **{n: v for n, v in rest.items() if n not in keys and n != EVENT_TIME},
                EVENT_TIME: end - 1,
            }
        )
    return results


def _in_any_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what tells the last row, the letters of "s" sorted behind the first."""
    return [
        {
            name: _sorted_tail(value) if name == "s" else value
            for name, value in row.items()
            if name != "x"
        }
        for row in rows
    ]


def _sorted_tail(text: str) -> str:
    return text[0] + "".join(sorted(text[1:]))


def _text(row: dict[str, Any]) -> str:
    for name in ("window_start", "window_end"):
        if name in row and not isinstance(row[name], int):
            row[name] = round(row[name].timestamp() * 1000)
    return repr(sorted(row.items()))


def test_count_windows_hand_their_rows_over() -> None:
    class Indexed(WindowFunction):
        @override
        def process(self, key: Any, window: WindowInfo, rows: Any, out: Collector) -> None:
            out.emit(key=key, index=window.index, xs=[row.x for row in rows])

    declared = pa.schema([("key", pa.int64()), ("index", pa.int64()), ("xs", pa.list_(pa.int64()))])
    spec = window_function_spec(count_window(2).to_proto(), ("k",), Indexed(), declared=declared)
    harness = OperatorHarness(window_function_operator(spec))
    for start in (0, 3):
        harness.push(batch_of([_row(k=i % 2, x=i) for i in range(start, start + 3)]))
    harness.end()
    assert harness.take_rows() == [
        {"key": 0, "index": 0, "xs": [0, 2]},
        {"key": 1, "index": 0, "xs": [1, 3]},
    ]


def test_a_function_may_emit_many_rows_and_none_and_side_outputs() -> None:
    class Many(WindowFunction):
        @override
        def process(self, key: Any, window: WindowInfo, rows: Any, out: Collector) -> None:
            for _ in range(key):
                out.emit(n=key)
            if key == 0:
                out.side("empty", rows[0])

    spec = window_function_spec(
        tumbling(10).to_proto(), ("k",), Many(), declared=pa.schema([("n", pa.int64())])
    )
    harness = OperatorHarness(window_function_operator(spec))
    harness.push(batch_of([_row(k=k) for k in (0, 1, 2)]))
    harness.end()
    assert [row["n"] for row in harness.rows()] == [1, 2, 2]
    assert [row["k"] for row in harness.side("empty")] == [0]


def test_what_the_function_raises_names_operator_row_and_line() -> None:
    class Broken(WindowFunction):
        @override
        def process(self, key: Any, window: WindowInfo, rows: Any, out: Collector) -> None:
            raise ValueError("no such item")

    spec = window_function_spec(tumbling(10).to_proto(), ("k",), Broken(), declared=LISTED)
    harness = OperatorHarness(window_function_operator(spec))
    harness.push(batch_of([_row(k=7)]))
    with pytest.raises(TaskFailure, match="no such item") as failure:
        harness.end()
    assert failure.value.operator == "window"
    assert "key=7" in failure.value.row
    assert "raise ValueError" in failure.value.user_traceback


def test_a_result_that_is_no_row_is_refused() -> None:
    spec = window_function_spec(tumbling(10).to_proto(), ("k",), lambda a, b: 3)
    harness = OperatorHarness(window_function_operator(spec))
    with pytest.raises(TaskFailure, match="reduce must return a row"):
        harness.push(batch_of([_row(k=1), _row(k=1)]))


@pytest.mark.parametrize("window", [tumbling(10), sliding(10, 5), session(4), count_window(9999)])
def test_reduce_holds_a_row_per_key_however_many_come(
    window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_column, "_COMPACT_ABOVE", 3)
    is_count = window == count_window(9999)
    spec = window_function_spec(
        window.to_proto() if is_count else window.to_proto("event"),
        ("k",),
        lambda a, b: {**a, "x": a.x + b.x},
    )
    harness = OperatorHarness(window_function_operator(spec))
    sizes = []
    for _ in range(100):
        harness.push(batch_of([_row(k=i % 5) for i in range(50)]))
        sizes.append(harness.state.memory_bytes())
    harness.end()
    assert [row["x"] for row in harness.take_rows()] == ([] if is_count else [1000] * 5) * (
        2 if window.to_proto("event").slide_ms == 5 else 1
    )
    assert sizes[-1] < 2 * sizes[9]


def _row(k: int, x: int = 1) -> dict[str, Any]:
    return {"k": k, "x": x, "f": 1.0, "s": "a", EVENT_TIME: 5}


def test_rows_do_not_show_the_event_time() -> None:
    assert EVENT_TIME in SCHEMA.names
    spec = window_function_spec(tumbling(10).to_proto(), (), lambda a, b: a)
    harness = OperatorHarness(window_function_operator(spec))
    harness.push(batch_of([_row(k=1), _row(k=2)]))
    harness.end()
    (row,) = harness.take_rows()
    assert (row["k"], row["x"]) == (1, 1)
