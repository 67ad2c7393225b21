"""Aim: a savepoint of a job on real daemons is one directory that holds all it needs, wherever it is moved, and the
job goes on as if there had been none. Method: jobs with state in both backends, small enough to lie in manifests and
large enough for files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from click.testing import CliRunner
from typing_extensions import override

import penstock as ps
from penstock.cli.main import main
from penstock.client.job import JobHandle
from penstock.errors import JobRejected
from penstock.storage.checkpoint_properties import CheckpointKind
from penstock.storage.local_store import LocalStore
from penstock.storage.manifest import decode_manifest, properties_of, references
from penstock.storage.snapshot_files import StoreSnapshotReader
from tests.integration.conftest import NewEnvironment
from tests.support.jobs import DEADLINE_S, await_details

pytestmark = [pytest.mark.integration, pytest.mark.sampled(2)]

KEYS = 20_000
MANY_KEYS = 300_000


def numbers(start: int, count: int) -> pa.RecordBatch:
    keys = [number % KEYS for number in range(start, start + count)]
    return pa.RecordBatch.from_pydict({"k": keys, "n": range(start, start + count)})


def many_keys(start: int, count: int) -> pa.RecordBatch:
    keys = [number % MANY_KEYS * 7919 for number in range(start, start + count)]
    return pa.RecordBatch.from_pydict({"k": keys, "n": range(start, start + count)})


def begin(
    new_env: NewEnvironment, backend: str = "hashmap", path: Path | None = None, **config: object
) -> JobHandle:
    env = new_env(
        config={
            "execution.checkpointing.interval": "1h",
            "state.backend.type": backend,
            **{key.replace("_", "."): value for key, value in config.items()},
        }
    )
    stream = env.generate(numbers, rate=40_000)
    stream.key_by("k").aggregate(total=ps.sum("n")).uid("totals").discard()
    return env.submit("savepoints", from_savepoint=path)


def submit(new_env: NewEnvironment, backend: str = "hashmap", **config: object) -> JobHandle:
    handle = begin(new_env, backend, **config)
    await_details(handle, lambda metrics, _: metrics["totals"]["records_in"] > KEYS)
    return handle


def check_whole(path: Path) -> int:
    """Reads all that a savepoint names; returns the rows in its manifest's segments."""
    store = LocalStore(path)
    manifest = decode_manifest(store.get("manifest"))
    assert properties_of(manifest.properties).kind is CheckpointKind.SAVEPOINT
    reader = StoreSnapshotReader(store)
    rows = 0
    for subtask in manifest.subtasks:
        assert not subtask.inputs
        assert not subtask.outputs
        for operator in subtask.operators:
            for file in operator.keyed.files:
                reader.read(file.handle)
            rows += sum(segment.row_count for segment in operator.keyed.segments)
    for reference in references(manifest):
        assert reference.location.path.startswith("state/")
    files = {one.path for one in store.list("")} - {"manifest", "committed"}
    assert files == {reference.location.path for reference in references(manifest)}
    return rows


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_a_savepoint_is_one_directory_that_may_be_moved(
    new_env: NewEnvironment, tmp_path: Path, backend: str
) -> None:
    handle = submit(new_env, backend)
    first = handle.checkpoint(DEADLINE_S)
    path = Path(handle.savepoint(tmp_path / "kept", timeout=DEADLINE_S))
    assert path.parent == tmp_path / "kept"
    rows = check_whole(path)
    assert backend == "rocksdb" or rows > KEYS
    # It is a checkpoint of the job as well: what that has written has a second name, and is not there twice.
    newest = handle.checkpoints()[0]
    assert newest.id == first + 1
    assert newest.id == decode_manifest(LocalStore(path).get("manifest")).checkpoint_id
    assert all(file.stat().st_nlink > 1 for file in (path / "state").iterdir())
    later = handle.checkpoint(DEADLINE_S)
    assert later > first
    assert handle.savepoint(tmp_path / "kept", timeout=DEADLINE_S) != str(path)
    copied = tmp_path / "copied"
    shutil.copytree(path, copied)
    shutil.rmtree(path)
    assert check_whole(copied) == rows
    handle.cancel()
    with pytest.raises(ps.JobCanceled):
        handle.wait(DEADLINE_S)
    assert check_whole(copied) == rows
    # Whose content has changed on the way, nobody sees before it is read.
    damaged = min((copied / "state").iterdir())
    damaged.write_bytes(bytes(byte ^ 1 for byte in damaged.read_bytes()))
    again = begin(new_env, backend, copied)
    with pytest.raises(ps.JobFailed, match=f"which is damaged.*state/{damaged.name}") as failure:
        again.wait(DEADLINE_S)
    assert "start it again" not in str(failure.value)
    assert not again.details().summary.restorable_from, "penstock list --restorable"


def test_asked_for_twice_under_one_id_it_is_taken_once(
    new_env: NewEnvironment, address: str, tmp_path: Path
) -> None:
    handle = submit(new_env)
    command = ["savepoint", handle.job_id, str(tmp_path), "--operation-id", "mine", "--json"]
    told = [CliRunner().invoke(main, [*command, "--jobmanager", address]) for _ in range(2)]
    assert [one.exit_code for one in told] == [0, 0], told[0].output
    first, second = (json.loads(one.output) for one in told)
    assert first == second
    assert first["job_id"] == handle.job_id
    assert first["operation_id"] == "mine"
    assert Path(first["path"]).name == f"savepoint-{handle.job_id[:8]}-mine"
    check_whole(Path(first["path"]))
    shown = handle.operation("mine")
    assert (shown.kind, shown.status, shown.path) == ("SAVEPOINT", "COMPLETED", first["path"])
    with pytest.raises(ps.errors.JobNotFound, match="other"):
        handle.operation("other")
    assert handle.checkpoint(operation_id="c") == handle.checkpoint(operation_id="c")


def test_what_is_in_the_way_is_named(new_env: NewEnvironment, tmp_path: Path) -> None:
    handle = submit(new_env)
    with pytest.raises(JobRejected, match="savepoint-dir"):
        handle.savepoint()
    (tmp_path / f"savepoint-{handle.job_id[:8]}-mine").mkdir()
    (tmp_path / f"savepoint-{handle.job_id[:8]}-mine" / "notes.txt").write_text("mine")
    with pytest.raises(JobRejected, match=r"not empty: notes\.txt"):
        handle.savepoint(tmp_path, operation_id="mine")
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(ps.StreamError, match="file"):
        handle.savepoint(tmp_path / "file")
    assert handle.status() == "RUNNING"


def test_a_job_without_checkpoints_says_why(new_env: NewEnvironment, tmp_path: Path) -> None:
    handle = submit(new_env, execution_checkpointing_interval="none")
    with pytest.raises(JobRejected, match=r"takes no checkpoints.*execution\.checkpointing"):
        handle.savepoint(tmp_path)
    assert not list(tmp_path.iterdir())


def test_savepoints_are_listed_looked_into_checked_and_disposed_of(
    new_env: NewEnvironment, address: str, tmp_path: Path
) -> None:
    handle = submit(new_env)

    def told(*command: str, status: int = 0) -> Any:
        if command[0] == "dispose":
            command = (*command, "--jobmanager", address)
        result = CliRunner().invoke(main, [*command, "--json"])
        assert result.exit_code == status, result.output
        return json.loads(result.output) if not status else result.output

    handle.checkpoint(DEADLINE_S)
    paths = [handle.savepoint(tmp_path, timeout=DEADLINE_S) for _ in range(2)]
    (tmp_path / "savepoint-half" / "state").mkdir(parents=True)
    (tmp_path / "savepoint-half" / "state" / "file").write_text("half")
    listed = told("savepoints", str(tmp_path))["savepoints"]
    assert [one["path"] for one in listed[:2]] == paths[::-1]
    assert [one["status"] for one in listed] == ["COMPLETE", "COMPLETE", "INCOMPLETE"]
    assert {one["job_id"] for one in listed[:2]} == {handle.job_id}
    states = {
        one["name"]: one for one in told("state", paths[0])["states"] if one["uid"] == "totals"
    }
    [name] = states
    assert states[name]["rows"] == KEYS
    assert states[name]["subtasks"] == [0, 1]
    rows = told("state", paths[0], "totals", name, "--limit", "1000000")["rows"]
    assert sorted(row["key_0"] for row in rows) == list(range(KEYS))
    assert "there is no state" in told("state", paths[0], "totals", "other", status=1)
    checked = CliRunner().invoke(main, ["fsck", str(tmp_path), "--json"])
    problems = {job["job_id"]: job["problems"] for job in json.loads(checked.output)["jobs"]}
    assert [one["path"] for one in problems.pop("savepoint-half")] == ["manifest"]
    assert set(map(len, problems.values())) == {0}
    told("dispose", paths[0])
    assert not Path(paths[0]).exists()
    told("dispose", str(tmp_path / "savepoint-half"))
    assert "no savepoint" in told("dispose", str(tmp_path), status=1)
    directory = Path(handle.checkpoints()[0].path).parents[1]
    assert "still runs" in told("dispose", str(directory), status=1)
    check_whole(Path(paths[1]))
    file = next((Path(paths[1]) / "state").iterdir())
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()
    file.write_bytes(content)
    checked = CliRunner().invoke(main, ["fsck", paths[1], "--json"])
    assert checked.exit_code == 1, checked.output
    handle.checkpoint(DEADLINE_S)


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_a_canonical_one_is_written_whole(
    new_env: NewEnvironment, tmp_path: Path, backend: str
) -> None:
    handle = submit(new_env, backend)
    handle.checkpoint(DEADLINE_S)
    path = Path(handle.savepoint(tmp_path, "canonical", timeout=DEADLINE_S))
    assert check_whole(path) >= KEYS
    assert all(file.stat().st_nlink == 1 for file in (path / "state").iterdir())
    manifest = decode_manifest(LocalStore(path).get("manifest"))
    operators = [one for subtask in manifest.subtasks for one in subtask.operators]
    (name,) = {table.name for one in operators for table in one.keyed.tables}
    shown = CliRunner().invoke(main, ["state", str(path), "totals", name, "--json"])
    assert shown.exit_code == 0, shown.output


@pytest.mark.parametrize(
    ("format", "backend", "parallelism"), [("native", "hashmap", 4), ("canonical", "rocksdb", 3)]
)
def test_each_subtask_of_another_parallelism_reads_its_share(
    new_env: NewEnvironment,
    tmp_path: Path,
    format: Literal["native", "canonical"],
    backend: str,
    parallelism: int,
) -> None:
    config = {"execution.checkpointing.interval": "1h"}

    def started(name: str, env: ps.Environment, path: Path | None = None) -> JobHandle:
        stream = env.generate(many_keys, rate=400_000)
        stream.key_by("k").aggregate(total=ps.sum("n")).uid("totals").discard()
        return env.submit(name, from_savepoint=path)

    first = started("first", new_env(config=config))
    await_details(first, lambda metrics, _: metrics["totals"]["records_in"] > MANY_KEYS)
    path = Path(first.savepoint(tmp_path, format, timeout=DEADLINE_S))
    first.cancel()
    manifest = decode_manifest(LocalStore(path).get("manifest"))
    keyed = [one.keyed for subtask in manifest.subtasks for one in subtask.operators]
    total = sum(segment.size_bytes for one in keyed for segment in one.segments)
    assert total > 2 << 20
    env = new_env(parallelism, config={**config, "state.backend.type": backend})
    handle = started("second", env, path)

    def read() -> list[int]:
        details = handle.details()
        subtasks = [subtask for vertex in details.vertices for subtask in vertex.subtasks]
        return [n for one in subtasks if (n := one.metrics.restored_store_bytes)]

    await_details(handle, lambda _metrics, _state: len(read()) == parallelism)
    bytes_read = read()
    assert sum(bytes_read) >= total
    assert max(bytes_read) <= 1.2 * total / parallelism


class FailsOnce(ps.MapFunction):
    """Raises at its first row, and never again."""

    def __init__(self, failed: Path) -> None:
        self.failed = failed

    @override
    def __call__(self, row: Any) -> Any:
        if not self.failed.exists():
            self.failed.touch()
            raise RuntimeError("the first row")
        return row


def test_who_asks_for_a_savepoint_of_a_job_that_runs_waits_for_those_of_its_tasks_that_begin_again(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    """One of two parts that share nothing has failed and waits for its restart: the job goes on to say RUNNING."""
    failed = tmp_path / "failed"
    env = new_env(
        1,
        config={
            "execution.checkpointing.interval": "1h",
            "restart-strategy.type": "fixed-delay",
            "restart-strategy.fixed-delay.delay": "3s",
        },
    )
    env.generate(numbers, rate=1_000).discard()
    env.generate(numbers, rate=1_000).map(
        FailsOnce(failed), schema={"k": "int64", "n": "int64"}
    ).discard()
    handle = env.submit("two parts")
    await_details(handle, lambda _m, _s: handle.details().summary.restarts)
    assert handle.status() == "RUNNING"
    assert not check_whole(Path(handle.savepoint(tmp_path / "kept", timeout=DEADLINE_S)))
    assert handle.status() == "RUNNING"
    handle.stop(tmp_path / "kept", timeout=DEADLINE_S)
    assert handle.wait(DEADLINE_S).status == "FINISHED"
