"""The classes of an exception and of everything that caused it, by name.

Whoever decides on a restart looks through them: an error that no restart mends may be the cause of the one
that came out of the task.

Invariants: each exception is named once, whatever cycles there are; a class derived from one of
``penstock.errors`` goes by the name of that one, so that an exception of the user's own means what the
class it is derived from means. ``raise ... from None`` hides what came before, as it does in tracebacks.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from penstock.errors import StreamError

_CLASSES_MAX: Final = 32
"""Of them all; those of ``penstock.errors`` behind them are named as well, each once: they decide."""


def cause_chain(error: BaseException) -> list[str]:
    """Names of classes, the outermost first: the first 32, and those of ours however deep they lie.

    Args:
        error: followed along ``__cause__`` or ``__context__``, and into groups of exceptions.
    """
    names: list[str] = []
    seen: set[int] = set()
    left = deque([error])
    while left:
        current = left.popleft()
        if id(current) in seen:
            continue
        seen.add(id(current))
        name = _name(current)
        if len(names) < _CLASSES_MAX or (isinstance(current, StreamError) and name not in names):
            names.append(name)
        cause = current.__cause__
        if cause is None and not current.__suppress_context__:
            cause = current.__context__
        if cause is not None:
            left.append(cause)
        if isinstance(current, BaseExceptionGroup):
            left.extend(current.exceptions)
    return names


def public_class(error: StreamError) -> str:
    """Name of the nearest class that users know: one of ``penstock.errors``."""
    return next(
        cls.__name__ for cls in type(error).__mro__ if cls.__module__ == StreamError.__module__
    )


def _name(error: BaseException) -> str:
    if isinstance(error, StreamError):
        return public_class(error)
    cls = type(error)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
