"""Aim: under any order of events a checkpoint completes once and only with all acks, nothing that is referred
to is ever deleted, everything else is in the end, and counts are what completed checkpoints name.

Method: a random history against a model that keeps sets only: a disk, tasks with backends that refer to
what they believe confirmed (notifications reach them late or never), and the contents of each checkpoint.
Backends step back from merged files to older ones, drop and re-upload what they like: worse than any real one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, assert_never

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from typing_extensions import override

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_ids import IDS_RESERVED_AT_ONCE
from jobmanager.checkpoint.completed_checkpoint import SnapshotSummary
from jobmanager.checkpoint.coordinator import CheckpointCoordinator
from jobmanager.checkpoint.settings import CheckpointSettings
from jobmanager.graph.execution_attempt import AttemptKey
from penstock.storage.checkpoint_properties import PLAIN
from penstock.storage.manifest import SharedIdentity, StoredRange, StoredReference
from tests.support.checkpoints import AT_THE_END, of_type
from tests.support.examples import examples

VERTICES = {"left": (), "right": (), "join": ("left", "right"), "sink": ("join",)}
NAMES = [f"file-{number}" for number in range(3)]
name_sets = st.sets(st.sampled_from(NAMES))


@dataclass
class ModelCheckpoint:
    """What the model knows of one checkpoint under way."""

    participants: set[AttemptKey]
    finished: set[AttemptKey]
    acks: dict[AttemptKey, tuple[StoredReference, ...]] = field(default_factory=dict)
    resolved: set[str] = field(default_factory=set)
    final: tuple[StoredReference, ...] = ()


@dataclass
class ModelTask:
    """A running subtask and what its backend believes to be confirmed."""

    finished: bool
    confirmed: dict[SharedIdentity, StoredRange]
    acked: dict[int, dict[SharedIdentity, StoredRange]] = field(default_factory=dict)
    notices: list[int] = field(default_factory=list)


class CoordinatorModel(RuleBasedStateMachine):
    """The coordinator and its world."""

    @initialize(
        interval_ms=st.sampled_from([None, 1, 1_000]),
        min_pause_ms=st.sampled_from([0, 500]),
        max_concurrent=st.integers(1, 3),
        retained_max=st.integers(1, 3),
        tolerable_failed=st.sampled_from([-1, 2]),
    )
    def create(self, **numbers: Any) -> None:
        self.settings = CheckpointSettings(timeout_ms=60_000, **numbers)
        self.machine = CheckpointCoordinator(self.settings, retained=(), next_checkpoint_id=1)
        self.ids_end = 1 + IDS_RESERVED_AT_ONCE
        """In HEAD: whoever claims it next begins there."""
        self.ids_end_with_store = 0
        self.is_reserving = self.was_not_reserved = False
        self.now_ms = 50_000
        self.attempt = -1
        self.paths = 0
        self.disk: set[str] = set()
        self.tasks: dict[AttemptKey, ModelTask] = {}
        self.old_keys: list[AttemptKey] = [AttemptKey("nobody", 0, 0)]
        self.pending: dict[int, ModelCheckpoint] = {}
        self.storing: int | None = None
        self.is_unsettled = False
        self.kept: dict[int, tuple[StoredReference, ...]] = {}
        self.ever_completed: set[int] = set()
        self.deleting: tuple[str, ...] = ()
        self.open_requests: set[str] = set()
        self.requests = 0
        self.start_tasks()

    # ------------------------------------------------------------ the world

    def send(self, event: c.CoordinatorEvent) -> list[c.CoordinatorEffect]:
        effects = self.machine.step(event)
        self.machine.check()
        for kind in (c.StoreCheckpoint, c.DeleteFiles, c.CallAt, c.NotifyCompleted):
            assert len(of_type(effects, kind)) <= 1
        for effect in effects:
            self.apply(effect)
        return effects

    def apply(self, effect: c.CoordinatorEffect) -> None:
        match effect:
            case c.TriggerTasks():
                self.apply_trigger(effect)
            case c.StoreCheckpoint():
                self.apply_store(effect)
            case c.NotifyCompleted():
                for task in self.known(effect.keys):
                    assert not task.finished
                    task.notices.append(effect.checkpoint_id)
            case c.NotifyAborted():
                assert all(not task.finished for task in self.known(effect.keys))
            case c.ReportAborted():
                del self.pending[effect.checkpoint_id]
                if self.storing == effect.checkpoint_id:
                    self.storing, self.is_unsettled = None, False
                assert effect.at_risk_ms >= 0
            case c.AnswerRequest():
                self.open_requests.remove(effect.request_id)
            case c.DeleteFiles():
                assert not self.deleting
                assert not self.referred() & set(effect.paths)
                self.deleting = effect.paths
            case c.SettleCheckpoint():
                assert effect.checkpoint_id == self.storing
                assert not self.is_unsettled
                self.is_unsettled = True
            case c.ReserveIds():
                assert self.storing is None
                assert not self.is_reserving
                assert self.machine.next_checkpoint_id == self.ids_end, "some are left"
                self.is_reserving, self.was_not_reserved = True, False
            case c.CallAt():
                assert effect.at_ms >= self.now_ms
            case c.ReportCompleted():
                assert effect.duration_ms >= 0
            case c.FailJob():
                assert self.settings.tolerable_failed >= 0
            case _:
                assert_never(effect)

    def apply_trigger(self, effect: c.TriggerTasks) -> None:
        running = set(self.running())
        done = set(self.tasks) - running
        vertices_done = {key.vertex for key in done}
        known = self.pending.get(effect.checkpoint_id)
        if known is not None:  # the last of their producers has finished meanwhile
            assert set(effect.keys) <= known.participants - known.acks.keys() - done
            assert all(vertices_done.issuperset(VERTICES[key.vertex]) for key in effect.keys)
            return
        assert set(effect.keys) == {
            key for key in running if vertices_done.issuperset(VERTICES[key.vertex])
        }
        assert effect.checkpoint_id > max(self.ever_completed, default=0)
        assert effect.checkpoint_id < self.ids_end, "another leader may use it as well"
        assert not self.is_unsettled
        self.pending[effect.checkpoint_id] = ModelCheckpoint(running, done)
        assert len(self.pending) <= self.settings.max_concurrent

    def apply_store(self, effect: c.StoreCheckpoint) -> None:
        checkpoint = self.pending[effect.checkpoint_id]
        assert self.storing is None
        assert not self.is_unsettled
        assert not self.is_reserving
        self.ids_end_with_store = effect.next_checkpoint_id
        assert {key for key, _ in effect.snapshots} == checkpoint.participants
        assert checkpoint.acks.keys() == checkpoint.participants
        assert set(effect.finished) == checkpoint.finished
        kept = [*sorted(self.kept), effect.checkpoint_id]
        assert list(effect.retained) == kept[-self.settings.retained_max :]
        replaced = dict(effect.replaced)
        final = {}
        for references in checkpoint.acks.values():
            for reference in references:
                key, location = reference.identity, reference.location
                if key is not None:
                    location = replaced.get(key, location)
                    assert location.checksum == reference.location.checksum
                    assert location == self.locations().get(key, location)
                final[key or location] = StoredReference(key, location)
        checkpoint.final = tuple(final.values())
        assert {reference.location.path for reference in checkpoint.final} <= self.disk
        self.storing = effect.checkpoint_id

    def locations(self) -> dict[SharedIdentity, StoredRange]:
        """Where shared files of kept checkpoints lie."""
        return {
            reference.identity: reference.location
            for references in self.kept.values()
            for reference in references
            if reference.identity is not None
        }

    def referred(self) -> set[str]:
        """Paths that a kept checkpoint, one being stored or an ack refers to."""
        paths = {r.location.path for references in self.kept.values() for r in references}
        paths |= {f"chk-{checkpoint_id}/manifest" for checkpoint_id in self.kept}
        for checkpoint in self.pending.values():
            paths |= checkpoint.resolved
            paths |= {reference.location.path for reference in checkpoint.final}
        return paths

    def known(self, keys: tuple[AttemptKey, ...]) -> list[ModelTask]:
        """The tasks of these keys; some may have been stopped, which the coordinator tells all the same."""
        assert set(keys) <= {*self.tasks, *self.old_keys}
        return [self.tasks[key] for key in keys if key in self.tasks]

    def running(self) -> list[AttemptKey]:
        return [key for key, task in self.tasks.items() if not task.finished]

    def seldom(self) -> bool:
        """Keeps events that end much from ending everything before it has become interesting."""
        return self.machine.next_checkpoint_id % 5 == 0

    def upload(self) -> str:
        self.paths += 1
        path = f"shared/{self.paths}"
        self.disk.add(path)
        return path

    def snapshot(self, key: AttemptKey, names: set[str]) -> tuple[StoredReference, ...]:
        """What a backend hands in: confirmed files by reference, the others in one new packed file."""
        task = self.tasks[key]
        packed = self.upload()
        references = [StoredReference(None, StoredRange(packed, 0, 5, 5))]
        for offset, name in enumerate(sorted(names), start=1):
            shared_key = SharedIdentity(key.vertex, 0, "instance", name)
            new = StoredRange(packed, 10 * offset, 10, NAMES.index(name))
            references.append(StoredReference(shared_key, task.confirmed.get(shared_key, new)))
        return tuple(references)

    # ------------------------------------------------------------ tasks

    @precondition(lambda self: not self.tasks or self.seldom())
    @rule()
    def start_tasks(self) -> None:
        if self.storing is not None:
            return  # whoever restores waits until it is known what the newest checkpoint is
        if self.tasks:
            self.stop_tasks()
        self.attempt += 1
        restored = self.kept[max(self.kept)] if self.kept else ()
        views = []
        for vertex, producers in VERTICES.items():
            key = AttemptKey(vertex, 0, self.attempt)
            confirmed = {
                reference.identity: reference.location
                for reference in restored
                if reference.identity is not None and reference.identity.operator_uid == vertex
            }
            self.tasks[key] = ModelTask(finished=False, confirmed=confirmed)
            feeds = tuple(AttemptKey(producer, 0, self.attempt) for producer in producers)
            views.append(c.TaskView(key, feeds))
        self.send(c.TasksStarted(tuple(views), self.now_ms))

    @precondition(lambda self: self.tasks and self.seldom())
    @rule()
    def stop_tasks(self) -> None:
        self.old_keys += self.tasks
        self.tasks = {}
        self.send(c.TasksStopped(self.now_ms))
        assert set(self.pending) <= {self.storing}

    @precondition(lambda self: self.running() and self.seldom())
    @rule(data=st.data())
    def finish_task(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.running()))
        self.tasks[key].finished = True
        self.send(c.TaskFinished(key, self.now_ms))
        for checkpoint in self.pending.values():
            assert key not in checkpoint.participants or key in checkpoint.acks

    @precondition(lambda self: any(task.notices for task in self.tasks.values()))
    @rule(data=st.data())
    def hear_of_completion(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from([t for t in self.tasks.values() if t.notices]))
        task.confirmed = task.acked.get(task.notices.pop(0), {})

    @rule()
    def hear_of_all_completions(self) -> None:
        for task in self.tasks.values():
            for checkpoint_id in task.notices:
                task.confirmed = task.acked.get(checkpoint_id, {})
            task.notices.clear()

    # ------------------------------------------------------------ checkpoints

    @rule(is_final=st.booleans())
    def request(self, is_final: bool) -> None:
        self.requests += 1
        request_id = f"r{self.requests}"
        self.open_requests.add(request_id)
        self.send(c.CheckpointRequested(request_id, self.now_ms, AT_THE_END if is_final else PLAIN))

    @precondition(lambda self: any(self.missing(number) for number in self.pending))
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        waiting = [number for number in sorted(self.pending) if self.missing(number)]
        checkpoint_id = data.draw(st.sampled_from(waiting))
        key = data.draw(st.sampled_from(self.missing(checkpoint_id)))
        self.acknowledge_one(checkpoint_id, key, data.draw(name_sets))

    @precondition(lambda self: any(self.missing(number) for number in self.pending))
    @rule(data=st.data())
    def acknowledge_all(self, data: st.DataObject) -> None:
        waiting = [number for number in sorted(self.pending) if self.missing(number)]
        checkpoint_id = data.draw(st.sampled_from(waiting))
        for key in self.missing(checkpoint_id):
            if checkpoint_id in self.pending:
                self.acknowledge_one(checkpoint_id, key, data.draw(name_sets))

    @precondition(lambda self: self.running())
    @rule(data=st.data(), is_heard=st.booleans())
    def take_checkpoint(self, data: st.DataObject, is_heard: bool) -> None:
        if len(self.pending) < self.settings.max_concurrent:
            self.request(is_final=False)
        if any(self.missing(number) for number in self.pending):
            self.acknowledge_all(data)
        if self.storing is not None:
            self.store()
        if is_heard:
            self.hear_of_all_completions()

    def missing(self, checkpoint_id: int) -> list[AttemptKey]:
        checkpoint = self.pending[checkpoint_id]
        return sorted((checkpoint.participants - checkpoint.acks.keys()) & self.tasks.keys())

    def acknowledge_one(self, checkpoint_id: int, key: AttemptKey, names: set[str]) -> None:
        checkpoint, in_use = self.pending[checkpoint_id], self.referred()
        references = self.snapshot(key, names)
        locations = self.locations()
        resolved = {
            locations.get(r.identity, r.location).path if r.identity else r.location.path
            for r in references
        }
        checkpoint.acks[key] = references
        checkpoint.resolved |= resolved
        self.tasks[key].acked[checkpoint_id] = {
            r.identity: r.location for r in references if r.identity
        }
        effects = self.send(
            c.AckReceived(key, checkpoint_id, object(), references, SnapshotSummary(), self.now_ms)
        )
        aborted = {r.checkpoint_id: r.reason for r in of_type(effects, c.ReportAborted)}
        if aborted.get(checkpoint_id) is c.AbortReason.DECLINED:
            # Only where the task refers to something old that is nobody's any more.
            new = {r.location.path for r in references if r.identity is None}
            assert resolved - new - in_use
        elif checkpoint_id not in aborted:
            assert resolved <= self.disk

    @rule(data=st.data(), checkpoint_id=st.integers(0, 12))
    def stray_ack(self, data: st.DataObject, checkpoint_id: int) -> None:
        key = data.draw(st.sampled_from([*self.old_keys, *self.tasks]))
        checkpoint = self.pending.get(checkpoint_id)
        if checkpoint and key in checkpoint.participants and key not in checkpoint.acks:
            return
        dropped = self.machine.dropped_events
        references: tuple[StoredReference, ...] = (
            StoredReference(None, StoredRange(self.upload(), 0, 1, 1)),
        )
        if self.kept:
            references += data.draw(st.sampled_from(list(self.kept.values())))
        self.send(
            c.AckReceived(key, checkpoint_id, object(), references, SnapshotSummary(), self.now_ms)
        )
        assert self.machine.dropped_events == dropped + 1

    @precondition(lambda self: self.locations() and self.pending and self.seldom())
    @rule(data=st.data())
    def acknowledge_with_other_bytes(self, data: st.DataObject) -> None:
        checkpoint_id = data.draw(st.sampled_from(sorted(self.pending)))
        missing = self.missing(checkpoint_id)
        if not missing:
            return
        key = data.draw(st.sampled_from(sorted(self.locations(), key=str)))
        wrong = StoredReference(key, StoredRange(self.upload(), 0, 10, 99))
        effects = self.send(
            c.AckReceived(
                missing[0], checkpoint_id, object(), (wrong,), SnapshotSummary(), self.now_ms
            )
        )
        reports = {r.checkpoint_id: r.reason for r in of_type(effects, c.ReportAborted)}
        assert reports[checkpoint_id] is c.AbortReason.STORE_FAILED

    @precondition(lambda self: self.tasks and self.seldom())
    @rule(data=st.data(), checkpoint_id=st.integers(0, 12))
    def decline(self, data: st.DataObject, checkpoint_id: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.tasks)))
        self.send(c.DeclineReceived(key, checkpoint_id, "no", self.now_ms))

    @precondition(lambda self: self.storing is not None)
    @rule()
    def store(self) -> None:
        checkpoint_id = self.storing
        assert checkpoint_id is not None
        self.storing, self.is_unsettled = None, False
        self.ids_end = max(self.ids_end, self.ids_end_with_store)
        final = self.pending.pop(checkpoint_id).final
        manifest = f"chk-{checkpoint_id}/manifest"
        self.disk.add(manifest)
        assert checkpoint_id not in self.ever_completed
        self.ever_completed.add(checkpoint_id)
        self.kept[checkpoint_id] = final
        for old in sorted(self.kept)[: -self.settings.retained_max]:
            del self.kept[old]
        effects = self.send(c.CheckpointStored(checkpoint_id, manifest, self.now_ms))
        [report] = of_type(effects, c.ReportCompleted)
        assert set(report.checkpoint.references) == set(final)
        assert min(self.pending, default=checkpoint_id + 1) > checkpoint_id

    @precondition(lambda self: self.storing is not None and self.seldom())
    @rule(is_too_large=st.booleans())
    def fail_store(self, is_too_large: bool) -> None:
        assert self.storing is not None
        self.send(c.CheckpointNotStored(self.storing, "full", self.now_ms, is_too_large))

    @precondition(lambda self: self.storing is not None and self.seldom())
    @rule()
    def lose_outcome(self) -> None:
        assert self.storing is not None
        self.send(c.StoreOutcomeUnknown(self.storing, "no answer", self.now_ms))
        assert self.is_unsettled
        if len(self.pending) == 1:
            assert not self.open_requests, "who waits is told so at once"

    @precondition(lambda self: self.seldom())
    @rule(checkpoint_id=st.integers(0, 12))
    def stray_store(self, checkpoint_id: int) -> None:
        if checkpoint_id != self.storing:
            self.send(c.CheckpointStored(checkpoint_id, "chk/x", self.now_ms))
            self.send(c.CheckpointNotStored(checkpoint_id, "full", self.now_ms))
            self.send(c.StoreOutcomeUnknown(checkpoint_id, "no answer", self.now_ms))

    @precondition(lambda self: self.is_reserving)
    @rule(count=st.integers(1, 3))
    def reserve(self, count: int) -> None:
        self.ids_end += count * IDS_RESERVED_AT_ONCE
        self.is_reserving = False
        self.send(c.IdsReserved(self.ids_end, self.now_ms))

    @precondition(lambda self: self.is_reserving)
    @rule()
    def fail_to_reserve(self) -> None:
        self.is_reserving, self.was_not_reserved = False, True
        self.send(c.IdsNotReserved("no answer", self.now_ms))
        assert not self.open_requests or self.pending, "who waits is told so"

    # ------------------------------------------------------------ time and files

    @rule(passed_ms=st.sampled_from([0, 1, 1_000, 3_000, 30_000, -1, -40_000]))
    def time_passes(self, passed_ms: int) -> None:
        self.now_ms += passed_ms
        self.send(c.TimeReached(self.now_ms))

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        left: set[str] = set()
        if self.deleting:
            left = data.draw(st.sets(st.sampled_from(self.deleting)))
        self.finish_deletion(tuple(left))

    def finish_deletion(self, left: tuple[str, ...]) -> None:
        self.disk -= set(self.deleting) - set(left)
        self.deleting = ()
        self.send(c.FilesDeleted(left, self.now_ms))

    # ------------------------------------------------------------ what holds always

    @invariant()
    def counts_are_what_completed_checkpoints_name(self) -> None:
        for vertex in VERTICES:
            for name in NAMES:
                key = SharedIdentity(vertex, 0, "instance", name)
                named = [references for references in self.kept.values() if key in keys(references)]
                assert self.machine._files.registry.count(key) == len(named)

    @invariant()
    def everything_kept_is_there(self) -> None:
        assert self.referred() <= self.disk
        assert [kept.checkpoint_id for kept in self.machine.retained] == sorted(self.kept)
        assert [view.checkpoint_id for view in self.machine.pending] == sorted(self.pending)

    @invariant()
    def requests_do_not_wait_for_nothing(self) -> None:
        if not self.pending and not self.is_reserving and not self.was_not_reserved:
            assert not self.open_requests

    @override
    def teardown(self) -> None:
        if not hasattr(self, "machine"):
            return
        if self.tasks:
            self.stop_tasks()
        if self.storing is not None:
            self.store()
        for _ in range(200):
            if not self.machine._files.deletions.paths():
                break
            if self.deleting:
                self.finish_deletion(())
            else:
                self.time_passes(300_000)
        assert self.disk == self.referred()
        assert not self.open_requests
        # Read back from the store, all counts are the same.
        again = CheckpointCoordinator(
            self.settings,
            retained=self.machine.retained,
            next_checkpoint_id=self.machine.next_checkpoint_id,
        )
        again.check()
        for key in self.locations():
            assert again._files.registry.count(key) == self.machine._files.registry.count(key)


def keys(references: tuple[StoredReference, ...]) -> set[SharedIdentity | None]:
    return {reference.identity for reference in references}


TestCoordinator = CoordinatorModel.TestCase
TestCoordinator.settings = examples(150, stateful_step_count=60)
