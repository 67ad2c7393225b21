"""The loop that a compiled function becomes: its own statements, over the rows of a batch, with state in arrays.

Behind each statement that may fail stands a test that leaves the loop. So a row that fails keeps what it has done to its
state, as in Python, and the rows before it are done.

Example: the text for a function that counts, shortened.
    for _p_i in _p_range(_p_first, _p_stop):
        _p_s = _p_slots[_p_i]
        count = _p_add((s_count[_p_s] if e_count[_p_s] else 0), 1, _p_errors, 12)
        if _p_errors[0] != 0: break
        _p_store(s_count, e_count, _p_s, count, ..., _p_errors, 13)
"""

from __future__ import annotations

import ast
import builtins
from typing import Final

import pyarrow.types as pt

from penstock.loops.checked import INT64_MAX, INT64_MIN
from penstock.loops.dialect import AssignedNames, refuse, stored_names
from penstock.loops.loop_expressions import (
    OPERATIONS,
    OWN,
    ExpressionWriter,
    LoopSource,
    dotted,
    named_kind,
)
from penstock.loops.row_errors import RowErrorKind
from penstock.loops.shapes import FunctionShape, is_passed_on, result_kind
from penstock.naming import nearest_hint

TIMER_CALLS: Final = (
    "event_time",
    "processing_time",
    "delete_event_time",
    "delete_processing_time",
)
_CELLS: Final = {"int64": "as_integer", "float64": "as_float", "bool": "as_boolean"}
_ARGUMENTS: Final = ("first", "stop", "slots", "times", "watermark", "now", "errors", "room")
_AHEAD: Final = 16
"""So many rows before it is its turn the memory of a row's numbers is asked for."""
_CACHED: Final = 1 << 13
"""So many numbers of a state are near the processor anyway."""
_DTYPES: Final = {"int64": "int64", "float64": "float64", "bool": "bool_"}


def loop_source(function: ast.FunctionDef, shape: FunctionShape) -> LoopSource:
    """The loop of a function ``process(self, row, ctx, out)``, or of ``(row, state, out)``.

    Raises:
        NotCompilable: it is not written in what is compiled.
    """
    return _Writer(function, shape).written()


class _Writer(ExpressionWriter):
    """Writes one loop."""

    # ------------------------------------------------------------ the whole

    def written(self) -> LoopSource:
        own = (self._self, self._row, self._ctx, self._collector)
        for node in stored_names(self._body):
            if node.id.startswith(OWN) or node.id in own:
                raise refuse(node, f"{node.id!r} cannot be given another value")
        AssignedNames().check(self._body)
        self._may_repeat = self._calls_repeat()
        self._find_results()
        self._indent = 2
        self._block(self._body)
        self._rows, self._out = self._out, []
        self._head()
        self._out += self._rows
        self._tail()
        source = self._source
        source.text = "\n".join(text for text, _ in self._out) + "\n"
        source.lines = [line for _, line in self._out]
        return source

    def _head(self) -> None:
        source, own = self._source, self._function.lineno
        arrays = [
            *(f"{kind}_{index}" for index in range(len(source.columns)) for kind in ("c", "k")),
            *(f"{kind}_{name}" for name in source.states for kind in ("s", "e", "d")),
        ]
        self._check_names({*arrays, *self._result_arrays()})
        names = [f"{OWN}{name}" for name in _ARGUMENTS] + arrays
        written = "\n".join(["_p_has_failed(", *(text for text, _ in self._rows)])
        used = [name for name in OPERATIONS if f"{OWN}{name}(" in written]
        imports = ", ".join(f"{name} as {OWN}{name}" for name in used)
        room = f"{max(1, self._calls_per_row)} * {OWN}room"
        head = [
            f"from builtins import range as {OWN}range",
            "import numpy as _p_numpy",
            "from math import fabs as _p_fabs",
            f"from penstock.loops.operations import {imports}" if used else "",
            f"from penstock.loops.prefetch import prefetch as {OWN}prefetch",
            f"def loop({', '.join(names)}):",
            f"    {OWN}n = 0",
            f"    {OWN}before = 0",
            f"    {OWN}i = {OWN}first",
            f"    {OWN}rows = {OWN}numpy.empty({room}, {OWN}numpy.int64)",
        ]
        for index, kind in enumerate(source.results.values()):
            head.append(f"    r_{index} = {OWN}numpy.empty({room}, {OWN}numpy.{_DTYPES[kind]})")
            head.append(f"    v_{index} = {OWN}numpy.empty({room}, {OWN}numpy.bool_)")
        if source.has_timers:
            head.append(f"    {OWN}t = 0")
            head += [
                f"    {OWN}{name} = {OWN}numpy.empty({room}, {OWN}numpy.int64)"
                for name in ("timer_kinds", "timer_rows", "timer_times")
            ]
        head += [
            f"    for {OWN}i in {OWN}range({OWN}first, {OWN}stop):",
            f"        {OWN}s = {OWN}slots[{OWN}i]",
            f"        {OWN}before = {OWN}n",
        ]
        head += self._asks_ahead()
        if self._has_leave:
            head.append(f"        {OWN}leave = False")
        self._out = [(text, own) for text in head]

    def _result_arrays(self) -> list[str]:
        return [f"{kind}_{index}" for index in range(len(self._source.results)) for kind in "rv"]

    def _check_names(self, arrays: set[str]) -> None:
        for node in stored_names(self._body):
            if node.id in arrays:
                raise refuse(
                    node, f"{node.id!r} is an array of the compiled loop: name it otherwise"
                )

    def _asks_ahead(self) -> list[str]:
        """Numbers of many keys are not near the processor: those of a row are asked for some rows before."""
        states = list(self._source.states)
        if not states:
            return []
        asked = [f"            {OWN}prefetch(s_{name}, {OWN}ahead)" for name in states]
        return [
            f"        if {OWN}i + {_AHEAD} < {OWN}stop and s_{states[0]}.size > {_CACHED}:",
            f"            {OWN}ahead = {OWN}slots[{OWN}i + {_AHEAD}]",
            *asked,
        ]

    def _tail(self) -> None:
        source = self._source
        given = [f"r_{index}, v_{index}" for index in range(len(source.results))]
        if source.has_timers:
            given.append(f"{OWN}t, {OWN}timer_kinds, {OWN}timer_rows, {OWN}timer_times")
        tail = [
            f"    if {OWN}has_failed({OWN}errors):",
            f"        return ({', '.join([f'{OWN}i', f'{OWN}before', f'{OWN}rows', *given])})",
            f"    return ({', '.join([f'{OWN}stop', f'{OWN}n', f'{OWN}rows', *given])})",
        ]
        self._out += [(text, self._function.lineno) for text in tail]

    # ------------------------------------------------------------ what is emitted

    def _find_results(self) -> None:
        """Which columns of the output are passed on as they are, and which are computed."""
        emitted = [
            self._emitted(node)
            for statement in self._body
            for node in ast.walk(statement)
            if isinstance(node, ast.Call) and self._is_emit(node)
        ]
        for field_ in self._shape.results:
            given = [columns[field_.name] for columns in emitted]
            passed = {self._passed_column(node) for node in given}
            (column,) = passed if len(passed) == 1 else ("",)
            kind = result_kind(field_.type)
            if any(map(self._is_key, given)) and pt.is_floating(field_.type):
                column = ""  # the key of a row, not its column: -0.0 is the key 0.0
                kind = "float64" if len(passed) == 1 else kind
            if column and is_passed_on(self._shape.columns.field(column).type, field_.type):
                self._source.passed[field_.name] = column
                continue
            if not kind and given:
                raise refuse(
                    given[0],
                    f"column {field_.name!r} of type {field_.type} is not computed by compiled functions: numbers "
                    "(integers up to 64 bits, uint64 apart, and float64) and booleans are; any column of the input is passed on, "
                    f"{field_.name}={self._row}.{field_.name}",
                )
            self._source.results[field_.name] = kind or "bool"

    def _calls_repeat(self) -> bool:
        """Whether a loop of the function's own holds a call."""
        return any(
            isinstance(call, ast.Expr) and isinstance(call.value, ast.Call)
            for statement in self._body
            for loop in ast.walk(statement)
            if isinstance(loop, ast.For | ast.While)
            for call in ast.walk(loop)
        )

    def _is_emit(self, node: ast.Call) -> bool:
        return dotted(node.func) == f"{self._collector}.emit"

    def _emitted(self, call: ast.Call) -> dict[str, ast.expr]:
        """The columns that a call emits, all of the output's."""
        columns: dict[str, ast.expr] = {}
        for argument in call.args:
            if not isinstance(argument, ast.Dict):
                raise refuse(
                    call,
                    f"{self._collector}.emit takes columns by name, or a dict that is written there",
                )
            for key, value in zip(argument.keys, argument.values, strict=True):
                if not isinstance(key, ast.Constant):
                    raise refuse(call, "the names of emitted columns are written out")
                columns[str(key.value)] = value
        for keyword in call.keywords:
            if keyword.arg is None:
                raise refuse(call, "the names of emitted columns are written out")
            columns[keyword.arg] = keyword.value
        wanted = self._shape.results.names
        for name in columns:
            if name not in wanted:
                raise refuse(
                    call, f"there is no output column {name!r}{nearest_hint(name, wanted)}"
                )
        missing = [name for name in wanted if name not in columns]
        if missing:
            raise refuse(call, f"no column {', '.join(missing)} (a null is given as None)")
        return columns

    # ------------------------------------------------------------ statements

    def _write(self, text: str) -> None:
        self._out.append(("    " * self._indent + text, self._line))

    def _check(self) -> None:
        """Leaves the row where the statement before failed."""
        if self._may_fail:
            self._write(f"if {OWN}has_failed({OWN}errors): break")
            self._may_fail = False

    def _temporary(self) -> str:
        self._temporaries += 1
        return f"{OWN}x{self._temporaries}"

    def _block(self, body: list[ast.stmt]) -> None:
        length = len(self._out)
        for statement in body:
            self._line = statement.lineno
            self._statement(statement)
        if len(self._out) == length:
            self._write("pass")

    def _nested(self, body: list[ast.stmt]) -> None:
        self._indent += 1
        self._block(body)
        self._indent -= 1

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Pass():
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._assign(name, value)
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
                self._assign(name, value)
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                own = ast.copy_location(ast.Name(name, ast.Load()), statement)
                self._assign(name, ast.copy_location(ast.BinOp(own, op, value), statement))
            case ast.If(test=test, body=body, orelse=other):
                self._if(test, body, other)
            case ast.While(test=test, body=body, orelse=[]):
                self._while(test, body)
            case ast.For(target=ast.Name(id=name), iter=ast.Call() as over, body=body, orelse=[]):
                self._for(name, over, body)
            case ast.Break():
                self._write("break")
            case ast.Continue():
                self._write("continue")
            case ast.Return(value=None) | ast.Return(value=ast.Constant(value=None)):
                self._leave()
            case ast.Raise(exc=error, cause=None) if error is not None:
                self._raise(error)
            case ast.Expr(value=ast.Call() as call):
                self._call_statement(call)
            case ast.Expr(value=ast.Constant()):
                pass
            case _:
                raise refuse(statement, f"{named_kind(statement)} is not compiled")

    def _assign(self, name: str, value: ast.expr) -> None:
        self._write(f"{name} = {self._value(value)}")
        self._check()

    def _if(self, test: ast.expr, body: list[ast.stmt], other: list[ast.stmt]) -> None:
        condition = self._condition(test)
        if self._may_fail:
            name = self._temporary()
            self._write(f"{name} = {condition}")
            self._check()
            condition = name
        self._write(f"if {condition}:")
        self._nested(body)
        if other:
            self._write("else:")
            self._nested(other)

    def _while(self, test: ast.expr, body: list[ast.stmt]) -> None:
        self._write("while True:")
        self._indent += 1
        name = self._temporary()
        self._write(f"{name} = {self._condition(test)}")
        self._check()
        self._write(f"if not {name}: break")
        self._loop_body(body)
        self._indent -= 1
        self._behind_loop()

    def _for(self, name: str, over: ast.Call, body: list[ast.stmt]) -> None:
        if (
            self._shape.functions.get(dotted(over.func)) != "range"
            or over.keywords
            or not 1 <= len(over.args) <= 3
        ):
            raise refuse(over, "loops are over range(...)")
        if len(over.args) == 3:
            step = self._known(over.args[2])
            if type(step) is not int or step == 0:
                raise refuse(
                    over, "the step of range(...) is known when the job is built, and not 0"
                )
        given = []
        for argument in over.args:
            bound = self._temporary()
            self._write(f"{bound} = {self._call('integer', self._value(argument))}")
            known = self._known(argument)
            given.append(bound if known is None else str(known))
        if len(given) > 1:
            end = "end_below" if len(given) == 3 and given[2].startswith("-") else "end_above"
            end_of = self._call(end, *given[:2])
            given[1] = self._temporary()
            self._write(f"{given[1]} = {end_of}")
        self._check()
        self._write(f"for {name} in {OWN}range({', '.join(given)}):")
        self._indent += 1
        self._loop_body(body)
        self._indent -= 1
        self._behind_loop()

    def _loop_body(self, body: list[ast.stmt]) -> None:
        self._loops += 1
        self._block(body)
        self._loops -= 1

    def _behind_loop(self) -> None:
        """A loop may have been left for the end of the row."""
        self._write(f"if {OWN}has_failed({OWN}errors): break")
        if self._has_leave:
            self._write(f"if {OWN}leave: {'break' if self._loops else 'continue'}")

    def _leave(self) -> None:
        """``return``: the row is done."""
        if not self._loops:
            self._write("continue")
            return
        self._has_leave = True
        self._write(f"{OWN}leave = True")
        self._write("break")

    def _raise(self, error: ast.expr) -> None:
        name, text = "", ""
        match error:
            case ast.Name(id=name):
                pass
            case ast.Call(func=ast.Name(id=name), args=[], keywords=[]):
                pass
            case ast.Call(
                func=ast.Name(id=name), args=[ast.Constant(value=str(text))], keywords=[]
            ):
                pass
            case _:
                raise refuse(error, "an error is raised with a text that is written there")
        kind = getattr(builtins, name, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise refuse(error, f"{name} is no built-in exception")
        try:
            kind(text)
        except TypeError:
            raise refuse(error, f"{name} is not made of a text alone") from None
        self._source.raised.append((name, text))
        number = RowErrorKind.RAISED + len(self._source.raised) - 1
        self._write(f"{OWN}fail({OWN}errors, {number}, {self._line})")
        self._write("break")

    def _call_statement(self, call: ast.Call) -> None:
        name = dotted(call.func)
        if self._is_emit(call):
            self._emit(call)
        elif name.startswith(f"{self._self}.") and name.count(".") == 2:
            self._state_change(call, name)
        elif self._ctx and name.startswith(f"{self._ctx}.timers."):
            self._timer(call, name.rpartition(".")[2])
        else:
            raise refuse(call, f"{name or 'what is called here'}() is not compiled")

    def _emit(self, call: ast.Call) -> None:
        columns = self._emitted(call)
        given = []
        for name in self._source.results:
            value = self._temporary()
            self._write(f"{value} = {self._value(columns[name])}")
            given.append(value)
        self._check()
        self._make_room(f"{OWN}n", [f"{OWN}rows", *self._result_arrays()])
        for index, (value, kind) in enumerate(
            zip(given, self._source.results.values(), strict=True)
        ):
            self._put(f"r_{index}", f"v_{index}", f"{OWN}n", value, kind, (INT64_MIN, INT64_MAX))
        self._write(f"{OWN}rows[{OWN}n] = {OWN}i")
        self._write(f"{OWN}n += 1")

    def _make_room(self, count: str, arrays: list[str]) -> None:
        """There is room for one more of each call in a row; where calls are repeated, for more only when it is made.

        Arrays that may be replaced in the loop cost it several times its own work.
        """
        if not self._loops:
            self._calls_per_row += 1
            if not self._may_repeat:
                return
        self._write(f"if {count} == {arrays[0]}.size:")
        for array in arrays:
            self._write(f"    {array} = {OWN}grown({array})")

    def _put(
        self, cells: str, are_there: str, index: str, value: str, kind: str, limits: tuple[int, int]
    ) -> None:
        """Puts a value, or none, into a cell."""
        own = self._temporary()
        bounds = [str(limit) for limit in limits] if kind == "int64" else []
        self._write(f"if {value} is None:")
        self._write(f"    {are_there}[{index}] = False")
        self._write("else:")
        self._indent += 1
        self._write(f"{own} = {self._call(_CELLS[kind], value, *bounds)}")
        self._check()
        self._write(f"{cells}[{index}] = {own}")
        self._write(f"{are_there}[{index}] = True")
        self._indent -= 1

    def _state_change(self, call: ast.Call, name: str) -> None:
        state = self._state(call, name)
        method = name.rpartition(".")[2]
        if method == "clear" and not call.args and not call.keywords:
            value = "None"
        elif method == "update" and len(call.args) == 1 and not call.keywords:
            value = self._temporary()
            self._write(f"{value} = {self._value(call.args[0])}")
            self._check()
        else:
            raise refuse(
                call, f"{name}(...) is not compiled: states have value(), update(value) and clear()"
            )
        own = state.attribute
        limits = (state.low, state.high)
        if value == "None":
            self._write(f"e_{own}[{OWN}s] = False")
        else:
            self._put(f"s_{own}", f"e_{own}", f"{OWN}s", value, state.kind, limits)
        self._write(f"d_{own}[{OWN}s] = True")

    def _timer(self, call: ast.Call, method: str) -> None:
        if method not in TIMER_CALLS or len(call.args) != 1 or call.keywords:
            raise refuse(call, f"timers have {', '.join(TIMER_CALLS)}, each with a time in ms")
        self._source.has_timers = True
        self._source.asks_for_timers |= not method.startswith("delete_")
        value = self._temporary()
        self._write(f"{value} = {self._call('integer', self._value(call.args[0]))}")
        self._check()
        names = [f"{OWN}{name}" for name in ("timer_kinds", "timer_rows", "timer_times")]
        self._make_room(f"{OWN}t", names)
        self._write(f"{OWN}timer_kinds[{OWN}t] = {TIMER_CALLS.index(method)}")
        self._write(f"{OWN}timer_rows[{OWN}t] = {OWN}i")
        self._write(f"{OWN}timer_times[{OWN}t] = {value}")
        self._write(f"{OWN}t += 1")
