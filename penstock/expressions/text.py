"""Expressions as a person would write them, for plans and errors."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from penstock.expressions.expression import Call, Cast, Column, Expr, Literal
from penstock.expressions.moments import nanoseconds

_PRECEDENCE = {
    "==": 1, "!=": 1, "<": 1, "<=": 1, ">": 1, ">=": 1,
    "|": 2, "^": 3, "&": 4, "+": 6, "-": 6, "*": 7, "/": 7, "//": 7, "%": 7,
    "neg": 8, "~": 8, "**": 9,
}  # fmt: skip
_ATOM = 10
_SHOWN_VALUES = 5
_SHOWN_CHARACTERS = 60


def expression_text(expression: Expr) -> str:
    """One line in Python's notation, with the parentheses that are needed."""
    return _render(expression)[0]


def _render(expression: Expr) -> tuple[str, int]:
    if isinstance(expression, Column):
        return expression._name, _ATOM
    if isinstance(expression, Literal):
        return _constant(expression._scalar), _ATOM
    if isinstance(expression, Cast):
        safe = ", safe=True" if expression._safe else ""
        return f"cast({expression_text(expression._argument)}, {expression._target}{safe})", _ATOM
    if isinstance(expression, Call):
        return _render_call(expression)
    return object.__repr__(expression), _ATOM


def _render_call(call: Call) -> tuple[str, int]:
    name, arguments = call._function, call._arguments
    if name == "[]":
        return f"{_within(arguments[0], _ATOM)}[{expression_text(arguments[1])}]", _ATOM
    if name in _PRECEDENCE:
        level = _PRECEDENCE[name]
        if len(arguments) == 1:
            return f"{'-' if name == 'neg' else name}{_within(arguments[0], level)}", level
        left = _within(arguments[0], level + (name == "**" or level == 1))
        return f"{left} {name} {_within(arguments[1], level + (name != '**'))}", level
    if name == "case_when" and isinstance(arguments[0], Call):
        return _render_case(arguments), _ATOM
    parts = [expression_text(argument) for argument in arguments]
    parts += [f"{key}={_value(value)}" for key, value in call._options.items()]
    return f"{name}({', '.join(parts)})", _ATOM


def _render_case(arguments: tuple[Expr, ...]) -> str:
    conditions = arguments[0]._children()
    cases = zip(conditions, arguments[1:], strict=False)
    text = ".".join(f"when({expression_text(c)}, {expression_text(v)})" for c, v in cases)
    rest = arguments[1 + len(conditions) :]
    return text + "".join(f".otherwise({expression_text(value)})" for value in rest)


def _within(expression: Expr, level: int) -> str:
    text, own = _render(expression)
    return text if own >= level else f"({text})"


def _constant(scalar: pa.Scalar) -> str:
    """The value as Python has it, or else, as with nanoseconds, as Arrow writes it."""
    kind = scalar.type
    if not pt.is_temporal(kind) or pt.is_interval(kind) or not scalar.is_valid:
        return _value(scalar.as_py())
    try:
        if not nanoseconds(scalar) % 1000:
            return _value(scalar.as_py())
    except (ValueError, OverflowError):
        return f"{kind}({scalar.value})"
    return (
        f"{kind}({scalar.value})" if pt.is_duration(kind) else repr(scalar.cast("string").as_py())
    )


def _value(value: Any) -> str:
    if isinstance(value, pa.Scalar):
        return _constant(value)
    if isinstance(value, pa.Array):
        shown = ", ".join(map(_constant, value[:_SHOWN_VALUES]))
        return f"[{shown}{', ...' if len(value) > _SHOWN_VALUES else ''}]"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
