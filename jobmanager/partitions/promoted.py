"""What outlives its job under a name, and whether it can be read (pure).

A set is readable when each partition that was promoted is still there. Under one name there may be more
than one set, while one takes the place of another, and as long as jobs read what had the name before: for others the newest one
counts, also where some of it is gone, since what is older may say something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import JobRejected, Unrecoverable
from penstock.naming import nearest_hint
from penstock.partition_id import PartitionId

_SHOWN_MAX = 10


@dataclass(frozen=True, slots=True)
class PromotedSet:
    """The partitions that one job has left behind under one name.

    Attributes:
        schema: of the rows, an Arrow IPC message.
        partition_count: of all TaskManagers.
        confirmed: all of them have been promoted; without that they are what a promotion that was broken
            off has left, or is just doing.
        updates_of: they are updates, which this operator gave out; "" = rows.
    """

    name: str
    job_id: str
    schema: bytes
    partition_count: int
    promoted_at_ms: int
    confirmed: bool
    updates_of: str = ""


@dataclass(frozen=True, slots=True)
class PromotedPart:
    """One of them, and who holds it."""

    taskmanager_id: str
    partition_id: PartitionId
    rows: int
    size_bytes: int

    @property
    def subtask_index(self) -> int:
        """Of its producer."""
        return self.partition_id.subtask_index


@dataclass(frozen=True, slots=True)
class PromotedPartitions:
    """A set, and what is there of it, in order of the producers' subtask index."""

    whole: PromotedSet
    parts: tuple[PromotedPart, ...]

    @property
    def missing(self) -> list[int]:
        """Producers' subtask indices whose partitions are gone."""
        return sorted(
            set(range(self.whole.partition_count)) - {part.subtask_index for part in self.parts}
        )


def newest_named(promoted: Sequence[PromotedPartitions], name: str) -> PromotedPartitions:
    """What a job that is built now reads under a name.

    Raises:
        JobRejected: nothing has that name, or some of it is gone.
    """
    named = [found for found in promoted if found.whole.name == name]
    if not named:
        names = sorted({found.whole.name for found in promoted})
        there_are = ", ".join(map(repr, names)) if names else "none"
        raise JobRejected(
            f"nothing is persisted as {name!r}{nearest_hint(name, names)}; the names there are: {there_are}"
        )
    newest = named[-1]
    if newest.missing:
        raise JobRejected(gone(name, newest.whole.job_id, newest.whole, newest.missing))
    return newest


def of_job(
    promoted: Sequence[PromotedPartitions], name: str, job_id: str
) -> tuple[PromotedPart, ...]:
    """What a job reads that was built when a set was there.

    Raises:
        Unrecoverable: some of it, or all, is gone.
    """
    for found in promoted:
        if (found.whole.name, found.whole.job_id) == (name, job_id):
            if found.missing:
                raise Unrecoverable(gone(name, job_id, found.whole, found.missing))
            return found.parts
    raise Unrecoverable(gone(name, job_id, None, ()))


def share_of(
    parts: Sequence[PromotedPart], subtask_index: int, parallelism: int
) -> list[PromotedPart]:
    """What one subtask reads: partitions are dealt out to the subtasks in turn."""
    return [part for part in parts if part.subtask_index % parallelism == subtask_index]


def name_taken(name: str) -> str:
    """Why a job cannot persist under a name."""
    return (
        f"something is persisted as {name!r} already: persist(..., overwrite=True) replaces it, and "
        f"`penstock partitions --drop {name}` removes it"
    )


def replaced_meanwhile(name: str, job_id: str) -> str:
    """Why a job cannot replace what another one has left under a name."""
    return (
        f"what is persisted as {name!r} is not what job {job_id} has left there, and this job was built from: it was "
        "dropped or replaced meanwhile, and stays as it is. Run this again"
    )


def gone(name: str, job_id: str, known: PromotedSet | None, missing: Sequence[int]) -> str:
    """What of a set is gone, and what to do.

    Args:
        known: None = nothing is left of it.
        missing: producers' subtask indices.
    """
    if known is None:
        what = f"what job {job_id} has persisted as {name!r} is gone"
        why = "it was dropped, something else has been persisted under the name, or"
        why += " the TaskManagers that held it were lost"
    else:
        shown = ", ".join(map(str, missing[:_SHOWN_MAX])) + (", ..." * (len(missing) > _SHOWN_MAX))
        what = (
            f"{len(missing)} of the {known.partition_count} partitions that job {job_id} has persisted as "
            f"{name!r} are gone (those of its subtasks {shown})"
        )
        why = "the TaskManagers that held them were lost"
    return f"{what}: {why}; run the job that persists it again"
