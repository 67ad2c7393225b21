"""Aim: whatever holds state, rows, code or secrets is for its own user alone, wherever it has been put.

Method: a real cluster whose directories an administrator has made beforehand, open for all to look into; modes are read
from the file system.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as ps
from penstock.client.client import Client
from penstock.client.job import JobHandle
from tests.support.jobs import await_details, cancel
from tests.support.other_users import open_for_others
from tests.support.processes import DaemonCluster, Site

pytestmark = pytest.mark.integration

SAVEPOINTS = "execution.checkpointing.savepoint-dir"
KEYS = (
    "execution.checkpointing.dir",
    SAVEPOINTS,
    "execution.checkpointing.local-backup.dirs",
    "jobmanager.storage.dir",
    "taskmanager.spill.dir",
)
KEPT = {
    "execution.checkpointing.interval": "200ms",
    "execution.checkpointing.local-backup.enabled": "true",
    "state.storage.fs.memory-threshold": "1",
    "taskmanager.memory.exchange-cache.size": "1kb",
}


@pytest.fixture
def given(own_site: Site) -> dict[str, Path]:
    """Directories for everything that can be elsewhere, and all above them."""
    made = {key: own_site.directory / "given" / key for key in KEYS}
    for directory in made.values():
        directory.mkdir(parents=True)
        open_for_others(directory)
    return made


@pytest.fixture
def cluster(own_site: Site, given: dict[str, Path]) -> Iterator[DaemonCluster]:
    cluster = DaemonCluster(own_site)
    cluster.directory.mkdir(mode=0o755)
    settings = {**{key: str(directory) for key, directory in given.items()}, **KEPT}
    cluster.start(*(part for key, value in settings.items() for part in ("-D", f"{key}={value}")))
    yield cluster
    cluster.stop()
    cluster.assert_nothing_left()


JOB = """
import penstock as ps, pyarrow as pa
from shipped import keyed

def numbers(start, count):
    return pa.record_batch({"value": pa.array(range(start, start + count), pa.int64())})

env = ps.Environment()
rows = env.generate(numbers, rate=5_000, schema={"value": "int64"})
kept = rows.map(keyed, schema={"key": "int64"}).exchange("caching").key_by("key")
kept.aggregate(n=ps.count()).write_parquet("OUT")
env.submit("kept")
"""


def submitted(cluster: DaemonCluster, client: Client, backend: str, out: Path) -> ps.JobHandle:
    code = cluster.site.directory / "shipped.py"
    code.write_text("def keyed(row):\n    return {'key': row.value % 7}\n")
    script = cluster.site.directory / "job.py"
    script.write_text(JOB.replace("OUT", str(out)))
    ran = cluster.site.penstock(
        "run", str(script), "--detach", "--json", "--jobmanager", cluster.jobmanager,
        "--py-files", str(code), "-D", f"state.backend.type={backend}",
    )  # fmt: skip
    assert ran.status == 0, ran.stderr
    return JobHandle(client, ran.json["jobs"][0]["job_id"])


def others_can_reach(directory: Path) -> list[str]:
    """What is in directories that another user can look into, and can itself be looked into or read."""
    found = []
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # the job runs on, or is cleaned up
            mode = stat.S_IMODE(path.lstat().st_mode)
            if mode & 0o077 and not path.is_symlink():
                found.append(f"{path} {mode:04o}")
            if path.is_dir() and mode & 0o011:
                found += others_can_reach(path)
    return found


def modes_below(directory: Path) -> set[int]:
    found = set()
    for place, directories, files in os.walk(directory):
        for name in directories + files:
            with contextlib.suppress(FileNotFoundError):  # jobs that have ended are cleaned up
                found.add(stat.S_IMODE(Path(place, name).stat().st_mode))
    return found


def run_into(cluster: DaemonCluster, client: Client, backend: str, out: Path) -> list[str]:
    """Runs the job until it has kept something of every kind; what others can reach then."""
    handle = submitted(cluster, client, backend, out)
    await_details(handle, lambda _, state: state == "RUNNING" and handle.checkpoints())
    handle.savepoint()
    given = cluster.site.directory / "given"
    empty = [path.name for path in given.iterdir() if not list(path.iterdir())]
    found = others_can_reach(given) + others_can_reach(cluster.directory)
    cancel(handle)
    assert empty == []
    return found


def test_what_is_kept_in_open_directories_is_private(
    cluster: DaemonCluster, given: dict[str, Path], tmp_path: Path
) -> None:
    # There is no secret in it: with one it is private too.
    expected = [f"{cluster.directory / 'penstock.yaml'} 0644"]
    expected += sorted(f"{directory} 0755" for directory in given.values())
    with Client(cluster.jobmanager) as client:
        for backend in ("hashmap", "rocksdb"):
            assert sorted(run_into(cluster, client, backend, tmp_path / backend)) == expected
    stored = modes_below(given["execution.checkpointing.dir"]) | modes_below(given[SAVEPOINTS])
    assert stored == {0o700, 0o600}
    # Rows that sinks have written are the user's to give away.
    written = [path for path in (tmp_path / "hashmap").iterdir() if path.suffix == ".parquet"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o644}
