"""A channel that outlives its producers, against a plain model: each row once, in order, or an error that says why.

Method: hypothesis writes the story of one channel. A producer is a list of rows and control elements;
its attempts cut the rows at random and begin at the barrier of the latest completed checkpoint or before
what was asked for. Between any two elements the connection may break, the producer may be replaced, a
checkpoint may complete or abort, or the consumer may be restored from its latest completed checkpoint.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from common.elements import (
    CheckpointBarrier,
    ControlElement,
    EndOfData,
    EndOfPartition,
    StreamStatus,
    Watermark,
)
from penstock.errors import NotReproducible, PartitionUnavailable, TaskFailure
from penstock.partition_id import PartitionId
from taskmanager.kernels.row_checksum import rows_checksum
from taskmanager.network.credit import charge_of
from taskmanager.network.input_channel import InputChannel, Upstream
from taskmanager.network.kept_channel import (
    START,
    KeptChannelSpec,
    KeptInputChannel,
    RowPosition,
    SupplyListener,
)
from tests.support.exchange_slots import numbers


@dataclass
class Producer(Upstream):
    """One attempt as the channel sees it: what it was told."""

    granted: int = 0
    cancelled: list[bool] = field(default_factory=list)

    @override
    def grant(self, returned_bytes: int) -> None:
        self.granted += returned_bytes

    @override
    def cancel(self, *, is_complete: bool) -> None:
        self.cancelled.append(is_complete)


class Notes(SupplyListener):
    """What the channel has reported."""

    def __init__(self) -> None:
        self.disconnects: list[str] = []
        self.releases = 0

    @override
    def subscribed(self, channel: KeptInputChannel) -> None:
        """Nothing is waited for here."""

    @override
    def disconnected(self, channel: KeptInputChannel, reason: str) -> None:
        self.disconnects.append(reason)

    @override
    def released(self, channel: KeptInputChannel) -> None:
        self.releases += 1


class Consumer:
    """A channel with what its task has been handed out."""

    def __init__(self, start: RowPosition = START, *, reproducible: bool = True) -> None:
        self.notes = Notes()
        self.failures: list[Exception] = []
        self.rows: list[int] = []
        self.controls: list[ControlElement] = []
        self.attempt = 0
        self.channel = KeptInputChannel(
            0,
            "e0",
            1 << 30,
            spec=KeptChannelSpec("e0", 0, is_reproducible=reproducible, start=start),
            supply=self.notes,
            on_data=self._has_data,
            on_failure=self.failures.append,
        )
        self.producer = Producer()
        self.channel.connected(self.producer)

    def _has_data(self, _channel: InputChannel) -> None:
        """The test takes what there is by itself."""

    def replace(self) -> None:
        self.attempt += 1
        self.channel.producer_replaced("e0", PartitionId("e0", "v0", 0, self.attempt))
        self.reconnect()

    def reconnect(self) -> None:
        self.producer = Producer()
        self.channel.connected(self.producer)

    def send(self, *elements: pa.RecordBatch | ControlElement, row: int = -1) -> None:
        """Elements arrive; rows count on from ``row``, or from the first value of a batch."""
        for element in elements:
            if isinstance(element, pa.RecordBatch):
                offset = element.column(0)[0].as_py() if row < 0 else row
                self.channel.batch_arrived(element, offset, charge_of(element.nbytes))
            else:
                self.channel.control_arrived(element)

    def take(self) -> None:
        """The task takes all there is."""
        while self.channel.has_data:
            element = self.channel.take()
            if isinstance(element, pa.RecordBatch):
                self.rows += element.column(0).to_pylist()
            elif element is not None:
                self.controls.append(element)


def position_after(rows: int) -> RowPosition:
    """Of a channel whose rows are their own offsets."""
    return RowPosition(rows, rows_checksum(numbers(0, rows), 0) if rows else 0)


# ---------------------------------------------------------------- single stories


def test_what_has_arrived_is_read_without_a_connection() -> None:
    consumer = Consumer()
    consumer.send(numbers(0, 5), Watermark(3), numbers(5, 5))
    consumer.channel.connection_lost("the wire broke")
    consumer.take()
    assert consumer.rows == list(range(10))
    assert consumer.notes.disconnects == ["the wire broke"]
    assert consumer.channel.stream_row == 10
    assert not consumer.failures
    consumer.reconnect()
    consumer.send(Watermark(3), numbers(10, 2))
    consumer.take()
    assert consumer.rows == list(range(12))
    assert consumer.controls == [Watermark(3)]


def test_a_new_connection_sends_again_what_was_not_taken() -> None:
    consumer = Consumer()
    consumer.send(numbers(0, 4))
    consumer.take()
    consumer.send(numbers(4, 4))
    consumer.channel.connection_lost("x")
    assert consumer.channel.stream_row == 4
    consumer.reconnect()
    assert not consumer.channel.has_data
    consumer.send(numbers(2, 9))
    consumer.take()
    assert consumer.rows == list(range(11))
    assert consumer.channel.position == position_after(11)


def test_a_replaced_producer_begins_at_the_completed_checkpoint() -> None:
    consumer = Consumer()
    for start, checkpoint_id in ((0, 1), (5, 2), (10, 3)):
        consumer.send(numbers(start, 5), CheckpointBarrier(checkpoint_id, 0))
        consumer.take()
        consumer.channel.mark(checkpoint_id)
    consumer.channel.checkpoint_completed(2)
    consumer.channel.checkpoint_aborted(3)
    consumer.send(numbers(15, 5))
    consumer.take()
    old = consumer.producer
    consumer.replace()
    assert old.cancelled == [False]
    assert consumer.channel.stream_row == 10
    consumer.send(numbers(10, 7), numbers(17, 1), numbers(18, 12))
    consumer.take()
    assert consumer.rows == list(range(30))
    assert consumer.channel.position == position_after(30)


@pytest.mark.parametrize("reproducible", [True, False])
def test_rows_from_behind_a_barrier_are_left_out_only_if_they_come_again_as_they_were(
    reproducible: bool,
) -> None:
    """At least once: other channels' barriers come later, and rows are taken meanwhile."""
    consumer = Consumer(reproducible=reproducible)
    consumer.send(numbers(0, 5), CheckpointBarrier(1, 0), numbers(5, 3))
    consumer.take()
    mark = consumer.channel.mark(1)
    assert mark.rows == (8 if reproducible else 5)
    consumer.channel.checkpoint_completed(1)
    if reproducible:
        consumer.replace()
        assert consumer.channel.stream_row == 8
    else:
        with pytest.raises(PartitionUnavailable, match="rows 5 to 7"):
            consumer.replace()


def test_control_elements_are_not_told_twice() -> None:
    consumer = Consumer()
    consumer.send(
        numbers(0, 5), Watermark(4), StreamStatus(active=False), numbers(5, 5), Watermark(9)
    )
    consumer.send(StreamStatus(active=True))
    consumer.take()
    before = list(consumer.controls)
    consumer.replace()
    consumer.send(Watermark(2), StreamStatus(active=False), numbers(0, 10), Watermark(7))
    consumer.send(StreamStatus(active=True))
    consumer.take()
    assert consumer.controls == before
    consumer.send(Watermark(12), StreamStatus(active=False), numbers(10, 1))
    consumer.take()
    assert consumer.controls == [*before, Watermark(12), StreamStatus(active=False)]
    assert consumer.rows == list(range(11))


def test_a_barrier_among_rows_that_were_read_before_finds_them_being_compared() -> None:
    consumer = Consumer()
    consumer.send(numbers(0, 10))
    consumer.take()
    assert not consumer.channel.is_comparing
    consumer.replace()
    assert consumer.channel.is_comparing, "from the moment on at which other rows may come"
    consumer.send(numbers(0, 4), CheckpointBarrier(7, 0))
    consumer.take()
    assert consumer.controls == [CheckpointBarrier(7, 0)]
    assert consumer.channel.is_comparing
    consumer.channel.checkpoint_aborted(7)
    consumer.send(numbers(4, 6))
    consumer.take()
    assert not consumer.channel.is_comparing
    consumer.send(CheckpointBarrier(8, 0))
    consumer.take()
    assert consumer.channel.mark(8) == position_after(10)


def test_what_has_read_the_end_compares_nothing() -> None:
    consumer = Consumer()
    consumer.send(numbers(0, 10), EndOfData(), EndOfPartition())
    consumer.take()
    consumer.replace()
    assert not consumer.channel.is_comparing
    assert consumer.channel.mark(7) == position_after(10)


def test_a_consumer_ahead_of_a_restored_producer_drops_what_is_in_its_snapshot() -> None:
    """In mode at-least-once rows from behind the barrier are in it."""
    consumer = Consumer()
    consumer.send(numbers(0, 4), CheckpointBarrier(7, 0), numbers(4, 6))
    consumer.take()
    consumer.channel.mark(7)
    consumer.channel.checkpoint_completed(7)
    consumer.send(numbers(10, 4))
    consumer.take()
    consumer.replace()
    assert consumer.channel.stream_row == 10, "not 4: the rows up to 10 are in its snapshot"
    consumer.send(numbers(4, 12))  # the new attempt was restored at 4
    consumer.take()
    assert consumer.rows == list(range(16))


def test_a_barrier_that_comes_again_is_ignored() -> None:
    consumer = Consumer()
    consumer.send(numbers(0, 3), CheckpointBarrier(4, 0))
    consumer.take()
    consumer.channel.connection_lost("x")
    consumer.reconnect()
    consumer.send(CheckpointBarrier(4, 0), numbers(3, 1), CheckpointBarrier(5, 0))
    consumer.take()
    assert consumer.controls == [CheckpointBarrier(4, 0), CheckpointBarrier(5, 0)]


def test_other_rows_than_before_are_noticed_at_once() -> None:
    consumer = Consumer()
    consumer.send(numbers(0, 10))
    consumer.take()
    consumer.replace()
    consumer.send(numbers(1, 10), row=0)
    with pytest.raises(NotReproducible, match="rows 0 to 9: an operator of the producer"):
        consumer.take()
    assert consumer.rows == list(range(10)), "nothing of it has reached the task"


def test_the_rows_that_were_compared_are_named_also_where_a_checkpoint_has_completed_meanwhile() -> (
    None
):
    consumer = Consumer()
    consumer.send(numbers(0, 5), CheckpointBarrier(1, 0))
    consumer.take()
    consumer.channel.mark(1)
    consumer.send(numbers(5, 5))
    consumer.take()
    consumer.replace()
    consumer.channel.checkpoint_completed(1)
    consumer.send(numbers(1, 10), row=0)
    with pytest.raises(NotReproducible, match="rows 0 to 9: an operator of the producer"):
        consumer.take()


def test_the_same_rows_in_another_order_are_noticed() -> None:
    consumer = Consumer()
    consumer.send(numbers(0, 10))
    consumer.take()
    consumer.replace()
    consumer.send(numbers(5, 5), row=0)
    consumer.send(numbers(0, 5), row=5)
    with pytest.raises(NotReproducible):
        consumer.take()


def test_fewer_rows_than_before_are_noticed() -> None:
    consumer = Consumer()
    consumer.send(numbers(0, 10))
    consumer.take()
    consumer.replace()
    consumer.send(numbers(0, 9), EndOfData())
    with pytest.raises(NotReproducible, match="ends after 9 rows, though 10"):
        consumer.take()


def test_more_rows_than_before_are_noticed() -> None:
    consumer = Consumer()
    consumer.send(numbers(0, 10), EndOfData())
    consumer.take()
    consumer.replace()
    consumer.send(numbers(0, 11))
    with pytest.raises(NotReproducible, match="more than the 10 rows"):
        consumer.take()


def test_a_gap_is_an_error_of_ours() -> None:
    consumer = Consumer()
    consumer.send(numbers(0, 4))
    consumer.take()
    consumer.replace()
    consumer.send(numbers(2, 9))
    with pytest.raises(TaskFailure, match="rows 0 to 1 are missing"):
        consumer.take()


def test_the_end_comes_once() -> None:
    consumer = Consumer()
    consumer.send(numbers(0, 4), EndOfData())
    consumer.take()
    consumer.replace()
    consumer.send(numbers(0, 4), EndOfData(), EndOfPartition())
    consumer.take()
    assert consumer.controls == [EndOfData(), EndOfPartition()]
    assert consumer.producer.cancelled == [True]
    assert consumer.channel.is_finished


def test_an_ended_channel_lets_every_new_producer_go_at_once() -> None:
    consumer = Consumer()
    consumer.send(numbers(0, 4), EndOfData(), EndOfPartition())
    consumer.take()
    assert consumer.producer.cancelled == [True]
    consumer.replace()
    assert consumer.producer.cancelled == [True]
    assert consumer.channel.stream_row == 0, "a row that the new attempt is sure to have"
    consumer.channel.connection_lost("x")
    assert consumer.notes.disconnects == []
    consumer.send(numbers(0, 4), EndOfData(), EndOfPartition())
    assert not consumer.channel.has_data, "what it sends before it hears of it"


def test_a_producer_that_is_not_reproducible_can_only_be_replaced_where_nothing_was_read() -> None:
    consumer = Consumer(RowPosition(7, 0), reproducible=False)
    consumer.replace()
    consumer.send(numbers(7, 3))
    consumer.take()
    assert consumer.channel.position == RowPosition(10, 0)
    with pytest.raises(PartitionUnavailable, match="rows 7 to 9") as raised:
        consumer.replace()
    assert raised.value.partition == PartitionId("e0", "v0", 0, 2)


def test_a_released_partition_is_waited_for() -> None:
    consumer = Consumer()
    consumer.send(numbers(0, 4))
    consumer.channel.released()
    consumer.take()
    assert consumer.rows == [0, 1, 2, 3]
    assert consumer.notes.releases == 1
    assert consumer.notes.disconnects == []
    assert not consumer.failures


def test_a_closed_channel_is_silent() -> None:
    consumer = Consumer()
    consumer.channel.close()
    consumer.channel.connection_lost("x")
    consumer.channel.released()
    assert consumer.notes.disconnects == []
    assert consumer.notes.releases == 0


# ---------------------------------------------------------------- random stories


@dataclass
class Script:
    """What a reproducible producer emits: rows 0 .. n - 1, a control element before some of them."""

    rows: int
    watermarks: dict[int, int]  # before which row -> timestamp
    statuses: dict[int, bool]

    def elements(self, start: int, cuts: list[int]) -> list[Any]:
        """Elements from a row on, with the ends; a batch ends where a control element stands, or at a cut."""
        stops = {*cuts, *self.watermarks, *self.statuses, self.rows}
        found: list[Any] = []
        begin = start
        for row in range(start, self.rows + 1):
            if row in stops and row > begin:
                found.append(numbers(begin, row - begin))
                begin = row
            if row in self.watermarks:
                found.append(Watermark(self.watermarks[row]))
            if row in self.statuses:
                found.append(StreamStatus(active=self.statuses[row]))
        return [*found, EndOfData(), EndOfPartition()]


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    rows = draw(st.integers(0, 40))
    places = st.integers(0, rows)
    times = draw(st.dictionaries(places, st.just(0), max_size=6))
    return Script(
        rows,
        {row: 10 * row + 1 for row in times},
        draw(st.dictionaries(places, st.booleans(), max_size=4)),
    )


@dataclass
class Snapshot:
    """A completed checkpoint: where each side was."""

    producer_row: int
    consumer: RowPosition
    rows_before: int


class Story:
    """One channel, its producer's script, and everything that happens to them."""

    def __init__(self, script: Script, data: st.DataObject) -> None:
        self.script = script
        self.data = data
        self.consumer = Consumer()
        self.output: list[int] = []
        """Rows in the state of the consumer, over all its attempts."""
        self.wire: list[Any] = []
        self.sent_rows = 0
        self.completed = Snapshot(0, START, 0)
        self.pending: dict[int, Snapshot] = {}
        self.barrier_rows: dict[int, int] = {}
        self.next_checkpoint = 1
        self.connect(0)

    def connect(self, attempt_start: int) -> None:
        """A producer's attempt, restored at a row, serves the channel from the row it asks for."""
        self.attempt_start = attempt_start
        wanted = self.consumer.channel.stream_row
        first = self.data.draw(st.integers(min(attempt_start, wanted), wanted), label="sent from")
        cuts = self.data.draw(st.lists(st.integers(0, 40), max_size=6), label="cuts")
        self.wire = self.script.elements(first, cuts)
        self.sent_rows = first

    # -- what may happen

    def deliver(self) -> None:
        for _ in range(self.data.draw(st.integers(1, 4), label="elements")):
            if self.wire:
                element = self.wire.pop(0)
                self.consumer.send(element)
                if isinstance(element, pa.RecordBatch):
                    self.sent_rows = element.column(0)[-1].as_py() + 1

    def take(self) -> None:
        seen = len(self.consumer.controls)
        self.consumer.take()
        self.output += self.consumer.rows
        self.consumer.rows = []
        for control in self.consumer.controls[seen:]:
            if isinstance(control, CheckpointBarrier):
                checkpoint_id = control.checkpoint_id
                if self.consumer.channel.is_comparing:
                    self.consumer.channel.checkpoint_aborted(checkpoint_id)
                    continue
                self.consumer.channel.mark(checkpoint_id)
                self.pending[checkpoint_id] = Snapshot(
                    self.barrier_rows[checkpoint_id],
                    self.consumer.channel.position,
                    len(self.output),
                )

    def barrier(self) -> None:
        if (
            self.wire
            and isinstance(self.wire[-1], EndOfPartition)
            and self.wire[0] != EndOfPartition()
        ):
            self.take()
            self.barrier_rows[self.next_checkpoint] = max(self.sent_rows, self.attempt_start)
            self.consumer.send(CheckpointBarrier(self.next_checkpoint, 0))
            self.next_checkpoint += 1
            self.take()

    def end_checkpoint(self) -> None:
        if self.pending:
            checkpoint_id = self.data.draw(
                st.sampled_from(sorted(self.pending)), label="checkpoint"
            )
            snapshot = self.pending.pop(checkpoint_id)
            if self.data.draw(st.booleans(), label="completes"):
                self.completed = snapshot
                self.pending = {id: kept for id, kept in self.pending.items() if id > checkpoint_id}
                self.consumer.channel.checkpoint_completed(checkpoint_id)
            else:
                self.consumer.channel.checkpoint_aborted(checkpoint_id)

    def break_connection(self) -> None:
        self.consumer.channel.connection_lost("broken")
        if self.data.draw(st.booleans(), label="reads on"):
            self.take()
        self.consumer.reconnect()
        self.connect(self.attempt_start)

    def abort_all(self) -> None:
        for checkpoint_id in list(self.pending):
            del self.pending[checkpoint_id]
            self.consumer.channel.checkpoint_aborted(checkpoint_id)

    def replace_producer(self) -> None:
        self.abort_all()
        self.consumer.replace()
        self.connect(self.completed.producer_row)

    def restore_consumer(self) -> None:
        self.abort_all()
        self.consumer = Consumer(self.completed.consumer)
        self.output = self.output[: self.completed.rows_before]
        self.connect(self.attempt_start)

    def finish(self) -> None:
        while self.wire:
            self.consumer.send(self.wire.pop(0))
        self.take()


@given(scripts(), st.data())
def test_each_row_once_whatever_happens(script: Script, data: st.DataObject) -> None:
    story = Story(script, data)
    events = [
        story.deliver,
        story.take,
        story.barrier,
        story.end_checkpoint,
        story.break_connection,
        story.replace_producer,
        story.restore_consumer,
    ]
    for event in data.draw(st.lists(st.sampled_from(events), max_size=25), label="events"):
        event()
        position = story.consumer.channel.position
        assert story.output + story.consumer.rows == list(range(len(story.output)))
        assert story.consumer.channel.stream_row <= position.rows
    story.finish()
    assert story.output == list(range(script.rows))
    assert story.consumer.channel.position == position_after(script.rows)
    assert story.consumer.channel.is_finished
    assert not story.consumer.failures
    ends = [c for c in story.consumer.controls if isinstance(c, EndOfData | EndOfPartition)]
    assert ends == [EndOfData(), EndOfPartition()]
    marks = [c.timestamp_ms for c in story.consumer.controls if isinstance(c, Watermark)]
    assert marks == sorted(set(marks)), "a watermark that goes back or comes again is not told"


@given(st.integers(1, 30), st.integers(0, 29), st.lists(st.integers(0, 40), max_size=6))
def test_any_changed_row_is_noticed(rows: int, changed: int, cuts: list[int]) -> None:
    changed %= rows
    consumer = Consumer()
    consumer.send(numbers(0, rows))
    consumer.take()
    consumer.replace()
    values = [row + 1000 * (row == changed) for row in range(rows)]
    bounds = sorted({0, rows, *(cut for cut in cuts if cut < rows)})
    for start, stop in itertools.pairwise(bounds):
        piece = pa.record_batch([pa.array(values[start:stop], pa.int64())], names=["x"])
        consumer.send(piece, row=start)
    with pytest.raises(NotReproducible):
        consumer.take()
