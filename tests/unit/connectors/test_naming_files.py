"""Aim: what the user names is checked on the client: paths, schemas, columns, sinks."""

from __future__ import annotations

import datetime as dt
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.connectors import (
    arrow_source,
    collect_sink,
    discard_sink,
    file_sink,
    file_source,
    generator_source,
    nexmark_source,
    print_sink,
    rows_to_table,
    sample_generator_schema,
    socket_source,
)
from penstock.errors import JobRejected
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME, schema_from_bytes


def rejected(words: str, call: object, *args: object, **named: object) -> None:
    with pytest.raises(JobRejected) as error:
        call(*args, **named)  # type: ignore[operator]
    assert words in str(error.value)


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rejected("no such file or directory", file_source, "csv", tmp_path / "nope")
    rejected("there are no files at gs://", file_source, "csv", "gs://b/x")
    rejected("there are no files at gs://", file_sink, "csv", "gs://b/x")
    rejected("so there is no schema to infer: give schema=", file_source, "csv", tmp_path)
    rejected("matches no file", file_source, "csv", tmp_path / "*.csv")
    rejected('unknown file format "xml"', file_source, "xml", tmp_path)
    rejected(
        "so there is no schema to infer: give schema=", file_source, "csv", tmp_path, watch_ms=5
    )
    (tmp_path / "f.csv").write_text("a\n1\n")
    rejected("watch needs a directory", file_source, "csv", tmp_path / "f.csv", watch_ms=5)
    monkeypatch.chdir(tmp_path)
    spec, schema = file_source("csv", "f.csv")
    assert spec.files.path == str(tmp_path / "f.csv")
    assert spec.bounded
    assert schema_from_bytes(spec.files.schema).equals(schema)
    assert file_source("csv", f"file://{tmp_path}/f.csv")[0] == spec


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_read_permission(tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("a\n")
    (tmp_path / "f.csv").chmod(0)
    rejected("Permission denied", file_source, "csv", tmp_path / "f.csv")


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_files_that_are_something_else(tmp_path: Path, format: str) -> None:
    (tmp_path / "f").write_text("hello, this is no such file")
    rejected(f"{tmp_path / 'f'}: not a readable {format} file", file_source, format, tmp_path / "f")


def test_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"auction": [1], "price": [2]}), tmp_path / "f.parquet")
    path = tmp_path / "f.parquet"
    spec, schema = file_source("parquet", path, columns=["price"])
    assert schema.names == ["price"]
    assert list(spec.files.columns) == ["price"]
    rejected(
        'no column "prize" (did you mean "price"?)', file_source, "parquet", path, columns=["prize"]
    )
    rejected("names no column", file_source, "parquet", path, columns=[])
    rejected("names a column twice", file_source, "parquet", path, columns=["price", "price"])
    pq.write_table(pa.table({EVENT_TIME: [1]}), path)
    rejected("is reserved", file_source, "parquet", path)


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_a_file_with_several_columns_of_a_name(tmp_path: Path, format: str) -> None:
    path = tmp_path / "f"
    table = pa.table([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "b", "a"])
    if format == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    rejected(f'{path}: has several columns "a"', file_source, format, path)
    file_source(format, path, schema=pa.schema([("b", pa.int64())]))


def test_schemas_of_several_files(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("a,b\n1,x\n")
    (tmp_path / "2.csv").write_text("a,b\n1.5,2\n")
    assert file_source("csv", tmp_path)[1].types == [pa.float64(), pa.string()]
    (tmp_path / "3.csv").write_text("a\n1\n")
    rejected('3.csv: has no column "b"', file_source, "csv", tmp_path)
    data = tmp_path / "json"
    data.mkdir()
    (data / "0.json").write_text("")
    (data / "1.json").write_text('{"a":1,"t":"2024-01-01 00:00:01"}\n{bad\n')
    (data / "2.json").write_text('[{"a":2.5,"c":null}]')
    assert file_source("json", data)[1].equals(
        pa.schema([("a", pa.float64()), ("t", pa.timestamp("us")), ("c", pa.string())])
    )
    (data / "3.json").write_text('{"a":"x"}')
    rejected('column "a" is double in', file_source, "json", data)
    (data / "4.json").write_text("")
    rejected("there are no rows to infer a schema from", file_source, "json", data / "4.json")


def test_types_that_text_cannot_give(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("a\n")
    nested = pa.schema([("a", pa.list_(pa.int64()))])
    rejected(
        'column "a": csv cannot be read as list', file_source, "csv", tmp_path / "f", schema=nested
    )
    duration = pa.schema([("a", pa.duration("s"))])
    rejected(
        "json cannot be read as duration", file_source, "json", tmp_path / "f", schema=duration
    )
    for inner in (pa.date32(), pa.time64("us"), pa.binary()):
        schema = pa.schema([("a", pa.list_(pa.struct([("b", inner)])))])
        rejected(
            f"JSON cannot be read as {inner}", file_source, "json", tmp_path / "f", schema=schema
        )
    assert file_source("csv", tmp_path / "f", schema=pa.schema([("a", pa.date32())]))


def test_file_sinks(tmp_path: Path) -> None:
    schema = pa.schema([("day", pa.date32()), ("v", pa.list_(pa.int64()))])
    spec = file_sink("parquet", tmp_path / "out", partition_by="day", schema=schema)
    assert list(spec.files.partition_by) == ["day"]
    assert spec.files.roll_size_bytes == 64 << 20
    rejected(
        'no column "daz" (did you mean "day"?)', file_sink, "json", tmp_path, "daz", schema=schema
    )
    rejected("cannot name a directory", file_sink, "json", tmp_path, ["v"], schema=schema)
    rejected("which CSV cannot hold", file_sink, "csv", tmp_path, schema=schema)
    one = pa.schema([("day", pa.date32())])
    rejected("at least one column must remain", file_sink, "json", tmp_path, ["day"], schema=one)
    rejected("roll must be a positive size", file_sink, "json", tmp_path, None, 0)
    (tmp_path / "file").write_text("")
    rejected("is not a directory", file_sink, "json", tmp_path / "file")


def test_other_sources_and_sinks() -> None:
    function = graph_pb2.Function(pickled=b"x", display_name="m.f")
    schema = pa.schema([("a", pa.dictionary(pa.int8(), pa.string()))])
    spec, plain = generator_source(function, schema, None, 10)
    assert (spec.generator.rows, spec.generator.rate, spec.bounded) == (-1, 10.0, False)
    assert plain.field("a").type == pa.string()
    rejected("rows must be", generator_source, function, schema, -1)
    rejected("rate must be", generator_source, function, schema, 1, 0)
    batch = pa.record_batch({"a": [1]})
    assert sample_generator_schema(lambda start, count: batch).equals(batch.schema)
    rejected("expected a pyarrow.RecordBatch", sample_generator_schema, lambda start, count: 3)
    of_nulls = pa.array([None]).dictionary_encode()
    for nothing in (*map(pa.array, ([None], [[]], [{"x": None}])), of_nulls):
        batch = pa.record_batch({"b": nothing})
        rejected(
            "does not say what later rows hold", sample_generator_schema, lambda *_, b=batch: b
        )
    spec, schema = nexmark_source(10, kind="bid", columns=["price", "auction"])
    assert schema.names == ["price", "auction"]
    assert spec.bounded
    rejected('did you mean "bid"', nexmark_source, 10, kind="bids")
    rejected('no column "prize"', nexmark_source, 10, columns=["prize"])
    rejected("interval", nexmark_source, 10, event_interval_us=0)
    assert socket_source("h", 1)[1].names == ["line"]
    rejected("port", socket_source, "h", 0)
    rejected("host is empty", socket_source, "", 1)
    rejected("reserved", arrow_source, "id", pa.schema([(EVENT_TIME, pa.int64())]))
    assert arrow_source("id", pa.schema([("a", pa.int64())]))[0].arrow.artifact == "id"
    assert print_sink().WhichOneof("kind") == "print"
    assert discard_sink().WhichOneof("kind") == "discard"
    assert collect_sink("c", 5).collect.limit == 5
    rejected("limit must be positive", collect_sink, "c", 0)


def test_rows_of_dictionaries() -> None:
    assert rows_to_table([{"a": 1}, {"b": "x", "a": None}]).to_pylist() == [
        {"a": 1, "b": None},
        {"a": None, "b": "x"},
    ]
    schema = pa.schema([("a", pa.int32()), ("b", pa.list_(pa.int64()))])
    assert rows_to_table([], schema).schema.equals(schema)
    assert rows_to_table({"a": n} for n in (1, 2)).to_pylist() == [{"a": 1}, {"a": 2}]
    assert rows_to_table(({"a": n} for n in (1, 2)), schema)["a"].to_pylist() == [1, 2]
    assert rows_to_table([{"b": [1]}], schema).to_pylist() == [{"a": None, "b": [1]}]
    rejected("row 1, column \"a\": 'x' is not int32", rows_to_table, [{"a": 1}, {"a": "x"}], schema)
    rejected(
        'row 2, column "a": 5000000000 is not int32',
        rows_to_table,
        [{}, {}, {"a": 5 * 10**9}],
        schema,
    )
    rejected(
        "row 1, column \"a\": 'x' is not int64", rows_to_table, [{"a": 1}, {"a": "x"}, {"a": 2}]
    )
    rejected('row 0, column "a"', rows_to_table, [{"a": object()}])
    rejected('row 1, column "a": 1.5 is not int32', rows_to_table, [{"a": 2.0}, {"a": 1.5}], schema)
    rejected('row 0, column "a": True is not int32', rows_to_table, [{"a": True}], schema)
    rejected('row 0, column "b": [0.5] is not list', rows_to_table, [{"b": [0.5]}], schema)
    nested = pa.schema([("s", pa.struct([("x", pa.int64())]))])
    rejected("which has no field y", rows_to_table, [{"s": {"x": 1, "y": 2}}], nested)
    day, time = dt.date(2024, 1, 1), dt.datetime(2024, 1, 1, 5, tzinfo=dt.UTC)
    rejected('row 1, column "a"', rows_to_table, [{"a": day}, {"a": time}])
    rejected("is a time beside dates; give schema=", rows_to_table, [{"a": day}, {"a": time}])
    rejected(
        'row 1: column "aa" is not in the schema (did you mean "a"?)',
        rows_to_table,
        [{}, {"aa": 1}],
        schema,
    )
    rejected("row 0: expected a dict, got tuple", rows_to_table, [(1, 2)])
    rejected("give schema=", rows_to_table, [])
    rejected("column names must be str", rows_to_table, [{1: 2}])
    assert rows_to_table([{"a": None}]).schema.field("a").type == pa.string()


@pytest.mark.parametrize(
    ("times", "kind"),
    [
        (["2020-01-01T00:00:00Z", None, "2020-01-01 12:30:00Z"], pa.timestamp("us", "UTC")),
        (["2020-01-01T00:00:00+02:00", "2020-01-01T00:00-0530"], pa.timestamp("us", "UTC")),
        (["2020-01-01T00:00:00", "2020-01-01", None], pa.timestamp("us")),
        (["2020-01-01T00:00:00Z", "2020-01-01T00:00:00"], pa.string()),
    ],
)
@pytest.mark.parametrize("as_array", [False, True])
def test_times_in_json_with_a_zone_are_utc(
    tmp_path: Path, times: list[str | None], kind: pa.DataType, as_array: bool
) -> None:
    rows = [{"n": 1, "t": t, "s": {"t": t}, "l": [t]} for t in times]
    text = json.dumps(rows, indent=2) if as_array else "\n".join(map(json.dumps, rows))
    (tmp_path / "a.json").write_text(text)
    _, schema = file_source("json", tmp_path)
    expected = [pa.int64(), kind, pa.struct([("t", kind)]), pa.list_(kind)]
    assert schema == pa.schema(list(zip(["n", "t", "s", "l"], expected, strict=True)))
    for i, row in enumerate(rows):  # one file each: what they have in common
        (tmp_path / f"{i}.json").write_text(json.dumps({"t": row["t"]}))
    (tmp_path / "a.json").unlink()
    assert file_source("json", tmp_path)[1].field("t").type == kind
