"""Aim: sources that are no files (rows of the client, generators, a socket, the user's own, a watched
directory) give exactly their rows, each once, at any parallelism.

Method: real cluster; what the test itself sends or can compute is the oracle.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from typing_extensions import override

import penstock as ps
from penstock import col
from penstock.nexmark.generator import nexmark_batch
from tests.integration.conftest import NewEnvironment
from tests.support.bids import SCHEMA, make_bids, to_table, write_table
from tests.support.jobs import DEADLINE_S, assert_same_rows, await_details, cancel, rows_of, run
from tests.support.row_server import LineServer, RowReceiver

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

BIDS = make_bids(1_000)


def test_rows_of_the_client_keep_their_order(new_env: NewEnvironment) -> None:
    env = new_env(parallelism=1)
    rows = [{"n": n, "word": None if n % 7 == 0 else f"w{n}"} for n in range(20_000)]
    assert rows_of(env, env.from_rows(rows)) == rows


def test_rows_of_the_client_take_a_schema(env: ps.Environment) -> None:
    at = dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)
    rows = [{"a": 1, "at": at, "tags": ["x", None]}, {"tags": [], "pair": {"x": 1, "y": "z"}}]
    schema = pa.schema(
        [
            ("a", pa.int8()),
            ("at", pa.timestamp("us", tz="UTC")),
            ("tags", pa.list_(pa.string())),
            ("pair", pa.struct([("x", pa.int64()), ("y", pa.string())])),
        ]
    )
    collected = env.from_rows(rows, schema=schema).collect()
    run(env)
    assert collected.to_arrow().schema == schema
    assert collected.to_pylist() == [
        {"a": 1, "at": at, "tags": ["x", None], "pair": None},
        {"a": None, "at": None, "tags": [], "pair": {"x": 1, "y": "z"}},
    ]


def test_what_nobody_reads_of_a_generator_is_left_out(env: ps.Environment) -> None:
    schema = pa.schema([("n", pa.int64()), ("square", pa.int64())])
    made = env.generate(squares, rows=5, schema=schema).select("square")
    assert sorted(row["square"] for row in rows_of(env, made)) == [0, 1, 4, 9, 16]


def test_no_rows_at_all(env: ps.Environment) -> None:
    schema = pa.schema([("a", pa.int64())])
    totals = env.from_rows([], schema=schema).key_by("a").aggregate(n=ps.count())
    assert rows_of(env, totals) == []


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_table_of_the_client(env: ps.Environment, parallelism: int) -> None:
    table = pa.concat_tables([to_table(BIDS[:1]), to_table(BIDS[1:])])
    stream = env.from_arrow(table).parallelism(parallelism)
    assert_same_rows(rows_of(env, stream), BIDS)


def squares(start: int, count: int) -> pa.RecordBatch:
    numbers = range(start, start + count)
    return pa.RecordBatch.from_pydict({"n": numbers, "square": [n * n for n in numbers]})


@pytest.mark.parametrize(("rows", "parallelism"), [(0, 2), (1, 2), (10_000, 1), (50_001, 3)])
def test_generated_rows_come_once_each(env: ps.Environment, rows: int, parallelism: int) -> None:
    stream = env.generate(squares, rows=rows).parallelism(parallelism)
    found = rows_of(env, stream)
    assert sorted(row["n"] for row in found) == list(range(rows))
    assert all(row["square"] == row["n"] ** 2 for row in found)


def test_generated_rows_keep_to_their_rate(env: ps.Environment) -> None:
    collected = env.generate(squares, rows=600, rate=1_500).collect()
    started = time.monotonic()
    run(env)
    took = time.monotonic() - started
    assert len(collected) == 600
    assert took > 0.35  # 0.4 s at this rate, and what a job costs


@pytest.mark.parametrize("kind", ["bid", "auction", "person", ""])
def test_nexmark_is_a_pure_function_of_seed_and_position(env: ps.Environment, kind: str) -> None:
    collected = env.nexmark(5_000, kind=kind, seed=3).collect()
    run(env)
    share = {"bid": 46, "auction": 3, "person": 1, "": 50}[kind]
    expected = nexmark_batch(kind, 3, 0, 5_000 * share // 50)
    assert_same_rows(collected.to_pylist(), expected.to_pylist())


def test_nexmark_columns_and_times(env: ps.Environment) -> None:
    stream = env.nexmark(
        1_000, columns=["ts", "price"], first_event_time_ms=1_000, event_interval_us=1_000
    )
    rows = rows_of(env, stream)
    assert len(rows) == 920
    assert set(rows[0]) == {"ts", "price"}
    assert min(row["ts"] for row in rows) == 1_004  # the first four events are no bids
    assert max(row["ts"] for row in rows) == 1_999


def test_lines_of_a_socket(env: ps.Environment) -> None:
    with LineServer() as server, RowReceiver() as receiver:
        lines = env.read_socket("127.0.0.1", server.port)
        lines.filter(col("line") != "skip").sink(receiver.sink())
        handle = env.submit("socket")
        server.send("one", "zwölf", "", "skip")
        assert_same_rows(receiver.take(3), [{"line": "one"}, {"line": "zwölf"}, {"line": ""}])
        server.send("more")
        assert receiver.take(1) == [{"line": "more"}]
        server.end()
        result = handle.wait(DEADLINE_S)
        assert result.status == "FINISHED"
        assert result.metrics["totals"]["records_in"] == 5


class Countdown(ps.Source):
    """A split per number; each gives its number of rows, in pieces, with nothing in between."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes

    @property
    @override
    def schema(self) -> pa.Schema:
        return pa.schema([("split", pa.string()), ("n", pa.int64())])

    @override
    def discover(self, ctx: ps.SourceContext) -> list[ps.Split]:
        return [
            ps.Split(f"s{i}", payload=str(size).encode(), size=size)
            for i, size in enumerate(self._sizes)
        ]

    @override
    def start(self, ctx: ps.SourceContext) -> None:
        self._context = ctx

    @override
    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        return CountdownReader(split, self.schema, self._context.now_ms)


class CountdownReader(ps.Reader):
    def __init__(self, split: ps.Split, schema: pa.Schema, now_ms: Any) -> None:
        self._split, self._schema, self._now_ms = split, schema, now_ms
        self._left = int(split.payload)
        self._is_pausing = False

    @override
    def read(self, max_rows: int) -> Any:
        self._is_pausing = not self._is_pausing
        if self._is_pausing:
            return None
        if not self._left:
            return ps.END
        count = min(self._left, max_rows, 7)
        numbers = range(self._left - count, self._left)
        self._left -= count
        return pa.RecordBatch.from_pydict(
            {"split": [self._split.id] * count, "n": numbers}, schema=self._schema
        )

    @override
    def next_read_at_ms(self) -> int:
        return int(self._now_ms()) + 1

    @override
    def position(self) -> bytes:
        return str(self._left).encode()


def test_a_source_of_the_users_own(env: ps.Environment) -> None:
    sizes = [0, 1, 50, 13, 100]
    expected = [{"split": f"s{i}", "n": n} for i, size in enumerate(sizes) for n in range(size)]
    assert_same_rows(rows_of(env, env.source(Countdown(sizes))), expected)


class Unpaced(Countdown):
    """Has no ``start`` that could keep ``ctx.wake``, and readers that do not say when they have rows again."""

    start = ps.Source.start

    @override
    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        return UnpacedReader(split, self.schema, None)


class UnpacedReader(CountdownReader):
    next_read_at_ms = ps.Reader.next_read_at_ms  # type: ignore[assignment]


class NeverWaking(Unpaced):
    @override
    def start(self, ctx: ps.SourceContext) -> None:
        self.wake = ctx.wake  # and nobody calls it


@pytest.mark.parametrize("kind", [Unpaced, NeverWaking])
def test_a_reader_that_does_not_say_when_is_asked_again(
    env: ps.Environment, kind: type[Unpaced]
) -> None:
    assert_same_rows(rows_of(env, env.source(kind([1]))), [{"split": "s0", "n": 0}])


def test_new_files_of_a_watched_directory_are_read(new_env: NewEnvironment, tmp_path: Path) -> None:
    env = new_env()
    data = tmp_path / "in"
    write_table(to_table(BIDS[:100]), data / "a.parquet")
    with RowReceiver() as receiver:
        env.read_parquet(str(data), watch="50ms").select("n").sink(receiver.sink())
        handle = env.submit("watch")
        assert sorted(row["n"] for row in receiver.take(100)) == list(range(100))
        write_table(to_table(BIDS[100:150]), data / ".b.parquet")
        (data / ".b.parquet").rename(data / "b.parquet")
        write_table(to_table(BIDS[150:200]), data / "later" / ".c.parquet")
        (data / "later" / ".c.parquet").rename(data / "later" / "c.parquet")
        assert sorted(row["n"] for row in receiver.take(100)) == list(range(100, 200))
        assert handle.status() == "RUNNING"
        cancel(handle)
        assert receiver.is_empty


def test_a_watched_directory_may_be_empty_at_first(env: ps.Environment, tmp_path: Path) -> None:
    schema = pa.schema([("n", pa.int64())])
    with RowReceiver() as receiver:
        env.read_json(str(tmp_path), schema=schema, watch="50ms").sink(receiver.sink())
        handle = env.submit("watch")
        await_details(handle, lambda _, state: state == "RUNNING")
        (tmp_path / ".x").write_text(json.dumps({"n": 1}) + "\n")
        (tmp_path / ".x").rename(tmp_path / "x.json")
        assert receiver.take(1) == [{"n": 1}]
        cancel(handle)


def test_windows_fire_while_a_watched_directory_grows(env: ps.Environment, tmp_path: Path) -> None:
    schema = pa.schema([("ts", pa.int64())])

    def add(name: str, *times: int) -> None:
        hidden = tmp_path / f".{name}"
        hidden.write_text("".join(json.dumps({"ts": ts}) + "\n" for ts in times))
        hidden.rename(tmp_path / name)

    with RowReceiver() as receiver:
        (
            env.read_json(str(tmp_path), schema=schema, watch="50ms")
            .with_event_time("ts")
            .window(ps.tumbling("10s"))
            .aggregate(n=ps.count())
            .select("n", start=col("window_start").cast("int64"))
            .sink(receiver.sink())
        )
        handle = env.submit("watch")
        add("a", 1_000, 2_000, 9_999, 10_000)
        assert receiver.take(1) == [{"n": 3, "start": 0}]
        add("b", 12_000, 25_000)
        assert receiver.take(1) == [{"n": 2, "start": 10_000}]
        cancel(handle)


def test_schema_of_bids_is_what_the_tests_think() -> None:
    assert to_table(BIDS).schema == SCHEMA


def test_encoded_columns_come_as_plain_ones(env: ps.Environment) -> None:
    texts = pa.array(["a", "b", "a", None])
    table = pa.table(
        {
            "view": texts.cast(pa.string_view()),
            "runs": pc.run_end_encode(texts),
            "codes": texts.dictionary_encode(),
            "bytes": texts.cast(pa.binary()).cast(pa.binary_view()),
        }
    )
    made = env.generate(lambda start, count: table.slice(start, count).to_batches()[0], rows=4)
    counts = {
        name: stream.key_by(name)
        .window_all(ps.count_window(4))
        .aggregate(n=ps.count(name))
        .collect()
        for stream in (env.from_arrow(table), made)
        for name in table.column_names
    }
    keyed = env.from_arrow(table).key_by("view", "runs").aggregate(n=ps.count()).collect()
    run(env)
    assert {row.n for rows in counts.values() for row in rows} == {3}
    assert {(row.view, row.runs): row.n for row in keyed} == {
        ("a", "a"): 2,
        ("b", "b"): 1,
        (None, None): 1,
    }


class ListsNever(ps.Source):
    """Its ``discover`` waits until somebody opens a named pipe for writing."""

    schema = pa.schema([("a", pa.int64())])

    def __init__(self, pipe: str) -> None:
        self.pipe = pipe

    @override
    def discover(self, ctx: ps.SourceContext) -> list[ps.Split]:
        with Path(self.pipe).open("rb"):
            return []

    @override
    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        raise AssertionError(split)


def test_sources_that_cannot_be_listed_hold_up_no_other(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    """Two threads of a slot were for listing, for reading ahead and for exchanges that keep their rows."""
    pipes = [tmp_path / f"pipe-{number}" for number in range(3)]
    env = new_env(parallelism=1)
    for pipe in pipes:
        os.mkfifo(pipe)
        env.source(ListsNever(str(pipe))).discard()
    pq.write_table(to_table(BIDS), tmp_path / "bids.parquet")
    env.read_parquet(str(tmp_path / "bids.parquet")).key_by("auction").aggregate(
        n=ps.count()
    ).discard()
    handle = env.submit("held up")
    await_details(
        handle, lambda metrics, _state: metrics["totals"]["records_in"] == len(to_table(BIDS))
    )
    for pipe in pipes:
        with pipe.open("wb"):
            pass
    handle.wait(DEADLINE_S)
