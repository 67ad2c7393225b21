"""Jobs for the simulation whose function reads a side to its end before it sees a row of its other input.

The function itself says where that does not hold (``World.breach``): a row of the other input comes although the side
is not whole, or a row of the side comes behind it, or twice.
"""

from __future__ import annotations

import collections
from typing import Any

import pyarrow as pa
from typing_extensions import override

import penstock as ps
from tests.support.simulated_jobs import (
    COUNTED,
    RecordingSink,
    SimulatedJob,
    input_rows,
    row_source,
)
from tests.support.simulated_kept_jobs import NO_CHECKPOINTS, PASSED_ON, pass_on
from tests.support.simulated_world import Rows

SIDE_ROWS = 40
_SIDE_RATE = 1000.0


class Look(ps.BroadcastProcessFunction):
    """Says of each row how much of the side is there."""

    times = ps.BroadcastState("times", pa.int64(), pa.int64())

    def __init__(self, world: str) -> None:
        self._world_name = world
        self._has_seen_rows = False

    @override
    def process_broadcast(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        times = self.times.get(row.value, 0) + 1
        self.times.put(row.value, times)
        if self._has_seen_rows or times > 1:
            self._breach(ctx, f"row {row.value} of the side comes late, or again: {times}")

    @override
    def process(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        self._has_seen_rows = True
        there = sum(self.times.get(value, 0) for value in range(SIDE_ROWS))
        if there != SIDE_ROWS:
            self._breach(ctx, f"row {row.value} comes before {SIDE_ROWS} of the side: {there}")
        out.emit(key=row.key, value=row.value, seen=there)

    def _breach(self, ctx: Any, what: str) -> None:
        from tests.support.simulated_world import World

        World.of(self._world_name).breach(what)


class LookByKey(Look, ps.KeyedBroadcastProcessFunction):
    """The same behind a keyed exchange."""


def _expected(rows: int) -> Rows:
    return collections.Counter((row["key"], SIDE_ROWS, row["value"]) for row in input_rows(rows))


def _side(env: ps.Environment, world: str) -> ps.Stream:
    read = row_source(env, SIDE_ROWS, _SIDE_RATE)
    return read.map(pass_on(world), schema=PASSED_ON)


def loading(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """A side and a stream over pipelined exchanges."""
    env = ps.Environment(parallelism=parallelism)
    main = row_source(env, rows, rate).map(pass_on(world), schema=PASSED_ON)
    side = _side(env, world).broadcast(load_first=True)
    main.connect(side).process(Look(world), schema=COUNTED).sink(RecordingSink(world))
    return SimulatedJob("loading", env.plan("job").graph, _expected(rows), lambda row: True)


def loading_kept(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """A side and a keyed stream over exchanges that keep their rows."""
    env = ps.Environment(parallelism=parallelism, config={"execution.exchange.default": "caching"})
    side = _side(env, world).broadcast(load_first=True)
    keyed = row_source(env, rows, rate).key_by("key").connect(side)
    keyed.process(LookByKey(world), schema=COUNTED).sink(RecordingSink(world))
    return SimulatedJob("loading_kept", env.plan("job").graph, _expected(rows), lambda row: True)


def loading_made_again(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """In front of the side is a blocking exchange, which is made again where everything restarts."""
    env = ps.Environment(parallelism=parallelism)
    made = _side(env, world).exchange("blocking").rebalance().map(pass_on(world), schema=PASSED_ON)
    side = made.broadcast(load_first=True)
    main = row_source(env, rows, rate).map(pass_on(world), schema=PASSED_ON)
    main.connect(side).process(Look(world), schema=COUNTED).sink(RecordingSink(world))
    graph = env.plan("job").graph
    return SimulatedJob("loading_made_again", graph, _expected(rows), lambda row: True)


def loading_batch(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """In batch mode, without checkpoints: every restart loads again."""
    env = ps.Environment(parallelism=parallelism)
    env.set_runtime_mode("batch")
    keyed = row_source(env, rows, rate).key_by("key").connect(_side(env, world).broadcast())
    keyed.process(LookByKey(world), schema=COUNTED).sink(RecordingSink(world))
    graph = env.plan("job").graph
    return SimulatedJob(
        "loading_batch", graph, _expected(rows), lambda row: True, settings=NO_CHECKPOINTS
    )


LOADING_JOBS = (loading, loading_kept, loading_made_again, loading_batch)
