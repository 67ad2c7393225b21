"""What the stored columns of a state's rows are as columns that people and engines read, part by part, and back.

A part takes some stored columns and gives some readable ones. All of them work on whole arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.state_tables.value_columns import ReadableValues, fitted
from penstock.storage.codec import StateError
from penstock.storage.key_types import value_type

TIME: Final = pa.timestamp("ms", "UTC")
WRITTEN_AT: Final = "written_at"
EXPIRES_AT: Final = "expires_at"
_STAMP: Final = "stamp_ms"

Columns = Mapping[str, pa.Array]


@dataclass(frozen=True, slots=True)
class WrittenAs:
    """What rows are written with.

    Attributes:
        now_ms: when values of a state with a time to live are taken to be written, where nothing says it.
        where: the state, for messages.
    """

    now_ms: int
    where: str


class TablePart(Protocol):
    """Some columns of a table.

    Attributes:
        fields: the readable columns.
        optional: those of them that need not be given when rows are written.
    """

    fields: tuple[pa.Field, ...]
    optional: frozenset[str]

    def shown(self, stored: pa.RecordBatch) -> list[pa.Array]:
        """The readable columns of stored rows."""

    def stored(self, shown: Columns, written: WrittenAs) -> dict[str, pa.Array]:
        """The stored columns, by name, of rows that were given.

        Raises:
            StateError: they do not fit.
        """


class PlainPart:
    """A stored column that is read as it is, or as times where it has milliseconds.

    Args:
        stored_field: of the column.
        name: that it is read by.
        is_time: it has milliseconds since the epoch.
        may_be_null: it may be null in rows that are written.
        default: of rows that are written without it; None = it has to be given.
        is_set: it has lists of the values that are counted.
    """

    def __init__(
        self,
        stored_field: pa.Field,
        name: str,
        *,
        is_time: bool = False,
        may_be_null: bool = False,
        default: int | bool | None = None,
        is_set: bool = False,
    ) -> None:
        self._field = stored_field
        self._is_set = is_set
        self._name = name
        self._may_be_null = may_be_null
        self._default = default
        kind = TIME if is_time else value_type(stored_field.type)
        self.fields = (pa.field(name, kind),)
        self.optional = frozenset() if default is None else frozenset({name})

    def shown(self, stored: pa.RecordBatch) -> list[pa.Array]:
        """As it is."""
        return [stored.column(self._field.name).cast(self.fields[0].type)]

    def stored(self, shown: Columns, written: WrittenAs) -> dict[str, pa.Array]:
        """As it is."""
        column = shown.get(self._name)
        if column is None:
            rows = len(next(iter(shown.values())))
            value = pa.scalar(self._default, self._field.type)
            return {self._field.name: pa.repeat(value, rows)}
        where = f"{written.where}: column {self._name!r}"
        if column.null_count and not self._may_be_null:
            raise StateError(f"{where} has nulls, and must have none")
        if self._is_set and pt.is_nested(column.type) and column.flatten().null_count:
            raise StateError(
                f"{where} has null among its items, which is not counted: leave it out of them"
            )
        if self._default == 0 and column.null_count:
            column = column.fill_null(0)
        return {self._field.name: fitted(column, self.fields[0].type, where).cast(self._field.type)}


class NumberPart:
    """A number of aggregates, which may be read by several names.

    Args:
        stored_field: of the column.
        names: that it is read by.
        is_count: where there is nothing it is 0.
    """

    def __init__(self, stored_field: pa.Field, names: Sequence[str], *, is_count: bool) -> None:
        self._name = stored_field.name
        self._is_count = is_count
        self._type = stored_field.type
        self.fields = tuple(pa.field(name, stored_field.type) for name in names)
        self.optional = frozenset(names[1:])

    def shown(self, stored: pa.RecordBatch) -> list[pa.Array]:
        """The same by each name."""
        return [stored.column(self._name)] * len(self.fields)

    def stored(self, shown: Columns, written: WrittenAs) -> dict[str, pa.Array]:
        """By whichever name it was given."""
        given = [(one.name, shown[one.name]) for one in self.fields if one.name in shown]
        (name, first), *others = [
            (name, fitted(column, self._type, f"{written.where}: column {name!r}"))
            for name, column in given
        ]
        for other_name, other in others:
            if not _is_same_number(first, other):
                raise StateError(
                    f"{written.where}: columns {name!r} and {other_name!r} are one number, and differ"
                )
        if self._is_count:
            first = first.fill_null(0)
            if len(first) and pc.min(first).as_py() < 0:
                raise StateError(
                    f"{written.where}: column {name!r} is a count, and has {pc.min(first)}"
                )
        return {self._name: first}


def _is_same_number(first: pa.Array, second: pa.Array) -> bool:
    """Whether two columns of one type have equal numbers, NaN where the other has NaN."""
    if not pt.is_floating(first.type):
        return bool(first.equals(second))
    is_nan = pc.is_nan(first)
    others = [pc.if_else(is_nan, pa.scalar(0, first.type), each) for each in (first, second)]
    return bool(is_nan.equals(pc.is_nan(second)) and others[0].equals(others[1]))


class ValuePart:
    """Values of a codec, with the time at which they were written where they have a time to live.

    Args:
        stored_field: of the column.
        name: that it is read by.
        codec: of the values, without stamps.
        is_stamped: values are stored with the time they were written at.
        ttl_ms: how long they live; 0 = that is not known, or for ever.
        may_be_null: null is a value, or that there is none.
        has_none: it is a value, None.
    """

    def __init__(
        self,
        stored_field: pa.Field,
        name: str,
        codec: str,
        *,
        is_stamped: bool = False,
        ttl_ms: int = 0,
        may_be_null: bool = False,
        has_none: bool = False,
    ) -> None:
        self._field = stored_field
        self._name = name
        self._values = ReadableValues(codec)
        self._is_stamped = is_stamped
        self._ttl_ms = ttl_ms if is_stamped else 0
        self._may_be_null = may_be_null
        self._has_none = has_none
        fields = [pa.field(name, self._values.type)]
        if is_stamped:
            fields.append(pa.field(WRITTEN_AT, TIME))
        if self._ttl_ms:
            fields.append(pa.field(EXPIRES_AT, TIME))
        self.fields = tuple(fields)
        self.optional = frozenset(one.name for one in fields[1:])

    def shown(self, stored: pa.RecordBatch) -> list[pa.Array]:
        """The values, and when they were written and will expire."""
        return self.shown_values(stored.column(self._field.name))

    def shown_values(self, column: pa.Array) -> list[pa.Array]:
        """The same of a column."""
        if not self._is_stamped:
            return [self._values.shown(column)]
        values, stamps = column.flatten()
        shown = [self._values.shown(values), stamps.cast(TIME)]
        if self._ttl_ms:
            shown.append(pc.add(stamps, self._ttl_ms).cast(TIME))
        return shown

    def stored(self, shown: Columns, written: WrittenAs) -> dict[str, pa.Array]:
        """The values, stamped where they are to be."""
        return {self._field.name: self.stored_values(shown, written)}

    def stored_values(self, shown: Columns, written: WrittenAs) -> pa.Array:
        """The same as a column."""
        where = f"{written.where}: column {self._name!r}"
        column = shown[self._name]
        if column.null_count and not self._may_be_null:
            raise StateError(
                f"{where} has nulls: null is no value; leave out the rows of keys without one"
            )
        values = self._values.stored(column, where, has_none=self._has_none)
        if not self._is_stamped:
            return values
        kind = pa.struct(
            [
                pa.field("value", values.type),
                pa.field(_STAMP, pa.int64(), nullable=False),
            ]
        )
        stamps = self._stamps(shown, len(values), written)
        return pa.StructArray.from_arrays([values, stamps], fields=list(kind))

    def _stamps(self, shown: Columns, rows: int, written: WrittenAs) -> pa.Array:
        """When values were written: as it is said, or else as they will expire, or else now.

        Raises:
            StateError: they would not expire when it is said.
        """
        said = []
        for name, before_ms in ((WRITTEN_AT, 0), (EXPIRES_AT, self._ttl_ms)):
            if name in shown:
                times = fitted(shown[name], TIME, f"{written.where}: column {name!r}")
                said.append(pc.subtract(times.cast(pa.int64()), before_ms))
        if len(said) > 1 and pc.any(pc.not_equal(*said)).as_py():
            raise StateError(
                f"{written.where}: column {EXPIRES_AT!r} has another time than {self._ttl_ms} ms behind {WRITTEN_AT!r}, "
                "which is when a value expires: leave one of them out"
            )
        return pc.coalesce(pa.nulls(rows, pa.int64()), *said).fill_null(written.now_ms)


class ListPart:
    """Lists of values.

    Args:
        stored_field: of the column.
        items: of the values, by the name that the lists are read by.
    """

    def __init__(self, stored_field: pa.Field, items: ValuePart) -> None:
        self._field = stored_field
        self._items = items
        self.fields = tuple(pa.field(one.name, pa.list_(one.type)) for one in items.fields)
        self.optional = items.optional

    def shown(self, stored: pa.RecordBatch) -> list[pa.Array]:
        """Lists of what items are."""
        column = stored.column(self._field.name)
        offsets = _offsets(column)
        return [
            pa.ListArray.from_arrays(offsets, one)
            for one in self._items.shown_values(column.flatten())
        ]

    def stored(self, shown: Columns, written: WrittenAs) -> dict[str, pa.Array]:
        """Lists of items as they are stored."""
        given = {}
        for field in self.fields:
            column = shown.get(field.name)
            if column is None:
                continue
            if not (pt.is_list(column.type) or pt.is_large_list(column.type)):
                raise StateError(
                    f"{written.where}: column {field.name!r} is {field.type}, got {column.type}"
                )
            if column.null_count:
                raise StateError(
                    f"{written.where}: column {field.name!r} has nulls: leave out the rows of keys without items"
                )
            given[field.name] = column
        main = given[self.fields[0].name]
        offsets = _offsets(main)
        for name, column in given.items():
            if not _offsets(column).equals(offsets):
                raise StateError(
                    f"{written.where}: lists in {name!r} are not as long as in {self.fields[0].name!r}"
                )
        flat = {name: column.flatten() for name, column in given.items()}
        items = self._items.stored_values(flat, written)
        return {self._field.name: pa.ListArray.from_arrays(offsets, items)}


def _offsets(lists: pa.Array) -> pa.Array:
    lengths = lists.value_lengths().fill_null(0).to_numpy().astype(np.int64)
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.array(offsets)
