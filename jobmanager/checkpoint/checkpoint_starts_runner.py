"""What a job, or a part of it, starts from: HEAD is claimed, and the newest checkpoint found that can be restored.

Calls of ``prepare`` may hang, and are given up on: the last one that was begun counts, and earlier ones that go on
change nothing any more. Which calls are given up on is said where they are made, not on their threads: a thread
may have its first turn when all is over.

Invariants: nothing is swept while a manifest that HEAD names cannot be read, since nobody knows what it refers to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from uuid import uuid4

from common.pb import internal_pb2
from jobmanager.checkpoint.checkpoint_ids import IDS_RESERVED_AT_ONCE
from jobmanager.checkpoint.claimed_head_store import (
    CheckpointsUnreadable,
    ClaimedHeadStore,
    HeadClaim,
)
from jobmanager.checkpoint.claimed_savepoint_store import ClaimedSavepointStore
from jobmanager.checkpoint.completed_checkpoint import CompletedCheckpoint
from jobmanager.checkpoint.done_splits_store import read_done_splits
from jobmanager.checkpoint.next_head import head_marked, head_started, head_taken_over
from jobmanager.checkpoint.orphans_sweep_runner import OrphansSweepRunner
from jobmanager.checkpoint.prepared_checkpoints import PreparedCheckpoints
from jobmanager.checkpoint.repeated_output import note_files
from jobmanager.checkpoint.retained_manifests_store import RetainedManifestsStore
from jobmanager.checkpoint.snapshot_convert import completed_of
from jobmanager.checkpoint.taken_over_savepoint import take_over
from jobmanager.graph.execution_attempt import SubtaskId
from penstock.errors import JobRejected, StoreCorrupt, StoreNotFound, StoreTransient
from penstock.graph.output_in_doubt import decided_output
from penstock.graph.restore_check import check_restore
from penstock.graph.started_from import started_from
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.head import HeadClaimedAgain
from penstock.storage.manifest import encode_manifest, manifest_path
from penstock.storage.object_store import ObjectStore
from penstock.storage.restore_point import RestorePoint, open_restore_point
from penstock.storage.snapshot_files import (
    SHARED_DIRECTORY,
    StoreSnapshotReader,
    snapshot_file_name,
)


class CheckpointStartsRunner:
    """Prepares the starts of one job.

    Args:
        store: its directory.
        claimed_savepoint: what it was started from.
        leader_epoch: in whose name it acts.
        starts_from: what it is started from as long as it has no checkpoint of its own; "" = nothing.
    """

    def __init__(
        self,
        job_id: str,
        graph: graph_pb2.JobGraph,
        store: ObjectStore,
        heads: ClaimedHeadStore,
        claimed_savepoint: ClaimedSavepointStore,
        leader_epoch: int,
        starts_from: str,
    ) -> None:
        self._job_id = job_id
        self._graph = graph
        self._store = store
        self._heads = heads
        self._claimed_savepoint = claimed_savepoint
        self._leader_epoch = leader_epoch
        self._starts_from = starts_from
        self._manifests = RetainedManifestsStore(job_id, graph, store)
        self._orphans = OrphansSweepRunner(job_id, store, heads)
        self._turns = threading.Lock()
        self._preparations = 0
        self._preparing = 0
        """The preparation that has not come to its end; 0 = all have."""

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
            ended_id: the newest checkpoint that has been completed or aborted in this leader's time; where the job
                is over, any number above all that were begun.
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
        claim = self._heads.claimed(must_exist)
        try:
            return self._prepared(preparation, claim, unusable, alone, ended_id, first_attempt)
        except HeadClaimedAgain as error:
            self._heads.void(claim)
            raise StoreTransient(f"storage was slow: {error}; it is tried again") from error
        except (StoreNotFound, StoreCorrupt) as error:
            self._heads.void(claim)
            raise self._heads.unusable(error) from error
        finally:
            with self._turns:
                if self._preparing == preparation:
                    self._preparing = 0

    def begin_preparation(self) -> int:
        """A call of ``prepare`` is about to be made: earlier ones that go on, or begin late, change nothing any
        more. To be called where the calls are made; returns what names this one."""
        with self._turns:
            if self._preparing:
                self._heads.forget()  # so that it finds HEAD claimed again before it deletes
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
        claim: HeadClaim,
        unusable: Collection[int],
        alone: Collection[SubtaskId] | None,
        ended_id: int,
        first_attempt: int,
    ) -> PreparedCheckpoints:
        point = None
        if not claim.head.retained and self._starts_from:
            point = self._point(unusable)
            self._note_start(claim, point)
            if self._can_take_over(point):
                self._take_over(claim, point)
        head = claim.head
        readable = self._manifests.readable(head.retained, unusable)
        done = self._manifests.newest_done(readable)
        if head.retained and not readable:
            claim.heads.verify()  # else the storage is away
            damage = "; ".join(f"{path}: {why}" for path, why in self._manifests.damage.items())
            raise CheckpointsUnreadable(
                f"none of the checkpoints of job {self._job_id} can be restored from {self._store!r} ({damage}): "
                "restore the files from a backup; nothing has been deleted"
            )
        self._mark_damaged(claim, unusable)
        completed = tuple(
            completed_of(retained, manifest, is_own=manifest.job_id == self._job_id)
            for retained, manifest in readable
        )
        claim.heads.verify()
        sweep = None
        if len(readable) == len(head.retained):
            ended_id = self._ended_id(head, ended_id)
            sweep = partial(self._sweep, head, completed, ended_id, alone, first_attempt)
        self._check_turn(preparation)
        self._claimed_savepoint.note(head)
        if point is not None and not head.retained:
            return self._started(head, point, sweep)
        return PreparedCheckpoints(
            newest=readable[-1][1] if readable else None,
            retained=completed,
            next_checkpoint_id=head.next_checkpoint_id - IDS_RESERVED_AT_ONCE,
            goes_back=bool(readable) and readable[-1][0] is not head.retained[-1],
            repeated=self._manifests.repeated(head, readable[-1][1]) if readable else None,
            is_of_another=bool(readable) and readable[-1][1].job_id != self._job_id,
            open_savepoints=frozenset(
                one.checkpoint_id
                for one in head.open_savepoints
                if not readable or one.checkpoint_id > readable[-1][1].checkpoint_id
            ),
            done=done,
            sweep=sweep,
        )

    def _mark_damaged(self, claim: HeadClaim, unusable: Collection[int]) -> None:
        """Has HEAD tell the next leader, which would take what has gone on from an older one for what it names last."""
        head = head_marked(claim.head, unusable)
        if head != claim.head:
            self._heads.swap(claim, head)

    def _point(self, unusable: Collection[int]) -> RestorePoint:
        """What the job was told to start from, as long as it has completed no checkpoint: the first time or again."""
        path = self._starts_from
        try:
            point = open_restore_point(path)
        except JobRejected as error:
            raise CheckpointsUnreadable(
                f"job {self._job_id} was started from {path}, has completed no checkpoint of its own, and cannot "
                f"be started from there again: {error}"
            ) from error
        if point.manifest.checkpoint_id in unusable:
            raise CheckpointsUnreadable(
                f"job {self._job_id} was started from {path}, which is damaged; start it from another one"
            )
        return point

    def _note_start(self, claim: HeadClaim, point: RestorePoint) -> None:
        output = decided_output(self._graph)
        check = check_restore(self._graph, point.manifest, ignores_unclaimed=True, output=output)
        started = started_from(
            point, check, output, path=self._starts_from, is_claimed=self._is_claimed(point)
        )
        head = head_started(claim.head, started)
        if head != claim.head:
            self._heads.swap(claim, head)

    def _is_claimed(self, point: RestorePoint) -> bool:
        return point.is_savepoint and point.owner == self._job_id

    def _can_take_over(self, point: RestorePoint) -> bool:
        return self._is_claimed(point) and self._store.can_copy_from(point.store)

    def _take_over(self, claim: HeadClaim, point: RestorePoint) -> None:
        """Makes the savepoint the job's first checkpoint; what an earlier try has copied is not copied again."""
        taken = take_over(point.manifest)
        wanted = point.store.sizes(taken.copied)
        found = self._store.sizes(taken.copied.values())
        missing = {
            theirs: own
            for theirs, own in taken.copied.items()
            if theirs not in wanted or found.get(own) != wanted[theirs]
        }
        self._store.copy_from(point.store, missing)
        path = manifest_path(taken.manifest.checkpoint_id, self._leader_epoch)
        self._store.put(path, [encode_manifest(taken.manifest)])
        head = head_taken_over(claim.head, taken.manifest, path)
        note_files(head.retained[-1], self._graph, taken.manifest)
        self._heads.swap(claim, head)

    def _started(
        self,
        head: checkpoint_pb2.CheckpointHead,
        point: RestorePoint,
        sweep: Callable[[Collection[str]], None] | None,
    ) -> PreparedCheckpoints:
        """The job goes on from files that are not its own."""
        located = point.located()
        return PreparedCheckpoints(
            newest=located,
            retained=(),
            next_checkpoint_id=head.next_checkpoint_id - IDS_RESERVED_AT_ONCE,
            is_of_another=True,
            open_savepoints=frozenset(one.checkpoint_id for one in head.open_savepoints),
            done=read_done_splits(located, StoreSnapshotReader(self._store)),
            sweep=sweep,
        )

    def _sweep(
        self,
        head: checkpoint_pb2.CheckpointHead,
        completed: tuple[CompletedCheckpoint, ...],
        ended_id: int,
        alone: Collection[SubtaskId] | None,
        first_attempt: int,
        brought: Collection[str],
    ) -> None:
        self._orphans.sweep(completed, ended_id, alone, first_attempt, brought)
        if completed:
            self._claimed_savepoint.drop(head, completed[-1].checkpoint_id)

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

    def _ended_id(self, head: checkpoint_pb2.CheckpointHead, ended_id: int) -> int:
        """Up to this one no checkpoint can be under way any more."""
        first_id = self._heads.first_id
        assert first_id is not None, "HEAD has been claimed"
        completed = (retained.checkpoint_id for retained in head.retained)
        return min(max(ended_id, first_id - 1, *completed), head.next_checkpoint_id - 1)
