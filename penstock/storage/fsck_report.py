"""What is wrong with a job's directory in a checkpoint store, and what in it nothing refers to.

Pure: decides from facts that ``fsck`` has read. Two decisions are made here:

- **Damage** is what may keep a restore from working: HEAD or a retained manifest that is missing or
  cannot be read, that contradict each other, files that are missing, short or altered.
- **Orphans** are objects that nothing refers to. They are no damage. One may be deleted only if no task
  that is alive can still come to refer to it. From the store alone nobody can see whether the job runs,
  so without being forced to, nothing is deleted of a job in whose directory anything has been written
  lately, nor an upload for a checkpoint newer than the newest completed one. And nothing at all, forced
  or not, while HEAD or a retained manifest cannot be read: what they refer to is not known then.

``taskowned/`` is the tasks' own: nothing in it is ever an orphan. Nor is what neither jobs nor savepoints put where it
lies: it is somebody else's, as a savepoint that was copied into the directory of another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from penstock.storage.head import HEAD_PATH
from penstock.storage.manifest import (
    StoredRange,
    StoredReference,
    parse_done_splits_path,
    parse_manifest_path,
)
from penstock.storage.snapshot_files import SHARED_DIRECTORY, parse_snapshot_file_name

TASK_OWNED_PREFIX: Final = "taskowned/"
_OWN_PREFIXES: Final = ("chk-", f"{SHARED_DIRECTORY}/", TASK_OWNED_PREFIX)


class Damage(Enum):
    """Kinds of damage; the values are stable."""

    HEAD = "head"
    MANIFEST = "manifest"
    MISSING = "missing-file"
    FILE = "damaged-file"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Problem:
    """One piece of damage.

    Attributes:
        path: of the object, relative to the job's directory.
        checkpoints: ids of the retained checkpoints that suffer from it.
    """

    damage: Damage
    path: str
    message: str
    checkpoints: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object that is there.

    Attributes:
        is_temporary: what a writer has not finished; hidden from listings.
    """

    path: str
    size_bytes: int
    modified_at_ms: int
    is_temporary: bool = False


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """HEAD as read.

    Attributes:
        retained: checkpoint id and manifest path, in its order.
        claimed_directory: of the job whose HEAD it was before this job has claimed it; "" = it was always its own.
        claimed_id: the newest checkpoint of that job; this one's own come behind it.
    """

    job_id: str
    leader_epoch: int
    next_checkpoint_id: int
    retained: tuple[tuple[int, str], ...]
    claimed_directory: str = ""
    claimed_id: int = 0


@dataclass(frozen=True, slots=True)
class ManifestFacts:
    """A manifest as read.

    Attributes:
        problems: what it says that cannot be true.
    """

    job_id: str
    checkpoint_id: int
    leader_epoch: int
    references: tuple[StoredReference, ...]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobFacts:
    """Everything that was read of a job's directory.

    Attributes:
        directory: its name, which is the job's id.
        objects: those that are the job's.
        head_version: stands for the very bytes of HEAD; "" = there is none.
        head: None = there is none; a text = it cannot be read, and why.
        manifests: per path what it says, or why it cannot be read.
        failures: per range that was read, why it is not what was written; only those that failed.
    """

    directory: str
    objects: tuple[StoredObject, ...]
    head_version: str
    head: HeadFacts | str | None
    manifests: Mapping[str, ManifestFacts | str]
    failures: Mapping[StoredRange, tuple[Damage, str]]


@dataclass(frozen=True, slots=True)
class FileUse:
    """Who refers to a file.

    Attributes:
        reference_count: distinct shared files and lists in it that retained checkpoints refer to.
        referenced_bytes: in distinct ranges; the rest of the file is dead.
    """

    path: str
    size_bytes: int
    reference_count: int
    referenced_bytes: int
    checkpoints: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Orphan:
    """An object that nothing refers to.

    Attributes:
        checkpoint_id: which checkpoint it was written for; None = its name does not say.
        is_young: written within the grace: somebody may be about to refer to it.
        is_temporary: what a writer has not finished.
        kept_because: why it is not deleted unless that is forced, "" = it may be deleted.
    """

    path: str
    size_bytes: int
    modified_at_ms: int
    checkpoint_id: int | None
    is_young: bool
    is_temporary: bool
    kept_because: str


@dataclass(frozen=True, slots=True)
class JobReport:
    """What was found in the directory of one job.

    Attributes:
        head_version: the HEAD that it is about, see ``JobFacts``.
        retained: ids of the checkpoints that count, oldest first.
        untouchable_because: why no orphan may be deleted, not even by force; "" = they may.
    """

    directory: str
    head_version: str
    retained: tuple[int, ...]
    problems: tuple[Problem, ...]
    files: tuple[FileUse, ...]
    orphans: tuple[Orphan, ...]
    untouchable_because: str

    @property
    def is_healthy(self) -> bool:
        """True where nothing is damaged."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class FsckReport:
    """What was found in a checkpoint store."""

    jobs: tuple[JobReport, ...]

    @property
    def is_healthy(self) -> bool:
        """True where nothing is damaged."""
        return all(job.is_healthy for job in self.jobs)


def is_of_job(path: str) -> bool:
    """Whether an object in a job's directory is one that jobs put there.

    Example: a savepoint that was copied there is not.
        >>> is_of_job("chk-7/manifest-1"), is_of_job("kept/manifest")
        (True, False)
    """
    return path == HEAD_PATH or path.startswith(_OWN_PREFIXES)


def retained_manifests(
    head: HeadFacts | str | None, manifest_paths: Iterable[str]
) -> tuple[str, ...]:
    """Paths of the manifests that count: HEAD's; where HEAD says nothing, all, to be on the safe side."""
    if isinstance(head, HeadFacts):
        return tuple(path for _, path in head.retained)
    return tuple(sorted(manifest_paths))


def judge_job(facts: JobFacts, now_ms: int, grace_ms: int) -> JobReport:
    """What the facts of a job's directory mean.

    Args:
        now_ms: wall-clock time.
        grace_ms: a job in whose directory something was written within it may be running.
    """
    paths = retained_manifests(facts.head, facts.manifests)
    retained = {
        path: found
        for path in paths
        if isinstance(found := facts.manifests.get(path), ManifestFacts)
    }
    problems = (
        *_head_problems(facts),
        *_manifest_problems(facts, paths),
        *_file_problems(facts, retained),
    )
    untouchable = ""
    if not isinstance(facts.head, HeadFacts) and (facts.head is not None or facts.manifests):
        untouchable = "HEAD cannot be read, so nobody knows what it refers to"
    elif len(retained) < len(set(paths)):
        untouchable = "a retained manifest cannot be read, so nobody knows what it refers to"
    return JobReport(
        facts.directory,
        facts.head_version,
        tuple(sorted(manifest.checkpoint_id for manifest in retained.values())),
        problems,
        tuple(_files(facts, retained)),
        tuple(_orphans(facts, retained, now_ms, grace_ms)),
        untouchable,
    )


def unlisted(directory: str, why: str) -> JobReport:
    """The report of a directory whose content nobody knows."""
    problem = Problem(Damage.UNREADABLE, ".", why)
    return JobReport(directory, "", (), (problem,), (), (), "its directory cannot be listed")


def _head_problems(facts: JobFacts) -> Iterator[Problem]:
    head = facts.head
    if isinstance(head, str):
        yield Problem(Damage.HEAD, "HEAD", head)
    elif head is None:
        if facts.manifests:
            yield Problem(
                Damage.HEAD,
                "HEAD",
                f"there is none, but {len(facts.manifests)} manifests: which of them count is "
                "not known",
            )
    else:
        ids = [checkpoint_id for checkpoint_id, _ in head.retained]
        if facts.directory not in (head.job_id, head.claimed_directory):
            yield Problem(
                Damage.HEAD,
                "HEAD",
                f"it is that of job {head.job_id!r}, and lies in the directory of job "
                f"{facts.directory!r}",
            )
        if ids != sorted(set(ids)):
            yield Problem(Damage.HEAD, "HEAD", f"checkpoints are not in order: {ids}")
        if ids and max(ids) >= head.next_checkpoint_id:
            yield Problem(
                Damage.HEAD,
                "HEAD",
                f"the next checkpoint is to be {head.next_checkpoint_id}, and {max(ids)} is "
                "there already",
            )


def _manifest_problems(facts: JobFacts, paths: Iterable[str]) -> Iterator[Problem]:
    head = facts.head if isinstance(facts.head, HeadFacts) else None
    named = {path: checkpoint_id for checkpoint_id, path in head.retained} if head else {}
    for path in paths:
        manifest = facts.manifests.get(path)
        expected_id = named.get(path)
        ids = () if expected_id is None else (expected_id,)
        if manifest is None:
            yield Problem(Damage.MISSING, path, "HEAD names it, and it is not there", ids)
            continue
        if isinstance(manifest, str):
            yield Problem(Damage.MANIFEST, path, manifest, ids)
            continue
        ids = (manifest.checkpoint_id,)
        if expected_id is not None and manifest.checkpoint_id != expected_id:
            message = f"it is that of checkpoint {manifest.checkpoint_id}, not {expected_id}"
            yield Problem(Damage.MANIFEST, path, message, (expected_id,))
        # What was claimed is another job's, and its epochs are maybe those of another cluster.
        own = head if head is not None and manifest.checkpoint_id > head.claimed_id else None
        if own is not None and manifest.job_id != own.job_id:
            message = f"it is that of job {manifest.job_id!r}, HEAD that of {own.job_id!r}"
            yield Problem(Damage.MANIFEST, path, message, ids)
        if own is not None and manifest.leader_epoch > own.leader_epoch:
            message = (
                f"leader epoch {manifest.leader_epoch} wrote it, and HEAD is at {own.leader_epoch}"
            )
            yield Problem(Damage.MANIFEST, path, message, ids)
        for message in manifest.problems:
            yield Problem(Damage.MANIFEST, path, message, ids)


def _file_problems(facts: JobFacts, retained: Mapping[str, ManifestFacts]) -> Iterator[Problem]:
    users: dict[StoredRange, set[int]] = {}
    for manifest in retained.values():
        for reference in manifest.references:
            users.setdefault(reference.location, set()).add(manifest.checkpoint_id)
    missing: dict[str, tuple[str, set[int]]] = {}
    for location, (damage, message) in sorted(
        facts.failures.items(), key=lambda item: (item[0].path, item[0].offset)
    ):
        ids = users.get(location, set())
        if damage is Damage.MISSING:  # once per file, however many ranges it had
            missing.setdefault(location.path, (message, set()))[1].update(ids)
        else:
            yield Problem(damage, location.path, message, tuple(sorted(ids)))
    for path, (message, ids) in missing.items():
        yield Problem(Damage.MISSING, path, message, tuple(sorted(ids)))


def _files(facts: JobFacts, retained: Mapping[str, ManifestFacts]) -> Iterator[FileUse]:
    sizes = {found.path: found.size_bytes for found in facts.objects}
    ranges: dict[str, set[StoredRange]] = {}
    checkpoints: dict[str, set[int]] = {}
    for manifest in retained.values():
        for reference in manifest.references:
            path = reference.location.path
            ranges.setdefault(path, set()).add(reference.location)
            checkpoints.setdefault(path, set()).add(manifest.checkpoint_id)
    counts = Counter(
        location.path
        for _, location in {
            (reference.identity, reference.location)
            for manifest in retained.values()
            for reference in manifest.references
        }
    )
    for path in sorted(ranges):
        yield FileUse(
            path,
            sizes.get(path, 0),
            counts[path],
            sum(location.size_bytes for location in ranges[path]),
            tuple(sorted(checkpoints[path])),
        )


def _orphans(
    facts: JobFacts, retained: Mapping[str, ManifestFacts], now_ms: int, grace_ms: int
) -> Iterator[Orphan]:
    used = {HEAD_PATH, *retained_manifests(facts.head, facts.manifests)}
    for manifest in retained.values():
        used.update(reference.location.path for reference in manifest.references)
    newest_id = max((manifest.checkpoint_id for manifest in retained.values()), default=0)
    newest_write_ms = max((found.modified_at_ms for found in facts.objects), default=0)
    busy = ""
    if now_ms - newest_write_ms < grace_ms:
        busy = f"the job may be running: {_ago(now_ms - newest_write_ms)} something was written"
    for found in facts.objects:
        if found.path in used or found.path.startswith(TASK_OWNED_PREFIX):
            continue
        checkpoint_id = _checkpoint_id(found.path)
        kept = busy
        if not kept and checkpoint_id is not None and checkpoint_id > newest_id:
            kept = f"checkpoint {checkpoint_id} may still complete: {newest_id or 'none'} has last"
        yield Orphan(
            found.path,
            found.size_bytes,
            found.modified_at_ms,
            checkpoint_id,
            now_ms - found.modified_at_ms < grace_ms,
            found.is_temporary,
            kept,
        )


def _checkpoint_id(path: str) -> int | None:
    manifest = parse_manifest_path(path)
    if manifest is not None:
        return manifest[0]
    name = parse_snapshot_file_name(path)
    return parse_done_splits_path(path) if name is None else name.checkpoint_id


def _ago(duration_ms: int) -> str:
    seconds = max(0, duration_ms) // 1000
    return f"{seconds} s ago" if seconds < 600 else f"{seconds // 60} min ago"
