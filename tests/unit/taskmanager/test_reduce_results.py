"""What ``reduce`` functions return: aim: a column that is left out is named, never made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps
import penstock.testing as pt
from penstock.errors import StreamError

SCHEMA = {"k": int, "v": int, "w": float}
WINDOWS: dict[str, Callable[[Any], Any]] = {
    "tumbling": lambda s: s.key_by("k").window(ps.tumbling("1s")),
    "session": lambda s: s.key_by("k").window(ps.session("1s")),
    "count": lambda s: s.key_by("k").window(ps.count_window(2)),
    "all": lambda s: s.window_all(ps.tumbling("1s")),
}


def run(window: str, function: Callable[[Any, Any], Any]) -> list[dict[str, Any]]:
    with pt.harness(lambda s: WINDOWS[window](s).reduce(function), schema=SCHEMA) as h:
        h.push_many([{"k": 1, "v": 1, "w": 0.5}, {"k": 1, "v": 2, "w": 0.25}], [0, 1])
        h.end()
        return [dict(row) for row in h.take()]


@pytest.mark.parametrize("window", WINDOWS)
def test_a_column_that_reduce_leaves_out_fails_by_name(window: str) -> None:
    with pytest.raises(
        StreamError, match=r"reduce returned no column w \(a null is given as None\)"
    ):
        run(window, lambda a, b: {"k": a.k, "v": a.v + b.v})


@pytest.mark.parametrize("window", ["tumbling", "session", "count"])
def test_keys_may_be_left_out(window: str) -> None:
    [row] = run(window, lambda a, b: {"v": a.v + b.v, "w": None})
    assert (row["k"], row["v"], row["w"]) == (1, 3, None)


def test_a_key_of_no_window_is_a_column_like_others() -> None:
    with pytest.raises(StreamError, match="reduce returned no column k"):
        run("all", lambda a, b: {"v": a.v + b.v, "w": a.w})


@pytest.mark.parametrize("window", ["tumbling", "session", "all"])
def test_rows_that_are_given_back_and_new_ones_lie_side_by_side(window: str) -> None:
    """Also a row that was kept from a batch before."""
    kept: list[Any] = []

    def function(one: Any, other: Any) -> Any:
        kept.append(other)
        if other.w is None:
            return one if one.v > other.v else other
        if other.w < 0:
            return kept[0]
        return {"k": one.k, "v": one.v + other.v, "w": one.w}

    rows = [(key, v, w) for v, w in ((5, None), (3, None), (8, 1.5), (1, -1.0)) for key in range(4)]
    rows += [(9, 7, None), (9, 9, None)]
    expected: dict[int, dict[str, Any]] = {}
    with pt.harness(lambda s: WINDOWS[window](s).reduce(function), schema=SCHEMA) as h:
        for start in range(0, len(rows), 8):
            batch = [
                dict(zip(("k", "v", "w"), row, strict=True)) for row in rows[start : start + 8]
            ]
            h.push_many(batch, [5] * len(batch))
        h.end()
        found = [{name: row[name] for name in SCHEMA} for row in h.take()]
    first = dict(zip(("k", "v", "w"), rows[1] if window == "all" else rows[4], strict=True))
    for k, v, w in rows:
        row = {"k": k, "v": v, "w": w}
        key = 0 if window == "all" else k
        held = expected.setdefault(key, row)
        if held is row:
            continue
        if w is None:
            expected[key] = held if held["v"] > v else row
        elif w < 0:
            expected[key] = first if window == "all" else {**first, "k": k}
        else:
            expected[key] = {"k": held["k"], "v": held["v"] + v, "w": held["w"]}
    assert sorted(found, key=str) == sorted(expected.values(), key=str)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_list_that_is_added_to_in_a_row_is_part_of_what_is_given_back(window: str) -> None:
    def function(one: Any, other: Any) -> Any:
        if other.v == 3:
            return {"k": one.k, "v": one.v, "w": [*one.w, *other.w]}
        one.w.extend(other.w)
        return one

    schema = {"k": "int64", "v": "int64", "w": "list<int64>"}
    with pt.harness(lambda s: WINDOWS[window](s).reduce(function), schema=schema) as h:
        rows = [{"k": 1, "v": 1, "w": [1]}, {"k": 1, "v": 2, "w": [2]}]
        h.push_many(rows, [0, 1])
        if window != "count":
            h.push({"k": 1, "v": 3, "w": [3]}, event_time=2)
        h.end()
        assert [row["w"] for row in h.output] == [[1, 2] if window == "count" else [1, 2, 3]]
