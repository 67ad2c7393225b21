"""Jobs for the simulation, each with a sequential oracle; their sinks write to a ``World``."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from typing_extensions import override

import penstock as ps
from penstock.pb import graph_pb2
from tests.support.simulated_world import Row, Rows

if TYPE_CHECKING:
    from tests.support.simulated_world import World


class RecordingSink(ps.TwoPhaseSink):
    """Writes to a world, in two phases."""

    def __init__(self, world: str) -> None:
        self._world_name = world

    @override
    def open(self, ctx: Any) -> None:
        generation = self._world().generation
        self._name = f"{generation}-{ctx.operator_uid}-{ctx.subtask_index}-{ctx.attempt}"
        self._rows: list[Row] = []
        self._count = 0

    def _world(self) -> World:
        from tests.support.simulated_world import World

        return World.of(self._world_name)

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        self._rows += rows_of(batch)

    @override
    def prepare_commit(self, checkpoint_id: int) -> list[bytes]:
        if not self._rows:
            return []
        self._count += 1
        name = f"{self._name}-{self._count}"
        self._world().prepare(name, self._rows)
        self._rows = []
        return [name.encode()]

    @override
    def commit(self, committable: bytes) -> None:
        self._world().commit(committable.decode())

    @override
    def abort(self, committable: bytes) -> None:
        raise AssertionError("nothing that a checkpoint covers is aborted")


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    """The rows of a batch, in the order of their columns' names."""
    return [tuple(row[name] for name in sorted(row)) for row in batch.to_pylist()]


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """A job and what it must bring.

    Attributes:
        expected: row -> how often it is in the output of a run without failures.
        is_repeated: whether a row comes out the same where rows before it were processed twice.
        settings: that it is run with.
        compared: what of a row is compared.
        ends_with_sums: its output is that of ``SumAtEnd``, and nothing else.
        noticed_rows: of a job that lies so that rows come twice or never: while no more rows than these have been
            processed at its last restart, that is noticed; later no more, where consumers have read an end.
    """

    name: str
    graph: graph_pb2.JobGraph
    expected: Rows
    is_repeated: Callable[[Row], bool]
    settings: Mapping[str, object] = field(default_factory=dict)
    compared: Callable[[Row], Row] = tuple
    noticed_rows: int | None = None
    ends_with_sums: bool = False

    def check(self, written: Rows, *, is_exactly_once: bool, has_finished: bool) -> None:
        """Compares what came out with what had to."""
        visible = self._compared(written)
        if is_exactly_once:
            extra, missing = visible - self.expected, self.expected - visible
            assert not extra, f"{self.name} wrote too much: {_few(extra)}; missing: {_few(missing)}"
            assert not missing or not has_finished, f"{self.name} lost {_few(missing)}"
        elif has_finished:
            wanted = {row for row in self.expected if self.is_repeated(row)}
            missing_rows = wanted - visible.keys()
            assert not missing_rows, f"{self.name} lost {sorted(missing_rows)[:10]}"

    def check_drained(self, written: Rows, *, is_whole: bool) -> None:
        """Compares what came out of a job whose event time was ended in its midst: each row that it has read is
        there once, and what it says of all of them at the end is of just these.

        Args:
            is_whole: all of its output was committed; a job that was cancelled behind that savepoint may leave some of it.
        """
        repeated = {row: count for row, count in written.items() if self.is_repeated(row)}
        extra = self._compared(repeated) - self.expected
        assert not extra, f"{self.name} wrote too much: {_few(extra)}"
        if not (self.ends_with_sums and is_whole):
            return
        sums: dict[Any, tuple[int, int]] = {}
        for (key, seen, value), count in written.items():
            if not seen:
                rows, total = sums.get(key, (0, 0))
                sums[key] = rows + count, total + value * count
        said = collections.Counter(row for row in written.elements() if row[1])
        expected = collections.Counter((key, *of_key) for key, of_key in sums.items())
        assert said == expected, (
            f"{self.name} says {_few(said - expected)}: {_few(expected - said)}"
        )

    def _compared(self, written: Mapping[Row, int]) -> Rows:
        """How often what is compared of the rows is there."""
        visible: Rows = collections.Counter()
        for row, count in written.items():
            visible[self.compared(row)] += count
        return visible


def _few(rows: Rows) -> list[tuple[Row, int]]:
    return sorted(rows.items())[:10]


def _always(row: Row) -> bool:
    return True


def _never(row: Row) -> bool:
    return False


def is_passed_on(row: Row) -> bool:
    """Of ``SumAtEnd``: not one of its sums."""
    return len(row) < 3 or row[1] == 0


def events(start: int, count: int) -> pa.RecordBatch:
    """Rows whose event times are out of order by up to 50 ms."""
    position = np.arange(start, start + count)
    return pa.record_batch(
        {
            "key": pa.array(position * 31 % 7),
            "ts": pa.array(position * 10 - position * 17 % 50 + 1000),
            "value": pa.array(position),
        }
    )


def row_source(env: ps.Environment, rows: int, rate: float | None) -> ps.Stream:
    """``events`` in event time."""
    stream = env.generate(events, rows=rows, rate=rate, schema=events(0, 1).schema)
    return stream.with_event_time("ts", out_of_orderness="50ms")


def input_rows(rows: int) -> list[dict[str, int]]:
    """What ``row_source`` reads."""
    return events(0, rows).to_pylist()


# ---------------------------------------------------------------- the jobs

COUNTED = pa.schema([("key", pa.int64()), ("value", pa.int64()), ("seen", pa.int64())])


class SumAtEnd(ps.KeyedProcessFunction):
    """Counts and sums the rows of a key, and says so once, when the data ends."""

    seen = ps.ValueState("seen", int, default=0)
    total = ps.ValueState("total", int, default=0)

    @override
    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        if not self.seen.value():
            ctx.timers.event_time(1 << 40)
        self.seen.update(self.seen.value() + 1)
        self.total.update(self.total.value() + row.value)
        out.emit(key=row.key, value=row.value, seen=0)

    @override
    def on_timer(self, timestamp: int, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(key=ctx.key, value=self.total.value(), seen=self.seen.value())


def keyed_process(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """Source -> key_by -> function with state and timers -> sink."""
    env = ps.Environment(parallelism=parallelism)
    stream = row_source(env, rows, rate).key_by("key").process(SumAtEnd(), schema=COUNTED)
    stream.sink(RecordingSink(world))
    graph = env.plan("keyed process").graph
    expected = expected_sums(rows)
    return SimulatedJob("keyed_process", graph, expected, is_passed_on, ends_with_sums=True)


def expected_sums(rows: int) -> Rows:
    """What ``SumAtEnd`` makes of the input: (key, seen, value)."""
    expected = collections.Counter((row["key"], 0, row["value"]) for row in input_rows(rows))
    for key, group in grouped(input_rows(rows)).items():
        expected[key, len(group), sum(row["value"] for row in group)] += 1
    return expected


def window_totals(rows: int, size_ms: int) -> Rows:
    """Rows and total of their values by key and window: (key, rows, total)."""
    cells: dict[tuple[int, int], list[int]] = collections.defaultdict(lambda: [0, 0])
    for row in input_rows(rows):
        cell = cells[row["key"], row["ts"] // size_ms]
        cell[0] += 1
        cell[1] += row["value"]
    return collections.Counter((key, *cell) for (key, _), cell in cells.items())


def grouped(rows: Iterable[dict[str, int]]) -> dict[int, list[dict[str, int]]]:
    """Rows by key."""
    groups: dict[int, list[dict[str, int]]] = {}
    for row in rows:
        groups.setdefault(row["key"], []).append(row)
    return groups


def window_aggregate(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """Source -> key_by -> windows -> sink."""
    env = ps.Environment(parallelism=parallelism)
    windows = row_source(env, rows, rate).key_by("key").window(ps.tumbling("300ms"))
    counted = windows.aggregate(rows=ps.count(), total=ps.sum("value"))
    counted.select("key", "rows", "total").sink(RecordingSink(world))
    graph = env.plan("windows").graph
    return SimulatedJob("window_aggregate", graph, window_totals(rows, 300), _never)


class MatchUp(ps.KeyedCoProcessFunction):
    """Pairs each row of the left with all rows of the right of its key that came before or after it."""

    lefts = ps.ListState("lefts", int)
    rights = ps.ListState("rights", int)

    @override
    def process_left(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.lefts.add(row.value)
        for right in self.rights.get():
            out.emit(key=row.key, value=row.value, seen=right)

    @override
    def process_right(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.rights.add(row.value)
        for left in self.lefts.get():
            out.emit(key=row.key, value=left, seen=row.value)


def connected(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """Two sources -> connect -> function with lists -> sink."""
    env = ps.Environment(parallelism=parallelism)
    rows = rows // 3
    left = row_source(env, rows, rate).key_by("key")
    right = row_source(env, rows // 2, None).key_by("key")
    left.connect(right).process(MatchUp(), schema=COUNTED).sink(RecordingSink(world))
    rights = grouped(input_rows(rows // 2))
    expected = collections.Counter(
        (row["key"], right["value"], row["value"])
        for row in input_rows(rows)
        for right in rights.get(row["key"], ())
    )
    return SimulatedJob("connected", env.plan("connected").graph, expected, _always)


def interval_join(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """Two sources -> join within an interval -> sink."""
    env = ps.Environment(parallelism=parallelism)
    left = row_source(env, rows, rate).rename(value="left")
    right = row_source(env, rows, None).rename(value="right")
    joined = left.join(right, on="key", within=("-50ms", "100ms"))
    joined.select("key", "left", "right").sink(RecordingSink(world))
    rights = grouped(input_rows(rows))
    expected = collections.Counter(
        (row["key"], row["value"], right["value"])
        for row in input_rows(rows)
        for right in rights[row["key"]]
        if -50 <= right["ts"] - row["ts"] <= 100
    )
    return SimulatedJob("interval_join", env.plan("join").graph, expected, _always)


def sink_and_exchange(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """A chain that ends in a sink and in an exchange: producers wait for the commit too."""
    env = ps.Environment(parallelism=parallelism)
    source = row_source(env, rows, rate)
    source.select("key", "value").sink(RecordingSink(world))
    running = source.key_by("key").process(SumAtEnd(), schema=COUNTED)
    running.filter(ps.col("seen") > 0).rebalance().sink(RecordingSink(world))
    expected: Rows = collections.Counter((row["key"], row["value"]) for row in input_rows(rows))
    for key, group in grouped(input_rows(rows)).items():
        expected[key, len(group), sum(row["value"] for row in group)] += 1
    return SimulatedJob("sink_and_exchange", env.plan("both").graph, expected, is_passed_on)


def running_aggregate(world: str, rows: int, rate: float | None, parallelism: int) -> SimulatedJob:
    """Three stages with two exchanges, of which the last has one subtask's worth of keys."""
    env = ps.Environment(parallelism=parallelism)
    windows = row_source(env, rows, rate).key_by("key").window(ps.tumbling("100ms"))
    small = windows.aggregate(rows=ps.count())
    large = small.window(ps.tumbling("400ms")).aggregate(total=ps.sum("rows"))
    large.select("total").sink(RecordingSink(world))
    totals = collections.Counter(row["ts"] // 400 for row in input_rows(rows))
    expected = collections.Counter((total,) for total in totals.values())
    return SimulatedJob("running_aggregate", env.plan("stages").graph, expected, _never)


JOBS = (
    keyed_process,
    window_aggregate,
    connected,
    interval_join,
    sink_and_exchange,
    running_aggregate,
)
