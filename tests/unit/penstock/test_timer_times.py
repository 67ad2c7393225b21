"""Aim: idioms of event-time timers work, and a timer that could never fire says so at its first call.

Method: functions on the harness, and on a stream without event time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
import penstock.testing as pt

LIMIT = 2**62
ROW = {"k": str, "n": int}


class SetsTimer(ps.KeyedProcessFunction):
    """Sets a timer per row, at a time that ``when`` says."""

    def __init__(self, when: Callable[[Any], int]) -> None:
        self.when = when

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        ctx.timers.event_time(self.when(ctx))

    def on_timer(self, timestamp: int, ctx: Any, out: Any) -> None:
        out.emit(at=timestamp, watermark=ctx.watermark)


def harness(when: Callable[[Any], int], **options: Any) -> pt.Harness:
    return pt.harness(
        SetsTimer(when),
        keys=["k"],
        schema=ROW,
        output_schema={"at": int, "watermark": int},
        **options,
    )


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_the_next_watermark_can_be_waited_for_before_the_first(backend: Any) -> None:
    with harness(lambda ctx: ctx.watermark + 1, backend=backend) as h:
        h.push({"k": "a", "n": 1}, event_time=5)
        assert h.timers() == [-LIMIT]
        h.watermark(-10)
        assert h.take() == [{"at": -LIMIT, "watermark": -10}]
        h.push({"k": "a", "n": 1}, event_time=5)
        h.watermark(4)
        assert [row["at"] for row in h.take()] == [-9]


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_timers_that_are_looked_at_are_all_there_beside_deleted_ones(backend: Any) -> None:
    class Sets(ps.KeyedProcessFunction):
        def process(self, row: Any, ctx: Any, out: Any) -> None:
            if row.n < 0:
                ctx.timers.delete_event_time(-row.n)
            else:
                ctx.timers.event_time(row.n)

        def on_timer(self, timestamp: int, ctx: Any, out: Any) -> None:
            out.emit(at=timestamp)

    with pt.harness(
        Sets(), keys=["k"], schema=ROW, output_schema={"at": int}, backend=backend
    ) as h:
        for when in (100, 50, 200, -50):
            h.push({"k": "a", "n": when}, event_time=0)
        assert h.timers(key="a") == [100, 200]
        h.watermark(100)
        assert h.take() == [{"at": 100}]


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize("event_time", [True, False])
def test_the_end_of_the_data_can_be_waited_for(backend: Any, event_time: bool) -> None:
    with harness(lambda ctx: ps.MAX_WATERMARK, backend=backend, event_time=event_time) as h:
        h.push({"k": "a", "n": 1})
        h.push({"k": "a", "n": 2})
        if event_time:
            h.watermark(10**15)
        assert h.output == []
        h.end()
        assert h.output == [{"at": LIMIT, "watermark": ps.MAX_WATERMARK}]


def test_the_end_can_be_taken_back() -> None:
    class TakesBack(ps.KeyedProcessFunction):
        def process(self, row: Any, ctx: Any, out: Any) -> None:
            ctx.timers.event_time(ps.MAX_WATERMARK)
            if row.n:
                ctx.timers.delete_event_time(ps.MAX_WATERMARK)

        def on_timer(self, timestamp: int, ctx: Any, out: Any) -> None:
            out.emit(k=ctx.key)

    with pt.harness(TakesBack(), keys=["k"], schema=ROW, output_schema={"k": str}) as h:
        h.push_many([{"k": "a", "n": 1}, {"k": "b", "n": 0}])
        h.end()
        assert h.output == [{"k": "b"}]


def test_a_timer_behind_the_end_is_an_error() -> None:
    with (
        harness(lambda ctx: ps.MAX_WATERMARK + 1) as h,
        pytest.raises(ps.JobFailed, match="end of the data"),
    ):
        h.push({"k": "a", "n": 1})


def test_without_event_time_the_first_timer_fails_with_the_name_of_its_operator() -> None:
    def build(rows: Any) -> Any:
        schema = pa.schema([("at", pa.int64()), ("watermark", pa.int64())])
        timed = rows.key_by("k").process(SetsTimer(lambda ctx: 5), schema=schema)
        return timed.name("reminders").on_error("skip")

    with (
        pt.harness(build, schema=ROW, event_time=False) as h,
        pytest.raises(ps.JobFailed, match=r"operator 'reminders'.*with_event_time") as failed,
    ):
        h.push({"k": "a", "n": 1})
    assert failed.value.operator == "reminders"


class Both(ps.KeyedCoProcessFunction):
    def process_left(self, row: Any, ctx: Any, out: Any) -> None:
        ctx.timers.event_time(5)

    def process_right(self, row: Any, ctx: Any, out: Any) -> None:
        ctx.timers.event_time(5)

    def on_timer(self, timestamp: int, ctx: Any, out: Any) -> None:
        out.emit(k=ctx.key)


@pytest.mark.parametrize("side", [0, 1])
def test_both_inputs_are_looked_at(side: int) -> None:
    options: dict[str, Any] = {"keys": ["k"], "schema": ROW, "output_schema": {"k": str}}
    with (
        pt.harness(Both(), event_time=False, **options) as h,
        pytest.raises(ps.JobFailed, match="no input has event time"),
    ):
        h.push({"k": "a", "n": 1}, input=side)
    with pt.harness(Both(), **options) as h:
        h.push({"k": "a", "n": 1}, input=side)


def test_in_batch_mode_the_harness_has_no_late_rows_either() -> None:
    def build(rows: Any) -> Any:
        windows = rows.with_event_time("ts").key_by("k").window(ps.tumbling("10s"), late_to="late")
        return windows.aggregate(n=ps.count())

    config = {"execution.runtime-mode": "batch"}
    with pt.harness(build, schema=[{"k": "a", "ts": 1}], config=config) as h:
        h.push_many([{"k": "a", "ts": 50_000}, {"k": "a", "ts": 1}])
        h.push({"k": "a", "ts": 3})
        assert h.output == []
        h.end()
        assert [row["n"] for row in h.output] == [2, 1]
        assert h.late_rows == 0


class Forgets(ps.KeyedProcessFunction):
    """Has a method whose name nobody calls."""

    def __init__(self, domain: str) -> None:
        self.domain = domain

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        getattr(ctx.timers, self.domain)(5)

    def on_time(self, timestamp: int, ctx: Any, out: Any) -> None:
        out.emit(k=ctx.key)


@pytest.mark.parametrize("domain", ["event_time", "processing_time"])
def test_a_timer_that_no_method_answers_is_refused(domain: str) -> None:
    with (
        pt.harness(Forgets(domain), keys=["k"], schema=ROW, output_schema={"k": str}) as h,
        pytest.raises(ps.JobFailed, match=rf"{domain}\(5\) asks for .*on_timer.*Forgets has none"),
    ):
        h.push({"k": "a", "n": 1})


def test_one_that_is_taken_back_needs_no_method() -> None:
    with pt.harness(
        Forgets("delete_event_time"), keys=["k"], schema=ROW, output_schema={"k": str}
    ) as h:
        h.push({"k": "a", "n": 1})


def test_a_method_may_be_given_to_the_instance() -> None:
    function = Forgets("event_time")
    function.on_timer = function.on_time  # type: ignore[method-assign]
    with pt.harness(function, keys=["k"], schema=ROW, output_schema={"k": str}) as h:
        h.push({"k": "a", "n": 1})
        h.end()
        assert h.output == [{"k": "a"}]
