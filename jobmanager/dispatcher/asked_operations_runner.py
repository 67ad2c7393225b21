"""What users ask of jobs under ids of their own: checkpoints, savepoints, stops.

Invariant: what was asked for under an id is told again under it, whether the job still runs or not.
"""

from __future__ import annotations

from jobmanager.dispatcher.known_jobs import KnownJob, KnownJobs
from jobmanager.job.job_operation import (
    JobOperation,
    OperationKind,
    savepoint_operation,
    stop_operation,
)
from jobmanager.job.operations_runner import left
from jobmanager.job.user_operations_runner import UserOperationsRunner
from jobmanager.messages.job_state import JobState
from penstock.errors import JobRejected, StreamError
from penstock.storage.checkpoint_properties import SavepointFormat


class AskedOperationsRunner:
    """The operations of all jobs."""

    def __init__(self, jobs: KnownJobs) -> None:
        self._jobs = jobs

    async def checkpoint(self, job_id: str, operation_id: str = "") -> int:
        """Takes a checkpoint of a job now; returns its id when it is complete.

        Raises:
            JobNotFound: there is no such job.
            JobRejected: it takes none, or has ended.
            StreamError: it could not be taken.
        """
        job = self._jobs.find(job_id)
        wanted = JobOperation(operation_id, OperationKind.CHECKPOINT)
        known = job.record.operations.known(wanted) if operation_id else None
        return (await (known or _asked(job).checkpoint(operation_id)).result()).checkpoint_id

    async def savepoint(
        self, job_id: str, operation_id: str, directory: str, format: SavepointFormat
    ) -> JobOperation:
        """Takes a savepoint of a job; returns when it is complete.

        Raises:
            JobNotFound: there is no such job.
            JobRejected: it takes none, or has ended; or the directory is not for it.
            StreamError: it could not be taken.
        """
        job = self._jobs.find(job_id)
        wanted = savepoint_operation(job.record.job_id, operation_id, directory, format)
        known = job.record.operations.known(wanted)
        return await (known or _asked(job).savepoint(operation_id, directory, format)).result()

    async def stop(
        self,
        job_id: str,
        operation_id: str,
        directory: str,
        format: SavepointFormat,
        *,
        drain: bool,
    ) -> JobOperation:
        """Stops a job with a savepoint; returns when that is complete, and the job about to finish.

        Raises:
            JobNotFound: there is no such job.
            JobRejected: it takes none; or the directory is not for it.
            StreamError: it was not stopped.
        """
        job = self._jobs.find(job_id)
        wanted = stop_operation(job.record.job_id, operation_id, directory, format, drain=drain)
        known = job.record.operations.known(wanted)
        if known is None:
            known = _asked(job).stop(operation_id, directory, format, drain=drain)
        return await known.result()

    def find(self, job_id: str, operation_id: str) -> JobOperation:
        """What somebody has asked of a job, as it stands.

        Raises:
            JobNotFound: there is no such job, or it knows no such operation.
        """
        return self._jobs.find(job_id).record.operations.find(operation_id)


def _asked(job: KnownJob) -> UserOperationsRunner:
    if job.unreadable is not None:
        raise StreamError(f"no checkpoint was taken: {job.unreadable.problem}")
    if job.record.state is JobState.SUSPENDED:
        raise left()
    if job.runner is None:
        raise JobRejected(f"job {job.record.job_id} has ended: {job.record.state.name}")
    return job.runner.checkpoints.asked
