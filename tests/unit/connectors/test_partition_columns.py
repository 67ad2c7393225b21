"""Aim: what names of directories say becomes columns without a value lost, or somebody is told.

Method: directories of small files, read without a schema.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow as pa
import pytest

import penstock as ps


def write(directory: Path, *names: str, text: str = "n\n1\n") -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def schema_of(directory: Path, **options: object) -> pa.Schema:
    with ps.Environment() as env:
        return env.read_csv(str(directory), **options).schema  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["01", "12"], pa.int32()),
        (["-1", "3000000000"], pa.int64()),
        (["007", "7"], pa.string()),  # two directories that somebody keeps apart
        (["--5", "1"], pa.string()),
        (["\u0663", "1"], pa.string()),  # a digit, but not one of ASCII
        (["-9223372036854775808", "9223372036854775807"], pa.int64()),
        (["9223372036854775808"], pa.string()),
    ],
)
def test_texts_become_integers_where_they_stay_apart(
    tmp_path: Path, values: list[str], expected: pa.DataType
) -> None:
    write(tmp_path, *(f"p={value}/a.csv" for value in values))
    assert schema_of(tmp_path).field("p").type == expected


def test_a_file_beside_the_directories_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "p=1/a.csv", "b.csv")
    with pytest.raises(ps.JobRejected, match=r"b.csv: has no column \"p\", .* p=\.\.\.; "):
        schema_of(tmp_path)
    assert schema_of(tmp_path, optional=["p"]).names == ["n", "p"]


def test_directories_that_win_over_a_column_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "n=7/a.csv")
    with caplog.at_level(logging.WARNING, "penstock"):
        assert schema_of(tmp_path).names == ["n"]
    (told,) = caplog.messages
    assert told.startswith('column "n" is in the files and in the names of their directories')
