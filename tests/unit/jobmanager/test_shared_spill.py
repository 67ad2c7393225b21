"""Aim: what is complete on shared storage is lost with no TaskManager, and is removed by the JobManager alone.

Method: stories of the job's machine, as those of partial restarts; and the store on a directory and in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.elements import EndOfData
from common.pb import internal_pb2
from common.spill_paths import index_path, partition_path, promoted_path
from jobmanager.dispatcher import submission_checks_runner
from jobmanager.dispatcher.known_jobs import KnownJobs
from jobmanager.dispatcher.submission_checks_runner import SubmissionChecksRunner
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState
from jobmanager.graph.job_plan import Exchange
from jobmanager.job.kept_partitions_runner import KeptPartitionsRunner
from jobmanager.messages import job_effects, job_events
from jobmanager.messages.job_state import JobState
from jobmanager.partitions.partition_tracker import SHARED_STORAGE
from jobmanager.scheduler.shared_spill_runner import shared_spill
from jobmanager.stores.shared_spill_store import SharedSpillStore, open_shared_spill
from penstock.config import Configuration
from penstock.errors import ConfigurationError, JobRejected, StoreCorrupt, StoreNotFound
from penstock.partition_id import PartitionId
from penstock.storage.local_store import LocalStore
from penstock.storage.memory_store import MemoryStore
from penstock.storage.object_store import ObjectStore
from taskmanager.partitions.spill_layout import (
    PartitionIndex,
    SpillFile,
    SubpartitionIndex,
    encode_index,
)
from tests.support.claimed_starts import claimed_starts
from tests.support.drawn_plans import drawn
from tests.unit.jobmanager.test_partial_restarts import Story, deployed, finished_stage

FINISHED = AttemptState.FINISHED
ONE, TWO, OTHER = (PartitionId("e0", "v0", index, 3) for index in range(3))


def released(effects: list[job_effects.JobEffect]) -> list[job_effects.ReleasePartitions]:
    return [effect for effect in effects if isinstance(effect, job_effects.ReleasePartitions)]


def test_a_lost_taskmanager_takes_nothing_with_it_that_was_complete() -> None:
    story = Story(drawn("a:2 b:2", "a>b hash blocking"), shares_spill=True)
    finished_stage(story, "a0 a1")
    story.run("b0 b1")
    effects = [*story.lose("a1"), *story.due()]
    assert deployed(effects) == "b1", "it ran there"
    assert story.attempts("a0 a1 b0 b1") == [0, 0, 0, 1]
    story.run("b1")
    story.report("b0", FINISHED)
    effects = story.report("b1", FINISHED)
    assert story.master.state is JobState.FINISHED
    assert {one.taskmanager_id for one in released(effects)} == {SHARED_STORAGE}
    assert job_effects.ReleasePartitions(SHARED_STORAGE) in effects


def test_what_is_damaged_is_made_again_all_the_same() -> None:
    story = Story(drawn("a:2 b:1", "a>b hash blocking"), shares_spill=True)
    finished_stage(story, "a0 a1")
    story.run("b0")
    missing = job_events.MissingPartition("a>b", story.key("a0"))
    assert deployed([*story.fail("b0", missing), *story.due()]) == "a0"
    story.run("a0")
    story.report("a0", FINISHED)
    assert story.attempts("a0 a1 b0") == [1, 0, 1]
    assert deployed(story.effects).endswith("b0")


def test_caching_outputs_stay_with_their_taskmanagers() -> None:
    story = Story(drawn("a:1 b:1", "a>b hash caching"), shares_spill=True)
    story.run("a0 b0")
    story.report("a0", FINISHED)
    effects = [*story.lose("a0"), *story.due()]
    assert deployed(effects) == "a0 b0"


def test_a_job_that_fails_leaves_nothing_there() -> None:
    story = Story(drawn("a:2 b:2", "a>b hash blocking"), attempts=0, shares_spill=True)
    story.run("a0 a1")
    effects = story.fail("a0")
    assert story.master.state is JobState.FAILED
    assert job_effects.ReleasePartitions(SHARED_STORAGE) in effects


# ---------------------------------------------------------------- at submission


def check(directory: Path, *, writes_blocking: bool = True) -> None:
    """What a submitted job's shared storage is asked."""
    checks = SubmissionChecksRunner(
        Configuration(), KnownJobs(1), claimed_starts(None, KnownJobs(1))[0]
    )
    job = SimpleNamespace(graph=SimpleNamespace(name="totals"), writes_blocking=writes_blocking)
    asyncio.run(
        checks.check_shared_spill(cast("Any", job), shared_spill(str(directory), "cluster"))
    )


def test_storage_that_cannot_be_written_is_told_at_submission(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        JobRejected,
        match=r"'totals': its blocking exchanges .*/file/x/cluster.*Not a dir.*spill\.shared-dir",
    ):
        check(tmp_path / "file" / "x")
    check(tmp_path / "file" / "x", writes_blocking=False)
    check(tmp_path / "made")
    assert (tmp_path / "made" / "cluster").is_dir()


def test_storage_that_hangs_is_waited_for_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = Event()
    monkeypatch.setattr(submission_checks_runner, "CHECK_TIMEOUT_MS", 20)
    monkeypatch.setattr(LocalStore, "check_writable", lambda _: go_on.wait(20))
    try:
        with pytest.raises(JobRejected, match=r"where its blocking exchanges .* has not answered"):
            check(tmp_path)
    finally:
        go_on.set()


def test_shared_storage_is_looked_at_for_what_it_has_and_taskmanagers_for_the_rest() -> None:
    plan = drawn("a:1 b:1", "a>b hash blocking")
    (edge,) = plan.edges
    persisted = replace(edge, id="kept", target="")
    cached = replace(edge, id="cached", exchange=Exchange.CACHING)
    asked: dict[str, set[str]] = {}

    class Asked:
        def __init__(self, where: str) -> None:
            self.where = where

        async def found(self, _job_id: str, wanted: Collection[PartitionId]) -> set[PartitionId]:
            asked[self.where] = {one.edge_id for one in wanted}
            return set(wanted)

        async def locate(
            self, _job_id: str, wanted: Collection[PartitionId]
        ) -> dict[PartitionId, str]:
            asked[self.where] = {one.edge_id for one in wanted}
            return dict.fromkeys(wanted, "tm")

    partitions: Any = Asked("taskmanagers")
    partitions.shared = Asked("storage")
    endpoint = internal_pb2.DataEndpoint(slot_id="partitions", host_id="h", unix_path="/tm")
    cluster: Any = SimpleNamespace(
        partitions=partitions, client=lambda _: SimpleNamespace(partition_endpoint=endpoint)
    )
    log: Any = SimpleNamespace(info=lambda *_, **__: None)
    edges = (edge, persisted, cached)
    kept = KeptPartitionsRunner("job", replace(plan, edges=edges), cluster, log)
    key = AttemptKey("a", 0, 3)
    wanted = ((edge.id, key), ("kept", key), ("cached", key))

    async def look() -> tuple[job_events.LocatedPartition, ...]:
        await kept.wait_for(wanted)
        return await kept.found_shared(wanted)

    found = asyncio.run(look())
    assert asked == {"storage": {edge.id, "kept"}, "taskmanagers": {"cached"}}
    assert {(one.taskmanager_id, one.edge_id) for one in found} == {
        (SHARED_STORAGE, edge.id),
        (SHARED_STORAGE, "kept"),
    }


# ---------------------------------------------------------------- the store


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return MemoryStore(1 << 20) if request.param == "memory" else LocalStore(tmp_path / "shared")


def fill(store: ObjectStore, job_id: str, partition_id: PartitionId, *, is_complete: bool) -> None:
    store.put(f"{partition_path(job_id, partition_id)}/sub=0/00000000.arrow", [b"rows"])
    if is_complete:
        store.put(index_path(job_id, partition_id), [b"index"])


def test_what_is_complete_is_found_and_removed(store: ObjectStore) -> None:
    shared = SharedSpillStore(store, "x")
    fill(store, "job", ONE, is_complete=True)
    fill(store, "job", TWO, is_complete=False)
    fill(store, "other", ONE, is_complete=True)
    assert shared.found("job", [ONE, TWO, OTHER]) == {ONE}
    shared.release("job", [ONE, OTHER])
    assert shared.found("job", [ONE]) == frozenset()
    assert len(store.list("job/")) == 1
    shared.release("job")
    shared.release("job")
    assert store.list("job/") == []
    assert shared.found("other", [ONE]) == {ONE}


def test_partitions_whose_numbers_begin_alike_are_told_apart(store: ObjectStore) -> None:
    shared = SharedSpillStore(store, "x")
    names = [PartitionId("e0", "v0", index, attempt) for index in (1, 10) for attempt in (3, 31)]
    for name in names:
        fill(store, "job", name, is_complete=True)
    shared.release("job", names[:1])
    assert shared.found("job", names) == set(names[1:])


def test_what_no_job_has_is_swept(store: ObjectStore) -> None:
    shared = SharedSpillStore(store, "x")
    assert shared.sweep(lambda _: False) == []
    for job_id in ("known", "gone", "gone-too"):
        fill(store, job_id, ONE, is_complete=job_id != "gone")
    assert shared.sweep(lambda job_id: job_id == "known") == ["gone", "gone-too"]
    assert {found.path.split("/")[0] for found in store.list("")} == {"known"}


def sealed(store: ObjectStore, job_id: str, partition_id: PartitionId, rows: int) -> None:
    """A complete partition, as a TaskManager leaves it."""
    file = SpillFile(0, 0, rows, 8 * rows, 1)
    part = SubpartitionIndex(0, (file,), ((rows, EndOfData()),))
    store.put(f"{partition_path(job_id, partition_id)}/sub=0/{file.name}", [b"rows"])
    index = encode_index(PartitionIndex(job_id, partition_id, (part,)))
    store.put(index_path(job_id, partition_id), [index])


def whole(name: str, job_id: str, count: int = 2) -> internal_pb2.PromotedSet:
    return internal_pb2.PromotedSet(name=name, job_id=job_id, partition_count=count, confirmed=True)


def test_what_outlives_its_job_stays_until_it_is_dropped(store: ObjectStore) -> None:
    shared = SharedSpillStore(store, "x")
    for partition_id, rows in ((ONE, 3), (TWO, 5), (OTHER, 7)):
        sealed(store, "job", partition_id, rows)
    shared.promote(whole("mine", "job"), [TWO, ONE])
    shared.promote(whole("mine", "job"), [TWO, ONE])
    found = shared.promoted()
    assert [(held.rows, held.size_bytes) for held in found.partitions] == [(3, 24), (5, 40)]
    assert list(found.promoted) == [whole("mine", "job")]
    assert (found.count, found.size_bytes) == (2, 64)
    # The job ends, then another JobManager leads: what is named stays.
    assert shared.release("job") == 2
    assert shared.found("job", [ONE, TWO, OTHER]) == {ONE, TWO}
    for _ in range(2):
        assert shared.sweep(lambda _: False) == []
    assert shared.found("job", [ONE, TWO]) == {ONE, TWO}
    # What is gone of it is not told to be there.
    store.delete(index_path("job", TWO))
    assert [held.rows for held in shared.promoted().partitions] == [3]
    assert shared.drop("mine", "other", lambda _: False) == 0
    assert shared.drop("other", "", lambda _: False) == 0
    assert shared.drop("mine", "", lambda _: False) == 2
    assert store.list("") == []


def test_a_job_that_has_not_ended_keeps_the_files_of_a_name_it_lost(store: ObjectStore) -> None:
    shared = SharedSpillStore(store, "x")
    sealed(store, "job", ONE, 3)
    sealed(store, "job", TWO, 4)
    shared.promote(whole("one", "job", 1), [ONE])
    shared.promote(whole("two", "job", 1), [TWO])
    assert shared.drop("one", "job", lambda _: True) == 1
    assert shared.found("job", [ONE, TWO]) == {ONE, TWO}
    shared.release("job")
    assert shared.found("job", [ONE, TWO]) == {TWO}
    # Killed between its list and its files: they are swept.
    store.delete(promoted_path("two", "job"))
    assert shared.sweep(lambda _: False) == ["job"]
    assert store.list("") == []


def test_what_is_not_complete_cannot_outlive_its_job(store: ObjectStore) -> None:
    shared = SharedSpillStore(store, "x")
    sealed(store, "job", ONE, 3)
    fill(store, "job", TWO, is_complete=False)
    with pytest.raises(StoreNotFound):
        shared.promote(whole("mine", "job"), [ONE, TWO])
    store.put(index_path("job", TWO), [b"damaged"])
    with pytest.raises(StoreCorrupt):
        shared.promote(whole("mine", "job"), [ONE, TWO])
    assert not shared.promoted().promoted


def test_every_cluster_has_a_place_of_its_own(tmp_path: Path) -> None:
    places = [open_shared_spill(str(tmp_path), name) for name in ("cluster-1", "cluster-2")]
    first, second = (place for place in places if place is not None)
    assert first.uri == f"{tmp_path}/cluster-1"
    fill(LocalStore(tmp_path / "cluster-2"), "job", ONE, is_complete=True)
    assert first.sweep(lambda _: False) == []
    assert second.found("job", [ONE]) == {ONE}
    assert open_shared_spill("", "cluster-1") is None
    with pytest.raises(ConfigurationError, match=r"taskmanager\.spill\.shared-dir: spill must be"):
        open_shared_spill("spill", "cluster-1")
