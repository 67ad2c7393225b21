"""Rows that a function returns or yields in place of emitting them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.functions.functions import check_has_run
from penstock.rows.column_values import short_repr


def emit_returned(returned: object, emit: Callable[[object], None], what: str = "row") -> None:
    """Emits what a function returned that is not None: a list of rows, or a generator of them.

    Args:
        emit: of the collector that the function was given.
        what: the function emits.

    Raises:
        TypeError: it returned something else.
    """
    if isinstance(returned, (list, Iterator)):
        for row in returned:
            emit(row)
        return
    check_has_run(returned, "it")
    raise TypeError(
        f"it returned {short_repr(returned)} ({type(returned).__name__}): emit each {what} with "
        f"out.emit({what}), yield it, or return a list"
    )
