"""Aim: a running aggregate's last value per key is that of all rows, and on the way it only ever grows.

Method: many small batches in several files and processes; plain Python over the same rows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typing_extensions import override

import penstock as ps
from penstock import col
from tests.integration.conftest import NewEnvironment
from tests.support.bids import cut, make_bids, to_table, write_table
from tests.support.expected_windows import Aggregates, whole
from tests.support.jobs import assert_same_rows, canonical, rows_of, run

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

BIDS = make_bids(2_000)
Row = dict[str, Any]


@pytest.fixture(scope="module")
def bids_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bids")
    for index, part in enumerate(cut(BIDS, 5)):
        write_table(to_table(part), directory / f"{index}.parquet")
    return directory


def last_per_key(rows: list[Row], keys: tuple[str, ...]) -> list[Row]:
    """The newest row of each key: rows of a key come from one subtask, in order."""
    last = {canonical([row[name] for name in keys]): row for row in rows}
    return list(last.values())


def present(rows: list[Row], column: str) -> list[Any]:
    return [row[column] for row in rows if row[column] is not None]


AGGREGATES: dict[str, ps.Aggregate] = {
    "rows": ps.count(),
    "prices": ps.count("price"),
    "total": ps.sum("price"),
    "low": ps.min("price"),
    "best": ps.max("price"),
    "average": ps.mean("price"),
    "doubled": ps.sum(col("n") * 2),
    "when": ps.max("at"),
}
ORACLE: Aggregates = {
    "rows": len,
    "prices": lambda rows: len(present(rows, "price")),
    "total": lambda rows: sum(present(rows, "price")) if present(rows, "price") else None,
    "low": lambda rows: min(present(rows, "price"), default=None),
    "best": lambda rows: max(present(rows, "price"), default=None),
    "average": lambda rows: sum(found) / len(found) if (found := present(rows, "price")) else None,
    "doubled": lambda rows: sum(2 * row["n"] for row in rows),
    "when": lambda rows: max(row["at"] for row in rows),
}


@pytest.mark.parametrize("pre_aggregation", ["true", "false"])
@pytest.mark.parametrize(
    "keys", [("auction",), ("bidder",), ("score",), ("open", "bidder", "score")], ids=str
)
def test_the_last_value_is_that_of_all_rows(
    new_env: NewEnvironment, bids_dir: Path, keys: tuple[str, ...], pre_aggregation: str
) -> None:
    env = new_env(
        parallelism=3,
        config={"execution.batch-rows": 100, "execution.pre-aggregation": pre_aggregation},
    )
    stream = env.read_parquet(str(bids_dir)).key_by(*keys).aggregate(**AGGREGATES)
    assert stream.schema.names == [*keys, *AGGREGATES]
    rows = rows_of(env, stream)
    expected = whole(BIDS, keys, ORACLE)
    assert_same_rows(last_per_key(rows, keys), expected)
    seen: dict[Any, int] = {}
    for row in rows:
        key = canonical([row[name] for name in keys])
        assert row["rows"] > seen.get(key, 0)
        seen[key] = row["rows"]


class Spread(ps.AggregateFunction):
    """Largest minus smallest."""

    @override
    def create_accumulator(self) -> list[float]:
        return [math.inf, -math.inf]

    @override
    def add(self, accumulator: list[float], value: Any) -> list[float]:
        if value is None:
            return accumulator
        return [min(accumulator[0], value), max(accumulator[1], value)]

    @override
    def merge(self, accumulator: list[float], other: list[float]) -> list[float]:
        return [min(accumulator[0], other[0]), max(accumulator[1], other[1])]

    @override
    def result(self, accumulator: list[float]) -> float:
        return accumulator[1] - accumulator[0]


class RowsOfBoth:
    """An aggregate of whole rows, of a class that derives from nothing."""

    def create_accumulator(self) -> int:
        return 0

    def add(self, accumulator: int, row: Any) -> int:
        return accumulator + int(row.open and row.price is not None)

    def merge(self, accumulator: int, other: int) -> int:
        return accumulator + other

    def result(self, accumulator: int) -> int:
        return accumulator


def test_aggregates_that_are_no_numbers(env: ps.Environment) -> None:
    aggregates = {
        "bidders": ps.count_distinct("bidder"),
        "scores": ps.count_distinct("score"),
        "first": ps.first("bidder"),
        "last": ps.last("price"),
        "names": ps.collect_list("bidder"),
        "largest": ps.max("bidder"),
        "spread": ps.aggregate(Spread(), "price"),
        "both": ps.aggregate(RowsOfBoth(), type="int64"),
    }
    oracle: Aggregates = {
        "bidders": lambda rows: len(set(present(rows, "bidder"))),
        "scores": lambda rows: len(set(map(canonical, present(rows, "score")))),
        "first": lambda rows: next(iter(present(rows, "bidder")), None),
        "last": lambda rows: next(reversed(present(rows, "price")), None),
        "names": lambda rows: present(rows, "bidder"),
        "largest": lambda rows: max(present(rows, "bidder"), key=str.encode, default=None),
        "spread": lambda rows: float(max(present(rows, "price")) - min(present(rows, "price"))),
        "both": lambda rows: sum(row["open"] and row["price"] is not None for row in rows),
    }
    stream = env.from_rows(BIDS).key_by("auction").aggregate(**aggregates)
    assert stream.schema.field("spread").type == pa.float64()
    found = last_per_key(rows_of(env, stream), ("auction",))
    assert_same_rows(found, whole(BIDS, ["auction"], oracle))


def test_running_aggregates_emit_once_per_key_and_batch(new_env: NewEnvironment) -> None:
    env = new_env(config={"execution.batch-rows": 10, "execution.pre-aggregation": "false"})
    rows = [{"k": n % 2, "n": n} for n in range(100)]
    stream = env.from_rows(rows).key_by("k").aggregate(rows=ps.count(), last=ps.max("n"))
    found = rows_of(env, stream)
    last = {row["k"]: row for row in found}
    assert last == {k: {"k": k, "rows": 50, "last": 98 + k} for k in (0, 1)}
    assert len(found) <= 20


def is_even(row: ps.Row) -> bool:
    return bool(row.auction % 2 == 0)


def test_a_running_aggregate_of_a_running_aggregate(env: ps.Environment, bids_dir: Path) -> None:
    per_auction = env.read_parquet(str(bids_dir)).key_by("auction").aggregate(n=ps.count())
    largest = per_auction.as_rows().key_by(is_even).aggregate(most=ps.max("n"))
    last = {row["key"]: row["most"] for row in rows_of(env, largest)}
    counts = whole(BIDS, ["auction"], {"n": len})
    assert last == {
        even: max(row["n"] for row in counts if (row["auction"] % 2 == 0) is even)
        for even in (True, False)
    }


def test_a_sum_that_does_not_fit_fails_with_its_key(env: ps.Environment) -> None:
    rows = [{"k": "small", "v": 1}, {"k": "huge", "v": 2**62}, {"k": "huge", "v": 2**62}]
    env.from_rows(rows).key_by("k").aggregate(total=ps.sum("v")).discard()
    with pytest.raises(ps.JobFailed, match="huge") as failed:
        run(env)
    assert "total" in str(failed.value)


def test_many_keys(env: ps.Environment) -> None:
    def numbers(start: int, count: int) -> pa.RecordBatch:
        n = range(start, start + count)
        return pa.RecordBatch.from_pydict(
            {"k": [f"key-{i * 7919 % 20_000}" for i in n], "v": list(n)}
        )

    rows = 60_000
    stream = env.generate(numbers, rows=rows).key_by("k").aggregate(n=ps.count(), s=ps.sum("v"))
    last = {row["k"]: (row["n"], row["s"]) for row in rows_of(env, stream)}
    expected: dict[str, tuple[int, int]] = {}
    for i in range(rows):
        n, s = expected.get(f"key-{i * 7919 % 20_000}", (0, 0))
        expected[f"key-{i * 7919 % 20_000}"] = n + 1, s + i
    assert last == expected
