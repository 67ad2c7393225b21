"""Aim: fsck finds every damage, calls nothing damaged that is not, and deletes only what it may.

Method: a store written by the real writers, damaged in one way per test; the command in this process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import penstock as ps
from penstock.cli.main import main
from penstock.errors import ConfigurationError, StoreNotFound
from penstock.pb import checkpoint_pb2 as pb
from penstock.storage.blobs import Blob
from penstock.storage.fsck import check_store, delete_orphans
from penstock.storage.fsck_report import Damage, FsckReport, JobReport
from penstock.storage.head import HeadStore
from penstock.storage.local_store import LocalStore
from penstock.storage.manifest import encode_manifest, manifest_path
from penstock.storage.snapshot_files import PackedSnapshotWriter, snapshot_file_name

JOB = "0123456789abcdef0123456789abcdef"


class Job:
    """A job with two subtasks, whose checkpoints share the files of the ones before."""

    def __init__(self, root: Path, job_id: str = JOB) -> None:
        self.directory = root / job_id
        self.store = LocalStore(self.directory)
        self.heads = HeadStore(self.store)
        self.head = self.heads.claim(job_id, 1)
        self.files: list[list[pb.StateFile]] = [[], []]
        self.unique = 0

    def upload(self, id_: int, subtask: int) -> pb.StateFile:
        self.unique += 1
        name = snapshot_file_name(id_, "v1", subtask, 0, f"u{self.unique}")
        blobs = [Blob("run", lambda: (b"%d-%d" % (id_, subtask) * 50,)), Blob("x", lambda: (b"x",))]
        handles = PackedSnapshotWriter(self.store, name, 10).write(blobs)
        return pb.StateFile(name=f"run-{id_}", shared=True, handle=handles["run"])

    def checkpoint(self, id_: int, retained_max: int = 2) -> None:
        manifest = pb.CheckpointManifest(job_id=self.head.job_id, checkpoint_id=id_, leader_epoch=1)
        for subtask, files in enumerate(self.files):
            files.append(self.upload(id_, subtask))
            keyed = pb.KeyedStateSnapshot(
                instance=f"i{subtask}",
                files=files,
                tables=[pb.StateTable(name="t")],
                segments=[
                    pb.StateSegment(file=file.name, size_bytes=file.handle.size_bytes)
                    for file in files
                ],
            )
            operator = pb.OperatorSnapshot(operator_uid="counts", keyed=keyed)
            manifest.subtasks.append(
                pb.SubtaskSnapshot(vertex="v1", subtask_index=subtask, operators=[operator])
            )
        path = manifest_path(id_, 1)
        self.store.put(path, [encode_manifest(manifest)])
        self.head.retained.append(pb.RetainedCheckpoint(checkpoint_id=id_, manifest_path=path))
        del self.head.retained[:-retained_max]
        self.head.next_checkpoint_id = id_ + 1
        self.heads.swap(self.head)

    def age(self, seconds: int = 7200) -> None:
        then = time.time() - seconds  # noqa: TID251 - what the kernel's clock says
        for path in self.directory.rglob("*"):
            os.utime(path, (then, then))

    def file(self, id_: int, subtask: int) -> Path:
        return self.directory / self.files[subtask][id_ - 1].handle.path


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path)
    for id_ in (1, 2, 3):
        job.checkpoint(id_)
    job.store.delete(manifest_path(1, 1))
    return job


def check(job: Job) -> JobReport:
    (report,) = check_store(str(job.directory)).jobs
    return report


def kinds(report: JobReport) -> list[tuple[Damage, str, tuple[int, ...]]]:
    return [(one.damage, one.path, one.checkpoints) for one in report.problems]


def test_a_whole_store(job: Job, tmp_path: Path) -> None:
    Job(tmp_path, "other").checkpoint(1)
    Job(tmp_path, "young")
    report = check_store(str(tmp_path))
    assert report.is_healthy
    assert [one.directory for one in report.jobs] == [JOB, "other", "young"]
    (first, second, third) = report.jobs
    assert first == check(job)
    assert first.retained == (2, 3)
    assert first.orphans == ()
    assert [(use.path, use.reference_count, use.checkpoints) for use in first.files] == sorted(
        (file.handle.path, 1, tuple(range(max(2, id_), 4)))
        for files in job.files
        for id_, file in enumerate(files, 1)
    )
    assert {(use.size_bytes, use.referenced_bytes) for use in first.files} == {(150, 150)}
    assert second.retained == (1,)
    assert third.retained == ()
    assert third.files == ()


def test_a_missing_file(job: Job) -> None:
    path = job.file(2, 1)
    path.unlink()
    report = check(job)
    assert kinds(report) == [(Damage.MISSING, f"shared/{path.name}", (2, 3))]


def test_an_altered_byte(job: Job) -> None:
    path = job.file(3, 0)
    content = bytearray(path.read_bytes())
    content[70] ^= 4
    path.write_bytes(content)
    report = check(job)
    assert kinds(report) == [(Damage.FILE, f"shared/{path.name}", (3,))]
    assert "altered" in report.problems[0].message


def test_any_altered_byte_of_what_counts(job: Job) -> None:
    """Manifests, HEAD, files: a byte of each that nothing else would notice."""
    before = check(job)
    assert before.is_healthy
    for path in [one for one in job.directory.rglob("*") if one.is_file()]:
        content = path.read_bytes()
        for position in range(0, len(content), max(1, len(content) // 7)):
            altered = bytearray(content)
            altered[position] ^= 0x80
            path.write_bytes(altered)
            assert not check(job).is_healthy, (path, position)
        path.write_bytes(content)
    assert check(job) == before


def test_a_short_file(job: Job) -> None:
    path = job.file(1, 0)
    path.write_bytes(path.read_bytes()[:-1])
    assert kinds(check(job)) == [(Damage.FILE, f"shared/{path.name}", (2, 3))]
    assert "149" in check(job).problems[0].message


def test_a_truncated_manifest(job: Job) -> None:
    path = job.directory / manifest_path(3, 1)
    path.write_bytes(path.read_bytes()[:-5])
    report = check(job)
    assert kinds(report) == [(Damage.MANIFEST, "chk-3/manifest-1", (3,))]
    assert report.retained == (2,)
    assert report.untouchable_because
    assert len(report.orphans) == 2  # what only the lost manifest refers to
    job.age()
    assert deleted(job, force=True) == []


def test_a_missing_manifest(job: Job) -> None:
    (job.directory / manifest_path(2, 1)).unlink()
    report = check(job)
    assert kinds(report) == [(Damage.MISSING, "chk-2/manifest-1", (2,))]
    assert report.untouchable_because


@pytest.mark.parametrize("damage", ["altered", "gone"])
def test_head_is_lost(job: Job, damage: str) -> None:
    if damage == "gone":
        (job.directory / "HEAD").unlink()
    else:
        (job.directory / "HEAD").write_bytes(b"PSTKHEAD")
    (job.directory / "shared" / "unknown").write_bytes(b"1")
    report = check(job)
    assert kinds(report) == [(Damage.HEAD, "HEAD", ())]
    assert report.retained == (2, 3)  # all that there are
    assert [one.path for one in report.orphans] == ["shared/unknown"]
    job.age()
    assert deleted(job, force=True) == []


def test_contradictions(job: Job) -> None:
    shutil.copy(job.directory / manifest_path(2, 1), job.directory / manifest_path(3, 1))
    assert (Damage.MANIFEST, "chk-3/manifest-1", (3,)) in kinds(check(job))
    job.head.next_checkpoint_id = 3
    job.heads.swap(job.head)
    assert "the next checkpoint" in check(job).problems[0].message
    copy = job.directory.with_name("copy")
    shutil.copytree(job.directory, copy)
    (report,) = check_store(str(copy)).jobs
    assert f"that of job {JOB!r}" in report.problems[0].message
    manifest = pb.CheckpointManifest(job_id="x", checkpoint_id=3, leader_epoch=9)
    keyed = manifest.subtasks.add().operators.add(operator_uid="o").keyed
    keyed.files.add(name="a", handle=pb.StateHandle(inline=b"1", size_bytes=1, checksum=5))
    keyed.files.add(name="a")
    keyed.segments.add(file="b")
    keyed.segments.add(file="a", offset=9)
    job.store.put(manifest_path(3, 1), [encode_manifest(manifest)])
    text = "\n".join(problem.message for problem in check(job).problems)
    for words in (
        "it is that of job 'x'",
        "leader epoch 9 wrote it, and HEAD is at 1",
        "two files have one name",
        "does not have its checksum",
        "lies in 'b', which it has not",
        "goes beyond the 0 bytes of 'a'",
        "is of table 0, which it has not",
    ):
        assert words in text


def test_a_directory_that_another_job_has_claimed_is_whole(job: Job) -> None:
    """The newest checkpoint is of the job that had it, those behind it are the other's."""
    store, started = job.store, pb.StartedFrom(checkpoint_id=3, claimed=True)
    started.path = f"{job.directory}/chk-3"
    HeadStore(store).take_over("other", JOB, 3, started)
    report = check(job)
    assert report.problems == ()
    assert report.retained == (2, 3)
    job.heads = HeadStore(store)
    job.head = job.heads.claim("other", 1)
    job.checkpoint(4)
    assert check(job).problems == ()
    # Of its own ones all is checked, and the directory must be the one that it has claimed.
    foreign = pb.CheckpointManifest(job_id=JOB, checkpoint_id=4, leader_epoch=9)
    store.put(manifest_path(4, 1), [encode_manifest(foreign)])
    said = [problem.message for problem in check(job).problems]
    assert said == [
        f"it is that of job {JOB!r}, HEAD that of 'other'",
        "leader epoch 9 wrote it, and HEAD is at 1",
    ]
    copy = job.directory.with_name("copy")
    shutil.copytree(job.directory, copy)
    (report,) = check_store(str(copy)).jobs
    assert (
        "it is that of job 'other', and lies in the directory of job 'copy'"
        in report.problems[0].message
    )


def test_a_segment_without_a_file_is_a_partition_of_a_database(job: Job) -> None:
    manifest = pb.CheckpointManifest(job_id=JOB, checkpoint_id=3, leader_epoch=1)
    keyed = manifest.subtasks.add().operators.add(operator_uid="o").keyed
    keyed.tables.add(name="t")
    keyed.segments.add(table=0, offset=7, row_count=2)
    job.store.put(manifest_path(3, 1), [encode_manifest(manifest)])
    assert all("a segment" not in problem.message for problem in check(job).problems)


def test_a_path_that_leaves_the_store(job: Job) -> None:
    job.files[0][0].handle.path = "../../secret"
    job.checkpoint(4)
    assert any(
        one.path == "../../secret" and one.damage is Damage.FILE for one in check(job).problems
    )


def deleted(job: Job, force: bool = False) -> list[str]:
    gone = delete_orphans(str(job.directory), check_store(str(job.directory)), force=force)
    return [orphan.path for orphans in gone.values() for orphan in orphans]


def test_orphans(job: Job) -> None:
    dead = job.upload(2, 0).handle.path
    pending = job.upload(4, 0).handle.path
    job.store.put("chk-1/manifest-1", [b"left over"])
    job.store.put("taskowned/log", [b"1"])
    (job.directory / "shared" / ".tmp-1-x").write_bytes(b"12")
    (job.directory / "shared" / "foreign").write_bytes(b"123")
    report = check(job)
    assert report.is_healthy
    found = {orphan.path: orphan for orphan in report.orphans}
    assert {path: orphan.checkpoint_id for path, orphan in found.items()} == {
        dead: 2,
        pending: 4,
        "chk-1/manifest-1": 1,
        "shared/.tmp-1-x": None,
        "shared/foreign": None,
    }
    assert all(orphan.is_young for orphan in report.orphans)
    assert all("may be running" in orphan.kept_because for orphan in report.orphans)
    assert deleted(job) == []
    job.age()
    report = check(job)
    assert not any(orphan.is_young for orphan in report.orphans)
    assert [one.path for one in report.orphans if one.kept_because] == [pending]
    assert sorted(deleted(job)) == sorted(set(found) - {pending})
    assert [one.path for one in check(job).orphans] == [pending]
    assert not (job.directory / "chk-1").exists()
    assert deleted(job, force=True) == [pending]
    report = check(job)
    assert report.is_healthy
    assert report.orphans == ()
    assert len(report.files) == 6
    assert job.store.get("taskowned/log") == b"1"


def test_what_was_copied_into_a_directory_is_no_orphan(job: Job, tmp_path: Path) -> None:
    env = ps.Environment()
    env.from_rows([{"n": 1}]).key_by("n").aggregate(count=ps.count()).discard()
    savepoint = Path(ps.write_savepoint(tmp_path / "kept" / "savepoint", {}, job=env))
    for directory, own in ((job.directory, "shared/left"), (savepoint, "state/left")):
        (directory / own).parent.mkdir(exist_ok=True)
        (directory / own).write_bytes(b"1")
        (directory / "README").write_text("of the week")
        copied = Job(directory, "copied")
        copied.checkpoint(1)
        (copied.directory / "shared" / ".tmp-1-x").write_bytes(b"half of it")
        before = {*directory.rglob("*")}
        (report,) = check_store(str(directory)).jobs
        assert [orphan.path for orphan in report.orphans] == [own]
        delete_orphans(str(directory), FsckReport((report,)), force=True)
        assert before - {*directory.rglob("*")} - {directory / "state"} == {directory / own}


def test_a_job_that_comes_back_keeps_its_orphans(job: Job) -> None:
    job.upload(2, 0)
    report = check_store(str(job.directory))
    HeadStore(job.store).claim(JOB, 2)
    assert delete_orphans(str(job.directory), report, force=True) == {JOB: ()}
    assert len(check(job).orphans) == 1


def test_a_job_that_runs_meanwhile_is_not_damaged(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalStore.temporaries

    def temporaries(self: LocalStore) -> Any:
        # Between the listing and HEAD, and between HEAD and the manifests, the job goes on.
        monkeypatch.undo()
        return real(self)

    monkeypatch.setattr(LocalStore, "temporaries", temporaries)
    read = LocalStore.get
    turns = iter([4, 5])

    def get(self: LocalStore, path: str) -> bytes:
        if "manifest" in path and (turn := next(turns, None)) is not None:
            job.checkpoint(turn, retained_max=1)
            job.store.delete(path)
        return read(self, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "get", get)
        report = check(job)
    assert report.is_healthy
    assert report.retained == (5,)


def test_a_store_that_is_not_there_is_not_a_healthy_one(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound, match="nowhere"):
        check_store(str(tmp_path / "nowhere"))


def test_directories_without_jobs(tmp_path: Path) -> None:
    assert check_store(str(tmp_path)).jobs == ()
    (tmp_path / "photos").mkdir()
    with pytest.raises(ConfigurationError, match=r"holds no job's checkpoints.*checkpointing\.dir"):
        check_store(str(tmp_path))


def test_a_directory_that_cannot_be_listed_is_told_beside_the_others(
    job: Job, tmp_path: Path
) -> None:
    place = tmp_path / "another"
    place.symlink_to(place)  # nobody can follow it
    first, second = sorted(check_store(str(tmp_path)).jobs, key=lambda one: one.is_healthy)
    assert kinds(first) == [(Damage.UNREADABLE, ".", ())]
    assert str(place) in first.problems[0].message
    assert first.untouchable_because
    assert second.retained == (2, 3)
    assert second.is_healthy


# ---------------------------------------------------------------- the command


@pytest.fixture
def run() -> Callable[..., Any]:
    return lambda *arguments: CliRunner().invoke(main, ["fsck", *map(str, arguments)])


def test_the_command(job: Job, tmp_path: Path, run: Any) -> None:
    orphan = job.upload(1, 0).handle.path
    ended = run(tmp_path)
    assert ended.exit_code == 0, ended.output
    assert f"{JOB}  2, 3         6      6           900    1        ok" in ended.stdout
    assert orphan not in ended.stdout
    ended = run(tmp_path, "--orphans")
    assert orphan in ended.stdout
    assert "may be running" in ended.stdout
    ended = run(tmp_path, "--orphans", "--delete")
    assert "deleted 0 orphans with 0 bytes, kept 1" in ended.stdout
    job.age()
    ended = run(job.directory, "--orphans", "--delete", "--json")
    document = json.loads(ended.stdout)
    assert document["healthy"] is True
    assert document["jobs"][0]["job_id"] == JOB
    assert document["jobs"][0]["checkpoints"] == [2, 3]
    assert document["jobs"][0]["orphans"] == [
        {
            "path": orphan,
            "size_bytes": 150,
            "modified_at_ms": document["jobs"][0]["orphans"][0]["modified_at_ms"],
            "checkpoint_id": 1,
            "young": False,
            "kept_because": "",
            "deleted": True,
        }
    ]
    assert len(document["jobs"][0]["files"]) == 6
    assert not (job.directory / orphan).exists()


def test_fields_of_the_document_are_documented(job: Job, run: Any) -> None:
    job.upload(1, 0)
    job.file(3, 0).unlink()
    text = (Path(__file__).parents[4] / "docs" / "cli.md").read_text()
    (line,) = [one for one in text.splitlines() if one.startswith("| `penstock fsck ")]
    document = json.loads(run(job.directory, "--json").stdout)
    (one,) = document["jobs"]
    parts = (document, one, one["problems"][0], one["files"][0], one["orphans"][0])
    names = {name for part in parts for name in part}
    assert names <= set(re.findall(r"\w+", line))
    assert all(f"`{kind.value}`" in text for kind in Damage)


def test_the_command_tells_damage(job: Job, run: Any) -> None:
    job.file(3, 0).unlink()
    ended = run(job.directory)
    assert ended.exit_code == 1
    assert "1 damaged" in ended.stdout
    assert f"{JOB}/shared/{job.file(3, 0).name}: it is not there (checkpoint 3)" in ended.stderr
    ended = run(job.directory, "--json")
    assert ended.exit_code == 1
    (problem,) = json.loads(ended.stdout)["jobs"][0]["problems"]
    assert problem["kind"] == "missing-file"
    assert problem["checkpoints"] == [3]


@pytest.mark.parametrize(
    "options", [["--delete"], ["--orphans", "--force"], ["--grace", "soon"], ["--nonsense"]]
)
def test_wrong_use(tmp_path: Path, run: Any, options: list[str]) -> None:
    assert run(tmp_path, *options).exit_code == 2
    assert run(tmp_path / "missing").exit_code == 2
    (tmp_path / "photos").mkdir()
    ended = run(tmp_path)
    assert ended.exit_code == 2
    assert "holds no job's checkpoints" in ended.stderr


def test_the_delete_option_is_explained(run: Any) -> None:
    text = " ".join(run("--help").stdout.split())
    for words in ("With --orphans: delete them", "newer than the newest completed one", "--force"):
        assert words in text
