"""Aim: a sum of int64 is the exact one or an error that says what to do, however its rows are ordered and split, and one
of decimals is exact in any case.

Method: random rows close to the limits, whose partial sums often leave them; exact sums are the oracle.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

import penstock as ps
import penstock.testing as pt
from penstock import col
from tests.support.examples import RUNS_ALL

SCHEMA = {"k": "int64", "v": "int64"}
WINDOWS: dict[str, ps.Window | None] = {
    "tumbling": ps.tumbling("8s"),
    "sliding": ps.sliding("8s", "2s"),
    "session": ps.session("1500ms"),
    "running": None,
}


def summed(window: ps.Window | None, value: Any) -> Any:
    def chain(stream: Any) -> Any:
        keyed = stream.with_columns(v=value).key_by("k")
        return (keyed if window is None else keyed.window(window)).aggregate(total=ps.sum("v"))

    return chain


def outcome(chain: Any, rows: list[tuple[int, int, int]], draw: random.Random) -> Any:
    """What comes out of the rows in an order and batches that are drawn."""
    left = draw.sample(rows, len(rows))
    with pt.harness(chain, schema=SCHEMA) as harness:
        while left:
            cut = draw.randint(1, 6)
            batch, left = left[:cut], left[cut:]
            harness.push_many(
                [{"k": key, "v": value} for key, value, _ in batch],
                event_times=[time for *_, time in batch],
            )
        harness.watermark(1_000_000)
        return harness.take()


def assert_exact(found: list[dict[str, Any]], rows: list[tuple[int, int, int]]) -> None:
    if "window_start" in found[0]:
        for row in found:
            start, end = (
                int(row[name].timestamp() * 1000) for name in ("window_start", "window_end")
            )
            inside = [value for key, value, at in rows if key == row["k"] and start <= at < end]
            assert row["total"] == sum(inside), row
    else:
        for key, total in {row["k"]: row["total"] for row in found}.items():
            assert total == sum(value for its, value, _ in rows if its == key)


@pytest.mark.parametrize("seed", range(20 if RUNS_ALL else 1))
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_a_sum_is_exact_or_an_error(window: ps.Window | None, seed: int) -> None:
    draw = random.Random(seed)
    rows = [
        (draw.randrange(2), draw.choice([1, -1]) * draw.choice([2**62, 2**61, 1]), 500 * (n % 20))
        for n in range(24)
    ]
    assert_exact(outcome(summed(window, col("v").cast("decimal(38, 0)")), rows, draw), rows)
    found, error = None, ""
    try:
        found = outcome(summed(window, col("v")), rows, draw)
    except ps.JobFailed as failed:
        error = str(failed)
    if found is None:
        assert "leaves the range of int64" in error
        assert "cast the column to decimal(38, 0)" in error
    else:
        assert_exact(found, rows)
