"""The directory of one savepoint, as the JobManager fills it.

Tasks write what is new into it; what the job's own checkpoints hold already is copied by the store itself. The
manifest comes last, and only where there is none. Whoever gives a savepoint up puts a word into its place
first: so what was about to write the manifest cannot do so any more, and what it would name may go.

Every call blocks, and may be made again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from penstock.errors import (
    JobRejected,
    StoreCorrupt,
    StoreNotFound,
    StoreTransient,
    Unrecoverable,
)
from penstock.graph.output_in_doubt import was_committed
from penstock.pb import checkpoint_pb2
from penstock.storage.manifest import decode_manifest, encode_manifest, references
from penstock.storage.object_store import FIRST_ANSWER_MS, ObjectStore, copy_all
from penstock.storage.open_store import open_store
from penstock.storage.output_claim import OutputClaim, OutputUse, make_claim, release_claim
from penstock.storage.prepared_output import claim_beside
from penstock.storage.savepoint import (
    ABOUT_OUTPUT,
    COMMITTED_PATH,
    GIVEN_UP,
    MANIFEST_PATH,
    OUTPUT_PATH,
    STATE_DIRECTORY,
    TAKEN_BACK_PATH,
    is_of_savepoint,
    path_in_savepoint,
)
from penstock.storage.savepoint_places import check_is_outside


@dataclass(frozen=True, slots=True)
class SavepointBegun:
    """What a directory is like before anything is written to it.

    Attributes:
        is_elsewhere: the job's files cannot be copied there by the store: everything is written anew.
        checkpoint_id: of the savepoint that is there already, taken under this name; 0 = none is.
        is_committed: its output has been committed by the job.
        is_taken_back: the job has gone back behind it before that.
    """

    is_elsewhere: bool
    checkpoint_id: int = 0
    is_committed: bool = False
    is_taken_back: bool = False


class SavepointStoreRunner:
    """Fills one directory.

    Args:
        job_id: whose savepoint it is.
        uri: names the directory.
        own: the directory of the job's checkpoints.
        open: opens stores by name.
        note_published: called where another job commits the output of one that is to be taken back, with its name, or
            with "" where nothing else is left of it.
    """

    def __init__(
        self,
        job_id: str,
        uri: str,
        own: ObjectStore,
        open: Callable[[str], ObjectStore] = open_store,
        note_published: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._job_id = job_id
        self._uri = uri
        self._own = own
        self._open = open
        self._note_published = note_published
        self._taken_back = OutputClaim(OutputUse.TAKES_BACK, job_id)
        self._store = open(uri)
        self._log = structlog.get_logger(__name__).bind(job_id=job_id, path=uri)

    def begin(self) -> SavepointBegun:
        """Looks whether a savepoint can be written here.

        Raises:
            JobRejected: there is something else, or it lies in another savepoint or among a job's checkpoints.
            StoreTransient: it cannot be written, or looked at.
        """
        self._store.check_answers(FIRST_ANSWER_MS)
        found = self._found()
        if found is not None:
            marks = self._store.sizes([*ABOUT_OUTPUT])
            return SavepointBegun(
                is_elsewhere=False,
                checkpoint_id=found.checkpoint_id,
                is_committed=COMMITTED_PATH in marks,
                is_taken_back=TAKEN_BACK_PATH in marks
                or claim_beside(self._store, marks) == self._taken_back,
            )
        others = [one.path for one in self._store.list("") if not is_of_savepoint(one.path)]
        if others:
            raise JobRejected(
                f"{self._uri} is not empty: {others[0]} is in it; name a directory in which the savepoint "
                "gets one of its own"
            )
        check_is_outside(self._uri, self._open)
        self._store.check_writable()
        return SavepointBegun(is_elsewhere=not self._store.can_copy_from(self._own))

    def complete(
        self,
        manifest: checkpoint_pb2.CheckpointManifest,
        announce: Callable[[], None] = lambda: None,
    ) -> None:
        """Brings all files together, then writes the manifest.

        Args:
            manifest: refers to files of the job and of the savepoint; is changed.
            announce: called before the manifest is written; what it raises comes out of here.

        Raises:
            StoreNotFound: a file is not there.
            JobRejected: another savepoint is.
            StoreTransient: it cannot be written now; it may be there all the same.
        """
        self.bring(manifest)
        announce()
        if self.write(manifest) != manifest.checkpoint_id:
            self.take_back()  # of tasks that are no more
            raise JobRejected(f"another savepoint has been written to {self._uri} meanwhile")

    def bring(self, manifest: checkpoint_pb2.CheckpointManifest) -> None:
        """Brings all files together; raises as ``complete`` does."""
        copied: dict[str, str] = {}
        for handle in _handles(manifest):
            if handle.path and not is_of_savepoint(handle.path):
                copied[handle.path] = path_in_savepoint(handle.path)
                handle.path = copied[handle.path]
        copy_all(self._own, self._store, copied)
        self._check_files(manifest)

    def write(self, manifest: checkpoint_pb2.CheckpointManifest) -> int:
        """Writes the manifest, when all that it names is there.

        Returns:
            The id of the job's savepoint that is there now: this one, or one that was written before.

        Raises:
            StoreNotFound: a file is not there any more.
            StoreCorrupt: the savepoint was given up.
            StoreTransient: it cannot be written now; it may be there all the same.
        """
        self._check_files(manifest)
        there = manifest
        if not self._store.compare_and_swap(MANIFEST_PATH, None, encode_manifest(manifest)):
            found = self._found()
            if found is None:
                raise StoreTransient(f"{self._uri}/{MANIFEST_PATH} was there, and is gone again")
            there = found
        self._sweep({reference.location.path for reference in references(there)})
        return there.checkpoint_id

    def mark_committed(self) -> None:
        """The job that it was taken of has committed the output that it names.

        Raises:
            StoreTransient: it cannot be written now.
        """
        self._store.put(COMMITTED_PATH, [f"by job {self._job_id}\n".encode()])

    def take_back(self) -> None:
        """The job that it was taken of goes back behind it, and produces again what it names. Nothing is made where
        nothing is left of it.

        Raises:
            Unrecoverable: another job commits that.
            StoreTransient: it cannot be said now.
        """
        left = self._store.sizes([MANIFEST_PATH, OUTPUT_PATH])
        if not left:
            return
        try:
            found = make_claim(self._store, self._taken_back)
        except StoreCorrupt as error:
            raise Unrecoverable(
                f"whether {self._uri} can be gone back behind is not known: {error}"
            ) from error
        if found != self._taken_back:
            self._note_published(self._uri if MANIFEST_PATH in left else "")
            raise Unrecoverable(
                f"job {self._job_id} cannot go on: {was_committed(self._uri, found)}"
            )

    def take_back_where_there(self, checkpoint_id: int) -> None:
        """The same, where this savepoint is there, or was and its output is committed.

        Raises:
            Unrecoverable: another job commits its output.
            StoreTransient: it cannot be found out now.
        """
        claim = claim_beside(self._store, self._store.sizes([OUTPUT_PATH]))
        is_others = claim is not None and claim.use is OutputUse.COMMITS
        found = None
        with contextlib.suppress(JobRejected, StoreCorrupt):  # nobody starts from what is there
            found = self._found()
        if is_others or (found is not None and found.checkpoint_id == checkpoint_id):
            self.take_back()

    def mark_in_doubt(self) -> None:
        """The job has gone back behind it, and ended before it had produced again what it names.

        Raises:
            StoreTransient: that cannot be said now.
        """
        release_claim(self._store, self._taken_back)

    def settle(self, checkpoint_id: int) -> bool:
        """Whether the savepoint is complete; from now on that does not change any more.

        Raises:
            StoreTransient: it cannot be found out now.
        """
        if self._store.compare_and_swap(MANIFEST_PATH, None, GIVEN_UP):
            return False
        try:
            found = self._found()
        except StoreCorrupt:
            return False
        return found is not None and found.checkpoint_id == checkpoint_id

    def discard(self, *, is_complete: bool = False, files: tuple[str, ...] = ()) -> None:
        """The savepoint will not be complete: what was written for it goes.

        Args:
            is_complete: it may be complete, and is to go all the same.
            files: only these go, which were not there when the rest did; () = all.

        Raises:
            Unrecoverable: another job was started from it, and commits its output: it stays.
            StoreTransient: it cannot be removed now.
        """
        try:
            if self._found() is not None:
                if not is_complete:
                    return
                self.take_back()
                self._store.delete(MANIFEST_PATH)
                self._store.delete(OUTPUT_PATH)
        except StoreCorrupt:
            pass  # given up: nothing names what is there
        self._remove(files or self._written())
        if not files:  # else another try may be writing there
            self._store.remove_remains()

    def _found(self) -> checkpoint_pb2.CheckpointManifest | None:
        """The savepoint that is there.

        Raises:
            JobRejected: it is another job's.
            StoreCorrupt: it was given up, or is damaged.
        """
        try:
            content = self._store.get(MANIFEST_PATH)
        except StoreNotFound:
            return None
        if content == GIVEN_UP:
            raise StoreCorrupt(
                f"the savepoint in {self._uri} was given up, since its storage did not answer: take another"
            )
        manifest = decode_manifest(content, f"{self._uri}/{MANIFEST_PATH}")
        if manifest.job_id != self._job_id:
            raise JobRejected(f"{self._uri} holds a savepoint of job {manifest.job_id}")
        return manifest

    def _check_files(self, manifest: checkpoint_pb2.CheckpointManifest) -> None:
        sizes = {one.path: one.size_bytes for one in self._store.list(f"{STATE_DIRECTORY}/")}
        for reference in references(manifest):
            location = reference.location
            if sizes.get(location.path, -1) < location.offset + location.size_bytes:
                raise StoreNotFound(
                    f"{location.path} is not in {self._uri}, though a task has written it: the JobManager "
                    "and every TaskManager must share that directory"
                )

    def _sweep(self, kept: set[str]) -> None:
        """What earlier tries have left; what cannot be removed does no harm."""
        self._remove(set(self._written()) - kept)

    def _written(self) -> list[str]:
        return [one.path for one in self._store.list(f"{STATE_DIRECTORY}/")]

    def _remove(self, paths: Iterable[str]) -> None:
        for path, error in self._store.delete_many(paths).items():
            self._log.warning("savepoint.not_swept", file=path, reason=str(error))


def _handles(
    manifest: checkpoint_pb2.CheckpointManifest,
) -> list[checkpoint_pb2.StateHandle]:
    operators = [one for subtask in manifest.subtasks for one in subtask.operators]
    files = [file.handle for operator in operators for file in operator.keyed.files]
    return files + [held.handle for operator in operators for held in operator.lists]
