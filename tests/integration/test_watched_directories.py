"""Aim: a watched directory gives each file's rows once over restarts, and its checkpoints do not grow with the
files that are done.

Method: a real cluster and files of one row each; between steps the job fails, its directory is empty for a while,
files are replaced, and its checkpoints are looked at as an operator of the cluster would.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.client.job import JobHandle
from penstock.storage.fsck import check_store
from penstock.storage.head import HEAD_PATH, decode_head
from tests.integration.conftest import NewEnvironment
from tests.support.jobs import await_details, cancel

pytestmark = pytest.mark.integration

FILES = 150
GROWTH_MAX = 1_200
"""Bytes: some digests that are not enough for a file, and a few references to files."""


class FailsAt(ps.ProcessFunction):
    """Passes rows on; fails once where there is a file that says so."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        if self.marker.exists():
            self.marker.unlink(missing_ok=True)
            raise RuntimeError("on purpose")
        out.emit(n=row.n)


def add(directory: Path, numbers: range) -> None:
    for number in numbers:
        hidden = directory / f".{number}"
        hidden.write_text(json.dumps({"n": number}) + "\n")
        hidden.rename(directory / f"{number}.json")


def written(out: Path) -> list[int]:
    files = [path for path in out.glob("**/*.json") if path.name[0] not in "._"]
    return sorted(json.loads(line)["n"] for path in files for line in path.read_text().splitlines())


def await_written(handle: JobHandle, out: Path, count: int) -> None:
    """Waits until so many rows have their final place."""
    await_details(handle, lambda _, state: state == "RUNNING" and len(written(out)) >= count)


def newest_manifest(directory: Path) -> int:
    """Its size in bytes."""
    head = decode_head((directory / HEAD_PATH).read_bytes())
    return (directory / head.retained[-1].manifest_path).stat().st_size


def test_checkpoints_do_not_grow_with_the_files_that_are_done(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    data, out, checkpoints = tmp_path / "in", tmp_path / "out", tmp_path / "checkpoints"
    data.mkdir()
    marker = tmp_path / "marker"
    env = new_env(
        2,
        {
            "execution.checkpointing.interval": "50ms",
            "execution.checkpointing.dir": str(checkpoints),
            "execution.checkpointing.num-retained": 9,  # the newest is read while others follow
            "restart-strategy.type": "fixed-delay",
            "restart-strategy.fixed-delay.attempts": 9,
            "restart-strategy.fixed-delay.delay": "0s",
        },
    )
    stream = env.read_json(data, schema={"n": "int64"}, watch="20ms")
    stream.process(FailsAt(marker), schema={"n": "int64"}).write_json(out)
    handle = env.submit("watch")
    sizes = []
    for step in range(4):
        add(data, range(step * FILES, (step + 1) * FILES))
        await_written(handle, out, (step + 1) * FILES)
        handle.checkpoint()  # nothing is new in it
        sizes.append(newest_manifest(checkpoints / handle.job_id))
    # By name it would be 36,000 bytes more.
    assert max(sizes) < sizes[0] + GROWTH_MAX

    # Nothing is listed for a while; a file is replaced; and the job begins again.
    data.rename(tmp_path / "away")
    data.mkdir()
    handle.checkpoint()
    data.rmdir()
    (tmp_path / "away").rename(data)
    (data / ".7").write_text(json.dumps({"n": -7}) + "\n")
    (data / ".7").rename(data / "7.json")
    marker.touch()
    add(data, range(4 * FILES, 5 * FILES))
    await_written(handle, out, 5 * FILES)
    assert handle.details().summary.restarts >= 1
    handle.checkpoint()
    assert newest_manifest(checkpoints / handle.job_id) < sizes[0] + GROWTH_MAX
    assert written(out) == list(range(5 * FILES))
    assert check_store(str(checkpoints)).is_healthy
    cancel(handle)


def test_who_reads_the_logs_of_a_job_hears_of_files_that_change(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    directory, out = tmp_path / "in", tmp_path / "out"
    directory.mkdir()
    add(directory, range(1))
    env = new_env(parallelism=1, config={"execution.checkpointing.interval": "100ms"})
    env.read_json(directory, schema={"n": "int64"}, watch="50ms").write_json(out)
    handle = env.submit("changing")
    await_written(handle, out, 1)
    with (directory / "0.json").open("a") as file:
        file.write('{"n": 1}\n')
    add(directory, range(2, 3))
    await_written(handle, out, 2)
    await_details(
        handle, lambda *_: any("source.files_changed" in log.text for log in handle.logs())
    )
    cancel(handle)
    assert written(out) == [0, 2]
