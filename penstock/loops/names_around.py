"""What the names in a function stand for outside of it: by the objects themselves, whatever they are called there.

Example: ``min`` is the built-in one only where nothing else has that name.
    >>> names_around(path_of)["min"] is min
    True
    >>> function_called(["len"], {"len": math.floor})
    'math.floor'
"""

from __future__ import annotations

import ast
import builtins
import math
import types
from collections.abc import Mapping
from typing import Any, Final

from penstock.loops.dialect import stored_names

_BUILT_IN = ("abs", "bool", "float", "int", "max", "min", "range", "round")
_OF_MATH = (
    *(
        "ceil",
        "exp",
        "fabs",
        "floor",
        "isfinite",
        "isinf",
        "isnan",
        "log",
        "log10",
        "sqrt",
        "trunc",
    ),
)
_KNOWN: Final = [
    *((name, getattr(builtins, name)) for name in _BUILT_IN),
    *((f"math.{name}", getattr(math, name)) for name in _OF_MATH),
]


def names_around(function: types.FunctionType) -> dict[str, Any]:
    """Objects by name: built in, of the module, of enclosing functions."""
    names = {**vars(builtins), **function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():
            names[name] = cell.cell_contents
    return names


def without_own(names: Mapping[str, Any], tree: ast.FunctionDef) -> dict[str, Any]:
    """Those that the function itself gives no other meaning."""
    own = {node.id for node in stored_names(tree.body)} | {each.arg for each in tree.args.args}
    return {name: value for name, value in names.items() if name not in own}


def value_of(path: list[str], names: Mapping[str, Any]) -> Any:
    """The object that ``a.b.c`` is; None = nothing is known of it."""
    value = names.get(path[0]) if path else None
    for step in path[1:]:
        value = getattr(value, step, None)
    return value


def function_called(path: list[str], names: Mapping[str, Any]) -> str:
    """The function of Python's that ``a.b.c`` is, "min" or "math.floor"; "" = it is none that loops have."""
    value = value_of(path, names)
    return next((name for name, known in _KNOWN if known is value), "")


def path_of(node: ast.AST) -> list[str]:
    """``a.b.c`` as its parts; [] = it is something else."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=value, attr=name):
            inner = path_of(value)
            return [*inner, name] if inner else []
        case _:
            return []
