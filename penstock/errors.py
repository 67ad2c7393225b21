"""Errors, sorted by who acts next.

``StreamError`` is the root. A message says what happened, where (job, vertex, subtask, file, row)
and what to do. The table between these classes and gRPC status codes is ``penstock/client/grpc_errors.py``.
"""

from __future__ import annotations

from penstock.partition_id import PartitionId


class StreamError(Exception):
    """Root of all errors of Penstock."""


class JobRejected(StreamError):
    """The job graph, its configuration or its code cannot be accepted. Next actor: the user."""


class ConfigurationError(JobRejected):
    """A configuration key or value is wrong."""


class ExpressionError(JobRejected):
    """An expression does not fit the schema it is used on."""


class TaskFailure(StreamError):
    """An execution attempt failed.

    Attributes:
        operator: name of the operator in the chain, "" where it is not known.
        row: the offending row as text, "" where there is none.
        row_index: of that row in the batch that the operator was given, -1 where it is not known.
        position: file and row, or rows, that were being processed, "" where that is not known.
        user_traceback: the traceback of the user's code, "" where there is none.
    """

    def __init__(
        self,
        message: str,
        *,
        operator: str = "",
        row: str = "",
        row_index: int = -1,
        position: str = "",
        user_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.operator = operator
        self.row = row
        self.row_index = row_index
        self.position = position
        self.user_traceback = user_traceback


class BadRecord(TaskFailure):
    """Input data that does not fit: a malformed line, a null event time, a wrong type."""


class PartitionUnavailable(TaskFailure):
    """A result partition that a consumer needs is not there, or not all of it.

    Attributes:
        partition: which, None where that is not known.
    """

    def __init__(self, message: str, *, partition: PartitionId | None = None) -> None:
        super().__init__(message)
        self.partition = partition


class NotReproducible(TaskFailure):
    """Rows that were sent again after a restart are not those that were sent before."""


class TaskManagerLost(TaskFailure):
    """The TaskManager that ran the attempt is gone or does not answer."""


class SparkFailed(TaskFailure):
    """Spark has failed in a stage, as a process of it that is gone, and not what the user has written for it."""


class NoResourceAvailable(StreamError):
    """No slot became free within ``slot.request.timeout``."""


class JobFailed(StreamError):
    """The job ended FAILED.

    Attributes:
        cause: name of the error class of the first failure.
        vertex: id of the vertex it happened in, "" where it belongs to none.
        subtask_index: the subtask of it, -1 where it belongs to none.
        operator: the operator it happened in, "" where it is not known.
        row: the offending row as text, "" where there is none.
        position: file and row, or rows, that were being processed, "" where that is not known.
        user_traceback: the traceback of the user's code, "" where there is none.
    """

    def __init__(
        self,
        message: str,
        *,
        job_id: str = "",
        cause: str = "",
        vertex: str = "",
        subtask_index: int = -1,
        operator: str = "",
        row: str = "",
        position: str = "",
        user_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.job_id = job_id
        self.cause = cause
        self.vertex = vertex
        self.subtask_index = subtask_index
        self.operator = operator
        self.row = row
        self.position = position
        self.user_traceback = user_traceback


class JobCanceled(StreamError):
    """The job ended CANCELED."""


class JobNotFound(StreamError):
    """The JobManager knows no job of this id."""


class JobManagerUnreachable(StreamError):
    """No leading JobManager answered at the given addresses."""


class NotLeader(JobManagerUnreachable):
    """The JobManager that was asked is a standby.

    Attributes:
        leader: address of the one that leads; "" = there is none now.
    """

    def __init__(self, message: str, leader: str = "") -> None:
        super().__init__(message)
        self.leader = leader


class RowsComeAgain(StreamError):
    """The JobManager that has sent rows of a ``collect()`` has ended; the next one may send some of them again."""


class ProtocolMismatch(StreamError):
    """The two sides speak different versions (protocol, Python minor or cloudpickle)."""


class Fenced(StreamError):
    """The sender acts for a leader epoch or an attempt that is over; it steps down, no retry."""


class Unauthenticated(StreamError):
    """The shared token is missing or wrong."""


class CheckpointAborted(StreamError):
    """A checkpoint did not complete; the job runs on.

    Attributes:
        reason: why, in a few words.
    """

    def __init__(self, checkpoint_id: int, reason: str) -> None:
        super().__init__(f"checkpoint {checkpoint_id}: {reason}")
        self.checkpoint_id = checkpoint_id
        self.reason = reason


class StoreTransient(StreamError):
    """A store did not answer; retried with backoff."""


class StoreFull(StoreTransient):
    """A store of limited size has no room; more may come free when older checkpoints go."""


class StoreNotFound(StreamError):
    """An object is not in the store; the caller decides."""


class StoreCorrupt(StreamError):
    """An object's content is not what was written."""


class Unrecoverable(StreamError):
    """No restart can mend this: the job ends FAILED under every restart strategy.

    User code raises it, a class derived from it, or another exception ``from`` it.
    """


class InvariantViolation(AssertionError):
    """Our bug: the story so far is logged, and the job that it concerns fails; its state is kept."""


def require_invariant(holds: bool, message: str) -> None:
    """Checks an invariant, also where asserts are off.

    Raises:
        InvariantViolation: it does not hold.
    """
    if not holds:
        raise InvariantViolation(message)
