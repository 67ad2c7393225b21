"""``Expr``: what a user builds with ``col``, ``lit``, ``when``, ``fn`` and Python's operators.

An expression is an immutable tree and knows nothing of a schema; ``type`` and ``compile`` meet it with
one. ``==`` builds an expression, so expressions compare and hash by identity where Python asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from typing_extensions import override

from penstock.errors import ExpressionError
from penstock.expressions import calls
from penstock.expressions.data_types import data_type
from penstock.expressions.literals import literal_scalar
from penstock.pb import graph_pb2

if TYPE_CHECKING:
    from penstock.expressions.compiled import CompiledExpression

_DEPTH_MAX = 200  # what is compiled and printed takes a few frames of Python for each
_SIZE_MAX = 10_000  # a part that is used twice counts twice, as it is computed


class Expr:
    """An expression over the columns of a stream.

    Every scalar function of ``pyarrow.compute`` is a method: ``col("x").floor()``. Combine conditions
    with ``&``, ``|`` and ``~``.
    """

    __slots__ = ()
    _extent: tuple[int, int] = (1, 1)

    def cast(self, type_: Any, *, safe: bool = False) -> Expr:
        """The value in another type.

        Args:
            type_: a name such as ``"int64"`` or ``"timestamp[ms, tz=UTC]"``, or a pyarrow type.
            safe: True makes any loss an error; otherwise fractions are cut towards zero, and only what
                does not fit at all is an error.
        """
        return Cast(self, data_type(type_), safe)

    def field(self, name: str) -> Expr:
        """A field of a struct column."""
        if not isinstance(name, str):
            raise ExpressionError(f"{self}: a field is asked for by name, not {name!r}")
        return Call("[]", (self, lit(name)))

    def is_not_null(self) -> Expr:
        """True where there is a value."""
        return Call("is_valid", (self,))

    def between(self, low: Any, high: Any) -> Expr:
        """``low <= self <= high``."""
        return Call("&", (self >= low, self <= high))

    def columns(self) -> frozenset[str]:
        """Names of the columns that the expression reads."""
        pending, found = [self], set()
        while pending:
            part = pending.pop()
            pending += part._children()
            if isinstance(part, Column):
                found.add(part._name)
        return frozenset(found)

    def type(self, schema: pa.Schema) -> pa.DataType:
        """The type of its values over a stream of this schema.

        Raises:
            ExpressionError: a column that is not there, or types that do not go together.
        """
        return self.compile(schema).type

    def compile(self, schema: pa.Schema) -> CompiledExpression:
        """The function that computes it for batches of exactly this schema.

        Raises:
            ExpressionError: as ``type``.
        """
        from penstock.expressions.compiled import compile_expression

        return compile_expression(self, schema)

    def to_proto(self) -> graph_pb2.Expression:
        """The expression as it travels and is stored."""
        from penstock.expressions.wire import to_proto

        return to_proto(self)

    @staticmethod
    def from_proto(message: graph_pb2.Expression) -> Expr:
        """Inverse of ``to_proto``.

        Raises:
            ExpressionError: the message is not a valid expression.
        """
        from penstock.expressions.wire import from_proto

        return from_proto(message)

    def _children(self) -> tuple[Expr, ...]:
        return ()

    def _comparable(self, other: object) -> Expr:
        if other is None:
            raise ExpressionError(
                f"{self}: a comparison with None is null for every row; use .is_null() or .is_valid()"
            )
        return as_expr(other)

    def __getattr__(self, name: str) -> Callable[..., Expr]:
        if name.startswith("_"):
            raise AttributeError(name)
        resolved = calls.resolve_name(name)

        def method(*arguments: Any, **options: Any) -> Expr:
            return call(resolved, (self, *arguments), options)

        method.__name__ = name
        return method

    @override
    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *calls.scalar_functions(), *calls.ALIASES})

    def __add__(self, other: Any) -> Expr:
        return Call("+", (self, as_expr(other)))

    def __radd__(self, other: Any) -> Expr:
        return Call("+", (as_expr(other), self))

    def __sub__(self, other: Any) -> Expr:
        return Call("-", (self, as_expr(other)))

    def __rsub__(self, other: Any) -> Expr:
        return Call("-", (as_expr(other), self))

    def __mul__(self, other: Any) -> Expr:
        return Call("*", (self, as_expr(other)))

    def __rmul__(self, other: Any) -> Expr:
        return Call("*", (as_expr(other), self))

    def __truediv__(self, other: Any) -> Expr:
        return Call("/", (self, as_expr(other)))

    def __rtruediv__(self, other: Any) -> Expr:
        return Call("/", (as_expr(other), self))

    def __floordiv__(self, other: Any) -> Expr:
        return Call("//", (self, as_expr(other)))

    def __rfloordiv__(self, other: Any) -> Expr:
        return Call("//", (as_expr(other), self))

    def __mod__(self, other: Any) -> Expr:
        return Call("%", (self, as_expr(other)))

    def __rmod__(self, other: Any) -> Expr:
        return Call("%", (as_expr(other), self))

    def __pow__(self, other: Any) -> Expr:
        return Call("**", (self, as_expr(other)))

    def __rpow__(self, other: Any) -> Expr:
        return Call("**", (as_expr(other), self))

    def __and__(self, other: Any) -> Expr:
        return Call("&", (self, as_expr(other)))

    def __rand__(self, other: Any) -> Expr:
        return Call("&", (as_expr(other), self))

    def __or__(self, other: Any) -> Expr:
        return Call("|", (self, as_expr(other)))

    def __ror__(self, other: Any) -> Expr:
        return Call("|", (as_expr(other), self))

    def __xor__(self, other: Any) -> Expr:
        return Call("^", (self, as_expr(other)))

    def __rxor__(self, other: Any) -> Expr:
        return Call("^", (as_expr(other), self))

    def __invert__(self) -> Expr:
        return Call("~", (self,))

    def __neg__(self) -> Expr:
        return Call("neg", (self,))

    def __pos__(self) -> Expr:
        return self

    def __abs__(self) -> Expr:
        return Call("abs", (self,))

    @override
    def __eq__(self, other: object) -> Expr:  # type: ignore[override]
        return Call("==", (self, self._comparable(other)))

    @override
    def __ne__(self, other: object) -> Expr:  # type: ignore[override]
        return Call("!=", (self, self._comparable(other)))

    def __lt__(self, other: Any) -> Expr:
        return Call("<", (self, as_expr(other)))

    def __le__(self, other: Any) -> Expr:
        return Call("<=", (self, as_expr(other)))

    def __gt__(self, other: Any) -> Expr:
        return Call(">", (self, as_expr(other)))

    def __ge__(self, other: Any) -> Expr:
        return Call(">=", (self, as_expr(other)))

    __hash__ = object.__hash__

    def __getitem__(self, key: str | int) -> Expr:
        return Call("[]", (self, lit(key)))

    def __iter__(self) -> Iterator[Expr]:
        raise TypeError(f"the expression {self} cannot be iterated")

    def __contains__(self, _: object) -> bool:
        raise TypeError("'in' does not work on expressions: use column.isin([...])")

    def __bool__(self) -> bool:
        raise ExpressionError(
            f"the expression {self} has no truth value before the job runs: combine conditions with "
            "&, | and ~ (not and, or, not), put parentheses around comparisons, and write "
            "a < b < c as (a < b) & (b < c)"
        )

    @override
    def __repr__(self) -> str:
        return f"<Expr {self}>"

    @override
    def __str__(self) -> str:
        from penstock.expressions.text import expression_text

        return expression_text(self)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return _from_bytes, (self.to_proto().SerializeToString(deterministic=True),)


class Column(Expr):
    """A column of the stream."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name


class Literal(Expr):
    """A constant."""

    __slots__ = ("_scalar",)

    def __init__(self, scalar: pa.Scalar) -> None:
        self._scalar = scalar


class Call(Expr):
    """An operator or a function of pyarrow.compute, by its resolved name."""

    __slots__ = ("_arguments", "_extent", "_function", "_options")

    def __init__(
        self, function: str, arguments: tuple[Expr, ...], options: Mapping[str, Any] | None = None
    ) -> None:
        self._function = function
        self._arguments = arguments
        self._options = dict(options or {})
        self._extent = _extent(arguments)

    @override
    def _children(self) -> tuple[Expr, ...]:
        return self._arguments


class Cast(Expr):
    """A change of type."""

    __slots__ = ("_argument", "_extent", "_safe", "_target")

    def __init__(self, argument: Expr, target: pa.DataType, safe: bool) -> None:
        self._argument = argument
        self._target = target
        self._safe = safe
        self._extent = _extent((argument,))

    @override
    def _children(self) -> tuple[Expr, ...]:
        return (self._argument,)


def _extent(children: Iterable[Expr]) -> tuple[int, int]:
    """How deep what is computed from these is, and how many parts it has.

    Raises:
        ExpressionError: more than what is compiled and printed part by part.
    """
    depth = 1 + max((child._extent[0] for child in children), default=0)
    size = 1 + sum(child._extent[1] for child in children)
    if depth > _DEPTH_MAX or size > _SIZE_MAX:
        raise ExpressionError(
            f"an expression of {size:,} parts that is {depth:,} calls deep: at most {_SIZE_MAX:,} and "
            f"{_DEPTH_MAX} are taken. Compute parts of it as columns first (.with_columns), combine long "
            "lists by halves, or use .isin([...]) for many values of one column"
        )
    return depth, size


def col(name: str) -> Expr:
    """The column of that name."""
    if not isinstance(name, str) or not name:
        raise ExpressionError(f"col() takes the name of a column, got {name!r}")
    return Column(name)


def lit(value: Any) -> Expr:
    """A constant; it takes on the type of the columns it meets where its value survives that."""
    return value if isinstance(value, Expr) else Literal(literal_scalar(value))


def as_expr(value: Any) -> Expr:
    """The value itself where it is an expression, else a literal."""
    return value if isinstance(value, Expr) else lit(value)


def call(name: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Expr:
    """A call of a function of pyarrow.compute (its resolved name)."""
    inputs, chosen = calls.split_arguments(name, arguments, options)
    return Call(name, tuple(map(as_expr, inputs)), chosen)


class Functions:
    """``ps.fn``: every scalar function of ``pyarrow.compute``, over expressions and constants."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Callable[..., Expr]:
        if name.startswith("__"):
            raise AttributeError(name)
        resolved = calls.resolve_name(name)

        def function(*arguments: Any, **options: Any) -> Expr:
            return call(resolved, arguments, options)

        function.__name__ = name
        return function

    @override
    def __dir__(self) -> list[str]:
        return sorted({*calls.scalar_functions(), *calls.ALIASES})

    def cast(self, value: Any, type_: Any, *, safe: bool = False) -> Expr:
        """See ``Expr.cast``."""
        return as_expr(value).cast(type_, safe=safe)


fn = Functions()


class CaseWhen:
    """An unfinished case: ``when(c1, v1).when(c2, v2).otherwise(v3)``."""

    __slots__ = ("_cases",)

    def __init__(self, cases: tuple[tuple[Expr, Expr], ...]) -> None:
        self._cases = cases

    @override
    def __repr__(self) -> str:
        """Messages show it where somebody takes it for an expression."""
        return "<unfinished ps.when(...): end it with .otherwise(value), or .otherwise(None)>"

    def when(self, condition: Any, value: Any) -> CaseWhen:
        """The value for rows for which no condition before was true and this one is."""
        return CaseWhen((*self._cases, (_condition(condition), as_expr(value))))

    def otherwise(self, value: Any) -> Expr:
        """The value for all other rows; a condition that is null counts as not true."""
        conditions = tuple(condition for condition, _ in self._cases)
        names = [str(i) for i in range(len(conditions))]
        choice = Call("make_struct", conditions, {"field_names": names})
        values = (value for _, value in self._cases)
        return Call("case_when", (choice, *values, as_expr(value)))


def when(condition: Any, value: Any) -> CaseWhen:
    """Begins a case: ``ps.when(col("x") > 0, "plus").otherwise("minus")``."""
    return CaseWhen(((_condition(condition), as_expr(value)),))


def _condition(value: Any) -> Expr:
    return Literal(pa.scalar(None, pa.bool_())) if value is None else as_expr(value)


def _from_bytes(data: bytes) -> Expr:
    return Expr.from_proto(graph_pb2.Expression.FromString(data))
