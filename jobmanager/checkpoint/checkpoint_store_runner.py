"""The checkpoints of one job in their store: manifests, HEAD, deletions.

Every call blocks, may hang, and is then given up on: others are made while it may yet go on, or even begin.
What it was about to do to HEAD it cannot do any more once HEAD has been claimed again, and what it writes late
has a name that nobody else uses. Which calls are given up on is said where they are made, not on their threads:
a thread may have its first turn when all is over.

Invariants: HEAD is claimed before anything is written or deleted; a manifest is written before HEAD
names it; nothing is swept while a manifest that HEAD names cannot be read, since nobody knows what it
refers to.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from uuid import uuid4

import structlog

from common.done_splits import DoneSplits
from common.pb import internal_pb2
from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_ids import IDS_RESERVED_AT_ONCE
from jobmanager.checkpoint.completed_checkpoint import CompletedCheckpoint
from jobmanager.checkpoint.done_splits_store import (
    DoneSplitsStore,
    done_references,
    read_done_splits,
)
from jobmanager.checkpoint.orphans import orphans
from jobmanager.checkpoint.prepared_checkpoints import PreparedCheckpoints
from jobmanager.checkpoint.repeated_output import RepeatedOutput, note_files, repeated_output
from jobmanager.checkpoint.savepoint_store_runner import SavepointStoreRunner
from jobmanager.checkpoint.snapshot_convert import (
    completed_of,
    finished_snapshot,
    with_replaced,
    without_positions,
)
from jobmanager.graph.execution_attempt import AttemptKey, SubtaskId
from penstock.errors import (
    Fenced,
    JobRejected,
    StoreCorrupt,
    StoreFull,
    StoreNotFound,
    StoreTransient,
    StreamError,
    Unrecoverable,
)
from penstock.graph.restore_check import check_restore, dropped_states
from penstock.graph.state_meaning import declaration
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.head import (
    HEAD_PATH,
    HeadClaimedAgain,
    HeadOutcomeUnknown,
    HeadStore,
)
from penstock.storage.manifest import (
    decode_manifest,
    encode_manifest,
    manifest_path,
    properties_message,
    references,
)
from penstock.storage.memory_store import MemoryStore
from penstock.storage.object_store import ObjectStore, delete_all
from penstock.storage.open_store import open_store
from penstock.storage.restore_point import open_restore_point, remove_savepoint
from penstock.storage.savepoint import OWNER_PATH
from penstock.storage.snapshot_files import (
    SHARED_DIRECTORY,
    StoreSnapshotReader,
    snapshot_file_name,
)

_SWEPT_PREFIXES = ("chk-", "shared/")
_SWAP_ATTEMPTS = 10
_SWAP_PAUSE_S = 0.5

DoneNames = Iterable[tuple[AttemptKey, str, tuple[str, ...]]]
LastStates = Mapping[SubtaskId, Iterable[checkpoint_pb2.OperatorSnapshot]]
_Readable = tuple[checkpoint_pb2.RetainedCheckpoint, checkpoint_pb2.CheckpointManifest]


class _Claim:
    """HEAD as this leader has claimed it, and what it says since the last swap."""

    def __init__(self, heads: HeadStore, head: checkpoint_pb2.CheckpointHead) -> None:
        self.heads = heads
        self.head = head


class CheckpointsUnreadable(Unrecoverable):
    """HEAD, or all that it names, is not there or cannot be read: a job that runs ends with it."""


class CheckpointStoreRunner:
    """Does what the coordinator wants done to the store.

    Args:
        job_id: the job.
        graph: its graph, for the fingerprint in the manifests.
        store: the job's directory.
        leader_epoch: in whose name it acts.
        version: of Penstock, for the manifests.
        now_ms: the wall clock.
        starts_from: what the job is started from as long as it has no checkpoint of its own; "" = nothing.

    Attributes:
        started_from: what the job was started from; None = from nothing, or that is not known yet. Replaced as a
            whole, so that any thread may read it.
    """

    def __init__(
        self,
        job_id: str,
        graph: graph_pb2.JobGraph,
        store: ObjectStore,
        *,
        leader_epoch: int,
        version: str,
        now_ms: Callable[[], int],
        starts_from: str = "",
    ) -> None:
        self._job_id = job_id
        self._job_name = graph.name
        self._graph = graph
        self._fingerprint = fingerprint(graph)
        self._store = store
        self._done_splits = DoneSplitsStore(store, leader_epoch)
        self._done_by_checkpoint: dict[int, tuple[c.SourceDone, ...]] = {}
        """What the last checkpoints that were begun to be stored hold of sources, whether they count or not."""
        self._leader_epoch = leader_epoch
        self._version = version
        self._now_ms = now_ms
        self._starts_from = starts_from
        self.started_from: checkpoint_pb2.StartedFrom | None = None
        self._has_dropped = False
        """What the job has claimed is gone."""
        self._claim: _Claim | None = None
        self._claims = 0
        self._turns = threading.Lock()
        """For what calls that go on at the same time look at, and change, about each other."""
        self._first_id: int | None = None
        """Checkpoints before this one are of earlier leaders; None = not known before the first claim."""
        self._storing: tuple[int, _Claim] | None = None
        self._given_up = 0
        """Checkpoints up to this one are not stored any more by calls that have not begun."""
        self._preparations = 0
        self._preparing = 0
        """The preparation that has not come to its end; 0 = all have."""
        self._stopped = threading.Event()
        self._log = structlog.get_logger(__name__).bind(job_id=job_id)

    def stop(self) -> None:
        """Retries under way are given up; called from any thread."""
        self._stopped.set()

    # ------------------------------------------------------------ the start of an attempt

    def prepare(
        self,
        unusable: Collection[int] = (),
        *,
        must_exist: bool = False,
        alone: Collection[SubtaskId] | None = None,
        preparation: int | None = None,
        ended_id: int = 0,
        first_attempt: int = 0,
    ) -> PreparedCheckpoints:
        """Claims HEAD and finds the newest checkpoint. Lists nothing: what is missing is found by looking at it.

        Args:
            unusable: checkpoints that tasks could not restore.
            must_exist: the job has been prepared before, if not by this instance.
            alone: subtasks that begin again while others of the job run, which may be uploading: nothing of
                these is to be swept, only manifests that could not be removed when their checkpoints failed;
                None = nothing runs.
            preparation: from ``begin_preparation``; None = it begins now.
            ended_id: the newest checkpoint that has been completed or aborted in this leader's time.
            first_attempt: number of the attempts that are about to begin.

        Raises:
            Fenced: another leader has the job.
            Unrecoverable: HEAD, or every checkpoint that it names, cannot be read, or is not there although
                it must be, or the store is too small for any; nothing is deleted.
            StoreTransient: the store does not answer now.
        """
        if preparation is None:
            preparation = self.begin_preparation()
        self._check_turn(preparation)
        claim = self._claimed(must_exist)
        try:
            return self._prepared(preparation, claim, unusable, alone, ended_id, first_attempt)
        except HeadClaimedAgain as error:
            self._void(claim)
            raise StoreTransient(f"storage was slow: {error}; it is tried again") from error
        except (StoreNotFound, StoreCorrupt) as error:
            self._void(claim)
            raise self._unusable(error) from error
        finally:
            with self._turns:
                if self._preparing == preparation:
                    self._preparing = 0

    def begin_preparation(self) -> int:
        """A call of ``prepare`` is about to be made: earlier ones that go on, or begin late, change nothing any
        more. To be called where the calls are made; returns what names this one."""
        with self._turns:
            if self._preparing:
                self._claim = None  # so that it finds HEAD claimed again before it deletes
            self._preparations += 1
            self._preparing = self._preparations
            return self._preparing

    def _check_turn(self, preparation: int) -> None:
        if preparation != self._preparations:
            # Whoever waited has given up, and begun again: what is listed may be of attempts that live.
            raise StoreTransient("another preparation has begun meanwhile")

    def _prepared(
        self,
        preparation: int,
        claim: _Claim,
        unusable: Collection[int],
        alone: Collection[SubtaskId] | None,
        ended_id: int,
        first_attempt: int,
    ) -> PreparedCheckpoints:
        head = claim.head
        readable = [
            (retained, manifest)
            for retained in head.retained
            if (manifest := self._read(retained, unusable)) is not None
        ]
        done = self._newest_done(readable)
        if head.retained and not readable:
            paths = ", ".join(retained.manifest_path for retained in head.retained)
            raise CheckpointsUnreadable(
                f"none of the checkpoints of job {self._job_id} can be restored ({paths} in "
                f"{self._store!r}): the JobManager's log says what is damaged; restore the files from "
                "a backup; nothing has been deleted"
            )
        completed = tuple(
            completed_of(retained, manifest, is_own=manifest.job_id == self._job_id)
            for retained, manifest in readable
        )
        claim.heads.verify()
        sweep = None
        if len(readable) == len(head.retained):
            ended_id = self._ended_id(head, ended_id)
            sweep = partial(self._sweep, completed, ended_id, alone, first_attempt)
        self._check_turn(preparation)
        if not head.retained and self._starts_from:
            return self._started(claim, unusable, sweep)
        self._note_started_from(head)
        return PreparedCheckpoints(
            newest=readable[-1][1] if readable else None,
            retained=completed,
            next_checkpoint_id=head.next_checkpoint_id - IDS_RESERVED_AT_ONCE,
            goes_back=bool(readable) and readable[-1][0] is not head.retained[-1],
            repeated=self._repeated(head, readable[-1][1]) if readable else None,
            is_of_another=bool(readable) and readable[-1][1].job_id != self._job_id,
            done=done,
            sweep=sweep,
        )

    def _started(
        self,
        claim: _Claim,
        unusable: Collection[int],
        sweep: Callable[[Collection[str]], None] | None,
    ) -> PreparedCheckpoints:
        """The job has completed no checkpoint: it starts from what it was told to, the first time or again."""
        path = self._starts_from
        try:
            point = open_restore_point(path)
        except JobRejected as error:
            raise CheckpointsUnreadable(
                f"job {self._job_id} was started from {path}, has completed no checkpoint of its own, and cannot "
                f"be started from there again: {error}"
            ) from error
        checkpoint_id = point.manifest.checkpoint_id
        if checkpoint_id in unusable:
            raise CheckpointsUnreadable(
                f"job {self._job_id} was started from {path}, which is damaged: the JobManager's log says where; "
                "start it from another one"
            )
        head = checkpoint_pb2.CheckpointHead()
        head.CopyFrom(claim.head)
        head.next_checkpoint_id = max(
            head.next_checkpoint_id, checkpoint_id + 1 + IDS_RESERVED_AT_ONCE
        )
        dropped = check_restore(self._graph, point.manifest, ignores_unclaimed=True).dropped
        head.started_from.CopyFrom(
            checkpoint_pb2.StartedFrom(
                path=path,
                checkpoint_id=checkpoint_id,
                is_savepoint=point.is_savepoint,
                claimed=point.is_savepoint and point.owner == self._job_id,
                dropped_states=dropped_states(dropped),
            )
        )
        if head != claim.head:
            self._swap(claim, head)
        self._note_started_from(head)
        located = point.located()
        return PreparedCheckpoints(
            newest=located,
            retained=(),
            next_checkpoint_id=head.next_checkpoint_id - IDS_RESERVED_AT_ONCE,
            is_of_another=True,
            done=read_done_splits(located, StoreSnapshotReader(self._store)),
            sweep=sweep,
        )

    def bring_lists(self, tasks: Mapping[SubtaskId, internal_pb2.RestoredTask]) -> list[str]:
        """Copies what finished subtasks go on holding in files of another store: nobody else ever writes it again.

        Returns:
            The paths of the copies.

        Raises:
            StreamError: it cannot be read or written.
        """
        brought = []
        reader = StoreSnapshotReader(self._store)
        for subtask, task in tasks.items():
            for held in (one for operator in task.operators for one in operator.lists):
                if task.finished and held.handle.store:
                    content = reader.read(held.handle)
                    name = snapshot_file_name(
                        task.checkpoint_id,
                        subtask.vertex,
                        subtask.subtask_index,
                        0,
                        uuid4().hex[:12],
                    )
                    path = f"{SHARED_DIRECTORY}/{name}"
                    self._store.put(path, [content])
                    held.handle.store, held.handle.path, held.handle.offset = "", path, 0
                    brought.append(path)
        return brought

    def _drop_claimed(
        self, head: checkpoint_pb2.CheckpointHead, checkpoint_id: int | None = None
    ) -> None:
        """Removes the savepoint that the job has claimed, once nothing names it and nobody reads it any more.

        Args:
            checkpoint_id: the newest: tasks hear of the first own one, and read the savepoint no more, before they
                take part in the next; None = the job has ended.
        """
        started = head.started_from
        since = started.independent_since_checkpoint_id
        is_needed = checkpoint_id is not None and (not since or since >= checkpoint_id)
        if not (started.claimed and started.is_savepoint) or is_needed or self._has_dropped:
            return
        store = open_store(started.path)
        try:
            if store.get(OWNER_PATH).decode(errors="replace") == self._job_id:
                remove_savepoint(store)
            self._has_dropped = True
        except StoreNotFound:
            self._has_dropped = True
        except StoreTransient as error:
            self._log.warning("savepoint.not_removed", path=started.path, reason=str(error))
            if checkpoint_id is None:
                raise

    def _note_started_from(self, head: checkpoint_pb2.CheckpointHead) -> None:
        if head.HasField("started_from"):
            noted = checkpoint_pb2.StartedFrom()
            noted.CopyFrom(head.started_from)
            self.started_from = noted

    def _newest_done(self, readable: list[_Readable]) -> Mapping[str, DoneSplits]:
        """Of the newest checkpoint that says it; those that do not are taken away from the list."""
        while readable:
            retained, manifest = readable[-1]
            try:
                return read_done_splits(manifest, StoreSnapshotReader(self._store))
            except (StoreCorrupt, StoreNotFound) as error:
                self._note_unreadable(retained, error)
                readable.pop()
        return {}

    def _repeated(
        self,
        head: checkpoint_pb2.CheckpointHead,
        newest: checkpoint_pb2.CheckpointManifest,
    ) -> RepeatedOutput | None:
        damaged: list[
            tuple[checkpoint_pb2.RetainedCheckpoint, checkpoint_pb2.CheckpointManifest | None]
        ] = []
        for retained in head.retained:
            if retained.checkpoint_id > newest.checkpoint_id:
                manifest, path = None, retained.manifest_path
                with contextlib.suppress(StoreCorrupt, StoreNotFound):
                    manifest = decode_manifest(self._store.get(path), path)
                damaged.append((retained, manifest))
        if not damaged:
            return None
        return repeated_output(self._graph, newest, damaged, StoreSnapshotReader(self._store))

    def _claimed(self, must_exist: bool, more_ids: int = 0) -> _Claim:
        with self._turns:
            claim = self._claim
            if claim is None:
                self._claims += 1
            number = self._claims
        if claim is None:
            heads = HeadStore(self._store)
            try:
                head = heads.claim(
                    self._job_id,
                    self._leader_epoch,
                    must_exist=must_exist,
                    reserved_ids=IDS_RESERVED_AT_ONCE,
                    more_ids=more_ids,
                )
            except StoreNotFound as error:
                raise CheckpointsUnreadable(
                    f"the checkpoints of job {self._job_id} are not in {self._store!r}: {error}; is the "
                    "directory mounted, and execution.checkpointing.dir the one that the job began with? "
                    "To start it anew, submit it again"
                ) from error
            except StoreFull as error:
                raise Unrecoverable(
                    f"job {self._job_id} has no room for checkpoints: {error}"
                ) from error
            except StoreCorrupt as error:
                raise self._unusable(error) from error
            with self._turns:
                # Where another call has claimed HEAD since this one began, nobody knows which of them came last.
                is_newest = number == self._claims
                if self._first_id is None:
                    self._first_id = head.next_checkpoint_id - more_ids - IDS_RESERVED_AT_ONCE
                self._claim = claim = _Claim(heads, head) if is_newest else None
            if claim is None:
                return self._claimed(must_exist, more_ids)
        return claim

    def _void(self, claim: _Claim) -> None:
        """Nobody knows any more what HEAD says: it is claimed again before it is used."""
        with self._turns:
            if self._claim is claim:
                self._claim = None

    def _unusable(self, error: StreamError) -> CheckpointsUnreadable:
        return CheckpointsUnreadable(
            f"the checkpoints of job {self._job_id} cannot be used: {error}; nothing has been deleted"
        )

    def _read(
        self,
        retained: checkpoint_pb2.RetainedCheckpoint,
        unusable: Collection[int],
    ) -> checkpoint_pb2.CheckpointManifest | None:
        """A manifest whose files are there and long enough; None = there is something wrong."""
        path = retained.manifest_path
        try:
            manifest = decode_manifest(self._store.get(path), path)
            self._check_files(manifest, unusable)
        except (StoreCorrupt, StoreNotFound) as error:
            self._note_unreadable(retained, error)
            return None
        return manifest

    def _note_unreadable(
        self, retained: checkpoint_pb2.RetainedCheckpoint, error: StreamError
    ) -> None:
        self._log.error(
            "checkpoint.unreadable",
            checkpoint_id=retained.checkpoint_id,
            path=retained.manifest_path,
            reason=str(error),
        )

    def _ended_id(self, head: checkpoint_pb2.CheckpointHead, ended_id: int) -> int:
        """Up to this one no checkpoint can be under way any more."""
        assert self._first_id is not None, "HEAD has been claimed"
        completed = (retained.checkpoint_id for retained in head.retained)
        return max(ended_id, self._first_id - 1, *completed)

    def _check_files(
        self, manifest: checkpoint_pb2.CheckpointManifest, unusable: Collection[int]
    ) -> None:
        """Raises ``StoreCorrupt`` where a file is missing, too short, or was found damaged by a task."""
        if manifest.checkpoint_id in unusable:
            raise StoreCorrupt("a task could not restore its state from it")
        ends: dict[str, int] = {}
        for reference in references(manifest):
            location = reference.location
            end = location.offset + location.size_bytes
            ends[location.path] = max(end, ends.get(location.path, 0))
        sizes = self._store.sizes(ends)
        for path, end in ends.items():
            if sizes.get(path, -1) < end:
                raise StoreCorrupt(f"{path}, which it refers to, is missing or truncated")

    def _sweep(
        self,
        completed: Sequence[CompletedCheckpoint],
        ended_id: int,
        alone: Collection[SubtaskId] | None,
        first_attempt: int,
        brought: Collection[str] = (),
    ) -> None:
        present = [one.path for prefix in _SWEPT_PREFIXES for one in self._store.list(prefix)]
        # A leader that has been deposed meanwhile must not take what its successor has written.
        head = HeadStore(self._store).read()
        if head is None or head.leader_epoch != self._leader_epoch:
            raise Fenced(f"job {self._job_id} is another leader's: nothing of it is swept")
        kept = {checkpoint.manifest_path for checkpoint in completed} | set(brought)
        kept |= {
            reference.location.path
            for checkpoint in completed
            for reference in checkpoint.references
        }
        swept = orphans(present, kept, ended_id, alone, first_attempt)
        delete_all(self._store, swept)
        if swept:
            self._log.info("checkpoint.orphans_swept", count=len(swept))
        if alone is None:
            self._sweep_temporaries()

    def _sweep_temporaries(self) -> None:
        if swept := self._store.sweep_temporaries():
            self._log.info("checkpoint.temporaries_swept", count=len(swept))

    # ------------------------------------------------------------ a checkpoint

    def store(
        self,
        wanted: c.StoreCheckpoint,
        done_splits: DoneNames = (),
        last_states: LastStates = MappingProxyType({}),
        done_before: Iterable[c.SourceDone] = (),
    ) -> c.CheckpointStored | c.CheckpointNotStored:
        """Writes the manifest and swaps HEAD.

        Args:
            wanted: by the coordinator; its snapshots are ``SubtaskSnapshot`` messages.
            done_splits: what finished source subtasks have read.
            last_states: of the collect sinks of finished subtasks.
            done_before: of the sources whose done splits are kept as a set, what the checkpoint before held.

        Raises:
            Fenced: another leader has the job.
            Unrecoverable: HEAD is gone, or damaged.
            HeadOutcomeUnknown: nobody knows whether it is stored; ``settle`` finds out.
        """
        claim = self._begin_storing(wanted.checkpoint_id)
        path = manifest_path(wanted.checkpoint_id, self._leader_epoch)
        manifest = self.manifest(wanted, done_splits, last_states)
        now_ms = manifest.completed_at_ms
        if wanted.properties.is_stop:
            try:
                self._save(wanted, manifest)
            except (StoreTransient, StoreNotFound, StoreCorrupt, JobRejected) as error:
                now_ms = self._now_ms()
                return c.CheckpointNotStored(wanted.checkpoint_id, str(error), now_ms)
        try:
            done = self._done_splits.seal(manifest, done_before)
            self._note_done(wanted.checkpoint_id, done)
            self._store.put(path, [encode_manifest(manifest)])
            head = _next_head(claim.head, wanted, path, now_ms)
            note_files(head.retained[-1], self._graph, manifest)
            self._swap(claim, head)
            self._note_started_from(head)
            self._drop_claimed(head, wanted.checkpoint_id)
        except HeadOutcomeUnknown:
            self._void(claim)
            raise
        except HeadClaimedAgain as error:
            self._void(claim)
            raise HeadOutcomeUnknown(str(error)) from error
        except (StoreNotFound, StoreCorrupt) as error:
            raise self._unusable(error) from error
        except StoreTransient as error:
            self._remove_quietly(path)
            self._remove_quietly(self._done_splits.path(wanted.checkpoint_id))
            return c.CheckpointNotStored(
                wanted.checkpoint_id,
                str(error),
                self._now_ms(),
                isinstance(error, StoreFull) and isinstance(self._store, MemoryStore),
            )
        return self._stored(wanted.checkpoint_id, path, done)

    def _note_done(self, checkpoint_id: int, done: tuple[c.SourceDone, ...]) -> None:
        with self._turns:
            for older in [one for one in self._done_by_checkpoint if one < checkpoint_id]:
                del self._done_by_checkpoint[older]
            self._done_by_checkpoint[checkpoint_id] = done

    def _stored(
        self, checkpoint_id: int, path: str, done: tuple[c.SourceDone, ...]
    ) -> c.CheckpointStored:
        return c.CheckpointStored(checkpoint_id, path, self._now_ms(), done, done_references(done))

    def _save(self, wanted: c.StoreCheckpoint, manifest: checkpoint_pb2.CheckpointManifest) -> None:
        """Makes the savepoint with which the job is stopped, before HEAD says that it is."""
        saved = checkpoint_pb2.CheckpointManifest()
        saved.CopyFrom(manifest)
        saved.properties.kind = checkpoint_pb2.CHECKPOINT_KIND_SAVEPOINT
        subtasks = [without_positions(snapshot) for snapshot in saved.subtasks]
        del saved.subtasks[:]
        saved.subtasks.extend(subtasks)
        self.savepoint(wanted.properties.target).complete(saved)

    def _begin_storing(self, checkpoint_id: int) -> _Claim:
        """What it is stored under; a checkpoint that was given up on before is not stored any more."""
        with self._turns:
            if checkpoint_id <= self._given_up or self._claim is None:
                raise HeadOutcomeUnknown(
                    f"checkpoint {checkpoint_id} was given up on, or HEAD must be claimed again, before it "
                    "began to be stored"
                )
            self._storing = checkpoint_id, self._claim
            return self._claim

    def give_up(self, checkpoint_id: int) -> None:
        """``store`` has not returned, or not begun, and is waited for no longer; called from any thread.

        HEAD is claimed again by the next call, and says then whether the checkpoint counts.
        """
        with self._turns:
            self._given_up = max(self._given_up, checkpoint_id)
            storing = self._storing
        if storing is not None and storing[0] == checkpoint_id:
            self._void(storing[1])

    def settle(self, checkpoint_id: int) -> c.CheckpointStored | c.CheckpointNotStored:
        """Finds out whether a checkpoint is stored whose ``store`` did not say so.

        Raises:
            Fenced: another leader has the job.
            Unrecoverable: HEAD is gone, or cannot be read.
            StoreTransient: it cannot be found out now.
        """
        head = self._claimed(must_exist=True).head
        for retained in head.retained:
            if retained.checkpoint_id == checkpoint_id:
                with self._turns:
                    done = self._done_by_checkpoint[checkpoint_id]
                return self._stored(checkpoint_id, retained.manifest_path, done)
        return c.CheckpointNotStored(
            checkpoint_id, "the store did not answer, and has not stored it", self._now_ms()
        )

    def reserve_ids(self) -> int:
        """Claims HEAD again, and with it a block of checkpoint ids; returns the end of the block.

        Not while a checkpoint is being stored.

        Raises:
            Fenced: another leader has the job.
            Unrecoverable: HEAD is gone, or cannot be read.
            StoreTransient: the store does not answer now.
        """
        with self._turns:
            self._claim = None
        claim = self._claimed(must_exist=True, more_ids=IDS_RESERVED_AT_ONCE)
        return claim.head.next_checkpoint_id

    def verify(self) -> None:
        """Makes sure that no other leader has the job.

        Raises:
            Fenced: one has.
            Unrecoverable: HEAD is gone, or cannot be read.
            StoreTransient: it cannot be found out now.
        """
        claim = self._claimed(must_exist=True)
        try:
            claim.heads.verify()
        except HeadClaimedAgain as error:
            self._void(claim)
            raise StoreTransient(f"storage was slow: {error}") from error
        except (StoreNotFound, StoreCorrupt) as error:
            raise self._unusable(error) from error

    def savepoint(self, uri: str) -> SavepointStoreRunner:
        """The directory of a savepoint of the job.

        Raises:
            ConfigurationError: there is no such kind of store.
        """
        return SavepointStoreRunner(self._job_id, uri, self._store)

    def savepoint_manifest(
        self,
        wanted: c.StoreCheckpoint,
        done_splits: DoneNames = (),
        last_states: LastStates = MappingProxyType({}),
        done_before: Iterable[c.SourceDone] = (),
    ) -> checkpoint_pb2.CheckpointManifest:
        """The manifest of a savepoint; arguments as of ``store``. Done splits are in itself."""
        manifest = self.manifest(wanted, done_splits, last_states)
        self._done_splits.seal(manifest, done_before)
        return manifest

    def manifest(
        self,
        wanted: c.StoreCheckpoint,
        done_splits: DoneNames = (),
        last_states: LastStates = MappingProxyType({}),
    ) -> checkpoint_pb2.CheckpointManifest:
        """The manifest of a checkpoint or savepoint; arguments as of ``store``."""
        replaced = dict(wanted.replaced)
        done: dict[AttemptKey, list[tuple[str, tuple[str, ...]]]] = {}
        for key, uid, ids in done_splits:
            done.setdefault(key, []).append((uid, ids))
        subtasks = []
        held: dict[AttemptKey, Sequence[checkpoint_pb2.OperatorSnapshot]] = {}
        for key, last in wanted.last:
            assert isinstance(last, checkpoint_pb2.SubtaskSnapshot), "what was reported"
            held[key] = last.operators
        for _, snapshot in wanted.snapshots:
            assert isinstance(snapshot, checkpoint_pb2.SubtaskSnapshot), "what was acknowledged"
            subtasks.append(with_replaced(snapshot, replaced))
        subtasks += (
            finished_snapshot(
                key.vertex,
                key.subtask_index,
                done.get(key, ()),
                [*last_states.get(key.subtask, ()), *held.get(key, ())],
            )
            for key in wanted.finished
        )
        subtasks.sort(key=lambda snapshot: (snapshot.vertex, snapshot.subtask_index))
        if wanted.properties.is_savepoint:
            subtasks = [without_positions(snapshot) for snapshot in subtasks]
        return checkpoint_pb2.CheckpointManifest(
            job_id=self._job_id,
            job_name=self._job_name,
            checkpoint_id=wanted.checkpoint_id,
            leader_epoch=self._leader_epoch,
            triggered_at_ms=wanted.triggered_at_ms,
            completed_at_ms=self._now_ms(),
            vertices=self._fingerprint,
            subtasks=subtasks,
            penstock_version=self._version,
            properties=properties_message(wanted.properties),
            edges=exchanges(self._graph),
        )

    def _swap(self, claim: _Claim, head: checkpoint_pb2.CheckpointHead) -> None:
        for attempt in range(1, _SWAP_ATTEMPTS + 1):
            try:
                claim.heads.swap(head)
            except HeadOutcomeUnknown as error:
                self._log.warning("checkpoint.head_unclear", reason=str(error))
                if attempt == _SWAP_ATTEMPTS or self._stopped.wait(_SWAP_PAUSE_S):
                    raise
            else:
                claim.head = head
                return

    def _remove_quietly(self, path: str) -> None:
        """What is left after a failure is an orphan that the next ``prepare`` sweeps."""
        try:
            self._store.delete(path)
        except StoreTransient as error:
            self._log.warning("checkpoint.not_removed", path=path, reason=str(error))

    # ------------------------------------------------------------ deletions

    def delete(self, paths: Iterable[str]) -> c.FilesDeleted:
        """Deletes objects that nothing refers to any more."""
        left = self._store.delete_many(paths)
        for path, error in left.items():
            self._log.warning("checkpoint.not_deleted", path=path, reason=str(error))
        return c.FilesDeleted(tuple(left), self._now_ms())

    def discard(
        self,
        *,
        must_exist: bool = False,
        is_emptied: bool = False,
        emptied: Callable[[], None] = lambda: None,
    ) -> None:
        """The job is over for good: deletes everything. To be repeated after an error.

        Args:
            must_exist: the job has had a HEAD.
            is_emptied: ``emptied`` has been called; what is there now is HEAD, or came behind it.
            emptied: called when nothing but HEAD is left.

        HEAD is swapped to name nothing first, which only its owner can, and goes last: what it names is
        there at every moment, and a leader that has been deposed deletes nothing.

        Raises:
            Fenced: another leader has the job.
            StreamError: something is left.
        """
        if not is_emptied:
            self._empty(must_exist)
            emptied()
        # HEAD also where it is not there: a swap that came too late has left its lock.
        found = [one.path for one in self._store.list("")]
        delete_all(self._store, dict.fromkeys((HEAD_PATH, *found)))
        self._store.remove_remains()
        if left := self._store.list(""):
            raise StoreTransient(
                f"{left[0].path} in {self._store!r} was written while job {self._job_id} was deleted"
            )

    def _empty(self, must_exist: bool) -> None:
        claim = self._claimed(must_exist)
        self._claim = None
        empty = checkpoint_pb2.CheckpointHead()
        empty.CopyFrom(claim.head)
        del empty.retained[:]
        self._swap(claim, empty)
        self._drop_claimed(empty)
        found = [one.path for one in self._store.list("")]
        delete_all(self._store, [path for path in found if path != HEAD_PATH])


def _next_head(
    last: checkpoint_pb2.CheckpointHead, wanted: c.StoreCheckpoint, path: str, now_ms: int
) -> checkpoint_pb2.CheckpointHead:
    head = checkpoint_pb2.CheckpointHead()
    head.CopyFrom(last)
    del head.retained[:]
    head.retained.extend(
        retained
        for retained in last.retained
        if retained.checkpoint_id in wanted.retained
        and retained.checkpoint_id != wanted.checkpoint_id
    )
    head.retained.add(
        checkpoint_id=wanted.checkpoint_id,
        manifest_path=path,
        triggered_at_ms=wanted.triggered_at_ms,
        completed_at_ms=now_ms,
        state_bytes=wanted.state_bytes,
    )
    head.next_checkpoint_id = max(last.next_checkpoint_id, wanted.next_checkpoint_id)
    started = head.started_from
    if head.HasField("started_from") and not started.independent_since_checkpoint_id:
        started.independent_since_checkpoint_id = wanted.checkpoint_id
        started.independent_since_ms = now_ms
    return head


def exchanges(graph: graph_pb2.JobGraph) -> list[checkpoint_pb2.EdgeFingerprint]:
    """What a manifest says of the exchanges of the graph it belongs to."""
    return [
        checkpoint_pb2.EdgeFingerprint(
            id=edge.id,
            source_vertex=edge.source_vertex,
            target_vertex=edge.target_vertex,
            blocking=edge.partition_type == graph_pb2.RESULT_PARTITION_TYPE_BLOCKING,
        )
        for edge in graph.edges
    ]


def fingerprint(graph: graph_pb2.JobGraph) -> list[checkpoint_pb2.VertexFingerprint]:
    """What a manifest says of the graph it belongs to."""
    return [
        checkpoint_pb2.VertexFingerprint(
            id=vertex.id,
            name=vertex.name,
            parallelism=vertex.parallelism,
            max_parallelism=vertex.max_parallelism,
            operators=[
                checkpoint_pb2.OperatorFingerprint(
                    uid=operator.uid,
                    uid_is_generated=operator.uid_is_generated,
                    name=operator.name,
                    kind=operator.WhichOneof("spec") or "",
                    input_schema=operator.input_schema,
                    output_schema=operator.output_schema,
                    declared=declaration(operator),
                )
                for operator in vertex.operators
            ],
        )
        for vertex in graph.vertices
    ]
