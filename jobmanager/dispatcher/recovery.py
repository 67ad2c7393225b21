"""What a JobManager that starts does with the jobs that an earlier one did not see to their end.

A job that can go on without the JobManager that ran it (``JobSettings.outlives_jobmanager``) is run again,
from its newest checkpoint. The others have ended with that JobManager; clients get a clear answer. Of a job
that had ended before, the checkpoints are deleted.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from jobmanager.artifact_store import ArtifactStore
from jobmanager.dispatcher.job_description import JobDescription, describe
from jobmanager.dispatcher.job_state import JobState
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.job_store import UnfinishedJob
from penstock.config import Configuration
from penstock.errors import StreamError


class JobEndedError(StreamError):
    """A job cannot be gone on with.

    Attributes:
        state: FAILED; CANCELED where its user had cancelled it; or what it had ended in before.
    """

    def __init__(self, state: JobState, reason: str) -> None:
        super().__init__(reason)
        self.state = state


def recovered(
    unfinished: UnfinishedJob, config: Configuration, artifacts: ArtifactStore
) -> JobDescription:
    """The job, as it is to be run again.

    Args:
        config: of the cluster.

    Raises:
        JobEndedError: it has ended with its JobManager, or before.
    """
    end: JobEndedError | None = None
    if unfinished.end:
        end = JobEndedError(JobState[unfinished.end], "the JobManager ended after the job")
    elif unfinished.is_cancelled:
        end = JobEndedError(JobState.CANCELED, "the job was cancelled when the JobManager ended")
    elif unfinished.has_committed:
        end = JobEndedError(
            JobState.FAILED,
            "the JobManager ended while the job, which took no checkpoints, committed its output: some "
            "of it may be missing, and to run the job again would repeat the rest; remove the output "
            "and submit the job again, or set execution.checkpointing.interval",
        )
    try:
        # The TaskManagers have not registered yet: each is checked when it gives slots.
        job = describe(unfinished.job_id, unfinished.graph, config, artifacts, list)
    except StreamError as error:
        raise end or JobEndedError(
            JobState.FAILED,
            f"the JobManager ended while the job ran, and it cannot be gone on with ({error}): submit "
            "it again",
        ) from error
    if end is not None:
        if job.checkpoint_directory:
            shutil.rmtree(Path(job.checkpoint_directory), ignore_errors=True)
        raise end
    if not job.settings.outlives_jobmanager:
        raise JobEndedError(
            JobState.FAILED,
            "the JobManager ended while the job ran, and the job ended with it: submit it again",
        )
    return job


def cause_of_end(end: JobEndedError, now_ms: int) -> FailureCause | None:
    """Why such a job has failed; None where it was cancelled."""
    if end.state is not JobState.FAILED:
        return None
    return FailureCause("Unrecoverable", str(end), timestamp_ms=now_ms)
