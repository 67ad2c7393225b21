"""Process functions that are called row by row, with one input or two.

The function runs in slices of time with a cursor into the batch, as row functions do: after each slice
what it emitted leaves, so that a slow function holds back neither its results nor the slot's other mail.
A batch is one bundle: its keys come into reach together, and are left before the batch is done.

An error that the function raises for a row goes the way of the operator's error policy; what the function
changed in its state before it raised stays changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from typing_extensions import override

from common.elements import PAUSE, OperatorOutput
from penstock.errors import JobRejected, StoreCorrupt, StoreNotFound, StoreTransient, Unrecoverable
from penstock.functions.functions import check_has_run
from penstock.pb import graph_pb2
from penstock.rows.decoded_values import decoded_keys
from penstock.rows.row_calls import RowCalls
from penstock.rows.schema import EVENT_TIME, schema_from_bytes, user_schema
from penstock.storage.key_encoding import KeyBatch
from taskmanager.operators.bad_records import BadRecordPolicy
from taskmanager.operators.key_columns import KeyColumns
from taskmanager.operators.operator import NOTHING, Handling, OperatorContext
from taskmanager.operators.process_base import TimerOperator
from taskmanager.operators.returned_rows import emit_returned
from taskmanager.operators.row_results import row_at

# Never a bad record: asks for the end, says that the state cannot be read, or that the graph is wrong.
_FATAL = (SystemExit, StoreCorrupt, StoreNotFound, StoreTransient, Unrecoverable)


@dataclass(slots=True)
class ProcessInput:
    """One input of the operator.

    Attributes:
        method: of the function, called for its rows.
        keys: its key columns; None = its rows have no key.
        is_broadcast: all subtasks see its rows.
        policy: where its bad records go.
        calls: for its rows.
    """

    method: str
    keys: KeyColumns | None
    is_broadcast: bool
    policy: BadRecordPolicy
    calls: RowCalls = field(default_factory=RowCalls)


class ProcessOperator(TimerOperator):
    """Runs a function of any kind but ``KeyedBatchFunction``."""

    handling = Handling.AT_ONCE

    def __init__(self, spec: graph_pb2.Operator) -> None:
        super().__init__(spec)
        methods = self._info.methods
        self._inputs = [ProcessInput(methods[0], self._keys, False, BadRecordPolicy(spec))]
        if len(methods) > 1:
            self._inputs.append(self._second_input(spec, methods[1]))

    def _second_input(self, spec: graph_pb2.Operator, method: str) -> ProcessInput:
        if not spec.second_input_schema:
            raise JobRejected(f"operator {spec.name}: {self._handle.name} needs a second input")
        schema = schema_from_bytes(spec.second_input_schema)
        is_broadcast = method == "process_broadcast"
        keys = None
        if self._keys is not None and not is_broadcast:
            keys = KeyColumns(spec.process.second_keys, schema)
            if keys.types != self._keys.types:
                raise JobRejected(
                    f"operator {spec.name}: the key columns of its inputs have different types, "
                    f"{', '.join(map(str, self._keys.types))} and {', '.join(map(str, keys.types))}: "
                    "cast one of them"
                )
        own = graph_pb2.Operator()
        own.CopyFrom(spec)
        own.input_schema = spec.second_input_schema
        first = user_schema(schema_from_bytes(spec.input_schema))
        if (
            spec.on_error.action == graph_pb2.ERROR_ACTION_SIDE_OUTPUT
            and user_schema(schema) != first
        ):
            # The side output has the first input's columns: rows of the other cannot go there.
            own.on_error.action = graph_pb2.ERROR_ACTION_FAIL
        return ProcessInput(method, keys, is_broadcast, BadRecordPolicy(own))

    @override
    def open(self, context: OperatorContext) -> None:
        for given in self._inputs:
            given.policy.open(context)
        super().open(context)

    @override
    def process(self, batch: pa.RecordBatch) -> Iterable[OperatorOutput]:
        if not batch.num_rows:
            return NOTHING
        index = self.context.origins.input_index if len(self._inputs) > 1 else 0
        return self._process(batch, self._inputs[index])

    def _process(self, batch: pa.RecordBatch, given: ProcessInput) -> Iterator[OperatorOutput]:
        ctx, time_slice, rows = self._ctx, self._slice, batch.num_rows
        keys, slots = self._begin(batch, given)
        call = getattr(self._handle.function, given.method)
        given.calls.begin(batch)
        cursor = 0
        time_slice.begin()
        while cursor < rows:
            stop = min(rows, cursor + time_slice.stride)
            while cursor < stop:
                cursor = self._call_rows(call, batch, slots, cursor, stop, given)
            is_over = time_slice.is_over()
            if cursor < rows and (is_over or len(self._out) >= self._batch_rows):
                ctx.slot = None
                yield from self._output.of_rows(batch, given.policy)
                if is_over:
                    yield PAUSE
                    time_slice.begin()
                ctx.tick()
        given.calls.end()
        self._end(keys, given)
        yield from self._output.of_rows(batch, given.policy)

    def _begin(
        self, batch: pa.RecordBatch, given: ProcessInput
    ) -> tuple[KeyBatch | None, Sequence[int | None]]:
        """Brings the keys of a batch into reach."""
        ctx = self._ctx
        position = batch.schema.get_field_index(EVENT_TIME)
        times = None if position < 0 else batch.column(position)
        if given.keys is None:
            ctx.begin(None, times)
            ctx.absence = self._absence
            if given.is_broadcast:
                ctx.absence = (
                    "in process_broadcast(): use ctx.apply_to_keyed_state(state, function)"
                )
                ctx.may_write_broadcast = True
                if self._keys is not None:
                    ctx.apply = self._apply
            return None, [None] * batch.num_rows
        keys = given.keys.encode(batch)
        slots = self._states.enter(keys)
        ctx.begin(given.keys.arrays(batch), times, given.keys.names)
        return keys, slots

    def _end(self, keys: KeyBatch | None, given: ProcessInput) -> None:
        if given.is_broadcast:
            self._ctx.may_write_broadcast = False
            self._ctx.apply = None
        self._leave(keys)

    def _apply(self, state: Any, function: Callable[[Any, Any], object]) -> None:
        def call(key: Any, state: Any) -> None:
            check_has_run(function(key, state), "what ctx.apply_to_keyed_state() calls")

        assert self._keys is not None
        names = self._keys.names
        self._states.visit(state, call, lambda keys: decoded_keys(keys.to_arrays(), names))

    def _call_rows(
        self,
        call: Callable[..., object],
        batch: pa.RecordBatch,
        slots: Sequence[int | None],
        cursor: int,
        stop: int,
        given: ProcessInput,
    ) -> int:
        """Calls the function for rows up to ``stop`` or the first it raises for; where to go on."""
        ctx, out = self._ctx, self._out
        try:
            given.calls.process(call, ctx, out, emit_returned, slots, cursor, stop)
        except (Exception, SystemExit) as e:  # noqa: BLE001 - the user's code may raise anything; the policy decides
            out.drop(ctx.index)
            self._call_failed(batch, ctx.index, e, given)
            return ctx.index + 1
        return stop

    def _call_failed(
        self, batch: pa.RecordBatch, index: int, error: Exception | SystemExit, given: ProcessInput
    ) -> None:
        def failure() -> Any:
            return self._handle.failure(error, row=row_at(batch, index), method=given.method)

        if isinstance(error, _FATAL):
            raise failure() from error
        given.policy.handle(index, failure)
