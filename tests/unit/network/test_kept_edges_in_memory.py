"""Kept edges over a network: connections that break, producers that die and come back, consumers restored.

Both ends are real: cached partitions, connections, gates. Time and network are simulated. Covered: loss of
the connection in every phase; a producer replaced in the same slot, in another, before it has registered,
and after its consumer has read the end; partitions that are gone; peers that never come back; consumers
restored at a mark; and random stories of several producers with checkpoints in between.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from common.elements import CheckpointBarrier, EndOfData, Watermark
from common.pb import internal_pb2
from penstock.errors import NotReproducible, PartitionUnavailable
from penstock.partition_id import PartitionId
from penstock.pb import checkpoint_pb2
from taskmanager.network.input_gate import InputGate
from taskmanager.network.result_partition import ResultPartition
from tests.support.exchange_slots import (
    BLOCKING,
    CACHING,
    Simulation,
    Slot,
    attempt_id,
    configuration,
    drain,
    end,
    input_edge,
    numbers,
    output_edge,
    rows_of,
)

MS = 1_000_000
EDGE = output_edge(partition_type=CACHING)


def description(slot: Slot, attempt: internal_pb2.AttemptId) -> internal_pb2.InputChannel:
    """Subpartition 0 of an attempt's partition."""
    (channel,) = input_edge([(slot.endpoint, attempt)]).channels
    return channel


class Pair:
    """One producer and one consumer on a caching edge, in one slot or in two."""

    def __init__(self, *, local: bool = False, seed: int = 1, reproducible: bool = True) -> None:
        self.simulation = Simulation(seed)
        self.config = configuration(network_buffer_timeout_ms=0)
        self.consumer = self.simulation.slot("c", self.config)
        self.producer = self.consumer if local else self.simulation.slot("p", self.config)
        self.attempt = 0
        self.partition = self.producer.partition(EDGE, attempt_id("v0"))
        edge = input_edge(
            [(self.producer.endpoint, attempt_id("v0"))],
            partition_type=CACHING,
            reproducible=reproducible,
        )
        self.gate = self.consumer.gate(edge)
        self.simulation.loop.run()

    @property
    def channel(self) -> Any:
        return self.gate.kept[0]

    def emit(self, start: int, count: int) -> None:
        self.partition.emit(numbers(start, count))
        self.partition.flush()

    def read(self) -> list[int]:
        self.simulation.pass_time(20 * MS)
        found = rows_of(drain(self.gate))
        self.simulation.pass_time(20 * MS)
        return found

    def break_wire(self) -> None:
        for link in self.simulation.network.links:
            link.lose("the wire broke")
        self.simulation.loop.run()

    def new_attempt(self, slot: Slot, *, first_row: int = 0) -> None:
        """The producer runs again; the consumer has not been told."""
        self.attempt += 1
        self.producer = slot
        position = checkpoint_pb2.ChannelPosition(edge_id="e0", index=0, rows=first_row)
        attempt = attempt_id("v0", 0, self.attempt)
        self.partition = slot.partition(EDGE, attempt, [position])

    def tell_consumer(self) -> None:
        attempt = attempt_id("v0", 0, self.attempt)
        self.consumer.exchange.replace_producer(self.gate, description(self.producer, attempt))


@pytest.fixture(params=[True, False], ids=["local", "remote"])
def local(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# ---------------------------------------------------------------- connections


def test_a_broken_connection_is_made_again_and_loses_nothing() -> None:
    pair = Pair()
    pair.emit(0, 10)
    assert pair.read() == list(range(10))
    pair.emit(10, 10)
    pair.break_wire()
    pair.emit(20, 10)
    pair.simulation.pass_time(100 * MS)
    assert pair.read() == list(range(10, 30))
    end(pair.partition)
    pair.read()
    assert pair.gate.is_finished
    assert pair.partition.is_drained()
    assert not pair.consumer.errors
    assert not pair.producer.errors


def test_a_barrier_that_was_lost_with_the_connection_comes_again() -> None:
    pair = Pair()
    pair.emit(0, 10)
    pair.partition.emit_control(CheckpointBarrier(1, 0))
    pair.break_wire()
    pair.simulation.pass_time(100 * MS)
    found = drain(pair.gate)
    assert rows_of(found) == list(range(10))
    assert found[-1] == CheckpointBarrier(1, 0)


def test_pauses_grow_and_the_peer_is_reported_once() -> None:
    pair = Pair()
    pair.simulation.kill(pair.producer)
    pair.simulation.loop.run()
    links = len(pair.simulation.network.links)
    tries = []
    for _ in range(60):
        pair.simulation.pass_time(50 * MS)
        tries.append(len(pair.simulation.network.links) - links)
    # behind 50, 100, 200, 400, 800 ms, then every second (and the time that a refusal takes)
    assert [tries[index] for index in (0, 1, 4, 9, 18, 35, 56)] == [0, 1, 2, 3, 4, 5, 6]
    assert pair.consumer.unreachable == ["p"]
    assert not pair.consumer.errors


def test_a_peer_that_was_reached_again_is_reported_again() -> None:
    pair = Pair()
    for times in (1, 2, 3):
        pair.break_wire()
        assert pair.consumer.unreachable == ["p"] * times
        assert pair.producer.unreachable == ["c"] * times
        pair.emit(times, 1)
        pair.simulation.pass_time(2000 * MS)


def test_nothing_worked_until_the_deadline() -> None:
    pair = Pair()
    pair.simulation.kill(pair.producer)
    pair.simulation.pass_time(599_000 * MS)
    assert not pair.consumer.errors
    pair.simulation.pass_time(2_000 * MS)
    (error,) = pair.consumer.errors
    assert isinstance(error, PartitionUnavailable)
    assert error.partition == PartitionId("e0", "v0", 0, 0)
    assert "cannot be reached" in str(error)


def test_a_disconnected_channel_holds_up_no_other() -> None:
    simulation = Simulation(3)
    config = configuration(network_buffer_timeout_ms=0)
    consumer, dead, alive = (simulation.slot(name, config) for name in ("c", "d", "a"))
    partitions = [
        slot.partition(EDGE, attempt_id("v0", index)) for index, slot in enumerate((dead, alive))
    ]
    producers = [(dead.endpoint, attempt_id("v0", 0)), (alive.endpoint, attempt_id("v0", 1))]
    gate = consumer.gate(input_edge(producers, partition_type=CACHING))
    simulation.pass_time(10 * MS)
    for partition in partitions:
        partition.emit_control(Watermark(5))
    simulation.pass_time(10 * MS)
    assert drain(gate) == [Watermark(5)]
    simulation.kill(dead)
    partitions[1].emit_control(Watermark(9))
    partitions[1].emit(numbers(0, 5))
    partitions[1].flush()
    simulation.pass_time(100 * MS)
    found = drain(gate)
    assert rows_of(found) == [0, 1, 2, 3, 4]
    assert Watermark(9) not in found, "its event time waits"


@pytest.mark.parametrize("near", ["hung", "successor", "neither"])
def test_a_consumer_that_hangs_holds_up_nobody_once_another_has_taken_its_place(near: str) -> None:
    """Its host is frozen, or cut off from the JobManager alone: its connections live on."""
    simulation = Simulation(2)
    config = configuration(buffer_timeout_ms=0, network_credit_bytes=1000)
    producer, other = simulation.slot("p", config), simulation.slot("c", config)
    edge = input_edge([(producer.endpoint, attempt_id("v0"))], partition_type=CACHING)
    partition = producer.partition(EDGE, attempt_id("v0"))
    first = producer if near == "hung" else other
    hung = first.gate(edge)
    simulation.loop.run()
    row = 0
    while partition.is_available():
        partition.emit(numbers(row, 10))
        row += 10
        simulation.loop.run()
    second = producer if near == "successor" else simulation.slot("d", config)
    successor = second.gate(edge, attempt=1)
    found: list[Any] = []
    for _ in range(30):
        simulation.pass_time(20 * MS)
        found += rows_of(drain(successor))
        simulation.pass_time(20 * MS)
        assert partition.is_available()
        partition.emit(numbers(row, 10))
        row += 10
    assert found == list(range(row - 10))
    assert not second.errors
    # It has nothing more to read, nor has it when it asks again.
    drain(hung)
    hung.release()
    late = first.gate(edge)
    simulation.pass_time(100 * MS)
    assert not drain(late)
    assert "later attempt" in str(first.errors[0])
    assert partition.is_available()


def test_a_barrier_that_is_void_does_not_block_a_restarted_consumer() -> None:
    """One of its producers has not heard yet that the checkpoint was given up, the other sends no barrier."""
    simulation = Simulation(1)
    config = configuration(buffer_timeout_ms=0)
    slots = [simulation.slot(name, config) for name in "pq"]
    partitions = [slot.partition(EDGE, attempt_id("v0", i)) for i, slot in enumerate(slots)]
    for partition in partitions:
        partition.emit_control(CheckpointBarrier(5, 0))
        partition.emit(numbers(0, 10))
    partitions[1].checkpoint_aborted(5)
    producers = [(slot.endpoint, attempt_id("v0", i)) for i, slot in enumerate(slots)]
    edge = input_edge(producers, partition_type=CACHING)
    consumer = simulation.slot("c", config)
    gate = consumer.gate(edge, attempt=1, first_checkpoint_id=6)
    simulation.pass_time(100 * MS)
    assert sorted(rows_of(drain(gate))) == sorted([*range(10)] * 2)
    for partition in partitions:
        partition.emit_control(CheckpointBarrier(6, 0))
    simulation.pass_time(100 * MS)
    assert drain(gate) == [CheckpointBarrier(6, 0)]


# ---------------------------------------------------------------- producers


def test_a_failed_producer_does_not_touch_its_consumer(local: bool) -> None:
    pair = Pair(local=local)
    pair.emit(0, 10)
    assert pair.read() == list(range(10))
    pair.emit(10, 5)
    pair.simulation.loop.run()
    pair.partition.release()
    pair.simulation.pass_time(10_000 * MS)
    assert pair.read() == [10, 11, 12, 13, 14]
    assert not pair.consumer.errors
    pair.new_attempt(pair.producer)
    pair.tell_consumer()
    pair.emit(0, 7)
    pair.emit(7, 20)
    assert pair.read() == list(range(15, 27))
    end(pair.partition)
    pair.read()
    assert pair.gate.is_finished
    assert pair.partition.is_drained()
    assert not pair.consumer.errors


def test_a_producer_comes_back_in_another_slot() -> None:
    pair = Pair()
    pair.emit(0, 10)
    pair.read()
    pair.simulation.kill(pair.producer)
    pair.simulation.pass_time(3_000 * MS)
    pair.new_attempt(pair.simulation.slot("q", pair.config))
    pair.emit(0, 12)
    pair.tell_consumer()
    assert pair.read() == [10, 11]
    pair.simulation.pass_time(3_000 * MS)
    assert pair.simulation.slots[0].exchange.next_deadline_ns is None, "the old one is forgotten"


def test_the_consumer_may_be_told_before_the_producer_is_there(local: bool) -> None:
    pair = Pair(local=local)
    pair.emit(0, 4)
    pair.read()
    pair.partition.release()
    pair.attempt = 1
    pair.tell_consumer()
    assert pair.read() == []
    pair.attempt = 0
    pair.new_attempt(pair.producer)
    pair.emit(0, 6)
    assert pair.read() == [4, 5]


def test_an_older_attempt_replaces_nothing() -> None:
    pair = Pair()
    pair.new_attempt(pair.producer)
    pair.tell_consumer()
    pair.emit(0, 3)
    assert pair.read() == [0, 1, 2]
    stale = description(pair.producer, attempt_id("v0", 0, 0))
    pair.consumer.exchange.replace_producer(pair.gate, stale)
    pair.emit(3, 2)
    assert pair.read() == [3, 4]


def test_other_rows_fail_the_consumer(local: bool) -> None:
    pair = Pair(local=local)
    pair.emit(0, 10)
    pair.read()
    pair.new_attempt(pair.producer)
    pair.tell_consumer()
    pair.emit(1, 10)
    with pytest.raises(NotReproducible):
        pair.read()


@pytest.mark.parametrize("is_there", [False, True])
def test_a_consumer_that_has_read_the_end_lets_a_new_producer_finish(
    local: bool, is_there: bool
) -> None:
    pair = Pair(local=local)
    pair.emit(0, 10)
    end(pair.partition)
    assert pair.read() == list(range(10))
    assert pair.gate.is_finished
    if is_there:
        pair.new_attempt(pair.producer)
        pair.tell_consumer()
    else:
        pair.attempt = 1
        pair.tell_consumer()
        pair.simulation.pass_time(10 * MS)
        pair.attempt = 0
        pair.new_attempt(pair.producer)
    pair.simulation.pass_time(10 * MS)
    pair.emit(0, 10)
    end(pair.partition)
    pair.simulation.pass_time(10 * MS)
    assert pair.partition.is_drained()
    assert not pair.consumer.errors


def test_a_consumer_may_be_ahead_of_a_restored_producer() -> None:
    """In mode at-least-once the consumer's mark lies behind the producer's."""
    pair = Pair()
    pair.emit(0, 5)
    pair.partition.emit_control(CheckpointBarrier(1, 0))
    pair.emit(5, 15)
    pair.read()
    pair.gate.mark(1)
    pair.gate.checkpoint_completed(1)
    pair.partition.release()
    pair.new_attempt(pair.producer, first_row=5)
    pair.tell_consumer()
    pair.emit(5, 10)
    assert pair.read() == []
    pair.emit(15, 10)
    assert pair.read() == list(range(20, 25))


# ---------------------------------------------------------------- what is gone


def test_rows_that_are_gone_are_missing(local: bool) -> None:
    pair = Pair(local=local)
    pair.emit(0, 10)
    pair.partition.emit_control(CheckpointBarrier(1, 0))
    pair.emit(10, 5)
    pair.read()
    pair.partition.checkpoint_completed(1)
    late = pair.consumer.gate(
        input_edge([(pair.producer.endpoint, attempt_id("v0"))], partition_type=CACHING)
    )
    pair.simulation.pass_time(10 * MS)
    (error,) = pair.consumer.errors
    assert isinstance(error, PartitionUnavailable)
    assert error.partition == PartitionId("e0", "v0", 0, 0)
    late.release()


def test_a_consumer_is_restored_at_its_row(local: bool) -> None:
    pair = Pair(local=local)
    pair.emit(0, 10)
    pair.partition.emit_control(CheckpointBarrier(1, 0))
    pair.emit(10, 5)
    pair.read()
    pair.gate.release()
    start = checkpoint_pb2.ChannelPosition(edge_id="e0", index=0, rows=10, checksum=77)
    edge = input_edge([(pair.producer.endpoint, attempt_id("v0"))], partition_type=CACHING)
    pair.partition.checkpoint_completed(1)
    pair.gate = pair.consumer.gate(edge, positions=[start])
    assert pair.channel.position.checksum == 77
    pair.emit(15, 3)
    assert pair.read() == list(range(10, 18))


def test_a_released_gate_leaves_nothing_behind() -> None:
    pair = Pair()
    pair.simulation.kill(pair.producer)
    pair.simulation.loop.run()
    assert pair.consumer.exchange.next_deadline_ns is not None
    pair.gate.release()
    assert pair.consumer.exchange.next_deadline_ns is None


# ---------------------------------------------------------------- blocking inputs and checkpoints


def test_a_gate_of_blocking_channels_is_triggered_between_two_elements() -> None:
    simulation = Simulation(5)
    slot = simulation.slot("s", configuration(network_buffer_timeout_ms=0))
    partition = slot.partition(EDGE, attempt_id("v0"))  # kept, and read as a blocking one is
    gate = slot.gate(input_edge([(slot.endpoint, attempt_id("v0"))], partition_type=BLOCKING))
    for start in (0, 10):
        partition.emit(numbers(start, 10))
        partition.flush()
    simulation.loop.run()
    first = gate.poll()
    assert rows_of([first]) == list(range(10))
    gate.trigger(CheckpointBarrier(1, 0))
    assert gate.poll() == CheckpointBarrier(1, 0)
    assert gate.kept[0].position.rows == 10
    assert rows_of(drain(gate)) == list(range(10, 20))
    end(partition)
    simulation.loop.run()
    assert drain(gate) == [EndOfData()]
    assert gate.is_finished


def test_a_gate_aligns_on_the_channels_that_carry_barriers() -> None:
    simulation = Simulation(6)
    slot = simulation.slot("s", configuration(network_buffer_timeout_ms=0))
    kept = slot.partition(EDGE, attempt_id("v0"))
    flowing = [
        slot.partition(output_edge(edge_id="e1"), attempt_id("v2", index)) for index in (0, 1)
    ]
    gate = slot.gate(
        input_edge([(slot.endpoint, attempt_id("v0"))], partition_type=BLOCKING),
        input_edge([(slot.endpoint, attempt_id("v2", i)) for i in (0, 1)], edge_id="e1"),
    )
    kept.emit(numbers(0, 3))
    kept.flush()
    flowing[0].emit_control(CheckpointBarrier(1, 0))
    simulation.loop.run()
    assert rows_of(drain(gate)) == [0, 1, 2]
    end(kept)
    simulation.loop.run()
    assert drain(gate) == [], "its end stands for no barrier"
    flowing[1].emit_control(CheckpointBarrier(1, 0))
    simulation.loop.run()
    assert drain(gate) == [CheckpointBarrier(1, 0)]


# ---------------------------------------------------------------- random stories


@dataclass
class Chain:
    """One producer of a random story: rows 0 .. total - 1, its attempts and where they stand."""

    index: int
    total: int
    slot: Slot
    partition: ResultPartition
    attempt: int = 0
    emitted: int = 0
    barrier_row: int = 0
    completed_row: int = 0
    has_ended: bool = False


class Story:
    """Producers in slots of their own, one consumer, and everything that may happen to them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.simulation = Simulation(seed)
        self.config = configuration(
            network_buffer_timeout_ms=0, network_credit_bytes=2048, batch_rows=16
        )
        self.consumer = self.simulation.slot("c", self.config)
        self.chains = []
        for index in range(self.random.randint(1, 3)):
            slot = self.new_slot() if self.random.random() < 0.7 else self.consumer
            partition = slot.partition(EDGE, attempt_id("v0", index))
            self.chains.append(Chain(index, self.random.randint(0, 300), slot, partition))
        self.rows: dict[int, list[int]] = {chain.index: [] for chain in self.chains}
        self.gate = self.new_gate(())
        self.checkpoint_id = 0
        self.aligned: int | None = None
        self.completed: list[checkpoint_pb2.ChannelPosition] = []
        self.rows_completed = {chain.index: 0 for chain in self.chains}
        self.positions: list[checkpoint_pb2.ChannelPosition] = []
        self.rows_marked: dict[int, int] = {}

    def new_slot(self) -> Slot:
        return self.simulation.slot(
            f"p{len(self.simulation.network.listeners)}-{self.random.random()}", self.config
        )

    def new_gate(self, positions: Any) -> InputGate:
        producers = [
            (chain.slot.endpoint, attempt_id("v0", chain.index, chain.attempt))
            for chain in self.chains
        ]
        return self.consumer.gate(
            input_edge(producers, partition_type=CACHING), positions=positions
        )

    def emit(self) -> None:
        chain = self.random.choice(self.chains)
        if chain.emitted < chain.total and chain.partition.is_available():
            count = min(self.random.randint(1, 40), chain.total - chain.emitted)
            chain.partition.emit(numbers(chain.index * 1000 + chain.emitted, count))
            chain.emitted += count
            if self.random.random() < 0.5:
                chain.partition.flush()
            if self.random.random() < 0.3:
                chain.partition.emit_control(Watermark(chain.emitted))
        elif chain.emitted == chain.total and not chain.has_ended:
            chain.has_ended = True
            end(chain.partition)

    def read(self) -> None:
        for _ in range(self.random.randint(1, 8)):
            element = self.gate.poll()
            if isinstance(element, pa.RecordBatch):
                index = self.gate.current_channel
                self.rows[index] += [value - 1000 * index for value in rows_of([element])]
            elif isinstance(element, CheckpointBarrier):
                self.snapshot(element.checkpoint_id)

    def snapshot(self, checkpoint_id: int) -> None:
        assert checkpoint_id == self.checkpoint_id
        if self.gate.comparing() is not None:
            self.abort()
            return
        self.aligned = checkpoint_id
        self.gate.mark(checkpoint_id)
        self.positions = [
            checkpoint_pb2.ChannelPosition(
                edge_id="e0",
                index=channel.spec.producer_index,
                rows=channel.position.rows,
                checksum=channel.position.checksum,
            )
            for channel in self.gate.kept
        ]
        self.rows_marked = {index: len(rows) for index, rows in self.rows.items()}

    def checkpoint(self) -> None:
        if self.aligned is not None:
            self.complete()
        elif all(chain.barrier_row < 0 for chain in self.chains):
            return
        else:
            self.abort()
            self.checkpoint_id += 1
            for chain in self.chains:
                if not chain.has_ended:
                    chain.partition.emit_control(CheckpointBarrier(self.checkpoint_id, 0))
                chain.barrier_row = chain.emitted

    def complete(self) -> None:
        assert self.aligned is not None
        for chain in self.chains:
            chain.completed_row = chain.barrier_row
            chain.partition.checkpoint_completed(self.aligned)
        self.gate.checkpoint_completed(self.aligned)
        self.completed, self.rows_completed = self.positions, self.rows_marked
        self.aligned = None

    def abort(self) -> None:
        self.aligned = None
        for chain in self.chains:
            chain.partition.checkpoint_aborted(self.checkpoint_id)
        self.gate.abort_checkpoint(self.checkpoint_id)

    def break_wire(self) -> None:
        links = self.simulation.network.links
        if links:
            link = self.random.choice(links)
            for broken in (link, link.other):
                if broken is not None:
                    broken.lose("broken")

    def replace_producer(self) -> None:
        self.abort()
        chain = self.random.choice(self.chains)
        if chain.slot is not self.consumer and self.random.random() < 0.5:
            self.simulation.kill(chain.slot)
            chain.slot = self.new_slot()
        else:
            chain.partition.release()
        self.simulation.pass_time(self.random.randrange(200) * MS)
        chain.attempt += 1
        chain.emitted, chain.has_ended = chain.completed_row, False
        start = checkpoint_pb2.ChannelPosition(edge_id="e0", index=0, rows=chain.completed_row)
        attempt = attempt_id("v0", chain.index, chain.attempt)
        chain.partition = chain.slot.partition(EDGE, attempt, [start])
        self.consumer.exchange.replace_producer(self.gate, description(chain.slot, attempt))

    def restore_consumer(self) -> None:
        self.abort()
        self.gate.release()
        self.rows = {index: rows[: self.rows_completed[index]] for index, rows in self.rows.items()}
        self.gate = self.new_gate(self.completed)

    def pass_time(self) -> None:
        self.simulation.pass_time(self.random.randrange(1, 120) * MS)

    def restart_what_failed(self) -> None:
        """A consumer that asks for an attempt that has failed meanwhile fails too: it is restored."""
        if self.consumer.errors:
            assert all(isinstance(error, PartitionUnavailable) for error in self.consumer.errors)
            assert all("has been released" in str(error) for error in self.consumer.errors)
            self.consumer.errors.clear()
            self.restore_consumer()


@pytest.mark.parametrize("seed", range(60))
def test_each_row_once_and_in_order_whatever_happens(seed: int) -> None:
    story = Story(seed)
    usual = [story.emit, story.read, story.pass_time]
    rare = [story.checkpoint, story.break_wire, story.replace_producer, story.restore_consumer]
    for _ in range(story.random.randint(10, 120)):
        story.random.choice(usual if story.random.random() < 0.8 else rare)()
        story.restart_what_failed()
    for _ in range(4000):
        if story.gate.is_finished:
            break
        story.emit()
        story.read()
        story.simulation.pass_time(5 * MS)
        story.restart_what_failed()
    assert story.gate.is_finished
    for chain in story.chains:
        assert story.rows[chain.index] == list(range(chain.total))
    assert not story.consumer.errors
