"""The life of a process function in an operator: states bound, hooks called, timers fired.

In the story of a barrier: it passes only between two elements, when no bundle is in reach; everything a
function holds is then in its states, in the timer tables, or put there by its ``snapshot``.

In the story of a watermark: timers fire in order of time and key before the watermark is passed on. What
has been taken out of the table and cannot fire yet (the function asked for an earlier timer meanwhile, or
its slice of time is over) is put back before anything is emitted, so that a yield is a consistent state.
In batch mode, where no row may be late, a function with timers passes on the end of the data only: a timer may be
set for any time, and what it emits has that time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, Literal

import pyarrow as pa
from typing_extensions import override

from common.elements import MAX_TIMESTAMP_MS, PAUSE, OperatorOutput, Watermark
from penstock.errors import JobRejected, TaskFailure
from penstock.functions.functions import check_has_run
from penstock.graph.state_meaning import EVENT_TIMERS, PROCESSING_TIMERS
from penstock.pb import graph_pb2
from penstock.processing.process_context import ProcessContext
from penstock.processing.process_functions import (
    PROCESS_KINDS,
    CheckpointContext,
    ProcessKindInfo,
    has_on_timer,
)
from penstock.rows.schema import EVENT_TIME, schema_from_bytes, user_schema
from penstock.storage.codec import StateError
from penstock.storage.key_encoding import KeyBatch
from taskmanager.operators.key_columns import KeyColumns
from taskmanager.operators.operator import NOTHING, Operator, OperatorContext
from taskmanager.operators.process_collector import process_collector
from taskmanager.operators.process_output import ProcessOutput
from taskmanager.operators.process_state import FunctionStates
from taskmanager.operators.process_timers import TimerService
from taskmanager.operators.returned_rows import emit_returned
from taskmanager.operators.time_slice import TimeSlice
from taskmanager.operators.user_function import UserFunctionHandle

_TAKEN_MIN = 16
_TAKEN_MAX = 4096


class StatefulOperator(Operator):
    """Base of the operators that run functions with state."""

    def __init__(self, spec: graph_pb2.Operator) -> None:
        self._name = spec.name
        self._info = _kind_info(spec)
        self._handle = UserFunctionHandle(spec.name, spec.process.function)
        self._keys: KeyColumns | None = None
        if self._info.is_keyed:
            self._keys = KeyColumns(spec.process.keys, schema_from_bytes(spec.input_schema))
        self._numbers = spec.process.compiled.states
        self._is_bound = False

    @property
    def states(self) -> FunctionStates:
        """The states of the function, once it is open."""
        return self._states

    @property
    def key_columns(self) -> KeyColumns | None:
        """The key columns of the first input; None = rows have no key."""
        return self._keys

    @override
    def load(self) -> None:
        self._handle.load()

    @override
    def restore(self, context: OperatorContext) -> None:
        self._ctx = ProcessContext(context.clock.now_ms)
        self._bind(context, self._handle.function)

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        if not self._is_bound:
            self._ctx = ProcessContext(context.clock.now_ms)
        self._handle.open(context, self._prepare)

    def _prepare(self, function: Any) -> None:
        """Binds the states of the function and lets it look at what was restored."""
        context = self.context
        if not self._is_bound:
            self._bind(context, function)
        self._absence = "" if self._keys is not None else "on an unkeyed stream"
        self._ctx.absence = "in open()"
        if context.restored_checkpoint_id:
            self._call_hook("restore", self._checkpoint_context(context.restored_checkpoint_id))

    def _bind(self, context: OperatorContext, function: Any) -> None:
        """Gives the function its states."""
        keys = self._keys
        if not isinstance(function, self._info.base):
            raise JobRejected(
                f"operator {self._name!r}: {self._handle.name} is no {self._info.base.__name__}"
            )
        try:
            self._states = FunctionStates(
                function,
                self._info,
                None if keys is None else keys.types,
                self._ctx,
                context,
                {state.name: state.kind for state in self._numbers},
            )
        except (StateError, JobRejected) as error:
            raise TaskFailure(f"operator {self._name!r}: {error}", operator=self._name) from error
        self._is_bound = True

    def _checkpoint_context(self, checkpoint_id: int) -> CheckpointContext:
        context = self.context
        return CheckpointContext(checkpoint_id, context.subtask_index, context.parallelism)

    @override
    def prepare_snapshot(self, checkpoint_id: int) -> None:
        self._call_hook("snapshot", self._checkpoint_context(checkpoint_id))
        self._states.snapshot()

    @override
    def on_checkpoint_completed(self, checkpoint_id: int) -> None:
        self._call_hook("checkpoint_complete", checkpoint_id)

    def _call_hook(self, method: str, argument: object) -> None:
        self._ctx.absence = f"in {method}()"
        try:
            check_has_run(getattr(self._handle.function, method)(argument), method)
        except Exception as error:
            raise self._handle.failure(error, method=method) from error

    @override
    def on_watermark(self, watermark: Watermark) -> Iterable[OperatorOutput]:
        self._ctx.watermark = max(self._ctx.watermark, watermark.timestamp_ms)
        return (watermark,)

    @override
    def on_idle(self) -> Iterable[OperatorOutput]:
        self._states.sweep()
        return NOTHING

    @override
    def close(self) -> None:
        if self.is_open:
            self._ctx.absence = "in close()"
        if self._is_bound:
            self._states.close()
        self._handle.close()


class TimerOperator(StatefulOperator):
    """Base of the operators whose functions may have timers and emit rows."""

    def __init__(self, spec: graph_pb2.Operator) -> None:
        super().__init__(spec)
        self._spec = spec
        self._taken = _TAKEN_MAX
        self._event_timers: TimerService | None = None
        self._processing_timers: TimerService | None = None
        self._emits_any_time = False

    @override
    def open(self, context: OperatorContext) -> None:
        self._slice = TimeSlice(context.clock.monotonic_ns)
        self._batch_rows = context.config.batch_rows
        super().open(context)
        self._emits_any_time = context.config.runtime_mode == "batch" and has_on_timer(
            self._handle.function
        )
        self._ask_for_wall_clock()

    @override
    def _bind(self, context: OperatorContext, function: Any) -> None:
        output_schema, input_schema = self._output_schemas()
        self._out = process_collector(output_schema, input_schema, self._ctx)
        self._output = ProcessOutput(self._spec, self._out)
        if self._keys is not None:
            state, types, timers = context.state, self._keys.types, self._ctx.timers
            timers.without_event_time = "" if _has_event_time(self._spec) else self._name
            timers.without_on_timer = "" if has_on_timer(function) else type(function).__name__
            self._event_timers = TimerService(state, EVENT_TIMERS, types, timers.event_changes)
            self._processing_timers = TimerService(
                state, PROCESSING_TIMERS, types, timers.processing_changes
            )
        super()._bind(context, function)

    def timers(self, domain: Literal["event", "processing"]) -> TimerService | None:
        """The timers of a domain; None = rows have no key."""
        return self._event_timers if domain == "event" else self._processing_timers

    def _output_schemas(self) -> tuple[pa.Schema, pa.Schema]:
        spec = self._spec
        return (
            user_schema(schema_from_bytes(spec.output_schema)),
            user_schema(schema_from_bytes(spec.input_schema)),
        )

    def _leave(self, keys: KeyBatch | None) -> None:
        """A bundle has ended: what it changed becomes part of the state."""
        self._ctx.end()
        self._states.check()
        if keys is None:
            return
        self._states.leave()
        assert self._event_timers is not None
        assert self._processing_timers is not None
        self._event_timers.flush(keys)
        if self._processing_timers.flush(keys):
            self._ask_for_wall_clock()

    def _ask_for_wall_clock(self) -> None:
        timers = self._processing_timers
        next_ms = None if timers is None else timers.next_time()
        if next_ms is not None:
            self.context.register_timer(next_ms)

    @override
    def on_watermark(self, watermark: Watermark) -> Iterable[OperatorOutput]:
        super().on_watermark(watermark)
        timers = self._event_timers
        next_ms = None if timers is None else timers.next_time()
        if timers is None or next_ms is None or next_ms > watermark.timestamp_ms:
            return self._passed_on(watermark)
        return self._fire_before(timers, watermark)

    def _fire_before(self, timers: TimerService, watermark: Watermark) -> Iterator[OperatorOutput]:
        yield from self._fire(timers, watermark.timestamp_ms, "event")
        yield from self._passed_on(watermark)

    def _passed_on(self, watermark: Watermark) -> Iterable[OperatorOutput]:
        if self._emits_any_time and watermark.timestamp_ms != MAX_TIMESTAMP_MS:
            return NOTHING
        return (watermark,)

    @override
    def on_timer(self, now_ms: int) -> Iterable[OperatorOutput]:
        return NOTHING if self._processing_timers is None else self._on_wall_clock(now_ms)

    def _on_wall_clock(self, now_ms: int) -> Iterator[OperatorOutput]:
        assert self._processing_timers is not None
        yield from self._fire(self._processing_timers, now_ms, "processing")
        self._ask_for_wall_clock()

    def _fire(
        self, timers: TimerService, up_to_ms: int, domain: Literal["event", "processing"]
    ) -> Iterator[OperatorOutput]:
        self._slice.begin()
        while (due := timers.take_due(up_to_ms, self._taken)) is not None:
            keys, times = due
            column = pa.array(times)
            fired = self._fire_bundle(timers, keys, times, domain)
            timers.put_back(keys.slice(fired, len(times)), times[fired:])
            self._leave(keys)
            yield from self._output.of_timers(column)
            if self._slice.is_over():
                yield PAUSE
                self._slice.begin()

    def _fire_bundle(
        self,
        timers: TimerService,
        keys: KeyBatch,
        times: Any,
        domain: Literal["event", "processing"],
    ) -> int:
        """Calls ``on_timer`` for timers in order; how many of them are done."""
        ctx, out, changes = self._ctx, self._out, timers.changes
        slots = self._states.enter(keys)
        assert self._keys is not None
        ctx.begin(keys.to_arrays(), pa.array(times), self._keys.names)
        ctx.time_domain = domain
        on_timer = self._handle.function.on_timer
        steps, fired, time_ms = self._slice.stride, 0, 0
        try:
            for fired, slot, time_ms in zip(count(), slots, times.tolist(), strict=False):
                if changes.earliest_ms <= time_ms:  # the function asked for one before this
                    self._taken = max(_TAKEN_MIN, self._taken // 2)
                    return fired
                if steps <= 0 or len(out) >= self._batch_rows:
                    steps = self._slice.stride
                    if len(out) >= self._batch_rows or self._slice.is_over():
                        return fired
                steps -= 1
                if changes.deleted and changes.deleted.pop((slot, time_ms), None) is not None:
                    continue
                ctx.slot, ctx.index = slot, fired
                returned = on_timer(time_ms, ctx, out)
                if returned is not None:
                    emit_returned(returned, out.emit)
        except Exception as error:
            shown = f"{domain} timer at {time_ms} ms of key {ctx.key!r}"
            raise self._handle.failure(error, row=_Text(shown), method="on_timer") from error
        finally:
            ctx.time_domain = None
        self._taken = min(_TAKEN_MAX, self._taken * 2)
        return len(slots)


def _has_event_time(spec: graph_pb2.Operator) -> bool:
    """Whether any input has event time: then its watermarks pass, some day."""
    schemas = filter(None, (spec.input_schema, spec.second_input_schema))
    return any(EVENT_TIME in schema_from_bytes(schema).names for schema in schemas)


class _Text(str):
    """Text that is its own ``repr``."""

    __slots__ = ()

    @override
    def __repr__(self) -> str:
        return str(self)


def _kind_info(spec: graph_pb2.Operator) -> ProcessKindInfo:
    for info in PROCESS_KINDS:
        if info.kind == spec.process.kind:
            return info
    raise JobRejected(
        f"operator {spec.name}: this TaskManager does not know process functions of kind "
        f"{spec.process.kind}; run client and cluster in the same version"
    )
