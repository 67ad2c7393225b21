"""Joins against DuckDB: the same rows, in any interleaving of both inputs, give the rows of the SQL query.

The operator is driven directly. Rows come in random batches from both sides, out of order within a bound
that the watermark respects, with equal times, duplicates and null keys; some runs are cut by a snapshot
from which one or two other operators go on.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from penstock.config import Configuration
from penstock.graph.join_schemas import joined_columns
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME, schema_from_bytes, schema_to_bytes
from penstock.storage.key_encoding import encode_keys
from penstock.storage.key_groups import key_group_of, key_group_range
from penstock.streams.windows import Window, session, sliding, tumbling
from taskmanager.operators.factory import build_operator
from taskmanager.state.backend import BackendEnvironment, KeyedStateBackend
from taskmanager.state.hashmap.store import HashMapStateBackend
from taskmanager.state.memory import ManagedMemory
from taskmanager.state.rocksdb import window_rows
from taskmanager.state.rocksdb.store import RocksDBStateBackend
from tests.support.operator_harness import OperatorHarness
from tests.support.rocksdb_cluster import starved_backend

TIME = pa.field(EVENT_TIME, pa.int64(), nullable=False)
HOWS = {
    "inner": graph_pb2.JOIN_KIND_INNER,
    "left": graph_pb2.JOIN_KIND_LEFT,
    "right": graph_pb2.JOIN_KIND_RIGHT,
    "full": graph_pb2.JOIN_KIND_FULL,
}
KEYS: dict[str, list[pa.Field]] = {
    "number": [pa.field("k", pa.int64())],
    "float": [pa.field("k", pa.float64())],
    "text": [pa.field("k", pa.string())],
    "decimal": [pa.field("k", pa.decimal128(9, 2))],
    "two": [pa.field("k", pa.int32()), pa.field("k2", pa.string())],
}
Event = tuple[int, pa.RecordBatch] | int


def join_spec(
    keys: Sequence[pa.Field],
    *,
    how: str = "inner",
    within: tuple[int, int] | None = None,
    window: Window | None = None,
    carries_time: bool = True,
) -> graph_pb2.Operator:
    """A join of (keys, x, v) with (keys, x, w)."""
    left = pa.schema([*keys, ("x", pa.int64()), ("v", pa.string())])
    right = pa.schema([*keys, ("x", pa.int64()), ("w", pa.float64())])
    names = [field.name for field in keys]
    window_spec = None if window is None else window.to_proto("event", 0, "")
    joined = joined_columns(left, right, names, HOWS[how], window_spec)
    output = joined.schema.append(TIME) if carries_time else joined.schema
    spec = graph_pb2.JoinSpec(keys=names, how=HOWS[how])
    if within is not None:
        spec.is_interval, (spec.lower_ms, spec.upper_ms) = True, within
    if window_spec is not None:
        spec.window.CopyFrom(window_spec)
    return graph_pb2.Operator(
        name="join",
        uid="join",
        join=spec,
        input_schema=schema_to_bytes(left.append(TIME)),
        second_input_schema=schema_to_bytes(right.append(TIME)),
        output_schema=schema_to_bytes(output),
    )


def key_values(field: pa.Field) -> list[Any]:
    """Five values of a key column, some of which are equal or nearly so."""
    if pa.types.is_integer(field.type):
        return [0, 1, 2, 3, -4]
    if pa.types.is_floating(field.type):
        return [0.0, -0.0, 1.5, float("nan"), 3.0]
    if pa.types.is_decimal(field.type):
        return [f"{i}.25" for i in range(5)]
    return ["", "a", "ab", "ä", "b" * 40]


def side_rows(
    rng: random.Random, keys: Sequence[pa.Field], side: int, count: int, span_ms: int
) -> list[dict[str, Any]]:
    """Rows in order of time, many with equal times."""
    choices = [[*key_values(field), None] for field in keys]
    rows = []
    for number in range(count):
        row: dict[str, Any] = {
            field.name: rng.choice(some) for field, some in zip(keys, choices, strict=True)
        }
        row["x"] = number
        row["v" if side == 0 else "w"] = (
            str(number) if side == 0 else rng.choice([None, number / 2])
        )
        row[EVENT_TIME] = rng.randrange(-span_ms // 2, span_ms // 2)
        rows.append(row)
    return sorted(rows, key=lambda row: row[EVENT_TIME])


def batch_of(spec: graph_pb2.Operator, side: int, rows: list[dict[str, Any]]) -> pa.RecordBatch:
    schema = schema_from_bytes(spec.second_input_schema if side else spec.input_schema)
    arrays = []
    for field in schema:
        values = [row[field.name] for row in rows]
        if pa.types.is_decimal(field.type):
            arrays.append(pa.array(values, pa.string()).cast(field.type))
        else:
            arrays.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def events_of(
    rng: random.Random, spec: graph_pb2.Operator, sides: list[list[dict[str, Any]]], late_ms: int
) -> list[Event]:
    """Batches of both sides, each out of order by up to ``late_ms``, and watermarks that allow for it."""
    pending = [
        sorted(rows, key=lambda row: row[EVENT_TIME] + rng.randrange(late_ms + 1)) for rows in sides
    ]
    events: list[Event] = []
    while any(pending):
        side = rng.choice([i for i in range(2) if pending[i]])
        count = rng.randrange(1, 30)
        taken, pending[side] = pending[side][:count], pending[side][count:]
        events.append((side, batch_of(spec, side, taken)))
        ahead = [row[EVENT_TIME] for rows in pending for row in rows]
        if ahead and rng.random() < 0.5:
            events.append(min(ahead) - 1 - rng.choice([0, 0, 50]))
    return events


def run(harness: OperatorHarness, events: Sequence[Event]) -> None:
    """Hands all events to one operator."""
    for event in events:
        if isinstance(event, int):
            harness.watermark(event)
        else:
            harness.push(event[1], event[0])


def run_cut(
    spec: graph_pb2.Operator,
    events: Sequence[Event],
    cut: int,
    parallelism: int,
    backend: Callable[[BackendEnvironment], KeyedStateBackend],
    directory: Path,
) -> list[dict[str, Any]]:
    """The rows of one operator up to event ``cut``, and of those that go on from its snapshot."""
    first = OperatorHarness(build_operator(spec), backend=backend, work_directory=directory / "0")
    run(first, events[: cut // 2])
    first.snapshot()
    run(first, events[cut // 2 : cut])
    taken = first.snapshot()
    first.state.close()
    rows = first.rows(event_time=True)
    names = list(spec.join.keys)
    for index in range(parallelism):
        owned = key_group_range(index, parallelism, 128)
        harness = OperatorHarness(
            build_operator(spec),
            restored=[taken],
            subtask_index=index,
            parallelism=parallelism,
            backend=backend,
            work_directory=directory / f"{index + 1}",
        )
        for event in events[cut:]:
            if isinstance(event, int):
                harness.watermark(event)
                continue
            side, batch = event
            groups = key_group_of(encode_keys([batch.column(n) for n in names]).hashes, 128)
            mine = [group in owned for group in groups.tolist()]
            harness.push(batch.filter(pa.array(mine)), side)
        harness.end()
        rows += harness.rows(event_time=True)
        harness.state.close()
    return rows


def comparable(rows: Sequence[dict[str, Any]]) -> Counter[str]:
    """Rows without their order; NaN equals itself, and both zeros are one."""
    return Counter(
        repr({n: 0.0 if v == 0 and isinstance(v, float) else v for n, v in sorted(row.items())})
        for row in rows
    )


def query(sides: list[pa.Table], sql: str, keys: Sequence[pa.Field]) -> list[dict[str, Any]]:
    left, right = sides
    on = " and ".join(f"l.{f.name} = r.{f.name}" for f in keys)
    both = ", ".join(f"coalesce(l.{f.name}, r.{f.name}) as {f.name}" for f in keys)
    columns = "l.x as x, l.v as v, r.x as x_right, r.w as w"
    text = sql.format(on=on, keys=both, columns=columns)
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        connection.register("lefts", left)
        connection.register("rights", right)
        found: list[dict[str, Any]] = connection.sql(text).to_arrow_table().to_pylist()
    return found


INTERVAL_SQL = (
    "select {keys}, {columns}, greatest(l.__event_time, r.__event_time) as __event_time "
    "from lefts l join rights r on {on} and r.__event_time between l.__event_time + ({lower}) "
    "and l.__event_time + ({upper})"
)


INTERVALS = [(-50, 50), (0, 0), (-200, -100), (30, 400), (0, 2000), (-3000, 100)]


@pytest.mark.parametrize(
    ("kind", "within"),
    [*(("number", within) for within in INTERVALS), *((kind, (-90, 10)) for kind in KEYS)],
    ids=str,
)
def test_interval_join_is_the_sql_join(kind: str, within: tuple[int, int]) -> None:
    for seed in range(2):
        rng = random.Random(f"{kind}{within}{seed}")
        keys = KEYS[kind]
        spec = join_spec(keys, within=within)
        sides = [side_rows(rng, keys, side, 150, 2000) for side in range(2)]
        config = Configuration.from_mapping({"execution.batch-rows": "16"}) if seed % 2 else None
        harness = OperatorHarness(build_operator(spec), config=config)
        run(harness, events_of(rng, spec, sides, late_ms=300))
        harness.end()
        tables = [
            pa.Table.from_batches([batch_of(spec, side, rows)]) for side, rows in enumerate(sides)
        ]
        sql = INTERVAL_SQL.replace("{lower}", str(within[0])).replace("{upper}", str(within[1]))
        assert comparable(harness.rows(event_time=True)) == comparable(query(tables, sql, keys))
        assert harness.counters.late_records == 0
        assert harness.state.namespaces("left") == harness.state.namespaces("right") == []


WINDOW_SQL = (
    "with l as (select *, {of_row} as s from lefts), r as (select *, {of_row} as s from rights) "
    "select {{keys}}, {{columns}}, "
    "make_timestamptz(coalesce(l.s, r.s) * 1000) as window_start, "
    "make_timestamptz((coalesce(l.s, r.s) + {size}) * 1000) as window_end, "
    "coalesce(l.s, r.s) + {size} - 1 as __event_time "
    "from l {how} join r on {{on}} and l.s = r.s"
)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    "window", [tumbling(100), tumbling(70, offset=-30), sliding(100, 40)], ids=str
)
def test_window_join_is_the_sql_join_of_each_window(window: Window, how: str) -> None:
    proto = window.to_proto("event", 0, "")
    size, slide, offset = proto.size_ms, proto.slide_ms, proto.offset_ms
    newest = f"(__event_time - ((__event_time - {offset}) % {slide} + {slide}) % {slide})"
    of_row = (
        f"unnest(list_filter([{newest} - i * {slide} for i in range({size // slide + 1})], "
        f"lambda s: s + {size} > __event_time))"
    )
    for seed in range(2):
        rng = random.Random(f"{window}{how}{seed}")
        keys = KEYS[rng.choice(["number", "two", "text"])]
        spec = join_spec(keys, how=how, window=window)
        sides = [side_rows(rng, keys, side, 120, 1000) for side in range(2)]
        config = Configuration.from_mapping({"execution.batch-rows": "16"}) if seed % 2 else None
        harness = OperatorHarness(build_operator(spec), config=config)
        run(harness, events_of(rng, spec, sides, late_ms=100))
        harness.end()
        tables = [
            pa.Table.from_batches([batch_of(spec, side, rows)]) for side, rows in enumerate(sides)
        ]
        sql = WINDOW_SQL.format(of_row=of_row, size=size, how=how)
        expected = query(tables, sql, keys)
        assert comparable(harness.rows(event_time=True)) == comparable(expected)
        assert len(harness.state.namespaces("left_slices")) == 0


def with_sessions(sides: list[list[dict[str, Any]]], keys: Sequence[pa.Field], gap_ms: int) -> None:
    """Sets ``s`` and ``e`` of each row: bounds of the session of its key that it is part of."""
    by_key: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in (row for rows in sides for row in rows):
        by_key.setdefault(tuple(row[field.name] for field in keys), []).append(row)
    for rows in by_key.values():
        rows.sort(key=lambda row: int(row[EVENT_TIME]))
        begun: list[dict[str, Any]] = []
        for row in [*rows, None]:
            if begun and (row is None or row[EVENT_TIME] - begun[-1][EVENT_TIME] > gap_ms):
                for member in begun:
                    member["s"] = begun[0][EVENT_TIME]
                    member["e"] = begun[-1][EVENT_TIME] + gap_ms
                begun = []
            if row is not None:
                begun.append(row)


SESSION_SQL = (
    "select {keys}, {columns}, make_timestamptz(coalesce(l.s, r.s) * 1000) as window_start, "
    "make_timestamptz(coalesce(l.e, r.e) * 1000) as window_end, "
    "coalesce(l.e, r.e) - 1 as __event_time "
    "from lefts l HOW join rights r on {on} and l.s = r.s"
)


def session_case(
    rng: random.Random, kind: str, how: str
) -> tuple[graph_pb2.Operator, list[Event], list[dict[str, Any]]]:
    """A session join, what it is given, and what DuckDB makes of it."""
    keys = KEYS[kind]
    spec = join_spec(keys, how=how, window=session(40))
    sides = [side_rows(rng, keys, side, 100, 3000) for side in range(2)]
    with_sessions(sides, keys, 40)
    tables = []
    for side, rows in enumerate(sides):
        table = pa.Table.from_batches([batch_of(spec, side, rows)])
        for name in ("s", "e"):
            table = table.append_column(name, pa.array([row[name] for row in rows], pa.int64()))
        tables.append(table)
    expected = query(tables, SESSION_SQL.replace("HOW", how), keys)
    return spec, events_of(rng, spec, sides, late_ms=100), expected


@pytest.mark.parametrize("how", HOWS)
def test_session_join_is_the_sql_join_of_each_session(how: str) -> None:
    for kind in ("number", "two"):
        spec, events, expected = session_case(random.Random(f"{kind}{how}"), kind, how)
        harness = OperatorHarness(build_operator(spec))
        run(harness, events)
        harness.end()
        assert comparable(harness.rows(event_time=True)) == comparable(expected)


@pytest.mark.parametrize("backend", [HashMapStateBackend, RocksDBStateBackend, starved_backend])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_joins_go_on_from_a_snapshot(
    parallelism: int,
    backend: Callable[[BackendEnvironment], KeyedStateBackend],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(window_rows, "PART_ROWS", 10)
    for seed, kind in enumerate(("number", "two")):
        rng = random.Random(f"{kind}{parallelism}")
        keys = KEYS[kind]
        interval = join_spec(keys, within=(-200, 700))
        window = join_spec(keys, how="full", window=sliding(300, 100))
        sides = [side_rows(rng, keys, side, 120, 3000) for side in range(2)]
        cases = [(spec, events_of(rng, spec, sides, late_ms=200)) for spec in (interval, window)]
        cases.append(session_case(rng, kind, "full")[:2])
        for number, (spec, events) in enumerate(cases):
            whole = OperatorHarness(build_operator(spec))
            run(whole, events)
            whole.end()
            directory = tmp_path / f"{seed}-{number}"
            cut = rng.randrange(2, len(events))
            rows = run_cut(spec, events, cut, parallelism, backend, directory)
            assert comparable(rows) == comparable(whole.rows(event_time=True))


@pytest.mark.parametrize("backend", [HashMapStateBackend, starved_backend])
def test_in_batch_mode_rows_in_any_order_lie_in_few_buckets(
    backend: Callable[[BackendEnvironment], KeyedStateBackend], tmp_path: Path
) -> None:
    """Also where two subtasks with buckets of different lengths become one."""
    rng = random.Random(3)
    keys, within, day_ms = KEYS["number"], (-300_000, 300_000), 86_400_000
    spec = join_spec(keys, within=within)
    sides = [side_rows(rng, keys, side, 600, day_ms) for side in range(2)]
    for rows in sides:
        rng.shuffle(rows)
        rows.append({**rows[0], EVENT_TIME: 1 << 50})
    batches = [
        (side, batch_of(spec, side, rows[start : start + size]))
        for start, size in ((0, 300), (300, 301))
        for side, rows in enumerate(sides)
    ]
    config = Configuration.from_mapping({"execution.runtime-mode": "batch"})
    snapshots, found = [], []
    for index in range(3):
        is_last = index == 2
        harness = OperatorHarness(
            build_operator(spec),
            config=config,
            restored=snapshots if is_last else (),
            subtask_index=0 if is_last else index,
            parallelism=1 if is_last else 2,
            backend=backend,
            work_directory=tmp_path / str(index),
        )
        for side, batch in batches[2:] if is_last else batches[:2]:
            groups = key_group_of(encode_keys([batch.column("k")]).hashes, 128)
            mine = [is_last or int(group) // 64 == index for group in groups]
            few = batch.filter(pa.array(mine))
            # The first subtask's rows come one by one: its buckets stay as short as they were.
            size = few.num_rows if index else 1
            for start in range(0, few.num_rows, size):
                harness.push(few.slice(start, size), side)
            if index == 1:
                assert len(harness.state.namespaces(("left", "right")[side])) <= 33
        if not is_last:
            snapshots.append(harness.snapshot())
        harness.end()
        found += harness.rows(event_time=True)
        harness.close()
    tables = [pa.Table.from_batches([batch_of(spec, i, rows)]) for i, rows in enumerate(sides)]
    sql = INTERVAL_SQL.replace("{lower}", str(within[0])).replace("{upper}", str(within[1]))
    assert comparable(found) == comparable(query(tables, sql, keys))


def pairs(harness: OperatorHarness) -> list[tuple[int, int]]:
    return [(row["x"], row["x_right"]) for row in harness.take_rows()]


def row(side: int, time: int, x: int, k: int | None = 1) -> dict[str, Any]:
    return {"k": k, "x": x, ("w" if side else "v"): None, EVENT_TIME: time}


def interval_harness(
    within: tuple[int, int], rows_max: int = 8192
) -> tuple[OperatorHarness, graph_pb2.Operator]:
    spec = join_spec(KEYS["number"], within=within)
    config = Configuration.from_mapping({"execution.batch-rows": str(rows_max)})
    return OperatorHarness(build_operator(spec), config=config), spec


def test_rows_are_late_when_no_row_in_time_can_fit_them() -> None:
    harness, spec = interval_harness((-10, 20))
    harness.push(batch_of(spec, 1, [row(1, 95, 0), row(1, 89, 1)]), 1)
    harness.watermark(100)
    # Left rows are live while time + 20 > 100, right ones while time + 10 > 100.
    harness.push(batch_of(spec, 0, [row(0, 80, 0), row(0, 81, 1), row(0, 120, 2)]))
    assert harness.counters.late_records == 1
    assert pairs(harness) == [(1, 0)]  # right row 1 fits, and is no longer live
    harness.push(batch_of(spec, 1, [row(1, 90, 2), row(1, 101, 3), row(1, 110, 4)]), 1)
    assert harness.counters.late_records == 2
    assert pairs(harness) == [(1, 3), (2, 4)]


def test_rows_whose_partners_all_came_before_them_are_joined_and_not_kept() -> None:
    harness, spec = interval_harness((-50, -10))  # right rows are older than left ones
    harness.push(batch_of(spec, 1, [row(1, 100, 0)]), 1)
    harness.watermark(105)
    harness.push(batch_of(spec, 0, [row(0, 105, 0), row(0, 112, 1)]))
    assert harness.counters.late_records == 1
    assert pairs(harness) == [(1, 0)]


def test_output_is_in_the_order_of_rows_and_of_their_partners_times() -> None:
    harness, spec = interval_harness((-5000, 5000), rows_max=3)
    for number, time in enumerate([30, 10, 4000, 20, 10]):
        harness.push(batch_of(spec, 0, [row(0, time, number)]))
    harness.push(batch_of(spec, 1, [row(1, 7, 0), row(1, 5, 1), row(1, 6, 2, None)]), 1)
    assert [batch.num_rows for batch in harness.batches] == [3, 2, 3, 2]
    found = pairs(harness)
    assert found == [(x, right) for right in (0, 1) for x in (1, 4, 3, 0, 2)]


def test_many_rows_of_one_key_come_out_batch_by_batch() -> None:
    harness, spec = interval_harness((0, 10), rows_max=1000)
    harness.push(batch_of(spec, 0, [row(0, i % 10, i) for i in range(300)]))
    harness.push(batch_of(spec, 1, [row(1, 10, i) for i in range(50)]), 1)
    assert max(batch.num_rows for batch in harness.batches) <= 1000
    assert len(pairs(harness)) == 300 * 50


def test_a_join_gives_only_the_columns_of_its_schema() -> None:
    spec = join_spec(KEYS["number"], how="left", window=tumbling(10), carries_time=False)
    harness = OperatorHarness(build_operator(spec))
    harness.push(batch_of(spec, 0, [row(0, 3, 5), row(0, 4, 6, None)]))
    harness.end()
    assert harness.batches[0].schema == schema_from_bytes(spec.output_schema)
    assert [(r["k"], r["x"], r["x_right"], r["w"]) for r in harness.rows()] == [
        (1, 5, None, None),
        (None, 6, None, None),
    ]


def test_late_rows_of_a_window_join_are_counted() -> None:
    spec = join_spec(KEYS["number"], window=tumbling(10))
    harness = OperatorHarness(build_operator(spec))
    harness.watermark(9)
    harness.push(batch_of(spec, 1, [row(1, 9, 0), row(1, 10, 1)]), 1)
    harness.push(batch_of(spec, 0, [row(0, 9, 0), row(0, 19, 1)]))
    harness.end()
    assert harness.counters.late_records == 2
    assert pairs(harness) == [(1, 1)]


def test_an_interval_join_many_times_as_large_as_memory_stays_within_it(tmp_path: Path) -> None:
    """100,000 rows of 400 bytes are 40 MB, the slot's memory is 16; every row finds its partner."""
    memory, number, size = ManagedMemory(16 << 20), 50_000, 1000

    def small(environment: BackendEnvironment) -> KeyedStateBackend:
        return RocksDBStateBackend(dataclasses.replace(environment, memory=memory))

    spec = join_spec(KEYS["number"], within=(-(1 << 30), 1 << 30))
    harness = OperatorHarness(
        build_operator(spec), backend=small, work_directory=tmp_path / "state"
    )
    found = 0
    for side in range(2):
        for start in range(0, number, size):
            rows = [
                {**row(side, key, key, key), **({} if side else {"v": f"{key:0400}"})}
                for key in range(start, start + size)
            ]
            harness.push(batch_of(spec, side, rows), side)
            memory.check()
            for joined in harness.take_rows():
                assert joined["v"] == f"{joined['k']:0400}"
                assert joined["x"] == joined["x_right"] == joined["k"]
                found += 1
    assert found == number
    harness.close()


def test_the_indexes_of_an_interval_join_count_as_memory_of_the_slot() -> None:
    """Beside the rows, which the backend counts; with RocksDB they are made of what is looked for."""
    spec = join_spec([pa.field("k", pa.int64())], within=(0, 1_000))
    rows = [{"k": n, "x": n, "v": "", "w": 1.0, EVENT_TIME: 5} for n in range(40_000)]
    batch = batch_of(spec, 0, rows)
    harness = OperatorHarness(build_operator(spec))
    harness.push(batch, 0)
    beside = harness.memory.used_bytes() - harness.state.memory_bytes()
    assert beside > batch.nbytes + 40_000 * 3 * 8, "the rows, and hash, time and place of each"
    harness.watermark(10_000)
    assert harness.memory.used_bytes() - harness.state.memory_bytes() == 0
    harness.close()
    rocksdb = Configuration.from_mapping({"state.backend.type": "rocksdb"})
    harness = OperatorHarness(build_operator(spec), config=rocksdb)
    harness.push(batch, 0)
    assert harness.memory.used_bytes() == harness.state.memory_bytes()
    harness.close()
