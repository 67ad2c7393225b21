"""Aim: a job that is restarted in the middle of its files gives each row once, or says which file is another.

Method: jobs with checkpoints; their function fails, or kills its slot, once behind a checkpoint, having
changed the file or not. What was read is numbered, so the oracle needs no reader.
"""

from __future__ import annotations

import bz2
import gzip
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from tests.integration.conftest import NewEnvironment
from tests.support.jobs import run

pytestmark = [pytest.mark.integration, pytest.mark.sampled(5)]

ROWS = 250_000
SCHEMA = pa.schema([("n", pa.int64()), ("old", pa.int64())])
READERS = {
    "csv": ps.Environment.read_csv,
    "jsonl": ps.Environment.read_json,
    "json": ps.Environment.read_json,
    "parquet": ps.Environment.read_parquet,
    "arrow": ps.Environment.read_arrow,
}


def beginning_with(suffix: str) -> list[str]:
    """All kinds of files; CI takes the first."""
    kinds = list(READERS)
    first = kinds.index(suffix)
    return kinds[first:] + kinds[:first]


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

    def count(self) -> None:
        """Takes its time until then: no machine is at the end of the file before."""
        self.rows += 1
        if self.rows % 500 == 0 and not self.covered and self.source.exists():
            time.sleep(0.02)

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.count()
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


@pytest.mark.parametrize("suffix", beginning_with("jsonl"))
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


@pytest.mark.parametrize("suffix", beginning_with("parquet"))
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


# ---------------------------------------------------------------- files in parts, at parallelism 2

PARTS = {".csv", ".jsonl", ".parquet", ".arrow"}
PACKED = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "zst": lambda data: pa.compress(data, "zstd", asbytes=True),
}
LARGE_ROWS = 400_000
TEXT = 'said ""so"",\n' * 14
"""Makes files of this many rows larger than 64 MB; CSV has it in quotes."""


def write_large(path: Path, old: int) -> None:
    """A file that is read in several parts (but Arrow); its size is the same for both values of ``old``."""
    numbers = range(LARGE_ROWS)
    if path.suffix == ".csv":
        lines = (f'{n},{old},"{TEXT}"\n' for n in numbers)
        path.write_text("n,old,text\n" + "".join(lines))
        assert path.stat().st_size > 64 << 20
    elif path.suffix == ".jsonl":
        path.write_text(
            "".join(f'{{"n":{n},"old":{old},"text":{json.dumps(TEXT)}}}\n' for n in numbers)
        )
        assert path.stat().st_size > 64 << 20
    else:
        columns = {"n": pa.array(numbers, pa.int64()), "old": pa.repeat(old, LARGE_ROWS)}
        table = pa.table({**columns, "text": pa.repeat(TEXT, LARGE_ROWS)})
        if path.suffix == ".parquet":
            pq.write_table(
                table, path, row_group_size=20_000, use_dictionary=False, compression="none"
            )
        else:
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=5_000)


class KilledOnce(FailsOnce):
    """As ``FailsOnce``; its process is killed, by whichever subtask is first."""

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.count()
        if self.covered and self.source.exists():
            try:
                os.replace(self.source, self.target)  # noqa: PTH105
            except FileNotFoundError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        out.emit(n=row.n, old=row.old)


def kill_in_the_middle(
    new_env: NewEnvironment, tmp_path: Path, path: Path, source: Path, target: Path
) -> None:
    """Runs a job over a file that loses a slot behind a checkpoint with rows of it."""
    config = {
        "execution.checkpointing.interval": "50ms",
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": 2,
        "restart-strategy.fixed-delay.delay": "0s",
    }
    env = new_env(2, config)
    kind = next(s[1:] for s in path.suffixes if s[1:] in READERS)
    rows = READERS[kind](env, path, schema=SCHEMA)
    rows.process(KilledOnce(source, target), schema=SCHEMA).write_parquet(tmp_path / "out")
    env.submit("killed").wait(120.0)


def numbers_written(out: Path) -> list[int]:
    return sorted(pq.read_table(out).column("n").to_pylist())


@pytest.mark.parametrize("suffix", sorted(PARTS))
def test_every_row_once_where_a_slot_is_killed_inside_a_large_file(
    new_env: NewEnvironment, tmp_path: Path, suffix: str
) -> None:
    path, marker = tmp_path / f"data{suffix}", tmp_path / "marker"
    write_large(path, 1)
    marker.touch()
    kill_in_the_middle(new_env, tmp_path, path, marker, tmp_path / "done")
    assert not marker.exists(), "a slot was to be killed"
    assert numbers_written(tmp_path / "out") == list(range(LARGE_ROWS))


@pytest.mark.parametrize("suffix", sorted(PARTS))
def test_a_large_file_that_is_replaced_as_a_slot_is_killed_ends_the_job(
    new_env: NewEnvironment, tmp_path: Path, suffix: str
) -> None:
    path, other = tmp_path / f"data{suffix}", tmp_path / f"other{suffix}"
    write_large(path, 1)
    write_large(other, 2)
    assert path.stat().st_size == other.stat().st_size
    with pytest.raises(ps.JobFailed, match="was replaced or changed while the job read it"):
        kill_in_the_middle(new_env, tmp_path, path, other, path)
    files = (tmp_path / "out").glob("*.parquet")
    assert {n for p in files for n in pq.read_table(p).column("old").to_pylist()} <= {1}


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_every_row_once_where_a_slot_is_killed_inside_a_compressed_file(
    new_env: NewEnvironment, tmp_path: Path, kind: str, packing: str
) -> None:
    plain, marker = tmp_path / f"plain.{kind}", tmp_path / "marker"
    write(plain, 1)
    path = tmp_path / f"data.{kind}.{packing}"
    path.write_bytes(PACKED[packing](plain.read_bytes()))
    marker.touch()
    kill_in_the_middle(new_env, tmp_path, path, marker, tmp_path / "done")
    assert not marker.exists(), "a slot was to be killed"
    assert numbers_written(tmp_path / "out") == list(range(ROWS))
