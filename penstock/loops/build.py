"""From a function that is declared as compiled to its loop, when the job is built: all that is wrong is found here."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.errors import JobRejected
from penstock.loops.declaration import CompiledSource, compiled_source
from penstock.loops.dialect import NotCompilable
from penstock.loops.loop_expressions import LoopSource
from penstock.loops.loop_source import loop_source
from penstock.loops.loop_store import compiled_loop
from penstock.loops.names_around import (
    function_called,
    names_around,
    path_of,
    value_of,
    without_own,
)
from penstock.loops.shapes import FunctionShape, StateShape, column_kind, limits_of, result_kind
from penstock.pb import graph_pb2
from penstock.processing.process_functions import has_on_timer
from penstock.state.base import State
from penstock.state.declarations import check_states
from penstock.state.values import ValueState


def build_loop(
    function: object,
    columns: pa.Schema,
    keys: Sequence[str],
    results: pa.Schema,
    *,
    has_event_time: bool,
) -> graph_pb2.CompiledLoop | None:
    """The loop of a function; None = it is not to be compiled.

    Args:
        function: an object of a class derived from ``ps.KeyedProcessFunction``.
        columns: of its input, without event time.
        results: what it emits.

    Raises:
        NotCompilable: it is declared as compiled, and cannot be; the message says the line and why.
    """
    source = compiled_source(function)
    if source is None:
        return None
    name = type(function).__name__
    constants = _Constants(function, source)
    try:
        shape = FunctionShape(
            columns,
            tuple(keys),
            results,
            _states(function),
            constants.found,
            constants.functions,
            has_event_time,
        )
        written = loop_source(source.tree, shape)
        loop = _message(written, shape, source, constants)
        compiled_loop(loop)
        if written.asks_for_timers and not has_on_timer(function):
            raise JobRejected(
                f"process: {name} asks for timers and has no on_timer, so that nothing would happen at their times: "
                "write def on_timer(self, timestamp, ctx, out)"
            )
    except NotCompilable as error:
        raise NotCompilable(
            f"process: {name} is declared with @ps.compiled, and {loop_file(source)}, {error}"
        ) from error
    return loop


def loop_file(source: CompiledSource) -> str:
    """The name of the file in which a function is written, for people."""
    return Path(source.function.__code__.co_filename).name


def _states(function: object) -> dict[str, StateShape]:
    """Those that a loop can hold."""
    found = {}
    for attribute, state in check_states(function, (State,)).items():
        if not isinstance(state, ValueState) or state.codec.value_type is None:
            continue
        type_ = state.codec.value_type
        kind = result_kind(type_)
        if kind and not (state.ttl is not None and state.ttl.update == "read_and_write"):
            low, high = limits_of(type_)
            found[attribute] = StateShape(attribute, kind, low, high, state.default)
    return found


class _Constants:
    """Numbers and functions that a function takes from around it."""

    def __init__(self, function: object, source: CompiledSource) -> None:
        self.found: dict[str, Any] = {}
        self.attributes: dict[str, str] = {}
        self.functions: dict[str, str] = {}
        names = without_own(names_around(source.function), source.tree)
        arguments = [each.arg for each in source.tree.args.args]
        itself = arguments[0] if len(arguments) == 4 else ""
        for node in ast.walk(source.tree):
            path = path_of(node)
            dotted = ".".join(path)
            if len(path) == 2 and path[0] == itself:
                value = getattr(function, path[1], None)
                if _is_number(value):
                    self.found[dotted] = value
                    self.attributes[path[1]] = repr(value)
            elif path and path[0] in names:
                value = value_of(path, names)
                if _is_number(value):
                    self.found[dotted] = value
                elif called := function_called(path, names):
                    self.functions[dotted] = called


def _is_number(value: Any) -> bool:
    return type(value) in (int, float, bool)


def _message(
    written: LoopSource, shape: FunctionShape, source: CompiledSource, constants: _Constants
) -> graph_pb2.CompiledLoop:
    loop = graph_pb2.CompiledLoop(
        source=written.text,
        lines=written.lines,
        file=loop_file(source),
        passed=written.passed,
        has_timers=written.has_timers,
        attributes=constants.attributes,
    )
    for name in written.columns:
        loop.columns.add(name=name, kind=column_kind(shape.columns.field(name).type))
    for name, kind in written.results.items():
        loop.results.add(name=name, kind=kind)
    for attribute in written.states:
        loop.states.add(name=attribute, kind=shape.states[attribute].kind)
    for exception, text in written.raised:
        loop.raised.add(exception=exception, text=text)
    return loop
