"""Aim: a prefix on S3 is compacted as a directory is: each row is read once, whatever is killed when.

Method: as of ``tests/unit/connectors/test_compaction.py``, on a real server; an object that is moved while it is read.
"""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from penstock.cli.main import main
from penstock.connectors import file_sink
from penstock.connectors.compacted import replaced_place
from penstock.connectors.compaction import CompactionSupersededError, uncommitted_names
from penstock.storage.s3.bucket import S3Bucket
from tests.integration.s3.conftest import BUCKET, settings_of
from tests.support.compactions import (
    NOW_MS,
    Killed,
    ReadingJob,
    fresh_ids,
    killing_at,
    merged,
    stepping,
    write_files,
)
from tests.support.examples import RUNS_ALL
from tests.support.file_sinks import batch, opened, prepare
from tests.support.radosgw import RadosGateway, s3_options

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

FILES = [(0, 5), (5, 1), (6, 7)]
IDS = list(range(13))


@pytest.fixture
def prefix(s3_server: RadosGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    settings = settings_of(s3_server.endpoint)
    monkeypatch.setattr("penstock.storage.open_store._s3", lambda: settings)
    return tmp_path.name


@pytest.fixture
def bucket(s3_server: RadosGateway) -> S3Bucket:
    return S3Bucket(BUCKET, settings_of(s3_server.endpoint))


def visible(bucket: S3Bucket, prefix: str) -> list[str]:
    keys = [one.key for one in bucket.below(f"{prefix}/")]
    return [key for key in keys if "/_" not in key]


@pytest.mark.skipif(not RUNS_ALL, reason="it takes long: make test-all runs it")
def test_at_every_moment_of_it_each_row_is_read_once(
    prefix: str, bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"s3://{BUCKET}/{prefix}"
    write_files(path, "csv", FILES)
    jobs = []

    def look(number: int) -> None:
        if number % 3:
            return
        assert fresh_ids("csv", path) == IDS
        job = ReadingJob("csv", path)
        job.discover()
        job.read(random.Random(number))
        job.checkpoint()
        jobs.append(job)

    with stepping(monkeypatch, look):
        [done] = merged(path)
    assert (done.merged, done.into) == (3, 1)
    for job in jobs:
        job.restart()
        assert job.finish() == IDS
    assert len(visible(bucket, prefix)) == 1
    assert fresh_ids("csv", f"s3://{BUCKET}/{prefix}/*") == IDS


def test_killed_at_any_moment_it_is_repeated(
    prefix: str, bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(3, 50, 8):
        path = f"s3://{BUCKET}/{prefix}-{step}"
        write_files(path, "json", FILES[:2])
        with stepping(monkeypatch, killing_at(step)):
            try:
                merged(path)
            except Killed:
                pass
            else:
                break
        assert fresh_ids("json", path) == IDS[:6]
        merged(path)
        assert fresh_ids("json", path) == IDS[:6]
        assert len(visible(bucket, f"{prefix}-{step}")) == 1
    assert step > 9


def test_names_are_archived_and_each_row_is_read_once(
    prefix: str, bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"s3://{BUCKET}/{prefix}"
    options = {"keep_ms": 1, "archived_names_min": 3}
    job = ReadingJob("csv", path, watches=True)
    for number in range(3):
        write_files(path, "csv", [(3 * number + place, 1) for place in range(3)])
        assert job.finish() == list(range(3 * number + 3))
        job.checkpoint()
        with stepping(monkeypatch, killing_at(4 + 3 * number)), suppress(Killed):
            merged(path, now_ms=NOW_MS + 10 * number, **options)
        assert fresh_ids("csv", path) == list(range(3 * number + 3))
    for later in (100, 200):
        merged(path, now_ms=NOW_MS + later, **options)
    job.restart()
    assert job.finish() == list(range(9))
    assert fresh_ids("csv", path) == list(range(9))
    hidden = [one.key for one in bucket.below(f"{prefix}/_compacted/")]
    assert len([key for key in hidden if key.endswith(".names")]) == 1
    assert not [key for key in hidden if key.endswith((".new", ".replaced"))]


def test_of_two_at_once_the_first_is_refused(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"s3://{BUCKET}/{prefix}"
    write_files(path, "csv", FILES)
    with (
        stepping(monkeypatch, lambda number: merged(path) if number == 2 else None),
        pytest.raises(CompactionSupersededError),
    ):
        merged(path)
    assert fresh_ids("csv", path) == IDS


def test_an_object_that_is_moved_while_it_is_read_is_read_on(prefix: str) -> None:
    path = f"s3://{BUCKET}/{prefix}"
    writer = opened(file_sink("csv", path))
    for start in (0, 200_000):
        writer.write(pa.record_batch([range(start, start + 200_000), ["x"] * 200_000], ["id", "k"]))
        writer.commit(prepare(writer))
    job = ReadingJob("csv", path)
    job.discover()
    chance = random.Random(0)
    job.read(chance, reads=1, max_rows=1_000)
    merged(path)
    while job._left:
        job.read(chance, max_rows=8_192)
    assert sorted(job.ids) == list(range(400_000))


def test_what_may_still_be_committed_is_not_touched(prefix: str, bucket: S3Bucket) -> None:
    path = f"s3://{BUCKET}/{prefix}"
    writer = opened(file_sink("json", path, "k"))
    writer.write(batch())
    held = writer.hold(7, committables := prepare(writer))
    writer.keep_held(7, committables)
    writer.commit(committables)
    writer.write(batch(100))
    writer.commit(prepare(writer))
    assert len(uncommitted_names(path)) == len(uncommitted_names(f"{path}/k=x%20y")) == 3
    assert merged(path) == []
    writer.let_go(7, committables)
    assert sum(one.merged for one in merged(path)) == 6
    for recovering in ({"job": "b" * 32}, {"attempt": 1}):
        opened(file_sink("json", path, "k"), **recovering).recover(
            held if "job" in recovering else committables
        )
    assert len(visible(bucket, prefix)) == 3
    # A savepoint that comes only now takes it from where it is.
    writer.keep_held(7, committables)
    opened(file_sink("json", path, "k"), job="b" * 32).recover(held)
    assert len(visible(bucket, prefix)) == 3
    assert not uncommitted_names(path)


def test_the_command(
    prefix: str,
    bucket: S3Bucket,
    s3_server: RadosGateway,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = f"s3://{BUCKET}/{prefix}"
    write_files(path, "parquet", FILES, partition_by="k")
    config = tmp_path / "penstock.yaml"
    options: dict[str, Any] = s3_options(s3_server.endpoint)
    config.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in options.items()))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["compact", path, "--json", "--keep", "0s"])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.output)
    assert [one["into"] for one in shown["directories"]] == [1, 1]
    keys = [one.key for one in bucket.below(f"{prefix}/")]
    assert len(keys) == 4  # a file and a manifest in each
    assert not [key for key in keys if key == replaced_place(key)]
    assert fresh_ids("parquet", path) == IDS
    result = CliRunner().invoke(main, ["compact", f"{path}x"])
    assert (result.exit_code, result.stderr) == (1, f"penstock: {path}x/: nothing is there\n")
