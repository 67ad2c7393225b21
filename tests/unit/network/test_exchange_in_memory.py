"""Whole exchanges on simulated time: order, offsets, credit, idleness, handshakes, deadlines."""

from __future__ import annotations

import dataclasses
from typing import Any

import pyarrow as pa
import pytest

from common.elements import (
    CheckpointBarrier,
    EndOfData,
    StreamStatus,
    Watermark,
)
from penstock.errors import InvariantViolation, PartitionUnavailable, TaskFailure
from penstock.pb import graph_pb2
from penstock.storage.checkpoint_properties import (
    BehindBarrier,
    CheckpointKind,
    CheckpointProperties,
)
from taskmanager.network.credit import charge_of
from taskmanager.network.frames import FrameKind, encode_frame
from taskmanager.network.input_gate import InputGate
from taskmanager.network.result_partition import ResultPartition
from tests.support.exchange_slots import (
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

A = attempt_id("v0")
PROPERTIES = CheckpointProperties(
    CheckpointKind.SAVEPOINT, "/savepoints/\u00e9", is_full=True, behind=BehindBarrier.HOLD
)
BARRIER = CheckpointBarrier(7, 1, leader_epoch=2**40, properties=PROPERTIES)


def pair(
    seed: int, *, local: bool = False, **config: Any
) -> tuple[Simulation, Slot, Slot, ResultPartition, InputGate]:
    simulation = Simulation(seed)
    producer = simulation.slot("p", configuration(**config))
    consumer = producer if local else simulation.slot("c", configuration(**config))
    partition = producer.partition(output_edge(), A)
    gate = consumer.gate(input_edge([(producer.endpoint, A)]))
    simulation.loop.run()
    return simulation, producer, consumer, partition, gate


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_rows_and_control_elements_arrive_in_order(seed: int, local: bool) -> None:
    simulation, producer, consumer, partition, gate = pair(seed, local=local, batch_rows=10)
    for start in range(0, 200, 4):
        partition.emit(numbers(start, 4))
        if start == 100:
            partition.emit_control(BARRIER)
    end(partition)
    simulation.loop.run()
    got = drain(gate)
    simulation.loop.run()
    assert rows_of(got) == list(range(200))
    assert rows_of(got[: got.index(BARRIER)]) == list(range(104))
    assert got[-1] == EndOfData()
    assert gate.is_finished
    assert partition.is_drained()
    assert producer.counters.records_out == consumer.counters.records_in == 200
    assert producer.counters.bytes_out == consumer.counters.bytes_in >= 1600
    assert not producer.errors
    assert not consumer.errors


@pytest.mark.parametrize("local", [False, True])
def test_a_slow_consumer_bounds_memory_and_gets_everything(local: bool) -> None:
    simulation, _, _, partition, gate = pair(1, local=local, network_credit_bytes=10_000)
    credit = gate.channels[0].credit.window  # an only channel has two windows
    assert credit == 20_000
    largest = charge_of(numbers(0, 1000).nbytes + 500)
    sent = 0
    got: list[Any] = []
    for _ in range(300):
        while partition.is_available() and sent < 100_000:
            partition.emit(numbers(sent, 1000))
            partition.flush()
            sent += 1000
        simulation.loop.run()
        held = gate.channels[0].credit.held_bytes
        assert held <= credit + largest
        assert sent - len(rows_of(got)) <= (credit + 3 * largest) // 8
        if gate.has_data:
            got.append(gate.poll())
    assert rows_of(got) == list(range(100_000))


@pytest.mark.parametrize("local", [False, True])
def test_a_batch_larger_than_the_window_passes(local: bool) -> None:
    simulation, _, _, partition, gate = pair(2, local=local, network_credit_bytes=1024)
    for start in (0, 5000, 10_000):
        partition.emit(numbers(start, 5000))
        assert partition.is_available() == (start == 0)
    got: list[Any] = []
    for _ in range(10):
        simulation.loop.run()
        got += drain(gate)
    assert rows_of(got) == list(range(15_000))


def test_back_pressure_ends_with_a_call_of_on_available() -> None:
    simulation, producer, _, partition, gate = pair(3, network_credit_bytes=1024)
    sent = 0
    while partition.is_available():
        partition.emit(numbers(sent, 500))
        partition.flush()
        sent += 500
    wakes = producer.wakes
    drain(gate)
    simulation.loop.run()
    drain(gate)
    simulation.loop.run()
    assert partition.is_available()
    assert producer.wakes > wakes


def test_the_buffer_timeout_and_idleness_send_what_is_collected() -> None:
    simulation, _, _, partition, gate = pair(4)
    partition.emit(numbers(0, 3))
    deadline = partition.flush_deadline_ns
    assert deadline == simulation.loop.monotonic_ns() + 100_000_000
    partition.flush_if_due(deadline - 1)
    simulation.loop.run()
    assert not gate.has_data
    partition.flush_if_due(deadline)
    assert partition.flush_deadline_ns is None
    partition.emit(numbers(3, 3))
    partition.flush()
    simulation.loop.run()
    assert rows_of(drain(gate)) == list(range(6))


def test_no_buffer_timeout_means_at_once() -> None:
    simulation, _, _, partition, gate = pair(5, buffer_timeout_ms=0)
    partition.emit(numbers(0, 3))
    simulation.loop.run()
    assert rows_of(drain(gate)) == [0, 1, 2]


def test_watermarks_and_idleness_are_merged_over_channels() -> None:
    simulation = Simulation(6)
    slots = [simulation.slot(f"p{index}") for index in range(2)]
    attempts = [attempt_id("v0", index) for index in range(2)]
    parts = [
        slot.partition(output_edge(), attempt)
        for slot, attempt in zip(slots, attempts, strict=True)
    ]
    gate = slots[1].gate(
        input_edge([(s.endpoint, a) for s, a in zip(slots, attempts, strict=True)])
    )

    def got() -> list[Any]:
        simulation.loop.run()
        return drain(gate)

    parts[0].emit_control(Watermark(10))
    assert got() == []
    parts[1].emit_control(Watermark(5))
    assert got() == [Watermark(5)]
    parts[1].emit_control(StreamStatus(active=False))
    assert got() == [Watermark(10)]
    parts[0].emit_control(StreamStatus(active=False))
    assert got() == [StreamStatus(active=False)]
    parts[1].emit_control(StreamStatus(active=True))
    assert got() == [StreamStatus(active=True)]
    end(parts[1])
    assert got() == [StreamStatus(active=False)]
    end(parts[0])
    assert got() == [EndOfData()]
    assert gate.is_finished


@pytest.mark.parametrize("seed", range(3))
def test_a_hash_edge_between_three_slots(seed: int) -> None:
    """Four producers, three consumers, spread over three slots; nothing lost, keys stay together."""
    simulation = Simulation(seed)
    slots = [simulation.slot(f"s{index}", configuration(batch_rows=16)) for index in range(3)]
    attempts = [attempt_id("v0", index) for index in range(4)]
    homes = [slots[index % 3] for index in range(4)]
    gates = [
        slots[index].gate(
            input_edge([(h.endpoint, a) for h, a in zip(homes, attempts, strict=True)], index)
        )
        for index in range(3)
    ]
    edge = output_edge(graph_pb2.PARTITIONING_HASH, 3, ["x"])
    parts = [home.partition(edge, a) for home, a in zip(homes, attempts, strict=True)]
    got: list[list[Any]] = [[], [], []]
    for turn in range(20):
        for part in parts:
            part.emit(numbers(turn * 5, 25))
        simulation.loop.run()
        for rows, gate in zip(got, gates, strict=True):
            rows += rows_of(drain(gate))
    for part in parts:
        end(part)
    simulation.loop.run()
    for rows, gate in zip(got, gates, strict=True):
        rows += rows_of(drain(gate))
        assert gate.is_finished
    simulation.loop.run()
    assert all(part.is_drained() for part in parts)
    expected = [v for turn in range(20) for v in range(turn * 5, turn * 5 + 25)]
    assert sorted([*got[0], *got[1], *got[2]]) == sorted(expected * 4)
    assert not set(got[0]) & set(got[1])
    assert not set(got[0]) & set(got[2])
    # one connection per pair of slots, used both ways: two links ends each
    assert len(simulation.network.links) <= 2 * 6


def test_an_inbound_connection_is_used_for_the_way_back() -> None:
    simulation = Simulation(8)
    one, two = simulation.slot("one"), simulation.slot("two")
    other = attempt_id("v0", 1)
    first, second = one.partition(output_edge(), A), two.partition(output_edge(), other)
    gate_two = two.gate(input_edge([(one.endpoint, A)]))
    simulation.loop.run()
    gate_one = one.gate(input_edge([(two.endpoint, other)]))
    first.emit(numbers(0, 3))
    second.emit(numbers(3, 3))
    first.flush()
    second.flush()
    simulation.loop.run()
    assert rows_of(drain(gate_two)) == [0, 1, 2]
    assert rows_of(drain(gate_one)) == [3, 4, 5]
    assert len(simulation.network.links) == 2


def test_a_blocked_channel_does_not_stall_another_on_its_connection() -> None:
    simulation = Simulation(9)
    producer = simulation.slot("p", configuration(network_credit_bytes=2000))
    consumer = simulation.slot("c", configuration(network_credit_bytes=2000))
    other = attempt_id("v0", 1)
    blocked = producer.partition(output_edge(), A)
    flowing = producer.partition(output_edge(), other)
    blocked_gate = consumer.gate(input_edge([(producer.endpoint, A)]))
    flowing_gate = consumer.gate(input_edge([(producer.endpoint, other)]))
    simulation.loop.run()
    for start in range(0, 5000, 500):
        blocked.emit(numbers(start, 500))
        blocked.flush()
    assert not blocked.is_available()
    got: list[int] = []
    for start in range(0, 5000, 100):
        flowing.emit(numbers(start, 100))
        flowing.flush()
        simulation.loop.run()
        got += rows_of(drain(flowing_gate))
    assert got == list(range(5000))
    assert blocked_gate.has_data
    assert not blocked.is_available()


def test_a_consumer_may_come_before_its_producer() -> None:
    simulation = Simulation(11)
    producer, consumer = simulation.slot("p"), simulation.slot("c")
    remote = consumer.gate(input_edge([(producer.endpoint, A)]))
    local = producer.gate(input_edge([(producer.endpoint, attempt_id("v0", 1))]))
    simulation.loop.run()
    parts = [producer.partition(output_edge(), attempt_id("v0", index)) for index in range(2)]
    for part in parts:
        part.emit(numbers(0, 3))
        end(part)
    simulation.loop.run()
    assert rows_of(drain(remote)) == rows_of(drain(local)) == [0, 1, 2]


@pytest.mark.parametrize("local", [False, True])
def test_a_producer_that_does_not_come_is_unavailable(local: bool) -> None:
    simulation = Simulation(12)
    producer = simulation.slot("p")
    consumer = producer if local else simulation.slot("c")
    consumer.gate(input_edge([(producer.endpoint, A)]))
    simulation.loop.run()
    assert producer.exchange.next_deadline_ns is not None
    producer.exchange.tick(producer.exchange.next_deadline_ns - 1)
    simulation.loop.run()
    assert not consumer.errors
    producer.exchange.tick(producer.exchange.next_deadline_ns)
    simulation.loop.run()
    (error,) = consumer.errors
    assert isinstance(error, PartitionUnavailable)
    assert "e0 of v0/0 (attempt 0)" in str(error)
    assert producer.exchange.next_deadline_ns is None


@pytest.mark.parametrize("local", [False, True])
def test_partitions_that_cannot_be_read(local: bool) -> None:
    simulation = Simulation(13)
    producer = simulation.slot("p")
    consumer = producer if local else simulation.slot("c")
    partition = producer.partition(output_edge(), A)
    partition.emit(numbers(0, 3))
    partition.flush()
    consumer.gate(input_edge([(producer.endpoint, A)]))
    simulation.loop.run()
    consumer.gate(input_edge([(producer.endpoint, A)]))
    consumer.gate(input_edge([(producer.endpoint, A)], subpartition_index=4))
    simulation.loop.run()
    partition.release()
    consumer.gate(input_edge([(producer.endpoint, A)]))
    simulation.loop.run()
    texts = [str(error) for error in consumer.errors]
    assert all(isinstance(error, PartitionUnavailable) for error in consumer.errors)
    assert len(texts) == 3
    assert "read already" in texts[0]
    assert "index 4" in texts[1]
    assert "released" in texts[2]


def test_an_old_attempt_is_refused() -> None:
    simulation = Simulation(14)
    producer, consumer = simulation.slot("p"), simulation.slot("c")
    producer.partition(output_edge(), attempt_id("v0", 0, attempt=2))
    consumer.gate(input_edge([(producer.endpoint, A)]))
    simulation.loop.run()
    assert "replaced by attempt 2" in str(consumer.errors[0])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"token": "wrong"}, "token is wrong"),
        ({"job_id": "other"}, "serves job job, not other"),
        ({"leader_epoch": 2}, "leader epoch 2, which is over"),
    ],
)
def test_refused_handshakes(values: dict[str, Any], words: str) -> None:
    simulation = Simulation(15)
    producer = simulation.slot("p")
    consumer = simulation.slot("c", **values)
    producer.partition(output_edge(), A)
    consumer.gate(input_edge([(producer.endpoint, A), (producer.endpoint, A)]))
    simulation.loop.run()
    (error,) = consumer.errors  # once, though two channels have failed
    assert isinstance(error, TaskFailure)
    assert words in str(error)
    assert "slot p" in str(error)
    assert not producer.errors


def test_a_newer_leader_epoch_is_let_in() -> None:
    simulation = Simulation(16)
    producer, consumer = simulation.slot("p"), simulation.slot("c", leader_epoch=4)
    partition = producer.partition(output_edge(), A)
    gate = consumer.gate(input_edge([(producer.endpoint, A)]))
    end(partition)
    simulation.loop.run()
    assert drain(gate) == [EndOfData()]


def test_another_slot_at_the_address_is_noticed() -> None:
    simulation = Simulation(17)
    producer, consumer = simulation.slot("p"), simulation.slot("c")
    producer.endpoint.slot_id = "former"
    consumer.gate(input_edge([(producer.endpoint, A)]))
    simulation.loop.run()
    assert "slot p (p|host|/p|:0) answered in its place" in str(consumer.errors[0])


def test_nobody_listens() -> None:
    simulation = Simulation(18)
    consumer = simulation.slot("c")
    gone = simulation.slot("p")
    gone.exchange.close()
    consumer.gate(input_edge([(gone.endpoint, A)]))
    simulation.loop.run()
    assert "cannot be reached" in str(consumer.errors[0])


def test_a_peer_that_does_not_answer_has_a_deadline() -> None:
    simulation = Simulation(19)
    producer, consumer = simulation.slot("p"), simulation.slot("c")
    consumer.gate(input_edge([(producer.endpoint, A)]))
    deadline = consumer.exchange.next_deadline_ns
    assert deadline is not None
    consumer.exchange.tick(deadline)
    simulation.loop.run()
    assert "did not answer in time" in str(consumer.errors[0])


def test_a_lost_connection_fails_the_consumer_and_not_the_producer() -> None:
    simulation, producer, consumer, partition, gate = pair(20)
    partition.emit(numbers(0, 3))
    partition.flush()
    simulation.loop.run()
    simulation.network.links[0].lose("the wire broke")
    simulation.network.links[1].lose("the wire broke")
    simulation.loop.run()
    (error,) = consumer.errors
    assert "slot p" in str(error)
    assert "the wire broke" in str(error)
    assert "v0/0 (attempt 0" in str(error)
    assert not producer.errors
    assert not partition.is_drained()
    gate.release()


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (encode_frame(FrameKind.BATCH, 0, b"", sequence=9), "frame 9 came where"),
        (encode_frame(FrameKind.CONTROL, 77, b"\x05"), "unknown channel 77"),
        (encode_frame(FrameKind.HELLO, 0, b""), "behind the handshake"),
        (encode_frame(FrameKind.SUBSCRIBE, 0, b"?"), "SUBSCRIBE|Subscribe"),
        (b"\x00" * 64, "does not speak"),
    ],
)
def test_a_peer_that_breaks_the_protocol_loses_the_connection(frame: bytes, words: str) -> None:
    simulation, _, consumer, _, _ = pair(21)
    to_consumer = simulation.network.links[1]
    to_consumer.send((frame,))
    simulation.loop.run()
    with pytest.raises(TaskFailure, match=words):
        raise consumer.errors[0]


def test_rows_seen_before_are_dropped_and_gaps_are_errors() -> None:
    *_, gate = pair(22, local=True)
    channel = gate.channels[0]
    for start, count in ((0, 5), (0, 3), (3, 4), (7, 1), (2, 6)):
        channel.batch_arrived(numbers(start, count), start, 100)
    assert rows_of(drain(gate)) == list(range(8))
    channel.batch_arrived(numbers(10, 1), 10, 100)
    with pytest.raises(TaskFailure, match="rows 8 to 9 are missing"):
        gate.poll()


def test_a_released_gate_tells_the_producer_and_takes_nothing_more() -> None:
    simulation, _, consumer, partition, gate = pair(23)
    partition.emit(numbers(0, 3))
    partition.flush()
    gate.release()
    simulation.loop.run()
    assert not gate.has_data
    assert not partition.subpartitions[0].has_reader
    assert not partition.is_drained()
    partition.release()
    partition.release()
    assert not consumer.errors


def test_a_batch_that_cannot_be_sent_fails_the_producer() -> None:
    simulation = Simulation(24)
    producer, consumer = simulation.slot("p"), simulation.slot("c")
    partition = producer.partition(output_edge(), A)
    gate = consumer.gate(input_edge([(producer.endpoint, A)]))
    simulation.loop.run()
    reader: Any = partition.subpartitions[0]._reader

    def refuse(batch: pa.RecordBatch, size_bytes: int) -> None:
        raise pa.ArrowInvalid("no such thing")

    reader._credit.available = -1
    partition.emit(numbers(0, 3))
    partition.subpartitions[0].detach(is_complete=False)
    partition.flush()
    reader.prepare = refuse
    partition.subpartitions[0]._reader = reader
    reader.granted(1)
    assert isinstance(producer.errors[0], pa.ArrowInvalid)
    assert not consumer.errors
    assert not gate.has_data


def test_the_same_partition_cannot_be_registered_twice() -> None:
    _, producer, *_ = pair(25)
    with pytest.raises(InvariantViolation, match="registered already"):
        producer.partition(output_edge(), A)


def test_a_gate_without_channels_ends_at_once() -> None:
    slot = Simulation(26).slot("c")
    gate = slot.gate()
    assert not gate.is_finished
    assert gate.poll() == EndOfData()
    assert gate.is_finished


def test_the_simulation_is_deterministic() -> None:
    def trace(seed: int) -> list[Any]:
        simulation, _, _, partition, gate = pair(seed, batch_rows=7)
        seen = []
        for start in range(0, 50, 5):
            partition.emit(numbers(start, 5))
            simulation.loop.run()
            seen.append((simulation.loop.monotonic_ns(), len(rows_of(drain(gate)))))
        return seen

    assert trace(1) == trace(1) != trace(2)


def test_identities_are_values() -> None:
    slot = Simulation(0).slot("x").exchange.slot
    assert dataclasses.replace(slot, slot_id="x") == slot
