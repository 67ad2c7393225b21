"""Functions with state and timers, which the user derives classes from.

All of them: state is declared on the class (``penstock.state.declarations``); ``open`` and ``close`` frame the work;
``snapshot``, ``restore`` and ``checkpoint_complete`` are optional hooks around checkpoints. Everything is
called on one thread, one call at a time, and every call should be short: a checkpoint waits for it.

What takes ``out`` may emit its results, return a list of them, or yield them; it returns nothing else.
"""

from __future__ import annotations

import types
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from penstock.errors import JobRejected
from penstock.functions.functions import Collector, UserFunction
from penstock.pb import graph_pb2
from penstock.processing.process_context import ProcessContext
from penstock.state.declarations import (
    BroadcastState,
    KeyedState,
    OperatorListState,
    State,
    check_states,
)


@dataclass(frozen=True, slots=True)
class CheckpointContext:
    """Given to ``snapshot`` and ``restore``.

    Attributes:
        checkpoint_id: the checkpoint that is being taken, or that the function starts from.
        subtask_index: which of ``parallelism`` copies of the function this is, from 0.
    """

    checkpoint_id: int
    subtask_index: int
    parallelism: int


class StatefulFunction(UserFunction):
    """Base of the functions with state."""

    def restore(self, ctx: CheckpointContext) -> None:
        """Called before ``open`` where the job starts from a checkpoint; operator state can be read."""

    def snapshot(self, ctx: CheckpointContext) -> None:
        """Called when a checkpoint is taken; puts what the function holds into its operator state."""

    def checkpoint_complete(self, checkpoint_id: int) -> None:
        """Called when a checkpoint is complete; may be left out for one that a later one replaces."""


class TimerFunction(StatefulFunction):
    """Base of the functions with timers."""

    def on_timer(self, timestamp: int, ctx: ProcessContext, out: Collector) -> Any:
        """Called for a timer of the current key.

        Args:
            timestamp: the timer's, in ms; also the event time of what is emitted.
            ctx: with the timer's key and ``time_domain``.
            out: takes the results.
        """


def has_on_timer(function: object) -> bool:
    """Whether a function does anything at its timers: without that it can ask for none."""
    found = getattr(function, "on_timer", TimerFunction.on_timer)
    return getattr(found, "__func__", found) is not TimerFunction.on_timer


class ProcessFunction(StatefulFunction):
    """Any number of rows for a row, with side outputs and operator state, without a key."""

    @abstractmethod
    def process(self, row: Any, ctx: ProcessContext, out: Collector) -> Any:
        """Called for each row; results have its event time."""


class KeyedProcessFunction(TimerFunction):
    """State and timers per key."""

    @abstractmethod
    def process(self, row: Any, ctx: ProcessContext, out: Collector) -> Any:
        """Called for each row; state is that of the row's key, results have its event time."""


class BatchCollector:
    """Takes the batches that a ``KeyedBatchFunction`` emits.

    Attributes:
        batches: since the runtime took them last, each with the row of the input per row (None = the same).
        sides: (tag, batch) for side outputs.
    """

    __slots__ = ("batches", "sides")
    __class_getitem__: ClassVar[Any] = classmethod(types.GenericAlias)

    def __init__(self) -> None:
        self.batches: list[tuple[pa.RecordBatch, Any]] = []
        self.sides: list[tuple[str, pa.RecordBatch]] = []

    def emit(self, batch: pa.RecordBatch | pa.Table, rows: Any = None) -> None:
        """Emits a batch with the output columns.

        Args:
            batch: n rows.
            rows: n integers: which row of the input each row was made from (it gets its event time).
                Needed where the stream carries event time and n is not the number of input rows.
        """
        for part in _batches(batch, "emit"):
            self.batches.append((part, rows))

    def side(self, tag: str, batch: pa.RecordBatch | pa.Table) -> None:
        """Sends a batch with the columns of the operator's input to a side output."""
        self.sides += [(tag, part) for part in _batches(batch, "side")]


def _batches(batch: Any, method: str) -> list[pa.RecordBatch]:
    if isinstance(batch, pa.Table):
        batch = batch.combine_chunks()
        return list(batch.to_batches())
    if not isinstance(batch, pa.RecordBatch):
        raise TypeError(f"out.{method}() takes a pyarrow.RecordBatch, got {type(batch).__name__}")
    return [batch]


class KeyedBatchFunction(StatefulFunction):
    """State per key, read and written for many keys at once (``get_many``, ``put_many``)."""

    @abstractmethod
    def process_batch(self, keys: pa.Array, batch: pa.RecordBatch, out: BatchCollector) -> Any:
        """Called for each batch.

        Args:
            keys: the key of each row; structs where the key has several columns.
            batch: n rows.
            out: takes the results.
        """


class BroadcastProcessFunction(StatefulFunction):
    """Rows, and a broadcast stream that all subtasks see."""

    @abstractmethod
    def process(self, row: Any, ctx: ProcessContext, out: Collector) -> Any:
        """Called for each row; broadcast state can be read."""

    @abstractmethod
    def process_broadcast(self, row: Any, ctx: ProcessContext, out: Collector) -> Any:
        """Called for each row of the broadcast stream; broadcast state can be changed.

        Must do the same to it in every subtask: depend on the row and on broadcast state alone.
        """


class KeyedBroadcastProcessFunction(BroadcastProcessFunction, TimerFunction):
    """Keyed rows with state and timers, and a broadcast stream (``ctx.apply_to_keyed_state``)."""


class CoProcessFunction(StatefulFunction):
    """Rows of two streams."""

    @abstractmethod
    def process_left(self, row: Any, ctx: ProcessContext, out: Collector) -> Any:
        """Called for each row of the first stream."""

    @abstractmethod
    def process_right(self, row: Any, ctx: ProcessContext, out: Collector) -> Any:
        """Called for each row of the second stream."""


class KeyedCoProcessFunction(CoProcessFunction, TimerFunction):
    """Rows of two streams with the same key: state and timers are shared by both sides."""


@dataclass(frozen=True, slots=True)
class ProcessKindInfo:
    """What a kind of process function is.

    Attributes:
        kind: in the job graph.
        base: the class that functions of the kind are derived from.
        states: kinds of state that they may declare.
        is_keyed: they need a keyed stream.
        methods: that take the rows of the first input, and of the second.
    """

    kind: graph_pb2.ProcessKind.ValueType
    base: type[StatefulFunction]
    states: tuple[type[State], ...]
    is_keyed: bool
    methods: tuple[str, ...]


PROCESS_KINDS: tuple[ProcessKindInfo, ...] = (
    ProcessKindInfo(
        graph_pb2.PROCESS_KIND_KEYED_BROADCAST,
        KeyedBroadcastProcessFunction,
        (KeyedState, BroadcastState, OperatorListState),
        True,
        ("process", "process_broadcast"),
    ),
    ProcessKindInfo(
        graph_pb2.PROCESS_KIND_BROADCAST,
        BroadcastProcessFunction,
        (BroadcastState, OperatorListState),
        False,
        ("process", "process_broadcast"),
    ),
    ProcessKindInfo(
        graph_pb2.PROCESS_KIND_KEYED_CO,
        KeyedCoProcessFunction,
        (KeyedState, OperatorListState),
        True,
        ("process_left", "process_right"),
    ),
    ProcessKindInfo(
        graph_pb2.PROCESS_KIND_CO,
        CoProcessFunction,
        (OperatorListState,),
        False,
        ("process_left", "process_right"),
    ),
    ProcessKindInfo(
        graph_pb2.PROCESS_KIND_KEYED_BATCH,
        KeyedBatchFunction,
        (KeyedState, OperatorListState),
        True,
        ("process_batch",),
    ),
    ProcessKindInfo(
        graph_pb2.PROCESS_KIND_KEYED,
        KeyedProcessFunction,
        (KeyedState, OperatorListState),
        True,
        ("process",),
    ),
    ProcessKindInfo(
        graph_pb2.PROCESS_KIND_PLAIN, ProcessFunction, (OperatorListState,), False, ("process",)
    ),
)


def process_kind(function: object) -> ProcessKindInfo:
    """The kind of a process function, whose declarations are checked.

    Raises:
        JobRejected: it is none, or a state of it is declared wrongly.
    """
    if isinstance(function, type):
        raise JobRejected(f"process: pass an object, {function.__name__}(), not the class")
    for info in PROCESS_KINDS:
        if isinstance(function, info.base):
            check_states(function, info.states)
            return info
    names = ", ".join(f"ps.{info.base.__name__}" for info in PROCESS_KINDS)
    raise JobRejected(
        f"process: {function!r} is no process function; derive its class from one of {names}"
    )
