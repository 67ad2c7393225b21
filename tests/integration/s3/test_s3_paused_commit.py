"""Aim: a process that is stopped in the middle of a commit to S3, and goes on long after another attempt has taken its
place, shows no row twice. Its copies carry no condition, since servers ignore one (``CopyObject``), and need none:

- a final name says subtask and attempt, and attempts are numbered without repetition, so that one name stands for one
  content: who copies it again changes nothing that can be read;
- what is copied goes when the next attempt has committed it, so that a copy that comes late finds nothing to copy: it
  can neither bring back a name that has been merged into another file since, nor one that was removed;
- nobody commits before HEAD names the checkpoint, and no attempt ever starts from an older one than HEAD names.

Method: a real process on a real server, stopped by SIGSTOP before, between and behind its copies; meanwhile the next
attempt recovers, goes on, and the output is compacted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from penstock.connectors.files import file_sink
from penstock.storage.s3.bucket import S3Bucket
from tests.integration.s3.conftest import BUCKET, settings_of
from tests.support.compactions import merged
from tests.support.file_sinks import batch, opened, prepare
from tests.support.jobs import DEADLINE_S
from tests.support.paused_commit import POINTS
from tests.support.radosgw import RadosGateway

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.fixture
def place(s3_server: RadosGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    settings = settings_of(s3_server.endpoint)
    monkeypatch.setattr("penstock.storage.open_store._s3", lambda: settings)
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture
def zombie(s3_server: RadosGateway, place: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.support.paused_commit", s3_server.endpoint, place]
    process = subprocess.Popen([*command, *POINTS], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def test_a_commit_that_goes_on_late_shows_no_row_twice(
    zombie: subprocess.Popen[str], place: str, s3_server: RadosGateway
) -> None:
    bucket = S3Bucket(BUCKET, settings_of(s3_server.endpoint))
    assert zombie.stdout is not None
    for point in POINTS:
        committables = [one.encode() for one in json.loads(_line(zombie.stdout))]
        _, status = os.waitpid(zombie.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), status
        directory = f"{place}/{point}"
        before = _visible(bucket, directory)
        assert len(before) == {"before": 0, "between": 1, "copied": 3}[point]

        second = opened(file_sink("json", directory), attempt=1)
        second.recover(committables)
        second.write(batch(300))
        second.commit(prepare(second, 2))
        assert _rows(bucket, directory) == list(range(400))
        [done] = merged(directory)
        assert (done.merged, done.into) == (4, 1)
        [kept] = _visible(bucket, directory)

        zombie.send_signal(signal.SIGCONT)
        assert _line(zombie.stdout) == "committed"
        assert _visible(bucket, directory) == [kept]
        assert _rows(bucket, directory) == list(range(400))
    assert zombie.wait(DEADLINE_S) == 0


def _line(output: IO[str]) -> str:
    line = output.readline().rstrip("\n")
    assert line, "the process has ended"
    return line


def _visible(bucket: S3Bucket, directory: str) -> list[str]:
    prefix = directory.removeprefix(f"s3://{BUCKET}/")
    keys = [one.key for one in bucket.below(f"{prefix}/")]
    return [key for key in keys if not key.removeprefix(f"{prefix}/").startswith("_")]


def _rows(bucket: S3Bucket, directory: str) -> list[int]:
    """The ids of all rows that readers of JSON lines see."""
    ids = []
    for key in _visible(bucket, directory):
        found = bucket.find(key)
        assert found is not None
        lines = bucket.read(found, 0, found.size_bytes).splitlines()
        ids += [json.loads(line)["id"] for line in lines]
    return sorted(ids)
