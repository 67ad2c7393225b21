"""Aim: what is complete on shared storage is lost with no TaskManager, and is removed by the JobManager alone.

Method: stories of the job's machine, as those of partial restarts; and the store on a directory and in memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from common.spill_paths import index_path, partition_path
from jobmanager.graph.execution_attempt import AttemptState
from jobmanager.messages import job_effects, job_events
from jobmanager.messages.job_state import JobState
from jobmanager.partitions.partition_tracker import SHARED_STORAGE
from jobmanager.stores.shared_spill_store import SharedSpillStore, open_shared_spill
from penstock.errors import ConfigurationError
from penstock.partition_id import PartitionId
from penstock.storage.local_store import LocalStore
from penstock.storage.memory_store import MemoryStore
from penstock.storage.object_store import ObjectStore
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


def test_kept_and_persisted_outputs_stay_with_their_taskmanagers() -> None:
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
