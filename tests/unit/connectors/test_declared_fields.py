"""Aim: a misspelt column, or field of a declared struct, is not null in every row without a word.

Method: one nested row in files of each format, read with declared schemas; the warnings are looked at.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

import penstock as ps

ROW = {"p": {"amount": 1, "q": {"n": 2}}, "l": [{"amount": 3}]}
READERS = {
    "parquet": ps.Environment.read_parquet,
    "arrow": ps.Environment.read_arrow,
    "json": ps.Environment.read_json,
}


def write(directory: Path, format: str) -> None:
    path = directory / f"a.{format}"
    if format == "json":
        path.write_text(json.dumps(ROW) + "\n")
    elif format == "parquet":
        pa.parquet.write_table(pa.Table.from_pylist([ROW]), path)
    else:
        pa.feather.write_feather(pa.Table.from_pylist([ROW]), path, compression="uncompressed")


def declared(text: str) -> pa.Schema:
    inner = pa.struct([(text.rsplit(".", 1)[1], pa.int64())])
    if text.startswith("p.q."):
        return pa.schema([("p", pa.struct([("q", inner)]))])
    return pa.schema([(text[0], inner if text[0] == "p" else pa.list_(inner))])


@pytest.mark.parametrize("format", READERS)
@pytest.mark.parametrize(
    ("name", "warned"),
    [
        ("p.amuont", True),
        ("l.amuont", True),
        ("p.q.m", True),
        ("p.amount", False),
        ("p.q.n", False),
    ],
)
def test_a_field_that_no_file_has_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, format: str, name: str, warned: bool
) -> None:
    write(tmp_path, format)
    READERS[format](ps.Environment(), str(tmp_path), schema=declared(name))
    assert (f'has the field "{name}"' in "\n".join(caplog.messages)) is warned
    assert ('did you mean "amount"' in "\n".join(caplog.messages)) is name.endswith("amuont")


def test_a_column_that_no_object_has_is_told_with_the_names_that_they_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Names that are too far apart to be one misspelt, and still the one stands in the other's place."""
    (tmp_path / "a.json").write_text('{"id": 1, "qty": 3}\n')
    env = ps.Environment()
    may_be_null = pa.schema([("id", pa.int64()), ("amount", pa.int64())])
    env.read_json(str(tmp_path), schema=may_be_null)
    told = 'the column "amount": it is null until one does; they have qty, not declared'
    assert told in "\n".join(caplog.messages)
    never_null = pa.schema([("id", pa.int64()), pa.field("amount", pa.int64(), nullable=False)])
    with pytest.raises(
        ps.JobRejected, match='"amount", which is declared as never null; they have qty'
    ):
        env.read_json(str(tmp_path), schema=never_null)
    env.read_json(str(tmp_path), schema=never_null, optional=["amount"])


def test_a_table_has_no_null_where_its_schema_has_none() -> None:
    schema = pa.schema([("n", pa.int64()), pa.field("a", pa.int64(), nullable=False)])
    batches = [
        pa.record_batch([[None, 2], values], schema=schema) for values in ([1, 2], [3, None])
    ]
    env = ps.Environment()
    env.from_arrow(batches[0])
    with pytest.raises(ps.JobRejected, match="row 3: a null in column 'a', which is declared as n"):
        env.from_arrow(pa.Table.from_batches(batches))
