"""The checkpoints of one job in their store: a manifest is written, then HEAD swapped to name it.

What a job starts from is found in ``starts``, what nothing names any more goes in ``deletions``.

Every call blocks, may hang, and is then given up on: others are made while it may yet go on, or even begin.
What it was about to do to HEAD it cannot do any more once HEAD has been claimed again, and what it writes late
has a name that nobody else uses. Which calls are given up on is said where they are made, not on their threads:
a thread may have its first turn when all is over.

Invariants: HEAD is claimed before anything is written or deleted; a manifest is written before HEAD names it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from types import MappingProxyType

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_deletions_runner import CheckpointDeletionsRunner
from jobmanager.checkpoint.checkpoint_ids import IDS_RESERVED_AT_ONCE
from jobmanager.checkpoint.checkpoint_starts_runner import CheckpointStartsRunner
from jobmanager.checkpoint.claimed_head_store import ClaimedHeadStore, HeadClaim
from jobmanager.checkpoint.claimed_savepoint_store import ClaimedSavepointStore
from jobmanager.checkpoint.done_splits_store import DoneSplitsStore, done_references
from jobmanager.checkpoint.manifest_composer import (
    DoneNames,
    LastStates,
    ManifestComposer,
    as_savepoint,
)
from jobmanager.checkpoint.next_head import head_opened, head_with
from jobmanager.checkpoint.repeated_output import note_files
from jobmanager.checkpoint.saved_checkpoints_store import SavedCheckpoints
from jobmanager.checkpoint.savepoint_store_runner import SavepointStoreRunner
from jobmanager.graph.job_plan import JobPlan
from penstock.errors import (
    ConfigurationError,
    JobRejected,
    StoreCorrupt,
    StoreFull,
    StoreNotFound,
    StoreTransient,
)
from penstock.graph.output_in_doubt import cannot_be_asked
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.head import HeadClaimedAgain, HeadOutcomeUnknown
from penstock.storage.manifest import encode_manifest, manifest_path
from penstock.storage.memory_store import MemoryStore
from penstock.storage.object_store import ObjectStore
from penstock.storage.prepared_output import has_prepared_output


class CheckpointStoreRunner:
    """Does what the coordinator wants done to the store.

    Args:
        graph: its graph, for the fingerprint in the manifests.
        store: the job's directory.
        leader_epoch: in whose name it acts.
        version: of Penstock, for the manifests.
        now_ms: the wall clock.
        plan: of the job, where each of its rows counts once; None = some may count twice after a restart.
        starts_from: what the job is started from as long as it has no checkpoint of its own; "" = nothing.

    Attributes:
        behind: ids of the savepoints behind which tasks have gone back before a checkpoint had committed their output.
        published: the one of them whose output another job commits, by its name; "" = which is gone; None = there is none.
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
        plan: JobPlan | None = None,
        starts_from: str = "",
    ) -> None:
        self._job_id = job_id
        self._graph = graph
        self._store = store
        self._leader_epoch = leader_epoch
        self._now_ms = now_ms
        self._manifests = ManifestComposer(job_id, graph, leader_epoch, version, plan)
        self._done_splits = DoneSplitsStore(store, leader_epoch)
        self._heads = ClaimedHeadStore(job_id, store, leader_epoch)
        self._claimed_savepoint = ClaimedSavepointStore(job_id)
        self.saved = SavedCheckpoints(job_id, self.savepoint)
        self.starts = CheckpointStartsRunner(
            job_id, graph, store, self._heads, self._claimed_savepoint, leader_epoch, starts_from
        )
        self.deletions = CheckpointDeletionsRunner(
            job_id, store, self._heads, self._claimed_savepoint, now_ms
        )
        self.behind: frozenset[int] = frozenset()
        self.published: str | None = None
        self._done_by_checkpoint: dict[int, tuple[c.SourceDone, ...]] = {}
        """What the last checkpoints that were begun to be stored hold of sources, whether they count or not."""
        self._turns = threading.Lock()
        """For what calls that go on at the same time look at, and change, about each other."""
        self._storing: tuple[int, HeadClaim] | None = None
        self._given_up = 0
        """Checkpoints up to this one are not stored any more by calls that have not begun."""

    @property
    def started_from(self) -> checkpoint_pb2.StartedFrom | None:
        """What the job was started from; None = from nothing, or that is not known yet."""
        return self._claimed_savepoint.started_from

    def forget(self) -> None:
        """A call that has not returned is waited for no longer: HEAD is claimed again before it is used."""
        self._heads.forget()

    def stop(self) -> None:
        """Retries under way are given up; called from any thread."""
        self._heads.stop()

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
            Unrecoverable: HEAD is gone, or damaged, or another job has published what tasks have gone back behind.
            HeadOutcomeUnknown: nobody knows whether it is stored; ``settle`` finds out.
        """
        claim = self._begin_storing(wanted.checkpoint_id)
        try:
            self._take_back(claim.head)
        except StoreTransient as error:
            return c.CheckpointNotStored(wanted.checkpoint_id, str(error), self._now_ms())
        path = manifest_path(wanted.checkpoint_id, self._leader_epoch)
        manifest = self._manifests.compose(wanted, done_splits, last_states, self._now_ms())
        now_ms = manifest.completed_at_ms
        if wanted.properties.is_stop or wanted.properties.is_saved:
            try:
                self._save(wanted, manifest, done_before)
            except (StoreTransient, StoreNotFound, StoreCorrupt, JobRejected) as error:
                now_ms = self._now_ms()
                return c.CheckpointNotStored(wanted.checkpoint_id, str(error), now_ms)
        try:
            done = self._done_splits.seal(manifest, done_before)
            self._note_done(wanted.checkpoint_id, done)
            self._store.put(path, [encode_manifest(manifest)])
            head = head_with(claim.head, wanted, path, now_ms)
            note_files(head.retained[-1], self._graph, manifest)
            self._heads.swap(claim, head)
            self._claimed_savepoint.note(head)
            self._claimed_savepoint.drop(head, wanted.checkpoint_id)
            if wanted.properties.is_saved:
                self.saved.try_to_write(wanted.checkpoint_id)
        except HeadOutcomeUnknown:
            self._heads.void(claim)
            raise
        except HeadClaimedAgain as error:
            self._heads.void(claim)
            raise HeadOutcomeUnknown(str(error)) from error
        except (StoreNotFound, StoreCorrupt) as error:
            raise self._heads.unusable(error) from error
        except StoreTransient as error:
            is_too_large = isinstance(error, StoreFull) and isinstance(self._store, MemoryStore)
            return self._not_stored(wanted.checkpoint_id, str(error), is_too_large=is_too_large)
        return self._stored(wanted.checkpoint_id, path, done)

    def _take_back(self, head: checkpoint_pb2.CheckpointHead) -> None:
        """What the checkpoint publishes tasks may have made for the second time: nobody else is to publish it then."""
        for one in head.open_savepoints:
            if one.checkpoint_id in self.behind:
                try:
                    self.savepoint(one.path).take_back_where_there(one.checkpoint_id)
                except (StoreTransient, ConfigurationError) as error:
                    raise StoreTransient(cannot_be_asked(one.path, error)) from error

    def _note_done(self, checkpoint_id: int, done: tuple[c.SourceDone, ...]) -> None:
        with self._turns:
            for older in [one for one in self._done_by_checkpoint if one < checkpoint_id]:
                del self._done_by_checkpoint[older]
            self._done_by_checkpoint[checkpoint_id] = done

    def _stored(
        self, checkpoint_id: int, path: str, done: tuple[c.SourceDone, ...]
    ) -> c.CheckpointStored:
        return c.CheckpointStored(checkpoint_id, path, self._now_ms(), done, done_references(done))

    def _save(
        self,
        wanted: c.StoreCheckpoint,
        manifest: checkpoint_pb2.CheckpointManifest,
        done_before: Iterable[c.SourceDone],
    ) -> None:
        """Makes the savepoint of a checkpoint before HEAD names that: the one with which the job is stopped is whole
        then, of another one the manifest is missing."""
        saved = as_savepoint(manifest)
        self._done_splits.seal(saved, done_before)
        if wanted.properties.is_stop:
            self.complete_savepoint(saved)
        else:
            self.saved.bring(saved)

    def complete_savepoint(self, manifest: checkpoint_pb2.CheckpointManifest) -> None:
        """Writes a savepoint whose output no checkpoint has committed.

        Args:
            manifest: its; is changed.

        Raises:
            StreamError: as of ``SavepointStoreRunner.complete``.
            Fenced: another leader has the job.
            Unrecoverable: HEAD is gone, or cannot be read.
        """
        target = manifest.properties.target
        self.savepoint(target).complete(manifest, partial(self._announce, manifest))

    def _announce(self, manifest: checkpoint_pb2.CheckpointManifest) -> None:
        """Has HEAD say that a savepoint with output may be there from now on: whoever goes back behind it has to know."""
        claim, checkpoint_id = self._heads.claimed(must_exist=True), manifest.checkpoint_id
        if any(one.checkpoint_id > checkpoint_id for one in claim.head.retained):
            raise StoreTransient(f"a checkpoint behind savepoint {checkpoint_id} is there already")
        if not has_prepared_output(manifest):
            return
        try:
            target = manifest.properties.target
            self._heads.swap(claim, head_opened(claim.head, target, checkpoint_id))
        except (HeadOutcomeUnknown, HeadClaimedAgain) as error:
            self._heads.void(claim)
            raise StoreTransient(f"storage was slow: {error}") from error
        except (StoreNotFound, StoreCorrupt) as error:
            raise self._heads.unusable(error) from error

    def _begin_storing(self, checkpoint_id: int) -> HeadClaim:
        """What it is stored under; a checkpoint that was given up on before is not stored any more."""
        with self._turns:
            claim = self._heads.current
            if checkpoint_id <= self._given_up or claim is None:
                raise HeadOutcomeUnknown(
                    f"checkpoint {checkpoint_id} was given up on, or HEAD must be claimed again, before it "
                    "began to be stored"
                )
            self._storing = checkpoint_id, claim
            return claim

    def give_up(self, checkpoint_id: int) -> None:
        """``store`` has not returned, or not begun, and is waited for no longer; called from any thread.

        HEAD is claimed again by the next call, and says then whether the checkpoint counts.
        """
        with self._turns:
            self._given_up = max(self._given_up, checkpoint_id)
            storing = self._storing
        if storing is not None and storing[0] == checkpoint_id:
            self._heads.void(storing[1])

    def settle(self, checkpoint_id: int) -> c.CheckpointStored | c.CheckpointNotStored:
        """Finds out whether a checkpoint is stored whose ``store`` did not say so.

        Raises:
            Fenced: another leader has the job.
            Unrecoverable: HEAD is gone, or cannot be read.
            StoreTransient: it cannot be found out now.
        """
        head = self._heads.claimed(must_exist=True).head
        for retained in head.retained:
            if retained.checkpoint_id == checkpoint_id:
                with self._turns:
                    done = self._done_by_checkpoint[checkpoint_id]
                return self._stored(checkpoint_id, retained.manifest_path, done)
            if retained.checkpoint_id > checkpoint_id:
                # This call is late: what it would delete may count.
                raise StoreTransient(
                    f"what became of checkpoint {checkpoint_id} was found out meanwhile"
                )
        return self._not_stored(checkpoint_id, "the store did not answer, and has not stored it")

    def _not_stored(
        self, checkpoint_id: int, error: str, *, is_too_large: bool = False
    ) -> c.CheckpointNotStored:
        written = (
            manifest_path(checkpoint_id, self._leader_epoch),
            self._done_splits.path(checkpoint_id),
        )
        left = self._store.delete_many(written)
        return c.CheckpointNotStored(
            checkpoint_id, error, self._now_ms(), is_too_large, tuple(left)
        )

    def reserve_ids(self) -> int:
        """Claims HEAD again, and with it a block of checkpoint ids; returns the end of the block.

        Not while a checkpoint is being stored.

        Raises:
            Fenced: another leader has the job.
            Unrecoverable: HEAD is gone, or cannot be read.
            StoreTransient: the store does not answer now.
        """
        self._heads.forget()
        claim = self._heads.claimed(must_exist=True, more_ids=IDS_RESERVED_AT_ONCE)
        return claim.head.next_checkpoint_id

    def verify(self) -> None:
        """Makes sure that no other leader has the job.

        Raises:
            Fenced: one has.
            Unrecoverable: HEAD is gone, or cannot be read.
            StoreTransient: it cannot be found out now.
        """
        claim = self._heads.claimed(must_exist=True)
        try:
            claim.heads.verify()
        except HeadClaimedAgain as error:
            self._heads.void(claim)
            raise StoreTransient(f"storage was slow: {error}") from error
        except (StoreNotFound, StoreCorrupt) as error:
            raise self._heads.unusable(error) from error

    def savepoint(self, uri: str) -> SavepointStoreRunner:
        """The directory of a savepoint of the job.

        Raises:
            ConfigurationError: there is no such kind of store.
        """
        return SavepointStoreRunner(
            self._job_id, uri, self._store, note_published=self._note_published
        )

    def _note_published(self, uri: str) -> None:
        self.published = uri

    def savepoint_manifest(
        self,
        wanted: c.StoreCheckpoint,
        done_splits: DoneNames = (),
        last_states: LastStates = MappingProxyType({}),
        done_before: Iterable[c.SourceDone] = (),
    ) -> checkpoint_pb2.CheckpointManifest:
        """The manifest of a savepoint; arguments as of ``store``. Done splits are in itself."""
        manifest = self._manifests.compose(wanted, done_splits, last_states, self._now_ms())
        self._done_splits.seal(manifest, done_before)
        return manifest
