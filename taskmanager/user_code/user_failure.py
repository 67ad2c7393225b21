"""What a user's function raised, as the failure of the task."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import penstock
import taskmanager
from penstock.errors import StreamError, TaskFailure
from penstock.rows.column_values import ROW_BYTES, cut_text, short_repr

_OWN_DIRECTORIES = tuple(
    f"{Path(p).resolve()}/" for m in (penstock, taskmanager) for p in m.__path__
)


def user_failure(error: BaseException, *, operator: str, function: str, row: object) -> TaskFailure:
    """The failure to raise ``from`` the error.

    Args:
        row: what it was called with.
    """
    text = short_repr(row, ROW_BYTES)
    if isinstance(error, TaskFailure):
        error.row = error.row or ("" if row is None else text)
        return error
    return TaskFailure(
        f"operator {operator!r}: {function} raised {error_text(error)}",
        operator=operator,
        row=text,
        user_traceback=user_traceback(error),
    )


_UNREAD_BYTES = 200


def name_unread_columns(failure: TaskFailure, unread: Sequence[str]) -> None:
    """Adds to the row of a failure which columns of it are not shown, since the job does not read them."""
    if not failure.row or not unread:
        return
    note = cut_text(", ".join(unread), _UNREAD_BYTES)
    note = f" (columns that the job does not read: {note})"
    failure.row = cut_text(failure.row, ROW_BYTES - len(note.encode())) + note


def failure_of_operator(error: BaseException, operator: str) -> TaskFailure:
    """What came out of an operator, as a failure that names it.

    Args:
        error: what was raised; a failure is given the operator's name where it has none.
    """
    if isinstance(error, TaskFailure):
        error.operator = error.operator or operator
        return error
    return TaskFailure(
        f"operator {operator!r} raised {error_text(error)}",
        operator=operator,
        # An error of ours is the cluster's, not the user's: its class is found through the cause.
        user_traceback="" if isinstance(error, StreamError) else user_traceback(error),
    )


def error_text(error: BaseException) -> str:
    """What was raised in a line, whatever the user's class makes of it.

    >>> error_text(ValueError("no number"))
    'ValueError: no number'
    """
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception as e:  # noqa: BLE001 - it is the user's
        return f"{name} (its text raised {type(e).__name__})"


def user_traceback(error: BaseException) -> str:
    """The traceback as the user reads it: from the first frame on that is not ours."""
    return "".join(traceback.format_exception(type(error), error, _user_part(error.__traceback__)))


def _user_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is not ours; all of it where every frame is."""
    start = trace
    while start is not None:
        if not start.tb_frame.f_code.co_filename.startswith(_OWN_DIRECTORIES):
            return start
        start = start.tb_next
    return trace
