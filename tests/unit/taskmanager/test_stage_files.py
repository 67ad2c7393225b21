"""Aim: what cannot be written for Spark says which column or which file, and a value that Spark has not is not tried again.

Method: files of a stage by themselves; a directory that cannot be made stands for a disk that is full.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import TaskFailure, Unrecoverable
from taskmanager.spark.stage_files import StageInputFiles, write_index

TIMES = pa.schema([("t", pa.timestamp("ns", "UTC"))])


def given_times(directory: Path, nanoseconds: int) -> StageInputFiles:
    given = StageInputFiles(directory, TIMES, "operator 'best', input 1")
    times = pa.array([None, nanoseconds], pa.int64()).cast(TIMES.field("t").type)
    given.add(pa.record_batch([times], schema=TIMES))
    return given


def test_a_nanosecond_that_is_no_whole_microsecond_is_refused_for_good(tmp_path: Path) -> None:
    given = given_times(tmp_path, 1_001)
    with pytest.raises(Unrecoverable, match=r"operator 'best', input 1: column 't'.*lose data"):
        given.write(given.take())
    whole = given_times(tmp_path, 2_000)
    whole.write(whole.take())
    assert pq.read_table(whole.files[0])["t"].cast(pa.int64()).to_pylist() == [None, 2]


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    given = given_times(tmp_path / "file", 0)
    with pytest.raises(TaskFailure, match=r"file/0\.parquet cannot be written: "):
        given.write(given.take())
    with pytest.raises(TaskFailure, match=r"file/\.index\.json cannot be written: "):
        write_index(tmp_path / "file", [])
