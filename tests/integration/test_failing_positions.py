"""Aim: a row that user code fails at is shown whole, with the file and the place in it that it came from.

Method: jobs over files of every format, and over other sources, that fail at a known row, in every kind of
operator of the source's chain; what ``JobFailed`` says of it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as parquet
import pytest
from typing_extensions import override

import penstock as ps
from penstock import col

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

BAD = 7_777
ROWS = 10_000
TABLE = pa.table({"n": range(ROWS), "word": [f"w{n}" for n in range(ROWS)]})


def failure_of(env: ps.Environment) -> ps.JobFailed:
    with pytest.raises(ps.JobFailed) as raised:
        env.execute("positions")
    assert raised.value.position in str(raised.value)
    return raised.value


def fails_at_bad(row: Any) -> Any:
    if row.n == BAD:
        raise ValueError("bad")
    return row


def csv(path: Path) -> str:
    path.write_text("n,word\n" + "".join(f"{n},w{n}\n" for n in range(ROWS)))
    return f"line {BAD + 2}"


def csv_with_quotes(path: Path) -> str:
    path.write_text("n,word\n" + "".join(f'{n},"w\n\n{n}"\n' for n in range(ROWS)))
    return f"line {3 * BAD + 2}"


def csv_with_blank_and_bad_lines(path: Path) -> str:
    lines = [f"{n},w{n}\n" + ("\nx,bad\n" if n % 100 == 0 else "") for n in range(ROWS)]
    path.write_text("n,word\n" + "".join(lines))
    return f"line {BAD + 2 + 2 * 78}"


def csv_gz(path: Path) -> str:
    plain = path.with_name("plain")
    place = csv_with_quotes(plain)
    path.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return place


def json_lines(path: Path) -> str:
    lines = [json.dumps({"n": n, "word": "w"}) + "\n" + "\n" * (n == 5) for n in range(ROWS)]
    path.write_text("".join(lines))
    return f"line {BAD + 2}"


def json_array(path: Path) -> str:
    path.write_text(json.dumps([{"n": n, "word": "w"} for n in range(ROWS)], indent=1))
    return f"line {2 + 4 * BAD}"


def parquet_file(path: Path) -> str:
    parquet.write_table(TABLE, path, row_group_size=1_000)
    return f"row {BAD + 1}"


def arrow_file(path: Path) -> str:
    feather.write_feather(TABLE, path, compression="uncompressed", chunksize=999)
    return f"row {BAD + 1}"


SCHEMA = pa.schema([("n", pa.int64()), ("word", pa.string())])
FILES: dict[str, tuple[str, Callable[[Path], str]]] = {
    "csv": ("a.csv", csv),
    "csv with newlines in quotes": ("a.csv", csv_with_quotes),
    "csv with blank and bad lines": ("a.csv", csv_with_blank_and_bad_lines),
    "csv.gz": ("a.csv.gz", csv_gz),
    "json lines": ("a.json", json_lines),
    "json array": ("a.json", json_array),
    "parquet": ("a.parquet", parquet_file),
    "arrow": ("a.arrow", arrow_file),
}


def read(env: ps.Environment, path: Path) -> ps.Stream:
    if ".csv" in path.name:
        return env.read_csv(str(path), schema=SCHEMA).on_error("skip")
    if path.suffix == ".json":
        return env.read_json(str(path), schema=SCHEMA).on_error("skip")
    return env.read_parquet(str(path)) if path.suffix == ".parquet" else env.read_arrow(str(path))


@pytest.mark.parametrize("form", FILES)
def test_a_row_that_fails_is_shown_with_its_file_and_place(
    env: ps.Environment, tmp_path: Path, form: str
) -> None:
    name, write = FILES[form]
    path = tmp_path / name
    place = write(path)
    read(env, path).map(fails_at_bad, schema=SCHEMA).discard()
    failed = failure_of(env)
    assert failed.position == f"{path}, {place}"
    assert f"n={BAD}" in failed.row


class FailingSink(ps.Sink):
    @override
    def write(self, batch: pa.RecordBatch) -> None:
        if BAD in batch.column("n").to_pylist():
            raise ValueError("bad")

    @override
    def flush(self) -> None:
        pass


def fail_in_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    if BAD in batch.column("n").to_pylist():
        raise ValueError("bad")
    return batch


def many(row: Any) -> Iterator[Any]:
    fails_at_bad(row)
    yield row


class Function(ps.ProcessFunction):
    @override
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        out.emit(fails_at_bad(row))


EXACT: dict[str, Callable[[ps.Stream], Any]] = {
    "map": lambda rows: rows.map(fails_at_bad, schema=SCHEMA).discard(),
    "flat_map": lambda rows: rows.flat_map(many, schema=SCHEMA).discard(),
    "filter": lambda rows: rows.filter(lambda row: fails_at_bad(row) is row).discard(),
    "process": lambda rows: rows.process(Function(), schema=SCHEMA).discard(),
    "expression": lambda rows: rows.with_columns(x=10 // (col("n") - BAD)).discard(),
    "filter by expression": lambda rows: rows.filter(10 // (col("n") - BAD) > 0).discard(),
    "behind a projection": lambda rows: (
        rows.with_columns(n=col("n") + 0).map(fails_at_bad, schema=SCHEMA).discard()
    ),
    "a result that does not fit": lambda rows: rows.map(
        lambda row: {"n": "x" if row.n == BAD else 1}, schema={"n": pa.int64()}
    ).discard(),
}
RANGE: dict[str, Callable[[ps.Stream], Any]] = {
    "map_batches": lambda rows: rows.map_batches(fail_in_batch, schema=SCHEMA).discard(),
    "sink": lambda rows: rows.sink(FailingSink()),
    "behind a filter": lambda rows: (
        rows.filter(col("n") % 7 == BAD % 7).map(fails_at_bad, schema=SCHEMA).discard()
    ),
    "behind a flat_map": lambda rows: (
        rows.flat_map(lambda row: [row, row], schema=SCHEMA)
        .map(fails_at_bad, schema=SCHEMA)
        .discard()
    ),
}


@pytest.mark.parametrize("kind", EXACT)
def test_functions_and_expressions_that_fail_name_the_row(
    env: ps.Environment, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "a.parquet"
    place = parquet_file(path)
    EXACT[kind](env.read_parquet(str(path)))
    assert failure_of(env).position == f"{path}, {place}"


@pytest.mark.parametrize("kind", RANGE)
def test_where_the_row_is_not_known_its_batch_is_named(
    env: ps.Environment, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "a.parquet"
    parquet_file(path)
    RANGE[kind](env.read_parquet(str(path)))
    where, _, rows = failure_of(env).position.rpartition(", rows ")
    first, last = map(int, rows.split(" to "))
    assert where == str(path)
    assert first <= BAD + 1 <= last
    assert last - first < ROWS - 1


def test_nothing_is_claimed_behind_an_exchange(env: ps.Environment, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet_file(path)
    env.read_parquet(str(path)).rebalance().map(fails_at_bad, schema=SCHEMA).discard()
    failed = failure_of(env)
    assert (failed.position, f"n={BAD}" in failed.row) == ("", True)


class FailingWindow(ps.WindowFunction):
    @override
    def process(self, rows: Any, ctx: Any, out: Any) -> None:
        raise ValueError("bad")


def test_nothing_is_claimed_of_what_a_watermark_fires(env: ps.Environment, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet_file(path)
    rows = env.read_parquet(str(path)).with_event_time("n").parallelism(1)
    rows.window(ps.tumbling("1s")).process(FailingWindow(), schema=SCHEMA).discard()
    assert failure_of(env).position == ""


def test_rows_of_other_sources_are_named_by_split(env: ps.Environment) -> None:
    rows = env.from_arrow(pa.table({"n": range(ROWS)}))
    rows.map(fails_at_bad, schema={"n": pa.int64()}).discard()
    failed = failure_of(env)
    assert failed.position.startswith("split 'rows-")
    assert failed.position.endswith(f"', row {BAD + 1}")


class CountingReader(ps.Reader):
    def __init__(self) -> None:
        self._done = False

    @override
    def read(self, max_rows: int) -> Any:
        if self._done:
            return ps.END
        self._done = True
        return pa.record_batch({"n": [1, BAD, 3]})

    @override
    def position(self) -> bytes:
        return b""


class NumberingReader(CountingReader):
    row_noun = "offset"

    @override
    def row_number(self, index: int) -> int:
        return 40 + index


class OwnSource(ps.Source):
    def __init__(self, reader: type[ps.Reader]) -> None:
        self._reader = reader

    @property
    @override
    def schema(self) -> pa.Schema:
        return pa.schema([("n", pa.int64())])

    @override
    def discover(self, ctx: Any) -> list[ps.Split]:
        return [ps.Split("topic-3")]

    @override
    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        return self._reader()


def test_readers_say_their_numbers_themselves(env: ps.Environment) -> None:
    env.source(OwnSource(NumberingReader)).map(fails_at_bad, schema={"n": pa.int64()}).discard()
    assert failure_of(env).position == "split 'topic-3', offset 41"


def test_no_number_is_invented_for_a_reader_that_knows_none(env: ps.Environment) -> None:
    env.source(OwnSource(CountingReader)).map(fails_at_bad, schema={"n": pa.int64()}).discard()
    assert failure_of(env).position == "split 'topic-3'"


# ---------------------------------------------------------------- the row itself


def test_columns_that_are_not_read_are_named(env: ps.Environment, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet_file(path)

    def fail(row: Any) -> Any:
        raise ValueError(row.n)

    env.read_parquet(str(path)).map(fail, schema={"x": pa.int64()}).discard()
    assert failure_of(env).row == "Row(n=0) (columns that the job does not read: word)"


def test_a_row_of_which_nothing_is_read_is_no_bare_row(env: ps.Environment, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet_file(path)

    def fail(row: Any) -> Any:
        raise ValueError("always")

    env.read_parquet(str(path)).map(fail, schema={"x": pa.int64()}).discard()
    row = failure_of(env).row
    assert "n" in row
    assert "word" in row


@pytest.mark.parametrize("text", ["x", "é", "日", "😀"])
def test_a_row_is_cut_at_a_thousand_bytes(env: ps.Environment, text: str) -> None:
    def fail(row: Any) -> Any:
        raise ValueError("always")

    env.from_rows([{"text": text * 2_000}]).map(fail, schema={"x": pa.int64()}).discard()
    row = failure_of(env).row
    assert 990 < len(row.encode()) <= 1_000
    assert row.endswith("...")
    assert set(row.removeprefix("Row(text='").removesuffix("...")) == {text}


def test_a_malformed_line_is_given_by_its_place(env: ps.Environment, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("n,word\n1,a\nx,b\n")
    env.read_csv(str(path), schema=SCHEMA).discard()
    assert failure_of(env).position == f"{path}:3"
