"""Aim: a job that is restarted in the middle of its files gives each row once, or says which file is another.

Method: jobs with checkpoints; their function fails once behind a checkpoint, having changed the file or not.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from tests.integration.conftest import NewEnvironment
from tests.support.jobs import run

pytestmark = pytest.mark.integration

ROWS = 250_000
SCHEMA = pa.schema([("n", pa.int64()), ("old", pa.int64())])
READERS = {
    "csv": ps.Environment.read_csv,
    "jsonl": ps.Environment.read_json,
    "json": ps.Environment.read_json,
    "parquet": ps.Environment.read_parquet,
    "arrow": ps.Environment.read_arrow,
}


def write(path: Path, old: int) -> None:
    """A file of ROWS rows; its size is the same for both values of ``old``."""
    rows = [{"n": n, "old": old} for n in range(ROWS)]
    if path.suffix == ".csv":
        path.write_text("n,old\n" + "".join(f"{row['n']},{old}\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, separators=(",", ":")) + "\n")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        table = pa.Table.from_pylist(rows, SCHEMA)
        if path.suffix == ".parquet":
            pq.write_table(table, path, row_group_size=5_000, use_dictionary=False)
        else:
            with pa.ipc.new_file(path, SCHEMA) as writer:
                writer.write_table(table, max_chunksize=5_000)


class FailsOnce(ps.ProcessFunction):
    """Passes rows on; behind the first checkpoint with rows it moves a file over another and fails."""

    def __init__(self, source: Path, target: Path) -> None:
        self.source, self.target = source, target
        self.covered = False
        self.rows = 0
        self.rows_at: dict[int, int] = {}

    def snapshot(self, ctx: Any) -> None:
        self.rows_at[ctx.checkpoint_id] = self.rows

    def checkpoint_complete(self, checkpoint_id: int) -> None:
        self.covered = self.covered or self.rows_at.get(checkpoint_id, 0) > 0

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.rows += 1
        if self.covered and self.source.exists():
            os.replace(self.source, self.target)  # noqa: PTH105 - the function is shipped as it is
            raise RuntimeError("on purpose")
        out.emit(n=row.n, old=row.old)


@pytest.fixture
def checkpointed(new_env: NewEnvironment, tmp_path: Path) -> ps.Environment:
    config = {
        "execution.checkpointing.interval": "20ms",
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": 2,
        "restart-strategy.fixed-delay.delay": "0s",
        "execution.batch-rows": 500,
    }
    return new_env(1, config)


def build(env: ps.Environment, path: Path, source: Path, target: Path, out: Path) -> None:
    stream = READERS[path.suffix[1:]](env, path, schema=SCHEMA)
    stream.process(FailsOnce(source, target), schema=SCHEMA).write_json(out)


def written(out: Path) -> list[dict[str, int]]:
    files = [
        path for path in sorted(out.glob("**/*")) if path.is_file() and path.name[0] not in "._"
    ]
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


@pytest.mark.parametrize("suffix", READERS)
def test_every_row_once_over_a_restart(
    checkpointed: ps.Environment, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"data.{suffix}"
    write(path, 1)
    (tmp_path / "marker").touch()
    build(checkpointed, path, tmp_path / "marker", tmp_path / "done", tmp_path / "out")
    run(checkpointed)
    assert (tmp_path / "done").exists(), "the job was to fail once"
    assert sorted(row["n"] for row in written(tmp_path / "out")) == list(range(ROWS))


@pytest.mark.parametrize("suffix", READERS)
def test_a_file_that_was_replaced_meanwhile_ends_the_job(
    checkpointed: ps.Environment, tmp_path: Path, suffix: str
) -> None:
    path, other = tmp_path / f"data.{suffix}", tmp_path / f"other.{suffix}"
    write(path, 1)
    write(other, 2)
    assert path.stat().st_size == other.stat().st_size
    build(checkpointed, path, other, path, tmp_path / "out")
    with pytest.raises(
        ps.JobFailed, match="was replaced or changed while the job read it"
    ) as failed:
        run(checkpointed)
    assert str(path) in str(failed.value)
    assert {row["old"] for row in written(tmp_path / "out")} <= {1}


@pytest.mark.parametrize("suffix", READERS)
def test_a_copy_of_the_file_in_its_place_is_read_on(
    checkpointed: ps.Environment, tmp_path: Path, suffix: str
) -> None:
    path, copy = tmp_path / f"data.{suffix}", tmp_path / f"copy.{suffix}"
    write(path, 1)
    write(copy, 1)
    build(checkpointed, path, copy, path, tmp_path / "out")
    run(checkpointed)
    assert not copy.exists(), "the job was to fail once"
    assert sorted(row["n"] for row in written(tmp_path / "out")) == list(range(ROWS))
