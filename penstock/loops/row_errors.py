"""What can go wrong in a row of a compiled function, and the exception that Python has for it."""

from __future__ import annotations

import enum

from penstock.loops.checked import BEYOND_64_BITS
from penstock.storage.codec import StateError


class RowErrorKind(enum.IntEnum):
    """Numbers from ``RAISED`` on are errors that the function raises itself."""

    NONE = 1
    OVERFLOW = 2
    ZERO_DIVISION = 3
    DOMAIN = 4
    NOT_A_NUMBER = 5
    INFINITE = 6
    MISFIT = 7
    SHIFT = 8
    RAISED = 100


_EXCEPTIONS: dict[int, tuple[type[Exception], str]] = {
    RowErrorKind.NONE: (TypeError, "None where a number is needed"),
    RowErrorKind.OVERFLOW: (OverflowError, BEYOND_64_BITS),
    RowErrorKind.ZERO_DIVISION: (ZeroDivisionError, "division by zero"),
    RowErrorKind.DOMAIN: (ValueError, "math domain error"),
    RowErrorKind.NOT_A_NUMBER: (ValueError, "cannot convert float NaN to integer"),
    RowErrorKind.INFINITE: (OverflowError, "cannot convert float infinity to integer"),
    RowErrorKind.MISFIT: (StateError, "a number that its state or column cannot hold"),
    RowErrorKind.SHIFT: (ValueError, "negative shift count"),
}


def row_error(
    kind: int, line: int, file: str, raised: list[tuple[type[Exception], str]]
) -> Exception:
    """The exception of a row.

    Args:
        line: of the user's file.
        raised: what the function raises itself, by number.

    Example:
        >>> row_error(3, 12, "totals.py", [])
        ZeroDivisionError('division by zero (line 12 of totals.py)')
    """
    if kind >= RowErrorKind.RAISED:
        own, text = raised[kind - RowErrorKind.RAISED]
        return own(text)
    known, text = _EXCEPTIONS[kind]
    return known(f"{text} (line {line} of {file})")
