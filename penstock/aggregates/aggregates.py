"""Aggregates: what is computed of the rows of a window, or of a key so far.

``ps.count()``, ``ps.sum("x")`` and the others make an ``Aggregate``, which knows its input, its output
type for a given input type, and how it travels. Nulls are skipped; an aggregate of nothing but nulls
is null, a count of them 0. NaN counts as a value, but ``min`` and ``max`` give it only where there is
nothing else. Integers sum to int64 (overflow is an error), floats to float64.
"""

from __future__ import annotations

import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.types as pt
from typing_extensions import override

from penstock.errors import ExpressionError, JobRejected
from penstock.naming import nearest_hint
from penstock.pb import graph_pb2
from penstock.rows.column_types import is_extension, parts_of_type

if TYPE_CHECKING:
    from penstock.expressions import Expr

CUSTOM = "custom"
COUNT_DISTINCT = "count_distinct"


class AggregateFunction(ABC):
    """An aggregate of the user's own: ``ps.aggregate(MyAggregate())``.

    ``add`` and ``merge`` may change and return the accumulator they are given.

    Attributes:
        accumulator_codec: how accumulators become part of a checkpoint: "msgpack" (plain Python values:
            None, bool, int, float, str, bytes, list, tuple, dict, set, dates and times, Decimal, nested
            at will), or "pickle" (any object that can be pickled; its class must still be there when
            the job is restored).
    """

    accumulator_codec: ClassVar[str] = "msgpack"

    @abstractmethod
    def create_accumulator(self) -> Any:
        """The accumulator of no rows."""

    @abstractmethod
    def add(self, accumulator: Any, value: Any) -> Any:
        """The accumulator with one more value.

        Args:
            accumulator: what ``create_accumulator``, ``add`` or ``merge`` returned.
            value: the column's value, None where it is null; the row where no column was named.
        """

    @abstractmethod
    def merge(self, accumulator: Any, other: Any) -> Any:
        """The accumulator of the rows of both; called for sliding and session windows."""

    @abstractmethod
    def result(self, accumulator: Any) -> Any:
        """The aggregate's value; its annotation or ``type=`` says the column type. Leaves the accumulator as it is."""


@dataclass(frozen=True, slots=True)
class Aggregate:
    """One aggregate; the name of its output column is given where it is used.

    Attributes:
        function: "count", "sum", ... or "custom".
        column: input column, an expression that is to become one, or None (rows).
        custom: the user's object, "custom" only.
        declared_type: output type the user gave, "custom" only.
        since: 0 = it has seen all rows; else it was added when the job was started from state (``graph.proto``).
    """

    function: str
    column: str | Expr | None = None
    custom: Any = None
    declared_type: Any = None
    since: int = 0

    @property
    def input_column(self) -> str | None:
        """Name of the input column; None where the aggregate sees whole rows or only counts them.

        Raises:
            ExpressionError: the input is an expression that has not been projected yet.
        """
        if self.column is None or isinstance(self.column, str):
            return self.column
        raise ExpressionError(f"{self.function}({self.column!r}): the expression is no column yet")

    @property
    def expression(self) -> Expr | None:
        """The input where it is an expression and not the name of a column."""
        return None if self.column is None or isinstance(self.column, str) else self.column

    @property
    def needs_row(self) -> bool:
        """True where every column of the row is needed."""
        return self.function == CUSTOM and self.column is None

    def with_column(self, name: str) -> Aggregate:
        """The same aggregate of the column ``name``."""
        return replace(self, column=name)

    def decomposable(self, input_type: pa.DataType | None) -> bool:
        """True where partial results are numbers that can be merged in any order.

        Args:
            input_type: type of the input column, None for a count of rows.
        """
        if self.function == "count":
            return True
        if input_type is None or self.function not in ("sum", "min", "max", "mean"):
            return False
        kind = plain_type(input_type)
        return is_number_like(kind) or (self.function == "mean" and pt.is_decimal(kind))

    def may_be_partial(self, input_type: pa.DataType | None) -> bool:
        """True where partial rows can stand for rows: of numbers, or one for each different value."""
        return self.function == COUNT_DISTINCT or self.decomposable(input_type)

    def output_type(self, input_type: pa.DataType | None) -> pa.DataType:
        """Type of the result.

        Args:
            input_type: type of the input column, None where there is none.

        Raises:
            ExpressionError: the aggregate has no meaning for that type.
        """
        if self.function == CUSTOM:
            return _custom_type(self)
        if self.function == "count":
            return pa.int64()
        if input_type is None:
            raise ExpressionError(f"{self.function}() needs a column: {self.function}('price')")
        return _OUTPUT_TYPES[self.function](self, plain_type(input_type))

    def to_proto(self, name: str, *, operator: str = "aggregate") -> graph_pb2.Aggregate:
        """The aggregate as it travels.

        Args:
            operator: the operator's name, for errors about what cannot be pickled.
        """
        proto = graph_pb2.Aggregate(
            name=name, function=self.function, column=self.input_column or ""
        )
        if self.function == CUSTOM:
            from penstock.functions.user_code import pickle_function

            proto.custom.CopyFrom(pickle_function(self.custom, operator=operator))
        return proto

    @staticmethod
    def from_proto(
        proto: graph_pb2.Aggregate,
        *,
        load_function: Callable[[graph_pb2.Function], Any] | None = None,
        output_type: pa.DataType | None = None,
    ) -> Aggregate:
        """Inverse of ``to_proto``.

        Args:
            proto: the aggregate as it travelled.
            load_function: unpickles a custom aggregate; without it ``custom`` stays None.
            output_type: type of a custom aggregate's result, from the operator's output schema.
        """
        custom = None
        if proto.function == CUSTOM and load_function is not None:
            custom = load_function(proto.custom)
        return Aggregate(proto.function, proto.column or None, custom, output_type, proto.since)

    @override
    def __str__(self) -> str:
        return f"{self.function}({'' if self.column is None else self.column})"


def count(column: str | Expr | None = None) -> Aggregate:
    """Number of rows; of the rows where ``column`` is not null where one is given."""
    return _aggregate("count", column)


def sum(column: str | Expr) -> Aggregate:
    """Sum: int64 of integers and booleans, float64 of floats, decimal of decimals."""
    return _aggregate("sum", column)


def min(column: str | Expr) -> Aggregate:
    """Smallest value."""
    return _aggregate("min", column)


def max(column: str | Expr) -> Aggregate:
    """Largest value."""
    return _aggregate("max", column)


def mean(column: str | Expr) -> Aggregate:
    """Arithmetic mean, float64."""
    return _aggregate("mean", column)


def first(column: str | Expr) -> Aggregate:
    """The value that arrived first, nulls skipped."""
    return _aggregate("first", column)


def last(column: str | Expr) -> Aggregate:
    """The value that arrived last, nulls skipped."""
    return _aggregate("last", column)


def count_distinct(column: str | Expr) -> Aggregate:
    """Number of different values, exact."""
    return _aggregate(COUNT_DISTINCT, column)


def collect_list(column: str | Expr) -> Aggregate:
    """All values as a list, in order of arrival, nulls skipped."""
    return _aggregate("collect_list", column)


def aggregate(
    function: Any, column: str | Expr | None = None, type: pa.DataType | type | str | None = None
) -> Aggregate:
    """An aggregate of the user's own.

    Args:
        function: an object with ``create_accumulator, add, merge, result`` (``AggregateFunction``
            or any class like it).
        column: what ``add`` is given; None = the row.
        type: type of the result; None = the annotation of ``result``.
    """
    if isinstance(function, _TYPE):
        raise JobRejected(
            f"ps.aggregate needs an object, got the class {function.__name__}: "
            f"write ps.aggregate({function.__name__}())"
        )
    missing = [
        method
        for method in ("create_accumulator", "add", "merge", "result")
        if not callable(getattr(function, method, None))
    ]
    if missing:
        raise JobRejected(
            f"{_TYPE(function).__name__} cannot be an aggregate: it has no method "
            f"{', '.join(missing)} (create_accumulator, add, merge and result are needed)"
        )
    return Aggregate(CUSTOM, column, function, type)


def input_type(aggregate: Aggregate, name: str, schema: pa.Schema) -> pa.DataType | None:
    """Type of an aggregate's input column in ``schema``; None where it has no input column.

    Raises:
        ExpressionError: there is no such column.
    """
    column = aggregate.input_column
    if column is None:
        return None
    index = schema.get_field_index(column)
    if index < 0:
        hint = nearest_hint(column, schema.names)
        raise ExpressionError(
            f"aggregate {name}={aggregate}: there is no column {column!r}{hint}; "
            f"columns are {', '.join(schema.names)}"
        )
    return schema.field(index).type


def output_field(aggregate: Aggregate, name: str, schema: pa.Schema) -> pa.Field:
    """Name and type of an aggregate's output column.

    Raises:
        ExpressionError: the aggregate does not fit the schema.
    """
    kind = input_type(aggregate, name, schema)
    try:
        return pa.field(name, _kept(aggregate.output_type(kind)))
    except ExpressionError as error:
        raise ExpressionError(f"aggregate {name}={aggregate}: {error}") from error


def _kept(kind: pa.DataType) -> pa.DataType:
    """The type of values that are kept until they are given out."""
    if any(map(is_extension, parts_of_type(kind))):
        raise ExpressionError(
            f"values of type {kind} cannot be kept: .cast(...) the column to the type it is stored as"
        )
    return kind


def check_aggregates(aggregates: Mapping[str, Any]) -> None:
    """Refuses what is not an aggregate, and an empty set of them.

    Raises:
        ExpressionError: with what to write instead.
    """
    if not aggregates:
        raise ExpressionError("aggregate() needs at least one aggregate: aggregate(n=ps.count())")
    for name, value in aggregates.items():
        if not isinstance(value, Aggregate):
            hint = f"ps.aggregate({value!r})" if callable(value) else "ps.count() or ps.sum('x')"
            raise ExpressionError(
                f"aggregate {name}={value!r} is no aggregate; write for example {name}={hint}"
            )


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of the values of a dictionary-encoded type, else the type itself."""
    return kind.value_type if pt.is_dictionary(kind) else kind


def is_number_like(kind: pa.DataType) -> bool:
    """True for types whose values fit an int64 or a float64: numbers, booleans, dates and times."""
    return (
        pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind) or pt.is_temporal(kind)
    ) and not pt.is_interval(kind)


_TYPE = type


def _aggregate(function: str, column: Any) -> Aggregate:
    if column is None and function != "count":
        raise ExpressionError(f"{function}() needs a column: {function}('price')")
    if column is not None and not isinstance(column, str):
        from penstock.expressions import Expr

        if not isinstance(column, Expr):
            raise ExpressionError(
                f"{function}({column!r}): the argument is a column name or an expression, "
                f"not {_TYPE(column).__name__}"
            )
    return Aggregate(function, column)


def _sum_type(aggregate: Aggregate, kind: pa.DataType) -> pa.DataType:
    if pt.is_integer(kind) or pt.is_boolean(kind):
        return pa.int64()
    if pt.is_floating(kind):
        return pa.float64()
    if pt.is_duration(kind):
        return kind
    if pt.is_decimal256(kind):
        return pa.decimal256(76, kind.scale)
    if pt.is_decimal(kind):
        return pa.decimal128(38, kind.scale)
    raise _unfit(aggregate, kind)


def _mean_type(aggregate: Aggregate, kind: pa.DataType) -> pa.DataType:
    if pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind) or pt.is_decimal(kind):
        return pa.float64()
    raise _unfit(aggregate, kind)


def _extreme_type(aggregate: Aggregate, kind: pa.DataType) -> pa.DataType:
    if is_number_like(kind) or pt.is_decimal(kind) or _is_text(kind):
        return kind
    raise _unfit(aggregate, kind)


def _distinct_type(aggregate: Aggregate, kind: pa.DataType) -> pa.DataType:
    if is_number_like(kind) or pt.is_decimal(kind) or _is_text(kind):
        return pa.int64()
    raise _unfit(aggregate, kind)


def _is_text(kind: pa.DataType) -> bool:
    return (
        pt.is_string(kind)
        or pt.is_large_string(kind)
        or pt.is_binary(kind)
        or pt.is_large_binary(kind)
        or pt.is_fixed_size_binary(kind)
    )


def _unfit(aggregate: Aggregate, kind: pa.DataType) -> ExpressionError:
    remedy = {
        "sum": "sum needs numbers; cast the column first: col('x').cast('int64')",
        "mean": "mean needs numbers; cast the column first: col('x').cast('float64')",
        "min": "min needs values that have an order",
        "max": "max needs values that have an order",
        "count_distinct": "count_distinct needs values that can be keys, not lists or structs",
    }
    return ExpressionError(
        f"cannot take the {aggregate.function} of a column of type {kind}: "
        f"{remedy[aggregate.function]}"
    )


def _custom_type(aggregate: Aggregate) -> pa.DataType:
    declared = aggregate.declared_type
    owner = _TYPE(aggregate.custom).__name__
    if declared is None:
        try:
            declared = typing.get_type_hints(aggregate.custom.result).get("return")
        except (NameError, TypeError, AttributeError):
            declared = None
    if declared is None:
        raise ExpressionError(
            f"the type of the result is not known: annotate {owner}.result "
            f"(def result(self, accumulator) -> float) or pass type=pa.float64()"
        )
    if isinstance(declared, pa.DataType):
        return declared
    if isinstance(declared, str):
        try:
            return pa.type_for_alias(declared)
        except ValueError as error:
            raise ExpressionError(f"type={declared!r} is no column type: {error}") from error
    from penstock.functions.row_types import arrow_type

    return arrow_type(declared)


_OUTPUT_TYPES: dict[str, Callable[[Aggregate, pa.DataType], pa.DataType]] = {
    "sum": _sum_type,
    "mean": _mean_type,
    "min": _extreme_type,
    "max": _extreme_type,
    "first": lambda _, kind: kind,
    "last": lambda _, kind: kind,
    "count_distinct": _distinct_type,
    "collect_list": lambda _, kind: pa.list_(kind),
}
