"""Jobs for the simulation whose exchanges keep their rows: caching, in memory only, blocking, and mixed.

Their functions can be made to fail once (``World.processing``). Sources are reproducible, functions with state
are not; what is declared deterministic is, but for the liars.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from typing_extensions import override

import penstock as ps
from tests.support.simulated_jobs import (
    COUNTED,
    MatchUp,
    RecordingSink,
    SimulatedJob,
    SumAtEnd,
    expected_sums,
    grouped,
    input_rows,
    is_passed_on,
    row_source,
    window_totals,
)
from tests.support.simulated_world import Row, Rows

NO_CHECKPOINTS = {"execution.checkpointing.interval": "none"}
LITTLE_MEMORY = {"taskmanager.memory.exchange-cache.size": 400}
_SPLIT_ROWS = 64
"""Of ``generate``: no source has read its last row before that many have been read."""
PASSED_ON = pa.schema([("key", pa.int64()), ("value", pa.int64())])
LIES = pa.schema([("key", pa.int64()), ("value", pa.int64()), ("lie", pa.int64())])


class FallibleSum(SumAtEnd):
    """Sums, and raises where the world has it fail."""

    def __init__(self, world: str) -> None:
        self._world_name = world

    @override
    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        from tests.support.simulated_world import World

        World.of(self._world_name).processing()
        super().process(row, ctx, out)


class CountAtEnd(ps.KeyedProcessFunction):
    """Passes on what it reads, and says once per key how many rows that were, behind all sums."""

    count = ps.ValueState("count", int, default=0)

    @override
    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        if not self.count.value():
            ctx.timers.event_time(1 << 41)
        self.count.update(self.count.value() + 1)
        out.emit(key=row.key, value=row.value, seen=row.seen)

    @override
    def on_timer(self, timestamp: int, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(key=ctx.key, value=-1, seen=self.count.value())


class FallibleMatch(MatchUp):
    """Pairs rows, and raises where the world has it fail."""

    def __init__(self, world: str) -> None:
        self._world_name = world

    @override
    def process_right(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        from tests.support.simulated_world import World

        World.of(self._world_name).processing()
        super().process_right(row, ctx, out)


def pass_on(world: str) -> Callable[[Any], dict[str, int]]:
    """A function of one row that raises where the world has it fail."""

    def passed_on(row: Any) -> dict[str, int]:
        from tests.support.simulated_world import World

        World.of(world).processing()
        return {"key": row.key, "value": row.value}

    return passed_on


def _counted(rows: Rows) -> Rows:
    """What ``CountAtEnd`` makes of rows (key, seen, value)."""
    counts: Rows = collections.Counter()
    for row, count in rows.items():
        counts[row[0],] += count
    return rows + collections.Counter((key, count, -1) for (key,), count in counts.items())


def caching(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """A reproducible source -> caching -> function with state -> sink."""
    env = ps.Environment(parallelism=parallelism, config={"execution.exchange.default": "caching"})
    summed = row_source(env, rows, rate).key_by("key").process(FallibleSum(world), schema=COUNTED)
    summed.sink(RecordingSink(world))
    expected, graph = expected_sums(rows), env.plan("job").graph
    return SimulatedJob("caching", graph, expected, is_passed_on, ends_with_sums=True)


def caching_memory(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """The same in memory only, with so little of it that rows go."""
    env = ps.Environment(
        parallelism=parallelism, config={"execution.exchange.default": "caching-memory"}
    )
    summed = row_source(env, rows, rate).key_by("key").process(FallibleSum(world), schema=COUNTED)
    summed.sink(RecordingSink(world))
    graph = env.plan("job").graph
    return SimulatedJob(
        "caching_memory", graph, expected_sums(rows), is_passed_on, settings=LITTLE_MEMORY
    )


def caching_twice(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """A second caching exchange, behind a function that is not reproducible."""
    env = ps.Environment(parallelism=parallelism, config={"execution.exchange.default": "caching"})
    summed = row_source(env, rows, rate).key_by("key").process(FallibleSum(world), schema=COUNTED)
    counted = summed.key_by("key").process(CountAtEnd(), schema=COUNTED)
    counted.sink(RecordingSink(world))
    expected = _counted(expected_sums(rows))
    return SimulatedJob("caching_twice", env.plan("job").graph, expected, is_passed_on)


def caching_windows(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """Windows behind a caching exchange: what counts is also when watermarks come again."""
    env = ps.Environment(parallelism=parallelism, config={"execution.exchange.default": "caching"})
    windows = row_source(env, rows, rate).key_by("key").window(ps.tumbling("300ms"))
    counted = windows.aggregate(rows=ps.count(), total=ps.sum("value"))
    counted.select("key", "rows", "total").sink(RecordingSink(world))
    expected = window_totals(rows, 300)
    return SimulatedJob("caching_windows", env.plan("job").graph, expected, lambda row: False)


def pre_aggregated(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """Windows behind a caching exchange, in front of which slices of time are added up, behind a function that fails."""
    env = ps.Environment(parallelism=parallelism, config={"execution.exchange.default": "caching"})
    mapped = row_source(env, rows, rate).map(pass_on(world), schema=PASSED_ON).deterministic(True)
    windows = mapped.key_by("key").window(ps.tumbling("100ms"))
    counted = windows.aggregate(rows=ps.count(), total=ps.sum("value"))
    counted.select("key", "rows", "total").sink(RecordingSink(world))
    graph = env.plan("job").graph
    assert graph.edges[0].reproducible
    assert graph.vertices[0].operators[-1].window_aggregate.HasField("out_of_orderness_ms")
    return SimulatedJob("pre_aggregated", graph, window_totals(rows, 100), lambda row: False)


def batch(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """Two stages behind blocking exchanges, without checkpoints."""
    env = ps.Environment(parallelism=parallelism)
    env.set_runtime_mode("batch")
    summed = row_source(env, rows, rate).key_by("key").process(FallibleSum(world), schema=COUNTED)
    counted = summed.key_by("key").process(CountAtEnd(), schema=COUNTED)
    counted.sink(RecordingSink(world))
    expected, graph = _counted(expected_sums(rows)), env.plan("job").graph
    return SimulatedJob("batch", graph, expected, is_passed_on, settings=NO_CHECKPOINTS)


def batch_join(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """A join of two blocking inputs, without checkpoints."""
    env = ps.Environment(parallelism=parallelism)
    env.set_runtime_mode("batch")
    left = row_source(env, rows // 3, rate).key_by("key")
    right = row_source(env, rows // 6, None).map(pass_on(world), schema=PASSED_ON)
    matched = left.connect(right.deterministic(True).key_by("key"))
    matched.process(FallibleMatch(world), schema=COUNTED).sink(RecordingSink(world))
    expected, graph = _pairs(rows // 3, rows // 6), env.plan("job").graph
    return SimulatedJob("batch_join", graph, expected, lambda row: True, settings=NO_CHECKPOINTS)


def _pairs(left: int, right: int) -> Rows:
    rights = grouped(input_rows(right))
    return collections.Counter(
        (row["key"], other["value"], row["value"])
        for row in input_rows(left)
        for other in rights.get(row["key"], ())
    )


def mixed(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """A blocking build side and a caching stream, with checkpoints."""
    env = ps.Environment(parallelism=parallelism)
    left = row_source(env, rows // 6, None).exchange("blocking").key_by("key")
    right = row_source(env, rows // 3, rate).exchange("caching").key_by("key")
    matched = left.connect(right).process(FallibleMatch(world), schema=COUNTED)
    matched.sink(RecordingSink(world))
    expected = _pairs(rows // 6, rows // 3)
    return SimulatedJob("mixed", env.plan("job").graph, expected, lambda row: True)


def blocking_and_pipelined(
    world: str, rows: int, rate: float | None, parallelism: int
) -> SimulatedJob:
    """A blocking build side and a pipelined stream, with checkpoints."""
    env = ps.Environment(parallelism=parallelism)
    left = row_source(env, rows // 6, None).exchange("blocking").key_by("key")
    right = row_source(env, rows // 3, rate).key_by("key")
    matched = left.connect(right).process(FallibleMatch(world), schema=COUNTED)
    matched.sink(RecordingSink(world))
    expected, graph = _pairs(rows // 6, rows // 3), env.plan("job").graph
    return SimulatedJob("blocking_and_pipelined", graph, expected, lambda row: True)


def blocking_stages(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """Two stages behind blocking exchanges, with checkpoints."""
    env = ps.Environment(parallelism=parallelism, config={"execution.exchange.default": "blocking"})
    summed = row_source(env, rows, rate).key_by("key").process(FallibleSum(world), schema=COUNTED)
    counted = summed.key_by("key").process(CountAtEnd(), schema=COUNTED)
    counted.sink(RecordingSink(world))
    expected = _counted(expected_sums(rows))
    return SimulatedJob("blocking_stages", env.plan("job").graph, expected, is_passed_on)


def pipelines(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """Pipelines side by side, each of two chains with a caching exchange between them."""
    env = ps.Environment(parallelism=parallelism)
    first = row_source(env, rows, rate).map(pass_on(world), schema=PASSED_ON).exchange("caching")
    first.map(pass_on(world), schema=PASSED_ON).sink(RecordingSink(world))
    expected: Rows = collections.Counter((row["key"], row["value"]) for row in input_rows(rows))
    return SimulatedJob("pipelines", env.plan("job").graph, expected, lambda row: True)


def chains(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """Single chains side by side, without any exchange."""
    env = ps.Environment(parallelism=parallelism)
    mapped = row_source(env, rows, rate).map(pass_on(world), schema=PASSED_ON)
    mapped.sink(RecordingSink(world))
    expected: Rows = collections.Counter((row["key"], row["value"]) for row in input_rows(rows))
    return SimulatedJob("chains", env.plan("job").graph, expected, lambda row: True)


def two_sinks(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """One caching source, read by a function behind a keyed exchange and by one behind a dealt one."""
    env = ps.Environment(parallelism=parallelism)
    source = row_source(env, rows, rate).exchange("caching")
    summed = source.key_by("key").process(FallibleSum(world), schema=COUNTED)
    summed.sink(RecordingSink(world))
    source.rebalance().map(pass_on(world), schema=PASSED_ON).sink(RecordingSink(world))
    expected = expected_sums(rows)
    expected.update((row["key"], row["value"]) for row in input_rows(rows))
    return SimulatedJob("two_sinks", env.plan("job").graph, expected, is_passed_on)


def declared(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """A declared function in front of a caching exchange."""
    env = ps.Environment(parallelism=parallelism)
    mapped = row_source(env, rows, rate).map(pass_on(world), schema=PASSED_ON)
    keyed = mapped.deterministic(True).exchange("caching").key_by("key")
    keyed.process(FallibleSum(world), schema=COUNTED).sink(RecordingSink(world))
    expected, graph = expected_sums(rows), env.plan("job").graph
    return SimulatedJob("declared", graph, expected, is_passed_on, ends_with_sums=True)


class KeepLies(ps.KeyedProcessFunction):
    """Passes on what it reads, behind a keyed exchange, and says what it was told."""

    def __init__(self, world: str) -> None:
        self._world_name = world

    @override
    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        from tests.support.simulated_world import World

        World.of(self._world_name).heard.setdefault(row.value, set()).add(row.lie)
        out.emit(key=row.key, value=row.value, lie=row.lie)


def _liar(world: str, rows: int, rate: float | None, parallelism: int, name: str) -> SimulatedJob:
    moves = name == "moving_liar"

    def lie(row: Any) -> dict[str, int]:
        from tests.support.simulated_world import World

        told = World.of(world).processing()
        World.of(world).sent[row.value] = told
        return {
            "key": (row.value * 31 + told // 40 if moves else row.value * 31) % 7,
            "value": row.value,
            "lie": told,
        }

    env = ps.Environment(parallelism=parallelism)
    mapped = row_source(env, rows, rate).map(lie, schema=LIES).deterministic(True)
    keyed = mapped.exchange("caching").key_by("key")
    keyed.process(KeepLies(world), schema=LIES).sink(RecordingSink(world))
    expected: Rows = collections.Counter((row["value"],) for row in input_rows(rows))
    return SimulatedJob(
        name,
        env.plan("job").graph,
        expected,
        lambda row: True,
        compared=_true_part,
        noticed_rows=min(rows, _SPLIT_ROWS) - 1 if moves else None,
    )


def _true_part(row: Row) -> Row:
    """Of a row (key, lie, value)."""
    return row[2:]


def liar(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """A function that is declared deterministic, and gives other values each time."""
    return _liar(world, rows, rate, parallelism, "liar")


def moving_liar(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """The same, and rows go to other consumers."""
    return _liar(world, rows, rate, parallelism, "moving_liar")


KEPT_JOBS = (
    caching,
    caching_memory,
    caching_twice,
    caching_windows,
    pre_aggregated,
    batch,
    batch_join,
    mixed,
    blocking_and_pipelined,
    blocking_stages,
    pipelines,
    chains,
    two_sinks,
    declared,
    liar,
    moving_liar,
)
