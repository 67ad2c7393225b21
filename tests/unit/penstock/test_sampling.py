"""Aim: functions without a schema find one in the first rows that give a result.

Method: streams over rows that are here, files and generators, some rows of which are bad.
"""

from __future__ import annotations

import json
import string
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock import col
from penstock.errors import JobRejected
from penstock.functions.user_code import trial_copy
from penstock.streams.stream import Stream

N = 300


@pytest.fixture
def env() -> ps.Environment:
    return ps.Environment(parallelism=2)


@pytest.fixture
def numbers(env: ps.Environment) -> Stream:
    return env.from_rows([{"n": i, "s": "x" if i == 7 else str(i)} for i in range(N)])


def bad_for_seven(row: Any) -> Any:
    if row.n == 7:
        raise ValueError("seven")
    return {"m": row.n}


def all_bad(row: Any) -> Any:
    raise ValueError(f"bad {row.n}")


BAD_ROWS: dict[str, Callable[[Stream], Stream]] = {
    "map": lambda s: s.map(bad_for_seven),
    "map returns None": lambda s: s.map(lambda r: None if r.n == 0 else {"m": r.n}),
    "flat_map": lambda s: s.flat_map(lambda r: [bad_for_seven(r)]),
    "key_by": lambda s: s.key_by(lambda r: bad_for_seven(r)["m"]).select(m=col("key")),
    "behind a map": lambda s: s.map(bad_for_seven).on_error("skip").map(lambda r: {"m": r.m}),
    "behind a flat_map": lambda s: s.flat_map(
        lambda r: [{"m": r.n, "z": bad_for_seven(r)["m"]}], schema={"m": int, "z": int}
    ).map(lambda r: {"m": r.m}),
    "behind an expression": lambda s: (
        s.with_columns(m=col("s").cast("int64")).on_error("skip").map(lambda r: {"m": r.m})
    ),
    "behind a filter": lambda s: s.filter(col("s").cast("int64") >= 0).map(lambda r: {"m": r.n}),
    "behind a filter function": lambda s: s.filter(lambda r: 1 / (r.n - 7)).map(
        lambda r: {"m": r.n}
    ),
    "behind a key function": lambda s: s.key_by(lambda r: bad_for_seven(r)["m"]).map(
        lambda r: {"m": r.key}
    ),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_rows_that_raise_are_left_to_the_job(numbers: Stream, case: str) -> None:
    stream = BAD_ROWS[case](numbers)
    assert stream.schema.field("m").type in (pa.int64(), pa.string())


def test_functions_that_raise_for_every_row_are_refused(numbers: Stream) -> None:
    for call in (numbers.map, numbers.flat_map, numbers.key_by):
        with pytest.raises(
            JobRejected, match=r"ValueError: bad 0 for the row .*n=0.*give|annotate"
        ):
            call(all_bad)


@pytest.mark.parametrize(
    "drop",
    [
        lambda s: s.filter(col("n") >= 200),
        lambda s: s.filter(lambda r: r.n >= 200),
        lambda s: s.flat_map(lambda r: [{"n": r.n}] if r.n >= 200 else [], schema={"n": int}),
    ],
)
def test_more_rows_are_read_where_the_first_do_not_arrive(
    numbers: Stream, drop: Callable[[Stream], Stream]
) -> None:
    kept = drop(numbers)
    assert kept.map(lambda r: {"m": r.n}).schema.names == ["m"]
    assert kept.map_batches(lambda b: b.select(["n"])).schema.names == ["n"]
    assert kept.key_by(lambda r: r.n % 3).schema.names[-1] == "key"


def test_it_is_said_when_no_row_arrives(env: ps.Environment, numbers: Stream) -> None:
    for call in (
        lambda s: s.map(lambda r: {"m": r.n}),
        lambda s: s.map_batches(lambda b: b),
        lambda s: s.key_by(lambda r: r.n),
    ):
        with pytest.raises(JobRejected, match=f"none of the first {N} rows"):
            call(numbers.filter(col("n") < 0))
        endless = env.generate(
            lambda start, n: pa.record_batch({"n": pa.array(range(start, start + n))})
        )
        with pytest.raises(JobRejected, match="none of the first 10000 rows"):
            call(endless.filter(col("n") < 0))


def test_nexmark_is_sampled(env: ps.Environment) -> None:
    for kind in ("bid", "auction", "person"):
        events = env.nexmark(1000, kind=kind)
        assert events.map(lambda r: r).schema == events.schema
    bids = env.nexmark(kind="bid", columns=["price", "ts"]).map(lambda r: {"p": r.price / 2})
    assert bids.schema.field("p").type == pa.float64()
    with pytest.raises(JobRejected, match="no rows"):
        env.nexmark(0).map(lambda r: {"p": r.price})


def write_csv(path: Path) -> None:
    path.write_text("n,s\n" + "".join("oops\n" if i == 3 else f'{i},"a\nb"\n' for i in range(200)))


def write_json(path: Path) -> None:
    path.write_text("".join('{"n":\n' if i == 3 else f'{{"n": {i}}}\n' for i in range(200)))


def write_array(path: Path) -> None:
    path.write_text(json.dumps([{"n": "oops" if i == 3 else i} for i in range(200)]))


@pytest.mark.parametrize(
    ("form", "write"), [("csv", write_csv), ("json", write_json), ("json", write_array)]
)
def test_malformed_rows_of_files_are_left_out(
    env: ps.Environment, tmp_path: Path, form: str, write: Callable[[Path], None]
) -> None:
    write(tmp_path / "a")
    read = getattr(env, f"read_{form}")(tmp_path, schema={"n": "int64"}).on_error("skip")
    assert (
        read.filter(col("n") > 150).map(lambda r: {"m": r.n}).schema.field("m").type == pa.int64()
    )


def test_several_files_are_sampled(env: ps.Environment, tmp_path: Path) -> None:
    for i in range(5):
        pq.write_table(pa.table({"n": [i] * 50}), tmp_path / f"{i}.parquet", row_group_size=7)
    read = env.read_parquet(tmp_path)
    assert read.filter(col("n") == 4).map(lambda r: {"m": r.n}).schema.names == ["m"]


class Opened(ps.MapFunction):
    def open(self, ctx: Any) -> None:
        self.factor = 2

    def __call__(self, row: Any) -> Any:
        return {"m": row.n * self.factor}


def test_functions_that_must_be_opened_are_not_tried(numbers: Stream) -> None:
    with pytest.raises(JobRejected, match="give schema="):
        numbers.map(Opened(), schema={"m": int}).map(lambda r: {"k": r.m})


SEEN: set[int] = set()


def is_new(row: Any) -> bool:
    before = len(SEEN)
    SEEN.add(row.n)
    return len(SEEN) > before


class Numbered:
    given: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.last = 0

    def __call__(self, row: Any) -> Any:
        self.last += 1
        self.given.append(row.n)
        return {"m": self.last}


def test_what_functions_keep_is_as_it_was_when_they_are_tried(numbers: Stream) -> None:
    batches: list[int] = []
    numbered, call, given = Numbered(), Numbered.__call__, Numbered.given

    def counted(batch: pa.RecordBatch) -> pa.RecordBatch:
        batches.append(batch.num_rows)
        return batch

    kept = numbers.filter(is_new).map_batches(counted).map(numbered)
    assert kept.schema == pa.schema({"m": pa.int64()})
    assert kept.key_by(lambda row: batches.append(0) or row.m).keys == ("key",)
    assert (SEEN, batches, numbered.last, given) == (set(), [], 0, [])
    assert (Numbered.__call__, Numbered.given) == (call, given)
    assert Numbered.given is given


def test_a_function_that_cannot_be_pickled_is_tried_as_it_is(numbers: Stream) -> None:
    lock = threading.Lock()

    def locked(row: Any) -> Any:
        with lock:
            return {"m": row.n}

    assert numbers.map(locked).schema.names == ["m"]


class Text(string.Template):
    """Its base hears of each class, as that of a registry of plugins does."""


def test_who_hears_of_classes_does_not_hear_of_them_again() -> None:
    assert trial_copy(lambda row: Text)(None) is Text
