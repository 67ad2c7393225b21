"""Aim: written files hold exactly the rows, show at commit only, and nothing else is ever left behind.

Method: real directories; pyarrow and DuckDB read what was written.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import resource
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from penstock.connectors import (
    collect_sink,
    discard_sink,
    file_sink,
    file_source,
    print_sink,
)
from penstock.connectors.sink import Sink, SinkContext
from penstock.errors import InvariantViolation, TaskFailure
from penstock.pb import graph_pb2
from penstock.schema import EVENT_TIME
from taskmanager.connectors import file_encoders
from taskmanager.connectors import file_sink as file_sink_module
from taskmanager.connectors.factory import build_sink_writer
from taskmanager.connectors.json_text import json_rows
from taskmanager.connectors.sink_writer import SinkWriter, UserSinkWriter


def context(
    job: str = "a" * 32, subtask: int = 0, attempt: int = 0, uid: str = "out"
) -> SinkContext:
    return SinkContext(job, "sink", uid, subtask, 2, attempt)


def opened(spec: graph_pb2.SinkSpec, **place: Any) -> SinkWriter:
    writer = build_sink_writer(spec, graph_pb2.Operator(uid="out", name="sink"))
    writer.open(context(**place))
    return writer


def batch(start: int = 0, rows: int = 100) -> pa.RecordBatch:
    numbers = range(start, start + rows)
    return pa.record_batch(
        {
            "id": pa.array(numbers, pa.int64()),
            "name": [None if i % 9 == 0 else f'n"{i}\n,' for i in numbers],
            "k": [["x y", None, "a/b"][i % 3] for i in numbers],
            EVENT_TIME: pa.array(numbers, pa.int64()),
        }
    )


def user(*batches: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches(batches).drop_columns([EVENT_TIME])


def visible(directory: Path) -> list[Path]:
    return sorted(
        p for p in directory.rglob("*") if p.is_file() and not p.name.startswith((".", "_"))
    )


def everything(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*"))


def read(format: str, directory: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for path in visible(directory):
        if format == "parquet":
            rows += pq.ParquetFile(path).read().to_pylist()
        elif format == "csv":
            nulls = pc.ConvertOptions(strings_can_be_null=True, quoted_strings_can_be_null=False)
            lines = pc.ParseOptions(newlines_in_values=True)
            rows += pc.read_csv(path, convert_options=nulls, parse_options=lines).to_pylist()
        else:
            rows += [json.loads(line) for line in path.read_text().splitlines()]
    return rows


@pytest.mark.parametrize("format", ["parquet", "csv", "json"])
def test_rows_show_at_commit(tmp_path: Path, format: str) -> None:
    out = tmp_path / "new" / "out"
    writer = opened(file_sink(format, out))
    writer.write(batch())
    writer.write(batch(100))
    writer.flush()
    assert visible(out) == []
    committables = writer.prepare_commit()
    assert len(committables) == 1
    assert visible(out) == []
    assert writer.prepare_commit() == []
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
    writer.commit(writer.prepare_commit())
    spec, schema = file_source(format, tmp_path)
    found = harness.read_all(spec, schema).sort_by("id").to_pylist()
    if format == "csv":
        found = [{**row, "name": row["name"] or None} for row in found]
    assert found == user(batch()).select(schema.names).to_pylist()


def test_partitions_are_read_by_pyarrow_and_duckdb(tmp_path: Path) -> None:
    writer = opened(file_sink("parquet", tmp_path, ["k", "id"]))
    writer.write(batch(0, 6))
    writer.write(batch(3, 6))
    writer.commit(writer.prepare_commit())
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


@settings(max_examples=25, deadline=None)
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


def test_files_roll_by_size_and_number(tmp_path: Path, monkeypatch: Any) -> None:
    writer = opened(file_sink("json", tmp_path / "a", roll=2000))
    for start in range(0, 200, 20):
        writer.write(batch(start, 20))
    writer.commit(writer.prepare_commit())
    assert len(visible(tmp_path / "a")) > 3
    assert sorted(row["id"] for row in read("json", tmp_path / "a")) == list(range(200))
    monkeypatch.setattr(file_sink_module, "OPEN_FILES_MAX", 2)
    monkeypatch.setattr(file_sink_module, "BUFFERED_BYTES_MAX", 100)
    monkeypatch.setattr(file_encoders, "ROW_GROUP_ROWS", 50)
    writer = opened(file_sink("parquet", tmp_path / "b", "k"))
    for start in range(0, 300, 100):
        writer.write(batch(start))
        assert sum(1 for p in everything(tmp_path / "b") if p.name.endswith("inprogress")) <= 2
    writer.commit(writer.prepare_commit())
    assert sorted(row["id"] for row in read("parquet", tmp_path / "b")) == list(range(300))


def test_nothing_written_shows_nothing(tmp_path: Path) -> None:
    writer = opened(file_sink("parquet", tmp_path / "out"))
    assert writer.prepare_commit() == []
    writer.commit([])
    writer.close()
    assert everything(tmp_path / "out") == []


@pytest.mark.parametrize("prepared", [False, True])
def test_close_without_commit_leaves_nothing(tmp_path: Path, prepared: bool) -> None:
    writer = opened(file_sink("json", tmp_path, "k", roll=300))
    for start in range(0, 100, 10):
        writer.write(batch(start, 10))
    if prepared:
        writer.prepare_commit()
    writer.close()
    assert everything(tmp_path) == []


def test_abort_removes_what_was_prepared_and_keeps_the_rest(tmp_path: Path) -> None:
    writer = opened(file_sink("json", tmp_path))
    writer.write(batch(0, 10))
    first = writer.prepare_commit()
    writer.write(batch(10, 10))
    second = writer.prepare_commit()
    writer.abort(first)
    writer.abort(first)
    other = opened(file_sink("json", tmp_path))
    other.commit(second)
    writer.close()
    assert [row["id"] for row in read("json", tmp_path)] == list(range(10, 20))
    with pytest.raises(TaskFailure, match="neither it nor"):
        other.commit(first)


def test_no_two_writers_share_a_name(tmp_path: Path) -> None:
    places: list[dict[str, Any]] = [
        {"job": job, "subtask": subtask, "attempt": attempt, "uid": uid}
        for job in ("a" * 32, "b" * 32)
        for subtask in (0, 1)
        for attempt in (0, 1)
        for uid in ("x", "y")
    ]
    for place in places:
        writer = opened(file_sink("json", tmp_path), **place)
        writer.write(batch(0, 1))
        writer.commit(writer.prepare_commit())
        writer.close()
    assert len(visible(tmp_path)) == len(places)


def test_a_new_attempt_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    places: list[dict[str, Any]] = [{}, {"subtask": 1}, {"job": "c" * 32}]
    killed = [opened(file_sink("json", tmp_path, "k"), **place) for place in places]
    for writer in killed:
        writer.write(batch(0, 2))
    opened(file_sink("json", tmp_path, "k"), attempt=1).close()
    left = [p.name for p in everything(tmp_path) if p.is_file()]
    assert len(left) == 4
    assert not any("aaaaaaaa" in name and name.split("-")[3] == "0" for name in left)
    for writer in killed:
        writer.close()


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
    writer.prepare_commit()


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


def test_types_that_csv_cannot_hold(tmp_path: Path) -> None:
    writer = opened(file_sink("csv", tmp_path))
    with pytest.raises(TaskFailure, match="the rows cannot be written as csv"):
        writer.write(pa.record_batch({"a": [[1]]}))
    writer.close()
    assert everything(tmp_path) == []


# ---------------------------------------------------------------- JSON text


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
