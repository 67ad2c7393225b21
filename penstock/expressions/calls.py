"""Calls of pyarrow.compute functions: which there are, what they take, how options are found.

Arguments come first, in the function's own order; what follows by position, and every keyword, is an
option: ``col("x").round(2)``, ``col("s").replace_substring(pattern="a", replacement="b")``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ExpressionError
from penstock.expressions.literals import key_of, literal_array, literal_scalar
from penstock.naming import nearest_hint

ALIASES = {
    "isin": "is_in",
    "fill_null": "coalesce",
    "and_": "and",
    "or_": "or",
    "utf8_zfill": "utf8_zero_fill",
}
"""Other names of functions: those that pyarrow.compute has itself, and the usual ones of data frames."""

_VALUE_SETS = frozenset({"is_in", "index_in"})
_NOT_A_FUNCTION_OF_ITS_ARGUMENTS = frozenset({"random"})


class UnknownFunction(ExpressionError, AttributeError):  # noqa: N818 - as in penstock.errors
    """An expression has no function of that name."""


@cache
def scalar_functions() -> frozenset[str]:
    """Names of all functions that give one value per row."""
    return frozenset(
        name
        for name in pc.list_functions()
        if pc.get_function(name).kind == "scalar"
        and hasattr(pc, name)
        and name not in _NOT_A_FUNCTION_OF_ITS_ARGUMENTS
    )


def resolve_name(name: str) -> str:
    """The function's own name.

    Raises:
        UnknownFunction: there is no such function, or it does not work row by row.
    """
    name = ALIASES.get(name, name)
    if name in scalar_functions():
        return name
    if name in _NOT_A_FUNCTION_OF_ITS_ARGUMENTS:
        raise UnknownFunction(f"{name} gives other values at each run: it cannot be replayed")
    if name in pc.list_functions():
        kind = pc.get_function(name).kind.replace("_", " ")
        raise UnknownFunction(
            f"{name} is a function over whole columns ({kind}), and a stream has no whole column; "
            "use window(...).aggregate(...), or map_batches for work on single batches"
        )
    known = scalar_functions() | ALIASES.keys()
    raise UnknownFunction(
        f"there is no function {name!r}{nearest_hint(name, known)}; expressions have the scalar "
        "functions of pyarrow.compute under their own names"
    )


def split_arguments(
    name: str, positional: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments and the options of a call of function ``name`` (already resolved)."""
    arity = pc.get_function(name).arity
    if arity is Ellipsis:
        arguments, extra = list(positional), []
        if not arguments:
            raise ExpressionError(f"{name} needs at least one argument")
    else:
        arguments, extra = list(positional[:arity]), list(positional[arity:])
        if len(arguments) < arity:
            raise ExpressionError(f"{name} takes {arity} arguments, got {len(arguments)}")
    options = dict(keywords)
    names = _option_names(name)
    if len(extra) > len(names):
        raise ExpressionError(f"{name} takes {_takes(name)}, got {len(positional)} values")
    for option, value in zip(names, extra, strict=False):
        if option in options:
            raise ExpressionError(f"{name} got the option {option} twice")
        options[option] = value
    options = {key: _plain_option(name, key, value) for key, value in options.items()}
    options_object(name, options, None)
    return arguments, options


def options_object(name: str, options: Mapping[str, Any], kind: pa.DataType | None) -> Any:
    """The options as pyarrow wants them, None where there are none.

    Args:
        kind: type of the first argument, where it is known: keys and value sets take it on.

    Raises:
        ExpressionError: the function has no such option, needs one, or the value does not fit.
    """
    info = getattr(pc, name).__arrow_compute_function__
    if not options and not info["options_required"]:
        return None
    if not info["options_class"]:
        raise ExpressionError(f"{name} has no options, got {', '.join(options)}")
    try:
        if name == "map_lookup" and "query_key" in options:
            key = literal_scalar(options["query_key"])
            if kind is not None and hasattr(kind, "key_type"):
                key = key_of(key, kind.key_type)
            options = {**options, "query_key": key}
        return getattr(pc, info["options_class"])(**options)
    except (TypeError, ValueError, pa.ArrowException, OverflowError) as e:
        raise ExpressionError(f"options of {name}: {e}; it takes {_takes(name)}") from e


def _plain_option(name: str, option: str, value: Any) -> Any:
    if hasattr(value, "to_proto"):
        raise ExpressionError(f"{name}: the option {option} must be a value, not an expression")
    if name in _VALUE_SETS and option == "value_set" and not isinstance(value, pa.Array):
        if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
            raise ExpressionError(f"{name} needs a list of values, got {value!r}")
        values = list(value)
        try:
            return literal_array(values)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as e:
            raise ExpressionError(f"{name}: the values must be of one type: {e}") from e
    return list(value) if isinstance(value, tuple) else value


@cache
def _option_names(name: str) -> tuple[str, ...]:
    """Options in the order in which they may be given by position."""
    parameters = inspect.signature(getattr(pc, name)).parameters.values()
    return tuple(
        p.name
        for p in parameters
        if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        and p.name not in ("options", "memory_pool")
    )


def _takes(name: str) -> str:
    parameters = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in inspect.signature(getattr(pc, name)).parameters.values()
        if p.name not in ("options", "memory_pool")
    ]
    return f"{name}{inspect.Signature(parameters)}"
