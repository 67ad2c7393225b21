"""Timers: fire once, in order of time and key, before the watermark; survive restores; can be taken back.

Method: a function does what its rows say with timers; a sorted list of (time, key) is the oracle.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from common.elements import MAX_TIMESTAMP_MS, PAUSE, Watermark
from penstock.config import Configuration
from penstock.errors import TaskFailure
from taskmanager.operators.time_slice import TimeSlice
from tests.support.examples import examples
from tests.support.process_specs import INPUT, rows, run_process

OUTPUT = pa.schema([("user", pa.int64()), ("time", pa.int64()), ("domain", pa.string())])


class Asking(ps.KeyedProcessFunction):
    """Row (user, n): n >= 0 asks for a timer at n, n < 0 takes the one at -n back."""

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        if row.n >= 0:
            ctx.timers.event_time(row.n)
        else:
            ctx.timers.delete_event_time(-row.n)

    def on_timer(self, timestamp: int, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        assert ctx.timestamp == timestamp
        out.emit(user=ctx.key, time=timestamp, domain=ctx.time_domain)


def fired(harness: Any) -> list[tuple[int, int]]:
    taken = harness.take_rows(event_time=True)
    assert all(row["time"] == row["__event_time"] for row in taken)
    times = [row["time"] for row in taken]
    assert times == sorted(times)
    # The order of keys of one time is the backend's.
    return sorted((row["time"], row["user"]) for row in taken)


def ask(*wanted: tuple[int, int]) -> pa.RecordBatch:
    return rows(*((user, n, 0) for user, n in wanted))


@examples(30)
@given(
    steps=st.lists(
        st.lists(st.tuples(st.integers(1, 4), st.integers(-9, 9)), min_size=1) | st.integers(0, 10),
        max_size=12,
    ),
    restores=st.booleans(),
)
def test_timers_fire_in_order_once(steps: list[Any], restores: bool) -> None:
    harness = run_process(Asking(), output=OUTPUT)
    pending: set[tuple[int, int]] = set()
    watermark = -1
    for step in steps:
        if isinstance(step, list):
            harness.push(ask(*step))
            for user, n in step:
                (pending.add if n >= 0 else pending.discard)((abs(n), user))
        else:
            watermark = max(watermark, step)
            harness.watermark(watermark)
            due = sorted(timer for timer in pending if timer[0] <= watermark)
            assert harness.controls[-1] == Watermark(watermark)
            assert fired(harness) == due
            pending.difference_update(due)
        if restores:
            taken = harness.snapshot()
            harness = run_process(Asking(), output=OUTPUT, harness={"restored": [taken]})
    harness.end()
    assert fired(harness) == sorted(pending)


def test_timers_fire_before_the_watermark_is_passed_on() -> None:
    harness = run_process(Asking(), output=OUTPUT)
    harness.push(ask((1, 5), (2, 7)))
    harness.watermark(4)
    harness.watermark(6)
    kinds = [type(element).__name__ for element in harness.emitted]
    assert kinds == ["Watermark", "RecordBatch", "Watermark"]


def test_a_timer_for_the_past_fires_with_the_next_watermark() -> None:
    harness = run_process(Asking(), output=OUTPUT)
    harness.watermark(100)
    harness.push(ask((1, 5)))
    assert fired(harness) == []
    harness.watermark(100)
    assert fired(harness) == [(5, 1)]


class Chained(ps.KeyedProcessFunction):
    """Asks in on_timer for timers and takes others back."""

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        ctx.timers.event_time(row.n)

    def on_timer(self, timestamp: int, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(user=ctx.key, time=timestamp, domain=ctx.time_domain)
        if timestamp % 10 == 0 and timestamp < 40:
            ctx.timers.event_time(timestamp + 10)
        if timestamp % 10 == 1:
            ctx.timers.delete_event_time(timestamp + 1)
        if timestamp % 10 == 3:
            ctx.timers.delete_event_time(timestamp + 1)
            ctx.timers.event_time(timestamp + 1)


def test_timers_asked_for_while_firing() -> None:
    harness = run_process(Chained(), output=OUTPUT)
    harness.push(
        ask((1, 10), (2, 15), (2, 20), (3, 45), (1, 11), (1, 12), (2, 12), (3, 13), (3, 14))
    )
    harness.watermark(50)
    assert fired(harness) == sorted(
        [
            *((n, 1) for n in (10, 11, 20, 30, 40)),
            *((n, 2) for n in (12, 15, 20, 30, 40)),
            *((n, 3) for n in (13, 14, 45)),
        ]
    )
    harness.end()
    assert fired(harness) == []


class Wavering(Chained):
    """Asks for timers and takes them back, and the other way round, within one call."""

    def on_timer(self, timestamp: int, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(user=ctx.key, time=timestamp, domain=ctx.time_domain)
        if timestamp == 5:
            ctx.timers.event_time(6)
            ctx.timers.delete_event_time(6)
            ctx.timers.delete_event_time(7)
            ctx.timers.event_time(7)
            ctx.timers.event_time(8)
        if timestamp == 8:
            ctx.timers.delete_event_time(8)
            ctx.timers.delete_event_time(9)


def test_the_last_word_counts() -> None:
    harness = run_process(Wavering(), output=OUTPUT)
    harness.push(ask((1, 5), (1, 6), (1, 8), (1, 9), (2, 6), (2, 9)))
    harness.watermark(20)
    assert fired(harness) == [(5, 1), (6, 2), (7, 1), (8, 1), (9, 2)]


@examples(10)
@given(starts=st.lists(st.tuples(st.integers(3, 30), st.integers(0, 50)), min_size=1, max_size=40))
def test_order_holds_when_many_timers_renew_themselves(starts: list[tuple[int, int]]) -> None:
    class Renewing(Chained):
        def on_timer(self, timestamp: int, ctx: ps.ProcessContext, out: ps.Collector) -> None:
            out.emit(user=ctx.key, time=timestamp, domain=ctx.time_domain)
            if timestamp < 60:
                ctx.timers.event_time(timestamp + ctx.key)

    harness = run_process(Renewing(), output=OUTPUT)
    harness.push(ask(*starts))
    harness.watermark(MAX_TIMESTAMP_MS)
    expected = set()
    for user, start in starts:
        while start < 60 and (start, user) not in expected:
            expected.add((start, user))
            start += user
        expected.add((start, user))
    assert fired(harness) == sorted(expected)


class Wall(ps.KeyedProcessFunction):
    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        if row.n >= 0:
            ctx.timers.processing_time(ctx.now_ms + row.n)
        else:
            ctx.timers.delete_processing_time(ctx.now_ms - row.n)

    def on_timer(self, timestamp: int, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(user=ctx.key, time=timestamp, domain=ctx.time_domain)


def test_processing_time_timers_follow_the_clock() -> None:
    harness = run_process(Wall(), output=OUTPUT, harness={"now_ms": 1000})
    harness.push(ask((1, 50), (2, 20), (3, 30), (3, -30)))
    harness.watermark(5000)
    assert fired(harness) == []
    harness.advance_clock(1019)
    assert fired(harness) == []
    harness.advance_clock(1020)
    assert [row["domain"] for row in harness.rows()] == ["processing"]
    assert fired(harness) == [(1020, 2)]
    harness.advance_clock(2000)
    assert fired(harness) == [(1050, 1)]
    harness.push(ask((4, 50)))
    harness.end()
    assert fired(harness) == []  # the data has ended before the clock got there


def test_processing_time_timers_survive_a_restore() -> None:
    harness = run_process(Wall(), output=OUTPUT)
    harness.push(ask((1, 50), (2, 20)))
    again = run_process(
        Wall(), output=OUTPUT, harness={"restored": [harness.snapshot()], "now_ms": 30}
    )
    again.advance_clock(30)
    assert fired(again) == [(20, 2)]
    again.advance_clock(60)
    assert fired(again) == [(50, 1)]


class Stateful(ps.KeyedProcessFunction):
    count = ps.ValueState("count", int, default=0)

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.count.update(self.count.value() + 1)
        ctx.timers.event_time(row.n)

    def on_timer(self, timestamp: int, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.count.update(self.count.value() + 100)
        out.emit(user=ctx.key, text=f"{timestamp} {self.count.value()} {ctx.watermark}")


def test_on_timer_sees_the_state_of_its_key() -> None:
    harness = run_process(Stateful())
    harness.push(rows((1, 5, 0), (2, 6, 0), (1, 7, 0)))
    harness.watermark(10)
    assert [row["text"] for row in harness.rows()] == ["5 102 10", "6 101 10", "7 202 10"]


def test_firing_yields_in_slices_and_each_yield_is_consistent() -> None:
    ticks = count(step=3_000_000)
    config = Configuration.from_mapping({})
    harness = run_process(Asking(), output=OUTPUT, harness={"config": config})
    harness.operator._slice = TimeSlice(lambda: next(ticks))  # every look at the clock takes 3 ms
    users = range(500)
    harness.push(ask(*((user, 5) for user in users)))
    pauses, seen = 0, []
    for output in harness.operator.on_watermark(Watermark(5)):
        if output is PAUSE:
            pauses += 1
            restored = run_process(
                Asking(), output=OUTPUT, harness={"restored": [harness.snapshot()]}
            )
            restored.end()
            assert sorted([*seen, *(user for _, user in fired(restored))]) == list(users)
        elif isinstance(output, pa.RecordBatch):
            seen += output.column("user").to_pylist()
    assert pauses > 3
    assert sorted(seen) == list(users)


@pytest.mark.parametrize(
    ("timestamp", "message"),
    [
        (
            1.5,
            r"event_time\(\) takes milliseconds since the epoch as an integer, got 1.5 \(float\)",
        ),
        (None, "as an integer, got None"),
        (2**63, "out of range"),
    ],
)
def test_times_are_milliseconds(timestamp: Any, message: str) -> None:
    class Wrong(Asking):
        def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
            ctx.timers.event_time(timestamp)

    with pytest.raises(TaskFailure, match=message):
        run_process(Wrong(), output=OUTPUT).push(ask((1, 1)))


def test_timers_need_a_key() -> None:
    class Unkeyed(ps.ProcessFunction):
        def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
            ctx.timers.event_time(5)

    with pytest.raises(TaskFailure, match=r"event_time\(\) needs a key, .* on an unkeyed stream"):
        run_process(Unkeyed(), schema=INPUT).push(ask((1, 1)))


def test_what_on_timer_raises_fails_the_task() -> None:
    class Raising(Asking):
        def on_timer(self, timestamp: int, ctx: ps.ProcessContext, out: ps.Collector) -> None:
            raise KeyError("odd")

    harness = run_process(Raising(), output=OUTPUT, on_error="skip")
    harness.push(ask((7, 5)))
    with pytest.raises(TaskFailure, match=r"Raising.on_timer raised KeyError: 'odd'") as caught:
        harness.watermark(9)
    assert caught.value.row == "event timer at 5 ms of key 7"
