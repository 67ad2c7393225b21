"""The classes a user derives functions from, and what such a function is given.

A plain Python function is enough for ``map``, ``flat_map`` and ``filter``; the classes here add
``open`` and ``close`` around its work. Everything is called on one thread, one call at a time.
"""

from __future__ import annotations

import datetime as dt
import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pyarrow as pa

from penstock.errors import JobRejected
from penstock.rows.column_values import record_as_dict
from penstock.rows.handed_over import handing_over
from penstock.rows.rows import Row, RowBuilder


@dataclass(frozen=True, slots=True)
class FunctionContext:
    """What a function may know about its place, given to ``open``.

    Attributes:
        subtask_index: which of ``parallelism`` copies of the function this is, from 0.
        attempt: how often this subtask has been started before.
    """

    job_name: str
    operator_name: str
    subtask_index: int
    parallelism: int
    attempt: int


class UserFunction(ABC):  # noqa: B024 - the abstract methods are those of the subclasses
    """A function with a life: ``open`` before the first row, ``close`` after the last."""

    def open(self, ctx: FunctionContext) -> None:
        """Called once per subtask before anything else; load models, open connections here."""

    def close(self) -> None:
        """Called once per subtask at the end, whatever the end."""


class MapFunction(UserFunction):
    """One row in, one row out."""

    @abstractmethod
    def __call__(self, row: Any) -> Any:
        """Returns a dict, a row, a dataclass instance or a tuple of the output schema."""


class FlatMapFunction(UserFunction):
    """One row in, any number of rows out."""

    @abstractmethod
    def __call__(self, row: Any) -> Iterable[Any]:
        """Returns or yields rows of the output schema; None is no row."""


class FilterFunction(UserFunction):
    """Decides which rows stay."""

    @abstractmethod
    def __call__(self, row: Any) -> bool:
        """True keeps the row."""


@dataclass(frozen=True, slots=True)
class WindowInfo:
    """The window that a function is called for.

    Attributes:
        start_ms: first millisecond of the window, since the epoch; 0 for count windows.
        end_ms: first millisecond after the window; 0 for count windows.
        index: number of a count window of its key, from 0; None for windows of time.
    """

    start_ms: int = 0
    end_ms: int = 0
    index: int | None = None

    @property
    def start(self) -> dt.datetime:
        """``start_ms`` as a datetime in UTC."""
        return _utc(self.start_ms)

    @property
    def end(self) -> dt.datetime:
        """``end_ms`` as a datetime in UTC."""
        return _utc(self.end_ms)


class Collector:
    """Takes the rows that a function emits: ``out.emit(user=1, n=2)`` or ``out.emit(row)``.

    Args:
        schema: of the main output, without the event-time column.
        side_schema: of rows for side outputs: that of the operator's input, without the event-time
            column.

    The runtime empties it with ``take`` and ``take_sides``.
    """

    __slots__ = ("_builder", "_own", "_own_of_side", "_side_schema", "_sides")
    # Collector[Alert] as an annotation says what is emitted: the fields of Alert are the columns.
    __class_getitem__: ClassVar[Any] = classmethod(types.GenericAlias)

    def __init__(self, schema: pa.Schema, side_schema: pa.Schema) -> None:
        self._builder = RowBuilder(schema)
        self._own = handing_over(schema)
        self._own_of_side = handing_over(side_schema)
        self._side_schema = side_schema
        self._sides: dict[str, RowBuilder] = {}

    def emit(self, row: object = None, /, **columns: Any) -> None:
        """Emits one row of the output schema.

        Args:
            row: a dict, row, dataclass instance or tuple.
            columns: the row's columns by name; together with ``row`` they replace its columns.
        """
        if not columns:
            result = row
        else:
            result = columns if row is None else {**as_mapping(row), **columns}
        self._builder.append(self._own(result))

    def side(self, tag: str, row: object) -> None:
        """Sends one row to a side output; rows there have the columns of the operator's input."""
        builder = self._sides.get(tag)
        if builder is None:
            builder = self._sides[tag] = RowBuilder(self._side_schema)
        builder.append(self._own_of_side(row))

    def __len__(self) -> int:
        return len(self._builder)

    def take(self) -> pa.RecordBatch | None:
        """What was emitted since the last call; None = nothing.

        Raises:
            RowMismatch: an emitted row does not fit the schema.
        """
        return self._builder.build() if len(self._builder) else None

    def take_sides(self) -> list[tuple[str, pa.RecordBatch]]:
        """(tag, batch) for every side output that got rows since the last call."""
        sides = [(tag, builder.build()) for tag, builder in self._sides.items() if len(builder)]
        self._sides.clear()
        return sides

    def discard(self) -> None:
        """Forgets what was emitted since the last ``take`` (the function raised)."""
        self._builder.clear()
        self._sides.clear()


class WindowFunction(UserFunction):
    """Sees all rows of a window at once."""

    @abstractmethod
    def process(self, key: Any, window: WindowInfo, rows: Sequence[Row], out: Collector) -> Any:
        """Called when the window fires; may also return a list of results, or yield them.

        Args:
            key: the value of the key column, a tuple where there are several, None on an unkeyed
                stream.
            window: its bounds (``start``, ``end``), or its ``index`` for a count window.
            rows: the window's rows in order of arrival.
            out: takes the results.
        """


def open_function(function: object, ctx: FunctionContext) -> None:
    """Calls ``function.open``, where it has one, with the context if it takes an argument."""
    hook = _hook(function, "open")
    if hook is None:
        return
    check_has_run(hook(ctx) if inspect.signature(hook).parameters else hook(), "open")


def has_open(function: object) -> bool:
    """Whether the function has an ``open`` of its own, so that it cannot be called without."""
    hook = _hook(function, "open")
    return hook is not None and getattr(hook, "__func__", None) is not UserFunction.open


def close_function(function: object) -> None:
    """Calls ``function.close``, where it has one."""
    hook = _hook(function, "close")
    if hook is not None:
        check_has_run(hook(), "close")


def check_is_plain(call: str, function: object) -> None:
    """Checks that calling the function does its work.

    Raises:
        JobRejected: it is asynchronous, and nobody would await what it returns.
    """
    while isinstance(function, partial):
        function = function.func
    called = function if inspect.isroutine(function) else getattr(function, "__call__", None)  # noqa: B004 - its code
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise JobRejected(
            f"{call}: {name} is an async function, and nobody awaits what it returns: write def, not async def"
        )


def check_has_run(returned: object, what: str) -> None:
    """Checks that a call has done its work, where nobody takes what it returned.

    Raises:
        TypeError: it returned a generator or a coroutine, of which no line has run.
    """
    if isinstance(returned, Coroutine):
        returned.close()
        raise TypeError(f"{what} is a coroutine, which nobody awaits: write def, not async def")
    if isinstance(returned, AsyncGenerator):
        raise TypeError(
            f"{what} is an async generator, which nobody awaits: write def, not async def"
        )
    if isinstance(returned, Generator):
        raise TypeError(f"{what} is a generator, of which no line would run: leave yield out")


def _hook(function: object, name: str) -> Callable[..., object] | None:
    """A method of that name; plain functions, built-ins and classes have no hooks."""
    if inspect.isroutine(function) or isinstance(function, type):
        return None
    hook = getattr(function, name, None)
    return hook if callable(hook) else None


def as_mapping(row: object) -> Mapping[str, Any]:
    """A dict, row or record as a mapping.

    Raises:
        TypeError: it is none of these.
    """
    record = row.as_dict() if isinstance(row, Row) else record_as_dict(row)
    if record is None:
        raise TypeError(f"out.emit(row, **columns) needs a dict, row or dataclass, got {row!r}")
    return record


def _utc(milliseconds: int) -> dt.datetime:
    return _EPOCH + dt.timedelta(milliseconds=milliseconds)


_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
