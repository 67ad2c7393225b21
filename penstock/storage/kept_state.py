"""Savepoints and what jobs have left, as users see them on disk: listed, looked into, and disposed of."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from penstock.errors import JobRejected, StoreCorrupt, StoreNotFound, StoreTransient
from penstock.storage.checkpoint_properties import BehindBarrier
from penstock.storage.head import HEAD_PATH, HeadStore
from penstock.storage.manifest import decode_manifest, file_ends, properties_of
from penstock.storage.object_store import ObjectStore, delete_all
from penstock.storage.open_store import open_store
from penstock.storage.output_claim import claim_that_stays
from penstock.storage.prepared_output import savepoint_output
from penstock.storage.savepoint import (
    COMMITTED_PATH,
    GIVEN_UP,
    MANIFEST_PATH,
    OWNER_PATH,
    is_part_of_savepoint,
    looks_like_savepoint,
    owner_of,
)
from penstock.storage.store_names import substore, without_slash


@dataclass(frozen=True, slots=True)
class KeptSavepoint:
    """A savepoint, or what is left of one that was never completed.

    Attributes:
        status: "COMPLETE" (all files are there and long enough), "INCOMPLETE" (it has no manifest), "DAMAGED", or "UNREADABLE"
            (what it is cannot be seen now, perhaps by this user).
        problem: what is wrong with one that is damaged or unreadable; "" = nothing.
        taken_at_ms: when it was complete.
        format: "native" or "canonical".
        size_bytes: of all files in its directory.
        is_for_ending: event time had been ended before it was taken (``stop --drain``).
        committed: the job that it was taken of has committed the output that it names.
        owner: the job that has claimed it; "" = none has.
        output: what has become of the output that it covers: "committed", "taken-back", "claimed" (by a job that was
            started from it) or "in-doubt"; "" = it covers none.
    """

    path: str
    status: str
    problem: str = ""
    job_id: str = ""
    job_name: str = ""
    checkpoint_id: int = 0
    taken_at_ms: int = 0
    format: str = ""
    size_bytes: int = 0
    is_for_ending: bool = False
    committed: bool = False
    owner: str = ""
    output: str = ""


def list_savepoints(uri: str) -> list[KeptSavepoint]:
    """The savepoints in a directory, the newest first; the directory may be one itself.

    Raises:
        StoreNotFound: there is no such directory.
        StoreTransient: it cannot be listed now, or is one itself and cannot be read.
    """
    uri = without_slash(uri)
    store = open_store(uri)
    inside = store.first_parts()
    if looks_like_savepoint(inside):
        return [_kept(uri, store)]
    found = []
    for name in inside:
        one = substore(uri, name)
        try:
            found += _found_in(one)
        except StoreTransient as error:  # it is another user's, for example
            found.append(KeptSavepoint(one, "UNREADABLE", str(error)))
    return sorted(found, key=lambda one: (-one.taken_at_ms, one.path))


def _found_in(uri: str) -> list[KeptSavepoint]:
    """The one savepoint that is there, or none."""
    store = open_store(uri)
    try:
        return [_kept(uri, store)] if looks_like_savepoint(store.first_parts()) else []
    except StoreNotFound:
        return []  # an object, or it has been disposed of meanwhile


def _kept(uri: str, store: ObjectStore) -> KeptSavepoint:
    objects = store.list("")
    size_bytes = sum(one.size_bytes for one in objects)
    names = {one.path: one.size_bytes for one in objects}
    if MANIFEST_PATH not in names:
        return KeptSavepoint(uri, "INCOMPLETE", size_bytes=size_bytes)
    try:
        content = store.get(MANIFEST_PATH)
        if content == GIVEN_UP:
            return KeptSavepoint(uri, "INCOMPLETE", size_bytes=size_bytes)
        manifest = decode_manifest(content, MANIFEST_PATH)
        properties = properties_of(manifest.properties)
    except (StoreCorrupt, ValueError) as error:
        return KeptSavepoint(uri, "DAMAGED", str(error), size_bytes=size_bytes)
    cut = [path for path, end in file_ends(manifest).items() if names.get(path, 0) < end]
    problem = f"{cut[0]}, which it needs, is missing or was copied in part" if cut else ""
    return KeptSavepoint(
        uri,
        "DAMAGED" if cut else "COMPLETE",
        problem + (f" ({len(cut)} files are)" if len(cut) > 1 else ""),
        job_id=manifest.job_id,
        job_name=manifest.job_name,
        checkpoint_id=manifest.checkpoint_id,
        taken_at_ms=manifest.completed_at_ms,
        format=properties.format.name.lower(),
        size_bytes=size_bytes,
        is_for_ending=properties.behind is BehindBarrier.DRAIN,
        committed=COMMITTED_PATH in names,
        owner=owner_of(store.get(OWNER_PATH)) if OWNER_PATH in names else "",
        output=savepoint_output(manifest, store, names),
    )


def dispose(
    uri: str,
    check_ended: Callable[[str], None],
    check_unneeded: Callable[[], None],
    *,
    force: bool = False,
) -> str:
    """Removes a savepoint, or what an ended job has left of its checkpoints; returns what it was.

    Args:
        check_ended: raises where the job of this id may still run.
        check_unneeded: raises where another job may still go back to what is there.
        force: also a savepoint that another job has claimed.

    Raises:
        JobRejected: it is neither, or somebody needs it.
        StreamError: something cannot be removed now; to be repeated.
    """
    uri = without_slash(uri)
    store = open_store(uri)
    try:
        inside = store.first_parts()
    except StoreNotFound as error:
        raise JobRejected(f"there is no savepoint, and no job's directory: {error}") from error
    if HEAD_PATH in inside:
        return _dispose_of_job(store, check_ended, check_unneeded)
    if not looks_like_savepoint(inside):
        raise JobRejected(
            f"{uri} is no savepoint and no job's directory of checkpoints: nothing has been removed{_hint(uri)}"
        )
    owner = owner_of(store.get(OWNER_PATH)) if OWNER_PATH in inside else ""
    if owner and not force:
        raise JobRejected(
            f"{uri} has been claimed, and its files are another job's now: {owner}; --force removes them "
            "all the same"
        )
    others = [one.path for one in store.list("") if not is_part_of_savepoint(one.path)]
    if others:
        raise JobRejected(
            f"{uri} holds something that is no part of a savepoint: {others[0]}; nothing has been removed"
        )
    check_unneeded()
    stays = claim_that_stays(store)
    # Without its manifest it is no savepoint any more, wherever this ends.
    delete_all(store, [MANIFEST_PATH])
    _remove_all(store, stays)
    return "savepoint"


def _hint(uri: str) -> str:
    """What to name instead of one checkpoint, as listings name what a job has left."""
    directory, _, name = uri.rpartition("/")
    is_checkpoint = name.startswith("chk-") and not directory.endswith("/")
    if not is_checkpoint or HEAD_PATH not in open_store(directory).first_parts():
        return ""
    return f"; checkpoints of a job share files, and go together: name {directory}"


def _dispose_of_job(
    store: ObjectStore, check_ended: Callable[[str], None], check_unneeded: Callable[[], None]
) -> str:
    heads = HeadStore(store)
    head = heads.read()
    if head is not None:
        check_ended(head.job_id)
    check_unneeded()
    if head is not None:
        # A JobManager that has the job after all cannot add anything any more.
        head = heads.claim(head.job_id, head.leader_epoch + 1)
        del head.retained[:]
        heads.swap(head)
    delete_all(store, [one.path for one in store.list("") if one.path != HEAD_PATH])
    _remove_all(store)
    return f"checkpoints of job {head.job_id}" if head is not None else "checkpoints"


def _remove_all(store: ObjectStore, but: Collection[str] = ()) -> None:
    delete_all(store, [one.path for one in store.list("") if one.path not in but])
    store.remove_remains()
