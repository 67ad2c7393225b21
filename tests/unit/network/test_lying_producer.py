"""A producer that is declared deterministic and is not: what its consumers have at the end is one telling of it, whole.

Method: hypothesis writes the story of one producer and two consumers. Each attempt of the producer deals its rows out
otherwise than the one before. A checkpoint completes when both consumers have taken their snapshots, as the
job's would. A consumer that notices the lie, or fails for another reason, goes back to the latest completed checkpoint
and reads what the present attempt has sent. Each row must be in the state of one consumer, once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from common.elements import CheckpointBarrier
from penstock.errors import NotReproducible
from taskmanager.network.kept_channel import START, RowPosition
from tests.unit.network.test_kept_channel import Consumer

ROWS = 24
CONSUMERS = (0, 1)


@dataclass
class Snapshot:
    """A checkpoint: rows the producer had sent in all and to each consumer, and the state of each consumer."""

    sent: int = 0
    sent_to: tuple[int, ...] = (0, 0)
    positions: dict[int, RowPosition] = field(
        default_factory=lambda: dict.fromkeys(CONSUMERS, START)
    )
    states: dict[int, list[int]] = field(default_factory=lambda: {index: [] for index in CONSUMERS})

    @property
    def is_whole(self) -> bool:
        return len(self.positions) == len(CONSUMERS)


class Attempt:
    """One attempt of the producer: what it has sent to each consumer since it began, to be read again."""

    def __init__(self, number: int, begin: Snapshot) -> None:
        self.number = number
        self.sent = begin.sent
        self.sent_to = list(begin.sent_to)
        self.logs: list[list[tuple[int, int | CheckpointBarrier]]] = [[] for _ in CONSUMERS]

    def emit(self) -> None:
        if self.sent < ROWS:
            reader = (self.sent * 7 + self.number * (self.sent % 3)) % 5 % len(CONSUMERS)
            self.logs[reader].append((self.sent_to[reader], self.sent))
            self.sent_to[reader] += 1
            self.sent += 1

    def emit_barrier(self, checkpoint_id: int) -> None:
        for reader in CONSUMERS:
            self.logs[reader].append((self.sent_to[reader], CheckpointBarrier(checkpoint_id, 0)))


class Story:
    def __init__(self) -> None:
        self.completed = Snapshot()
        self.pending: dict[int, Snapshot] = {}
        self.next_checkpoint = 1
        self.attempt = Attempt(0, self.completed)
        self.consumers = [Consumer() for _ in CONSUMERS]
        self.states: list[list[int]] = [[] for _ in CONSUMERS]
        self.read_to = [0, 0]
        self.lies_noticed = 0

    def emit(self) -> None:
        for _ in range(3):
            self.attempt.emit()

    def barrier(self) -> None:
        attempt = self.attempt
        self.pending[self.next_checkpoint] = Snapshot(
            attempt.sent, tuple(attempt.sent_to), positions={}, states={}
        )
        attempt.emit_barrier(self.next_checkpoint)
        self.next_checkpoint += 1

    def read(self, reader: int, count: int = 4) -> None:
        log = self.attempt.logs[reader]
        for row, element in log[self.read_to[reader] :][:count]:
            self.read_to[reader] += 1
            consumer = self.consumers[reader]
            if isinstance(element, int):
                batch = pa.record_batch([pa.array([element], pa.int64())], names=["x"])
                consumer.send(batch, row=row)
            else:
                consumer.send(element)
            try:
                consumer.take()
            except NotReproducible:
                self.lies_noticed += 1
                self.restore(reader)
                return
            self.states[reader] += consumer.rows
            consumer.rows = []
            if isinstance(element, CheckpointBarrier) and element in consumer.controls:
                self.snapshot(reader, element.checkpoint_id)

    def snapshot(self, reader: int, checkpoint_id: int) -> None:
        pending = self.pending.get(checkpoint_id)
        if pending is None or reader in pending.positions:
            return
        channel = self.consumers[reader].channel
        if channel.is_comparing:
            self.abort(checkpoint_id)
            return
        pending.positions[reader] = channel.mark(checkpoint_id)
        pending.states[reader] = list(self.states[reader])
        if pending.is_whole:
            self.completed = pending
            self.pending = {id: kept for id, kept in self.pending.items() if id > checkpoint_id}
            for consumer in self.consumers:
                consumer.channel.checkpoint_completed(checkpoint_id)

    def abort(self, checkpoint_id: int) -> None:
        del self.pending[checkpoint_id]
        for consumer in self.consumers:
            consumer.channel.checkpoint_aborted(checkpoint_id)

    def abort_all(self) -> None:
        for checkpoint_id in list(self.pending):
            self.abort(checkpoint_id)

    def replace_producer(self) -> None:
        self.abort_all()
        self.attempt = Attempt(self.attempt.number + 1, self.completed)
        self.read_to = [0, 0]
        for consumer in self.consumers:
            consumer.replace()

    def restore(self, reader: int) -> None:
        self.abort_all()
        self.consumers[reader] = Consumer(self.completed.positions[reader])
        self.states[reader] = list(self.completed.states[reader])
        self.read_to[reader] = 0

    def finish(self) -> None:
        while self.attempt.sent < ROWS:
            self.attempt.emit()
        for reader in CONSUMERS:
            while self.read_to[reader] < len(self.attempt.logs[reader]):
                self.read(reader)


@given(st.data())
def test_what_is_read_is_one_telling_whole(data: st.DataObject) -> None:
    story = Story()
    events = [
        story.emit,
        story.emit,
        story.barrier,
        lambda: story.read(0),
        lambda: story.read(1),
        story.replace_producer,
        lambda: story.restore(0),
        lambda: story.restore(1),
    ]
    for event in data.draw(st.lists(st.sampled_from(events), max_size=40), label="events"):
        event()
    story.finish()
    assert sorted(story.states[0] + story.states[1]) == list(range(ROWS))


def test_a_checkpoint_does_not_hide_a_lie() -> None:
    """Its barrier comes among rows that are being compared, and the lie is behind it."""
    story = Story()
    for _ in range(3):
        story.emit()
    story.read(0, 9)
    story.read(1, 9)
    story.replace_producer()
    story.attempt.emit()
    story.barrier()
    for _ in range(3):
        story.emit()
    story.read(0, 20)
    story.read(1, 20)
    assert story.completed.sent == 0
    story.finish()
    assert story.lies_noticed
    assert sorted(story.states[0] + story.states[1]) == list(range(ROWS))
