"""Aim: files of every format give exactly their rows, whatever the way they are named and cut.

Method: rows are written with pyarrow and json, read by a job on a real cluster, and compared as
multisets; DuckDB says what CSV means.
"""

from __future__ import annotations

import datetime as dt
import gzip
import json
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet
import pytest

import penstock as ps
from penstock import col
from tests.support.bids import SCHEMA, cut, make_bids, to_table, write_table
from tests.support.jobs import assert_same_rows, rows_of, run

pytestmark = [pytest.mark.integration, pytest.mark.sampled(2)]

BIDS = make_bids(2_000)
PLAIN = SCHEMA.remove(SCHEMA.get_field_index("at"))
"""Without the timestamp, which JSON has no type for."""

READERS = {
    ".parquet": ps.Environment.read_parquet,
    ".arrow": ps.Environment.read_arrow,
    ".csv": ps.Environment.read_csv,
    ".jsonl": ps.Environment.read_json,
    ".json": ps.Environment.read_json,
}
FORMATS = list(READERS)


def plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "at"} for row in rows]


def write_files(directory: Path, suffix: str, rows: list[dict[str, Any]], files: int = 5) -> None:
    """Several files in nested directories, and hidden ones that nobody may read."""
    for index, part in enumerate(cut(rows, files)):
        path = directory / f"d{index % 2}" / f"part-{files - index}{suffix}"
        write_table(to_table(plain(part), PLAIN), path, row_group_size=100)
    (directory / "_SUCCESS").write_text("not data")
    (directory / "d0" / f".part-9{suffix}.inprogress").write_text("not data")
    (directory / "_tmp").mkdir()
    (directory / "_tmp" / f"part-0{suffix}").write_text("not data")


def read(env: ps.Environment, suffix: str, path: Path | str, **options: Any) -> ps.Stream:
    return READERS[suffix](env, str(path), **options)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_directory_gives_the_rows_of_all_its_files(
    env: ps.Environment, tmp_path: Path, suffix: str
) -> None:
    rows = [{**row, "score": 1.5 if row["score"] is None else row["score"]} for row in BIDS]
    if suffix in (".csv", ".json", ".jsonl"):  # text has no NaN that every reader agrees on
        rows = [{**row, "score": row["n"] / 4} for row in rows]
    if suffix == ".csv":  # and no difference between null and empty text
        rows = [{**row, "bidder": row["bidder"] or "x"} for row in rows]
    write_files(tmp_path, suffix, rows)
    stream = read(env, suffix, tmp_path)
    assert stream.schema.names == PLAIN.names
    assert_same_rows(rows_of(env, stream), plain(rows))


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_glob_names_some_of_the_files(env: ps.Environment, tmp_path: Path, suffix: str) -> None:
    for name, part in zip(["a-1", "a-2", "b-1"], cut(BIDS[:300], 3), strict=True):
        write_table(to_table(part).select(["n", "auction"]), tmp_path / f"{name}{suffix}")
    stream = read(env, suffix, tmp_path / f"a-*{suffix}")
    expected = [{"n": row["n"], "auction": row["auction"]} for row in BIDS[:200]]
    assert_same_rows(rows_of(env, stream), expected)


@pytest.mark.parametrize("suffix", FORMATS)
def test_columns_are_chosen_and_ordered(env: ps.Environment, tmp_path: Path, suffix: str) -> None:
    write_files(tmp_path, suffix, BIDS[:500])
    stream = read(env, suffix, tmp_path, columns=["price", "n"])
    expected = [{"price": row["price"], "n": row["n"]} for row in BIDS[:500]]
    assert_same_rows(rows_of(env, stream), expected)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_schema_says_types_and_what_may_be_missing(
    env: ps.Environment, tmp_path: Path, suffix: str
) -> None:
    write_table(to_table(BIDS[:100]).select(["n", "price"]), tmp_path / f"x{suffix}")
    schema = pa.schema([("n", pa.int32()), ("price", pa.float64())])
    stream = read(env, suffix, tmp_path, schema=schema)
    assert stream.schema == schema
    table = stream.collect()
    run(env)
    assert table.to_arrow().schema == schema
    expected = [
        {"n": row["n"], "price": None if row["price"] is None else float(row["price"])}
        for row in BIDS[:100]
    ]
    assert_same_rows(table.to_pylist(), expected)


@pytest.mark.parametrize("suffix", FORMATS)
def test_hive_directories_are_columns(env: ps.Environment, tmp_path: Path, suffix: str) -> None:
    expected = []
    for row in BIDS[:200]:
        day, city = row["auction"], ["a b", "c=d", None][row["n"] % 3]
        expected.append({"n": row["n"], "day": day, "city": city})
    for day in {row["day"] for row in expected}:
        for city, directory in (
            ("a b", "a%20b"),
            ("c=d", "c%3Dd"),
            (None, "__HIVE_DEFAULT_PARTITION__"),
        ):
            rows = [{"n": r["n"]} for r in expected if (r["day"], r["city"]) == (day, city)]
            path = tmp_path / f"day={day}" / f"city={directory}" / f"p{suffix}"
            if rows:
                write_table(to_table(rows, pa.schema([("n", pa.int64())])), path)
    stream = read(env, suffix, tmp_path)
    assert stream.schema.field("day").type == pa.int32()
    assert_same_rows(rows_of(env, stream), expected)


def test_large_parquet_files_are_cut_between_row_groups(
    env: ps.Environment, tmp_path: Path
) -> None:
    # Random text does not compress: 12 MB in one file, read by both subtasks.
    import os

    texts = [os.urandom(1_500).hex() for _ in range(4_000)]
    table = pa.table({"n": range(4_000), "text": texts})
    pa.parquet.write_table(table, tmp_path / "big.parquet", row_group_size=500)
    rows = env.read_parquet(str(tmp_path)).map_batches(
        _with_process, schema={"n": "int64", "length": "int32", "pid": "int64"}
    )
    found = rows_of(env, rows)
    assert sorted(row["n"] for row in found) == list(range(4_000))
    assert {row["length"] for row in found} == {3_000}
    assert len({row["pid"] for row in found}) == 2


def _with_process(batch: pa.RecordBatch) -> pa.RecordBatch:
    import os

    import pyarrow.compute as pc

    pid = pa.array([os.getpid()] * batch.num_rows, pa.int64())
    return pa.RecordBatch.from_arrays(
        [batch["n"], pc.utf8_length(batch["text"]), pid], ["n", "length", "pid"]
    )


def test_encoded_parquet_columns_come_as_plain_ones(env: ps.Environment, tmp_path: Path) -> None:
    table = pa.table(
        {
            "word": pa.array(["x", None, "y", "x"]).dictionary_encode(),
            "view": pa.array(["a", "b", None, "d"], pa.string_view()),
            "large": pa.array(["a", "b", None, "d"], pa.large_string()),
            "items": [[1, 2], [], None, [3]],
            "pair": [{"a": 1, "b": "x"}, {"a": None, "b": "y"}, None, {"a": 4, "b": None}],
            "exact": pa.array([1, 2, None, 4], pa.decimal128(9, 2)),
            "day": [dt.date(2024, 2, 29), None, dt.date(1969, 12, 31), dt.date(2000, 1, 1)],
        }
    )
    pa.parquet.write_table(table, tmp_path / "x.parquet")
    write_table(table, tmp_path / "x.arrow")
    for suffix in (".parquet", ".arrow"):
        assert_same_rows(
            rows_of(env, read(env, suffix, tmp_path / f"x{suffix}")), table.to_pylist()
        )


def test_csv_means_what_duckdb_says(env: ps.Environment, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        'id,name,value,on,ok\n1,"quoted, with ""marks""",1.5,2024-01-31,true\n'
        '2,"two\nlines",,2024-02-29,false\n3,plain,-2e3,2023-12-31,true\n'
    )
    (tmp_path / "b.csv").write_bytes(b"id,name,value,on,ok\r\n4,crlf,7,2024-03-01,false\r\n")
    wanted = duckdb.sql(
        f"SELECT * FROM read_csv('{tmp_path}/a.csv') UNION ALL "
        f"SELECT * FROM read_csv('{tmp_path}/b.csv')"
    ).fetchall()
    names = ["id", "name", "value", "on", "ok"]
    found = rows_of(env, env.read_csv(str(tmp_path)))
    assert_same_rows(found, [dict(zip(names, row, strict=True)) for row in wanted])


def test_csv_with_everything_said_about_it(env: ps.Environment, tmp_path: Path) -> None:
    text = "1;x;NA\n2;-;2.5\n"
    (tmp_path / "a.txt").write_bytes(gzip.compress(text.encode()))
    rows = env.read_csv(
        str(tmp_path),
        schema={"a": "int64", "b": "string", "c": "float64"},
        delimiter=";",
        header=False,
        nulls=["NA", "-"],
        compression="gzip",
    )
    assert_same_rows(
        rows_of(env, rows), [{"a": 1, "b": "x", "c": None}, {"a": 2, "b": None, "c": 2.5}]
    )


def test_a_column_that_files_may_be_without(env: ps.Environment, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n")
    rows = env.read_csv(
        str(tmp_path), schema={"a": "int64", "b": "string"}, optional=["b"], delimiter=","
    )
    assert_same_rows(rows_of(env, rows), [{"a": 1, "b": None}])


@pytest.mark.parametrize("layout", ["lines", "array", "compact array", "lines without end"])
def test_json_in_each_of_its_shapes(env: ps.Environment, tmp_path: Path, layout: str) -> None:
    rows = [
        {
            "n": n,
            "text": f'"{n}" [,] {{}} \\ é \n',
            "items": list(range(n % 4)),
            "inner": {"a": n / 2, "b": None if n % 3 else str(n)},
        }
        for n in range(500)
    ]
    for index, part in enumerate(cut(rows, 3)):
        lines = [json.dumps(row) for row in part]
        text = {
            "lines": "".join(f"{line}\n" for line in lines),
            "array": json.dumps(part, indent=2, ensure_ascii=False),
            "compact array": json.dumps(part, separators=(",", ":")),
            "lines without end": "\n\n".join(lines),
        }[layout]
        (tmp_path / f"{index}.json").write_text(text)
    assert_same_rows(rows_of(env, env.read_json(str(tmp_path))), rows)


def test_json_rows_may_lack_columns(env: ps.Environment, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"n": 1}\n{"n": 2, "x": "two"}\n')
    (tmp_path / "b.json").write_text('[{"n": 3.5, "x": "three", "y": true}]')
    expected = [
        {"n": 1.0, "x": None, "y": None},
        {"n": 2.0, "x": "two", "y": None},
        {"n": 3.5, "x": "three", "y": True},
    ]
    assert_same_rows(rows_of(env, env.read_json(str(tmp_path))), expected)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".arrow"])
def test_files_without_rows_add_nothing(env: ps.Environment, tmp_path: Path, suffix: str) -> None:
    table = to_table(BIDS[:50]).select(["n", "price"])
    write_table(table, tmp_path / f"a{suffix}")
    write_table(table.slice(0, 0), tmp_path / f"b{suffix}")
    assert_same_rows(rows_of(env, read(env, suffix, tmp_path)), table.to_pylist())


def test_more_subtasks_than_files(env: ps.Environment, tmp_path: Path) -> None:
    write_table(to_table(BIDS), tmp_path / "one.parquet")
    stream = env.read_parquet(str(tmp_path)).parallelism(4).filter(col("n") % 2 == 0)
    assert_same_rows(rows_of(env, stream), BIDS[::2])
