"""Why something failed, and which of several causes is the one to show.

When an attempt dies, its neighbours notice a lost connection and fail as well, often earlier. Such
a consequence must not hide the cause: ``more_telling`` picks what the user sees.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FailureCause:
    """One failure in the user's words.

    Attributes:
        error_class: name of a class of ``penstock.errors``.
        traceback: the user's traceback, "" where no user code raised.
        subtask_index: -1 where the failure belongs to no subtask.
        row: the offending row, printed.
        position: file and row, or rows, that were being processed, "" where that is not known.
        timestamp_ms: when it was noticed.
        cause_chain: classes of what was raised and of what caused that, the outermost first: names of
            ``penstock.errors`` as they are, others with their module; () where nothing was raised.
    """

    error_class: str
    message: str
    traceback: str = ""
    vertex: str = ""
    subtask_index: int = -1
    attempt: int = 0
    operator: str = ""
    row: str = ""
    taskmanager_id: str = ""
    timestamp_ms: int = 0
    cause_chain: tuple[str, ...] = ()
    position: str = ""

    @property
    def is_of_user(self) -> bool:
        """Of code, data, or files: what an operator itself says that it cannot go on for."""
        said_by_operator = bool(self.operator) and self.error_class == "TaskFailure"
        raised = bool(self.traceback or self.row)
        return said_by_operator or raised or self.error_class == "BadRecord"


_RANKS = {"PartitionUnavailable": 0, "Fenced": 0, "TaskManagerLost": 1}
_RANK_OF_ORIGINALS = 2


def more_telling(current: FailureCause | None, candidate: FailureCause) -> FailureCause:
    """The cause to show: the first, unless it is a consequence and ``candidate`` is not.

    Example: what a neighbour of the lost subtask reports first does not hide what happened.
        >>> consequence = FailureCause("PartitionUnavailable", "connection closed")
        >>> cause = FailureCause("TaskFailure", "division by zero")
        >>> more_telling(consequence, cause).message, more_telling(cause, consequence).message
        ('division by zero', 'division by zero')
    """
    if current is None or _rank(candidate) > _rank(current):
        return candidate
    return current


def _rank(cause: FailureCause) -> int:
    return _RANKS.get(cause.error_class, _RANK_OF_ORIGINALS)
