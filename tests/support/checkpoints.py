"""Drives a checkpoint coordinator in tests: short ways to make events and to read effects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_ids import IDS_RESERVED_AT_ONCE
from jobmanager.checkpoint.completed_checkpoint import CompletedCheckpoint, SnapshotSummary
from jobmanager.checkpoint.coordinator import CheckpointCoordinator
from jobmanager.checkpoint.settings import CheckpointSettings
from jobmanager.graph.execution_attempt import AttemptKey
from penstock.storage.checkpoint_properties import PLAIN, BehindBarrier, CheckpointProperties
from penstock.storage.manifest import SharedIdentity, StoredRange, StoredReference

E = TypeVar("E")

AT_THE_END = CheckpointProperties(behind=BehindBarrier.END)

SOURCE = AttemptKey("source", 0, 0)
MIDDLE = AttemptKey("middle", 0, 0)
SINK = AttemptKey("sink", 0, 0)
CHAIN = (
    c.TaskView(SOURCE, ()),
    c.TaskView(MIDDLE, (SOURCE,)),
    c.TaskView(SINK, (MIDDLE,)),
)
ONE_TASK = (c.TaskView(SOURCE, ()),)


def shared(name: str, path: str, *, size: int = 10, checksum: int = 1) -> StoredReference:
    """A reference to a shared file of one backend instance."""
    key = SharedIdentity("operator-2", 1, "instance-1", name)
    return StoredReference(key, StoredRange(path, 0, size, checksum))


def private(path: str, offset: int = 0) -> StoredReference:
    """A reference to a range that no other checkpoint may name."""
    return StoredReference(None, StoredRange(path, offset, 10, 7))


def of_type(effects: Iterable[object], kind: type[E]) -> list[E]:
    """The effects of one type."""
    return [effect for effect in effects if isinstance(effect, kind)]


class Driver:
    """A coordinator with a clock of its own; ``check`` runs after each step.

    Deletions and stores are answered only where a test says so; ids are reserved at once.
    """

    def __init__(
        self,
        tasks: tuple[c.TaskView, ...] = CHAIN,
        *,
        retained: tuple[CompletedCheckpoint, ...] = (),
        next_checkpoint_id: int = 1,
        start: bool = True,
        interval_ms: int | None = 1_000,
        timeout_ms: int = 10_000,
        min_pause_ms: int = 0,
        max_concurrent: int = 1,
        tolerable_failed: int = -1,
        retained_max: int = 1,
    ) -> None:
        settings = CheckpointSettings(
            interval_ms=interval_ms,
            timeout_ms=timeout_ms,
            min_pause_ms=min_pause_ms,
            max_concurrent=max_concurrent,
            tolerable_failed=tolerable_failed,
            retained_max=retained_max,
        )
        self.machine = CheckpointCoordinator(
            settings, retained=retained, next_checkpoint_id=next_checkpoint_id
        )
        self.now_ms = 100_000
        self.tasks = tasks
        self.requests = 0
        self.reserves_ids = True
        if start:
            self.step(c.TasksStarted(tasks, self.now_ms))

    def step(self, event: c.CoordinatorEvent) -> list[c.CoordinatorEffect]:
        """One step with its check."""
        effects = self.machine.step(event)
        self.machine.check()
        assert len(of_type(effects, c.TriggerTasks)) <= 1
        assert all(call.at_ms >= event.now_ms for call in of_type(effects, c.CallAt))
        if self.reserves_ids and of_type(effects, c.ReserveIds):
            end = self.machine.next_checkpoint_id + IDS_RESERVED_AT_ONCE
            effects += self.step(c.IdsReserved(end, event.now_ms))
        return effects

    def at(self, now_ms: int) -> list[c.CoordinatorEffect]:
        """Time passes, relative to the start of the test."""
        self.now_ms = 100_000 + now_ms
        return self.step(c.TimeReached(self.now_ms))

    def request(self, *, is_final: bool = False) -> list[c.CoordinatorEffect]:
        """A request; its id is r1, r2, ..."""
        self.requests += 1
        properties = AT_THE_END if is_final else PLAIN
        return self.step(c.CheckpointRequested(f"r{self.requests}", self.now_ms, properties))

    def trigger(self) -> int:
        """Takes a checkpoint on demand, which must start at once; its id."""
        [trigger] = of_type(self.request(), c.TriggerTasks)
        return trigger.checkpoint_id

    def ack(
        self,
        checkpoint_id: int,
        key: AttemptKey = SOURCE,
        *references: StoredReference,
        state_bytes: int = 0,
    ) -> list[c.CoordinatorEffect]:
        """One ack; the snapshot is a text that names task and checkpoint."""
        return self.step(
            c.AckReceived(
                key,
                checkpoint_id,
                f"{key.vertex}@{checkpoint_id}",
                references,
                SnapshotSummary(state_bytes=state_bytes),
                self.now_ms,
            )
        )

    def ack_all(
        self, checkpoint_id: int, *references: StoredReference
    ) -> list[c.CoordinatorEffect]:
        """Acks of all tasks, the references in the first one; effects of the last one."""
        effects: list[c.CoordinatorEffect] = []
        for index, task in enumerate(self.tasks):
            effects = self.ack(checkpoint_id, task.key, *(references if index == 0 else ()))
        return effects

    def stored(self, checkpoint_id: int) -> list[c.CoordinatorEffect]:
        """The store has done its work."""
        return self.step(
            c.CheckpointStored(checkpoint_id, f"chk-{checkpoint_id}/manifest", self.now_ms)
        )

    def not_stored(
        self, checkpoint_id: int, *, too_large: bool = False, left: tuple[str, ...] = ()
    ) -> list[c.CoordinatorEffect]:
        """The store has failed."""
        return self.step(
            c.CheckpointNotStored(checkpoint_id, "disk full", self.now_ms, too_large, left)
        )

    def deleted(self, *left: str) -> list[c.CoordinatorEffect]:
        """A deletion has come to its end."""
        return self.step(c.FilesDeleted(left, self.now_ms))

    def finish(self, key: AttemptKey) -> list[c.CoordinatorEffect]:
        """An attempt finishes."""
        return self.step(c.TaskFinished(key, self.now_ms))

    def stop(self) -> list[c.CoordinatorEffect]:
        """All tasks stop."""
        return self.step(c.TasksStopped(self.now_ms))

    def restart(self, tasks: tuple[c.TaskView, ...] | None = None) -> list[c.CoordinatorEffect]:
        """All tasks start."""
        return self.step(c.TasksStarted(tasks or self.tasks, self.now_ms))

    def complete(self, *references: StoredReference) -> list[c.CoordinatorEffect]:
        """A whole checkpoint on demand; effects of its last step."""
        checkpoint_id = self.trigger()
        assert of_type(self.ack_all(checkpoint_id, *references), c.StoreCheckpoint)
        return self.stored(checkpoint_id)


def deletions(effects: Iterable[object]) -> set[str]:
    """All paths that effects delete."""
    return {path for effect in of_type(effects, c.DeleteFiles) for path in effect.paths}
