"""HEAD: the one object of a job that says which checkpoints count, and whose word counts.

A leader claims HEAD before it does anything with the job's checkpoints, and from then on replaces it
only while it is what this leader wrote last. So a deposed leader can add nothing. Every claim carries a
random token, so that no two claims ever have the same bytes.

Invariants: HEAD is only ever replaced by compare-and-swap; one that cannot be read is never replaced;
the epoch never goes down.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from penstock.errors import (
    Fenced,
    InvariantViolation,
    StoreCorrupt,
    StoreNotFound,
    StoreTransient,
    StreamError,
)
from penstock.pb import checkpoint_pb2
from penstock.storage.framing import FrameFormat, decode_frame, encode_frame
from penstock.storage.manifest import decode_manifest, parse_manifest_path
from penstock.storage.object_store import ObjectStore
from penstock.storage.swap_counts import SwappedKind
from penstock.storage.swapped_object import NewerLeader, SwapOutcomeUnknown, SwappedObject

HEAD_PATH: Final = "HEAD"
FORMAT: Final = FrameFormat("a checkpoint HEAD", b"PSTKHEAD", 1)

_TOKEN_BYTES: Final = 16
_CLAIM_ATTEMPTS: Final = 16


class HeadOutcomeUnknown(StoreTransient):
    """A swap may or may not have happened, or may still: nothing that HEAD would name or did name may
    be deleted until a later ``swap`` has returned or raised ``Fenced``."""


class HeadClaimedAgain(Fenced):
    """The same leader has claimed HEAD again: this claim is void, and HEAD tells what it has done."""


@dataclass(frozen=True, slots=True)
class FoundManifest:
    """A manifest that can be read."""

    path: str
    manifest: checkpoint_pb2.CheckpointManifest


class HeadStore:
    """HEAD of one job, in the store of the job's directory. Used by one thread at a time.

    Where HEAD is gone, and every manifest with it, the storage is away: ``StoreTransient``.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._object = SwappedObject(store, HEAD_PATH, SwappedKind.HEAD, self._lost)
        self._token = b""
        self._epoch = 0
        self._job_id = ""
        self._named: list[str] = []
        """Manifests, by HEAD as this instance wrote it last."""

    def read(self) -> checkpoint_pb2.CheckpointHead | None:
        """HEAD as it is now, whoever wrote it; None = the job has none.

        Raises:
            StoreCorrupt: it cannot be understood; ``find_manifests`` shows what is there.
            StoreTransient: it cannot be read now.
        """
        content = self._object.content()
        return None if content is None else decode_head(content)

    def claim(
        self,
        job_id: str,
        leader_epoch: int,
        *,
        must_exist: bool = False,
        reserved_ids: int = 0,
        more_ids: int = 0,
    ) -> checkpoint_pb2.CheckpointHead:
        """Makes HEAD this leader's, and makes it where there is none; retained checkpoints stay.

        An earlier claim of the same epoch is void from then on. To be repeated after an error.

        Args:
            job_id: whose checkpoints these are.
            leader_epoch: in whose name.
            must_exist: the job had a HEAD: that there is none now means that this is another store.
            reserved_ids: checkpoint ids that are this leader's with its first claim: those before the next id
                that HEAD says then.
            more_ids: ids that are this leader's besides.

        Returns:
            HEAD as claimed.

        Raises:
            StoreNotFound: there is no HEAD, although there must be one; none is made.
            Fenced: a leader of a newer epoch has it.
            StoreCorrupt: there is a HEAD that cannot be understood or is another job's; it stays.
            StoreTransient: it cannot be read or written now.
        """
        token = os.urandom(_TOKEN_BYTES)
        for _ in range(_CLAIM_ATTEMPTS):
            content = self._object.content()
            if content is None and must_exist:
                found = (info.path for info in self._store.list("chk-"))
                raise self._gone(
                    f"job {job_id} had a {HEAD_PATH}, and there is none any more",
                    is_left=any(parse_manifest_path(path) for path in found),
                )
            head = _claimed(content, job_id, leader_epoch, reserved_ids)
            head.next_checkpoint_id += more_ids
            new = _encode(head, token)
            if self._object.take_over(content, new):
                self._store.note_place()
                self._object.name = f"{HEAD_PATH} of job {job_id}"
                self._token = token
                self._epoch = leader_epoch
                self._job_id = job_id
                self._note(head)
                return head
        raise StoreTransient(
            f"{HEAD_PATH} of job {job_id} changed {_CLAIM_ATTEMPTS} times while leader epoch "
            f"{leader_epoch} claimed it: do several JobManagers lead?"
        )

    def take_over(
        self,
        job_id: str,
        owner: str,
        checkpoint_id: int,
        started_from: checkpoint_pb2.StartedFrom,
        note: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """Makes HEAD another job's, which goes on from one of its checkpoints; newer ones are forgotten.

        The job that had it can add nothing any more, whoever leads it. To be repeated after an error.

        Args:
            job_id: whose HEAD it is from then on; nothing changes where it is already.
            owner: the job that is to lose it.
            checkpoint_id: what is gone on from.
            started_from: what HEAD tells of it.
            note: is told what HEAD is, for ``give_back``, before it is replaced.

        Raises:
            Fenced: it is neither job's, or does not name the checkpoint any more; it stays as it is.
            StoreNotFound: there is no HEAD.
            StoreCorrupt: it cannot be understood; it stays.
            StoreTransient: it cannot be read or written now.
        """
        for _ in range(_CLAIM_ATTEMPTS):
            content = self._object.content()
            if content is None:
                raise StoreNotFound(f"there is no {HEAD_PATH}: {self._object.why_absent}")
            head = decode_head(content)
            if head.job_id == job_id:
                return
            if head.job_id != owner:
                raise Fenced(f"job {head.job_id} has claimed it")
            kept = [one for one in head.retained if one.checkpoint_id <= checkpoint_id]
            if not kept or kept[-1].checkpoint_id != checkpoint_id:
                raise Fenced(f"{HEAD_PATH} of job {owner} does not name it any more")
            del head.retained[:]
            head.retained.extend(kept)
            # The epochs of another cluster mean nothing here.
            head.job_id, head.leader_epoch = job_id, 0
            head.started_from.CopyFrom(started_from)
            note(content)
            if self._object.hand_over(content, _encode(head, os.urandom(_TOKEN_BYTES))):
                return
        raise StoreTransient(f"{HEAD_PATH} of job {owner} changed while job {job_id} claimed it")

    def give_back(self, job_id: str, found: bytes, check: Callable[[], None]) -> None:
        """Undoes ``take_over`` for a job that never began, whether that had succeeded or is not known to have. Nothing
        changes where HEAD has become another's since.

        Args:
            job_id: that job.
            found: what was noted; b"" = nothing, so that nothing was replaced.
            check: is called before anything changes, with what is there then; raises where that is not to be.

        Raises:
            StoreCorrupt: it cannot be understood; it stays.
            StoreTransient: it cannot be read or written now.
        """
        content = self._object.content() if found else None
        if content is None:
            return
        head, before = decode_head(content), decode_head(found)
        if head == before or (head.job_id, head.leader_epoch) == (job_id, 0):
            check()
            # Also where it is as it was: a swap that is late finds another token.
            if not self._object.hand_over(content, _encode(before, os.urandom(_TOKEN_BYTES))):
                raise StoreTransient(f"{HEAD_PATH} of job {before.job_id} has changed meanwhile")

    def swap(self, head: checkpoint_pb2.CheckpointHead) -> None:
        """Replaces HEAD. When this returns, the new one counts and survives a crash.

        Args:
            head: of the job and the epoch that were claimed.

        Raises:
            Fenced: HEAD is no longer what this instance wrote last: another leader has it, or
                (``HeadClaimedAgain``) another claim of this one.
            StoreNotFound: there is no HEAD any more.
            StoreCorrupt: what is there cannot be understood, and is no leader's.
            StoreTransient: nothing has changed, and the same call may succeed later.
            HeadOutcomeUnknown: see there.
        """
        if not self._object.is_own:
            raise InvariantViolation("HEAD is swapped before it has been claimed")
        if (head.job_id, head.leader_epoch) != (self._job_id, self._epoch):
            raise InvariantViolation(
                f"HEAD of job {head.job_id!r}, epoch {head.leader_epoch}, swapped by who claimed "
                f"that of job {self._job_id!r}, epoch {self._epoch}"
            )
        try:
            self._object.swap(_encode(head, self._token))
        except SwapOutcomeUnknown as error:
            raise HeadOutcomeUnknown(str(error)) from error
        self._note(head)

    def verify(self) -> None:
        """Makes sure that no other leader has claimed HEAD so far.

        Before objects are deleted that HEAD does not name: list them, then call this, then delete what
        was listed. Whatever a later leader will refer to was either named by HEAD or is not listed.

        Raises:
            Fenced, StoreNotFound, StoreCorrupt: as ``swap``.
            StoreTransient: it cannot be read now.
        """
        if not self._object.is_own:
            raise InvariantViolation("HEAD is verified before it has been claimed")
        self._object.verify()

    def _note(self, head: checkpoint_pb2.CheckpointHead) -> None:
        self._named = [one.manifest_path for one in head.retained]

    def _lost(self, content: bytes | None) -> StreamError:
        """What has become of HEAD, which is no longer what this instance wrote."""
        if content is None:
            is_left = bool(self._store.sizes(self._named))
            return self._gone(f"{HEAD_PATH} of job {self._job_id} is gone", is_left)
        try:
            other = decode_head(content)
        except StoreCorrupt as error:
            return StoreCorrupt(f"{HEAD_PATH} of job {self._job_id} was damaged: {error}")
        mine = f"leader epoch {self._epoch} no longer has {HEAD_PATH} of job {self._job_id}"
        if (other.job_id, other.leader_epoch) == (self._job_id, self._epoch):
            return HeadClaimedAgain(f"{mine}: it has claimed it again")
        if other.job_id != self._job_id:
            return Fenced(f"{mine}: job {other.job_id} has claimed it")
        return NewerLeader(f"{mine}: epoch {other.leader_epoch} has claimed it", other.leader_epoch)

    def _gone(self, told: str, is_left: bool) -> StreamError:
        """What it means that there is no HEAD: where nothing is left that it has named, nobody has removed HEAD alone."""
        told = f"{told}: {self._object.why_absent}"
        if is_left:
            return StoreNotFound(f"{told}; somebody has removed it: its checkpoints are there")
        return StoreTransient(
            f"{told}, and no checkpoint is there either: is the directory mounted, and execution.checkpointing.dir "
            "the one that the job began with? It is tried again"
        )


def decode_head(content: bytes, path: str = HEAD_PATH) -> checkpoint_pb2.CheckpointHead:
    """The HEAD that these bytes are.

    Args:
        path: where they come from, for messages.

    Raises:
        StoreCorrupt: they are truncated, altered, no HEAD, or of a newer format.
    """
    _, payload = decode_frame(FORMAT, content, path)
    if len(payload) < _TOKEN_BYTES:
        raise StoreCorrupt(f"{path} is not {FORMAT.noun}: it holds {len(payload)} bytes")
    try:
        return checkpoint_pb2.CheckpointHead.FromString(payload[_TOKEN_BYTES:])
    except DecodeError as error:
        raise StoreCorrupt(f"{path} is not {FORMAT.noun}: {error}") from error


def find_manifests(store: ObjectStore) -> list[FoundManifest]:
    """All manifests of a job that can be read, the newest first, for when HEAD cannot be read.

    Not all of them count: one that HEAD never named, or no longer names, may refer to files that have
    been deleted.

    Raises:
        StoreTransient: the store cannot be read now.
    """
    return sorted(
        _readable_manifests(store),
        key=lambda found: (found.manifest.checkpoint_id, found.manifest.leader_epoch),
        reverse=True,
    )


def _readable_manifests(store: ObjectStore) -> Iterator[FoundManifest]:
    for info in store.list("chk-"):
        if parse_manifest_path(info.path) is None:
            continue
        try:
            manifest = decode_manifest(store.get(info.path), info.path)
        except (StoreCorrupt, StoreNotFound):
            continue  # what is asked for are those that can be read
        yield FoundManifest(info.path, manifest)


def _claimed(
    content: bytes | None, job_id: str, leader_epoch: int, reserved_ids: int
) -> checkpoint_pb2.CheckpointHead:
    if content is None:
        return checkpoint_pb2.CheckpointHead(
            format_version=FORMAT.version,
            job_id=job_id,
            leader_epoch=leader_epoch,
            next_checkpoint_id=1 + reserved_ids,
        )
    head = decode_head(content)
    if head.job_id != job_id:
        raise StoreCorrupt(
            f"{HEAD_PATH} is that of job {head.job_id}, not of job {job_id}: give each job a "
            "directory of its own"
        )
    if head.leader_epoch > leader_epoch:
        raise NewerLeader(
            f"{HEAD_PATH} of job {job_id} has been claimed by leader epoch {head.leader_epoch}, "
            f"which is newer than {leader_epoch}",
            head.leader_epoch,
        )
    if head.leader_epoch < leader_epoch:
        head.leader_epoch = leader_epoch
        head.next_checkpoint_id = max(1, head.next_checkpoint_id) + reserved_ids
    return head


def _encode(head: checkpoint_pb2.CheckpointHead, token: bytes) -> bytes:
    stamped = checkpoint_pb2.CheckpointHead()
    stamped.CopyFrom(head)
    stamped.format_version = FORMAT.version
    return encode_frame(FORMAT, token + stamped.SerializeToString(deterministic=True))
