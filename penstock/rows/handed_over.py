"""What a function hands over, as it is at that moment: what the function does to the object later is not part of it.

Results become columns a batch at a time, and a function may give the same dict again, with other values in it.

Example: a generator that fills one dict again and again.
    >>> def counted():
    ...     row = {}
    ...     for row["n"] in range(3):
    ...         yield row
    >>> [row["n"] for row in counted()], [row["n"] for row in map(handed_over, counted())]
    ([0, 1, 2], [0, 1, 2])
    >>> [row["n"] for row in list(counted())], [row["n"] for row in list(map(handed_over, counted()))]
    ([2, 2, 2], [0, 1, 2])
"""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as pt

from penstock.rows.rows import Row

NEVER_CHANGED: Final = frozenset(
    {type(None), bool, int, float, str, bytes, dt.date, dt.datetime, dt.time, dt.timedelta, Decimal}
)
"""Types of which Python changes no value in its place."""


_AS_THEY_ARE: Final = (tuple, Row)
_OF_COPIES: Final = ("__new__", "__reduce_ex__", "__reduce__", "__getstate__")


def handing_over(schema: pa.Schema) -> Callable[[Any], Any]:
    """How results of a schema are taken."""
    is_flat = not any(pt.is_nested(kind) for kind in schema.types)
    return handed_over if is_flat else handed_over_whole


def handed_over(value: Any) -> Any:
    """A result whose values are no lists, structs or maps."""
    kind = type(value)
    if kind is dict:
        return value.copy()
    if kind in NEVER_CHANGED or issubclass(kind, _AS_THEY_ARE):
        return value
    if _is_plain(kind):  # type: ignore[arg-type]
        result = object.__new__(kind)
        result.__dict__.update(value.__dict__)
        return result
    return _copied(value, copy.copy)


@lru_cache(maxsize=256)
def _is_plain(kind: type) -> bool:
    """True where the attributes of an object are all there is to copy, as of most dataclasses."""
    return (
        kind.__dictoffset__ != 0
        and not any(hasattr(kind, name) for name in ("__copy__", "__setstate__"))
        and all(getattr(kind, name) is getattr(object, name) for name in _OF_COPIES)
        and not any("__slots__" in base.__dict__ for base in kind.__mro__)
    )


def handed_over_whole(value: Any) -> Any:
    """A result with everything in it."""
    kind = type(value)
    if kind in NEVER_CHANGED or issubclass(kind, Row):
        return value
    if kind is dict:
        return {key: handed_over_whole(item) for key, item in value.items()}
    if kind is list:
        return list(map(handed_over_whole, value))
    if kind is tuple:
        return tuple(map(handed_over_whole, value))
    return _copied(value, copy.deepcopy)


def _copied(value: Any, copied: Callable[[Any], Any]) -> Any:
    try:
        return copied(value)
    except Exception:  # noqa: BLE001 - an object of the user's may raise anything; what is no row is told when it is built
        return value
