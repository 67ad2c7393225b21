"""Rows: what a Python function sees of a batch, and how its results become a batch again.

A ``Row`` is a view of one row of a batch: it decodes a column once per batch, when the first row is
asked for it, so that columns a function does not touch cost nothing. It cannot be changed and may
be kept (it then keeps its batch). The reserved event-time column is not visible to it. *Eager* columns are
those whose value is put into the row as it is made (``penstock.rows.row_calls``).

``RowBuilder`` goes the other way: dicts, rows, dataclass instances, tuples or plain values in, one
``RecordBatch`` of a given schema out, or a ``RowMismatch`` that names row, column and type.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

import pyarrow as pa
import pyarrow.types as pt
from typing_extensions import override

from penstock.errors import BadRecord
from penstock.naming import nearest_hint
from penstock.rows.column_values import (
    ROW_BYTES,
    ValueMismatch,
    encode,
    is_never_changed,
    record_as_dict,
    short_repr,
    shown_row,
)
from penstock.rows.decoded_values import changed_values, decoded
from penstock.rows.schema import EVENT_TIME, is_optional, user_batch, user_schema


class Row:
    """One row: ``row.price``, ``row["price"]``, ``row.as_dict()``, ``{**row, "new": 1}``.

    Iterating gives the column names, as a dict does. A column whose name is not an identifier, or
    is that of a method (``ROW_METHODS``), is reached by ``row["..."]`` only. Two rows are equal when
    their names and values are.
    """

    __slots__ = ("_penstock_columns", "_penstock_index")

    # Never a __getattr__ here: it would make every access to a column several times slower.
    _penstock_columns: list[Any]
    _penstock_index: int
    _penstock_names: tuple[str, ...] = ()
    _penstock_positions: dict[str, int] = {}  # noqa: RUF012 - set once per generated class
    # Of a row as it was given (``handed_over``): position -> the values that the batch may not have.
    _penstock_own: Mapping[int, Any] = MappingProxyType({})

    def __getitem__(self, name: str) -> Any:
        position = self._penstock_positions.get(name)
        if position is None:
            raise KeyError(_no_column(name, self._penstock_names))
        columns = self._penstock_columns
        values = columns[position]
        return (decoded_column(columns, position) if values is None else values)[
            self._penstock_index
        ]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def keys(self) -> tuple[str, ...]:
        """The column names, in order."""
        return self._penstock_names

    def as_dict(self) -> dict[str, Any]:
        """Name -> value of all columns."""
        get = type(self).__getitem__
        return {name: get(self, name) for name in self._penstock_names}

    def _asdict(self) -> dict[str, Any]:
        """The same as ``as_dict``, under the name that named tuples have."""
        return Row.as_dict(self)

    def __iter__(self) -> Iterator[str]:
        return iter(self._penstock_names)

    def __len__(self) -> int:
        return len(self._penstock_names)

    def __contains__(self, name: object) -> bool:
        return name in self._penstock_positions

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Row):
            return NotImplemented
        return self._penstock_names == other._penstock_names and _values(self) == _values(other)

    @override
    def __hash__(self) -> int:
        return hash((self._penstock_names, _values(self)))

    @override
    def __repr__(self) -> str:
        try:
            values: dict[str, Any] = Row.as_dict(self)
        except BadRecord:
            values = shown_row(user_batch(_batch_of(self)), 0)
        return f"Row({', '.join(f'{k}={v!r}' for k, v in values.items())})"

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        batch = _batch_of(self)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        data = sink.getvalue().to_pybytes()
        changed = changed_values(self, lambda: next(iter(rows_of(batch))))
        return _restore_row, (data, changed) if changed else (data,)

    def __copy__(self) -> Row:
        """Its lists are its own, as they are of each row that a function gets."""
        return copy.deepcopy(self)


ROW_METHODS = frozenset({"keys", "as_dict", "_asdict"})
"""What ``row.<name>`` gives the method for, whatever columns there are."""


class RowSequence(Sequence[Row]):
    """The rows of one batch."""

    __slots__ = ("_columns", "_range", "_row_class")

    def __init__(self, row_class: type[Row], columns: list[Any], indexes: range) -> None:
        self._row_class = row_class
        self._columns = columns
        self._range = indexes

    @override
    def __len__(self) -> int:
        return len(self._range)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> RowSequence: ...
    @override
    def __getitem__(self, index: int | slice) -> Row | RowSequence:
        chosen = self._range[index]
        if isinstance(chosen, range):
            return RowSequence(self._row_class, self._columns, chosen)
        return make_row(self._row_class, self._columns, chosen)

    @override
    def __iter__(self) -> Iterator[Row]:
        new, row_class, columns = object.__new__, self._row_class, self._columns
        for index in self._range:
            row = new(row_class)
            row._penstock_columns = columns
            row._penstock_index = index
            yield row

    @override
    def __repr__(self) -> str:
        return f"RowSequence({short_repr(list(self))})"


def rows_of(batch: pa.RecordBatch) -> RowSequence:
    """The rows of a batch, created as they are asked for.

    Args:
        batch: n rows; the event-time column, where there is one, is not visible in the rows.
    """
    return RowSequence(row_class(batch), lazy_columns(batch), range(batch.num_rows))


def make_row(row_class: type[Row], columns: list[Any], index: int) -> Row:
    """One row of ``lazy_columns``."""
    row = object.__new__(row_class)
    row._penstock_columns = columns
    row._penstock_index = index
    return row


def lazy_columns(batch: pa.RecordBatch) -> list[Any]:
    """What the rows of a batch share: per column None or its decoded values, then what ``handed_over`` notes of the
    batch, a set of the columns that were asked for by name, and the batch."""
    columns: list[Any] = [None] * batch.num_columns
    columns += (None, set(), batch)
    return columns


def row_class(batch: pa.RecordBatch) -> type[Row]:
    """The class of the rows of a batch."""
    return _row_class(tuple(batch.schema.names))


def row_maker(names: Sequence[str]) -> Callable[[Sequence[Any]], Row]:
    """A function that makes rows of values, which stand in the order of the names."""
    kind = _row_class(tuple(names))

    def make(values: Sequence[Any]) -> Row:
        columns: list[Any] = [[value] for value in values]
        columns += (None, set(), None)
        return make_row(kind, columns, 0)

    return make


def schema_of(row: Row) -> pa.Schema:
    """The schema of the row, without the event-time column."""
    return user_schema(_batch_of(row).schema)


def _batch_of(row: Row) -> pa.RecordBatch:
    """The row as a batch of its own."""
    batch: pa.RecordBatch | None = row._penstock_columns[-1]
    if batch is None:  # made of values
        return pa.RecordBatch.from_pylist([Row.as_dict(row)])
    return batch.slice(row._penstock_index, 1)


def unknown_column(error: BaseException) -> str:
    """What was wrong with an attribute that a row does not have, "" for any other error."""
    if not isinstance(error, AttributeError) or not isinstance(error.obj, Row):
        return ""
    return _no_column(str(error.name), error.obj._penstock_names)


def _asked_for(columns: list[Any], position: int) -> list[Any]:
    columns[-2].add(position)
    return decoded_column(columns, position)


def decoded_column(columns: list[Any], position: int) -> list[Any]:
    """The values of a column of ``lazy_columns``, from now on one of them; a list where Python has each of them.

    To ask for one that Python does not have raises ``BadRecord``.
    """
    batch: pa.RecordBatch = columns[-1]
    values = columns[position] = decoded(batch.column(position), batch.schema.field(position).name)
    return values


@lru_cache(maxsize=256)
def _row_class(names: tuple[str, ...]) -> type[Row]:
    positions = {name: i for i, name in enumerate(names) if name != EVENT_TIME}
    namespace: dict[str, Any] = {
        "__slots__": (),
        "_penstock_names": tuple(positions),
        "_penstock_positions": positions,
    }
    for name, position in positions.items():
        if name not in ROW_METHODS and not name.startswith(("__", "_penstock_")):
            namespace[name] = property(_column_getter(position))
    return type("Row", (Row,), namespace)


@lru_cache(maxsize=256)
def eager_row_class(names: tuple[str, ...], eager: tuple[int, ...]) -> type[Row]:
    """The class of rows whose value in the n-th of the ``eager`` columns is ``_penstock_value_n``."""
    kind = _row_class(names)
    if not eager:
        return kind
    slots = [f"_penstock_value_{n}" for n in range(len(eager))]
    namespace: dict[str, Any] = {"__slots__": slots}
    for slot, position in zip(slots, eager, strict=True):
        namespace[names[position]] = property(attrgetter(slot))
    return type("Row", (kind,), namespace)


@lru_cache(maxsize=1024)
def _column_getter(position: int) -> Callable[[Row], Any]:
    """A getter with the position in its code, which is faster than in a closure."""
    scope: dict[str, Any] = {"asked_for": _asked_for}
    exec(compile(_GETTER.format(position=position), __file__, "exec"), scope)
    getter: Callable[[Row], Any] = scope["get"]
    return getter


_GETTER = """
def get(row):
    columns = row._penstock_columns
    values = columns[{position}]
    if values is None:
        values = asked_for(columns, {position})
    return values[row._penstock_index]
"""


def _values(row: Row) -> tuple[Any, ...]:
    return tuple(Row.as_dict(row).values())


def _no_column(name: str, names: tuple[str, ...]) -> str:
    hint = nearest_hint(name, names)
    return f"the row has no column {name!r}; its columns are {', '.join(names)}{hint}"


def _restore_row(data: bytes, changed: Mapping[int, Any] = MappingProxyType({})) -> Row:
    with pa.ipc.open_stream(data) as reader:
        row = rows_of(reader.read_next_batch())[0]
    for position, value in changed.items():
        row._penstock_columns[position] = [value]
    return row


class RowMismatch(BadRecord):
    """A function returned something that is no row of the output schema.

    Attributes:
        index: position of the result among those given to the builder, -1 where it is not known.
    """

    def __init__(self, message: str, *, index: int, row: str = "") -> None:
        super().__init__(message, row=row)
        self.index = index


class RowBuilder:
    """Collects results of a function and makes a batch of them.

    A result is a dict, a ``Row``, a dataclass instance, a tuple (by position), or, where the schema
    has one column, a plain value that is not None. A key that is missing is an error, but for columns that are
    optional (``penstock.rows.schema.optional``), and so is a key that the schema does not have.

    Args:
        schema: of the batches; must not contain the event-time column.
        given: the columns that rows may be given with, in their order, where nobody reads some of them.
    """

    __slots__ = ("_given", "_names", "_places", "_single_nested", "_values", "schema")

    def __init__(self, schema: pa.Schema, given: Iterable[str] = ()) -> None:
        self.schema = schema
        self._names: list[str] = list(schema.names)
        self._values: list[Any] = []
        self._single_nested = len(self._names) == 1 and pt.is_nested(schema.field(0).type)
        self._given = dict.fromkeys(given or self._names)
        order = list(self._given)
        # Where the values of a tuple stand that are read, None where all of them are.
        self._places = None if order == self._names else list(map(order.index, self._names))

    def __len__(self) -> int:
        return len(self._values)

    def append(self, value: object) -> None:
        """Adds one result; it is checked by ``build``."""
        self._values.append(value)

    def extend(self, values: Iterable[object]) -> None:
        """Adds several results."""
        self._values.extend(values)

    def clear(self) -> None:
        """Forgets what was added."""
        self._values = []

    def build(self) -> pa.RecordBatch:
        """A batch of everything added since the last build; the builder is empty afterwards.

        Raises:
            RowMismatch: a result does not fit; the builder keeps what was added.
        """
        columns = self._columns()
        arrays = []
        for field, values in zip(self.schema, columns, strict=True):
            try:
                arrays.append(values if isinstance(values, pa.Array) else encode(values, field))
            except ValueMismatch as e:
                shown = short_repr(self._values[e.index], ROW_BYTES) if e.index >= 0 else ""
                raise RowMismatch(str(e), index=e.index, row=shown) from e
        batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        if not arrays:
            raise RowMismatch("the output schema has no columns", index=-1)
        self._values = []
        return batch

    def _columns(self) -> Sequence[Sequence[Any] | pa.Array]:
        """The results column by column; one pass in C where they are all of one kind."""
        values, names = self._values, self._names
        if not values:
            return [[] for _ in names]
        kinds = set(map(type, values))
        if all(issubclass(kind, Row) for kind in kinds):
            return self._columns_of_rows(kinds)
        if len(kinds) == 1 and not self._single_nested:
            (kind,) = kinds
            if kind is dict and set(map(len, values)) == {len(names)}:
                try:
                    return [list(map(itemgetter(name), values)) for name in names]
                except KeyError:
                    pass  # found again, with its position, below
            elif kind is tuple and set(map(len, values)) == {len(self._given)}:
                columns = list(zip(*values, strict=True))
                return columns if self._places is None else [columns[n] for n in self._places]
            elif dataclasses.is_dataclass(kind) and _field_names(kind) == names:
                return [list(map(attrgetter(name), values)) for name in names]
            elif kind in _SCALARS and len(self._given) == 1:
                return [values]
        return self._columns_one_by_one()

    def _columns_of_rows(self, kinds: set[type[Row]]) -> Sequence[Sequence[Any] | pa.Array]:
        """The same for rows: those of one batch have their columns in common, which are passed on as they are, but for
        values that can have been changed since they were read."""
        values, wanted = self._values, set(self._names)
        if any(set(kind._penstock_names) != wanted for kind in kinds):
            return self._columns_one_by_one()
        columns = values[0]._penstock_columns
        batch: pa.RecordBatch | None = columns[-1]
        if batch is None or any(row._penstock_columns is not columns for row in values):
            return [self._of_each(name) for name in self._names]
        places = pa.array([row._penstock_index for row in values], pa.int64())
        positions, found = values[0]._penstock_positions, []
        own = set().union(*(row._penstock_own for row in values))
        for field in self.schema:
            position = positions[field.name]
            given = batch.column(position)
            is_read = columns[position] is not None or position in own
            is_same = given.type == field.type and (field.nullable or not given.null_count)
            is_same &= not is_read or is_never_changed(field.type)
            found.append(given.take(places) if is_same else self._of_each(field.name))
        return found

    def _of_each(self, name: str) -> list[Any]:
        """The values that the rows have in a column."""
        found: list[Any] = []
        try:
            found.extend(row[name] for row in self._values)
        except BadRecord as e:
            index = len(found)
            row = short_repr(self._values[index], ROW_BYTES)
            raise RowMismatch(str(e), index=index, row=row) from e
        return found

    def _columns_one_by_one(self) -> Sequence[Sequence[Any]]:
        rows = [self._normalise(value, i) for i, value in enumerate(self._values)]
        return list(zip(*rows, strict=True))

    def _normalise(self, value: Any, index: int) -> Sequence[Any]:
        """One result as values in the order of the schema."""
        names, given = self._names, self._given
        if len(given) == 1 and self._is_plain(value):
            return (value,)
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            if len(value) != len(given):
                raise self._bad(
                    value, index, f"a tuple of {len(value)} values for {len(given)} columns"
                )
            return value if self._places is None else [value[n] for n in self._places]
        record = record_as_dict(value)
        if isinstance(value, Coroutine):
            value.close()
            got = "a coroutine, which nobody awaits (write def, not async def)"
            raise self._bad(value, index, got)
        if record is None:
            raise self._bad(value, index, f"{short_repr(value)} ({type(value).__name__})")
        unknown = [str(k) for k in record if k not in given]
        if unknown:
            hint = nearest_hint(unknown[0], given)
            raise self._bad(value, index, f"unknown columns {', '.join(unknown)}{hint}")
        if any(name not in record for name in names):
            missing = [f.name for f in self.schema if f.name not in record and not is_optional(f)]
            if missing:
                raise self._bad(
                    value, index, f"no column {', '.join(missing)} (a null is given as None)"
                )
        return [record.get(name) for name in names]

    def _is_plain(self, value: Any) -> bool:
        """Whether a result for one column is the value itself, not a row that holds it."""
        if value is None or isinstance(value, Row):
            return False
        if isinstance(value, tuple):
            return False if not self._single_nested else len(value) != 1
        record = record_as_dict(value)
        return record is None or (self._single_nested and set(record) != set(self._names))

    def _bad(self, value: object, index: int, got: str) -> RowMismatch:
        expected = ", ".join(f"{f.name}: {f.type}" for f in self.schema)
        return RowMismatch(
            f"the function must return a row of ({expected}), got {got}; return a dict with these "
            "keys, a dataclass instance or a tuple",
            index=index,
            row=short_repr(value, ROW_BYTES),
        )


_SCALARS = frozenset({int, float, str, bytes, bool})


@lru_cache(maxsize=256)
def _field_names(kind: type) -> list[str]:
    return [f.name for f in dataclasses.fields(kind)]
