"""Keyed functions that are compiled: a batch is one call of a loop, with its state in arrays.

The loop takes rows up to the first that fails. What a function has done to its state before it failed stays, what it
emitted for that row does not, and the row goes the way of the operator's error policy; the loop goes on behind it.
``on_timer`` is Python, and sees the same state: the loop's is put back before anything leaves.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from common.elements import PAUSE, OperatorOutput
from penstock.errors import TaskFailure, Unrecoverable
from penstock.loops.loop_source import TIMER_CALLS
from penstock.loops.loop_store import Loop, compiled_loop
from penstock.loops.row_errors import row_error
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME, schema_from_bytes
from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.operators.operator import OperatorContext
from taskmanager.operators.process_rows import ProcessInput, ProcessOperator
from taskmanager.state.hashmap.number_column import NumberColumn

_ROWS_AT_ONCE: Final = 16_384
"""Rows of one call: between two calls the slot may do something else."""

_ZEROS: Final[dict[str, Any]] = {"int64": 0, "float64": 0.0, "bool": False}
_NO_TIMES = np.zeros(0, np.int64)


class _HeldNumbers:
    """A state that the backend has in arrays, by slot.

    Attributes:
        values: [room], zero where there is none.
        are_there: bool[room].
        have_changed: bool[room].
    """

    def __init__(self, column: NumberColumn, slots: Int64Array) -> None:
        self._column = column
        self._slots = slots
        self.values = column.values.numbers
        self.are_there = column.values.are_there
        self.have_changed = column.changed_numbers

    def put_back(self, first: int, stop: int) -> None:
        """Tells the backend what rows have changed."""
        self._column.put_numbers(self._slots[first:stop])


class _CopiedNumbers:
    """A state of which the numbers are copied into arrays, for the keys of a batch.

    Attributes:
        values: [keys], zero where there is none.
        are_there: bool[keys].
        have_changed: bool[keys].
    """

    def __init__(self, state: Any, kind: str, slots: list[int]) -> None:
        self._state = state
        self._slots = slots
        found = state.values_in(slots)
        if None in found:
            self.are_there: BoolArray = np.array([value is not None for value in found], np.bool_)
            zero = _ZEROS[kind]
            found = [zero if value is None else value for value in found]
        else:
            self.are_there = np.ones(len(slots), np.bool_)
        self.values: Any = np.array(found, kind)
        self.have_changed: BoolArray = np.zeros(len(slots), np.bool_)

    def put_back(self, _first: int, _stop: int) -> None:
        """Gives the state what has changed."""
        changed = np.flatnonzero(self.have_changed)
        if not len(changed):
            return
        values = self.values[changed].tolist()
        if not self.are_there[changed].all():
            there = self.are_there[changed].tolist()
            values = [v if is_there else None for v, is_there in zip(values, there, strict=True)]
        slots = self._slots
        self._state.put_in([slots[index] for index in changed.tolist()], values)
        self.have_changed[:] = False


class CompiledProcessOperator(ProcessOperator):
    """Runs the loop of a keyed function."""

    def __init__(self, spec: graph_pb2.Operator) -> None:
        super().__init__(spec)
        self._compiled = spec.process.compiled
        self._schema = schema_from_bytes(spec.output_schema)
        self._loop: Loop | None = None
        self._errors = np.zeros(2, np.int64)
        self._raised = [
            (getattr(builtins, each.exception), each.text) for each in self._compiled.raised
        ]

    @override
    def load(self) -> None:
        super().load()
        if self._loop is None:
            self._loop = compiled_loop(self._compiled)

    @override
    def open(self, context: OperatorContext) -> None:
        self.load()
        super().open(context)
        for name, known in self._compiled.attributes.items():
            value = getattr(self._handle.function, name, None)
            if repr(value) != known:
                raise TaskFailure(
                    f"operator {self._name!r}: {self._handle.name} is compiled with self.{name} = {known}, and it is "
                    f"{value!r} once the function is open: set it in __init__, or declare it without @ps.compiled",
                    operator=self._name,
                )

    @override
    def _process(self, batch: pa.RecordBatch, given: ProcessInput) -> Iterator[OperatorOutput]:
        assert given.keys is not None
        assert self._loop is not None
        ctx, rows, compiled = self._ctx, batch.num_rows, self._compiled
        keys = given.keys.encode(batch)
        slots = self._states.enter_slots(keys)
        position = batch.schema.get_field_index(EVENT_TIME)
        times = None if position < 0 else batch.column(position)
        ctx.begin(given.keys.arrays(batch), times, given.keys.names)
        places, states = self._numbers_of(slots)
        arrays = [array for column in compiled.columns for array in _arrays(batch, column)]
        for state in states:
            arrays += [state.values, state.are_there, state.have_changed]
        moments = _NO_TIMES if times is None else times.to_numpy()
        errors, cursor = self._errors, 0
        self._slice.begin()
        while cursor < rows:
            stop = min(rows, cursor + _ROWS_AT_ONCE)
            errors[:] = 0
            done, count, of_rows, *given_back = self._loop(
                cursor,
                stop,
                places,
                moments,
                ctx.watermark,
                ctx.now_ms,
                errors.ctypes.data,
                stop - cursor,
                *arrays,
            )
            if compiled.has_timers:
                self._ask_for_timers(batch, given, slots, *given_back[-4:])
            emitted = self._emitted(batch, of_rows[:count], given_back)
            if errors[0]:
                self._failed(batch, done, given)
                done += 1
            for state in states:
                state.put_back(cursor, done)
            cursor = done
            yield from emitted
            yield from self._output.of_rows(batch, given.policy)
            if cursor < rows and self._slice.is_over():
                yield PAUSE
                self._slice.begin()
            ctx.tick()
        self._end(keys, given)

    def _numbers_of(
        self, slots: Int64Array
    ) -> tuple[Int64Array, list[_HeldNumbers | _CopiedNumbers]]:
        """Where each row finds its numbers, and the states."""
        function, kinds = self._handle.function, self._compiled.states
        held = [getattr(function, state.name) for state in kinds]
        if all(isinstance(state.column, NumberColumn) for state in held):
            return slots, [_HeldNumbers(state.column, slots) for state in held]
        unique, places = np.unique(slots, return_inverse=True)
        own = unique.tolist()
        return places, [
            _CopiedNumbers(state, kind.kind, own) for state, kind in zip(held, kinds, strict=True)
        ]

    def _failed(self, batch: pa.RecordBatch, index: int, given: ProcessInput) -> None:
        """The error of a row goes the way of the operator's policy."""
        kind, line = self._errors.tolist()
        error = row_error(kind, line, self._compiled.file, self._raised)
        self._call_failed(batch, index, error, given)

    def _ask_for_timers(
        self,
        batch: pa.RecordBatch,
        given: ProcessInput,
        slots: Int64Array,
        count: int,
        kinds: Any,
        rows: Any,
        times: Any,
    ) -> None:
        ctx = self._ctx
        calls = [getattr(ctx.timers, name) for name in TIMER_CALLS]
        asked = (kinds[:count].tolist(), rows[:count].tolist(), times[:count].tolist())
        for kind, row, time_ms in zip(*asked, strict=True):
            ctx.slot, ctx.index = int(slots[row]), row
            try:
                calls[kind](time_ms)
            except Unrecoverable as error:  # event time that the stream does not have
                self._call_failed(batch, row, error, given)
        ctx.slot = None

    def _emitted(
        self, batch: pa.RecordBatch, rows: Int64Array, given_back: list[Any]
    ) -> list[pa.RecordBatch]:
        """What the loop emitted; what does not fit the output's types goes through Python, which says so by row."""
        if not len(rows):
            return []
        compiled, columns = self._compiled, {}
        taken = pa.array(rows)
        for name, column in compiled.passed.items():
            columns[name] = batch.column(column).take(taken)
        for index, result in enumerate(compiled.results):
            values, are_there = (
                each[: len(rows)] for each in given_back[2 * index : 2 * index + 2]
            )
            mask = None if are_there.all() else ~are_there
            columns[result.name] = pa.array(values, mask=mask)
        arrays = []
        try:
            for field in self._schema:
                if field.name == EVENT_TIME:
                    arrays.append(batch.column(EVENT_TIME).take(taken))
                else:
                    arrays.append(columns[field.name].cast(field.type))
        except pa.ArrowInvalid:
            arrays.clear()
        nulls = [array.null_count for array in arrays]
        if not arrays or any(
            n and not f.nullable for n, f in zip(nulls, self._schema, strict=True)
        ):
            self._out.extend(_python_rows(columns), rows.tolist())
            return []
        return [pa.RecordBatch.from_arrays(arrays, schema=self._schema)]


def _arrays(batch: pa.RecordBatch, column: graph_pb2.LoopColumn) -> tuple[Any, BoolArray]:
    """The values of a column, and which are there."""
    array = batch.column(column.name)
    if array.null_count:
        are_there = array.is_valid().to_numpy(zero_copy_only=False)
        array = pc.fill_null(array, pa.scalar(0).cast(array.type))
    else:
        are_there = np.ones(len(array), np.bool_)
    return np.ascontiguousarray(array.to_numpy(zero_copy_only=False)), are_there


def _python_rows(columns: dict[str, pa.Array]) -> list[dict[str, Any]]:
    """Rows as a function emits them; what Python has no value for, as a time that was passed on may be, stays Arrow's."""
    values = [_python_values(column) for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def _python_values(column: pa.Array) -> list[Any]:
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):
        return [_python_value(value) for value in column]


def _python_value(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except (ValueError, OverflowError):
        return value
