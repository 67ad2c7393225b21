"""What a submitted job claims of what it starts from, as it is kept until the job has a record, and how it is given back."""

from __future__ import annotations

from collections.abc import Callable

from common.pb import job_record_pb2
from jobmanager.dispatcher.recovery import restorable_from
from jobmanager.stores.job_store import JobStore
from penstock.graph.output_in_doubt import OutputDecision, release_output
from penstock.pb import checkpoint_pb2
from penstock.storage.head import HeadStore
from penstock.storage.open_store import open_store
from penstock.storage.restore_point import RestorePoint, give_savepoint_back


def stored_start(
    job_id: str, point: RestorePoint, output: OutputDecision, head: bytes, *, is_claim: bool
) -> job_record_pb2.StoredStart:
    """All that giving back needs.

    Args:
        point: as it was found.
        head: HEAD beside it, where that is to be claimed.
        is_claim: it is to be the job's own.
    """
    found = point.manifest
    manifest = checkpoint_pb2.CheckpointManifest(
        job_id=found.job_id, checkpoint_id=found.checkpoint_id, properties=found.properties
    )
    return job_record_pb2.StoredStart(
        job_id=job_id,
        uri=point.uri,
        store_uri=point.store_uri,
        manifest=manifest,
        owner=point.owner,
        open_savepoints=point.open_savepoints,
        is_claim=is_claim,
        head=head,
        commits=output.commits,
        claimant=output.claimant,
    )


def withdraw(
    jobs: JobStore,
    job_id: str,
    start: job_record_pb2.StoredStart | None,
    *,
    may_come: bool = True,
) -> str:
    """Nobody runs the job any more, and then ``give_back``.

    Args:
        start: what was noted of it; None = it claims nothing. The note stays.

    Returns: as ``give_back``.

    Raises:
        StreamError: it cannot be undone now.
    """
    if start is not None or jobs.may_have(job_id):
        jobs.withdraw(job_id)
    return "" if start is None else give_back(start, jobs.check_leads, may_come=may_come)


def give_back(
    start: job_record_pb2.StoredStart, check_leads: Callable[[], None], *, may_come: bool = True
) -> str:
    """Has all that a job which never began had claimed say what it said before; what has become another's since stays.
    Blocks; to be repeated after an error.

    Args:
        check_leads: is called before anything changes; raises where another JobManager leads.
        may_come: a call that claims something may have been given up on, and be made yet: it claims nothing then.

    Returns:
        What the job that it was claimed from can be started from again; "" = nothing of its own.

    Raises:
        StreamError: it cannot be undone now.
    """
    point = RestorePoint(
        start.uri,
        start.store_uri,
        open_store(start.store_uri),
        start.manifest,
        "",
        start.owner,
        tuple(start.open_savepoints),
    )
    output = OutputDecision(start.commits, claimant=start.claimant)
    try:
        release_output(point, output, start.job_id, check_leads, may_come=may_come)
    finally:
        _give_back_point(point, start, check_leads, may_come)
    is_its_own = start.is_claim and not point.is_savepoint
    return restorable_from(start.store_uri, start.owner) if is_its_own else ""


def _give_back_point(
    point: RestorePoint,
    start: job_record_pb2.StoredStart,
    check_leads: Callable[[], None],
    may_come: bool,
) -> None:
    if start.is_claim and point.is_savepoint:
        give_savepoint_back(point, start.job_id, check_leads, may_come=may_come)
    elif start.is_claim:
        HeadStore(point.store).give_back(start.job_id, start.head, check_leads)
