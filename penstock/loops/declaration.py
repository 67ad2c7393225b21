"""``@ps.compiled``: declares that a keyed function is compiled, and sees to it that it computes the same where it is not.

The methods that the class has are replaced by ones with checked arithmetic (``penstock.loops.checked``), at the same lines of the
same file: they run in tests, under a debugger and with ``PENSTOCK_COMPILED=0``, and ``on_timer`` always.
"""

from __future__ import annotations

import ast
import copy
import inspect
import os
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, TypeVar, overload
from weakref import WeakKeyDictionary

from typing_extensions import override

from penstock.errors import JobRejected
from penstock.loops import checked
from penstock.loops.checked import POWER_MAX
from penstock.loops.names_around import function_called, names_around, path_of, without_own
from penstock.processing.process_functions import KeyedProcessFunction, TimerFunction
from penstock.state.values import ValueState

_CHECKED: Final = "_penstock_checked"


@dataclass(frozen=True, slots=True)
class CompiledSource:
    """What a function was declared with.

    Attributes:
        function: the user's, as it was written.
        tree: of it.
        runs: what is called instead where it runs uncompiled.
    """

    function: types.FunctionType
    tree: ast.FunctionDef
    runs: Any


C = TypeVar("C", bound="type[KeyedProcessFunction]")

_sources: WeakKeyDictionary[type, CompiledSource] = WeakKeyDictionary()
"""Of classes that are declared in this process: who runs a job without having built it needs none."""

_is_uncompiled: ContextVar[bool] = ContextVar("penstock_is_uncompiled", default=False)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Functions of what is built here run as they are written."""
    before = _is_uncompiled.set(True)
    try:
        yield
    finally:
        _is_uncompiled.reset(before)


@overload
def compiled(declared: C, /) -> C: ...


@overload
def compiled(
    declared: None = None, /, **states: ValueState
) -> Callable[[Callable[..., Any]], KeyedProcessFunction]: ...


def compiled(declared: Any = None, /, **states: ValueState) -> Any:
    """Compiles a keyed function on numbers: ``process`` becomes one loop over the rows of a batch.

    Above a class derived from ``ps.KeyedProcessFunction``, or, with its states by name, above a plain function
    ``(row, state, out)``, which becomes such a function.

    What is compiled: numbers and booleans, ``if``, ``while``, ``for ... in range``, ``ps.ValueState`` of integers, float64 and
    booleans, ``out.emit``, timers, and what ``math`` has for numbers. All else is refused when the job is built, with the line.

    Example:
        @ps.compiled
        class Total(ps.KeyedProcessFunction):
            total = ps.ValueState("total", pa.int64(), default=0)

            def process(self, row, ctx, out):
                total = self.total.value() + row.amount
                self.total.update(total)
                out.emit(user=row.user, total=total)

    Raises:
        JobRejected: what is declared is none of these, or its source is not there.
    """
    if declared is None:
        if not states:
            raise JobRejected(
                "ps.compiled(...) above a plain function is given its states: @ps.compiled(total=ps.ValueState('total', "
                "pa.int64()))"
            )
        return lambda function: _of_function(function, states)
    if isinstance(declared, type) and issubclass(declared, KeyedProcessFunction) and not states:
        return _declared(declared)
    what = declared.__name__ if isinstance(declared, type | types.FunctionType) else repr(declared)
    raise JobRejected(
        f"ps.compiled: {what} is no class derived from ps.KeyedProcessFunction; above a plain function (row, state, out) "
        "give its states: @ps.compiled(total=ps.ValueState('total', pa.int64()))"
    )


def compiled_source(function: object) -> CompiledSource | None:
    """What a function was declared with; None = it was not, or is not to be compiled here.

    ``PENSTOCK_COMPILED`` says 0 or 1; else it is compiled unless in a harness, or under a debugger.
    """
    said = os.environ.get("PENSTOCK_COMPILED")
    if said == "0" or (said != "1" and (_is_uncompiled.get() or sys.gettrace() is not None)):
        return None
    kind: Any = type(function)
    source = next((_sources[base] for base in kind.__mro__ if base in _sources), None)
    if source is None:
        return None
    # A pickle of the class that was read here may have given it an equal method.
    if kind.process.__code__ != source.runs.__code__:
        raise JobRejected(
            f"process: {type(function).__name__} has a process() of its own, and the class above it is declared with "
            "@ps.compiled: declare this one, too, or let it be the other's"
        )
    return source


def _declared(kind: Any) -> Any:
    own = kind.process
    tree = _tree_of(own)
    kind.process = _with_checked_arithmetic(own, tree)
    if kind.on_timer is not TimerFunction.on_timer:
        kind.on_timer = _with_checked_arithmetic(kind.on_timer, _tree_of(kind.on_timer))
    _sources[kind] = CompiledSource(own, tree, kind.process)
    return kind


def _of_function(function: Any, states: dict[str, ValueState]) -> KeyedProcessFunction:
    if not isinstance(function, types.FunctionType):
        raise JobRejected(f"ps.compiled: {function!r} is no plain function (row, state, out)")
    if len(inspect.signature(function).parameters) != 3:
        raise JobRejected(f"ps.compiled: {function.__name__} takes (row, state, out)")
    tree = _tree_of(function)
    checked_function = _with_checked_arithmetic(function, tree)

    def process(self: Any, row: Any, _ctx: Any, out: Any) -> None:
        checked_function(row, self, out)

    names: dict[str, Any] = {
        **states,
        "process": process,
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
        "__doc__": function.__doc__,
    }
    kind: Any = type(function.__name__, (KeyedProcessFunction,), names)
    _sources[kind] = CompiledSource(function, tree, process)
    return kind()


def _tree_of(function: Any) -> ast.FunctionDef:
    """The function as it is written, at the lines of its file."""
    name = getattr(function, "__qualname__", repr(function))
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError) as error:
        raise JobRejected(
            f"ps.compiled: the source of {name} is not there ({error}): write it in a file, with def"
        ) from error
    ast.increment_lineno(tree, first - 1)
    (definition,) = tree.body
    if not isinstance(definition, ast.FunctionDef):
        raise JobRejected(f"ps.compiled: {name} is not written with def")
    definition.decorator_list = []
    for node in ast.walk(definition):
        if (
            isinstance(node, ast.Attribute)
            and node.attr.startswith("__")
            and not node.attr.endswith("__")
        ):
            raise JobRejected(
                f"ps.compiled: {name} uses the private name {node.attr}: give it one underscore"
            )
    return definition


# ---------------------------------------------------------------- checked arithmetic

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
    ast.FloorDiv: "floor_divide",
    ast.LShift: "shift_left",
}
_CALLS = {
    "abs": "absolute",
    "int": "to_int",
    "round": "rounded",
    "math.floor": "floor",
    "math.ceil": "ceil",
    "math.trunc": "trunc",
}


class _Checked(ast.NodeTransformer):
    """Puts a checked operation in the place of each that may go beyond 64 bits.

    Args:
        names: what stands around the function, without what it gives another meaning.
    """

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names

    @override
    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        return self._operation(node, node.left, node.op, node.right)

    @override
    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        own = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)
        value = self._operation(node, own, node.op, node.value)
        if value is node:
            return node
        return ast.copy_location(ast.Assign([node.target], value), node)

    @override
    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            return _call(node, "negate", node.operand)
        return node

    @override
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = function_called(path_of(node.func), self._names)
        if name in _CALLS and len(node.args) == 1 and not node.keywords:
            return _call(node, _CALLS[name], node.args[0])
        if name == "range" and len(node.args) > 1 and not node.keywords:
            return _call(node, "numbers_from", *node.args)
        return node

    @staticmethod
    def _operation(node: Any, left: ast.expr, op: ast.operator, right: ast.expr) -> Any:
        if isinstance(op, ast.Pow):
            is_small = (
                isinstance(right, ast.Constant)
                and type(right.value) is int
                and 0 <= right.value <= POWER_MAX
            )
            return _call(node, "power", left, right) if is_small else node
        name = _BINARY.get(type(op))
        return node if name is None else _call(node, name, left, right)


def _call(node: ast.AST, name: str, *arguments: ast.expr) -> ast.expr:
    function = ast.Attribute(ast.Name(_CHECKED, ast.Load()), name, ast.Load())
    return ast.fix_missing_locations(
        ast.copy_location(ast.Call(function, list(arguments), []), node)
    )


def _with_checked_arithmetic(function: types.FunctionType, tree: ast.FunctionDef) -> Any:
    """The same function, at the same lines, with arithmetic that is an error beyond 64 bits."""
    free = function.__code__.co_freevars
    own = copy.deepcopy(tree)
    _without_annotations(own)
    names = without_own(names_around(function), tree)
    checked_tree = _Checked(names).visit(own)
    around = ast.parse(
        f"def _around({', '.join((*free, _CHECKED))}):\n    pass\n    return {tree.name}"
    )
    (outer,) = around.body
    assert isinstance(outer, ast.FunctionDef)
    outer.body[0] = checked_tree
    ast.fix_missing_locations(around)
    defined: dict[str, Any] = {}
    exec(compile(around, function.__code__.co_filename, "exec"), function.__globals__, defined)
    cells = dict(zip(free, function.__closure__ or (), strict=True))
    made = defined["_around"](*(None for _ in free), checked)
    code = made.__code__
    closure = tuple(
        types.CellType(checked) if name == _CHECKED else cells[name] for name in code.co_freevars
    )
    result = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    result.__kwdefaults__ = function.__kwdefaults__
    result.__annotations__ = function.__annotations__
    result.__qualname__ = function.__qualname__
    result.__module__ = function.__module__
    result.__doc__ = function.__doc__
    if hasattr(function, "__isabstractmethod__"):
        result.__isabstractmethod__ = function.__isabstractmethod__  # type: ignore[attr-defined]
    return result


def _without_annotations(function: ast.FunctionDef) -> None:
    function.returns = None
    for argument in (*function.args.args, *function.args.kwonlyargs, *function.args.posonlyargs):
        argument.annotation = None
