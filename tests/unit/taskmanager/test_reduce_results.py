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
