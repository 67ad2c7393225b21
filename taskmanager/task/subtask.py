"""One execution attempt of one subtask: its input, its chain and its outputs.

``step`` does one bounded piece of work and never waits. The slot calls it again when it answers
``MORE``, and otherwise once the subtask has asked for it (input arrived, an output has room, a timer
is due). The way to the end: input ended -> watermark to the maximum -> operators emit what they
hold -> end of data on every output -> all of it read by the consumers -> commit where the output
needs one -> FINISHED.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Protocol

from common.clock import Clock
from common.elements import (
    MAX_TIMESTAMP_MS,
    EndOfData,
    OperatorOutput,
    OriginEnded,
    Watermark,
)
from taskmanager.alignment.origins import Origins
from taskmanager.network.input_gate import InputGate
from taskmanager.network.result_partition import ResultPartition
from taskmanager.operators.operator import Operator
from taskmanager.operators.source import SourceOperator
from taskmanager.task.metrics import SubtaskCounters
from taskmanager.task.operator_chain import SOURCE, ChainState, OperatorChain


class Progress(Enum):
    """What a step came to."""

    MORE = auto()
    """There is more to do at once."""
    IDLE = auto()
    """Nothing to do until input arrives or a timer is due."""
    BLOCKED = auto()
    """An output is full."""
    READY_TO_COMMIT = auto()
    """All is done but making the output visible."""
    ENDED = auto()
    """All is done."""


class Phase(Enum):
    """How far the subtask is on the way to its end."""

    READING = auto()
    ENDING = auto()
    DRAINING = auto()
    WAITING_FOR_COMMIT = auto()
    ENDED = auto()


class Input(Protocol):
    """Where the elements of a chain come from."""

    def poll(self) -> Iterable[OperatorOutput] | None:
        """The next elements, or None when there are none for now."""

    @property
    def has_ended(self) -> bool:
        """True when no element will follow."""

    def on_timer(self, now_ms: int) -> None:
        """The wall-clock time the input has asked for is reached."""

    def close(self) -> None:
        """Releases what the input holds."""


class SourceInput:
    """The input of a source's chain."""

    def __init__(self, source: SourceOperator) -> None:
        self._source = source

    def poll(self) -> Iterable[OperatorOutput] | None:
        """What the reader has next."""
        return self._source.poll()

    @property
    def has_ended(self) -> bool:
        """True when every split is read."""
        return self._source.is_finished

    def on_timer(self, now_ms: int) -> None:
        """Time to list again, or to read on."""
        self._source.on_timer(now_ms)

    def close(self) -> None:
        """Closes the reader."""
        self._source.close()


class GateInput:
    """The input of a chain behind an exchange.

    Args:
        gate: the channels.
        origins: told which of them the rows come from.
        counters: get the watermark; None where the chain makes event time of its own.
    """

    def __init__(
        self, gate: InputGate, origins: Origins, counters: SubtaskCounters | None = None
    ) -> None:
        self._gate = gate
        self._origins = origins
        origins.has_waiting = gate.has_waiting
        self._counters = counters

    def poll(self) -> Iterable[OperatorOutput] | None:
        """The next element of any channel."""
        element = self._gate.poll()
        if element is None:
            return None
        if isinstance(element, EndOfData):
            return ()  # the chain ends once the partitions have ended, right behind their data
        if isinstance(element, OriginEnded):
            self._origins.end(element.origin)
        else:
            self._origins.current = self._gate.current_origin
            if isinstance(element, Watermark) and self._counters is not None:
                self._counters.watermark_ms = element.timestamp_ms
        return (element,)

    @property
    def has_ended(self) -> bool:
        """True when every channel has been read to its end."""
        return self._gate.is_finished

    def on_timer(self, now_ms: int) -> None:
        """A gate asks for no timers."""

    def close(self) -> None:
        """Lets the producers know that nobody reads."""
        self._gate.release()


class Subtask:
    """Runs the chain of one subtask on the mailbox thread of its slot."""

    def __init__(
        self,
        chain: OperatorChain,
        operators: list[Operator],
        chain_input: Input,
        partitions: list[ResultPartition],
        counters: SubtaskCounters,
        clock: Clock,
    ) -> None:
        self.counters = counters
        self.phase = Phase.READING
        self._chain = chain
        self._operators = operators
        self._input = chain_input
        self._partitions = partitions
        self._clock = clock
        self._timers: dict[int, int] = {}
        self._is_flushed = True
        self._last_settled_ns = clock.monotonic_ns()
        self._last_progress = Progress.IDLE

    def step(self) -> Progress:
        """Does one bounded piece of work."""
        self.settle_waiting()
        started_ns = self._last_settled_ns
        progress = self._step()
        ended_ns = self._clock.monotonic_ns()
        self.counters.busy_ns += ended_ns - started_ns
        self._last_settled_ns, self._last_progress = ended_ns, progress
        return progress

    def settle_waiting(self) -> None:
        """Counts the time since the last step as what it was: idle or back-pressured."""
        now_ns = self._clock.monotonic_ns()
        if self._last_progress is Progress.BLOCKED:
            self.counters.back_pressured_ns += now_ns - self._last_settled_ns
        elif self._last_progress is Progress.IDLE:
            self.counters.idle_ns += now_ns - self._last_settled_ns
        self._last_settled_ns = now_ns

    def _step(self) -> Progress:
        if self._chain.is_busy:
            return self._run_chain()
        if self._timers and self._fire_timers():
            return self._run_chain()
        if self.phase is Phase.READING:
            return self._read()
        if self.phase is Phase.ENDING:
            return self._end_outputs()
        if self.phase is Phase.DRAINING:
            return self._drain()
        return Progress.ENDED if self.phase is Phase.ENDED else Progress.IDLE

    def _run_chain(self) -> Progress:
        self._is_flushed = False
        state = self._chain.run()
        return Progress.BLOCKED if state is ChainState.BLOCKED else Progress.MORE

    def _read(self) -> Progress:
        if not self._chain.can_emit():
            return Progress.BLOCKED
        elements = self._input.poll()
        if elements is not None:
            self._chain.start(SOURCE, elements)
            return self._run_chain()
        if self._input.has_ended:
            self.phase = Phase.ENDING
            self._chain.start(SOURCE, (Watermark(MAX_TIMESTAMP_MS),))
            self._chain.start_end_of_data()
            return self._run_chain()
        if not self._is_flushed:
            self._is_flushed = True
            self._chain.start_idle()
            self._chain.run()
            self.flush()
            return Progress.MORE if self._chain.is_busy else Progress.IDLE
        return Progress.IDLE

    def _end_outputs(self) -> Progress:
        for partition in self._partitions:
            partition.emit_control(EndOfData())
            partition.finish()
        self.phase = Phase.DRAINING
        return self._drain()

    def _drain(self) -> Progress:
        is_drained = all(partition.is_drained() for partition in self._partitions) and all(
            operator.is_drained() for operator in self._operators
        )
        if not is_drained:
            return Progress.IDLE
        if any(operator.needs_commit for operator in self._operators):
            self.phase = Phase.WAITING_FOR_COMMIT
            return Progress.READY_TO_COMMIT
        self.phase = Phase.ENDED
        return Progress.ENDED

    def commit_output(self) -> None:
        """Makes the output visible: every attempt of the job has come this far."""
        assert self.phase is Phase.WAITING_FOR_COMMIT, "a commit that nobody waits for"
        for operator in self._operators:
            if operator.needs_commit:
                operator.commit_output()
        self.phase = Phase.ENDED

    # -- timers and deadlines

    def register_timer(self, node: int, at_ms: int) -> None:
        """Asks for ``on_timer`` of an operator; the earliest request wins."""
        current = self._timers.get(node)
        if current is None or at_ms < current:
            self._timers[node] = at_ms

    def next_deadline_ms(self) -> int | None:
        """Wall-clock time of the earliest timer; None while the chain is busy with something else."""
        if self._chain.is_busy:
            return None
        return min(self._timers.values(), default=None)

    def flush_deadline_ns(self) -> int | None:
        """Monotonic time at which a batch that is being filled has to leave."""
        deadlines = [
            deadline
            for partition in self._partitions
            if (deadline := partition.flush_deadline_ns) is not None
        ]
        return min(deadlines, default=None)

    def flush_if_due(self, now_ns: int) -> None:
        """Sends batches that have waited for the buffer timeout."""
        for partition in self._partitions:
            partition.flush_if_due(now_ns)

    def flush(self) -> None:
        """Sends what is there: nothing more is coming for now."""
        for partition in self._partitions:
            partition.flush()

    def _fire_timers(self) -> bool:
        now_ms = self._clock.now_ms()
        due = [node for node, at_ms in self._timers.items() if at_ms <= now_ms]
        for node in due:
            del self._timers[node]
            self._on_timer(node, now_ms)
        return self._chain.is_busy

    def _on_timer(self, node: int, now_ms: int) -> None:
        if node == SOURCE:
            self._input.on_timer(now_ms)
        elif self.phase is Phase.READING:
            self._chain.start_timer(node, now_ms)

    # -- end

    def close(self) -> list[BaseException]:
        """Releases everything, whatever state it is in; returns what went wrong on the way."""
        errors = self._chain.close()
        closers: list[Callable[[], None]] = [self._input.close]
        closers += [operator.close for operator in self._operators if operator.is_open]
        closers += [partition.release for partition in self._partitions]
        for close in closers:
            try:
                close()
            except BaseException as error:  # noqa: BLE001 - a task's boundary: the rest must be closed too
                errors.append(error)
        return errors
