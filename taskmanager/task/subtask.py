"""One execution attempt of one subtask: its input, its chain and its outputs.

``step`` does a bounded piece of work and never waits. The slot calls it again when it answers
``MORE``, and otherwise once the subtask has asked for it (input arrived, an output has room, a timer
is due). The way to the end: the input's data has ended -> watermark to the maximum -> operators emit
what they hold -> end of data on every output -> commit where the output needs one, and the ends of all
producers -> end of the partitions -> all of it read by the consumers -> FINISHED.

Behind a barrier with which the job is stopped the subtask *holds*: it reads nothing, no timer fires, nothing that is held
back leaves. When that checkpoint is complete it ends where it stands, without an end of its data; where it is aborted, it
goes on as if there had been none. Behind one with which others leave their TaskManager it holds as well, until it is told
that it goes on, or is cancelled.

A barrier passes here like any other element, but nothing else is done from the moment it enters the
chain until it has left it on every output and the snapshot has been taken: that is what makes the
snapshot exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import partial

from common.clock import Clock
from common.elements import (
    MAX_TIMESTAMP_MS,
    CheckpointBarrier,
    CheckpointCancelled,
    OperatorOutput,
    Watermark,
)
from penstock.storage.checkpoint_properties import BehindBarrier
from taskmanager.network.result_partition import ResultPartition
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.operators.operator import Operator
from taskmanager.snapshot.subtask_snapshot import Alignment
from taskmanager.task.inputs import Input
from taskmanager.task.operator_chain import SOURCE, ChainState, OperatorChain
from taskmanager.task.subtask_timers import SubtaskTimers


class Progress(Enum):
    """What a step came to."""

    MORE = auto()
    """There is more to do at once."""
    IDLE = auto()
    """Nothing to do until input arrives or a timer is due."""
    BLOCKED = auto()
    """An output is full."""
    WAITING = auto()
    """All data has been processed: waits for a commit, or for the ends of its producers."""
    ENDED = auto()
    """All is done."""


class SubtaskPhase(Enum):
    """How far the subtask is on the way to its end."""

    READING = auto()
    """Rows may come."""
    ENDING = auto()
    """The operators emit what they hold; then the outputs get their end of data."""
    WAITING = auto()
    """Takes part in checkpoints until its output is committed and its producers have ended."""
    DRAINING = auto()
    """The consumers read what is left."""
    ENDED = auto()


def _no_snapshots(barrier: CheckpointBarrier, _alignment: Alignment | None) -> None:
    raise AssertionError(f"checkpoint {barrier.checkpoint_id} of a subtask that takes none")


class Subtask:
    """Runs the chain of one subtask on the mailbox thread of its slot.

    Args:
        take_snapshot: called when a barrier has passed the chain, with how it was aligned.
        commits_by_checkpoint: output is committed by checkpoints; else by ``commit_output``.

    Example: the end of the input passes the chain and comes out as the end of every output.
        >>> from unittest.mock import Mock
        >>> from common.elements import EndOfData
        >>> from taskmanager.harness.manual_clock import ManualClock
        >>> output, ended = Mock(), Mock(poll=lambda: None, has_ended_data=True, has_ended=True)
        >>> chain = OperatorChain([Operator()], [(SOURCE, "")], [(0, "", output)])
        >>> subtask = Subtask(chain, [Operator()], ended, [output], Mock(busy_ns=0, idle_ns=0), ManualClock(0))
        >>> subtask.step().name, subtask.phase.name
        ('MORE', 'ENDING')
        >>> subtask.step().name, output.end_data.called
        ('ENDED', True)
    """

    def __init__(
        self,
        chain: OperatorChain,
        operators: list[Operator],
        chain_input: Input,
        partitions: list[ResultPartition],
        counters: SubtaskCounters,
        clock: Clock,
        *,
        take_snapshot: Callable[[CheckpointBarrier, Alignment | None], None] = _no_snapshots,
        commits_by_checkpoint: bool = False,
    ) -> None:
        self.counters = counters
        self.phase = SubtaskPhase.READING
        self._chain = chain
        self._operators = operators
        self._input = chain_input
        self._partitions = partitions
        self._clock = clock
        self._take_snapshot = take_snapshot
        self._commits_by_checkpoint = commits_by_checkpoint
        self._passing: CheckpointBarrier | None = None
        self._is_void = False
        """The checkpoint whose barrier is passing has been given up meanwhile."""
        self._held_by: int | None = None
        """The checkpoint behind which it holds, once its barrier has passed."""
        self._goes_on = False
        """It goes on when that is complete, as when it is given up; else the job has been stopped with it."""
        self.passed_checkpoint_id = 0
        """Of the checkpoint that a snapshot was taken for last."""
        self._last_checkpoint_id: int | None = None
        """Of the checkpoints since the end of the data, the first: it covers all output."""
        self._is_committed = False
        self._timers = SubtaskTimers()
        self._is_flushed = True
        self._last_settled_ns = clock.monotonic_ns()
        self._last_progress = Progress.IDLE

    def step(self, turn_ns: int = 0) -> Progress:
        """Does one bounded piece of work, and goes on while there is more and less than ``turn_ns`` have passed.

        A barrier that has passed ends the turn: others wait for it, and nobody for what comes behind it.
        """
        return self._timed(partial(self._turn, turn_ns))

    def _turn(self, turn_ns: int) -> Progress:
        until_ns, passed_id = self._last_settled_ns + turn_ns, self.passed_checkpoint_id
        while (progress := self._step()) is Progress.MORE:
            if self.passed_checkpoint_id != passed_id or self._clock.monotonic_ns() >= until_ns:
                break
        return progress

    def _timed(self, work: Callable[[], Progress]) -> Progress:
        self.settle_waiting()
        started_ns = self._last_settled_ns
        progress = work()
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
        if self._held_by is not None:
            return Progress.IDLE
        if self._fire_timers():
            return self._run_chain()
        if self.phase is SubtaskPhase.READING:
            return self._read()
        if self.phase is SubtaskPhase.ENDING:
            return self._end_data()
        if self.phase is SubtaskPhase.WAITING:
            return self._wait()
        if self.phase is SubtaskPhase.DRAINING:
            return self._drain()
        return Progress.ENDED

    def _run_chain(self) -> Progress:
        self._is_flushed = False
        state = self._chain.run()
        if self._passing is not None and not self._chain.is_busy:
            self._barrier_passed()
        return Progress.BLOCKED if state is ChainState.BLOCKED else Progress.MORE

    def _barrier_passed(self) -> None:
        """Between two elements: every operator has seen exactly what came before the barrier."""
        barrier, self._passing = self._passing, None
        assert barrier is not None
        if self._is_void:
            self._is_void = False
            return
        self.passed_checkpoint_id = barrier.checkpoint_id
        properties = barrier.properties
        if (properties.is_stop or properties.is_move) and self.phase is SubtaskPhase.READING:
            self._held_by, self._goes_on = barrier.checkpoint_id, properties.is_move
        self._take_snapshot(barrier, self._input.alignment())
        if self.phase is SubtaskPhase.WAITING and self._last_checkpoint_id is None:
            self._last_checkpoint_id = barrier.checkpoint_id

    def _enter(self, elements: Iterable[OperatorOutput]) -> None:
        """Lets elements of the input into the chain."""
        if isinstance(elements, tuple) and elements and isinstance(elements[0], CheckpointBarrier):
            self._passing = elements[0]
            if self._passing.properties.behind is BehindBarrier.DRAIN and not self._has_ended_data:
                self._chain.start(SOURCE, (Watermark(MAX_TIMESTAMP_MS),))
                self._chain.start_end_of_data()
                self._chain.start_last(SOURCE, elements)
                return
        self._chain.start(SOURCE, elements)

    def _read(self) -> Progress:
        if not self._chain.can_emit():
            return Progress.BLOCKED
        elements = self._input.poll()
        if elements is not None:
            self._enter(elements)
            return self._run_chain()
        if self._input.has_ended_data:
            self.phase = SubtaskPhase.ENDING
            self._chain.start(SOURCE, (Watermark(MAX_TIMESTAMP_MS),))
            self._chain.start_end_of_data()
            return self._run_chain()
        return Progress.IDLE

    @property
    def _has_ended_data(self) -> bool:
        """Whether operators have heard of the end of the data."""
        return self.phase is not SubtaskPhase.READING

    def stop(self) -> None:
        """Ends where it stands: the job has been stopped, and no data is ended."""
        self._held_by = None
        if self.phase is SubtaskPhase.READING:
            self._input.stop()
            self.phase = SubtaskPhase.ENDING

    @property
    def sealed_bytes(self) -> dict[str, int]:
        """Edge -> size of what is complete for consumers that begin with that."""
        partitions = (one for one in self._partitions if one.sealed_bytes)
        return {one.partition_id.edge_id: one.sealed_bytes for one in partitions}

    def _end_data(self) -> Progress:
        for partition in self._partitions:
            partition.end_data()
        self.phase = SubtaskPhase.WAITING
        return self._wait()

    def _wait(self) -> Progress:
        """Lets barriers pass until the output is committed and every producer has ended."""
        if not self._chain.can_emit():
            return Progress.BLOCKED
        while (elements := self._input.poll()) is not None:
            passing = tuple(
                element
                for element in elements
                if isinstance(element, CheckpointBarrier | CheckpointCancelled)
            )
            if passing:
                self._enter(passing)
                return self._run_chain()
        if not all(operator.is_drained() for operator in self._operators):
            return Progress.IDLE
        if not all(partition.is_complete for partition in self._partitions):
            return Progress.IDLE
        if self._needs_commit or not self._input.has_ended:
            return Progress.WAITING
        for partition in self._partitions:
            partition.finish()
        self.phase = SubtaskPhase.DRAINING
        return self._drain()

    @property
    def _needs_commit(self) -> bool:
        return not self._is_committed and any(op.needs_commit for op in self._operators)

    def _drain(self) -> Progress:
        if not all(partition.is_drained() for partition in self._partitions):
            return Progress.IDLE
        self.phase = SubtaskPhase.ENDED
        return Progress.ENDED

    def commit_output(self) -> None:
        """Makes the output visible: every attempt of the job has come to the end of its data."""
        if (
            self._commits_by_checkpoint
            or self.phase is not SubtaskPhase.WAITING
            or self._is_committed
        ):
            return
        for operator in self._operators:
            if operator.needs_commit:
                operator.commit_output()
        self._is_committed = True

    # -- checkpoints

    @property
    def has_ended_outputs(self) -> bool:
        """True once nothing can be emitted any more, a barrier neither."""
        return self.phase in (SubtaskPhase.DRAINING, SubtaskPhase.ENDED)

    def trigger(self, barrier: CheckpointBarrier) -> None:
        """The coordinator starts a checkpoint here; it may have come from the producers already."""
        if barrier.checkpoint_id <= self.passed_checkpoint_id:
            return
        if self.has_ended_outputs:
            # The consumers know the ends of the partitions, which stand for the barrier.
            self.passed_checkpoint_id = barrier.checkpoint_id
            self._take_snapshot(barrier, None)
        else:
            self._input.trigger(barrier)

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """A checkpoint is complete: output that it covers is committed."""
        for operator in self._operators:
            operator.on_checkpoint_completed(checkpoint_id)
        covering = self._last_checkpoint_id
        if covering is not None and covering <= checkpoint_id:
            self._is_committed = True
        if self._held_by == checkpoint_id and self._goes_on:
            self._held_by = None
        elif self._held_by == checkpoint_id:
            self.stop()

    def checkpoint_aborted(self, checkpoint_id: int, *, is_known: bool = True) -> None:
        """A checkpoint will not complete.

        Args:
            is_known: False = it may be a savepoint that is complete, which its JobManager has told nobody: what it names
                stays until a later checkpoint is.
        """
        if self._passing is not None and self._passing.checkpoint_id == checkpoint_id:
            self._is_void = True
        if self._held_by == checkpoint_id:
            self._held_by = None
        self._input.abort_checkpoint(checkpoint_id)
        for operator in self._operators if is_known else ():
            operator.on_checkpoint_aborted(checkpoint_id)

    # -- timers and deadlines

    def register_timer(self, node: int, at_ms: int) -> None:
        """Asks for ``on_timer`` of an operator at a time of the wall clock; the earliest request wins."""
        self._timers.at(node, at_ms)

    def call_after(self, node: int, pause_ms: int) -> None:
        """Asks for ``on_pause_over`` of an operator; the earliest request wins."""
        self._timers.after(node, self._clock.monotonic_ns() + pause_ms * 1_000_000)

    def next_call_ns(self, now_ms: int, now_ns: int) -> int | None:
        """Monotonic time of the earliest of these calls; None while the chain is busy with something else, or holds."""
        if self._chain.is_busy or self._held_by is not None:
            return None
        return self._timers.next_ns(now_ms, now_ns)

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

    @property
    def holds_back(self) -> bool:
        """True while operators or outputs may keep rows waiting for company, and nothing is to be done."""
        is_reading = self.phase is SubtaskPhase.READING and self._held_by is None
        return not self._is_flushed and is_reading and not self._chain.is_busy

    def flush(self) -> Progress:
        """Sends all that is held back: nothing more is coming for now."""
        return self._timed(self._flush)

    def _flush(self) -> Progress:
        if not self._chain.can_emit():
            return Progress.BLOCKED
        self._is_flushed = True
        self._chain.start_idle()
        self._chain.run()
        for partition in self._partitions:
            partition.flush()
        return Progress.MORE if self._chain.is_busy else Progress.IDLE

    def _fire_timers(self) -> bool:
        now_ms = self._clock.now_ms()
        timers, pauses = self._timers.take_due(now_ms, self._clock.monotonic_ns())
        if SOURCE in pauses:
            pauses.remove(SOURCE)
            self._input.on_pause_over()
        if self.phase is SubtaskPhase.READING:
            for node in timers:
                self._chain.start_timer(node, now_ms)
            for node in pauses:
                self._chain.start_pause_over(node)
        return self._chain.is_busy

    # -- end

    def discard_output(self) -> None:
        """No checkpoint will be restored: ``close`` removes what was prepared for them."""
        for operator in self._operators:
            operator.discard_output()

    def close(self, *, has_finished: bool = False) -> list[BaseException]:
        """Releases everything, whatever state it is in; returns what went wrong on the way.

        Args:
            has_finished: outputs that are kept stay.
        """
        errors = self._chain.close()
        closers: list[Callable[[], None]] = [self._input.close]
        closers += [operator.close for operator in self._operators if operator.is_open]
        closers += [
            partition.retire if has_finished else partition.release
            for partition in self._partitions
        ]
        for close in closers:
            try:
                close()
            except BaseException as error:  # noqa: BLE001 - a task's boundary: the rest must be closed too
                errors.append(error)
        return errors
