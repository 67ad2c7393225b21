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
from operator import itemgetter
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as pt
from typing_extensions import override

from penstock.rows.column_values import is_never_changed, record_as_dict
from penstock.rows.rows import Row, lazy_columns, row_class, row_maker

NEVER_CHANGED: Final = frozenset(
    {type(None), bool, int, float, str, bytes, dt.date, dt.datetime, dt.time, dt.timedelta, Decimal}
)
"""Types of which Python changes no value in its place."""

_AS_THEY_ARE: Final = (tuple, Row)


def handing_over(schema: pa.Schema) -> Callable[[Any], Any]:
    """How results of a schema are taken."""
    return handed_over_whole if any(map(may_change, schema.types)) else handed_over


def may_change(kind: pa.DataType) -> bool:
    """Whether a value that is given for a column may be changed in its place, as a list or a bytearray may."""
    if isinstance(kind, pa.BaseExtensionType):
        return may_change(kind.storage_type)
    is_bytes = pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_fixed_size_binary(kind)
    return pt.is_nested(kind) or is_bytes


def handed_over(value: Any) -> Any:
    """A result of which no value may change; of a record the values."""
    kind = type(value)
    if kind is dict or kind is list:
        return value.copy()
    if kind in NEVER_CHANGED or issubclass(kind, _AS_THEY_ARE):
        return value
    record = record_as_dict(value)
    return value if record is None else dict(record)


def handed_over_whole(value: Any) -> Any:
    """A result with everything in it; of records the values."""
    kind = type(value)
    if kind in NEVER_CHANGED:
        return value
    if issubclass(kind, Row):
        return _row_as_it_is(value)
    if kind is list:
        return list(map(handed_over_whole, value))
    if kind is tuple:
        return tuple(map(handed_over_whole, value))
    record = value if kind is dict else record_as_dict(value)
    if record is not None:
        return {key: handed_over_whole(item) for key, item in record.items()}
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - an object of the user's may raise anything
        # Any iterable is a list; what is none fits no column, and is told when that is built.
        return list(map(handed_over_whole, value)) if hasattr(value, "__iter__") else value


class _RowAsItWas(Row):
    """A row of which nothing is the user's: no function sees it."""

    __slots__ = ("_penstock_own",)

    @override
    def __getitem__(self, name: str) -> Any:
        own, position = self._penstock_own, self._penstock_positions.get(name, -1)
        return own[position] if position in own else Row.__getitem__(self, name)


def _row_as_it_is(row: Row) -> Row:
    """A row whose lists and the like are as they are now, also those that are yet to be read."""
    columns, index = row._penstock_columns, row._penstock_index
    batch: pa.RecordBatch | None = columns[-1]
    if batch is None:  # made of values
        names = tuple(row)
        return row_maker(names)([handed_over_whole(row[name]) for name in names])
    if columns[-3] is None:
        changing = [n for n, kind in enumerate(batch.schema.types) if not is_never_changed(kind)]
        plain: Any = row_class(batch)
        columns[-3] = changing, lazy_columns(batch), _kind_as_it_was(plain)
    changing, unread, kind = columns[-3]
    if not changing or isinstance(row, _RowAsItWas):
        return row
    taken = object.__new__(kind)
    taken._penstock_columns, taken._penstock_index, taken._penstock_own = unread, index, {}
    for n in changing:
        if columns[n] is not None:
            taken._penstock_own[n] = handed_over_whole(columns[n][index])
    return taken


@lru_cache(maxsize=256)
def _kind_as_it_was(kind: type[Any]) -> type[_RowAsItWas]:
    own = {
        name: property(itemgetter(name))
        for name in kind._penstock_positions
        if isinstance(getattr(kind, name, None), property)
    }
    return type("Row", (_RowAsItWas, kind), {"__slots__": (), **own})
