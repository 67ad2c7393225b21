"""The nearest known name, for errors about a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like ``name``, None where none is near."""
    by_folded = {k.casefold(): k for k in known}
    matches = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[matches[0]] if matches else None


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """``" (did you mean 'price'?)"``, or nothing where no known name is near."""
    nearest = nearest_name(name, known)
    return "" if nearest is None or nearest == name else f" (did you mean {nearest!r}?)"
