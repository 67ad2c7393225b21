"""Aim: written files hold exactly the rows, show at commit only, and nothing else is ever left behind.

Method: real directories; pyarrow and DuckDB read what was written.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import resource
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from penstock.connectors import (
    collect_sink,
    discard_sink,
    file_sink,
    file_source,
    print_sink,
)
from penstock.connectors.sink import Sink, SinkContext, TwoPhaseSink
from penstock.errors import InvariantViolation, JobRejected, TaskFailure, Unrecoverable
from penstock.pb import graph_pb2
from taskmanager.connectors import file_encoders
from taskmanager.connectors import file_sink as file_sink_module
from taskmanager.connectors.hive_partitions import split_by_partition
from taskmanager.connectors.json_text import json_rows
from taskmanager.connectors.sink_writer import SinkWriter, UserSinkWriter
from tests.support.examples import examples
from tests.support.file_sinks import (
    batch,
    context,
    everything,
    opened,
    prepare,
    read,
    release_killed,
    user,
    visible,
)


@pytest.fixture(autouse=True)
def _killed_writers() -> Iterator[None]:
    yield
    release_killed()


@pytest.mark.parametrize("format", ["parquet", "csv", "json"])
def test_rows_show_at_commit(tmp_path: Path, format: str) -> None:
    out = tmp_path / "new" / "out"
    writer = opened(file_sink(format, out))
    writer.write(batch())
    writer.write(batch(100))
    writer.flush()
    assert visible(out) == []
    committables = prepare(writer)
    assert len(committables) == 1
    assert visible(out) == []
    assert prepare(writer) == []
    writer.commit(committables)
    writer.commit(committables)
    writer.close()
    assert read(format, out) == user(batch(), batch(100)).to_pylist()
    assert [p.name for p in everything(out)] == [p.name for p in visible(out)]
    (name,) = [p.name for p in visible(out)]
    assert name.startswith("part-0-0-0-aaaaaaaa-")
    assert name.endswith(f".{format}")


@pytest.mark.parametrize("format", ["parquet", "csv", "json"])
def test_written_files_can_be_read_back_as_a_source(
    harness: Any, tmp_path: Path, format: str
) -> None:
    writer = opened(file_sink(format, tmp_path, "k"))
    writer.write(batch())
    writer.commit(prepare(writer))
    spec, schema = file_source(format, tmp_path)
    found = harness.read_all(spec, schema).sort_by("id").to_pylist()
    if format == "csv":
        found = [{**row, "name": row["name"] or None} for row in found]
    assert found == user(batch()).select(schema.names).to_pylist()


_MOMENTS = [-2_208_891_600_000_000, None, 1_709_164_800_000_000]
_KINDS = [
    pa.array([b"abc", b"", None, b"\xff\x00"]),
    pa.array([b"abc", None], pa.large_binary()),
    pa.array([b"abc", None], pa.binary(3)),
    pa.array([True, None, False]),
    pa.array([-128, 127, None], pa.int8()),
    pa.array([2**64 - 1, 0, 2**63], pa.uint64()),
    pa.array([1.5, None], pa.float32()),
    pa.array([0.1, -0.0, None, 1e300]),
    pa.array(["", "null", "a\nb", None, '"q"', "NaN", " x "]),
    pa.array([dt.date(1900, 1, 1), None, dt.date(9999, 12, 31)]),
    pa.array([dt.time(1, 2, 3, 4), None, dt.time(0, 0)], pa.time64("us")),
    pa.array([dt.time(1, 2, 3), None], pa.time32("s")),
    *(
        pa.array(_MOMENTS, pa.timestamp("us")).cast(pa.timestamp(unit))
        for unit in ("s", "ms", "us", "ns")
    ),
    pa.array(_MOMENTS, pa.timestamp("us", "Europe/Berlin")),
    pa.array([Decimal("1.1"), None], pa.decimal128(38, 10)),
]


@pytest.mark.parametrize("format", ["parquet", "csv", "json"])
@pytest.mark.parametrize("values", _KINDS, ids=lambda values: str(values.type))
def test_values_of_each_type_are_read_back(
    harness: Any, tmp_path: Path, values: pa.Array, format: str
) -> None:
    if format == "csv" and pa.types.is_binary(values.type):
        values = values[:-1]  # it is text
    rows = pa.record_batch({"id": pa.array(range(len(values))), "a": values})
    writer = opened(file_sink(format, tmp_path))
    writer.write(rows)
    writer.commit(prepare(writer))
    found = harness.read_all(*file_source(format, tmp_path, schema=rows.schema)).sort_by("id")
    expected = rows.column("a")
    if format == "csv" and str(values.type) in ("string", "binary", "large_binary"):
        expected = expected.fill_null("" if pa.types.is_string(values.type) else b"")
    assert found.column("a").combine_chunks().equals(expected)


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1, None, None, -3]),
        pa.array([None, 0.5, float("inf"), None]),
        pa.array([None, Decimal("-1.50")]),
        pa.array([0, None, -1], pa.timestamp("us", "UTC")),
        pa.array([None, None], pa.date32()),
    ],
    ids=lambda values: str(values.type),
)
def test_a_null_alone_in_its_row_of_csv_is_read_back(
    harness: Any, tmp_path: Path, values: pa.Array
) -> None:
    writer = opened(file_sink("csv", tmp_path))
    rows = pa.record_batch({"a": values})
    writer.write(rows)
    writer.write(rows.slice(1))
    writer.commit(prepare(writer))
    found = harness.rows(file_source("csv", tmp_path, schema=rows.schema))
    assert found == rows.to_pylist() + rows.slice(1).to_pylist()


def test_texts_alone_in_their_rows_of_csv(harness: Any, tmp_path: Path) -> None:
    writer = opened(file_sink("csv", tmp_path))
    rows = pa.record_batch({"a": ['a"\n,b', None, "", "é"]})
    writer.write(rows)
    writer.write(rows.slice(2))
    writer.commit(prepare(writer))
    found = harness.rows(file_source("csv", tmp_path, schema=rows.schema))
    assert [row["a"] for row in found] == ['a"\n,b', "", "", "é", "", "é"]


def test_a_text_that_reads_like_null_stays_a_text(harness: Any, tmp_path: Path) -> None:
    writer = opened(file_sink("parquet", tmp_path, "k"))
    texts = [None, "__HIVE_DEFAULT_PARTITION__", "%5F_HIVE_DEFAULT_PARTITION__"]
    rows = batch(0, 3)
    rows = rows.set_column(rows.schema.get_field_index("k"), "k", pa.array(texts, pa.string()))
    writer.write(rows)
    writer.commit(prepare(writer))
    spec, schema = file_source("parquet", tmp_path)
    found = harness.read_all(spec, schema).sort_by("id")
    assert found["k"].to_pylist() == texts


@pytest.mark.parametrize("name", ["_k", ".k", "..", "__HIVE_DEFAULT_PARTITION__"])
def test_a_column_with_the_name_of_what_is_hidden_is_read_back(
    harness: Any, tmp_path: Path, name: str
) -> None:
    writer = opened(file_sink("parquet", tmp_path, name))
    whole = batch(0, 6)
    rows = whole.rename_columns(
        [name if column == "k" else column for column in whole.schema.names]
    )
    writer.write(rows)
    writer.commit(prepare(writer))
    expected = user(rows).sort_by("id")[name].to_pylist()
    found = harness.read_all(*file_source("parquet", tmp_path)).sort_by("id")
    assert found[name].to_pylist() == expected
    with_pyarrow = ds.dataset(tmp_path, partitioning="hive").to_table().sort_by("id")
    assert with_pyarrow[name].to_pylist() == expected


@pytest.mark.parametrize("wrong", [5, ["k", None], {"k": 1}])
def test_partition_by_takes_names(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(JobRejected, match="partition_by takes names of columns"):
        file_sink("parquet", tmp_path, wrong)


@pytest.mark.parametrize(
    "values",
    [
        pa.array([0, None, 86_399_999_999], pa.time64("us")),
        pa.array([1], pa.time64("ns")),
        pa.array([3723], pa.time32("s")),
        pa.array([3_723_004, None], pa.time32("ms")),
        pa.array([-5, None, 2**62], pa.duration("us")),
        pa.array([7, 7, None], pa.time64("us")).dictionary_encode(),
        pa.array([1, 2], pa.timestamp("ns", "Europe/Vienna")).dictionary_encode(),
        pa.array([-0.0, 0.1, math.inf]),
        pa.array([Decimal("-0.01"), None], pa.decimal256(50, 2)),
    ],
    ids=lambda values: str(values.type),
)
def test_partitions_are_read_with_the_type_they_were_written_with(
    harness: Any, tmp_path: Path, values: pa.Array
) -> None:
    rows = pa.record_batch({"v": values, "n": range(len(values))})
    writer = opened(file_sink("parquet", tmp_path, ["v"]))
    writer.write(rows)
    writer.commit(prepare(writer))
    found = harness.read_all(*file_source("parquet", tmp_path, schema=rows.schema)).sort_by("n")
    assert found["v"].to_pylist() == values.to_pylist()


@pytest.mark.parametrize("kind", [pa.binary(), pa.binary(2), pa.uuid(), pa.list_(pa.int8())])
def test_bytes_are_no_names_of_directories(tmp_path: Path, kind: pa.DataType) -> None:
    schema = pa.schema([("v", kind), ("n", pa.int64())])
    with pytest.raises(JobRejected, match=r'"v" is .*, which cannot name a directory; take '):
        file_sink("json", tmp_path, ["v"], schema=schema)


@pytest.mark.parametrize("wrong", [None, 5, b"out"])
def test_a_path_is_a_text(wrong: Any) -> None:
    with pytest.raises(JobRejected, match="a path is a text"):
        file_sink("parquet", wrong)


def test_partitions_are_read_by_pyarrow_and_duckdb(tmp_path: Path) -> None:
    writer = opened(file_sink("parquet", tmp_path, ["k", "id"]))
    writer.write(batch(0, 6))
    writer.write(batch(3, 6))
    writer.commit(prepare(writer))
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"k=x%20y", "k=a%2Fb", "k=__HIVE_DEFAULT_PARTITION__"}
    expected = user(batch(0, 6), batch(3, 6)).sort_by("id").to_pylist()
    found = ds.dataset(tmp_path, partitioning="hive").to_table().sort_by("id").to_pylist()
    assert [{k: row[k] for k in ("id", "name", "k")} for row in found] == expected
    query = (
        f"select id, name, k from read_parquet('{tmp_path}/**/*.parquet', hive_partitioning=true)"
    )
    rows = duckdb.sql(query + " order by id").fetchall()
    assert [row[:2] for row in rows] == [(row["id"], row["name"]) for row in expected]


@examples(25)
@given(
    st.lists(
        st.tuples(st.sampled_from([None, 1, 2, 3]), st.sampled_from([None, "a", "b/c", ""])),
        min_size=1,
        max_size=30,
    )
)
def test_every_row_goes_to_its_directory(keys: list[tuple[int | None, str | None]]) -> None:
    from taskmanager.connectors.hive_partitions import directory_name, split_by_partition

    rows = pa.record_batch(
        {
            "x": pa.array([k[0] for k in keys], pa.int64()),
            "y": pa.array([k[1] for k in keys], pa.string()),
            "row": range(len(keys)),
        }
    )
    expected: dict[str, list[int]] = {}
    for index, (x, y) in enumerate(keys):
        name = f"{directory_name('x', None if x is None else str(x))}/{directory_name('y', y)}"
        expected.setdefault(name, []).append(index)
    found = {
        name: part.column("row").to_pylist() for name, part in split_by_partition(rows, ["x", "y"])
    }
    assert found == expected


def test_many_partition_columns_of_many_values() -> None:
    from taskmanager.connectors.hive_partitions import split_by_partition

    names = [f"k{number}" for number in range(6)]
    rows = pa.record_batch({name: range(5_000) for name in names} | {"row": range(5_000)})
    found = {part["row"][0].as_py(): name for name, part in split_by_partition(rows, names)}
    assert found == {row: "/".join(f"{name}={row}" for name in names) for row in range(5_000)}


def test_files_roll_by_size_and_number(tmp_path: Path, monkeypatch: Any) -> None:
    writer = opened(file_sink("json", tmp_path / "a", roll=2000))
    for start in range(0, 200, 20):
        writer.write(batch(start, 20))
    writer.commit(prepare(writer))
    assert len(visible(tmp_path / "a")) > 3
    assert sorted(row["id"] for row in read("json", tmp_path / "a")) == list(range(200))
    monkeypatch.setattr(file_sink_module, "OPEN_FILES_MAX", 2)
    monkeypatch.setattr(file_sink_module, "WAITING_FILES_MAX", 0)
    monkeypatch.setattr(file_sink_module, "BUFFERED_BYTES_MAX", 100)
    monkeypatch.setattr(file_encoders, "ROW_GROUP_ROWS", 50)
    writer = opened(file_sink("parquet", tmp_path / "b", "k"))
    for start in range(0, 300, 100):
        writer.write(batch(start))
        assert sum(1 for p in everything(tmp_path / "b") if p.name.endswith("inprogress")) <= 2
    writer.commit(prepare(writer))
    assert sorted(row["id"] for row in read("parquet", tmp_path / "b")) == list(range(300))


def test_null_structs_with_lists_of_a_fixed_size_are_read_again(tmp_path: Path) -> None:
    lists = pa.list_(pa.int64(), 2)
    inner = pa.struct([pa.field("x", lists, nullable=False), pa.field("y", pa.list_(lists, 1))])
    kinds = [inner, pa.list_(inner), pa.map_(pa.string(), inner), pa.list_(inner, 1)]
    full = {"x": [1, 2], "y": [[3, 4]]}
    values = [
        [full, None],
        [[full, None], None],
        [[("k", full), ("l", None)], None],
        [[full], None],
    ]
    names = ["struct", "list", "map", "fixed"]
    rows = pa.record_batch([pa.array(*one) for one in zip(values, kinds, strict=True)], names=names)
    writer = opened(file_sink("parquet", tmp_path))
    writer.write(rows)
    writer.commit(prepare(writer))
    assert read("parquet", tmp_path) == rows.to_pylist()


def test_nothing_written_shows_nothing(tmp_path: Path) -> None:
    writer = opened(file_sink("parquet", tmp_path / "out"))
    assert prepare(writer) == []
    writer.commit([])
    writer.close()
    assert everything(tmp_path / "out") == []


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec = graph_pb2.SinkSpec(
        files=graph_pb2.FileSink(
            format="csv", directory=str(tmp_path / "file" / "out"), roll_size_bytes=9
        )
    )
    with pytest.raises(TaskFailure, match="cannot be written: Not a directory; check the output"):
        opened(spec)
    with pytest.raises(TaskFailure, match="cannot be written"):
        opened(file_sink("csv", "/proc/out"))


def _write_and_prepare(writer: SinkWriter) -> None:
    for start in range(0, 2000, 500):
        writer.write(batch(start, 500))
    prepare(writer)


@pytest.mark.parametrize("format", ["parquet", "csv", "json"])
def test_a_full_disk(tmp_path: Path, format: str) -> None:
    writer = opened(file_sink(format, tmp_path, roll=10**6))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(TaskFailure, match=r"\.part-.*cannot be written: .*File too large"):
            _write_and_prepare(writer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.close()
    assert everything(tmp_path) == []


def test_a_value_too_long_for_a_directory_ends_the_job(tmp_path: Path) -> None:
    writer = opened(file_sink("parquet", tmp_path, partition_by=["town"]))
    writer.write(pa.record_batch({"town": ["東" * 40], "n": [1]}))
    with pytest.raises(Unrecoverable, match=r"too long.*the values of town become names"):
        prepare(writer)
    writer.close()
    assert everything(tmp_path) == []


def test_types_that_csv_cannot_hold(tmp_path: Path) -> None:
    writer = opened(file_sink("csv", tmp_path))
    with pytest.raises(TaskFailure, match="the rows cannot be written as csv"):
        writer.write(pa.record_batch({"a": [[1]]}))
    writer.close()
    assert everything(tmp_path) == []


@pytest.mark.parametrize("others", [{}, {"n": [1, 2]}])
@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(2)])
def test_bytes_that_are_no_text_are_named_with_what_holds_them(
    tmp_path: Path, kind: pa.DataType, others: dict[str, Any]
) -> None:
    writer = opened(file_sink("csv", tmp_path))
    with pytest.raises(TaskFailure, match=r"column \"raw\": b'a\\xff' is no text.*write JSON"):
        writer.write(pa.record_batch({"raw": pa.array([None, b"a\xff"], kind), **others}))
    writer.close()


# ---------------------------------------------------------------- JSON text


@pytest.mark.parametrize("format", ["csv", "json"])
@pytest.mark.parametrize("partition_by", [[], ["t"]])
def test_a_time_that_has_no_text_is_not_written(
    tmp_path: Path, format: str, partition_by: list[str]
) -> None:
    """It was written as "<value out of range: 4503599627370496>"."""
    times = pa.array([0, None, 2**52], pa.timestamp("ms"))
    writer = opened(file_sink(format, tmp_path, partition_by=partition_by))
    with pytest.raises(TaskFailure, match=f"of {2**52} has no text"):
        writer.write(pa.record_batch({"t": times, "n": [1, 2, 3]}))
    writer.close()


def test_json_of_every_type() -> None:
    utc = dt.datetime(2024, 1, 2, 3, 4, 5, 678000, tzinfo=dt.UTC)
    columns = {
        'quo"te': pa.array(["a", 'b"\\\n\x01é', None]),
        "i": pa.array([1, -(2**63), None]),
        "u": pa.array([0, 2**64 - 1, None], pa.uint64()),
        "f": pa.array([0.1, math.nan, math.inf]),
        "b": pa.array([True, False, None]),
        "t": pa.array([utc, None, utc], pa.timestamp("ms", "UTC")),
        "z": pa.array([utc, None, utc], pa.timestamp("ms", "Europe/Vienna")),
        "n": pa.array(
            [utc.replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=None), None, None],
            pa.timestamp("us"),
        ),
        "d": pa.array([dt.date(2024, 1, 2), None, None]),
        "m": pa.array([Decimal("1.50"), None, None], pa.decimal128(5, 2)),
        "y": pa.array([b"\x00\xff", None, b""]),
        "l": pa.array([[1, None], None, []], pa.list_(pa.int64())),
        "s": pa.array([{"x": math.nan, "t": utc}, None, {"x": 1.0, "t": None}]),
        "p": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
        "c": pa.array(["x", None, "x"]).dictionary_encode(),
        "e": pa.nulls(3),
        "du": pa.array([5, None, 7], pa.duration("ms")),
    }
    rows = [json.loads(line) for line in json_rows(pa.record_batch(columns)).decode().splitlines()]
    iso = "2024-01-02T03:04:05.678Z"
    assert [row['quo"te'] for row in rows] == ["a", 'b"\\\n\x01é', None]
    assert [row["i"] for row in rows] == [1, -(2**63), None]
    assert [row["u"] for row in rows] == [0, 2**64 - 1, None]
    assert [row["f"] for row in rows] == [0.1, None, None]
    assert [row["b"] for row in rows] == [True, False, None]
    assert [row["t"] for row in rows] == [row["z"] for row in rows] == [iso, None, iso]
    assert rows[0]["n"] == "2024-01-02T00:00:00.000000"
    assert (rows[0]["d"], rows[0]["m"], rows[0]["y"]) == ("2024-01-02", "1.50", "AP8=")
    assert [row["l"] for row in rows] == [[1, None], None, []]
    assert rows[0]["s"] == {"x": None, "t": "2024-01-02T03:04:05.678000Z"}
    assert [row["p"] for row in rows] == [{"k": 1}, None, {}]
    assert [row["c"] for row in rows] == ["x", None, "x"]
    assert [row["e"] for row in rows] == [None] * 3
    assert [row["du"] for row in rows] == [5, None, 7]


def test_nested_nanoseconds_are_written_as_they_are() -> None:
    """pyarrow has no Python value for them without pandas: a bare error said so."""
    at = 1_700_000_000_000_000_000
    kind = pa.struct(
        {
            "t": pa.list_(pa.timestamp("ns", "Europe/Berlin")),
            "m": pa.map_(pa.timestamp("ns"), pa.time64("ns")),
            "d": pa.list_(pa.duration("ns"), 2),
            "y": pa.binary(),
        }
    )
    row = {"t": [at, at + 1, None], "m": [(at + 1000, 1001)], "d": [1001, 2000], "y": b"a"}
    text = json_rows(pa.record_batch({"s": pa.array([row, None], kind)})).decode()
    assert [json.loads(line)["s"] for line in text.splitlines()] == [
        {
            "t": ["2023-11-14T22:13:20Z", "2023-11-14T22:13:20.000000001Z", None],
            "m": {"2023-11-14T22:13:20.000001": "00:00:00.000001001"},
            "d": [1001, 2000],
            "y": "YQ==",
        },
        None,
    ]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_durations_are_numbers_of_their_unit_at_any_depth(unit: str) -> None:
    kind = pa.duration(unit)
    columns = {
        "top": pa.array([5, None], kind),
        "list": pa.array([[5, None], None], pa.list_(kind)),
        "map": pa.array([[("k", {"d": 5})], []], pa.map_(pa.string(), pa.struct([("d", kind)]))),
    }
    lines = json_rows(pa.record_batch(columns)).decode().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"top": 5, "list": [5, None], "map": {"k": {"d": 5}}},
        {"top": None, "list": None, "map": {}},
    ]


@given(
    st.lists(st.tuples(st.text() | st.none(), st.floats() | st.none()), max_size=20),
    st.integers(0, 3),
)
def test_json_rows_parse_to_the_same_values(values: list[tuple[Any, Any]], skip: int) -> None:
    rows = pa.record_batch(
        {
            "t": pa.array([v[0] for v in values], pa.string()),
            "f": pa.array([v[1] for v in values], pa.float64()),
        }
    ).slice(skip)
    found = [json.loads(line) for line in json_rows(rows).decode().split("\n")[:-1]]
    expected = [
        {"t": t, "f": f if f is not None and math.isfinite(f) else None} for t, f in values[skip:]
    ]
    assert found == expected


# ---------------------------------------------------------------- other sinks


def test_print(capsys: pytest.CaptureFixture[str]) -> None:
    writer = opened(print_sink(), subtask=1)
    writer.write(batch(1, 2))
    writer.flush()
    writer.close()
    assert capsys.readouterr().out == (
        '[sink (2/2)] {"id": 1, "name": "n\\"1\\n,", "k": null}\n'
        '[sink (2/2)] {"id": 2, "name": "n\\"2\\n,", "k": "a/b"}\n'
    )


def test_discard_and_collect() -> None:
    opened(discard_sink()).write(batch())
    with pytest.raises(InvariantViolation):
        opened(collect_sink("c"))


class Recording(Sink):
    """Remembers what was called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    @override
    def open(self, ctx: SinkContext) -> None:
        self.calls.append(ctx.subtask_index)

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        self.calls.append(batch.num_rows)
        if batch.num_rows == 3:
            raise ValueError("three")

    @override
    def flush(self) -> None:
        self.calls.append("flush")

    @override
    def close(self) -> None:
        self.calls.append("close")


def test_a_users_sink() -> None:
    sink = Recording()
    writer = UserSinkWriter(sink, "mine")
    writer.open(context(subtask=1))
    writer.write(batch(0, 2))
    with pytest.raises(TaskFailure, match=r"Recording\.write raised ValueError: three") as failure:
        writer.write(batch(0, 3))
    assert 'raise ValueError("three")' in failure.value.user_traceback
    writer.flush()
    writer.close()
    assert sink.calls == [1, 2, 3, "flush", "close"]
    with pytest.raises(TaskFailure, match=r"derive it from penstock\.Sink"):
        UserSinkWriter(3, "mine")


class Ledger(TwoPhaseSink):
    """A two-phase sink that keeps numbers in memory."""

    def __init__(self, committable: Any = None) -> None:
        self.rows: list[int] = []
        self.committable = committable
        self.calls: list[Any] = []

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        self.rows += batch["id"].to_pylist()

    @override
    def prepare_commit(self, checkpoint_id: int) -> list[Any]:
        rows, self.rows = self.rows, []
        if self.committable is not None:
            return [self.committable]
        return [{"checkpoint": checkpoint_id, "rows": rows}] if rows else []

    @override
    def commit(self, committable: Any) -> None:
        self.calls.append(("commit", committable))

    @override
    def abort(self, committable: Any) -> None:
        self.calls.append(("abort", committable))


def test_a_users_two_phase_sink() -> None:
    sink = Ledger()
    writer = UserSinkWriter(sink, "mine")
    writer.open(context())
    assert not writer.has_unprepared
    assert writer.prepare_commit(1) == []
    writer.write(batch(0, 2))
    assert writer.has_unprepared
    first = writer.prepare_commit(2)
    assert writer.finish_prepared() is None
    assert not writer.has_unprepared
    other = Ledger()
    UserSinkWriter(other, "mine").recover(first)
    writer.commit(first)
    writer.abort(first)
    committable = {"checkpoint": 2, "rows": [0, 1]}
    assert other.calls == [("commit", committable)]
    assert sink.calls == [("commit", committable), ("abort", committable)]


@pytest.mark.parametrize(
    "committable", [b"\x00\xff", "text", 7, (1, [2, {"a": b"x"}]), dt.date(2024, 1, 2), 2**70]
)
def test_committables_come_back_as_what_they_were(committable: Any) -> None:
    sink = Ledger(committable)
    writer = UserSinkWriter(sink, "mine")
    writer.commit(writer.prepare_commit(1))
    ((_, found),) = sink.calls
    assert found == committable
    assert type(found) is type(committable)


def test_committables_that_cannot_be_kept() -> None:
    with pytest.raises(TaskFailure, match=r"prepare_commit returned a committable .*return bytes"):
        UserSinkWriter(Ledger(object()), "mine").prepare_commit(1)

    class Bare(Ledger):
        @override
        def prepare_commit(self, checkpoint_id: int) -> Any:
            return b"not in a list"

    with pytest.raises(TaskFailure, match="a bytes in the place of a list of committables"):
        UserSinkWriter(Bare(), "mine").prepare_commit(1)


def test_a_sink_that_is_neither_is_refused() -> None:
    class Neither(Sink):
        @override
        def write(self, batch: pa.RecordBatch) -> None:
            pass

    with pytest.raises(TaskFailure, match="neither flush nor prepare_commit"):
        UserSinkWriter(Neither(), "mine")


def test_an_idempotent_sink_prepares_nothing() -> None:
    writer = UserSinkWriter(Recording(), "mine")
    writer.write(batch(0, 1))
    assert not writer.has_unprepared
    assert writer.prepare_commit(1) == []


def test_rows_are_copied_out_of_batches_as_far_as_arrow_can() -> None:
    """Dictionaries that together outgrow their index stay apart, and rows of some types where they are."""
    values = [pa.array([f"v{n}" for n in range(first, first + 100)]) for first in (0, 100)]
    codes = pa.array(range(100), pa.int8())
    apart = [
        pa.record_batch({"d": pa.DictionaryArray.from_arrays(codes, texts)}) for texts in values
    ]
    views = [pa.record_batch({"v": pa.array(["a", None, "b"], pa.string_view())})] * 2
    for batches in (apart, views):
        rows = [row for batch in batches for row in batch.to_pylist()]
        assert [row for batch in file_encoders.copied(batches) for row in batch.to_pylist()] == rows


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()], ids=str)
def test_both_zeros_go_to_one_directory(kind: pa.DataType) -> None:
    values = pa.array(np.array([-0.0, 1.5, 0.0, -0.5], kind.to_pandas_dtype()))
    found = split_by_partition(pa.record_batch({"x": values, "n": [1, 2, 3, 4]}), ["x"])
    assert [(name, rows["n"].to_pylist()) for name, rows in found] == [
        ("x=-0.5", [4]),
        ("x=0", [1, 3]),
        ("x=1.5", [2]),
    ]
