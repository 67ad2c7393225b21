"""Aim: every transformation and every way of routing gives the rows that plain Python gives.

Method: several files, parallelism 2 and more, so that each job has exchanges; rows are compared as
multisets with a comprehension over the same rows.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

import pyarrow as pa
import pytest
from typing_extensions import override

import penstock as ps
from penstock import col
from tests.integration.conftest import NewEnvironment
from tests.support.bids import cut, make_bids, to_table, write_table
from tests.support.jobs import assert_same_rows, rows_of, run

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

BIDS = make_bids(2_000)


@pytest.fixture(scope="module")
def bids_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bids in five files."""
    directory = tmp_path_factory.mktemp("bids")
    for index, part in enumerate(cut(BIDS, 5)):
        write_table(to_table(part), directory / f"{index}.parquet")
    return directory


@pytest.fixture
def bids(env: ps.Environment, bids_dir: Path) -> ps.Stream:
    return env.read_parquet(str(bids_dir))


# ---------------------------------------------------------------- columns


def test_select_with_columns_drop_and_rename(env: ps.Environment, bids: ps.Stream) -> None:
    stream = (
        bids.select("n", col("price"), "open", double=col("n") * 2, constant="x")
        .with_columns(n=col("n") + 1, before=col("n"), nothing=ps.lit(None).cast("int32"))
        .drop("open")
        .rename(price="cost", n="m")
    )
    expected = [
        {
            "m": row["n"] + 1,
            "cost": row["price"],
            "double": row["n"] * 2,
            "constant": "x",
            "before": row["n"],
            "nothing": None,
        }
        for row in BIDS
    ]
    assert stream.schema.names == list(expected[0])
    assert_same_rows(rows_of(env, stream), expected)


def test_filter_by_an_expression_drops_what_is_null(env: ps.Environment, bids: ps.Stream) -> None:
    stream = bids.filter((col("price") > 500) | (col("bidder") == "ada")).select("n")
    expected = [
        {"n": row["n"]}
        for row in BIDS
        if (row["price"] is not None and row["price"] > 500) or row["bidder"] == "ada"
    ]
    assert_same_rows(rows_of(env, stream), expected)


def test_filter_by_a_function(env: ps.Environment, bids: ps.Stream) -> None:
    words = {"ada", "bob"}
    stream = bids.filter(lambda row: row.bidder in words and row["n"] % 2 == 0).select("n")
    expected = [{"n": r["n"]} for r in BIDS if r["bidder"] in words and r["n"] % 2 == 0]
    assert_same_rows(rows_of(env, stream), expected)


# ---------------------------------------------------------------- Python functions


@dataclasses.dataclass
class Labelled:
    n: int
    label: str | None
    parts: list[float]


class Priced(TypedDict):
    n: int
    euro: float | None


def labelled(row: ps.Row) -> Labelled:
    return Labelled(row.n, None if row.bidder is None else row.bidder.upper(), [row.n / 2, 0.5])


def priced(row: ps.Row) -> Priced:
    return {"n": row.n, "euro": None if row.price is None else row.price / 4}


def test_map_to_a_dataclass(env: ps.Environment, bids: ps.Stream) -> None:
    expected = [
        {
            "n": row["n"],
            "label": row["bidder"] and row["bidder"].upper(),
            "parts": [row["n"] / 2, 0.5],
        }
        for row in BIDS
    ]
    assert_same_rows(rows_of(env, bids.map(labelled)), expected)


def test_map_to_a_typed_dict(env: ps.Environment, bids: ps.Stream) -> None:
    expected = [{"n": r["n"], "euro": r["price"] and r["price"] / 4} for r in BIDS]
    assert_same_rows(rows_of(env, bids.map(priced)), expected)


@pytest.mark.parametrize(
    "schema", [None, {"n": "int64", "word": "string"}, {"n": int, "word": str | None}]
)
def test_map_with_and_without_a_schema(env: ps.Environment, bids: ps.Stream, schema: Any) -> None:
    stream = bids.map(lambda row: {"n": row.n, "word": row.bidder}, schema=schema)
    assert_same_rows(rows_of(env, stream), [{"n": r["n"], "word": r["bidder"]} for r in BIDS])


def test_map_may_return_a_row_or_a_tuple(env: ps.Environment, bids: ps.Stream) -> None:
    whole = bids.select("n", "open").map(lambda row: row, schema={"n": "int64", "open": "bool"})
    stream = whole.map(lambda row: (row.n, not row.open), schema={"n": "int64", "closed": "bool"})
    assert_same_rows(rows_of(env, stream), [{"n": r["n"], "closed": not r["open"]} for r in BIDS])


def letters(row: ps.Row) -> Iterator[dict[str, Any]]:
    for place, letter in enumerate(row.bidder or ""):
        yield {"n": row.n, "place": place, "letter": letter}


def test_flat_map_gives_any_number_of_rows(env: ps.Environment, bids: ps.Stream) -> None:
    stream = bids.flat_map(letters)
    expected = [
        {"n": row["n"], "place": place, "letter": letter}
        for row in BIDS
        for place, letter in enumerate(row["bidder"] or "")
    ]
    assert_same_rows(rows_of(env, stream), expected)


def test_a_flat_map_far_larger_than_a_batch(env: ps.Environment) -> None:
    stream = (
        env.from_rows([{"n": 50_000}, {"n": 3}, {"n": 0}])
        .flat_map(lambda row: ({"i": i} for i in range(row.n)), schema={"i": "int64"})
        .rebalance()
    )
    found = Counter(row["i"] for row in rows_of(env, stream))
    assert found == Counter(range(50_000)) + Counter(range(3))


def test_batches_of_arrow_and_of_pandas(env: ps.Environment, bids: ps.Stream) -> None:
    pytest.importorskip("pandas")

    def with_pandas(batch: pa.RecordBatch) -> pa.RecordBatch:
        frame = batch.to_pandas()
        frame["half"] = frame["n"] / 2
        return pa.RecordBatch.from_pandas(frame[frame["n"] % 3 == 0], preserve_index=False)

    stream = (
        bids.select("n")
        .map_batches(with_pandas)
        .map_batches(lambda batch: batch.append_column("twice", batch["n"]))
    )
    assert stream.schema.names == ["n", "half", "twice"]
    expected = [{"n": n, "half": n / 2, "twice": n} for n in range(0, 2_000, 3)]
    assert_same_rows(rows_of(env, stream), expected)


class Numbered(ps.MapFunction):
    """Opens and closes once per subtask."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @override
    def open(self, ctx: ps.FunctionContext) -> None:
        self._name = f"{ctx.operator_name}-{ctx.subtask_index}-of-{ctx.parallelism}"
        (self._directory / f"{self._name}.opened").touch(exist_ok=False)

    @override
    def __call__(self, row: Any) -> dict[str, Any]:
        return {"n": row.n, "where": self._name}

    @override
    def close(self) -> None:
        (self._directory / f"{self._name}.opened").rename(self._directory / f"{self._name}.closed")


class Repeat(ps.FlatMapFunction):
    @override
    def __call__(self, row: Any) -> Sequence[Any]:
        return [row] * (row.n % 3)


class Even(ps.FilterFunction):
    @override
    def __call__(self, row: Any) -> bool:
        return bool(row.n % 2 == 0)


def test_function_objects_live_once_per_subtask(
    env: ps.Environment, bids: ps.Stream, tmp_path: Path
) -> None:
    stream = (
        bids.filter(Even())
        .flat_map(Repeat(), schema=bids.schema)
        .rebalance()
        .map(Numbered(tmp_path), schema={"n": "int64", "where": "string"})
        .name("numbered")
        .parallelism(3)
    )
    rows = rows_of(env, stream)
    expected = [n for n in range(0, 2_000, 2) for _ in range(n % 3)]
    assert sorted(row["n"] for row in rows) == expected
    names = {f"numbered-{i}-of-3" for i in range(3)}
    assert {row["where"] for row in rows} == names
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.closed" for name in names}


# ---------------------------------------------------------------- routing


def with_subtask(stream: ps.Stream, parallelism: int) -> ps.Stream:
    """Adds which process a row came to: one per subtask of a chain."""
    return stream.map_batches(_process_column, schema={"n": "int64", "pid": "int64"}).parallelism(
        parallelism
    )


def _process_column(batch: pa.RecordBatch) -> pa.RecordBatch:
    pids = pa.array([os.getpid()] * batch.num_rows, pa.int64())
    return pa.RecordBatch.from_arrays([batch["n"], pids], ["n", "pid"])


ROUTES: dict[str, Callable[[ps.Stream], ps.Stream]] = {
    "rebalance": ps.Stream.rebalance,
    "rescale": ps.Stream.rescale,
    "any": lambda stream: stream,
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (2, 3), (4, 2)])
def test_parallelism_changes_lose_nothing(
    new_env: NewEnvironment, bids_dir: Path, route: str, before: int, after: int
) -> None:
    env = new_env(config={"execution.batch-rows": 64})
    source = env.read_parquet(str(bids_dir)).parallelism(before).select("n")
    rows = rows_of(env, with_subtask(ROUTES[route](source), after))
    assert sorted(row["n"] for row in rows) == list(range(2_000))
    assert len({row["pid"] for row in rows}) == after


def test_rebalance_deals_evenly(new_env: NewEnvironment) -> None:
    env = new_env(config={"execution.batch-rows": 10})
    source = env.from_rows([{"n": n} for n in range(4_000)])
    rows = rows_of(env, with_subtask(source.rebalance(), 4))
    shares = Counter(row["pid"] for row in rows)
    assert len(shares) == 4
    assert max(shares.values()) - min(shares.values()) <= 20


@pytest.mark.parametrize("parallelism", [1, 3])
def test_broadcast_reaches_every_subtask(
    env: ps.Environment, bids: ps.Stream, parallelism: int
) -> None:
    rows = rows_of(env, with_subtask(bids.select("n").broadcast(), parallelism))
    by_process: dict[int, list[int]] = {}
    for row in rows:
        by_process.setdefault(row["pid"], []).append(row["n"])
    assert len(by_process) == parallelism
    assert all(sorted(found) == list(range(2_000)) for found in by_process.values())


def test_forward_keeps_rows_in_their_subtask(env: ps.Environment, bids: ps.Stream) -> None:
    first = bids.map_batches(_process_column, schema={"n": "int64", "pid": "int64"})
    second = first.forward().map(
        lambda row: {"n": row.n, "same": row.pid == os.getpid()},
        schema={"n": "int64", "same": "bool"},
    )
    assert_same_rows(rows_of(env, second), [{"n": n, "same": True} for n in range(2_000)])


def test_forward_between_different_parallelisms_is_refused(
    env: ps.Environment, bids: ps.Stream
) -> None:
    bids.forward().filter(col("n") > 0).parallelism(3).discard()
    with pytest.raises(ps.JobRejected, match="forward"):
        env.submit("forward")


def test_union_takes_all_rows_of_streams_and_of_one_twice(
    env: ps.Environment, bids: ps.Stream
) -> None:
    other = env.from_rows([{"price": 1, "n": -1}, {"price": None, "n": -2}])
    low, high = bids.filter(col("n") < 1_000), bids.filter(col("n") >= 500)
    stream = low.select("n", "price").union(high.select("n", "price"), other)
    expected = [{"n": r["n"], "price": r["price"]} for r in BIDS if r["n"] < 1_000]
    expected += [{"n": r["n"], "price": r["price"]} for r in BIDS if r["n"] >= 500]
    expected += [{"n": -1, "price": 1}, {"n": -2, "price": None}]
    assert_same_rows(rows_of(env, stream), expected)


def test_a_stream_feeds_several_operators_and_sinks(env: ps.Environment, bids: ps.Stream) -> None:
    even = bids.filter(col("n") % 2 == 0)
    small = even.filter(col("n") < 100).select("n").collect()
    totals = even.key_by("auction").aggregate(n=ps.count()).collect()
    everything = bids.select("n").rebalance().collect()
    bids.discard()
    run(env)
    assert sorted(row.n for row in small) == list(range(0, 100, 2))
    assert sorted(row.n for row in everything) == list(range(2_000))
    last = {row.auction: row.n for row in totals}
    assert last == Counter(row["auction"] for row in BIDS[::2])


def test_slot_groups_run_in_different_processes(env: ps.Environment, bids: ps.Stream) -> None:
    schema = {"n": "int64", "pid": "int64"}
    first = bids.map_batches(_process_column, schema=schema)
    both = first.with_columns(before=col("pid")).map_batches(
        _second_process, schema={"n": "int64", "before": "int64", "pid": "int64"}
    )
    rows = rows_of(env, both.slot_group("other"))
    assert sorted(row["n"] for row in rows) == list(range(2_000))
    assert {row["before"] for row in rows}.isdisjoint({row["pid"] for row in rows})


def _second_process(batch: pa.RecordBatch) -> pa.RecordBatch:
    pids = pa.array([os.getpid()] * batch.num_rows, pa.int64())
    return pa.RecordBatch.from_arrays([batch["n"], batch["before"], pids], ["n", "before", "pid"])


# ---------------------------------------------------------------- keys


KEYS: dict[str, tuple[str, ...]] = {
    "integers": ("auction",),
    "strings with nulls": ("bidder",),
    "floats with null and NaN": ("score",),
    "booleans": ("open",),
    "times": ("at",),
    "several": ("bidder", "open", "score"),
}


@pytest.mark.parametrize("name", KEYS)
def test_all_rows_of_a_key_come_to_one_subtask(
    env: ps.Environment, bids: ps.Stream, name: str
) -> None:
    keyed = bids.key_by(*KEYS[name]).map_batches(
        _add_process, schema=bids.schema.append(pa.field("pid", pa.int64()))
    )
    rows = rows_of(env, keyed.parallelism(3))
    processes: dict[Any, set[int]] = {}
    for row in rows:
        key = tuple(_same_key(row[column]) for column in KEYS[name])
        processes.setdefault(key, set()).add(row["pid"])
    assert all(len(found) == 1 for found in processes.values())
    assert_same_rows([{k: v for k, v in row.items() if k != "pid"} for row in rows], BIDS)


def _add_process(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.append_column("pid", pa.array([os.getpid()] * batch.num_rows, pa.int64()))


def _same_key(value: Any) -> Any:
    if isinstance(value, float):
        return "NaN" if value != value else value + 0.0
    return value


def test_key_by_a_function_adds_the_key(env: ps.Environment, bids: ps.Stream) -> None:
    totals = bids.key_by(lambda row: (row.bidder or "?")[:1]).aggregate(n=ps.count())
    assert totals.schema.names == ["key", "n"]
    last = {row["key"]: row["n"] for row in rows_of(env, totals)}
    assert last == Counter((row["bidder"] or "?")[:1] for row in BIDS)


def test_flat_map_may_return_none_for_no_row(env: ps.Environment, bids: ps.Stream) -> None:
    def large(row: Any) -> Any:
        return [{"n": row.n}] if row.n % 10 == 0 else None

    found = rows_of(env, bids.flat_map(large))
    assert sorted(row["n"] for row in found) == [bid["n"] for bid in BIDS if bid["n"] % 10 == 0]
