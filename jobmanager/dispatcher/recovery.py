"""What a JobManager that starts does with the jobs that an earlier one did not see to their end.

A job that can go on without the JobManager that ran it (``JobDescription.outlives_jobmanager``) is taken over, or run
again from its newest checkpoint. The others have ended with that JobManager; clients get a clear answer. Of a job
that had ended before, the checkpoints are deleted. A job that cannot be read now has not ended: it is kept, and
tried again.
"""

from __future__ import annotations

from contextlib import suppress

from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.restart_settings import over_cluster
from jobmanager.job.exception_views import shown_cause
from jobmanager.job.job_causes import ENDED_COMMITTING, ENDED_WITH_JOBMANAGER
from jobmanager.job.job_description import (
    JobDescription,
    claimed_directory,
    describe,
    is_checkpoint_path,
)
from jobmanager.job.job_settings import JobSettings, job_settings
from jobmanager.messages.job_state import JobState
from jobmanager.stores.artifact_store import ArtifactStore
from jobmanager.stores.stored_job import StoredJob
from penstock.config import Configuration
from penstock.errors import StoreTransient, StreamError
from penstock.graph.output_in_doubt import committed_elsewhere
from penstock.pb import client_pb2
from penstock.storage.head import HeadStore
from penstock.storage.open_store import open_store
from penstock.storage.savepoint import MANIFEST_PATH
from penstock.storage.store_names import substore


class JobUnreadableError(StreamError):
    """A job cannot be gone on with now, and may be later."""


class JobEndedError(StreamError):
    """A job cannot be gone on with.

    Attributes:
        state: FAILED; CANCELED where its user had cancelled it; or what it had ended in before.
        checkpoint_directory: what is to be deleted with it; "" = nothing.
        is_retained: its checkpoints, with the output that they let be committed, stay: it took some and failed, or was
            cancelled with retention.
        retained_directory: where these lie; "" = there are none.
    """

    def __init__(
        self,
        state: JobState,
        reason: str,
        checkpoint_directory: str = "",
        *,
        is_retained: bool = False,
    ) -> None:
        super().__init__(reason)
        self.state = state
        self.checkpoint_directory = "" if is_retained else checkpoint_directory
        self.retained_directory = checkpoint_directory if is_retained else ""
        self.is_retained = is_retained


def recovered(stored: StoredJob, config: Configuration, artifacts: ArtifactStore) -> JobDescription:
    """The job, as it is to be run again.

    Args:
        config: of the cluster.

    Raises:
        JobEndedError: it has ended with its JobManager, or before.
        JobUnreadableError: something of it cannot be read now.
    """
    if stored.problem:
        raise JobUnreadableError(stored.problem)
    root = stored.record.checkpoint_root
    if root:
        config = config.merged({"execution.checkpointing.dir": root})
    try:
        own = over_cluster(config, dict(stored.graph.config))
        settings = job_settings(own)
    except StreamError as error:
        if stored.is_clean:  # it is here to be shown only
            directory = substore(root, stored.job_id) if root else ""
            end = stored.record.end
            raise JobEndedError(
                JobState[end.state], end.reason, directory, is_retained=True
            ) from error
        raise JobUnreadableError(f"its configuration cannot be used: {error}") from error
    _check_end(stored, settings, claimed_directory(own))
    if settings.keeps_in_jobmanager:
        if stored.record.has_committed:
            raise JobEndedError(JobState.FAILED, ENDED_COMMITTING)
        if not settings.begins_again:
            raise JobEndedError(JobState.FAILED, ENDED_WITH_JOBMANAGER)
    try:
        # The TaskManagers have not registered yet: each is checked when it gives slots.
        return describe(stored.job_id, stored.graph, config, artifacts, list)
    except (StreamError, OSError) as error:
        raise JobUnreadableError(str(error)) from error


def _check_end(stored: StoredJob, settings: JobSettings, claimed: str) -> None:
    root = settings.directory if settings.checkpoints is not None else ""
    directory = (claimed or substore(root, stored.job_id)) if root else ""
    if stored.has_ended:
        state = JobState[stored.record.end.state]
        is_retained = (state is JobState.FAILED and settings.checkpoints is not None) or (
            state is JobState.CANCELED and settings.retains_on_cancellation
        )
        reason = stored.record.end.reason or "the JobManager ended after the job"
        raise JobEndedError(state, reason, directory, is_retained=is_retained)
    if stored.record.is_cancelled:
        reason = "the job was cancelled when the JobManager ended"
        is_retained = settings.retains_on_cancellation
        raise JobEndedError(JobState.CANCELED, reason, directory, is_retained=is_retained)


def restorable_from(directory: str, job_id: str) -> str:
    """What a job that has ended can be started from again; "" = nothing is left, or another job has claimed it.

    Blocks.

    Raises:
        StreamError: it cannot be found out now.
    """
    head = HeadStore(open_store(directory)).read()
    if head is None or head.job_id != job_id:
        return ""
    if head.retained:
        newest = head.retained[-1].checkpoint_id
        behind = [one.path for one in head.open_savepoints if one.checkpoint_id > newest]
        for path in reversed(behind):
            # It lies where users have put it; a start asks again, and says so.
            with suppress(StoreTransient):
                if committed_elsewhere(path, job_id) is not None:  # which no start goes back behind
                    return still_restorable_from(path, job_id, is_others=False)
        return f"{directory}/chk-{newest}"
    return head.started_from.path if head.started_from is not None else ""


def still_restorable_from(path: str, job_id: str, *, is_others: bool) -> str:
    """As ``restorable_from``, of a job of which it was known before. Blocks.

    Args:
        path: a savepoint, or one ``chk-<n>``; of its own there may be a newer one.
        is_others: it is not of the job's own directory.

    Raises:
        StreamError: it cannot be found out now.
    """
    if not is_checkpoint_path(path):
        return path if MANIFEST_PATH in open_store(path).sizes([MANIFEST_PATH]) else ""
    directory, _, name = path.rpartition("/")
    if not is_others:
        return restorable_from(directory, job_id)
    head = HeadStore(open_store(directory)).read()
    is_left = head is not None and name in {f"chk-{one.checkpoint_id}" for one in head.retained}
    return path if is_left else ""


def cause_of_end(
    end: JobEndedError, details: client_pb2.JobDetails, now_ms: int
) -> FailureCause | None:
    """Why such a job has failed; None where it was cancelled.

    Args:
        details: as its JobManager showed it at its end; empty where it had not ended.
    """
    if end.state is not JobState.FAILED:
        return None
    if details.HasField("failure"):
        return shown_cause(details.failure)
    return FailureCause("Unrecoverable", str(end), timestamp_ms=now_ms)
