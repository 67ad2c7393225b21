"""Aim: output in doubt is committed by nobody else while the job that it was taken of may still do so itself.

Method: a savepoint on disk whose sink has prepared output; who runs is said by hand.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from common.pb import job_record_pb2
from jobmanager.checkpoint.next_head import head_opened
from jobmanager.checkpoint.savepoint_store_runner import SavepointStoreRunner
from jobmanager.dispatcher import claimed_start_store, claimed_starts_runner
from jobmanager.dispatcher.job_start_runner import prepare_start
from jobmanager.dispatcher.known_jobs import KnownJob, KnownJobs
from jobmanager.dispatcher.recovery import restorable_from
from jobmanager.dispatcher.submission_checks_runner import SubmissionChecksRunner
from jobmanager.job.job_record import JobRecord
from jobmanager.messages.job_state import JobState
from penstock.cli.describe import started_fields, started_lines
from penstock.config import Configuration
from penstock.errors import JobRejected, StoreTransient, Unrecoverable
from penstock.graph.output_in_doubt import IN_DOUBT_KEY, decided_output
from penstock.graph.restore_check import Fate, RestoreCheck, StateFate
from penstock.graph.started_from import started_from
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.head import HeadStore
from penstock.storage.kept_state import KeptSavepoint, list_savepoints
from penstock.storage.local_store import LocalStore
from penstock.storage.manifest import encode_manifest
from penstock.storage.memory_store import MemoryStore
from penstock.storage.output_claim import read_claim
from penstock.storage.prepared_output import COMMITTABLES
from penstock.storage.restore_point import claim_savepoint, open_restore_point, remove_savepoint
from penstock.storage.savepoint import (
    COMMITTED_PATH,
    MANIFEST_PATH,
    OUTPUT_PATH,
    TAKEN_BACK_PATH,
)
from tests.support.claimed_starts import claimed_starts
from tests.support.jobs import DEADLINE_S

ORIGINAL, CLAIMER, NEW = "0" * 32, "1" * 32, "2" * 32


def make_savepoint(path: Path, target: str = "") -> None:
    manifest = checkpoint_pb2.CheckpointManifest(job_id=ORIGINAL, checkpoint_id=7)
    manifest.properties.kind = checkpoint_pb2.CHECKPOINT_KIND_SAVEPOINT
    manifest.properties.target = target
    vertex = manifest.vertices.add(id="v0", parallelism=1)
    vertex.operators.add(uid="files", kind="sink")
    held = manifest.subtasks.add(vertex="v0").operators.add(operator_uid="files").lists.add()
    held.name, held.items[:] = COMMITTABLES, [b"a file"]
    LocalStore(path).put(MANIFEST_PATH, [encode_manifest(manifest)])


def start(path: Path, running: str) -> str:
    """What a job that says commit does with the output, while that one runs and all others have ended."""
    graph = graph_pb2.JobGraph(name="job")
    graph.vertices.add(id="v0", parallelism=1).operators.add(uid="files")
    config = Configuration.from_mapping(
        {"execution.state-recovery.path": str(path), IN_DOUBT_KEY: "commit"}
    )
    is_running = running.__eq__
    return prepare_start(
        NEW, graph, config, is_running, lambda job_id: job_id != running
    ).graph.config[IN_DOUBT_KEY]


@pytest.mark.parametrize("is_claimed", [False, True])
def test_output_is_committed_by_another_once_its_own_job_has_ended(
    tmp_path: Path, is_claimed: bool
) -> None:
    make_savepoint(tmp_path)
    if is_claimed:  # by a job that has ended before it had taken it over
        claim_savepoint(open_restore_point(str(tmp_path)), CLAIMER)
    with pytest.raises(JobRejected, match=f"job {ORIGINAL} still runs"):
        start(tmp_path, ORIGINAL)
    assert start(tmp_path, "") == "commit"


def begin(path: Path, job_id: str, said: str = "", ended: str = "") -> str:
    """What a job does with the output, and says so; that one is known to have ended."""
    graph = graph_pb2.JobGraph(name="job")
    graph.vertices.add(id="v0", parallelism=1).operators.add(uid="files")
    config = {"execution.state-recovery.path": str(path)} | ({IN_DOUBT_KEY: said} if said else {})
    start = prepare_start(
        job_id, graph, Configuration.from_mapping(config), lambda _: False, ended.__eq__
    )
    start.claim_output(lambda _: None, lambda: None, ended.__eq__)
    return start.graph.config[IN_DOUBT_KEY]


def original_goes_back(path: Path) -> None:
    SavepointStoreRunner(ORIGINAL, str(path), MemoryStore(1 << 20)).take_back_where_there(7)


@pytest.mark.parametrize("is_copy", [False, True])
def test_of_all_that_may_publish_its_output_one_does(tmp_path: Path, is_copy: bool) -> None:
    taken = tmp_path / "taken"
    make_savepoint(taken, str(taken))
    path = tmp_path / "copy" if is_copy else taken
    if is_copy:
        shutil.copytree(taken, path)
    assert begin(path, NEW, "commit") == "commit"
    assert begin(path, NEW, "commit") == "commit"  # its answer was lost
    assert [one.output for one in list_savepoints(str(taken))] == ["claimed"]
    with pytest.raises(JobRejected, match=f"is committed by job {NEW}, .* say --in-doubt leave"):
        begin(path, CLAIMER, "commit")
    with pytest.raises(JobRejected, match=f"or by job {NEW}, which was started from it"):
        begin(path, CLAIMER)
    assert begin(path, CLAIMER, "leave") == "leave"
    with pytest.raises(Unrecoverable, match=f"is committed by job {NEW}"):
        original_goes_back(taken)
    assert begin(path, CLAIMER, "commit", ended=NEW) == "commit"  # which may have failed before
    with pytest.raises(Unrecoverable, match=f"is committed by job {CLAIMER}"):
        original_goes_back(taken)
    SavepointStoreRunner(ORIGINAL, str(taken), MemoryStore(1 << 20)).mark_committed()
    assert begin(path, NEW) == "leave"  # also of a copy from before


@pytest.mark.parametrize("original", ["is no more", "cannot be read"])
def test_a_copy_that_cannot_ask_its_original_says_so(tmp_path: Path, original: str) -> None:
    taken, path = tmp_path / "taken", tmp_path / "copy"
    make_savepoint(taken, str(taken))
    shutil.copytree(taken, path)
    if original == "is no more":
        shutil.rmtree(taken)
    else:
        (taken / "manifest").write_bytes(b"damaged")
    with structlog.testing.capture_logs() as logs:
        assert begin(path, NEW, "commit") == "commit"
    told = [one["reason"] for one in logs if one["event"] == "savepoint.original_not_asked"]
    assert len(told) == (original == "cannot be read")
    assert all(f"{taken}, where it was taken, cannot be asked" in reason for reason in told)


def test_whoever_commits_what_a_moved_savepoint_covers_tells_its_original(tmp_path: Path) -> None:
    taken, moved = tmp_path / "kept" / "taken", tmp_path / "moved"
    make_savepoint(taken, str(taken))
    taken.rename(moved)
    shutil.copytree(moved, tmp_path / "copy")
    assert begin(moved, NEW, "commit") == "commit"
    with pytest.raises(Unrecoverable, match=f"is committed by job {NEW}"):
        original_goes_back(taken)
    with pytest.raises(JobRejected, match=f"is committed by job {NEW}; say --in-doubt leave"):
        begin(tmp_path / "copy", CLAIMER, "commit")
    shutil.rmtree(taken.parent)  # or on another machine, where nothing is made
    assert begin(tmp_path / "copy", CLAIMER, "commit") == "commit"
    assert not taken.parent.exists()


def test_what_its_job_has_taken_back_nobody_commits_unless_that_has_ended(tmp_path: Path) -> None:
    make_savepoint(tmp_path)
    original_goes_back(tmp_path)
    with pytest.raises(JobRejected, match=f"job {ORIGINAL} has gone back behind it"):
        begin(tmp_path, NEW, "commit")
    assert begin(tmp_path, NEW) == "leave"
    SavepointStoreRunner(ORIGINAL, str(tmp_path), MemoryStore(1 << 20)).mark_in_doubt()
    assert begin(tmp_path, NEW, "commit") == "commit"


def test_of_a_savepoint_that_never_came_to_be_nothing_is_made(tmp_path: Path) -> None:
    original_goes_back(tmp_path / "never")
    SavepointStoreRunner(ORIGINAL, str(tmp_path / "never"), MemoryStore(1 << 20)).take_back()
    assert not (tmp_path / "never").exists()


def leave_checkpoint(job: Path, saved: Path) -> None:
    """Of a job that has ended between a savepoint and the checkpoint that was to commit it."""
    store = LocalStore(job)
    manifest = checkpoint_pb2.CheckpointManifest(job_id=ORIGINAL, checkpoint_id=6)
    store.put("chk-6/manifest-1", [encode_manifest(manifest)])
    heads = HeadStore(store)
    head = heads.claim(ORIGINAL, 1)
    head.retained.add(checkpoint_id=6, manifest_path="chk-6/manifest-1")
    heads.swap(head_opened(head, str(saved), 7))


@pytest.mark.parametrize("first", ["savepoint", "checkpoint"])
def test_a_checkpoint_before_a_savepoint_is_gone_on_from_or_its_output_committed(
    tmp_path: Path, first: str
) -> None:
    """Of a job that has ended between the savepoint and the checkpoint that was to commit it."""
    saved, job = tmp_path / "saved", tmp_path / "job"
    make_savepoint(saved)
    leave_checkpoint(job, saved)
    older = job / "chk-6"
    if first == "savepoint":
        begin(saved, NEW, "commit")
        with pytest.raises(JobRejected, match=f"{saved} was taken behind it.*by job {NEW}.*leave"):
            begin(older, CLAIMER)
        remove_savepoint(LocalStore(saved))  # its claimant has taken it over
        with pytest.raises(JobRejected, match=f"{saved} was taken behind it.*by job {NEW}.*leave"):
            begin(older, CLAIMER)
        return
    begin(older, CLAIMER)
    with pytest.raises(JobRejected, match=f"job {CLAIMER} has gone back behind it"):
        begin(saved, NEW, "commit")
    SavepointStoreRunner(ORIGINAL, str(saved), MemoryStore(1 << 20)).mark_in_doubt()
    with pytest.raises(JobRejected, match=f"job {CLAIMER} has gone back behind it"):
        begin(saved, NEW, "commit")
    begin(older, NEW)  # once more: it goes on from there again


def savepoint_in(saved: Path) -> KeptSavepoint:
    """What is said of it, but for its size: an ``OWNER`` that names nobody stays."""
    [kept] = list_savepoints(str(saved))
    return replace(kept, size_bytes=0)


@pytest.mark.parametrize("kind", ["savepoint", "checkpoint"])
def test_what_a_job_has_claimed_that_is_refused_all_the_same_is_given_back(
    tmp_path: Path, kind: str
) -> None:
    """It is claimed, then nobody can be told who publishes its output."""
    saved, job = tmp_path / "saved", tmp_path / "job"
    make_savepoint(saved)
    leave_checkpoint(job, saved)
    path = saved if kind == "savepoint" else job
    graph = graph_pb2.JobGraph(name="job")
    graph.vertices.add(id="v0", parallelism=1).operators.add(uid="files")
    graph.config["execution.state-recovery.path"] = str(path)
    graph.config["execution.state-recovery.claim-mode"] = "claim"
    graph.config[IN_DOUBT_KEY] = "commit"
    jobs = KnownJobs(1)
    record = JobRecord(ORIGINAL, graph, None, 0)
    record.left = str(job / "chk-6")
    jobs[ORIGINAL] = KnownJob(record, None)
    record.enter(JobState.FAILED, 0)
    checks = SubmissionChecksRunner(
        Configuration(), jobs, claimed_starts(tmp_path / "kept", jobs)[0]
    )
    before = HeadStore(LocalStore(job)).read(), savepoint_in(saved)

    async def claim(*, fails: bool) -> None:
        start = await checks.find_start(NEW, graph)
        assert start is not None
        if not fails:
            await checks.claim(start, "")
            return
        (saved / OUTPUT_PATH).mkdir()  # so it can be neither read nor replaced
        with pytest.raises(StoreTransient):
            await checks.claim(start, "")
        (saved / OUTPUT_PATH).rmdir()

    asyncio.run(claim(fails=True))
    assert (HeadStore(LocalStore(job)).read(), savepoint_in(saved)) == before
    assert record.restorable_from() == str(job / "chk-6")
    asyncio.run(claim(fails=False))
    assert open_restore_point(str(path)).owner == NEW


@pytest.mark.parametrize("kind", ["savepoint", "checkpoint"])
@pytest.mark.parametrize("has_claimed", [False, True])
def test_the_next_jobmanager_gives_back_what_was_claimed_for_a_job_without_a_record(
    tmp_path: Path, kind: str, has_claimed: bool
) -> None:
    """The first one ends on either side of the claim, and may have been asked for it before."""
    saved, job = tmp_path / "saved", tmp_path / "job"
    make_savepoint(saved)
    leave_checkpoint(job, saved)
    path, jobs = (saved if kind == "savepoint" else job), KnownJobs(1)
    graph = graph_pb2.JobGraph(name="job")
    graph.vertices.add(id="v0", parallelism=1).operators.add(uid="files")
    graph.config["execution.state-recovery.path"] = str(path)
    graph.config["execution.state-recovery.claim-mode"] = "claim"
    graph.config[IN_DOUBT_KEY] = "commit"

    def found() -> object:
        [kept] = list_savepoints(str(saved))
        claim = read_claim(LocalStore(saved))
        return HeadStore(LocalStore(job)).read(), kept.owner, claim

    before = found()

    async def begin() -> None:
        starts, _ = claimed_starts(tmp_path / "kept", jobs)
        checks = SubmissionChecksRunner(Configuration(), jobs, starts)
        start = await checks.find_start(NEW, graph)
        assert start is not None

        def note(stored: job_record_pb2.StoredStart) -> None:
            starts.note(stored)
            if not has_claimed:
                raise InterruptedError

        with suppress(InterruptedError):
            start.claim(note)
            start.claim_output(note, starts.check_leads, jobs.has_ended)
        assert (found() == before) is not has_claimed

    async def begin_next() -> None:
        starts, store = claimed_starts(tmp_path / "kept", jobs)
        assert store.stored() == []
        await starts.give_back_all(store.unstored())
        assert found() == before
        assert store.stored() == []
        assert store.unstored() == []

    for _ in range(2):
        asyncio.run(begin())
        asyncio.run(begin_next())
    asyncio.run(begin())  # by the same JobManager, where the same job is submitted again
    asyncio.run(begin())


def test_storage_that_hangs_holds_up_no_start_and_takes_few_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What earlier JobManagers have left is given back beside it; an error that nobody foresaw ends nothing."""
    hanging, most, is_over = list[str](), 0, threading.Event()

    def hang(start: job_record_pb2.StoredStart, *_: object, **__: object) -> str:
        nonlocal most
        hanging.append(start.job_id)
        most = max(most, len(hanging))
        is_over.wait(DEADLINE_S)
        hanging.remove(start.job_id)
        if start.job_id == "job-7":
            raise ValueError("nobody foresaw it")
        return ""

    monkeypatch.setattr(claimed_start_store, "give_back", hang)
    monkeypatch.setattr(claimed_starts_runner, "PATIENCE_S", 0.01)

    async def begin() -> None:
        starts, store = claimed_starts(tmp_path, KnownJobs(1))
        for number in range(10):
            store.starts.note(job_record_pb2.StoredStart(job_id=f"job-{number}"))
        assert store.stored() == []
        await starts.give_back_all(store.unstored())
        is_over.set()
        while [one for one in range(10) if store.starts.read(f"job-{one}")] != [7]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    asyncio.run(begin())
    assert 0 < most <= 4


@pytest.mark.parametrize(
    ("beside", "said", "listed", "started", "text"),
    [
        (COMMITTED_PATH, "", "committed", "committed", "committed by the job that it was taken of"),
        (TAKEN_BACK_PATH, "leave", "taken-back", "taken-back", "taken back by the job"),
        ("", "commit", "in-doubt", "committed-here", "by the job that is started from it"),
        ("", "leave", "in-doubt", "left", "was in doubt, and is left as it is"),
    ],
)
def test_what_becomes_of_its_output_is_listed_and_shown(
    tmp_path: Path, beside: str, said: str, listed: str, started: str, text: str
) -> None:
    make_savepoint(tmp_path)
    if beside:
        LocalStore(tmp_path).put(beside, [b"x"])
    assert [one.output for one in list_savepoints(str(tmp_path))] == [listed]
    graph = graph_pb2.JobGraph()
    graph.vertices.add(id="v0", parallelism=1).operators.add(uid="files")
    config = {"execution.state-recovery.path": str(tmp_path)}
    config |= {IN_DOUBT_KEY: said} if said else {}
    nobody_runs = (lambda _: False, lambda _: True)
    start = prepare_start(NEW, graph, Configuration.from_mapping(config), *nobody_runs)
    changed = StateFate("counts", "Count", "n", Fate.MIGRATES, "from int32 to int64")
    check = RestoreCheck((*start.check.fates, changed), ())
    output = decided_output(start.graph)
    kept = started_from(start.point, check, output, path="/saved", is_claimed=False)
    shown = started_fields(kept)
    assert shown["output"] == started
    how = {"name": "Count", "state": "n", "how": "from int32 to int64"}
    assert shown["migrated"] == [{"operator_uid": "counts", **how}]
    _, about_output, about_state = started_lines(kept, is_over=False)
    assert text in about_output
    assert about_state.endswith("state n of operator Count (uid counts): from int32 to int64")


def test_what_a_job_was_started_from_is_not_needed_when_it_is_over() -> None:
    started = checkpoint_pb2.StartedFrom(path="/saved", checkpoint_id=7)
    [running], [over] = (started_lines(started, is_over=is_over) for is_over in (False, True))
    assert running.endswith("; still needed: this job has completed no checkpoint of its own")
    assert over.endswith("; not needed any more: this job has ended")


def test_whoever_starts_from_what_was_claimed_is_told_by_which_job(tmp_path: Path) -> None:
    path, graph = tmp_path / "saved", graph_pb2.JobGraph(name="job")
    claimed = checkpoint_pb2.StartedFrom(path=str(path), claimed=True)
    record = JobRecord(CLAIMER, graph, None, 0, started_from=lambda: claimed)
    jobs = KnownJobs(1)
    jobs[CLAIMER] = KnownJob(record, None)
    checks = SubmissionChecksRunner(
        Configuration(), jobs, claimed_starts(tmp_path / "kept", jobs)[0]
    )
    graph.config["execution.state-recovery.path"] = f"{path}/"
    reason = rf"saved is no directory that exists.*; job {CLAIMER} was started from {path} and has"
    with pytest.raises(JobRejected, match=reason):
        asyncio.run(checks.find_start(NEW, graph))
    claimed.claimed = False
    with pytest.raises(JobRejected, match=r"or one chk-<n> in it$"):
        asyncio.run(checks.find_start(NEW, graph))


def test_jobs_may_come_while_a_thread_looks_for_who_has_claimed(tmp_path: Path) -> None:
    jobs = KnownJobs(1)

    def come() -> checkpoint_pb2.StartedFrom:
        jobs[f"{len(jobs)}"] = jobs[CLAIMER]
        return checkpoint_pb2.StartedFrom()

    graph = graph_pb2.JobGraph(name="job")
    jobs[CLAIMER] = KnownJob(JobRecord(CLAIMER, graph, None, 0, started_from=come), None)
    assert jobs.claimant(str(tmp_path)) is None


def test_a_job_can_be_started_from_its_newest_checkpoint_where_a_later_savepoint_cannot_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who starts it is told; what is left of the job waits for no place that users have put a savepoint to."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    heads = HeadStore(LocalStore(tmp_path / "job"))
    head = heads.claim("a-job", 1)
    head.retained.add(checkpoint_id=3, manifest_path="chk-3/manifest")
    head.open_savepoints.add(checkpoint_id=4, path="s3://away/saved")
    heads.swap(head)
    assert restorable_from(str(tmp_path / "job"), "a-job") == str(tmp_path / "job" / "chk-3")
