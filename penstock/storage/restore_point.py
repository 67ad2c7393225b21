"""What a job can be started from: a savepoint, or a checkpoint that a job has left.

A path may name a savepoint's directory, a job's directory (its newest checkpoint is meant) or one ``chk-<n>`` in
it, or the manifest of either. Everything that a start needs to know is found by reading; nothing is listed but a directory that was named
wrongly, to say so.

Invariants: what is returned can be read, and each file that it names is there as long as it should be; of a
job's checkpoints only those count that HEAD names, unless there is no HEAD that can be read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from penstock.errors import Fenced, JobRejected, StoreCorrupt, StoreNotFound, StoreTransient
from penstock.pb import checkpoint_pb2
from penstock.storage.head import HEAD_PATH, FoundManifest, decode_head, find_manifests
from penstock.storage.manifest import decode_manifest, file_ends, parse_manifest_path
from penstock.storage.object_store import ObjectStore, delete_all
from penstock.storage.open_store import open_store
from penstock.storage.output_claim import claim_that_stays
from penstock.storage.savepoint import (
    MANIFEST_PATH,
    OWNER_PATH,
    is_part_of_savepoint,
    owner_of,
    signed,
)
from penstock.storage.store_names import substore, without_slash

_CHECKPOINT: Final = re.compile(r"(?P<directory>.+)/chk-(?P<checkpoint_id>\d{1,18})")
_NAMED_MAX: Final = 5
_LOOKED_INTO_MAX: Final = 50


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """What was found.

    Attributes:
        uri: of the savepoint, or of the one ``chk-<n>``.
        store_uri: of the store that all paths of the manifest are relative to.
        store: that store.
        manifest_path: in that store.
        owner: the job that HEAD belongs to, or that has claimed the savepoint; "" = none is known.
        open_savepoints: those that its job had taken behind it, and whose output no checkpoint of its commits, by their
            paths.
    """

    uri: str
    store_uri: str
    store: ObjectStore
    manifest: checkpoint_pb2.CheckpointManifest
    manifest_path: str
    owner: str = ""
    open_savepoints: tuple[str, ...] = ()

    @property
    def is_savepoint(self) -> bool:
        """Whether it is one, or else a checkpoint."""
        return self.manifest.properties.kind == checkpoint_pb2.CHECKPOINT_KIND_SAVEPOINT

    @property
    def has_ended_time(self) -> bool:
        """Whether event time had ended before it was taken (``stop --drain``): what comes behind it is late."""
        return self.manifest.properties.behind == checkpoint_pb2.BEHIND_BARRIER_DRAIN

    def located(self) -> checkpoint_pb2.CheckpointManifest:
        """The manifest for a job with another directory: its files are named with their store, and no checkpoint of
        that job may refer to them."""
        located = checkpoint_pb2.CheckpointManifest()
        located.CopyFrom(self.manifest)
        for subtask in located.subtasks:
            for operator in subtask.operators:
                for file in operator.keyed.files:
                    file.shared = False
                    _locate(file.handle, self.store_uri)
                for held in operator.lists:
                    if held.HasField("handle"):
                        _locate(held.handle, self.store_uri)
        for done in located.done_splits:
            for chunk in done.chunks:
                _locate(chunk, self.store_uri)
        return located


def _locate(handle: checkpoint_pb2.StateHandle, store_uri: str) -> None:
    if handle.path:
        handle.store = store_uri


def claim_savepoint(
    point: RestorePoint, job_id: str, note: Callable[[], None] = lambda: None
) -> None:
    """Makes a savepoint a job's own; of several that claim it at once, one does. To be repeated after an error.

    Args:
        point: with the owner that is to lose it, where there is one.
        job_id: the new owner.
        note: is called before it is claimed, with what is there then: what is given back behind it is not claimed.

    Raises:
        Fenced: it is another job's.
        StoreTransient: it cannot be claimed now.
    """
    before = _content(point.store, OWNER_PATH)
    if owner_of(before) in (point.owner, job_id):
        note()
        if point.store.compare_and_swap(OWNER_PATH, before, signed(job_id.encode())):
            return
    owner = owner_of(_content(point.store, OWNER_PATH))
    if owner != job_id:
        raise Fenced(f"job {owner or 'of another name'} has claimed it")


def give_savepoint_back(
    point: RestorePoint,
    job_id: str,
    check: Callable[[], None] = lambda: None,
    *,
    may_come: bool = True,
) -> None:
    """Undoes ``claim_savepoint`` for a job that never began; what it had not claimed is nobody else's either.

    Args:
        point: as it was claimed.
        check: is called before anything changes, with what is there then; raises where that is not to be.
        may_come: a call that claims it may have been given up on, and be made yet: it does not find what it was to replace.

    Raises:
        StoreTransient: it cannot be said now.
    """
    content, before = _content(point.store, OWNER_PATH), point.owner
    if before == job_id:
        before = ""
    is_there = bool(point.store.sizes([MANIFEST_PATH]))
    is_free = owner_of(content) == before
    if owner_of(content) != job_id and not (may_come and is_there and is_free):
        return
    check()
    if not point.store.compare_and_swap(OWNER_PATH, content, signed(before.encode())):
        raise StoreTransient(f"{OWNER_PATH} in {point.uri} has changed meanwhile")


def remove_savepoint(store: ObjectStore) -> None:
    """Removes a savepoint, its manifest first: what is left of one that is removed in part is none. Whose it is goes
    last, so that its owner finds what is left. What somebody else has put into its directory stays.

    Raises:
        StoreTransient: something of it cannot be removed now.
    """
    stays = claim_that_stays(store) | {OWNER_PATH}
    store.delete(MANIFEST_PATH)
    parts = [one.path for one in store.list("") if is_part_of_savepoint(one.path)]
    delete_all(store, [path for path in parts if path not in stays])
    store.delete(OWNER_PATH)
    store.remove_remains()


def open_restore_point(
    uri: str, opened: Callable[[str], ObjectStore] = open_store, *, use: str = "started from"
) -> RestorePoint:
    """What is to be started from, or looked into.

    Args:
        opened: opens stores by their names.
        use: what it is opened for, for messages: "it cannot be ...".

    Raises:
        JobRejected: it is not there, or not whole; the message says what is wrong.
        StoreTransient: it cannot be read now.
    """
    uri = _without_manifest(without_slash(uri))
    if not uri:
        raise JobRejected(f"the path of the savepoint or checkpoint that is to be {use} is empty")
    try:
        point = _whole(uri, opened)
    except (StoreCorrupt, _UnusableError) as error:
        raise JobRejected(f"{uri} cannot be {use}: {error}") from error
    return point


def _without_manifest(uri: str) -> str:
    """The directory that is meant where its manifest is named, as listings of checkpoints do.

    >>> _without_manifest("/kept/job/chk-7/manifest-2"), _without_manifest("/kept/job/chk-7")
    ('/kept/job/chk-7', '/kept/job/chk-7')
    """
    directory, _, name = uri.rpartition("/")
    parent = directory.rpartition("/")[2]
    is_one = name == MANIFEST_PATH or parse_manifest_path(f"{parent}/{name}") is not None
    return directory if is_one else uri


def _whole(uri: str, opened: Callable[[str], ObjectStore]) -> RestorePoint:
    point = _savepoint(uri, opened) or _checkpoint(uri, opened)
    if point is None:
        raise _UnusableError(_why_none(uri, opened))
    _check_files(point)
    return point


class _UnusableError(Exception):
    """Why it is not there, or not whole."""


def _savepoint(uri: str, opened: Callable[[str], ObjectStore]) -> RestorePoint | None:
    store = opened(uri)
    content = _content(store, MANIFEST_PATH)
    if content is None:
        return None
    manifest = decode_manifest(content, f"{uri}/{MANIFEST_PATH}")
    owner = owner_of(_content(store, OWNER_PATH))
    point = RestorePoint(uri, uri, store, manifest, MANIFEST_PATH, owner)
    return point if point.is_savepoint else None


def _checkpoint(uri: str, opened: Callable[[str], ObjectStore]) -> RestorePoint | None:
    """A job's directory, or one checkpoint of it."""
    one = _CHECKPOINT.fullmatch(uri)
    directory = uri if one is None else one["directory"]
    checkpoint_id = None if one is None else int(one["checkpoint_id"])
    store = opened(directory)
    content = _content(store, HEAD_PATH)
    if content is None and one is None:
        return None
    try:
        head = None if content is None else decode_head(content, f"{directory}/{HEAD_PATH}")
    except StoreCorrupt as error:
        if checkpoint_id is None:
            raise _UnusableError(_without_head(directory, store, str(error))) from error
        head = None
    if head is None:
        assert checkpoint_id is not None, "without HEAD one is named"
        path = _path_without_head(store, checkpoint_id)
        if path is None:
            return None
    else:
        path = _path_in_head(head, checkpoint_id)
    content = _content(store, path)
    if content is None:
        raise _UnusableError(f"{directory}/{path} is missing")
    manifest = decode_manifest(content, f"{directory}/{path}")
    found = substore(directory, f"chk-{manifest.checkpoint_id}")
    opened_behind = head.open_savepoints if head else ()
    behind = [one.path for one in opened_behind if one.checkpoint_id > manifest.checkpoint_id]
    owner = head.job_id if head else ""
    return RestorePoint(found, directory, store, manifest, path, owner, tuple(behind))


def _path_in_head(head: checkpoint_pb2.CheckpointHead, checkpoint_id: int | None) -> str:
    retained = list(head.retained)
    if not retained:
        raise _UnusableError(
            f"job {head.job_id} has completed no checkpoint there, or none is kept any more"
        )
    if checkpoint_id is None:
        return retained[-1].manifest_path
    for each in retained:
        if each.checkpoint_id == checkpoint_id:
            return each.manifest_path
    kept = ", ".join(f"chk-{each.checkpoint_id}" for each in retained[-_NAMED_MAX:])
    raise _UnusableError(
        f"{HEAD_PATH} of job {head.job_id} does not name it, so its files may "
        f"be gone; there is {kept}"
    )


def _path_without_head(store: ObjectStore, checkpoint_id: int) -> str | None:
    """The manifest of a checkpoint whose job has no HEAD that can be read; None = there is none."""
    found = [one for one in find_manifests(store) if one.manifest.checkpoint_id == checkpoint_id]
    if len(found) > 1:
        raise _UnusableError(
            f"there is no {HEAD_PATH} that says which of its manifests counts "
            f"({', '.join(one.path for one in found)})"
        )
    return found[0].path if found else None


def _without_head(directory: str, store: ObjectStore, reason: str) -> str:
    found: list[FoundManifest] = find_manifests(store)
    names = ", ".join(f"{directory}/chk-{one.manifest.checkpoint_id}" for one in found[:_NAMED_MAX])
    hint = f"; name one of {names}" if names else ""
    return f"{reason}{hint}"


def _content(store: ObjectStore, path: str) -> bytes | None:
    try:
        return store.get(path)
    except StoreNotFound:
        return None


def _why_none(uri: str, opened: Callable[[str], ObjectStore]) -> str:
    store = opened(uri)
    wanted = (
        "give the directory of a savepoint, that of a job's checkpoints (<execution.checkpointing.dir>/<job "
        "id>), or one chk-<n> in it"
    )
    try:
        names = store.first_parts()
    except StoreNotFound as error:
        return f"{error}; {wanted}"
    if not names:
        return f"it is empty; {wanted}"
    if any(name.startswith("chk-") or name == "shared" for name in names):
        return (
            f"it has files of checkpoints, but no {HEAD_PATH}: it was copied in "
            f"part; copy the whole directory, or {wanted}"
        )
    shown = ", ".join(names[:_NAMED_MAX])
    inside = [name for name in names[:_LOOKED_INTO_MAX] if _has_some(opened(substore(uri, name)))]
    if inside:
        return f"it has some in it, but is none itself: name one of them ({', '.join(inside[:_NAMED_MAX])})"
    return (
        f"there is neither a {MANIFEST_PATH} nor a {HEAD_PATH} in it "
        f"(but {shown}): it is no savepoint, or one that was not completed or copied in part; {wanted}"
    )


def _has_some(store: ObjectStore) -> bool:
    """Whether it is the directory of a savepoint, or of a job."""
    return bool(store.sizes((MANIFEST_PATH, HEAD_PATH)))


def _check_files(point: RestorePoint) -> None:
    """Reads the end of each file: what is missing, or was copied in part, is found before anything starts."""
    ends = sorted((path, end) for path, end in file_ends(point.manifest).items() if end)
    read = 0
    try:
        with closing(point.store.ranges((path, end - 1, 1) for path, end in ends)) as contents:
            for _ in contents:
                read += 1
    except (StoreNotFound, StoreCorrupt) as error:
        raise _UnusableError(
            f"{point.store_uri}/{ends[read][0]}, which it needs, is missing or "
            f"was copied in part: {error}"
        ) from error
    except ValueError as error:
        raise _UnusableError(f"a reference in it is damaged: {error}") from error
