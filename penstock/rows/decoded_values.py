"""The values of columns in which there may be some that Python does not have: who asks for one of these is told so.

>>> moments = decoded(pa.array([1_000, 1_001], pa.timestamp("ns")), "at")
>>> moments[0].microsecond
1
>>> moments[1]  # doctest: +ELLIPSIS
Traceback (most recent call last):
penstock.errors.BadRecord: column 'at': a timestamp[ns] value has more digits than Python's own values have ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import pyarrow as pa

from penstock.errors import BadRecord, StreamError
from penstock.rows.column_values import decode, is_never_changed


def decoded(array: pa.Array, name: str) -> list[Any]:
    """The values of a column: a list where Python has each of them.

    To ask for one that Python does not have raises ``BadRecord``.
    """
    try:
        return decode(array)
    except (ValueError, OverflowError):
        return cast("list[Any]", _OneByOne(array, name))


def decoded_keys(arrays: Sequence[pa.Array], names: Sequence[str]) -> Sequence[Any]:
    """The keys of some rows, tuples where they have several columns; as ``decoded``."""
    columns = [decoded(array, name) for array, name in zip(arrays, names, strict=True)]
    if len(columns) == 1:
        return columns[0]
    if all(type(values) is list for values in columns):
        return list(zip(*columns, strict=True))
    return cast("Sequence[Any]", _TupleByTuple(columns))


def dicts_of(rows: pa.Table | pa.RecordBatch, remedy: str) -> list[dict[str, Any]]:
    """Rows as Python values.

    Args:
        remedy: what to do where Python has not all of them.

    Raises:
        StreamError: a value is none of Python's (a time beyond its years, or of single nanoseconds).
    """
    try:
        return cast("list[dict[str, Any]]", rows.to_pylist())
    except (OverflowError, ValueError) as error:
        name = next((n for n in rows.schema.names if not _is_python(rows[n])), "")
        raise StreamError(
            f"column {name!r} has a value that Python cannot hold: {error}; {remedy}"
        ) from error


def _is_python(column: pa.Array) -> bool:
    try:
        column.to_pylist()
    except (OverflowError, ValueError):
        return False
    return True


def changed_values(row: Any, as_it_came: Callable[[], Any]) -> dict[int, Any]:
    """Position -> the value of a ``Row`` that somebody has changed in its place since it was read."""
    columns, own = row._penstock_columns, row._penstock_own
    batch: pa.RecordBatch | None = columns[-1]
    found: dict[int, Any] = {}
    if batch is None:  # made of values, which go with it
        return found
    came: Any = None
    for name, position in row._penstock_positions.items():
        is_read = columns[position] is not None or position in own
        if is_read and not is_never_changed(batch.schema.types[position]):
            with contextlib.suppress(BadRecord):  # the row next to it was read
                value, came = row[name], came or as_it_came()
                if repr(value) != repr(came[name]):
                    found[position] = value
    return found


class _OneByOne:
    """The values of a column, some of which Python does not have; each is decoded once."""

    __slots__ = ("_array", "_name", "_values")

    def __init__(self, array: pa.Array, name: str) -> None:
        self._array = array
        self._name = name
        self._values: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        try:
            if index not in self._values:
                self._values[index] = decode(self._array.slice(index, 1))[0]
            return self._values[index]
        except (ValueError, OverflowError) as e:
            raise BadRecord(f"column {self._name!r}: {e}") from e


class _TupleByTuple:
    """The keys of rows, in some columns of which are values that Python does not have."""

    __slots__ = ("_columns",)

    def __init__(self, columns: Sequence[Sequence[Any]]) -> None:
        self._columns = columns

    def __getitem__(self, index: int) -> Any:
        return tuple([values[index] for values in self._columns])
