"""Aim: every format gives the rows that pyarrow or DuckDB reads from the same files.

Method: real files, tiny blocks, every way to cut them; a reader opened at any position goes on exactly.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from penstock.connectors import file_source
from penstock.errors import JobRejected, TaskFailure, Unrecoverable
from taskmanager.connectors import file_splits, parquet_reader
from taskmanager.connectors.file_splits import min_event_times
from taskmanager.connectors.parquet_columns import column_names
from tests.support.examples import examples

SHARED_FLIGHTS = Path(__file__).parents[4] / "shared" / "data" / "flights-20k.json"
START = dt.datetime(2024, 1, 1, tzinfo=dt.UTC).replace(tzinfo=None)


def table(rows: int = 500) -> pa.Table:
    return pa.table(
        {
            "id": pa.array(range(rows), pa.int64()),
            "name": pa.array([f'n"{i % 7}, é\n' if i % 5 == 0 else f"n{i}" for i in range(rows)]),
            "price": pa.array([None if i % 11 == 0 else i / 4 for i in range(rows)], pa.float64()),
            "at": pa.array(
                [START + dt.timedelta(seconds=i) for i in range(rows)],
                pa.timestamp("us"),
            ),
        }
    )


def write(format: str, path: Path, data: pa.Table) -> None:
    if format == "parquet":
        pq.write_table(data, path, row_group_size=64)
    elif format == "arrow":
        with pa.ipc.new_file(path, data.schema) as writer:
            writer.write_table(data, max_chunksize=70)
    elif format == "csv":
        seconds = [
            c.cast(pa.timestamp("s")) if pa.types.is_timestamp(c.type) else c for c in data.columns
        ]
        pc.write_csv(pa.table(seconds, data.schema.names), path)
    else:
        rows = [{k: str(v) if k == "at" else v for k, v in r.items()} for r in data.to_pylist()]
        if format == "json":
            path.write_text("\n".join(json.dumps(row) for row in rows))
        else:
            indent = 2 if format == "pretty" else None
            path.write_text(json.dumps(rows, indent=indent))


FORMATS = ["parquet", "arrow", "csv", "json", "array", "pretty"]


def as_read(format: str) -> str:
    return "json" if format in ("array", "pretty") else format


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.usefixtures("small_blocks")
def test_rows_equal_what_was_written(harness: Any, tmp_path: Path, format: str) -> None:
    data = table()
    write(format, tmp_path / "data", data)
    spec, schema = file_source(as_read(format), tmp_path / "data")
    assert schema.equals(data.schema)
    assert harness.read_all(spec, schema, max_rows=13).equals(data)
    assert harness.bad == []


@pytest.mark.parametrize("format", FORMATS)
def test_columns_are_pruned_and_ordered(harness: Any, tmp_path: Path, format: str) -> None:
    data = table(50)
    write(format, tmp_path / "data", data)
    spec, schema = file_source(as_read(format), tmp_path / "data", columns=["price", "id"])
    assert harness.read_all(spec, schema).equals(data.select(["price", "id"]))


@pytest.mark.parametrize("format", FORMATS)
@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stop=st.integers(0, 60), max_rows=st.integers(1, 40), again=st.integers(1, 40))
@pytest.mark.usefixtures("small_blocks")
def test_a_reader_opened_at_any_position_goes_on(
    harness: Any,
    tmp_path: Path,
    monkeypatch: Any,
    format: str,
    stop: int,
    max_rows: int,
    again: int,
) -> None:
    monkeypatch.setattr(parquet_reader, "_DECODE_ROWS", 50)
    path = tmp_path / "data"
    data = table(300)
    if not path.exists():
        write(format, path, data)
    source = harness.start(*file_source(as_read(format), path))
    (split,) = harness.discover(source)
    first, position = harness.read_split(source, split, max_rows, stop_after=stop)
    rest, _ = harness.read_split(source, split, again, position=position)
    assert pa.Table.from_batches(first + rest, schema=data.schema).equals(data)


def test_a_large_parquet_file_is_split_between_row_groups(
    harness: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(file_splits, "SPLIT_BYTES", 3000)
    data = table(1000)
    write("parquet", tmp_path / "data.parquet", data)
    harness.event_time_column = "at"
    source = harness.start(*file_source("parquet", tmp_path))
    splits = harness.discover(source)
    assert len(splits) > 3
    assert [s.id for s in splits] == [s.id for s in harness.discover(source)]
    assert len({s.id for s in splits}) == len(splits)
    tables = [pa.Table.from_batches(harness.read_split(source, s, 17)[0]) for s in splits]
    assert pa.concat_tables(tables).equals(data)
    for split, part in zip(splits, tables, strict=True):
        smallest = min(part["at"].to_pylist()).replace(tzinfo=dt.UTC)
        assert split.min_event_time_ms == smallest.timestamp() * 1000
        assert split.size > 0
        batches, position = harness.read_split(source, split, 9, stop_after=4)
        rest, _ = harness.read_split(source, split, 9, position=position)
        assert pa.Table.from_batches(batches + rest).equals(part)


def test_event_times_of_statistics() -> None:
    assert file_splits.event_time_ms(7) == 7
    assert file_splits.event_time_ms(dt.date(1970, 1, 2)) == 86_400_000
    just_before = dt.datetime(1969, 12, 31, 23, 59, 59, 999_500, tzinfo=dt.UTC)
    assert file_splits.event_time_ms(just_before) == -1
    assert file_splits.event_time_ms(just_before.replace(tzinfo=None)) == -1
    assert file_splits.event_time_ms(True) is None
    assert file_splits.event_time_ms("x") is None
    assert file_splits.event_time_ms(2**64 - 1) is None
    assert file_splits.event_time_ms(float("nan")) is None


@pytest.mark.parametrize("format", ["parquet", "csv", "json"])
def test_hive_directories_are_columns_as_pyarrow_reads_them(
    harness: Any, tmp_path: Path, format: str
) -> None:
    data = table(40).drop_columns(["at", "price"])
    for day in (1, 2):
        for place in ("a b", None):
            name = "__HIVE_DEFAULT_PARTITION__" if place is None else "a%20b"
            target = tmp_path / f"day={day}" / f"place={name}"
            target.mkdir(parents=True)
            write(format, target / "f", data)
    (tmp_path / "_temporary").mkdir()
    (tmp_path / "_temporary" / "x").write_text("no data")
    (tmp_path / "day=1" / ".hidden").write_text("no data")
    found = harness.read_all(*file_source(format, tmp_path))
    assert found.schema.names == ["id", "name", "day", "place"]
    assert found.schema.field("day").type == pa.int32()
    if format == "parquet":
        expected = ds.dataset(tmp_path, partitioning="hive").to_table()
        assert found.sort_by(
            [("day", "ascending"), ("place", "ascending"), ("id", "ascending")]
        ).equals(
            expected.sort_by([("day", "ascending"), ("place", "ascending"), ("id", "ascending")])
        )
    assert found.num_rows == 160
    assert sorted(set(found["place"].to_pylist()), key=str) == [None, "a b"]
    only = harness.read_all(*file_source(format, tmp_path, columns=["day"]))
    assert only["day"].to_pylist() == [1] * 80 + [2] * 80


def test_globs_take_matching_files_only(harness: Any, tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv", "c.txt", "_d.csv"):
        (tmp_path / name).write_text(f"x\n{name}\n")
    rows = harness.rows(file_source("csv", tmp_path / "*.csv"))
    assert rows == [{"x": "a.csv"}, {"x": "b.csv"}]


def test_arrow_streams_and_dictionaries(harness: Any, tmp_path: Path) -> None:
    data = pa.table({"k": pa.array(["a", "b", "a", None]).dictionary_encode(), "v": [1, 2, 3, 4]})
    with pa.ipc.new_stream(tmp_path / "s.arrow", data.schema) as writer:
        writer.write_table(data, max_chunksize=3)
    source = harness.start(*file_source("arrow", tmp_path / "s.arrow"))
    assert source.schema.field("k").type == pa.string()
    (split,) = harness.discover(source)
    for stop in range(6):
        first, position = harness.read_split(source, split, 1, stop_after=stop)
        rest, _ = harness.read_split(source, split, 1, position=position)
        assert pa.Table.from_batches(first + rest).to_pylist() == data.to_pylist()


def test_csv_reads_as_duckdb_reads_it(harness: Any, tmp_path: Path) -> None:
    text = 'a,b,c\r\n1,"x\r\ny",2.5\r\n2,"he said ""no""",\r\n\r\n3,5" disk,7\r\n'
    (tmp_path / "f.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    found = harness.rows(file_source("csv", tmp_path / "f.csv"))
    (tmp_path / "plain.csv").write_bytes(text.replace('5" disk', '"5"" disk"').encode())
    query = f"select * from read_csv('{tmp_path / 'plain.csv'}')"
    assert [tuple(row.values()) for row in found] == duckdb.sql(query).fetchall()


def test_types_may_widen_and_files_may_have_more_columns(harness: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([1], pa.int32()), "b": ["x"]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"b": ["y"], "c": [0], "a": [2**40]}), tmp_path / "2.parquet")
    spec, schema = file_source("parquet", tmp_path)
    assert schema.equals(pa.schema([("a", pa.int64()), ("b", pa.string())]))
    assert harness.rows((spec, schema)) == [{"a": 1, "b": "x"}, {"a": 2**40, "b": "y"}]


def test_json_nests_misses_keys_and_has_dates(harness: Any, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text('[{"a":{"x":[1,2]},"d":"2024-02-03"},\n {"more":1}]')
    nested = pa.struct([("x", pa.list_(pa.int64()))])
    schema = pa.schema([("a", nested), ("d", pa.date32())])
    assert harness.rows(file_source("json", path, schema=schema)) == [
        {"a": {"x": [1, 2]}, "d": dt.date(2024, 2, 3)},
        {"a": None, "d": None},
    ]


def test_json_has_times_of_day(skipping: Any, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    texts = ["01:02:03.5", "23:59:59.999999", "01:02", None, "24:00:00", "01:02:03Z", "1"]
    path.write_text("".join(json.dumps({"t": text, "s": text}) + "\n" for text in texts))
    schema = pa.schema([("t", pa.time64("us"))])
    assert [row["t"] for row in skipping.rows(file_source("json", path, schema=schema))] == [
        dt.time(1, 2, 3, 500_000),
        dt.time(23, 59, 59, 999_999),
        dt.time(1, 2),
        None,
    ]
    assert [error for _, _, error in skipping.bad] == [
        f'column "t": "{text}" is not time64[us]' for text in texts[4:]
    ]
    path.write_text('{"t":"07:00:01"}\n')
    whole = pa.schema([("t", pa.time32("s"))])
    assert skipping.rows(file_source("json", path, schema=whole)) == [{"t": dt.time(7, 0, 1)}]


@pytest.mark.skipif(not SHARED_FLIGHTS.exists(), reason="no flights data on this machine")
def test_flights(harness: Any) -> None:
    spec, schema = file_source("json", SHARED_FLIGHTS)
    assert schema.names == ["date", "delay", "distance", "origin", "destination"]
    found = harness.read_all(spec, schema)
    query = f"select * from read_json('{SHARED_FLIGHTS}', columns={{date:'VARCHAR', delay:'BIGINT',"
    query += " distance:'BIGINT', origin:'VARCHAR', destination:'VARCHAR'})"
    assert [tuple(r.values()) for r in found.to_pylist()] == duckdb.sql(query).fetchall()


def test_flights_like_array_on_one_line_in_small_blocks(
    harness: Any, tmp_path: Path, small_blocks: None
) -> None:
    rows = [
        {
            "date": "2001/01/01 00:47",
            "delay": -i,
            "distance": i,
            "origin": "DTW",
            "destination": "LAS",
        }
        for i in range(100)
    ]
    (tmp_path / "f.json").write_text(json.dumps(rows, separators=(",", ":")))
    assert harness.rows(file_source("json", tmp_path / "f.json"), max_rows=7) == rows


# ---------------------------------------------------------------- files that change or do not fit


def fails(harness: Any, opened: Any, *words: str) -> None:
    with pytest.raises(TaskFailure) as failure:
        harness.read_all(*opened)
    for word in words:
        assert word in str(failure.value)


@pytest.mark.parametrize("format", ["parquet", "arrow", "csv", "json"])
def test_a_file_that_went_away(harness: Any, tmp_path: Path, format: str) -> None:
    path = tmp_path / "data"
    write(format, path, table(10))
    opened = file_source(format, tmp_path)
    source = harness.start(*opened)
    (split,) = harness.discover(source)
    path.unlink()
    with pytest.raises(TaskFailure, match="data: cannot be read on this TaskManager: No such file"):
        source.open(split, None)
    again = harness.start(*opened)
    with pytest.raises(TaskFailure, match="there are no files to read on this TaskManager"):
        harness.discover(again)
    tmp_path.rmdir()
    with pytest.raises(TaskFailure, match="no such file or directory on this TaskManager"):
        harness.discover(again)


@pytest.mark.parametrize("format", ["parquet", "arrow", "csv", "json"])
def test_a_file_that_is_cut_off(harness: Any, tmp_path: Path, format: str) -> None:
    path = tmp_path / "data"
    write(format, path, table(100))
    opened = file_source(format, path)
    source = harness.start(*opened)
    (split,) = harness.discover(source)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(Unrecoverable, match="was cut off or replaced"):
        source.open(split, None)
    if format in ("parquet", "arrow"):
        fails(harness, opened, str(path), "not a readable")


@pytest.mark.parametrize("format", ["parquet", "arrow", "csv"])
def test_a_file_without_a_declared_column(harness: Any, tmp_path: Path, format: str) -> None:
    schema = pa.schema([("id", pa.int64()), ("prize", pa.float64())])
    write(format, tmp_path / "data", table(5).rename_columns(["id", "name", "prize", "at"]))
    seen_whole = file_source(format, tmp_path, schema=schema)
    write(format, tmp_path / "data", table(5))
    words = ('has no column "prize" (did you mean "price"?)', str(tmp_path / "data"))
    fails(harness, seen_whole, *words)
    with pytest.raises(JobRejected) as rejected:
        file_source(format, tmp_path, schema=schema)
    for word in words:
        assert word in str(rejected.value)
    assert file_source(format, tmp_path, schema=schema, columns=["id"])


def test_types_that_do_not_cast(harness: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [[1]], "b": [2**40]}), tmp_path / "f.parquet")
    schema = pa.schema([("a", pa.int64())])
    fails(
        harness, file_source("parquet", tmp_path, schema=schema), 'column "a" is list', "f.parquet"
    )
    schema = pa.schema([("b", pa.int32())])
    fails(
        harness,
        file_source("parquet", tmp_path, schema=schema),
        str(tmp_path),
        "column 'b' as int64",
        "int32",
    )


@pytest.mark.parametrize("day", ["x", "0xFFFFFFFF"])
def test_a_hive_value_of_another_type(harness: Any, tmp_path: Path, day: str) -> None:
    (tmp_path / f"day={day}").mkdir()
    (tmp_path / f"day={day}" / "f.csv").write_text("a\n1\n")
    schema = pa.schema([("a", pa.int64()), ("day", pa.int32())])
    fails(harness, file_source("csv", tmp_path, schema=schema), f'day="{day}", which is not int32')


# ---------------------------------------------------------------- watching


def test_watching_takes_files_once_they_are_still(harness: Any, tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.int64())])
    spec, _ = file_source("csv", tmp_path, schema=schema, watch_ms=1000)
    assert not spec.bounded
    source = harness.start(spec, schema)
    assert source.discovery_interval_ms() == 1000
    assert not source.bounded
    assert harness.discover(source) == []
    path = tmp_path / "1.csv"
    path.touch()
    os.utime(path, (1, 1))
    assert (
        harness.discover(source) == []
    )  # it is about to be written, however long it has been there
    path.write_text("a\n1\n")
    os.utime(path, (harness.now / 1000, harness.now / 1000))
    assert harness.discover(source) == []
    harness.now += 600
    path.write_text("a\n1\n2\n")
    os.utime(path, (harness.now / 1000, harness.now / 1000))
    harness.now += 600
    assert harness.discover(source) == []
    harness.now += 500
    (split,) = harness.discover(source)
    assert split.id == str(path)
    moved = tmp_path / "0.csv"
    moved.write_text("a\n3\n")
    os.utime(moved, (1, 1))
    (later,) = harness.discover(source)
    assert later.id == str(moved)
    assert harness.discover(source) == []
    batches = [b for s in (later, split) for b in harness.read_split(source, s)[0]]
    assert pa.Table.from_batches(batches).to_pylist() == [{"a": 3}, {"a": 1}, {"a": 2}]


def test_a_file_that_changes_after_it_was_taken_is_told_once(harness: Any, tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.int64())])
    spec, _ = file_source("csv", tmp_path, schema=schema, watch_ms=500)
    source = harness.start(spec, schema)
    grows, stays = tmp_path / "grows.csv", tmp_path / "stays.csv"
    for path in (grows, stays):
        path.write_text("a\n1\n")
        os.utime(path, (1, 1))
    with capture_logs() as told:
        assert len(harness.discover(source)) == 2
        assert harness.discover(source) == []
        assert not told
        for _ in range(2):
            with grows.open("a") as file:
                file.write("2\n")
            stays.touch()
            assert harness.discover(source) == []
            (only,) = told
            assert (only["event"], only["path"]) == ("source.files_changed", str(grows))


def test_what_a_watched_directory_has_given_costs_16_bytes_a_file(
    harness: Any, tmp_path: Path
) -> None:
    """Files come and are taken away, and come back; half-written ones that go leave nothing."""
    import pickle

    schema = pa.schema([("a", pa.int64())])
    spec, _ = file_source("csv", tmp_path, schema=schema, watch_ms=500)
    source = harness.start(spec, schema)
    held = []
    for round in range(6):
        paths = [tmp_path / f"{round}-{number}.csv" for number in range(200)]
        for path in paths:
            path.write_text("a\n1\n")
            os.utime(path, (1, 1))
        half = tmp_path / f"{round}-half.csv"
        half.write_text("a")
        os.utime(half, (harness.now / 1000, harness.now / 1000))
        assert len(harness.discover(source)) == len(paths)
        assert harness.discover(source) == []
        for path in (*paths, half):
            path.unlink()
        assert harness.discover(source) == []
        held.append(len(pickle.dumps((source._taken, source._seen))))
    assert held[-1] - held[1] < 4 * 200 * 16 + 100
    for path in paths:
        path.write_text("a\n2\n")
        os.utime(path, (1, 1))
    assert harness.discover(source) == []


def test_a_file_of_the_future_is_taken_after_an_interval(harness: Any, tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("a\n1\n")
    spec, schema = file_source("csv", tmp_path, watch_ms=500)
    source = harness.start(spec, schema)
    assert harness.discover(source) == []
    harness.now += 500
    assert len(harness.discover(source)) == 1


@pytest.mark.parametrize("format", ["parquet", "csv", "json", "arrow"])
def test_an_empty_directory_with_a_schema_has_no_rows(
    harness: Any, tmp_path: Path, format: str
) -> None:
    schema = pa.schema([("a", pa.int64())])
    spec, found = file_source(format, tmp_path, schema=schema)
    assert harness.read_all(spec, found).num_rows == 0
    write(format, tmp_path / f"a.{format}", pa.table({"a": [1]}))
    saw_files, found = file_source(format, tmp_path, schema=schema)
    assert harness.read_all(saw_files, found).num_rows == 1
    (tmp_path / f"a.{format}").unlink()
    with pytest.raises(TaskFailure, match="there are no files"):
        harness.read_all(saw_files, found)


def test_a_smallest_time_that_python_cannot_hold_is_no_bound(harness: Any, tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"at": pa.array([-(2**62)], pa.timestamp("us"))}), tmp_path / "a.parquet"
    )
    harness.event_time_column = "at"
    (split,) = harness.discover(harness.start(*file_source("parquet", tmp_path)))
    assert split.min_event_time_ms is None


def test_a_smallest_time_in_nanoseconds_is_a_bound_without_pandas(tmp_path: Path) -> None:
    """pyarrow has no value for it then: a base installation is without pandas."""
    at = pa.array([1_700_000_000_000_000_001, 1_800_000_000_000_000_000], pa.timestamp("ns"))
    pq.write_table(pa.table({"at": at}), tmp_path / "a.parquet")
    script = f"""
import sys
class Without:
    def find_spec(self, name, *_):
        if name == "pandas":
            raise ImportError(name)
sys.meta_path.insert(0, Without())
from pyarrow import parquet
from taskmanager.connectors.file_splits import min_event_times
metadata = parquet.read_metadata({str(tmp_path / "a.parquet")!r})
print(min_event_times(metadata, metadata.schema.to_arrow_schema().field("at"), range(1)))
"""
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert found.stdout == "[1700000000000]\n", found.stderr


def test_event_time_is_not_that_of_a_part_of_another_column_of_the_same_path(
    tmp_path: Path,
) -> None:
    early, late = (pa.array([at], pa.timestamp("ms")) for at in (1, 2000))
    nested, plain = pa.StructArray.from_arrays([early], ["b"]), pa.field("a.b", late.type)
    for columns, expected in (({"a": nested, "a.b": late}, 2000), ({"a": nested}, None)):
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")
        metadata = pq.read_metadata(tmp_path / "a.parquet")
        assert min_event_times(metadata, plain, range(1)) == [expected]


def test_each_leaf_of_a_parquet_file_is_of_a_column(tmp_path: Path) -> None:
    pair = pa.struct([("x", pa.int64()), ("y.z", pa.list_(pa.float64(), 2))])
    kinds = {"a.list": pair, "a": pa.map_(pa.string(), pa.list_(pair)), "b": pa.large_list(pair)}
    kinds |= {"u": pa.uuid(), "c": pa.dictionary(pa.int8(), pa.string()), "a.x": pa.int64()}
    pq.write_table(pa.schema(list(kinds.items())).empty_table(), tmp_path / "a.parquet")
    names = column_names(pq.read_metadata(tmp_path / "a.parquet"))
    assert names == ["a.list"] * 2 + ["a"] * 3 + ["b"] * 2 + ["u", "c", "a.x"]


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_several_columns_of_one_name_are_refused_where_it_is_declared(
    harness: Any, tmp_path: Path, format: str
) -> None:
    table = pa.table([[1], [2], [3]], names=["a", "a", "b"])
    write(format, tmp_path / "twice", table)
    for column, is_refused in (("a", True), ("b", False)):
        spec, schema = file_source(
            format, tmp_path / "twice", schema=pa.schema([(column, pa.int64())])
        )
        harness.event_time_column = column
        if is_refused:
            with pytest.raises(TaskFailure, match=r'twice: has several columns "a"'):
                harness.read_all(spec, schema)
        else:
            assert harness.read_all(spec, schema).to_pylist() == [{"b": 3}]


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\n \r\n", '\n{"a":3}\n', '\n\n{"a":3}'])
@pytest.mark.parametrize("line", ['{"a":1}{"a":2}', '{"a":\n{"b":1}}{"a":2}', '{"a":1} x'])
def test_a_line_of_json_that_is_not_one_object_is_bad_whatever_is_beside_it(
    harness: Any, tmp_path: Path, line: str, end: str
) -> None:
    (tmp_path / "a.json").write_text(line + end)
    spec, schema = file_source("json", tmp_path, schema=pa.schema([("a", pa.int64())]))
    with pytest.raises(TaskFailure, match=r"a\.json:1"):
        harness.read_all(spec, schema)
