"""Meeting of an expression and a schema: types at graph-building time, a fast function for batches.

Binding finds each node's type, and types that do not go together, by evaluating it on a row of nulls; what depends on no column is
evaluated once and stays a scalar. A compiled expression calls Arrow's functions directly, with options
built once, so that a node costs a few microseconds per batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from penstock.errors import BadRecord, ExpressionError
from penstock.expressions import calls
from penstock.expressions.calendar_times import CALENDAR, in_calendar
from penstock.expressions.comparisons import COMPARISONS, comparison_kernel
from penstock.expressions.conditionals import Conditional, ReadColumns, needed_parts
from penstock.expressions.decimal_rounding import ROUNDING, rounding
from penstock.expressions.expression import Call, Cast, Column, Expr, Literal
from penstock.expressions.function_kernels import function_kernel
from penstock.expressions.literals import adopt, array_of_scalars, written_decimal
from penstock.expressions.mixed_numbers import (
    choice_problem,
    clocks_problem,
    of_floats,
)
from penstock.expressions.operators import (
    OPERATORS,
    SAME_AS_OPERATORS,
    Apply,
    item_kernel,
    operator_kernel,
)
from penstock.expressions.parsed_times import strptime_kernel
from penstock.expressions.rounded_times import ROUNDED, rounded_times
from penstock.expressions.value_sets import (
    SEARCHES,
    Positions,
    adopted_values,
    search_kernel,
)
from penstock.naming import nearest_hint
from penstock.rows.casting import cast_kernel
from penstock.rows.column_values import row_text
from penstock.rows.schema import user_batch, user_schema

Evaluate = Callable[[ReadColumns], Any]
"""Rows in, array of their length or scalar out."""

_ARROW_ERRORS = (pa.ArrowException, TypeError, ValueError, KeyError, OverflowError)
_TOO_MANY_DIGITS = re.compile(r"Decimal precision out of range \[1, (38|76)\]: (\d+)")
# Functions of which the first argument is no value among values.
_FIRST_STANDS_APART = frozenset({"if_else", "choose", "case_when", "list_element"})
_COMPARED = frozenset({*COMPARISONS, *COMPARISONS.values()})
# Functions of which all arguments, or all but the first, are of one type.
_OF_ONE_TYPE = frozenset(
    {"coalesce", "if_else", "choose", "case_when", "max_element_wise", "min_element_wise"}
)


class BadRow(BadRecord):
    """An expression could not be computed for a row.

    Attributes:
        row_index: the first such row of the batch.
    """

    def __init__(self, message: str, *, row: str, row_index: int) -> None:
        super().__init__(message, row=row, row_index=row_index)


class CompiledExpression:
    """Computes one expression for batches of one schema."""

    __slots__ = ("_constant", "_evaluate", "text", "type")

    def __init__(
        self, text: str, type_: pa.DataType, evaluate: Evaluate, constant: pa.Scalar | None
    ) -> None:
        self.text = text
        self.type = type_
        self._evaluate = evaluate
        self._constant = constant

    @property
    def constant(self) -> pa.Scalar | None:
        """The value, where it depends on no column."""
        return self._constant

    def __call__(self, batch: pa.RecordBatch) -> pa.Array:
        """The values for n rows.

        Args:
            batch: n rows of the schema it was compiled for.

        Raises:
            BadRow: a value cannot be computed (overflow, a text that is no number); names the row.
        """
        try:
            value = self._evaluate(batch)
        except _ARROW_ERRORS as e:
            raise self._bad_row(batch, e) from e
        return repeat(value, batch.num_rows) if isinstance(value, pa.Scalar) else value

    def _bad_row(self, batch: pa.RecordBatch, error: Exception) -> BadRow:
        """Halves the batch until one row is left that fails by itself."""
        start, rows = 0, batch.num_rows
        while rows > 1:
            half = rows // 2
            try:
                self._evaluate(batch.slice(start, half))
                start, rows = start + half, rows - half
            except _ARROW_ERRORS:
                rows = half
        try:
            self._evaluate(batch.slice(start, rows))
        except _ARROW_ERRORS as e:
            error = e
        row = row_text(user_batch(batch), start) if rows else ""
        return BadRow(f"cannot compute {self.text}: {error}", row=row, row_index=start)


def evaluate_each(
    batch: pa.RecordBatch, function: Callable[[pa.RecordBatch], pa.RecordBatch]
) -> tuple[list[pa.RecordBatch], list[tuple[int, BadRecord]]]:
    """Applies a columnar function to all rows that it can be applied to.

    Returns:
        The results in order, and (row index, error) of every row that it raised ``BadRecord`` for.
    """
    results: list[pa.RecordBatch] = []
    bad: list[tuple[int, BadRecord]] = []
    pending = [(0, batch.num_rows)]
    while pending:
        start, rows = pending.pop()
        try:
            results.append(function(batch.slice(start, rows)))
        except BadRecord as e:
            if rows == 1:
                bad.append((start, e))
            else:
                half = rows // 2
                pending += [(start + half, rows - half), (start, half)]
    return results, bad


def repeat(value: pa.Scalar, rows: int) -> pa.Array:
    """An array of ``rows`` times the value."""
    if not value.is_valid:
        return pa.nulls(rows, value.type)
    if pt.is_nested(value.type):  # pa.repeat gives structs a wrong length
        return array_of_scalars([value], value.type).take(pa.repeat(pa.scalar(0), rows))
    return pa.repeat(value, rows)


def compile_expression(expression: Expr, schema: pa.Schema) -> CompiledExpression:
    """Binds an expression to a schema (``Expr.compile``)."""
    text = str(expression)
    try:
        bound = _bind(expression, schema)
    except ExpressionError as e:
        if text in str(e):
            raise
        raise ExpressionError(f"{e} (in the expression {text})") from e
    return CompiledExpression(text, bound.type, bound.evaluate, bound.constant)


def bound(expression: Expr, schema: pa.Schema) -> tuple[pa.DataType, pa.Scalar | None]:
    """The type of an expression, and its value where it depends on no column."""
    found = _bind(expression, schema)
    return found.type, found.constant


def bound_call(call: Call, schema: pa.Schema) -> tuple[list[pa.Scalar | None], Mapping[str, Any]]:
    """The constants among a call's arguments, None where it depends on a column, and its options: as they are computed with."""
    arguments = [_bind(argument, schema) for argument in call._arguments]
    _adopt_literals(call, arguments)
    options, _ = _adopted_options(call, [argument.type for argument in arguments])
    return [argument.constant for argument in arguments], options


class _Bound:
    """A node that knows its type, and what it is made of where that is not a constant."""

    __slots__ = ("constant", "evaluate", "kernel", "parts", "type")

    def __init__(
        self,
        type_: pa.DataType,
        evaluate: Evaluate,
        constant: pa.Scalar | None = None,
        parts: Sequence[_Bound] = (),
        kernel: Apply | None = None,
    ) -> None:
        self.type = type_
        self.evaluate = evaluate
        self.constant = constant
        self.parts = parts
        self.kernel = kernel

    def sample(self) -> Any:
        """A value to find types with: the constant, or a row of nulls; no rows would not do, since Arrow
        compares some types only where there are any."""
        if self.constant is not None:
            return self.constant
        if pt.is_struct(self.type):  # case_when wants a struct of nulls, not a null
            return pa.array([{}], self.type)
        return pa.nulls(1, self.type)


def _constant(scalar: pa.Scalar) -> _Bound:
    return _Bound(scalar.type, lambda _: scalar, scalar)


def _bind(expression: Expr, schema: pa.Schema) -> _Bound:
    if isinstance(expression, Column):
        return _bind_column(expression._name, schema)
    if isinstance(expression, Literal):
        return _constant(expression._scalar)
    if isinstance(expression, Cast):
        argument = _bind(expression._argument, schema)
        try:
            kernel = cast_kernel(argument.type, expression._target, safe=expression._safe)
        except _ARROW_ERRORS as error:
            raise ExpressionError(_type_error(expression, [argument], error)) from error
        return _apply(expression, [argument], lambda args: kernel(args[0]))
    assert isinstance(expression, Call)
    arguments = [_bind(argument, schema) for argument in expression._arguments]
    _adopt_literals(expression, arguments)
    if expression._function in _COMPARED:  # Arrow compares dictionaries as well, and not exactly
        arguments = [_decoded(argument) for argument in arguments]
    try:
        return _apply(expression, arguments, _call_kernel(expression, arguments))
    except ExpressionError:
        decoded = [_decoded(argument) for argument in arguments]
        if decoded == arguments:
            raise
        return _apply(expression, decoded, _call_kernel(expression, decoded))


def _bind_column(name: str, schema: pa.Schema) -> _Bound:
    positions = schema.get_all_field_indices(name)
    if len(positions) == 1:
        position = positions[0]
        return _Bound(schema.field(position).type, lambda batch: batch.column(position))
    names = user_schema(schema).names
    if positions:
        raise ExpressionError(f"the column name {name!r} is not unique among {', '.join(names)}")
    raise ExpressionError(
        f"there is no column {name!r}{nearest_hint(name, names)}; the columns are {', '.join(names)}"
    )


def _adopt_literals(call: Call, arguments: list[_Bound]) -> None:
    """Gives literals the type of the first argument beside them that is none.

    Where all arguments are of one type, literals alone agree on theirs, and what is nothing but null
    takes on the type of the others.
    """
    first = 1 if call._function in _FIRST_STANDS_APART else 0
    if call._function == "[]" or len(arguments) - first < 2:
        return
    others, is_alike = arguments[first:], call._function in _OF_ONE_TYPE
    target = next((a.type for a in others if a.constant is None and _is_settled(a.type)), None)
    if target is None and is_alike:
        target = next((a.type for a in others if _is_settled(a.type)), None)
    if target is None:
        return
    is_compared = call._function in _COMPARED
    for i in range(first, len(arguments)):
        child, constant = call._arguments[i], arguments[i].constant
        if constant is not None and isinstance(child, Literal):
            adopted = adopt(constant, target)
            arguments[i] = _constant(written_decimal(adopted, target) if is_compared else adopted)
        elif constant is not None and is_compared and not isinstance(child, Cast):
            arguments[i] = _constant(written_decimal(constant, target))
        elif is_alike and pt.is_null(arguments[i].type):
            arguments[i] = _nulls(target)


def _is_settled(kind: pa.DataType) -> bool:
    """Whether no part of a type is null, as it is of an empty list."""
    if pt.is_nested(kind):
        return all(_is_settled(kind.field(i).type) for i in range(kind.num_fields))
    return not pt.is_null(kind)


def _nulls(kind: pa.DataType) -> _Bound:
    return _Bound(kind, lambda batch: pa.nulls(batch.num_rows, kind))


def _call_kernel(call: Call, arguments: Sequence[_Bound]) -> Apply:
    try:
        return _kernel(call, arguments)
    except ExpressionError:
        raise
    except _ARROW_ERRORS as e:
        raise ExpressionError(_type_error(call, arguments, e)) from e


def _kernel(call: Call, arguments: Sequence[_Bound]) -> Apply:
    name = call._function
    types = [argument.type for argument in arguments]
    if name == "[]":
        key = arguments[1].constant
        if key is None:
            raise TypeError("what stands in [] must be a constant")
        return item_kernel(types[0], key)
    operator = SAME_AS_OPERATORS.get(name, name)
    if operator in OPERATORS:
        return operator_kernel(operator, types)
    if name in COMPARISONS.values():
        return comparison_kernel(name, types)
    chosen, positions = _adopted_options(call, types)
    options = calls.options_object(name, chosen, types[0] if types else None)
    function = function_kernel(name, types, chosen)
    if name in SEARCHES and types:
        return search_kernel(name, function, options, chosen["value_set"], positions)
    if name == "strptime":
        return strptime_kernel(function, options, chosen)
    if name in ROUNDED and types and pt.is_temporal(types[0]):
        return rounded_times(name, types[0], chosen)
    kernel = function if options is None else lambda args: function(args, options)
    if name in CALENDAR:
        return in_calendar(name, kernel, types, chosen)
    if name in ROUNDING:
        return rounding(name, kernel, types, chosen)
    if name not in _OF_ONE_TYPE:
        return kernel
    problem = clocks_problem(types)
    if name == "choose":
        problem = problem or choice_problem(types)
    if problem:
        raise ExpressionError(f"cannot compute {call}: {problem}")
    return of_floats(kernel, types, 1 if name in _FIRST_STANDS_APART else 0)


def _adopted_options(call: Call, types: Sequence[pa.DataType]) -> tuple[dict[str, Any], Positions]:
    """Value sets in the type of the column that is searched, and where its values stand in what was given."""
    options = call._options
    values = options.get("value_set")
    if not isinstance(values, pa.Array):
        return options, None
    try:
        values, positions = adopted_values(values, types[0])
    except TypeError as e:
        raise ExpressionError(f"cannot compute {call}: {e}") from e
    return {**options, "value_set": values}, positions


def _decoded(argument: _Bound) -> _Bound:
    """A dictionary-encoded argument as plain values, for functions that do not know the encoding."""
    if not pt.is_dictionary(argument.type):
        return argument
    kernel = cast_kernel(argument.type, argument.type.value_type, safe=True)
    if argument.constant is not None:
        return _constant(kernel(argument.constant))
    evaluate = argument.evaluate
    return _Bound(argument.type.value_type, lambda batch: kernel(evaluate(batch)))


def _apply(expression: Expr, arguments: Sequence[_Bound], kernel: Apply) -> _Bound:
    try:
        result = kernel([argument.sample() for argument in arguments])
    except _ARROW_ERRORS as e:
        raise ExpressionError(_type_error(expression, arguments, e)) from e
    if isinstance(result, pa.Scalar):
        return _constant(result)
    function = expression._function if isinstance(expression, Call) else "cast"
    needed = needed_parts(function, [argument.type for argument in arguments])
    if needed is None:
        evaluate = _evaluator(kernel, arguments)
    else:
        evaluate = Conditional(needed, arguments, kernel, _ARROW_ERRORS)
    return _Bound(result.type, evaluate, parts=arguments, kernel=kernel)


def _evaluator(kernel: Apply, arguments: Sequence[_Bound]) -> Evaluate:
    """A closure for the usual shapes without a loop over the arguments."""
    getters = [argument.evaluate for argument in arguments]
    if len(arguments) == 1:
        (only,) = getters
        return lambda batch: kernel([only(batch)])
    if len(arguments) == 2:
        left, right = getters
        constant = arguments[1].constant
        if constant is not None:
            return lambda batch: kernel([left(batch), constant])
        return lambda batch: kernel([left(batch), right(batch)])
    return lambda batch: kernel([get(batch) for get in getters])


def _type_error(expression: Expr, arguments: Sequence[_Bound], error: Exception) -> str:
    described = ", ".join(
        f"{child} is {bound.type}"
        for child, bound in zip(expression._children(), arguments, strict=True)
    )
    reason = str(error)
    if isinstance(error, pa.ArrowNotImplementedError):
        reason = "it does not work on these types"
    elif beyond := _TOO_MANY_DIGITS.search(reason):
        reason = _of_fewer_digits(int(beyond[1]), int(beyond[2]), [one.type for one in arguments])
    return f"cannot compute {expression}: {reason}; {described}"


def _of_fewer_digits(limit: int, digits: int, types: Sequence[pa.DataType]) -> str:
    """What is done about a decimal of more digits than its type has: no result is made shorter in silence.

    >>> _of_fewer_digits(38, 41, [pa.decimal128(30, 10), pa.decimal128(10, 2)])
    'its result has up to 41 digits, of 38 in decimal128: cast one of them to decimal256(30, 10), or both to fewer digits'
    """
    kind = "decimal128" if limit == 38 else "decimal256"
    wider = ""
    if limit < digits <= 76 and (decimals := [one for one in types if pt.is_decimal(one)]):
        widest = max(decimals, key=lambda one: one.precision)
        wider = f"one of them to decimal256({widest.precision}, {widest.scale}), or "
    return f"its result has up to {digits} digits, of {limit} in {kind}: cast {wider}both to fewer digits"
