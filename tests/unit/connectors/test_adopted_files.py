"""Aim: files that another program has written for a sink are its output like any other: shown by a commit, gone without one.

Method: real directories; attempts are dropped where they stand, as by a kill.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.connectors import file_sink
from penstock.connectors.streams import discard_sink
from penstock.errors import InvariantViolation
from taskmanager.connectors.hidden_files import foreign_directory, output_tag, sweep_hidden_files
from tests.support.file_sinks import context, everything, finish, opened, read, visible

TAG = output_tag(context().job_id, "out")


def written(directory: Path, attempt: int = 0) -> list[str]:
    """What another program leaves for an attempt, and what it has not finished."""
    place = foreign_directory(directory, TAG, 0, attempt)
    place.mkdir(parents=True)
    (place / "_temporary").mkdir()
    (place / "_temporary" / "half.parquet").write_bytes(b"PAR1")
    for number in range(2):
        pq.write_table(pa.table({"n": [number]}), place / f"{number}.parquet")
    return [str(place / f"{number}.parquet") for number in range(2)]


def test_they_show_when_they_are_committed(tmp_path: Path) -> None:
    writer = opened(file_sink("parquet", tmp_path))
    writer.adopt(written(tmp_path))
    assert writer.has_unprepared
    committables = writer.prepare_commit(0)
    finish(writer)
    assert visible(tmp_path) == []
    writer.commit(committables)
    writer.commit(committables)  # may be repeated
    assert sorted(row["n"] for row in read("parquet", tmp_path)) == [0, 1]
    writer.close()
    assert len(visible(tmp_path)) == 2


@pytest.mark.parametrize("is_prepared", [False, True])
def test_they_go_where_nobody_commits_them(tmp_path: Path, is_prepared: bool) -> None:
    writer = opened(file_sink("parquet", tmp_path))
    writer.adopt(written(tmp_path))
    if is_prepared:
        writer.abort(writer.prepare_commit(0))
    writer.close()
    sweep_hidden_files(tmp_path, TAG)
    assert everything(tmp_path) == []


def test_the_next_attempt_and_a_sweep_remove_what_a_killed_one_has_left(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = opened(file_sink("parquet", out))
    taken, left = written(out)
    first.adopt([taken])
    foreign = foreign_directory(out, output_tag(context("b" * 32).job_id, "out"), 0, 0)
    foreign.mkdir()
    second = opened(file_sink("parquet", out), attempt=1)
    assert Path(left).exists()
    second.recover([])
    assert everything(out) == [foreign]  # another job's
    later = written(out, attempt=1)
    assert sweep_hidden_files(out, TAG) == 1
    assert not Path(later[0]).exists()
    assert everything(out) == [foreign]


def test_what_writes_no_files_takes_none(tmp_path: Path) -> None:
    with pytest.raises(InvariantViolation, match="DiscardWriter is given files"):
        opened(discard_sink()).adopt(written(tmp_path))
