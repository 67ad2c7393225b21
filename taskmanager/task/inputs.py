"""Where the elements of a chain come from: the splits of a source, or the channels of a gate."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from typing_extensions import override

from common.elements import (
    CheckpointBarrier,
    CheckpointCancelled,
    EndOfData,
    OperatorOutput,
    OriginEnded,
    Watermark,
)
from taskmanager.alignment.origins import Origins
from taskmanager.network.input_gate import InputGate
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.operators.source import SourceOperator
from taskmanager.snapshot.subtask_snapshot import Alignment


class Input(Protocol):
    """Where the elements of a chain come from."""

    def poll(self) -> Iterable[OperatorOutput] | None:
        """The next elements, or None when there are none for now."""

    @property
    def has_ended_data(self) -> bool:
        """True when no row will follow."""

    @property
    def has_ended(self) -> bool:
        """True when no element will follow, no barrier either."""

    def trigger(self, barrier: CheckpointBarrier) -> None:
        """Starts a checkpoint here: ``poll`` hands the barrier out when it is its turn."""

    def abort_checkpoint(self, checkpoint_id: int) -> None:
        """A checkpoint has been given up."""

    def stop(self) -> None:
        """The job has been stopped: nothing more is read."""

    def alignment(self) -> Alignment | None:
        """How the barrier handed out last was aligned, None where there was nothing to align."""

    def on_pause_over(self) -> None:
        """The time the input wanted to let pass has passed."""

    def close(self) -> None:
        """Releases what the input holds."""


class SourceInput:
    """The input of a source's chain."""

    def __init__(self, source: SourceOperator) -> None:
        self._source = source
        self._triggered: deque[CheckpointBarrier] = deque()
        self._is_rows_turn = False
        self._is_stopped = False

    def poll(self) -> Iterable[OperatorOutput] | None:
        """A barrier that was asked for, else what the reader has next.

        Between two barriers the reader has a turn: checkpoints that take longer than their interval do
        not keep the job from going on.
        """
        if self._is_stopped:
            return (self._triggered.popleft(),) if self._triggered else None
        if self._triggered and self._is_rows_turn:
            self._is_rows_turn = False
            elements = self._source.poll()
            if elements is not None:
                return elements
        if self._triggered:
            self._is_rows_turn = True
            return (self._triggered.popleft(),)
        return self._source.poll()

    @property
    def has_ended_data(self) -> bool:
        """True when every split is read, or nothing is any more."""
        return (self._is_stopped or self._source.is_finished) and not self._triggered

    @property
    def has_ended(self) -> bool:
        """True when every split is read; nothing else comes in."""
        return self.has_ended_data

    def stop(self) -> None:
        """Reads no more."""
        self._is_stopped = True

    def trigger(self, barrier: CheckpointBarrier) -> None:
        """The next element is the barrier."""
        self._triggered.append(barrier)

    def abort_checkpoint(self, checkpoint_id: int) -> None:
        """Drops the barrier, where it is not on its way yet."""
        self._triggered = deque(b for b in self._triggered if b.checkpoint_id != checkpoint_id)

    def alignment(self) -> Alignment | None:
        """A source has nothing to align."""
        return None

    def on_pause_over(self) -> None:
        """Time to list again, or to read on."""
        self._source.on_pause_over()

    def close(self) -> None:
        """Closes the reader."""
        self._source.close()


class GateInput:
    """The input of a chain behind an exchange.

    Args:
        gate: the channels.
        origins: told which of them the rows come from.
        has_own_event_time: the chain makes event time of its own: the gate's watermark is not its.
        input_of_channel: per channel the input of the vertex that it feeds.
    """

    def __init__(
        self,
        gate: InputGate,
        origins: Origins,
        counters: SubtaskCounters,
        *,
        has_own_event_time: bool = False,
        input_of_channel: Sequence[int] = (),
    ) -> None:
        self._gate = gate
        self._origins = origins
        origins.has_waiting = gate.has_waiting
        self._counters = counters
        self._has_own_event_time = has_own_event_time
        self._input_of_channel = input_of_channel if any(input_of_channel) else ()

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
            if self._input_of_channel:
                self._origins.input_index = self._input_of_channel[self._gate.current_channel]
            if isinstance(element, Watermark) and not self._has_own_event_time:
                self._counters.watermark_ms = element.timestamp_ms
        return (element,)

    @property
    def has_ended_data(self) -> bool:
        """True when the data of every channel has been read."""
        return self._gate.has_ended_data

    @property
    def has_ended(self) -> bool:
        """True when every channel has been read to its end."""
        return self._gate.is_finished

    def trigger(self, barrier: CheckpointBarrier) -> None:
        """The barrier comes once the ends of all channels have been read."""
        self._gate.trigger(barrier)

    def abort_checkpoint(self, checkpoint_id: int) -> None:
        """Channels that were blocked for it go on."""
        self._gate.abort_checkpoint(checkpoint_id)

    def alignment(self) -> Alignment | None:
        """How the barrier that came out last was aligned."""
        started = self._gate.last_start
        if started is None:
            return None
        return Alignment(started.first_at_ms, self._counters.bytes_in - started.first_bytes)

    def stop(self) -> None:
        """What its producers have sent behind the barrier is not processed any more: only their ends are read."""

    def on_pause_over(self) -> None:
        """A gate asks for no pauses."""

    def close(self) -> None:
        """Lets the producers know that nobody reads."""
        self._gate.release()


class TakenInput(GateInput):
    """The input of a subtask that had done all its work before it was restored.

    Its producers may send again what it has taken, and those that were not restored may still keep all of it:
    it waits for their ends and lets barriers pass.
    """

    @override
    def poll(self) -> Iterable[OperatorOutput] | None:
        """The next barrier of those that have arrived."""
        while (elements := super().poll()) is not None:
            passing = tuple(filter(_is_of_checkpoints, elements))
            if passing:
                return passing
        return None


def _is_of_checkpoints(element: OperatorOutput) -> bool:
    return isinstance(element, CheckpointBarrier | CheckpointCancelled)


class EndedInput:
    """The input of a subtask that reads nothing: a source that had been read to its end before it was restored, or one
    whose blocking exchanges had."""

    has_ended_data = True
    has_ended = True

    def __init__(self) -> None:
        self._triggered: deque[CheckpointBarrier] = deque()

    def poll(self) -> Iterable[OperatorOutput] | None:
        """Barriers that were asked for, and nothing else."""
        return (self._triggered.popleft(),) if self._triggered else None

    def trigger(self, barrier: CheckpointBarrier) -> None:
        """The next element is the barrier."""
        self._triggered.append(barrier)

    def abort_checkpoint(self, checkpoint_id: int) -> None:
        """Barriers go out at once: there is none to drop."""

    def alignment(self) -> Alignment | None:
        """There is nothing to align."""
        return None

    def stop(self) -> None:
        """It has ended anyway."""

    def on_pause_over(self) -> None:
        """It asks for no pauses."""

    def close(self) -> None:
        """It holds nothing."""
