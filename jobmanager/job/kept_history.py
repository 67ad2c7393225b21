"""What has become of a job, as its record keeps it for the next JobManager (pure).

Bounded: exceptions take up ``EXCEPTIONS_BYTES_MAX``, the newest first, and lose what failed with them and the ends of
long texts before they are left out; of regions and subtasks that are counted those with the most are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from common.pb import job_record_pb2
from jobmanager.checkpoint.statistics import KeptCheckpoints
from jobmanager.failover.exceptions_history import ExceptionEntry, readable_subtasks, subtasks_of
from jobmanager.failover.restart_counts import BackoffCounts, KeptFailures, RestartCounts
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.job.checkpoint_gauges import CheckpointNumbers
from jobmanager.job.checkpoint_views import checkpoint_record, checkpoints_of, summary_message
from jobmanager.job.exception_views import exception_entry, exceptions_of
from jobmanager.job.job_history import JobHistory
from jobmanager.job.job_master import JobMaster
from penstock.pb import client_pb2

EXCEPTIONS_BYTES_MAX: Final = 256 * 1024
_COUNTED_MAX: Final = 1_000
_SHORT: Final = 1_024


def encode_history(
    master: JobMaster, directory: str, numbers: CheckpointNumbers, running_at_ms: int
) -> job_record_pb2.StoredHistory:
    """All that the next JobManager is to know of what has become of a job.

    Args:
        directory: the job's in the checkpoint store; "" = the JobManager's memory.
        running_at_ms: when all of it ran for the first time; 0 = it has not.
    """
    failures = master.kept_failures()
    checkpoints = checkpoints_of(master, directory)
    ended = [one for one in checkpoints.checkpoints if one.ended_at_ms]
    del checkpoints.checkpoints[:]
    checkpoints.checkpoints.extend(ended)
    return job_record_pb2.StoredHistory(
        restarts=_restarts(failures),
        exceptions=_bounded(failures.entries),
        checkpoints=checkpoints,
        checkpoint_numbers=_numbers(numbers),
        rivals_started=master.speculation.started,
        rivals_won=master.speculation.won,
        running_at_ms=running_at_ms,
    )


def decode_history(stored: job_record_pb2.StoredHistory, directory: str) -> JobHistory:
    """Inverse of ``encode_history``."""
    kept = stored.restarts
    counts = RestartCounts(
        restarts=kept.counted,
        delay_ms=kept.delay_ms,
        delay_ends_at_ms=kept.delay_ends_at_ms or None,
        backoff=BackoffCounts(
            kept.backoff_attempts,
            kept.backoff_ms,
            kept.backoff_ends_at_ms or None,
            tuple(kept.restarted_at_ms),
        ),
        failures=kept.failures,
        failures_of_task={
            subtask: count
            for name, count in kept.failures_of_task.items()
            for subtask in subtasks_of([name])
        },
    )
    failures = KeptFailures(
        counts,
        kept.uncounted,
        dict(kept.by_region),
        tuple(map(exception_entry, stored.exceptions)),
        subtasks_of(kept.restarting),
    )
    told = stored.checkpoints
    checkpoints = KeptCheckpoints(
        tuple(checkpoint_record(one, directory) for one in told.checkpoints),
        told.completed_count,
        told.failed_count,
    )
    return JobHistory(
        failures,
        checkpoints,
        _known_numbers(stored.checkpoint_numbers),
        stored.rivals_started,
        stored.rivals_won,
        stored.running_at_ms,
    )


def _restarts(failures: KeptFailures) -> job_record_pb2.StoredRestarts:
    counts = failures.counts
    return job_record_pb2.StoredRestarts(
        counted=counts.restarts,
        uncounted=failures.restarts_uncounted,
        by_region=_most(failures.restarts_by_region),
        delay_ms=counts.delay_ms,
        delay_ends_at_ms=counts.delay_ends_at_ms or 0,
        restarting=readable_subtasks(failures.restarting),
        backoff_attempts=counts.backoff.attempts,
        backoff_ms=counts.backoff.backoff_ms,
        backoff_ends_at_ms=counts.backoff.delay_ends_at_ms or 0,
        restarted_at_ms=counts.backoff.restarted_at_ms[-_COUNTED_MAX:],
        failures=counts.failures,
        failures_of_task=_most(_named(counts.failures_of_task)),
    )


def _named(counted: Mapping[SubtaskId, int]) -> dict[str, int]:
    return {name: count for one, count in counted.items() for name in readable_subtasks([one])}


def _most(counted: Mapping[str, int]) -> dict[str, int]:
    return dict(Counter(counted).most_common(_COUNTED_MAX))


def _bounded(entries: Iterable[ExceptionEntry]) -> list[client_pb2.ExceptionEntry]:
    kept, room = [], EXCEPTIONS_BYTES_MAX
    for entry in exceptions_of(entries).entries:
        if entry.ByteSize() > room:
            del entry.concurrent[:]
        if entry.ByteSize() > room:
            cause = entry.root_cause
            cause.message, cause.row = cause.message[:_SHORT], cause.row[:_SHORT]
            cause.traceback = cause.traceback[-_SHORT:]
        if entry.ByteSize() > room:
            break
        room -= entry.ByteSize()
        kept.append(entry)
    return kept


def _numbers(numbers: CheckpointNumbers) -> job_record_pb2.StoredCheckpointNumbers:
    last = summary_message(numbers.last_parts)
    last.checkpoint_id = numbers.last_id
    last.ended_at_ms = numbers.last_completed_at_ms
    # Those of the whole checkpoint: what its parts had is not shown.
    last.state_bytes, last.uploaded_bytes = numbers.last_state_bytes, numbers.last_uploaded_bytes
    return job_record_pb2.StoredCheckpointNumbers(
        completed=numbers.completed,
        failed=numbers.failed,
        last_duration_ms=numbers.last_duration_ms,
        safe_since_ms=numbers.safe_since_ms,
        last=last,
    )


def _known_numbers(stored: job_record_pb2.StoredCheckpointNumbers) -> CheckpointNumbers:
    last = checkpoint_record(stored.last, "")
    return CheckpointNumbers(
        completed=stored.completed,
        failed=stored.failed,
        last_id=last.checkpoint_id,
        last_completed_at_ms=last.ended_at_ms,
        last_duration_ms=stored.last_duration_ms,
        last_state_bytes=last.summary.state_bytes,
        last_uploaded_bytes=last.summary.uploaded_bytes,
        last_parts=last.summary,
        safe_since_ms=stored.safe_since_ms,
    )
