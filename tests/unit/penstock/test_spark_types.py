"""Aim: what is carried to Spark comes back as it was, at any depth, and what cannot be is refused before. Method: there and back."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock import col
from penstock.errors import JobRejected, TaskFailure
from penstock.rows.spark_types import carried_schema, converted
from taskmanager.spark.stage_files import has_other_calendar, written_output

UUIDS = [b"0123456789abcdef", None, b"\0" * 16]
NESTED = pa.array(
    [{"m": [(1, UUIDS), (2, None)], "f": [[u, u] for u in UUIDS if u]}, None] * 3,
    pa.struct(
        [
            ("m", pa.map_(pa.int16(), pa.large_list(pa.binary(16)))),
            pa.field("f", pa.list_(pa.list_(pa.binary(16), 2)), nullable=False),
        ]
    ),
)
OF_UUIDS = pa.struct(
    [
        ("m", pa.map_(pa.int16(), pa.large_list(pa.uuid()))),
        pa.field("f", pa.list_(pa.list_(pa.uuid(), 2)), nullable=False),
    ]
)


def test_extension_types_within_others_come_back() -> None:
    """Arrow casts none of them: a stage failed for a struct with a UUID when its rows were there."""
    column = NESTED.view(OF_UUIDS)
    chunks = [column.slice(0, 2), column.slice(2, 3), column.slice(5, 0)]
    table = pa.table(
        {"x": pa.chunked_array(chunks), "u": pa.array([*UUIDS, *UUIDS[:2]], pa.uuid())}
    )
    there = converted(table, carried_schema(table.schema), "there")
    assert there.schema.field("u").type == pa.binary()
    back = converted(there, table.schema, "back")
    back.validate(full=True)
    assert back.to_pylist() == table.to_pylist()


def test_lists_of_one_size_come_back_where_all_are_null() -> None:
    items = pa.Array.from_buffers(pa.float32(), 0, [None, None])
    nulls = pa.array([None] * 5, pa.list_(pa.float32()))
    bare = pa.Array.from_buffers(nulls.type, 5, nulls.buffers()[:2], children=[items])
    schema = pa.schema([("x", pa.list_(pa.float32(), 2))])
    assert converted(pa.table({"x": bare}), schema, "back")["x"].to_pylist() == [None] * 5
    with pytest.raises(TaskFailure, match=r"column 'x'.*another size"):
        converted(pa.table({"x": pa.array([[1.0]], nulls.type)}), schema, "back")


@pytest.mark.parametrize("kind", [pa.struct([]), pa.struct([("a", pa.int8()), ("a", pa.int8())])])
def test_structs_that_spark_has_not_are_refused(kind: pa.DataType) -> None:
    env = ps.Environment()
    env.set_runtime_mode("batch")
    rows = env.from_arrow(pa.table({"n": [1], "l": pa.array([None], pa.list_(kind))}))
    with pytest.raises(
        JobRejected, match=r"column 'l'.*no struct without fields, and none with two"
    ):
        rows.spark(lambda frame: frame, schema={"n": "int64"})


def test_files_of_the_calendar_before_1582_are_known(tmp_path: Path) -> None:
    """Spark writes them with ``spark.sql.parquet.datetimeRebaseModeInWrite``; Arrow reads other days out of them."""
    table = pa.table({"n": [1]}).replace_schema_metadata({"org.apache.spark.legacyDateTime": ""})
    (tmp_path / "_SUCCESS").touch()
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
    assert [one.rows for one in written_output(tmp_path)] == [1]
    pq.write_table(table, tmp_path / "b.parquet")
    assert has_other_calendar(pq.read_metadata(tmp_path / "b.parquet"))
    with pytest.raises(TaskFailure, match="datetimeRebaseModeInWrite = LEGACY"):
        written_output(tmp_path)


def test_a_null_beside_an_extension_type_within_another_is_refused_as_it_should() -> None:
    """Arrow computes nothing of these, and said so in its own words, without the expression."""
    schema = pa.schema([("x", OF_UUIDS)])
    with pytest.raises(ps.ExpressionError, match="cannot compute coalesce"):
        col("x").fill_null(None).type(schema)
