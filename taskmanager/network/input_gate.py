"""The input of one subtask: takes turns over its channels and merges their control elements (pure).

A record enters its chain here. ``poll`` goes round the channels that have something, one element of
each in turn. Watermarks and idleness come out merged; the end of a channel's data comes out as
``OriginEnded``, and once all channels have ended their data as one ``EndOfData``. A checkpoint barrier
comes out once the aligner lets it; until then channels that have delivered it may be blocked: they
are not read, so their credit stays ungranted. The same goes for channels that wait for others to be read first,
to the end of their data. Latency markers come out as they came.

All methods run on the mailbox thread; ``on_available`` may be called from within a producer's
``emit``, so it must only note that there is work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

import pyarrow as pa

from common.elements import (
    MAX_TIMESTAMP_MS,
    CheckpointBarrier,
    CheckpointCancelled,
    ControlElement,
    EndOfData,
    EndOfPartition,
    OriginEnded,
    StreamElement,
    StreamStatus,
    Watermark,
)
from penstock.errors import InvariantViolation, TaskFailure
from taskmanager.alignment.barrier_aligner import (
    AlignerEffect,
    BarrierAligner,
    BlockChannel,
    CancelCheckpoint,
    StartCheckpoint,
    UnblockChannels,
)
from taskmanager.alignment.watermark_merger import WatermarkMerger
from taskmanager.network.input_channel import InputChannel
from taskmanager.network.kept_channel import (
    KeptChannelSpec,
    KeptInputChannel,
    RowPosition,
    SupplyListener,
)
from taskmanager.network.result_partition import ExchangeCounters


@dataclass(frozen=True, slots=True)
class ChannelSpec:
    """What a gate has to know of a channel.

    Attributes:
        name: which subpartition of which producer it reads; also its origin.
        carries_barriers: False on blocking edges, whose producers have finished.
        kept: None on pipelined edges.
        is_first: it is read to the end of its data before those of which this is not said.
        follows: while it waits for those it holds no watermark back: it goes on where they end.
        windows: its credit, in windows.
    """

    name: str
    carries_barriers: bool = True
    kept: KeptChannelSpec | None = None
    is_first: bool = False
    follows: bool = False
    windows: int = 1


def _ignore_release(_channels: Sequence[InputChannel]) -> None:
    """Nobody connects the channels."""


class InputGate:
    """Reads the channels of one subtask.

    Args:
        supply: is told when a kept channel has lost its producer; needed where there are such channels.
        on_available: ``poll`` may have something after it had nothing.
        on_error: called once, when a channel cannot go on.
        on_release: called once with the channels when they have been closed.
        is_exactly_once: channels are blocked while barriers are being aligned.
        first_checkpoint_id: barriers of checkpoints before this one are not meant for the subtask.
        now_ms: the wall clock, for the times of alignments.
    """

    def __init__(
        self,
        specs: Sequence[ChannelSpec],
        credit_bytes: int,
        *,
        counters: ExchangeCounters,
        supply: SupplyListener | None = None,
        on_available: Callable[[], None],
        on_error: Callable[[Exception], None],
        on_release: Callable[[Sequence[InputChannel]], None] = _ignore_release,
        is_exactly_once: bool = True,
        first_checkpoint_id: int = 0,
        now_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        self._counters = counters
        self._on_available = on_available
        self._on_error = on_error
        self._on_release = on_release
        self.origins = tuple(spec.name for spec in specs)
        self.current_channel = 0
        self.channels = [
            self._new_channel(index, spec, credit_bytes * spec.windows, supply)
            for index, spec in enumerate(specs)
        ]
        self.kept = tuple(c for c in self.channels if isinstance(c, KeptInputChannel))
        """The channels that can be read again."""
        self._channel_of = dict(zip(self.origins, self.channels, strict=True))
        self._round: deque[InputChannel] = deque()
        self._blocked: set[int] = set()
        self._merger = WatermarkMerger(len(self.channels))
        self._aligner = BarrierAligner(
            [index for index, spec in enumerate(specs) if spec.carries_barriers],
            is_exactly_once=is_exactly_once,
            first_id=first_checkpoint_id,
        )
        self._now_ms = now_ms
        self.last_start: StartCheckpoint | None = None
        """How the alignment of the barrier that came out last began."""
        self._outputs: deque[StreamElement | OriginEnded] = deque()
        self._data_ended = [False] * len(self.channels)
        self._first = {index for index, spec in enumerate(specs) if spec.is_first}
        """Channels that others wait for, as long as they have not ended their data."""
        self._held = set(range(len(specs))) - self._first if self._first else set[int]()
        self._history = tuple(sorted(self._first))
        self._following = [index for index in sorted(self._held) if specs[index].follows]
        for index in self._following:
            self._merger.on_status(index, active=False)
        self.on_loaded: Sequence[Callable[[], None]] = ()
        """Called once those that are read first have been read: nothing else is held any more."""
        self._finished_count = 0
        self._is_released = False
        self._has_failed = False
        if not self.channels:
            self._outputs.append(EndOfData())

    def _new_channel(
        self, index: int, spec: ChannelSpec, credit_bytes: int, supply: SupplyListener | None
    ) -> InputChannel:
        if spec.kept is None:
            return InputChannel(
                index,
                spec.name,
                credit_bytes,
                on_data=self._channel_has_data,
                on_failure=self._channel_failed,
            )
        if supply is None:
            raise InvariantViolation(f"nobody connects {spec.name} again")
        return KeptInputChannel(
            index,
            spec.name,
            credit_bytes,
            spec=spec.kept,
            supply=supply,
            on_data=self._channel_has_data,
            on_failure=self._channel_failed,
        )

    @property
    def current_origin(self) -> str:
        """The channel that the element polled last came from."""
        return self.origins[self.current_channel] if self.origins else ""

    def has_waiting(self, origin: str) -> bool:
        """True when something of this channel has arrived and was not polled yet."""
        channel = self._channel_of.get(origin)
        return channel is not None and channel.has_data

    @property
    def is_loading(self) -> bool:
        """True while channels wait for others to end their data."""
        return bool(self._first)

    def holds(self, channel: InputChannel) -> bool:
        """Whether a channel is not read yet, since others are read first."""
        return channel.index in self._held

    def load(self) -> tuple[int, int]:
        """Bytes that have come and are not taken yet, and bytes that may be under way to here at most."""
        open_credits = [channel.credit for channel in self.channels if not channel.is_finished]
        queued = sum(credit.held_bytes for credit in open_credits)
        return queued, sum(credit.window for credit in open_credits)

    @property
    def has_data(self) -> bool:
        """True when ``poll`` may have something."""
        return bool(self._round or self._outputs)

    @property
    def has_ended_data(self) -> bool:
        """True once every channel has ended its data and ``poll`` has handed out everything."""
        return all(self._data_ended) and not self._outputs

    @property
    def is_finished(self) -> bool:
        """True once every channel has ended and ``poll`` has handed out everything."""
        return self._finished_count == len(self.channels) and not self._outputs

    def poll(self) -> StreamElement | OriginEnded | None:
        """The next element, or None when nothing has arrived.

        Raises:
            TaskFailure: a channel breaks the rules of the exchange.
        """
        turns = self._round
        while not self._outputs:
            if not turns:
                return None
            channel = turns.popleft()
            self.current_channel = channel.index
            element = channel.take()
            channel.is_queued = False
            if isinstance(element, pa.RecordBatch):
                self._queue(channel)
                self._counters.records_in += element.num_rows
                self._counters.bytes_in += channel.taken_bytes
                return element
            if element is not None:
                self._control(channel, element)
            self._queue(channel)
        return self._outputs.popleft()

    def trigger(self, barrier: CheckpointBarrier) -> None:
        """Starts a checkpoint whose barrier no producer is left to send, or could.

        It is the next element where every channel that carries barriers has ended.
        """
        self._apply(self._aligner.triggered(barrier, self._now_ms(), self._counters.bytes_in))

    def kept_channel(self, edge_id: str, producer_index: int) -> KeptInputChannel:
        """The channel of a producer on an edge that keeps its rows.

        Raises:
            InvariantViolation: there is none.
        """
        for channel in self.kept:
            if (channel.spec.edge_id, channel.spec.producer_index) == (edge_id, producer_index):
                return channel
        raise InvariantViolation(
            f"producer {producer_index} of {edge_id} is no producer that keeps its rows"
        )

    def comparing(self) -> KeptInputChannel | None:
        """A channel that reads rows again which are in the state, and has not compared them all yet."""
        return next((channel for channel in self.kept if channel.is_comparing), None)

    def mark(self, checkpoint_id: int) -> list[RowPosition]:
        """The snapshot of a checkpoint is being taken: what has been handed out is in it.

        Returns:
            Where each channel of ``kept`` is read on by a task that is restored from it.
        """
        return [channel.mark(checkpoint_id) for channel in self.kept]

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """A checkpoint is complete: nothing before it will be read again."""
        for channel in self.kept:
            channel.checkpoint_completed(checkpoint_id)

    def abort_checkpoint(self, checkpoint_id: int) -> None:
        """A checkpoint has been given up: nothing waits for its barriers any more."""
        for channel in self.kept:
            channel.checkpoint_aborted(checkpoint_id)
        self._apply(self._aligner.aborted(checkpoint_id))

    def release(self) -> None:
        """Drops what waits and lets the producers know that nobody reads."""
        if self._is_released:
            return
        self._is_released = True
        self._round.clear()
        self._outputs.clear()
        for channel in self.channels:
            channel.close()
        self._on_release(self.channels)

    def _control(self, channel: InputChannel, element: ControlElement) -> None:
        index = channel.index
        outputs = self._outputs
        match element:
            case Watermark(timestamp_ms):
                if timestamp_ms == MAX_TIMESTAMP_MS and self._first and self._following:
                    return  # the end of a history is not that of time: others go on from there
                outputs.extend(self._merger.on_watermark(index, timestamp_ms))
            case StreamStatus(active):
                outputs.extend(self._merger.on_status(index, active=active))
            case EndOfData():
                self._end_data(channel)
            case EndOfPartition():
                if not self._data_ended[index]:
                    raise TaskFailure(f"{channel.name} ended before the end of its data")
                self._finished_count += 1
                self._apply(self._aligner.channel_ended(index))
            case CheckpointBarrier():
                self._apply(
                    self._aligner.barrier_arrived(
                        index, element, self._now_ms(), self._counters.bytes_in
                    )
                )
            case CheckpointCancelled(checkpoint_id):
                self._apply(self._aligner.cancelled(index, checkpoint_id))
            case _:
                outputs.append(element)

    def _apply(self, effects: list[AlignerEffect]) -> None:
        for effect in effects:
            match effect:
                case BlockChannel(channel):
                    self._blocked.add(channel)
                case UnblockChannels():
                    blocked, self._blocked = self._blocked, set()
                    for channel in sorted(blocked):
                        self._queue(self.channels[channel])
                case StartCheckpoint(barrier):
                    self.last_start = effect
                    self._outputs.append(barrier)
                case CancelCheckpoint(checkpoint_id):
                    self._outputs.append(CheckpointCancelled(checkpoint_id))
                case _:
                    assert_never(effect)

    def _queue(self, channel: InputChannel) -> None:
        """Puts a channel into the round where it has something and may be read."""
        index = channel.index
        if (
            channel.has_data
            and not channel.is_queued
            and index not in self._blocked
            and index not in self._held
        ):
            channel.is_queued = True
            self._round.append(channel)

    def _end_data(self, channel: InputChannel) -> None:
        index = channel.index
        if self._data_ended[index]:
            raise TaskFailure(f"{channel.name} ended its data twice")
        self._data_ended[index] = True
        self._outputs.append(OriginEnded(self.origins[index]))
        if self._first:
            self._note_loaded(index)
        changes = self._merger.on_end(index)
        if all(self._data_ended):
            # The chain moves to the end of time by itself before it ends its data.
            self._outputs.append(EndOfData())
        else:
            self._outputs.extend(changes)

    def _note_loaded(self, index: int) -> None:
        """A channel has ended its data: behind the last of those that are read first come the others."""
        self._first.discard(index)
        if self._first:
            return
        if self._following:
            self._outputs.extend(self._merger.reach(self._history))
        for following in self._following:
            self._outputs.extend(self._merger.on_status(following, active=True))
        held, self._held = self._held, set()
        for channel in sorted(held):
            self._queue(self.channels[channel])
        connects, self.on_loaded = self.on_loaded, ()
        for connect in connects:
            connect()

    def _channel_has_data(self, channel: InputChannel) -> None:
        if self._is_released:
            return
        was_empty = not self.has_data
        self._queue(channel)
        if was_empty and self.has_data:
            self._on_available()

    def _channel_failed(self, error: Exception) -> None:
        if not self._has_failed and not self._is_released:
            self._has_failed = True
            self._on_error(error)
