"""Aim: a source that lists for ever reads each split once, whatever fails, and what its checkpoints cost does not
grow with what it has read.

Method: the real assigner, coordinator, store code and restore, readers that are a few lines, and drawn stories of
listings (also empty ones), checkpoints that are declined, not stored or settled, confirmations that do not
arrive, restarts of one reader and of all, other leaders and other parallelisms. What a reader has read is rolled
back with it, so the rows that count are known.
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from common.done_splits import SEALED_FROM
from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_store_runner import CheckpointStoreRunner
from jobmanager.checkpoint.completed_checkpoint import SnapshotSummary
from jobmanager.checkpoint.coordinator import CheckpointCoordinator
from jobmanager.checkpoint.done_splits_store import read_done_splits
from jobmanager.checkpoint.settings import CheckpointSettings
from jobmanager.checkpoint.snapshot_convert import references_of
from jobmanager.checkpoint.stored_operators import StoredOperators
from jobmanager.graph.execution_attempt import AttemptKey, SubtaskId
from jobmanager.graph.execution_graph import ExecutionGraph
from jobmanager.job.restored_tasks import restored_checkpoint, restored_tasks
from jobmanager.job.source_splits import SourceSplits
from jobmanager.messages import job_effects, job_events
from jobmanager.rpc.graph_convert import plan_of
from penstock.connectors.source import PART_OF, Split
from penstock.errors import StoreTransient, Unrecoverable
from penstock.graph.restore_check import check_restore
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.checkpoint_properties import (
    BehindBarrier,
    CheckpointKind,
    CheckpointProperties,
)
from penstock.storage.fsck import check_store
from penstock.storage.head import HeadOutcomeUnknown
from penstock.storage.local_store import LocalStore
from penstock.storage.manifest import decode_manifest, references
from penstock.storage.memory_store import MemoryStore
from penstock.storage.object_store import ObjectStore
from penstock.storage.restore_point import RestorePoint
from penstock.storage.snapshot_files import StoreSnapshotReader
from penstock.storage.split_digest import digest_of
from penstock.storage.stored_state import stored_rows, stored_states
from taskmanager.operators.done_names import DoneNames
from tests.support.jobs import DEADLINE_S

JOB = "ab" * 16
VERTEX, UID = "v0", "files"
DAY_MS = 86_400_000
MANIFEST_MAX = 3_000
"""Bytes of a manifest of two readers, whatever they have read."""


def graph_of(parallelism: int) -> graph_pb2.JobGraph:
    vertex = graph_pb2.Vertex(id=VERTEX, parallelism=parallelism, max_parallelism=8)
    vertex.operators.add(uid=UID).source.bounded = False
    vertex.operators.add(uid="sink").sink.discard.SetInParent()
    return graph_pb2.JobGraph(name="watch", vertices=[vertex])


@dataclass
class Reader:
    """A subtask: what it is to read, and what of that a checkpoint is to name."""

    key: AttemptKey
    open: list[str] = field(default_factory=list)
    done: DoneNames = field(default_factory=DoneNames)
    rows: Counter[str] = field(default_factory=Counter)

    def read(self, count: int) -> None:
        for split_id in self.open[:count]:
            self.rows[split_id] += 1
            self.done.append(split_id)
        del self.open[:count]

    def snapshot(self, checkpoint_id: int) -> checkpoint_pb2.SubtaskSnapshot:
        snapshot = checkpoint_pb2.SubtaskSnapshot(
            vertex=VERTEX, subtask_index=self.key.subtask_index
        )
        source = snapshot.operators.add(operator_uid=UID)
        for split_id in self.done.snapshot(checkpoint_id):
            source.splits.add(id=split_id, done=True)
        for split_id in self.open:
            source.splits.add(id=split_id, size=1)
        return snapshot


class FailingPuts:
    """Mixed into a store: some writes fail."""

    failing = 0
    written = 0

    def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        if self.failing:
            self.failing -= 1
            if not self.failing:
                raise StoreTransient("the disk is away")
        size: int = super().put(path, chunks)  # type: ignore[misc]
        self.written += size
        return size


class Disk(FailingPuts, LocalStore):
    """A directory."""


class Memory(FailingPuts, MemoryStore):
    """Storage ``jobmanager``."""


class World:
    """One job with one source over its restarts."""

    def __init__(self, store: Any, settings: CheckpointSettings, parallelism: int = 2) -> None:
        self.store: Any = store
        self.settings = settings
        self.now_ms = 1_000
        self.leader_epoch = 0
        self.listed: list[str] = []
        self.attempt = 0
        self.rows_at: dict[int, list[Counter[str]]] = {}
        self.latest = 0
        self.lead(parallelism)

    # ------------------------------------------------------------ restarts

    def lead(self, parallelism: int) -> None:
        """A new JobManager begins everything again."""
        self.leader_epoch += 1
        self.graph = graph_of(parallelism)
        self.plan = plan_of(self.graph)
        self.parallelism = parallelism
        self.checkpoints = CheckpointStoreRunner(
            JOB,
            self.graph,
            self.store,
            leader_epoch=self.leader_epoch,
            version="1",
            now_ms=lambda: self.now_ms,
        )
        self.coordinator: CheckpointCoordinator | None = None
        self.restart_all()

    def restart_all(self) -> None:
        found = self._prepared(None)
        rows = sum(self.rows_at.get(self.latest, []), Counter())
        self.splits = SourceSplits(self.plan, found)
        self.attempt += 1
        self.readers = [
            Reader(AttemptKey(VERTEX, index, self.attempt)) for index in range(self.parallelism)
        ]
        # Who had read what does not matter any more.
        self.readers[0].rows = rows
        self.rows_at[self.latest] = [reader.rows.copy() for reader in self.readers]
        for split in found.splits if found is not None else ():
            if not split.done:
                self.readers[split.subtask_index].open.append(split.split_id)
        self._start()

    def restart_one(self, index: int) -> None:
        subtask = SubtaskId(VERTEX, index)
        found = self._prepared(frozenset({subtask}))
        self.splits.restart([subtask], found)
        self.attempt += 1
        reader = self.readers[index] = Reader(AttemptKey(VERTEX, index, self.attempt))
        reader.rows = self.rows_at[self.latest][index].copy()
        for split in found.splits if found is not None else ():
            if split.subtask_index == index and not split.done:
                reader.open.append(split.split_id)
        self._tell(self.splits.told_again([subtask], ExecutionGraph(self.plan)))
        self._start()

    def _prepared(self, alone: frozenset[SubtaskId] | None) -> Any:
        if self.coordinator is not None:
            self._step(c.TasksStopped(self.now_ms))
        found = self.checkpoints.starts.prepare(must_exist=self.leader_epoch > 1, alone=alone)
        if self.coordinator is None:
            self.coordinator = CheckpointCoordinator(
                self.settings,
                retained=found.retained,
                next_checkpoint_id=found.next_checkpoint_id,
                leader_epoch=self.leader_epoch,
            )
        if found.newest is None:
            assert not self.latest
            return None
        assert found.newest.checkpoint_id == self.latest
        tasks = restored_tasks(found.newest, self.graph, alone)
        return restored_checkpoint(self.latest, tasks, self.graph, found.done)

    def _start(self) -> None:
        tasks = tuple(c.TaskView(reader.key, ()) for reader in self.readers)
        self._step(c.TasksStarted(tasks, self.now_ms))

    # ------------------------------------------------------------ reading

    def report(self, split_ids: Iterable[str]) -> None:
        """Subtask 0 has found these."""
        splits = tuple(Split(split_id, size=1) for split_id in split_ids)
        event = job_events.SplitsReported(self.readers[0].key, UID, splits, final=False)
        self._tell(self.splits.assign(event, ExecutionGraph(self.plan)))

    def add(self, *split_ids: str) -> None:
        self.listed += split_ids
        self.report(split_ids)

    def list_again(self) -> None:
        """What was listed before is reported again where subtask 0 has begun again, or the mount was away."""
        self.report(self.listed)

    def _tell(self, told: Iterable[job_effects.AddSplits]) -> None:
        for each in told:
            self.readers[each.key.subtask_index].open += [split.id for split in each.splits]

    def read_all(self) -> None:
        for reader in self.readers:
            reader.read(len(reader.open))

    def rows(self) -> Counter[str]:
        return sum((reader.rows for reader in self.readers), Counter())

    # ------------------------------------------------------------ checkpoints

    def checkpoint(
        self,
        *,
        declined: bool = False,
        failing: int = 0,
        unknown: str = "",
        deaf: int = -1,
        is_full: bool = False,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> bool:
        """Takes one; whether it is complete.

        Args:
            failing: the write that fails, counted from 1; 0 = none.
            unknown: "stored" or "not stored": what nobody is told.
            deaf: the reader that does not hear of its end.
            meanwhile: done when the store has it, or has not, and before anybody hears of that.
        """
        self.now_ms += 1_000
        properties = CheckpointProperties(is_full=is_full)
        request = c.CheckpointRequested(f"r{self.now_ms}", self.now_ms, properties)
        effects = self._step(request)
        while any(isinstance(effect, c.ReserveIds) for effect in effects):
            effects = self._step(c.IdsReserved(self.checkpoints.reserve_ids(), self.now_ms))
        (trigger,) = (effect for effect in effects if isinstance(effect, c.TriggerTasks))
        checkpoint_id = trigger.checkpoint_id
        self.rows_at[checkpoint_id] = [reader.rows.copy() for reader in self.readers]
        stored = None
        for reader in self.readers:
            snapshot = reader.snapshot(checkpoint_id)
            event: c.CoordinatorEvent = c.AckReceived(
                reader.key,
                checkpoint_id,
                snapshot,
                references_of(snapshot),
                SnapshotSummary(),
                self.now_ms,
                self.leader_epoch,
            )
            if declined and reader is self.readers[-1]:
                event = c.DeclineReceived(
                    reader.key, checkpoint_id, "no", self.now_ms, leader_epoch=self.leader_epoch
                )
            for effect in self._step(event):
                stored = effect if isinstance(effect, c.StoreCheckpoint) else stored
        if stored is None:
            self._aborted(checkpoint_id, deaf)
            return False
        self.store.failing = failing
        answer = self._stored(stored, unknown, meanwhile)
        self.store.failing = 0
        if not isinstance(answer, c.CheckpointStored):
            self._step(answer)
            self._aborted(checkpoint_id, deaf)
            return False
        self.splits.completed(answer.done)
        self._step(answer)
        self.latest = checkpoint_id
        for reader in self.readers:
            if reader.key.subtask_index != deaf:
                reader.done.completed(checkpoint_id)
        return True

    def _stored(
        self, wanted: c.StoreCheckpoint, unknown: str, meanwhile: Callable[[], object]
    ) -> c.CheckpointStored | c.CheckpointNotStored:
        done = self.splits.done
        if not unknown:
            answer = self.checkpoints.store(wanted, (), {}, done)
            meanwhile()
            return answer
        if unknown == "stored":
            self.checkpoints.store(wanted, (), {}, done)
        self.checkpoints.give_up(wanted.checkpoint_id)
        if unknown != "stored":
            with pytest.raises(HeadOutcomeUnknown):
                self.checkpoints.store(wanted, (), {}, done)
        self._step(c.StoreOutcomeUnknown(wanted.checkpoint_id, "it hangs", self.now_ms))
        meanwhile()
        return self.checkpoints.settle(wanted.checkpoint_id)

    def _aborted(self, checkpoint_id: int, deaf: int) -> None:
        for reader in self.readers:
            if reader.key.subtask_index != deaf:
                reader.done.aborted(checkpoint_id)

    def _step(self, event: c.CoordinatorEvent) -> list[c.CoordinatorEffect]:
        assert self.coordinator is not None
        effects = self.coordinator.step(event)
        self.coordinator.check()
        for effect in effects:
            if isinstance(effect, c.DeleteFiles):
                effects = effects + self._step(self.checkpoints.deletions.delete(effect.paths))
        return effects

    # ------------------------------------------------------------ looking

    def manifest_bytes(self) -> bytes:
        assert self.coordinator is not None
        assert self.coordinator.latest_completed is not None
        content: bytes = self.store.get(self.coordinator.latest_completed.manifest_path)
        return content

    def paths(self) -> set[str]:
        return {found.path for found in self.store.list("")}


SETTINGS = CheckpointSettings(interval_ms=None)


def files(first: int, count: int) -> list[str]:
    return [f"/data/in/part-{number:06}.parquet" for number in range(first, first + count)]


@pytest.fixture(params=["filesystem", "jobmanager"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "filesystem":
        return Disk(tmp_path / JOB)
    return Memory(10_000_000)


def test_what_a_checkpoint_costs_does_not_grow_with_what_is_done(store: Any) -> None:
    world = World(store, SETTINGS)
    sizes, written = [], []
    for number in range(60):
        world.add(*files(number * 20, 20))
        world.read_all()
        before = store.written
        assert world.checkpoint()
        sizes.append(len(world.manifest_bytes()))
        written.append(store.written - before)
    world.list_again()
    assert world.rows() == Counter(files(0, 1_200))
    # By name it is 40 bytes for each of 1,200 files in the last one.
    assert max(sizes[-15:]) <= max(sizes[5:20]) + 500
    assert max(sizes) < MANIFEST_MAX
    assert sum(written) < 60 * (MANIFEST_MAX + 20 * 16 * 20)
    assert not [path for path in world.paths() if "part-" in path]


def test_readers_and_the_assigner_forget_names(store: Any) -> None:
    world = World(store, SETTINGS)
    for number in range(10):
        world.add(*files(number * 100, 100))
        world.read_all()
        assert world.checkpoint()
    assigner = world.splits.assigner(VERTEX, UID)
    assert assigner is not None
    assert [assigner.owned_by(index) for index in (0, 1)] == [[], []]
    assert [assigner.assigned_to(index) for index in (0, 1)] == [(), ()]
    assert not assigner._open_wholes
    assert len(assigner.done) == 1_000
    assert all(reader.done.snapshot(99) == [] for reader in world.readers)


def test_a_mount_that_is_away_for_a_minute_is_not_read_again(store: Any) -> None:
    world = World(store, SETTINGS)
    world.add(*files(0, 100))
    world.read_all()
    assert world.checkpoint()
    world.report([])
    assert world.checkpoint()
    world.list_again()
    world.lead(2)
    world.report([])
    world.list_again()
    world.read_all()
    assert world.rows() == Counter(files(0, 100))


def test_what_an_aborted_checkpoint_had_sealed_joins_the_next(store: Any) -> None:
    world = World(store, SETTINGS)
    for number, failed in enumerate(
        [{"declined": True}, {"failing": 1}, {"failing": 2}, {"unknown": "not stored"}]
    ):
        world.add(*files(number * 100, 100))
        world.read_all()
        assert not world.checkpoint(**failed)  # type: ignore[arg-type]
        assert len(world.paths()) == 1  # HEAD
    assert world.checkpoint(unknown="stored")
    manifest = decode_manifest(world.manifest_bytes())
    assert [chunk.size_bytes for done in manifest.done_splits for chunk in done.chunks] == [6_400]
    world.lead(2)
    world.list_again()
    assert world.rows() == Counter(files(0, 400))


def test_what_is_read_while_a_checkpoint_is_stored_belongs_to_the_next(store: Any) -> None:
    world = World(store, SETTINGS)
    world.add(*files(0, 100))
    world.readers[0].read(20)
    assert world.checkpoint(meanwhile=world.read_all)
    assert world.checkpoint()
    world.lead(2)
    world.list_again()
    world.read_all()
    assert world.rows() == Counter(files(0, 100))


def test_a_reader_may_go_on_from_a_checkpoint_that_nobody_has_heard_of_yet(store: Any) -> None:
    world = World(store, SETTINGS)
    world.add(*files(0, 10))
    world.read_all()

    def restart() -> None:
        world.latest = 1
        world.restart_one(1)

    world.checkpoint(unknown="stored", meanwhile=restart)
    world.read_all()
    assert world.rows() == Counter(files(0, 10))
    assert world.checkpoint()
    world.lead(2)
    world.list_again()
    assert world.rows() == Counter(files(0, 10))


def test_a_checkpoint_that_is_full_refers_to_no_older_one(store: Any) -> None:
    world = World(store, SETTINGS)
    for number in range(5):
        world.add(*files(number * 100, 100))
        world.read_all()
        assert world.checkpoint()
    assert world.checkpoint(is_full=True)
    left = world.paths()
    assert len(left) == 3, "HEAD, the manifest, and all splits in one file"
    assert world.checkpoint()
    world.lead(1)
    world.list_again()
    assert world.rows() == Counter(files(0, 500))


def test_a_savepoint_has_them_in_itself_and_a_job_that_starts_from_it_has_files_of_its_own(
    tmp_path: Path,
) -> None:
    world = World(Disk(tmp_path / JOB), SETTINGS)
    for number in range(3):
        world.add(*files(number * 100, 100))
        world.read_all()
        assert world.checkpoint()
    world.add(*files(300, 5))
    world.read_all()
    before = world.paths()
    properties = CheckpointProperties(kind=CheckpointKind.SAVEPOINT, target=str(tmp_path / "s"))
    wanted = c.StoreCheckpoint(
        checkpoint_id=99,
        triggered_at_ms=0,
        snapshots=tuple((one.key, one.snapshot(99)) for one in world.readers),
        finished=(),
        replaced=(),
        retained=(),
        next_checkpoint_id=0,
        state_bytes=0,
        properties=properties,
    )
    manifest = world.checkpoints.savepoint_manifest(wanted, (), {}, world.splits.done)
    assert world.paths() == before
    assert not references(manifest)
    (done,) = read_done_splits(manifest, StoreSnapshotReader(None)).values()
    assert all(done.holds(files(0, 305)))
    # As a checkpoint of another job's directory, its files are read there and written anew.
    other = RestorePoint(
        "x", str(tmp_path / JOB), world.store, decode_manifest(world.manifest_bytes()), ""
    )
    (done,) = read_done_splits(other.located(), StoreSnapshotReader(None)).values()
    assert not done.chunks
    assert done.holds(files(0, 305)) == [True] * 300 + [False] * 5


def test_the_savepoint_that_a_job_is_stopped_with_has_all_of_them_in_itself(tmp_path: Path) -> None:
    """Those of checkpoints before as well, of which nobody has names any more."""
    world = World(Disk(tmp_path / JOB), SETTINGS)
    for number in range(3):
        world.add(*files(number * 100, 100))
        world.read_all()
        assert world.checkpoint()
    world.add(*files(300, 5))
    world.read_all()
    target = str(tmp_path / "s")
    world.checkpoints.savepoint(target).begin()
    wanted = c.StoreCheckpoint(
        checkpoint_id=99,
        triggered_at_ms=0,
        snapshots=tuple((one.key, one.snapshot(99)) for one in world.readers),
        finished=(),
        replaced=(),
        retained=(99,),
        next_checkpoint_id=200,
        state_bytes=0,
        properties=CheckpointProperties(target=target, behind=BehindBarrier.HOLD),
    )
    stored = world.checkpoints.store(wanted, (), {}, world.splits.done)
    assert isinstance(stored, c.CheckpointStored)
    manifest = decode_manifest(LocalStore(Path(target)).get("manifest"))
    assert not references(manifest)
    (done,) = read_done_splits(manifest, StoreSnapshotReader(None)).values()
    assert all(done.holds(files(0, 305)))


def test_done_splits_are_state_of_their_source(store: Any) -> None:
    """Listed, refused where the source is gone, and no less so where nothing else is left of it."""
    world = World(store, SETTINGS)
    for first, count in ((0, 100), (100, 5)):
        world.add(*files(first, count))
        world.read_all()
        assert world.checkpoint()
    manifest = decode_manifest(world.manifest_bytes())
    (state,) = stored_states(manifest, None)
    assert (state.uid, state.name, state.rows) == (UID, "done splits", 105)
    rows = list(stored_rows(manifest, StoreSnapshotReader(world.store), UID, "done splits"))
    names = files(0, 105)
    assert sorted(row["digest"] for row in rows) == sorted({digest_of(n).hex() for n in names})

    without = graph_of(2)
    del without.vertices[0].operators[0]
    with pytest.raises(Unrecoverable, match="has state of operator"):
        StoredOperators(manifest).check(without)
    refused = check_restore(without, manifest, ignores_unclaimed=False).refusals
    assert len(refused) == 1
    assert "splits" in refused[0]
    for subtask in manifest.subtasks:
        subtask.operators[0].split_parallelism = 2
    tasks = restored_tasks(manifest, graph_of(3))
    assert [task.operators[0].split_parallelism for task in tasks.values()] == [2, 2, 2]


def test_a_damaged_file_of_done_splits_is_noticed_before_anything_starts(tmp_path: Path) -> None:
    store = Disk(tmp_path / JOB)
    world = World(store, CheckpointSettings(interval_ms=None, retained_max=2))
    world.add(*files(0, 100))
    world.read_all()
    assert world.checkpoint()
    older, rows = world.latest, world.rows()
    world.add(*files(100, 500))
    world.read_all()
    assert world.checkpoint()
    newest = max(path for path in world.paths() if "done-splits" in path)
    content = bytearray(store.get(newest))
    content[-1] ^= 1
    store.delete(newest)
    store.put(newest, [bytes(content)])
    (job,) = check_store(str(tmp_path)).jobs
    assert [problem.path for problem in job.problems] == [newest]
    world.latest = older
    world.lead(2)
    assert world.rows() == rows
    world.list_again()
    world.read_all()
    assert world.rows() == Counter(files(0, 600))


def test_a_checkpoint_of_an_older_version_names_them(tmp_path: Path) -> None:
    world = World(Disk(tmp_path / JOB), SETTINGS)
    world.add(*files(0, 10))
    world.read_all()
    snapshots = [reader.snapshot(1) for reader in world.readers]
    manifest = checkpoint_pb2.CheckpointManifest(checkpoint_id=1, vertices=[], subtasks=snapshots)
    for vertex in world.graph.vertices:
        described = manifest.vertices.add(id=vertex.id, parallelism=2, max_parallelism=8)
        for operator in vertex.operators:
            described.operators.add(uid=operator.uid)
    found = restored_checkpoint(1, restored_tasks(manifest, world.graph), world.graph)
    splits = SourceSplits(world.plan, found)
    assert [len(one.done) for one in splits.done] == [10]
    world.splits = splits
    world.add(*files(10, 1))
    world.list_again()
    assert [one for reader in world.readers for one in reader.open] == files(10, 1)


def test_who_begins_again_is_told_only_what_its_checkpoint_does_not_name(store: Any) -> None:
    world = World(store, SETTINGS)
    world.add(*files(0, 10))
    world.readers[1].read(2)
    assert world.checkpoint()
    world.add(*files(10, 10))
    world.readers[1].read(5)
    world.restart_one(1)
    world.read_all()
    assert world.rows() == Counter(files(0, 20))


def test_a_file_that_is_replaced_is_not_read_again(store: Any) -> None:
    """Neither a whole one, which has its path for an id, nor one in parts of another content."""
    world = World(store, SETTINGS)
    whole, large = "/data/in/a.csv", "/data/in/b.parquet"
    first = [f"{large}{PART_OF}1f{PART_OF}{part}" for part in range(3)]
    world.add(whole, *first)
    for begin_again in (lambda: None, lambda: world.lead(1), lambda: world.restart_one(0)):
        world.read_all()
        assert world.checkpoint()
        begin_again()
        world.report([whole, *(f"{large}{PART_OF}2e{PART_OF}{part}" for part in range(4)), large])
        world.report([f"{whole}{PART_OF}3d{PART_OF}0", *first])
        world.read_all()
        assert world.rows() == Counter([whole, *first])


@pytest.mark.parametrize("seed", range(8 if os.environ.get("PENSTOCK_TESTS") != "all" else 200))
def test_each_split_is_read_once_whatever_happens(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    root = tmp_path / JOB
    retained = draw.choice([1, 1, 3])
    world = World(Disk(root), CheckpointSettings(interval_ms=None, retained_max=retained))
    total = 0
    for _ in range(draw.randint(20, 60)):
        what = draw.choice(
            ["add", "add", "read", "read", "checkpoint", "checkpoint", "one", "all", "lead", "away"]
        )
        if what == "add":
            count = draw.choice([1, 5, 200])
            world.add(*_drawn_files(draw, total, count))
            total += count
        elif what == "read":
            world.readers[draw.randrange(world.parallelism)].read(draw.choice([1, 3, 1_000]))
        elif what == "checkpoint":
            world.checkpoint(
                declined=draw.random() < 0.1,
                failing=draw.choice([0] * 8 + [1, 2]),
                unknown=draw.choice([""] * 8 + ["stored", "not stored"]),
                deaf=draw.choice([-1, -1, -1, 0]),
                is_full=draw.random() < 0.1,
                meanwhile=world.read_all if draw.random() < 0.2 else lambda: None,
            )
        elif what == "one":
            world.restart_one(draw.randrange(world.parallelism))
        elif what == "all":
            world.restart_all()
            world.list_again()
        elif what == "lead":
            world.lead(draw.randint(1, 4))
            world.list_again()
        else:
            world.report([])
            world.list_again()
        assert max(world.rows().values(), default=0) <= 1
    world.read_all()
    assert world.rows() == Counter(world.listed)
    assert world.checkpoint()
    assert len(world.manifest_bytes()) < MANIFEST_MAX * 2
    (job,) = check_store(str(tmp_path), now_ms=10 * DAY_MS * 365 * 60).jobs
    assert not job.problems
    chunks = [path for path in world.paths() if "done-splits" in path]
    assert set(chunks) == {one.path for one in job.files}
    assert len(world.splits.done[0].done.loose) < SEALED_FROM


def _drawn_files(draw: random.Random, first: int, count: int) -> list[str]:
    """Files, some of them in parts."""
    if count == 5 and draw.random() < 0.5:
        whole = f"/data/in/large-{first}.parquet"
        return [f"{whole}{PART_OF}content{PART_OF}{part}" for part in range(count)]
    return files(first, count)


class SlowHead(Memory):
    """Answers one read of HEAD when it is told to."""

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.hangs, self.go_on = threading.Event(), threading.Event()
        self.is_slow = False

    @override
    def get(self, path: str) -> bytes:
        if self.is_slow and path == "HEAD":
            self.is_slow = False
            self.hangs.set()
            assert self.go_on.wait(DEADLINE_S)
        return super().get(path)


def test_who_settles_late_deletes_nothing_that_a_newer_checkpoint_names() -> None:
    store = SlowHead()
    world = World(store, CheckpointSettings(interval_ms=1000), 2)
    late = list[BaseException]()

    def settle_late() -> None:
        try:
            world.checkpoints.settle(1)
        except StoreTransient as error:
            late.append(error)

    thread = threading.Thread(target=settle_late)

    def given_up_on() -> None:
        store.is_slow = True
        thread.start()
        assert store.hangs.wait(DEADLINE_S)

    world.add(*(f"f{i}" for i in range(100)))  # so many that they lie in a file of their own
    world.read_all()
    assert world.checkpoint(unknown="stored", meanwhile=given_up_on)
    world.add("g")
    world.read_all()
    assert world.checkpoint()
    store.go_on.set()
    thread.join(DEADLINE_S)
    assert [str(error) for error in late] == ["what became of checkpoint 1 was found out meanwhile"]
    world.lead(2)
