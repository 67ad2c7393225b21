"""Aim: a full disk or a damaged store costs a checkpoint, never a row; what is wrong is said by name.

Method: the ledger job with checkpoints on demand, so that it is known which one is the newest; its files are
damaged while it runs, a slot process is killed, and it must go on from an older checkpoint and write exactly
what it should. Full disks are small file systems in memory, which need the right to mount.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock as ps
from penstock.client.job_result import state_name
from penstock.storage import head, manifest
from penstock.storage.framing import FrameFormat, decode_frame, encode_frame
from tests.support.jobs import DEADLINE_S
from tests.support.ledger_job import LedgerJob
from tests.support.small_disk import filled, small_disk

pytestmark = [pytest.mark.integration, pytest.mark.sampled(5)]


# ---------------------------------------------------------------- full disks


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    with small_disk(tmp_path / "small") as directory:
        yield directory


def test_the_disk_is_full_during_snapshots(job: LedgerJob, small: Path) -> None:
    job.submit(
        "200ms",
        execution__checkpointing__dir=small / "checkpoints",
        # Nothing is deleted that would make room.
        execution__checkpointing__num_retained=100,
    )
    job.await_checkpoints(lambda one: one.status == "COMPLETED")
    with filled(small):
        failed = job.await_checkpoints(lambda one: one.status == "FAILED" and one.failure)
    assert "No space left on device" in failed.failure, failed.failure
    assert str(small) in failed.failure, failed.failure
    job.await_checkpoints(lambda one: one.status == "COMPLETED" and one.id > failed.id)
    assert job.handle.details().summary.restarts == 0
    job.finish()


def test_the_disk_is_full_while_output_is_written(job: LedgerJob, small: Path) -> None:
    job.ledger = dataclasses.replace(job.ledger, output=small / "out")
    job.submit("200ms")
    job.await_checkpoints(lambda one: one.status == "COMPLETED")
    with filled(small):
        failed = job.await_that(lambda details: details.summary.restarts > 0)
    assert "No space left on device" in failed.failure.message, failed.failure
    assert str(small) in failed.failure.message, failed.failure
    job.finish()


# ---------------------------------------------------------------- damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def make_newer(kind: FrameFormat) -> Callable[[Path], None]:
    """Writes an object as a later version of its format would begin."""

    def write(path: Path) -> None:
        version, payload = decode_frame(kind, path.read_bytes(), str(path))
        newer = FrameFormat(kind.noun, kind.magic, version + 1)
        path.write_bytes(encode_frame(newer, payload))

    return write


MANIFEST_DAMAGE = {
    "truncated": truncate,
    "altered": alter,
    "newer format": make_newer(manifest.FORMAT),
    "missing": Path.unlink,
}
HEAD_DAMAGE = {"truncated": truncate, "altered": alter, "newer format": make_newer(head.FORMAT)}
FILE_DAMAGE = {"truncated": truncate, "altered": alter, "missing": Path.unlink}


def take_three(job: LedgerJob) -> list[int]:
    """Three checkpoints, one after the other, whose output has been committed."""
    taken = []
    for _ in range(3):
        taken.append(job.handle.checkpoint(30))
        job.await_commits()
    return taken


def assert_older_is_taken(job: LedgerJob, taken: list[int], damaged: Path) -> None:
    """The job goes on from the second of three checkpoints, and it is said what is wrong with the third.

    What the third had committed cannot be taken back from readers, and comes a second time. Beside that,
    everything is there exactly once.
    """
    job.kill_a_slot()
    failures = job.await_restart(taken[1])
    log = job.cluster.wait_for_log("jobmanager", "checkpoint.unreadable", job_id=job.handle.job_id)
    assert log["checkpoint_id"] == taken[2]
    told = [log["reason"], log["path"], *failures]
    path = str(damaged.relative_to(job.store))
    assert any(path in text for text in told), told
    job.finish(is_last_commit_repeated=True)


@pytest.mark.parametrize("damage", MANIFEST_DAMAGE)
def test_a_manifest_is_damaged(job: LedgerJob, damage: str) -> None:
    job.submit()
    taken = take_three(job)
    newest = job.manifests()[-1]
    MANIFEST_DAMAGE[damage](newest)
    assert_older_is_taken(job, taken, newest)


@pytest.mark.parametrize("backend", ["hashmap", pytest.param("rocksdb", marks=pytest.mark.chaos)])
@pytest.mark.parametrize("damage", FILE_DAMAGE)
def test_a_state_file_is_damaged(job: LedgerJob, damage: str, backend: str) -> None:
    job.submit(state__backend__type=backend)
    taken = take_three(job)
    largest = job.own_files()[0]
    FILE_DAMAGE[damage](largest)
    assert_older_is_taken(job, taken, largest)


def test_a_damaged_state_file_uses_up_no_restart(job: LedgerJob) -> None:
    """The one restart that there is has gone into the slot that was killed."""
    job.submit(restart_strategy__fixed_delay__attempts=1)
    taken = take_three(job)
    largest = job.own_files()[0]
    alter(largest)
    assert_older_is_taken(job, taken, largest)


@pytest.mark.parametrize("damage", HEAD_DAMAGE)
def test_head_is_damaged_and_a_restart_changes_nothing(job: LedgerJob, damage: str) -> None:
    job.submit()
    job.handle.checkpoint(30)
    path = job.store / "HEAD"
    whole = path.read_bytes()
    HEAD_DAMAGE[damage](path)
    before = job.content()
    # A JobManager that begins reads HEAD; one that has claimed it knows what it wrote.
    job.kill_the_jobmanager()
    job.cluster.start(taskmanagers=2)
    # It keeps the job, says what is wrong, and goes on with it once that can be read again.
    assert "HEAD" in job.await_that(lambda details: details.summary.problem).summary.problem
    assert job.content() == before
    path.write_bytes(whole)
    job.await_that(lambda details: state_name(details) == "RUNNING")


def test_every_manifest_is_damaged(job: LedgerJob) -> None:
    job.submit()
    take_three(job)
    for path in job.manifests():
        truncate(path)
    before = job.content()
    job.kill_a_slot()
    with pytest.raises(ps.JobFailed, match="none of the checkpoints"):
        job.handle.wait(DEADLINE_S)
    assert job.content() == before
    assert state_name(job.handle.details()) == "FAILED"


# ---------------------------------------------------------------- storage that is away


@pytest.fixture
def mount(job: LedgerJob, tmp_path: Path) -> Path:
    """What the directory of the job's checkpoints is on."""
    return tmp_path / "mount"


@contextlib.contextmanager
def away(mount: Path) -> Iterator[None]:
    """It is not there, as when a file system is not mounted; nothing may have been made in its place."""
    elsewhere = mount.with_name("elsewhere")
    mount.rename(elsewhere)
    try:
        yield
    finally:
        elsewhere.rename(mount)


def test_a_mount_vanishes_for_a_moment(job: LedgerJob, mount: Path) -> None:
    job.submit("200ms", execution__checkpointing__dir=mount / "checkpoints")
    job.await_checkpoints(lambda one: one.status == "COMPLETED")
    with away(mount):
        failed = job.await_checkpoints(lambda one: one.status == "FAILED" and one.failure)
        assert "is not there any more: is its file system mounted" in failed.failure, failed
        assert str(mount) in failed.failure
        assert not mount.exists()
    job.await_checkpoints(lambda one: one.status == "COMPLETED" and one.id > failed.id)
    assert job.handle.details().summary.restarts == 0
    job.finish()


def test_a_job_that_restarts_waits_for_a_mount_that_is_away(job: LedgerJob, mount: Path) -> None:
    job.submit(execution__checkpointing__dir=mount / "checkpoints")
    newest = job.handle.checkpoint(30)
    with away(mount):
        job.kill_a_slot()
        failed = job.await_that(lambda details: "mounted" in details.failure.message)
        assert str(mount) in failed.failure.message, failed.failure
        assert not mount.exists()
    job.await_restart(newest)
    job.finish()
