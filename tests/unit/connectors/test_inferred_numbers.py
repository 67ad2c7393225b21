"""Aim: what is read without a schema has the numbers that are in the files, or is refused.

Method: files with one long number each, as CSV, JSON lines and a JSON array.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps

FORMS = ["csv", "lines", "array"]


def schema_of(tmp_path: Path, form: str, values: list[str]) -> pa.Schema:
    path = tmp_path / f"file.{form}"
    if form == "csv":
        path.write_text("\n".join(["n,id", *(f"{value},x" for value in values)]))
    else:
        objects = [f'{{"n": {value}, "id": "12345678901234567890"}}' for value in values]
        text = ",\n".join(objects)
        path.write_text("\n".join(objects) if form == "lines" else f"[{text}]")
    with ps.Environment() as env:
        return (env.read_csv if form == "csv" else env.read_json)(str(path)).schema


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "values",
    [
        ["1", "18446744073709551615"],  # an unsigned hash
        ["0.5", "9007199254740993"],
        ["-9223372036854775809"],
        ["1.5", "1" + "0" * 400],
    ],
)
def test_an_integer_that_would_be_another_one_is_refused(
    tmp_path: Path, form: str, values: list[str]
) -> None:
    with pytest.raises(ps.JobRejected, match=re.escape(values[-1])[:60]) as refused:
        schema_of(tmp_path, form, values)
    if len(values[-1]) < 100:
        assert "give schema=, for example with 'n' as string" in str(refused.value)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["9007199254740993"], pa.int64()),
        (["0.5", "9007199254740992"], pa.float64()),
        (["0.12345678901234567890", "12345678901234567.0"], pa.float64()),
        (["0.5", "100000000000000000000"], pa.float64()),
    ],
)
def test_what_floats_hold_is_taken(
    tmp_path: Path, form: str, values: list[str], expected: pa.DataType
) -> None:
    assert schema_of(tmp_path, form, values).field("n").type == expected


def test_numbers_within_objects_and_lists_count(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text('{"a": {"b": [0.5, 9007199254740993]}}\n')
    with ps.Environment() as env, pytest.raises(ps.JobRejected, match="9007199254740993"):
        env.read_json(str(path))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("whole_first", [True, False])
def test_fractions_of_another_file_count(tmp_path: Path, form: str, whole_first: bool) -> None:
    """Each file alone has a type that loses nothing."""
    directory = tmp_path / "in"
    for name, value in zip("ab" if whole_first else "ba", ["9007199254740993", "1.5"], strict=True):
        (directory / name).mkdir(parents=True)
        schema_of(directory / name, form, [value])
    with ps.Environment() as env, pytest.raises(ps.JobRejected, match="9007199254740993 is no int"):
        (env.read_csv if form == "csv" else env.read_json)(str(directory))


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (pa.array([1.5]), "int64 in .*a.parquet and double in .*b.parquet: it is read as double"),
        (pa.array([1], pa.int8()), None),
    ],
)
def test_files_that_make_floats_of_integers_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, second: pa.Array, told: str | None
) -> None:
    for name, column in (("a", pa.array([1])), ("b", second)):
        pq.write_table(pa.table({"n": column}), tmp_path / f"{name}.parquet")
    with ps.Environment() as env, caplog.at_level(logging.WARNING, "penstock"):
        env.read_parquet(str(tmp_path))
    if told is None:
        assert caplog.messages == []
    else:
        assert re.search(told, "\n".join(caplog.messages))


def test_numbers_beside_text_of_another_file_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.csv").write_text("n\n1\n")
    (tmp_path / "b.csv").write_text("n\nx\n")
    with ps.Environment() as env, caplog.at_level(logging.WARNING, "penstock"):
        assert env.read_csv(str(tmp_path)).schema.field("n").type == pa.string()
    assert re.search(
        "int64 in .*a.csv and string in .*b.csv: it is read as string", "\n".join(caplog.messages)
    )
