"""Words that several connector errors share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_DELIMITERS = (";", "\t", "|", ",")


def nearest_name(name: str, known: Sequence[str]) -> str:
    """`` (did you mean "x"?)`` where a known name is close, else nothing."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f' (did you mean "{close[0]}"?)' if close else ""


def name_list(names: Iterable[str], *, limit: int = 20) -> str:
    """The names, comma-separated and cut to a readable number."""
    names = list(names)
    shown = ", ".join(names[:limit])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > limit else shown


def delimiter_hint(fields: Sequence[str], delimiter: str) -> str:
    """What to say of the first row of CSV where it has one field, which another delimiter would part; "" otherwise."""
    found = [one for one in _DELIMITERS if one != delimiter and one in fields[0]] if fields else []
    if len(fields) != 1 or not found:
        return ""
    likely = max(found, key=fields[0].count)
    return f"the first row is one field, {shorten(fields[0], 60)!r}: if the delimiter is not {delimiter!r}, give delimiter={likely!r}"


def os_reason(error: OSError) -> str:
    """The operating system's words for an error, without number and path."""
    return error.strerror or str(error)


def shorten(text: str, limit: int = 300) -> str:
    """The text, cut to a readable length."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
