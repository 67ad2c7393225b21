"""A job whose only operators are two keyed states, one on each backend, with everything around them real:
snapshotters, packed files in a store, the coordinator with its registry, manifests, deletion of files.

One checkpoint covers both operators, so that both are always restored to the same moment. What runs on
I/O threads is run step by step on the test's own thread; what the coordinator no longer needs is deleted
at once, so that any reference to a file that nobody has confirmed fails. The coordinator forgives much
of that (it keeps files for acks on their way, and aborts what names a file that is gone), so what a
snapshot may refer to is checked here too, see ``FileRules``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from common.elements import CheckpointBarrier
from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.snapshot_convert import references_of, summary_of, with_replaced
from jobmanager.checkpoint.state_assignment import KeyedPart, assign_keyed
from jobmanager.graph.execution_attempt import AttemptKey
from penstock.config import Configuration
from penstock.errors import StoreTransient, StreamError
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import Blob
from penstock.storage.memory_store import MemoryStore
from penstock.storage.snapshot_files import (
    SHARED_DIRECTORY,
    PackedSnapshotWriter,
    StoreSnapshotReader,
    snapshot_file_name,
)
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.snapshot.subtask_snapshot import SnapshotPart, SubtaskSnapshotter
from taskmanager.state.backend import BackendEnvironment, BackendSnapshot, KeyedStateBackend
from taskmanager.state.factory import open_backend
from taskmanager.state.memory import ManagedMemory
from taskmanager.state.operator_state import OperatorStateStore
from tests.support.checkpoints import Driver
from tests.support.hashmap_backend import SteppedClock

MAX_PARALLELISM: Final = 16
BACKENDS: Final = ("hashmap", "rocksdb")

Manifest = list[checkpoint_pb2.SubtaskSnapshot]


def open_state(kind: str, environment: BackendEnvironment) -> KeyedStateBackend:
    """The backend that ``state.backend.type: kind`` gives."""
    return open_backend(Configuration.from_mapping({"state.backend.type": kind}), environment)


class SteppedSnapshot:
    """A ``BackendSnapshot`` whose bytes can be pulled ahead of its writer, one part at a time."""

    def __init__(self, snapshot: BackendSnapshot) -> None:
        self._snapshot = snapshot
        self._pulled: list[tuple[str, list[bytes]]] = []
        self._parts = self._pull()
        self._error: Exception | None = None

    def _pull(self) -> Iterator[None]:
        for blob in self._snapshot.blobs():
            chunks: list[bytes] = []
            self._pulled.append((blob.name, chunks))
            yield
            for chunk in blob.chunks():
                chunks.append(bytes(chunk))
                yield

    def step(self) -> None:
        """Makes the next part; an error is raised to the writer."""
        try:
            next(self._parts, None)
        except (StreamError, OSError) as error:
            self._error = error

    def blobs(self) -> Iterable[Blob]:
        """See ``BackendSnapshot``."""
        if self._error is not None:
            raise self._error
        for _ in self._parts:
            pass
        for name, chunks in self._pulled:
            yield Blob(name, partial(list, chunks))

    def describe(
        self, handles: Mapping[str, checkpoint_pb2.StateHandle]
    ) -> checkpoint_pb2.KeyedStateSnapshot:
        """See ``BackendSnapshot``."""
        return self._snapshot.describe(handles)

    def discard(self) -> None:
        """See ``BackendSnapshot``."""
        self._snapshot.discard()


class _SteppedBackend:
    """What a snapshotter needs of a backend."""

    def __init__(
        self, backend: KeyedStateBackend, taken: Callable[[SteppedSnapshot], None]
    ) -> None:
        self._backend = backend
        self._taken = taken

    def snapshot(
        self, checkpoint_id: int, *, is_full: bool = False, in_runs: bool = False
    ) -> SteppedSnapshot:
        taken = self._backend.snapshot(checkpoint_id, is_full=is_full, in_runs=in_runs)
        snapshot = SteppedSnapshot(taken)
        self._taken(snapshot)
        return snapshot


class FileRules:
    """What the snapshots of one attempt of a subtask may refer to, besides what they have written.

    - Files of a checkpoint that the backend knows to be complete when the snapshot is taken, or learns to
      be until it is described; those that it was restored from are.
    - Once a checkpoint is complete, nothing that it does not have: the older files may be gone.
    - Nothing that is another checkpoint's alone (``StateFile.shared``).

    Args:
        restored: paths of the files that the backend was restored from.
    """

    def __init__(self, restored: Iterable[str]) -> None:
        self._confirmed: list[tuple[int, set[str]]] = [(0, set(restored))]
        self._confirmed_at: dict[int, int] = {}
        self._referred: dict[int, set[str]] = {}
        self._all: dict[int, set[str]] = {}

    def taken(self, checkpoint_id: int) -> None:
        """A snapshot was taken."""
        self._confirmed_at[checkpoint_id] = len(self._confirmed) - 1

    def acknowledged(
        self,
        checkpoint_id: int,
        files: Iterable[checkpoint_pb2.StateFile],
        written: str,
    ) -> None:
        """A snapshot was described; ``written`` is the path of its own file."""
        files = [file for file in files if file.handle.path]
        referred = {file.handle.path for file in files} - {written}
        known = self._confirmed[self._confirmed_at[checkpoint_id] :]
        unknown = referred.difference(*(paths for _, paths in known))
        assert not unknown, f"refers to files of no complete checkpoint: {unknown}"
        newer = [paths for confirmed_id, paths in known[1:] if confirmed_id < checkpoint_id]
        assert not newer or referred <= newer[-1], "refers to what a newer checkpoint has replaced"
        alone = {file.handle.path for file in files if not file.shared} - {written}
        assert not alone, f"refers to files that are another checkpoint's alone: {alone}"
        self._referred[checkpoint_id] = referred
        self._all[checkpoint_id] = {file.handle.path for file in files}

    def completed(self, checkpoint_id: int, stored: Iterable[str]) -> None:
        """The backend was told; ``stored`` are the paths in the manifest."""
        paths = self._all.pop(checkpoint_id) | set(stored)
        for later_id, referred in self._referred.items():
            if later_id > checkpoint_id:
                assert referred <= paths, "refers to what a checkpoint before it has replaced"
        self._confirmed.append((checkpoint_id, paths))

    def aborted(self, checkpoint_id: int) -> None:
        """The backend was told."""
        self._referred.pop(checkpoint_id, None)


class _BrokenWriter(PackedSnapshotWriter):
    """Fails before it asks for more than was pulled ahead of it."""

    @override
    def write(self, blobs: Iterable[Blob]) -> Mapping[str, checkpoint_pb2.StateHandle]:
        raise StoreTransient("the store is away")


@dataclass
class Writing:
    """A snapshot of one subtask that is to be written on an I/O thread.

    Attributes:
        finish: writes the rest, and acknowledges or declines.
    """

    checkpoint_id: int
    snapshot: SteppedSnapshot
    finish: Callable[[], None]


class Subtask:
    """One subtask of one of the operators, and the listener of its snapshotter."""

    def __init__(
        self, job: BackendJob, key: AttemptKey, backend: KeyedStateBackend, restored: Iterable[str]
    ) -> None:
        self.key = key
        self.backend = backend
        self.rules = FileRules(restored)
        self._job = job
        self._written: dict[int, str] = {}
        self._newest: SteppedSnapshot | None = None
        self._checkpoint_id = 0
        proxy: Any = _SteppedBackend(backend, self._taken)
        self._snapshotter = SubtaskSnapshotter(
            key.vertex,
            key.subtask_index,
            [SnapshotPart(f"uid-{key.vertex}", None, OperatorStateStore(), proxy)],
            new_writer=self._writer,
            submit=self._submit,
            listener=self,
            clock=job.clock,
            counters=SubtaskCounters(),
            inline_max_bytes=job.inline_max_bytes,
        )

    def trigger(self, checkpoint_id: int) -> None:
        """The barrier has passed."""
        self._checkpoint_id = checkpoint_id
        self.rules.taken(checkpoint_id)
        self._snapshotter.take(CheckpointBarrier(checkpoint_id, 0), None, finished=False)

    def acknowledge(
        self, barrier: CheckpointBarrier, snapshot: checkpoint_pb2.SubtaskSnapshot
    ) -> None:
        """See ``SnapshotListener``; the snapshot as it is sent."""
        sent = checkpoint_pb2.SubtaskSnapshot.FromString(snapshot.SerializeToString())
        checkpoint_id, files = barrier.checkpoint_id, sent.operators[0].keyed.files
        self.rules.acknowledged(checkpoint_id, files, self._written[checkpoint_id])
        summary = summary_of(sent.metrics)
        ack = c.AckReceived(self.key, checkpoint_id, sent, references_of(sent), summary, 0)
        self._job.step(ack)

    def decline(self, barrier: CheckpointBarrier, reason: str) -> None:
        """See ``SnapshotListener``."""
        self._job.declined.append(reason)
        self._job.step(c.DeclineReceived(self.key, barrier.checkpoint_id, reason, 0))

    def fail_later(self, error: BaseException) -> None:
        """See ``SnapshotListener``: no test expects that."""
        raise error

    def _taken(self, snapshot: SteppedSnapshot) -> None:
        self._newest = snapshot

    def _submit(self, finish: Callable[[], None]) -> None:
        assert self._newest is not None
        self._job.writings.append(Writing(self._checkpoint_id, self._newest, finish))

    def _writer(self, checkpoint_id: int, target: str) -> PackedSnapshotWriter:
        assert not target, "no savepoints here"
        job = self._job
        job.written += 1
        key = self.key
        name = snapshot_file_name(
            checkpoint_id, key.vertex, key.subtask_index, key.attempt, f"w{job.written}"
        )
        self._written[checkpoint_id] = f"{SHARED_DIRECTORY}/{name}"
        broken, job.fails_to_write = job.fails_to_write, False
        kind = _BrokenWriter if broken else PackedSnapshotWriter
        return kind(job.store, name, job.inline_max_bytes)


@dataclass
class BackendJob:
    """The job.

    Args:
        directory: for the databases.
        retained_max: completed checkpoints to keep.
        inline_max_bytes: smaller snapshots are kept in the manifest.
        frozen: called for each checkpoint at the moment that it covers, after the barrier has passed.

    Attributes:
        subtasks: the running ones by backend and index.
        writings: snapshots that are to be written, of earlier attempts too.
        manifests: retained checkpoints, oldest first.
        declined: why snapshots were not written.
        is_deaf: what the coordinator tells the tasks waits in ``notices``.
        fails_to_store: the next manifest is not written.
        fails_to_write: the next snapshot is not written.
    """

    directory: Path
    retained_max: int = 1
    inline_max_bytes: int = 0
    is_incremental: bool = True
    frozen: Callable[[int], None] = lambda _: None
    clock: SteppedClock = field(default_factory=lambda: SteppedClock(1000))
    store: MemoryStore = field(default_factory=lambda: MemoryStore(1 << 30))
    subtasks: dict[str, list[Subtask]] = field(default_factory=dict)
    writings: list[Writing] = field(default_factory=list)
    manifests: dict[int, Manifest] = field(default_factory=dict)
    declined: list[str] = field(default_factory=list)
    notices: list[c.NotifyCompleted | c.NotifyAborted] = field(default_factory=list)
    is_deaf: bool = False
    fails_to_store: bool = False
    fails_to_write: bool = False
    written: int = 0
    _savepoints: int = 0
    _attempt: int = 0
    _stored: dict[tuple[int, AttemptKey], set[str]] = field(default_factory=dict)
    _opened: list[KeyedStateBackend] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._driver = Driver(
            (), start=False, interval_ms=None, max_concurrent=4, retained_max=self.retained_max
        )
        self._driver.now_ms = 0  # as in all events: nothing expires

    def start(self, parallelism: int, checkpoint_id: int | None = None) -> None:
        """Starts the subtasks, from a retained checkpoint; those before are killed."""
        self._begin(parallelism, [] if checkpoint_id is None else self.manifests[checkpoint_id])

    def cross(self, parallelism: int) -> None:
        """Takes a canonical savepoint of all subtasks, and starts each backend from what the other one wrote."""
        self._savepoints += 1
        other = dict(zip(BACKENDS, reversed(BACKENDS), strict=True))
        manifest: Manifest = []
        for kind, subtasks in self.subtasks.items():
            for subtask in subtasks:
                frozen = subtask.backend.snapshot(10**9 + self._savepoints, in_runs=True)
                self.written += 1
                writer = PackedSnapshotWriter(self.store, f"savepoint-{self.written}", 0)
                keyed = frozen.describe(writer.write(frozen.blobs()))
                for file in keyed.files:
                    file.shared = False  # the savepoint's own
                operator = checkpoint_pb2.OperatorSnapshot(keyed=keyed)
                manifest.append(
                    checkpoint_pb2.SubtaskSnapshot(vertex=other[kind], operators=[operator])
                )
        self._begin(parallelism, manifest)

    def _begin(self, parallelism: int, manifest: Manifest) -> None:
        if self.subtasks:
            self.step(c.TasksStopped(0))
        self.notices.clear()
        self._attempt += 1
        self.subtasks = {kind: self._start(kind, parallelism, manifest) for kind in BACKENDS}
        keys = [subtask.key for kind in BACKENDS for subtask in self.subtasks[kind]]
        self.step(c.TasksStarted(tuple(c.TaskView(key, ()) for key in keys), 0))

    def _start(self, kind: str, parallelism: int, manifest: Manifest) -> list[Subtask]:
        keyed = [s.operators[0].keyed for s in manifest if s.vertex == kind]
        parts = [KeyedPart(k.first_key_group, k.last_key_group, k) for k in keyed]
        memory = ManagedMemory(64 << 20)
        subtasks = []
        for index, own in enumerate(assign_keyed(parts, parallelism, MAX_PARALLELISM)):
            environment = BackendEnvironment(
                operator_uid=f"uid-{kind}",
                operator_name=f"operator-{index}",
                subtask_index=index,
                parallelism=parallelism,
                max_parallelism=MAX_PARALLELISM,
                clock=self.clock,
                memory=memory,
                work_directory=self.directory / f"{self._attempt}-{kind}-{index}",
                is_incremental=self.is_incremental,
                restored=tuple(own),
                reader=StoreSnapshotReader(self.store),
            )
            backend = open_state(kind, environment)
            self._opened.append(backend)
            key = AttemptKey(kind, index, self._attempt)
            paths = {file.handle.path for part in own for file in part.files}
            subtasks.append(Subtask(self, key, backend, paths))
        return subtasks

    def checkpoint(self) -> None:
        """Asks for a checkpoint."""
        self._run(self._driver.request())

    def complete(self) -> None:
        """Writes all that waits to be written."""
        while self.writings:
            self.writings.pop(0).finish()

    def abort_oldest(self) -> None:
        """A task declines the oldest checkpoint that is under way."""
        for pending in self._driver.machine.pending[:1]:
            for subtask in self.subtasks[BACKENDS[0]]:
                decline = c.DeclineReceived(subtask.key, pending.checkpoint_id, "a test", 0)
                self.step(decline)

    def step(self, event: c.CoordinatorEvent) -> None:
        """An event for the coordinator, and what follows from it."""
        self._run(self._driver.step(event))

    def listen(self) -> None:
        """Tells the tasks what the coordinator has to say."""
        while self.notices and not self.is_deaf:
            notice = self.notices.pop(0)
            for subtasks in self.subtasks.values():
                for subtask in subtasks:
                    if subtask.key not in notice.keys:
                        continue
                    if isinstance(notice, c.NotifyCompleted):
                        stored = self._stored[notice.checkpoint_id, subtask.key]
                        subtask.rules.completed(notice.checkpoint_id, stored)
                        subtask.backend.checkpoint_completed(notice.checkpoint_id)
                    else:
                        subtask.rules.aborted(notice.checkpoint_id)
                        subtask.backend.checkpoint_aborted(notice.checkpoint_id)

    def bury(self) -> None:
        """Closes what was killed: its directories, and the writing it had left."""
        running = {id(s.backend) for subtasks in self.subtasks.values() for s in subtasks}
        for backend in self._opened:
            if id(backend) not in running:
                backend.close()
        self._opened = [backend for backend in self._opened if id(backend) in running]

    def close(self) -> None:
        """Ends everything."""
        self.subtasks = {}
        self.bury()

    def _run(self, effects: Iterable[c.CoordinatorEffect]) -> None:
        for effect in effects:
            match effect:
                case c.TriggerTasks():
                    self._trigger(effect)
                case c.StoreCheckpoint():
                    self._store(effect)
                case c.DeleteFiles():
                    for path in effect.paths:
                        self.store.delete(path)
                    self.step(c.FilesDeleted((), 0))
                case c.NotifyCompleted() | c.NotifyAborted():
                    self.notices.append(effect)
                case _:
                    pass
        self.listen()

    def _trigger(self, effect: c.TriggerTasks) -> None:
        self.listen()
        asked = [s for subtasks in self.subtasks.values() for s in subtasks]
        self.frozen(effect.checkpoint_id)
        for subtask in asked:
            if subtask.key in effect.keys:
                subtask.trigger(effect.checkpoint_id)

    def _store(self, effect: c.StoreCheckpoint) -> None:
        if self.fails_to_store:
            self.fails_to_store = False
            self.step(c.CheckpointNotStored(effect.checkpoint_id, "the disk is full", 0))
            return
        replaced = dict(effect.replaced)
        acknowledged: Any = effect.snapshots
        snapshots = [with_replaced(snapshot, replaced) for _, snapshot in acknowledged]
        taken: set[str] = set()
        for (key, _), snapshot in zip(effect.snapshots, snapshots, strict=True):
            files = snapshot.operators[0].keyed.files
            paths = {file.handle.path for file in files if file.handle.path}
            assert not paths & taken, "two subtasks refer to one file"
            taken |= paths
            self._stored[effect.checkpoint_id, key] = paths
        self.manifests[effect.checkpoint_id] = snapshots
        self.manifests = {
            i: self.manifests[i] for i in sorted(effect.retained) if i in self.manifests
        }
        self.step(
            c.CheckpointStored(effect.checkpoint_id, f"chk-{effect.checkpoint_id}/manifest", 0)
        )
