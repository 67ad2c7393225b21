"""Expressions of a compiled function as expressions of its loop.

Each operation becomes a call to ``penstock.loops.operations``, which notes an error instead of raising it; whether one of
them may have failed is known behind each expression.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from penstock.loops.checked import INT64_MAX, INT64_MIN, POWER_MAX
from penstock.loops.dialect import refuse, stored_names
from penstock.loops.names_around import path_of
from penstock.loops.shapes import FunctionShape, StateShape, column_kind
from penstock.naming import nearest_hint

OWN: Final = "_p_"
"""What names of the loop's own begin with."""

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "modulo",
    ast.LShift: "shift_left",
    ast.RShift: "shift_right",
    ast.BitAnd: "bit_and",
    ast.BitOr: "bit_or",
    ast.BitXor: "bit_xor",
}
_UNARY: dict[type[ast.unaryop], str] = {
    ast.USub: "negate",
    ast.UAdd: "positive",
    ast.Invert: "invert",
}
_COMPARE: dict[type[ast.cmpop], tuple[str, bool]] = {
    ast.Lt: ("less", False),
    ast.Gt: ("less", True),
    ast.LtE: ("less_equal", False),
    ast.GtE: ("less_equal", True),
}
_CALLS = {
    "abs": "absolute",
    "int": "to_int",
    "float": "to_float",
    "round": "rounded",
    "math.floor": "floor",
    "math.ceil": "ceil",
    "math.trunc": "to_int",
    "math.fabs": "fabs",
    "math.sqrt": "sqrt",
    "math.log": "log",
    "math.log10": "log10",
    "math.exp": "exp",
    "math.isnan": "is_nan",
    "math.isinf": "is_inf",
    "math.isfinite": "is_finite",
}
_EXTREMES = {"min": "minimum", "max": "maximum"}
OPERATIONS: Final = sorted(
    {
        *_BINARY.values(),
        *_UNARY.values(),
        *(name for name, _ in _COMPARE.values()),
        *(set(_CALLS.values()) - {"fabs"}),
        *_EXTREMES.values(),
        *("equal", "truth", "power", "integer", "fail", "has_failed", "grown"),
        *("as_integer", "as_float", "as_boolean"),
        *("end_above", "end_below"),
    }
)


@dataclass(slots=True)
class LoopSource:
    """A loop in Python, as numba compiles it.

    Attributes:
        text: a module with a function ``loop``.
        lines: line of the text -> of the user's file.
        columns: that it reads, by name.
        passed: results that are a column of the input: name -> its name there.
        results: results that it computes: name -> "int64", "float64", "bool".
        states: attributes of those that it uses.
        has_timers: it asks for timers, or takes some back.
        asks_for_timers: it asks for some.
        raised: what it raises itself: name of a built-in exception and text.
    """

    text: str = ""
    lines: list[int] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    passed: dict[str, str] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)
    has_timers: bool = False
    asks_for_timers: bool = False
    raised: list[tuple[str, str]] = field(default_factory=list)


class ExpressionWriter:
    """Writes the expressions of one function.

    Args:
        function: as it is written.
        shape: what it is given and gives.
    """

    def __init__(self, function: ast.FunctionDef, shape: FunctionShape) -> None:
        self._function = function
        self._shape = shape
        self._source = LoopSource()
        self._out: list[tuple[str, int]] = []
        self._rows: list[tuple[str, int]] = []
        self._indent = 1
        self._line = function.lineno
        self._loops = 0
        self._may_fail = False
        self._has_leave = False
        self._may_repeat = False
        self._calls_per_row = 0
        self._temporaries = 0
        arguments = [each.arg for each in function.args.args]
        if len(arguments) == 4:
            self._self, self._row, self._ctx, self._collector = arguments
        elif len(arguments) == 3:
            self._row, self._self, self._collector = arguments
            self._ctx = ""
        else:
            raise refuse(function, "a compiled function is process(self, row, ctx, out)")
        body = function.body
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]  # its docstring
        self._body = body
        self._locals = {node.id for node in stored_names(body)}

    def _known(self, node: ast.expr) -> int | float | None:
        """The number that an expression is when the job is built."""
        return self._shape.constants.get(dotted(node), _literal(node))

    def _passed_column(self, node: ast.expr) -> str:
        """The column of the input that an expression is; "" = it is none."""
        if self._is_key(node):
            return self._shape.keys[0] if len(self._shape.keys) == 1 else ""
        return self._column_of(node) or ""

    def _call(self, operation: str, *arguments: str) -> str:
        """A call of an operation that may fail."""
        self._may_fail = True
        return f"{OWN}{operation}({', '.join(arguments)}, {OWN}errors, {self._line})"

    def _condition(self, node: ast.expr) -> str:
        """An expression as True or False."""
        match node:
            case ast.BoolOp(op=op, values=values):
                word = " and " if isinstance(op, ast.And) else " or "
                return f"({word.join(map(self._condition, values))})"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return f"(not {self._condition(operand)})"
            case ast.Compare():
                return self._compare(node)
            case ast.Constant(value=bool(value)):
                return str(value)
            case _:
                return f"{OWN}truth({self._value(node)})"

    def _value(self, node: ast.expr) -> str:
        self._line = getattr(node, "lineno", self._line)
        match node:
            case ast.Constant(value=value):
                return self._constant(node, value)
            case ast.Name(id=name) if name in self._locals:
                return name
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                exponent = _literal(right)
                if not isinstance(exponent, int) or not 0 <= exponent <= POWER_MAX:
                    raise refuse(
                        node, f"** takes an exponent from 0 to {POWER_MAX} that is written there"
                    )
                return self._call("power", self._value(left), str(exponent))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return self._call(_BINARY[type(op)], self._value(left), self._value(right))
            case ast.UnaryOp(op=ast.Not()) | ast.Compare():
                return self._condition(node)
            case ast.UnaryOp(op=op, operand=operand):
                literal = _literal(node)
                if literal is not None:
                    return self._constant(node, literal)
                return self._call(_UNARY[type(op)], self._value(operand))
            case ast.BoolOp(op=op, values=[*values, last]):
                text = self._value(last)
                for each in reversed(values):
                    own = self._value(each)
                    ways = (text, own) if isinstance(op, ast.And) else (own, text)
                    text = f"({ways[0]} if {self._condition(each)} else {ways[1]})"
                return text
            case ast.IfExp(test=test, body=body, orelse=other):
                return f"({self._value(body)} if {self._condition(test)} else {self._value(other)})"
            case ast.Call():
                return self._called(node)
            case _:
                return self._read(node)

    def _constant(self, node: ast.AST, value: object) -> str:
        match value:
            case None | True | False:
                return str(value)
            case int():
                if not INT64_MIN <= value <= INT64_MAX:
                    raise refuse(node, f"{value} has more than 64 bits")
                return f"{OWN}numpy.int64({value})"
            case float():
                return f"{OWN}numpy.float64({value!r})" if math.isfinite(value) else _special(value)
            case _:
                raise refuse(
                    node,
                    f"{value!r} is no number: compiled functions compute with numbers and booleans",
                )

    def _compare(self, node: ast.Compare) -> str:
        parts = []
        left = node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            parts.append(self._pair(node, left, op, right))
            left = right
        return f"({' and '.join(parts)})"

    def _pair(self, node: ast.Compare, left: ast.expr, op: ast.cmpop, right: ast.expr) -> str:
        first, second = self._value(left), self._value(right)
        if isinstance(op, ast.Is | ast.IsNot):
            if not (isinstance(right, ast.Constant) and right.value is None):
                raise refuse(node, "'is' is for None")
            return f"({first} is {'not ' if isinstance(op, ast.IsNot) else ''}None)"
        if isinstance(op, ast.Eq):
            return self._call("equal", first, second)
        if isinstance(op, ast.NotEq):
            return f"(not {self._call('equal', first, second)})"
        if type(op) not in _COMPARE:
            raise refuse(node, "'in' is not compiled")
        name, is_reversed = _COMPARE[type(op)]
        return self._call(name, *((second, first) if is_reversed else (first, second)))

    def _called(self, call: ast.Call) -> str:
        name = dotted(call.func)
        if name.startswith(f"{self._self}."):
            state = self._state(call, name)
            if name.rpartition(".")[2] != "value" or call.args or call.keywords:
                raise refuse(
                    call,
                    f"{name}(...) gives no value here: states have value(), update(value) and clear()",
                )
            own, default = state.attribute, self._constant(call, state.default)
            return f"(s_{own}[{OWN}s] if e_{own}[{OWN}s] else {default})"
        if call.keywords or any(isinstance(each, ast.Starred) for each in call.args):
            raise refuse(call, f"{name}() is compiled with plain arguments only")
        arguments = [self._value(each) for each in call.args]
        called = self._shape.functions.get(name, "")
        if called in _EXTREMES and len(arguments) >= 2:
            text = arguments[0]
            for each in arguments[1:]:
                text = self._call(_EXTREMES[called], text, each)
            return text
        if called == "bool" and len(arguments) == 1:
            return self._condition(call.args[0])
        if called in _CALLS and len(arguments) == 1:
            if called == "math.fabs":
                return f"{OWN}fabs({self._call('to_float', arguments[0])})"
            return self._call(_CALLS[called], arguments[0])
        known = ", ".join([*_CALLS, *_EXTREMES, "bool", "range"])
        raise refuse(
            call,
            f"{name or 'what is called here'}() is not compiled with {len(arguments)} arguments; what is: {known}",
        )

    def _read(self, node: ast.expr) -> str:
        """A column, a number from around the function, or something of the context."""
        column = self._passed_column(node)
        if column:
            return self._column(node, column)
        name = dotted(node)
        if name in self._shape.constants:
            return self._constant(node, self._shape.constants[name])
        if self._ctx and name == f"{self._ctx}.timestamp":
            return f"{OWN}times[{OWN}i]" if self._shape.has_event_time else "None"
        if self._ctx and name == f"{self._ctx}.watermark":
            return f"{OWN}watermark"
        if self._ctx and name == f"{self._ctx}.now_ms":
            return f"{OWN}now"
        if isinstance(node, ast.Name | ast.Attribute):
            raise refuse(
                node, f"{name or named_kind(node)} is no number that is known when the job is built"
            )
        raise refuse(node, f"{named_kind(node)} is not compiled")

    def _is_key(self, node: ast.expr) -> bool:
        return bool(self._ctx) and dotted(node) == f"{self._ctx}.key"

    def _column_of(self, node: ast.expr) -> str | None:
        """The column that ``row.x`` or ``row["x"]`` is."""
        match node:
            case ast.Attribute(value=ast.Name(id=row), attr=name) if row == self._row:
                pass
            case ast.Subscript(value=ast.Name(id=row), slice=ast.Constant(value=str(name))) if (
                row == self._row
            ):
                pass
            case _:
                return None
        if name not in self._shape.columns.names:
            hint = nearest_hint(name, self._shape.columns.names)
            raise refuse(node, f"there is no column {name!r}{hint}")
        return str(name)

    def _column(self, node: ast.expr, name: str) -> str:
        type_: pa.DataType = self._shape.columns.field(name).type
        kind = column_kind(type_)
        if not kind:
            raise refuse(
                node,
                f"column {name!r} is of type {type_}, and compiled functions compute with numbers and booleans (uint64 "
                "apart); it can be passed on as it is",
            )
        columns = self._source.columns
        if name not in columns:
            columns.append(name)
        index = columns.index(name)
        value = f"c_{index}[{OWN}i]"
        if kind.startswith(("int", "uint")):
            value = f"{OWN}numpy.int64({value})"
        elif kind.startswith("float"):
            value = f"{OWN}numpy.float64({value})"
            if self._is_key(node):
                value = f"({value} + 0.0)"  # -0.0 is the key 0.0
        return f"({value} if k_{index}[{OWN}i] else None)"

    def _state(self, node: ast.AST, name: str) -> StateShape:
        attribute = name.split(".")[1]
        state = self._shape.states.get(attribute)
        if state is None:
            raise refuse(
                node,
                f"{name}() is not compiled: {self._self}.{attribute} is no ps.ValueState of integers up to 64 bits (uint64 "
                "apart), float64 or booleans",
            )
        if attribute not in self._source.states:
            self._source.states.append(attribute)
        return state


def _special(value: float) -> str:
    return f"{OWN}numpy.nan" if math.isnan(value) else f"{'-' if value < 0 else ''}{OWN}numpy.inf"


def dotted(node: ast.expr) -> str:
    """``a.b.c`` as text; "" = it is something else."""
    return ".".join(path_of(node))


def _literal(node: ast.expr) -> int | float | None:
    """The number that is written there."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return None if isinstance(value, bool) else -value
        case _:
            return None


_WORDS: dict[type[ast.AST], str] = {
    ast.Try: "try",
    ast.With: "with",
    ast.FunctionDef: "a function within it",
    ast.Lambda: "a function within it",
    ast.Import: "an import",
    ast.ImportFrom: "an import",
    ast.Yield: "yield (use out.emit)",
    ast.List: "a list",
    ast.Dict: "a dict",
    ast.Tuple: "a tuple",
    ast.Set: "a set",
    ast.JoinedStr: "text",
    ast.Subscript: "an index",
    ast.ListComp: "a list",
    ast.Assert: "assert (use raise)",
    ast.Delete: "del",
    ast.Global: "global",
    ast.Match: "match",
    ast.Return: "a value that is returned (use out.emit)",
}


def named_kind(node: ast.AST) -> str:
    """What a user calls a statement or an expression."""
    if isinstance(node, ast.Expr):
        return named_kind(node.value)
    return _WORDS.get(type(node), type(node).__name__)
