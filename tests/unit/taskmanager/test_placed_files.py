"""Aim: Spark is given a file as it is where it reads the same out of it as we do, and no other.

Method: files as pyarrow writes them; the tests with real Spark read those that it is given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import TaskFailure
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_to_bytes
from taskmanager.operators.placed_files import place_files
from taskmanager.spark.stage_files import StageInputFiles

N = pa.schema([("n", pa.int64())])


def placed(
    path: Path,
    schema: pa.Schema,
    beside: Path,
    seen_below: Path | None = None,
    *,
    may_be_empty: bool = False,
) -> list[str]:
    """The files that a stage is given."""
    spec = graph_pb2.FileSource(
        format="parquet",
        path=str(path),
        columns=schema.names,
        schema=schema_to_bytes(schema),
        may_be_empty=may_be_empty,
    )
    given = StageInputFiles(beside, schema, "tested")
    place_files(spec, given, seen_below)
    return given.files


@pytest.mark.parametrize(
    ("kind", "value", "options"),
    [
        (pa.uint64(), 2**64 - 1, {}),
        (pa.large_string(), "x", {"compression": "gzip"}),
        (pa.timestamp("ms", "Europe/Berlin"), 1, {"compression": "none"}),
        (pa.decimal128(38, 10), 1, {"compression": "zstd"}),
        (pa.list_(pa.struct([("a", pa.uint8())])), [{"a": 1}], {}),
        (pa.int64(), 1, {"use_dictionary": False, "column_encoding": "DELTA_BINARY_PACKED"}),
    ],
)
def test_a_file_that_is_read_alike_is_given_as_it_is(
    tmp_path: Path, kind: pa.DataType, value: Any, options: dict[str, Any]
) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"v": pa.array([value, None], kind)}), path, **options)
    assert placed(path, pa.schema([("v", kind)]), tmp_path / "beside") == [str(path)]


def test_lists_that_are_never_null_may_be_empty(tmp_path: Path) -> None:
    """Where the file says that there is no null; in its statistics an empty list is one."""
    never_null = pa.schema([pa.field("v", pa.list_(pa.int64()), nullable=False)])
    rows = pa.table({"v": [[], [1]]}, schema=never_null)
    pq.write_table(rows, tmp_path / "said.parquet")
    pq.write_table(
        rows.cast(pa.schema([never_null.field(0).with_nullable(True)])), tmp_path / "not.parquet"
    )
    for name, is_given in (("said.parquet", True), ("not.parquet", False)):
        path = tmp_path / name
        assert (placed(path, never_null, tmp_path / "beside") == [str(path)]) == is_given


@pytest.mark.parametrize(
    ("kind", "value", "options"),
    [
        (pa.timestamp("ns"), 1000, {}),
        (pa.float16(), 1.5, {}),
        (pa.time64("us"), 1, {}),
        (pa.duration("ms"), 1, {}),
        (pa.dictionary(pa.int32(), pa.string()), "x", {}),
        (pa.list_(pa.timestamp("ns")), [1000], {}),
        (pa.int64(), 1, {"compression": "brotli"}),
        (pa.float64(), 1.0, {"use_dictionary": False, "column_encoding": "BYTE_STREAM_SPLIT"}),
    ],
)
def test_a_file_that_is_not_is_written_anew(
    tmp_path: Path, kind: pa.DataType, value: Any, options: dict[str, Any]
) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"v": pa.array([value, None], kind)}), path, **options)
    [written] = placed(path, pa.schema([("v", kind)]), tmp_path / "beside")
    assert Path(written).parent == tmp_path / "beside"
    assert pq.read_metadata(written).num_rows == 2


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (pa.int64(), pa.array([1, 2], pa.int32())),
        (pa.list_(pa.int8()), pa.array([[1], []], pa.list_(pa.int64()))),
    ],
)
def test_what_is_written_anew_may_be_declared_as_never_null(
    tmp_path: Path, kind: pa.DataType, given: pa.Array
) -> None:
    """And Parquet calls the items of lists otherwise than Arrow does."""
    pq.write_table(pa.table({"v": given}), tmp_path / "in.parquet")
    for nullable in (True, False):
        schema = pa.schema([pa.field("v", kind, nullable=nullable)])
        [written] = placed(tmp_path / "in.parquet", schema, tmp_path / f"beside-{nullable}")
        assert pq.read_table(written)["v"].to_pylist() == given.to_pylist()


def test_a_file_of_another_calendar_is_written_anew(tmp_path: Path) -> None:
    """To Spark its days before 1582-10-15 are others than to us."""
    path = tmp_path / "in.parquet"
    old = pa.schema(N, metadata={"org.apache.spark.legacyDateTime": ""})
    pq.write_table(pa.table({"n": [1]}, schema=old), path)
    [written] = placed(path, N, tmp_path / "beside")
    assert Path(written).parent == tmp_path / "beside"


def test_each_file_is_looked_at_for_itself(tmp_path: Path) -> None:
    """Other types, names that are one to Spark, values of directories, and files that Spark elsewhere does not see."""
    directory = tmp_path / "in"
    (directory / "n=5").mkdir(parents=True)
    pq.write_table(pa.table({"n": [1], "more": ["x"]}), directory / "same.parquet")
    pq.write_table(pa.table({"n": pa.array([2], pa.int32())}), directory / "narrow.parquet")
    pq.write_table(pa.table({"n": [3], "N": [0]}), directory / "case.parquet")
    pq.write_table(pa.table({"n": [4]}), directory / "n=5" / "of_directory.parquet")
    first, second = sorted(placed(directory, N, tmp_path / "beside"))
    assert Path(first).parent == tmp_path / "beside"
    assert second == str(directory / "same.parquet")
    assert sorted(pq.ParquetFile(first).read()["n"].to_pylist()) == [2, 3, 5]

    same = directory / "same.parquet"
    assert placed(same, N, tmp_path / "beside", seen_below=directory) == [str(same)]
    assert placed(same, N, tmp_path / "beside", seen_below=tmp_path / "beside") != [str(same)]


def test_what_is_no_input_is_refused_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(TaskFailure, match="no such file or directory on this TaskManager"):
        placed(tmp_path / "gone", N, tmp_path / "beside")
    (tmp_path / "in").mkdir()
    with pytest.raises(TaskFailure, match="there are no files to read"):
        placed(tmp_path / "in", N, tmp_path / "beside")
    [empty] = placed(tmp_path / "in", N, tmp_path / "beside", may_be_empty=True)
    assert pq.read_metadata(empty).num_rows == 0  # Spark wants a file
    (tmp_path / "in" / "a.parquet").write_bytes(b"no Parquet")
    with pytest.raises(TaskFailure, match=r"a\.parquet: not a readable Parquet file"):
        placed(tmp_path / "in", N, tmp_path / "beside")
    pq.write_table(pa.table({"m": [1]}), tmp_path / "in" / "a.parquet")
    with pytest.raises(TaskFailure, match='has no column "n"'):
        placed(tmp_path / "in", N, tmp_path / "beside")


def test_columns_go_by_their_names(tmp_path: Path) -> None:
    given = StageInputFiles(tmp_path, pa.schema({"a": pa.int64(), "b": pa.int64()}), "tested")
    given.add(pa.record_batch({"b": [2], "a": [1]}))
    assert given.take().to_pylist() == [{"a": 1, "b": 2}]


def test_a_column_with_a_dot_in_its_name_is_looked_at(tmp_path: Path) -> None:
    """It was taken for a part of a struct: Spark was given a codec that it does not know."""
    path, schema = tmp_path / "in.parquet", pa.schema([("a.b", pa.int64())])
    pq.write_table(pa.table({"a.b": [1, 2]}), path, compression="brotli")
    [written] = placed(path, schema, tmp_path / "beside")
    assert Path(written).parent == tmp_path / "beside"
    assert pq.read_table(written).to_pylist() == [{"a.b": 1}, {"a.b": 2}]
