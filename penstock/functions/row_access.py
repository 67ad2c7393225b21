"""Which columns a row function reads, found in its bytecode.

The planner ships only these columns to the function, so the analysis never names too few: whatever it
does not understand counts as reading everything. Understood are ``row.name`` and ``row["name"]``; a row
that is passed on, returned, stored, captured by an inner function or compared is read as a whole.
"""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from penstock.rows.rows import ROW_METHODS

_LOADS = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_WITHOUT_EFFECT = frozenset({"EXTENDED_ARG", "CACHE", "NOP"})
# Functions that see the variables of their caller.
_SEE_THE_FRAME = frozenset({"locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe"})


def columns_used(function: Callable[..., Any], schema: pa.Schema) -> frozenset[str] | None:
    """The columns that a function reads of its row.

    Args:
        function: called with the row as its only or first argument.

    Returns:
        Names of columns; None = cannot tell, it may read all, or it reads one that is not there.
    """
    found = _code_and_row(function)
    if found is None:
        return None
    code, row = found
    if row in code.co_cellvars or not _SEE_THE_FRAME.isdisjoint(code.co_names):
        return None
    names = _names_read(code, row)
    # Of a row without a column that is asked for, the error says all that it has.
    return None if names is None or not names.issubset(schema.names) else frozenset(names)


def class_attribute(instance: object, name: str) -> Any:
    """What Python finds for a special method of the instance, None where its class has none."""
    return next((vars(c)[name] for c in type(instance).__mro__ if name in vars(c)), None)


def _code_and_row(function: Any) -> tuple[types.CodeType, str] | None:
    """The code that runs, and the name of the parameter that takes the row."""
    position = 0
    if inspect.ismethod(function):
        function, position = function.__func__, 1
    elif not isinstance(function, types.FunctionType | type):
        function, position = class_attribute(function, "__call__"), 1
    if not isinstance(function, types.FunctionType):
        return None
    code = function.__code__
    if code.co_argcount <= position or inspect.iscoroutinefunction(function):
        return None
    return code, code.co_varnames[position]


def _names_read(code: types.CodeType, row: str) -> set[str] | None:
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _WITHOUT_EFFECT]
    names: set[str] = set()
    for position, instruction in enumerate(instructions):
        if not _mentions(instruction, row):
            continue
        name = _column_read(instructions[position : position + 3], row)
        if name is None:
            return None
        names.add(name)
    return names


def _mentions(instruction: dis.Instruction, row: str) -> bool:
    """Whether an instruction works on the variable; later Pythons handle two variables at once."""
    if instruction.opcode not in dis.haslocal and instruction.opcode not in dis.hasfree:
        return False
    value = instruction.argval
    return row in value if isinstance(value, tuple) else bool(value == row)


def _column_read(following: Sequence[dis.Instruction], row: str) -> str | None:
    """The column that a load of the row and the instructions after it read; None = the row escapes."""
    load = following[0]
    if isinstance(load.argval, tuple):
        loaded_last = set(load.opname.split("_")) == {"LOAD", "FAST"} and load.argval[-1] == row
        if not loaded_last or load.argval.count(row) > 1:
            return None
    elif load.opname not in _LOADS:
        return None
    if len(following) > 1 and following[1].opname in _ATTRIBUTES:
        name = following[1].argval
        return None if name in ROW_METHODS or name.startswith("__") else str(name)
    if len(following) < 3 or following[1].opname != "LOAD_CONST":
        return None
    key = following[1].argval
    if not isinstance(key, str) or not _is_subscript(following[2]):
        return None
    # A jump into the middle would bring another key or another object.
    return None if following[1].is_jump_target or following[2].is_jump_target else key


def _is_subscript(instruction: dis.Instruction) -> bool:
    return instruction.opname == "BINARY_SUBSCR" or (
        instruction.opname == "BINARY_OP" and instruction.argrepr == "[]"
    )
