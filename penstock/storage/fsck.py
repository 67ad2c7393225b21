"""Checks a checkpoint store: reads everything that retained checkpoints refer to.

What the facts mean is decided in ``fsck_report``. Checking never writes. Deleting orphans follows the
report, and stops where HEAD has changed since the report was made.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from penstock.errors import ConfigurationError, StoreCorrupt, StoreNotFound, StoreTransient
from penstock.pb import checkpoint_pb2
from penstock.storage.fsck_report import (
    Damage,
    FsckReport,
    HeadFacts,
    JobFacts,
    JobReport,
    ManifestFacts,
    Orphan,
    Problem,
    StoredObject,
    is_of_job,
    judge_job,
    retained_manifests,
    unlisted,
)
from penstock.storage.head import HEAD_PATH, decode_head
from penstock.storage.manifest import (
    StoredRange,
    decode_manifest,
    parse_manifest_path,
    references,
)
from penstock.storage.object_store import ObjectStore
from penstock.storage.open_store import open_store
from penstock.storage.savepoint import (
    MANIFEST_PATH,
    is_of_savepoint,
    looks_like_savepoint,
)
from penstock.storage.snapshot_files import SHARED_DIRECTORY
from penstock.storage.store_names import substore, without_slash

GRACE_MS: Final = 3_600_000

_READ_BYTES_MAX: Final = 8 << 20
_ATTEMPTS_MAX: Final = 5


def check_store(root: str, *, now_ms: int | None = None, grace_ms: int = GRACE_MS) -> FsckReport:
    """Checks all jobs and savepoints below a directory, or that of one of them.

    Args:
        root: names the store, as ``open_store`` takes it.
        now_ms: wall-clock time; None = that of the machine.
        grace_ms: a job in whose directory something was written within it may be running.

    Raises:
        ConfigurationError: there are things in the directory, and none of them is a job's, or a savepoint.
        StoreTransient: the directory cannot be listed.
    """
    if now_ms is None:
        now_ms = time.time_ns() // 1_000_000
    return FsckReport(
        tuple(_check(store, name, now_ms, grace_ms) for name, store in _job_stores(root).items())
    )


def _check(store: ObjectStore, directory: str, now_ms: int, grace_ms: int) -> JobReport:
    try:
        if looks_like_savepoint(_inside(store)):
            return _check_savepoint(store, directory, now_ms, grace_ms)
        return _check_job(store, directory, now_ms, grace_ms)
    except StoreTransient as error:  # it is another user's, for example
        return unlisted(directory, str(error))


def delete_orphans(
    root: str, report: FsckReport, *, force: bool = False
) -> dict[str, tuple[Orphan, ...]]:
    """Deletes what a report says nothing refers to.

    Args:
        root: what the report is about.
        force: no JobManager runs these jobs: delete also what could belong to a running one.

    Returns:
        What has been deleted, by job.

    Raises:
        StoreTransient: something cannot be deleted now; what was deleted before it is gone.
    """
    stores = _job_stores(root)
    return {
        job.directory: tuple(_delete_of_job(stores[job.directory], job, force))
        for job in report.jobs
        if job.directory in stores and not job.untouchable_because
    }


def _delete_of_job(store: ObjectStore, job: JobReport, force: bool) -> Iterator[Orphan]:
    for orphan in job.orphans:
        if orphan.kept_because and not force:
            continue
        # A job that has come back to life since then may refer to it by now.
        if _head_version(store) != job.head_version:
            return
        if orphan.is_temporary:
            store.remove_temporary(orphan.path)
        else:
            store.delete(orphan.path)
        yield orphan


def _job_stores(root: str) -> dict[str, ObjectStore]:
    """The stores of the jobs, by the last part of their names, sorted.

    Raises:
        ConfigurationError: none of what is there is a job's.
        StoreNotFound: there is no such store.
        StoreTransient: it cannot be listed now.
    """
    store = open_store(root)
    inside = store.first_parts()
    if _is_job(inside):
        return {without_slash(root).rpartition("/")[2]: store}
    stores = {name: open_store(substore(root, name)) for name in inside}
    jobs = {name: one for name, one in stores.items() if _may_be_job(one)}
    if inside and not jobs:
        raise ConfigurationError(
            f"{root} holds no job's checkpoints and no savepoint: give the directory of "
            "execution.checkpointing.dir, one with savepoints, or that of one job or savepoint in it"
        )
    return jobs


def _inside(store: ObjectStore) -> tuple[str, ...]:
    try:
        return store.first_parts()
    except StoreNotFound:
        return ()  # an object, or a job that has been deleted meanwhile


def _may_be_job(store: ObjectStore) -> bool:
    """Whether it is one, or cannot be listed."""
    try:
        return _is_job(_inside(store))
    except StoreTransient:
        return True


def _is_job(first_parts: tuple[str, ...]) -> bool:
    return looks_like_savepoint(first_parts) or any(
        part in (HEAD_PATH, SHARED_DIRECTORY) or part.startswith("chk-") for part in first_parts
    )


def _check_savepoint(store: ObjectStore, directory: str, now_ms: int, grace_ms: int) -> JobReport:
    """A savepoint is its own HEAD: its one manifest counts."""
    objects = tuple(
        StoredObject(one.path, one.size_bytes, one.modified_at_ms)
        for one in store.list("")
        if one.path == MANIFEST_PATH or is_of_savepoint(one.path)
    )
    manifest = _read_manifest(store, MANIFEST_PATH)
    found = manifest if isinstance(manifest, ManifestFacts) else ManifestFacts("", 0, 0, ())
    head = HeadFacts(
        found.job_id,
        found.leader_epoch,
        found.checkpoint_id + 1,
        ((found.checkpoint_id, MANIFEST_PATH),),
    )
    manifests = {} if manifest is None else {MANIFEST_PATH: manifest}
    failures = _check_ranges(store, {reference.location for reference in found.references})
    facts = JobFacts(found.job_id, objects, "", head, manifests, failures)
    report = judge_job(facts, now_ms, grace_ms)
    if manifest is None:
        problem = Problem(
            Damage.MISSING, MANIFEST_PATH, "it has none: it was never completed, or copied in part"
        )
        return replace(report, directory=directory, problems=(problem,))
    return replace(report, directory=directory)


def _check_job(store: ObjectStore, directory: str, now_ms: int, grace_ms: int) -> JobReport:
    attempts = 0
    while True:
        report = judge_job(_read_job(store, directory), now_ms, grace_ms)
        attempts += 1
        # A job that runs deletes older checkpoints while they are being checked.
        is_stable = report.is_healthy or report.head_version == _head_version(store)
        if is_stable or attempts == _ATTEMPTS_MAX:
            return report


def _read_job(store: ObjectStore, directory: str) -> JobFacts:
    # Before HEAD: what is written meanwhile is then at most unknown to the listing.
    objects = (
        *(
            StoredObject(one.path, one.size_bytes, one.modified_at_ms)
            for one in store.list("")
            if is_of_job(one.path)
        ),
        *(
            StoredObject(one.path, one.size_bytes, one.modified_at_ms, True)
            for one in store.temporaries()
            if is_of_job(one.path) or "/" not in one.path
        ),
    )
    head_version = _head_version(store)
    head = _read_head(store)
    written = [found.path for found in objects if parse_manifest_path(found.path) is not None]
    manifests: dict[str, ManifestFacts | str] = {}
    for path in retained_manifests(head, written):
        manifest = _read_manifest(store, path)
        if manifest is not None:
            manifests[path] = manifest
    named = {
        reference.location
        for manifest in manifests.values()
        if isinstance(manifest, ManifestFacts)
        for reference in manifest.references
    }
    failures = _check_ranges(store, named)
    return JobFacts(directory, objects, head_version, head, manifests, failures)


def _check_ranges(
    store: ObjectStore, locations: Iterable[StoredRange]
) -> dict[StoredRange, tuple[Damage, str]]:
    failures: dict[StoredRange, tuple[Damage, str]] = {}
    for location in sorted(
        locations, key=lambda location: (location.path, location.offset, location.size_bytes)
    ):
        failure = _check_range(store, location)
        if failure is not None:
            failures[location] = failure
    return failures


def _head_version(store: ObjectStore) -> str:
    try:
        return hashlib.blake2b(store.get(HEAD_PATH), digest_size=16).hexdigest()
    except StoreNotFound:
        return ""
    except StoreTransient:
        return "unreadable"


def _read_head(store: ObjectStore) -> HeadFacts | str | None:
    try:
        head = decode_head(store.get(HEAD_PATH))
    except StoreNotFound:
        return None
    except (StoreCorrupt, StoreTransient) as error:
        return str(error)
    started = head.started_from
    is_claimed = started.claimed and not started.is_savepoint
    return HeadFacts(
        head.job_id,
        head.leader_epoch,
        head.next_checkpoint_id,
        tuple((one.checkpoint_id, one.manifest_path) for one in head.retained),
        started.path.split("/")[-2] if is_claimed else "",
        started.checkpoint_id if is_claimed else 0,
    )


def _read_manifest(store: ObjectStore, path: str) -> ManifestFacts | str | None:
    try:
        manifest = decode_manifest(store.get(path), path)
    except StoreNotFound:
        return None
    except (StoreCorrupt, StoreTransient, ValueError) as error:
        return str(error)
    return ManifestFacts(
        manifest.job_id,
        manifest.checkpoint_id,
        manifest.leader_epoch,
        references(manifest),
        tuple(_contradictions(manifest)),
    )


def _contradictions(manifest: checkpoint_pb2.CheckpointManifest) -> Iterator[str]:
    """What a manifest says that cannot be true."""
    for subtask in manifest.subtasks:
        for operator in subtask.operators:
            where = f"operator {operator.operator_uid!r}, subtask {subtask.subtask_index}"
            keyed = operator.keyed
            sizes = {file.name: file.handle.size_bytes for file in keyed.files}
            if len(sizes) < len(keyed.files):
                yield f"{where}: two files have one name"
            for file in keyed.files:
                inline = file.handle.inline
                if not file.handle.path and zlib.crc32(inline) != file.handle.checksum:
                    yield f"{where}: the inline file {file.name!r} does not have its checksum"
            for segment in keyed.segments:
                size = sizes.get(segment.file)
                if not segment.file:
                    pass  # a partition of a database, which lies in all of its files
                elif size is None:
                    yield f"{where}: a segment lies in {segment.file!r}, which it has not"
                elif segment.offset < 0 or segment.offset + segment.size_bytes > size:
                    yield f"{where}: a segment goes beyond the {size} bytes of {segment.file!r}"
                parts = sum(part.size_bytes for part in segment.parts)
                if segment.parts and parts != segment.size_bytes:
                    yield f"{where}: the parts of a segment have {parts} bytes, it has {segment.size_bytes}"
                if not 0 <= segment.table < len(keyed.tables):
                    yield f"{where}: a segment is of table {segment.table}, which it has not"


def _check_range(store: ObjectStore, location: StoredRange) -> tuple[Damage, str] | None:
    """Why the bytes of a range are not what was written; None = they are."""
    checksum = 0
    position = location.offset
    stop = location.offset + location.size_bytes
    try:
        while position < stop:
            part = store.read(location.path, position, min(stop - position, _READ_BYTES_MAX))
            checksum = zlib.crc32(part, checksum)
            position += len(part)
    except StoreNotFound:
        return Damage.MISSING, "it is not there"
    except (StoreCorrupt, ValueError) as error:
        return Damage.FILE, str(error)
    except StoreTransient as error:
        return Damage.UNREADABLE, str(error)
    if checksum == location.checksum:
        return None
    message = (
        f"{location.size_bytes} bytes at offset {location.offset} are altered: their checksum is "
        f"{checksum:08x}, it was {location.checksum:08x}"
    )
    return Damage.FILE, message
