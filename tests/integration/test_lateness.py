"""Aim: which rows are late, what becomes of them, and when windows fire: exactly as promised.

Method: ``execution.batch-rows`` cuts the client's rows into known batches and a watermark follows each
(``auto-watermark-interval`` 0), so that the row-by-row oracle knows what every operator has seen.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Sequence
from typing import Any

import pytest

import penstock as ps
from penstock import col
from tests.integration.conftest import NewEnvironment
from tests.support.expected_windows import EPOCH, sliced
from tests.support.jobs import DEADLINE_S, assert_same_rows, cancel, rows_of, run
from tests.support.row_server import LineServer, RowReceiver
from tests.support.window_oracle import MAX_TIME, WindowOracle

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

BATCH_ROWS = 20
STEPPED = {
    "execution.batch-rows": BATCH_ROWS,
    "pipeline.auto-watermark-interval": "0ms",
}
Row = dict[str, Any]


def disorderly(count: int = 600, seed: int = 3) -> list[Row]:
    """Times advance by 50 ms; a tenth of the rows is far behind."""
    numbers = random.Random(seed)
    rows = []
    for n in range(count):
        behind = numbers.randrange(20_000) if numbers.random() < 0.1 else numbers.randrange(1_000)
        rows.append(
            {"n": n, "key": numbers.choice(["a", "b", None]), "ts": 100_000 + 50 * n - behind}
        )
    return rows


WINDOWS: dict[str, tuple[ps.Window, dict[str, int]]] = {
    "tumbling": (ps.tumbling("3s"), {"size_ms": 3_000, "slide_ms": 3_000}),
    "sliding": (ps.sliding("4s", "1s"), {"size_ms": 4_000, "slide_ms": 1_000}),
    "session": (ps.session("400ms"), {"gap_ms": 400}),
}


@pytest.mark.parametrize("lateness_ms", [0, 5_000])
@pytest.mark.parametrize("keys", [(), ("key",)], ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_late_rows(
    new_env: NewEnvironment, window: str, keys: tuple[str, ...], lateness_ms: int
) -> None:
    rows, out_of_orderness_ms = disorderly(), 500
    env = new_env(config=STEPPED)
    stream = env.from_rows(rows).with_event_time("ts", out_of_orderness=out_of_orderness_ms)
    keyed = stream.key_by(*keys) if keys else stream
    result = keyed.window(
        WINDOWS[window][0], allowed_lateness=lateness_ms, late_to="late"
    ).aggregate(numbers=ps.collect_list("n"))
    late, fired = result.side_output("late").collect(), result.collect()
    counters = run(env).metrics["totals"]

    oracle = WindowOracle(keys, lateness_ms=lateness_ms, **WINDOWS[window][1])
    expected = expected_firings(oracle, rows, keys, out_of_orderness_ms)
    assert oracle.late, "the rows have to show something"
    assert_same_rows(late, oracle.late)
    assert counters["late_records"] == len(oracle.late)
    for row in [*fired, *expected]:
        row["numbers"] = sorted(row["numbers"])
    assert_same_rows(fired, expected)


def expected_firings(
    oracle: WindowOracle, rows: list[Row], keys: Sequence[str], out_of_orderness_ms: int
) -> list[Row]:
    found, highest = [], 0
    for start in range(0, len(rows), BATCH_ROWS):
        batch = rows[start : start + BATCH_ROWS]
        found += oracle.push(batch, lambda row: row["ts"])
        highest = max(highest, *(row["ts"] for row in batch))
        found += oracle.watermark(highest - out_of_orderness_ms - 1)
    found += oracle.watermark(MAX_TIME)
    return [
        {
            **dict(zip(keys, key, strict=True)),
            "window_start": EPOCH + dt.timedelta(milliseconds=start_ms),
            "window_end": EPOCH + dt.timedelta(milliseconds=end_ms),
            "numbers": [row["n"] for row in members],
        }
        for key, start_ms, end_ms, members in found
    ]


@pytest.mark.parametrize("pre_aggregation", ["true", "false"])
def test_late_rows_without_a_side_output_are_dropped_and_counted(
    new_env: NewEnvironment, pre_aggregation: str
) -> None:
    rows = disorderly()
    env = new_env(config={**STEPPED, "execution.pre-aggregation": pre_aggregation})
    stream = env.from_rows(rows).with_event_time("ts", out_of_orderness=500).key_by("key")
    fired = stream.window(ps.tumbling("3s")).aggregate(n=ps.count(), total=ps.sum("n")).collect()
    result = run(env)

    oracle = WindowOracle(("key",), size_ms=3_000, slide_ms=3_000)
    expected = [
        {
            **{k: v for k, v in row.items() if k != "numbers"},
            "n": len(row["numbers"]),
            "total": sum(row["numbers"]),
        }
        for row in expected_firings(oracle, rows, ["key"], 500)
    ]
    assert_same_rows(fired, expected)
    assert result.metrics["totals"]["late_records"] == len(oracle.late) > 0


def test_late_rows_keep_their_columns_and_can_be_used_on(new_env: NewEnvironment) -> None:
    env = new_env(config={**STEPPED, "execution.batch-rows": 1})
    rows = [
        {"ts": 10_000, "word": "x", "n": 1},
        {"ts": 30_000, "word": None, "n": 2},
        {"ts": 9_000, "word": "late", "n": 3},
        {"ts": 15_000, "word": "late too", "n": 4},
        {"ts": 31_000, "word": "y", "n": 5},
    ]
    windows = (
        env.from_rows(rows)
        .with_event_time("ts")
        .key_by("word")
        .window(ps.tumbling("10s"), late_to="too late")
        .aggregate(total=ps.sum(col("n") * 10))
    )
    late = windows.side_output("too late")
    assert late.schema.names == ["ts", "word", "n"]
    per_word = late.select("word", "n").rebalance().collect()
    totals = windows.select("word", "total").collect()
    run(env)
    assert_same_rows(per_word, [{"word": "late", "n": 3}, {"word": "late too", "n": 4}])
    assert_same_rows(
        totals,
        [{"word": "x", "total": 10}, {"word": None, "total": 20}, {"word": "y", "total": 50}],
    )


def test_late_rows_of_process_and_reduce(new_env: NewEnvironment) -> None:
    rows = disorderly(400)
    env = new_env(config=STEPPED)
    keyed = env.from_rows(rows).with_event_time("ts", out_of_orderness=500).key_by("key")
    window = keyed.window(ps.tumbling("3s"), late_to="late")
    reduced = window.reduce(lambda left, right: left if left.n > right.n else right)
    late, found = reduced.side_output("late").collect(), reduced.select("key", "n").collect()
    run(env)
    oracle = WindowOracle(("key",), size_ms=3_000, slide_ms=3_000)
    firings = expected_firings(oracle, rows, ["key"], 500)
    assert_same_rows(late, oracle.late)
    assert_same_rows(found, [{"key": r["key"], "n": max(r["numbers"])} for r in firings])


# ---------------------------------------------------------------- while the job runs


def timed_lines(env: ps.Environment, server: LineServer, **options: Any) -> ps.Stream:
    """Lines "source time" as rows with event time."""
    columns = {
        "source": col("line").split_pattern(" ")[0],
        "ts": col("line").split_pattern(" ")[1].cast("int64"),
    }
    # In one subtask with the socket: behind an exchange, watermarks are per channel.
    lines = env.read_socket("127.0.0.1", server.port).select(**columns).parallelism(1)
    return lines.with_event_time("ts", **options)


def test_windows_fire_as_event_time_passes(env: ps.Environment) -> None:
    with LineServer() as server, RowReceiver() as receiver:
        windows = timed_lines(env, server).key_by("source").window(ps.tumbling("10s"))
        windows.aggregate(n=ps.count()).select("source", "n").sink(receiver.sink())
        handle = env.submit("fire")
        server.send("a 1000", "a 2000", "b 9999", "a 10000")
        assert_same_rows(receiver.take(2), [{"source": "a", "n": 2}, {"source": "b", "n": 1}])
        server.send("a 30000")
        assert receiver.take(1) == [{"source": "a", "n": 1}]
        server.end()
        assert receiver.take(1) == [{"source": "a", "n": 1}]
        assert handle.wait(DEADLINE_S).status == "FINISHED"


def test_a_late_row_within_the_allowed_lateness_fires_again(env: ps.Environment) -> None:
    with LineServer() as server, RowReceiver() as receiver:
        keyed = timed_lines(env, server).key_by("source")
        windows = keyed.window(ps.tumbling("10s"), allowed_lateness="5s")
        windows.aggregate(n=ps.count()).select("n").sink(receiver.sink())
        handle = env.submit("again")
        server.send("a 1000", "a 12000")
        assert receiver.take(1) == [{"n": 1}]
        server.send("a 2000")
        assert receiver.take(1) == [{"n": 2}]
        server.send("a 15000", "a 3000")  # the watermark passes 14,999: too late now
        server.send("a 20001")
        assert receiver.take(1) in ([{"n": 2}], [{"n": 3}])
        cancel(handle)


def test_a_source_that_is_silent_holds_nothing_back(env: ps.Environment) -> None:
    with LineServer() as talking, LineServer() as silent, RowReceiver() as receiver:
        first = timed_lines(env, talking, idle_timeout="100ms")
        second = timed_lines(env, silent, idle_timeout="100ms")
        windows = first.union(second).key_by("source").window(ps.tumbling("10s"))
        windows.aggregate(n=ps.count()).select("source", "n").sink(receiver.sink())
        handle = env.submit("idle")
        silent.accept()
        talking.send("a 1000", "a 25000")
        assert receiver.take(1) == [{"source": "a", "n": 1}]
        silent.send("b 21000", "b 45000")  # active again, and behind: its rows are not late
        assert_same_rows(receiver.take(2), [{"source": "b", "n": 1}, {"source": "a", "n": 1}])
        cancel(handle)


def test_a_source_without_a_timeout_holds_the_watermark_back(env: ps.Environment) -> None:
    with LineServer() as talking, LineServer() as silent, RowReceiver() as receiver:
        union = timed_lines(env, talking).union(timed_lines(env, silent))
        windows = union.key_by("source").window(ps.tumbling("10s"))
        windows.aggregate(n=ps.count()).select("source", "n").sink(receiver.sink())
        handle = env.submit("held")
        talking.send("a 1000", "a 25000")
        silent.send("b 2000")
        silent.send("b 11000")
        assert_same_rows(receiver.take(2), [{"source": "a", "n": 1}, {"source": "b", "n": 1}])
        assert receiver.is_empty
        silent.end()  # has ended: now only the other counts
        assert receiver.take(1) == [{"source": "b", "n": 1}]
        cancel(handle)


def test_rows_without_event_time(env: ps.Environment) -> None:
    rows = [{"n": n, "ts": None if n % 10 == 3 else 1_000 * n} for n in range(100)]
    timed = env.from_rows(rows).with_event_time("ts").on_error("untimed")
    bad = timed.side_output("untimed").collect()
    windows = timed.window(ps.tumbling("20s")).aggregate(n=ps.count()).collect()
    result = run(env)
    good = [row for row in rows if row["ts"] is not None]
    assert_same_rows(
        windows, sliced(good, [], {"n": len}, time=lambda row: row["ts"], size_ms=20_000)
    )
    assert sorted(row.n for row in bad) == list(range(3, 100, 10))
    assert all("ts" in row.error and "null" in row.error for row in bad)
    assert result.metrics["totals"]["bad_records"] == 10


def test_rows_without_event_time_can_be_skipped(env: ps.Environment) -> None:
    rows = [{"ts": None}, {"ts": 1}, {"ts": None}]
    timed = env.from_rows(rows).with_event_time("ts").on_error("skip")
    assert [
        r["n"] for r in rows_of(env, timed.window(ps.tumbling(10)).aggregate(n=ps.count()))
    ] == [1]


def test_rows_without_event_time_fail_the_job_by_default(env: ps.Environment) -> None:
    env.from_rows([{"ts": 1}, {"ts": None}]).with_event_time("ts").window(
        ps.tumbling(10)
    ).aggregate(n=ps.count()).discard()
    with pytest.raises(ps.JobFailed, match=r"ts.* is null"):
        run(env)
