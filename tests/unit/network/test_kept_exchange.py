"""Kept partitions in the exchange: chosen by their edge, found by attempt, there until released."""

from __future__ import annotations

from typing import Any

from common.elements import CheckpointBarrier, EndOfData
from common.pb import internal_pb2
from penstock.errors import PartitionUnavailable, StoreCorrupt
from penstock.partition_id import PartitionId
from penstock.pb import checkpoint_pb2, graph_pb2
from taskmanager.network.partition_registry import PartitionRegistry, PartitionRequest
from taskmanager.network.subpartition import ReadablePartition, SubpartitionView
from tests.support.exchange_slots import (
    Simulation,
    Slot,
    attempt_id,
    drain,
    end,
    input_edge,
    numbers,
    output_edge,
    rows_of,
)
from tests.support.subpartition_readers import RecordingReader


def caching_edge(**values: Any) -> internal_pb2.OutputEdge:
    edge = output_edge(**values)
    edge.edge.partition_type = graph_pb2.RESULT_PARTITION_TYPE_CACHING
    return edge


def id_of(attempt: internal_pb2.AttemptId) -> PartitionId:
    return PartitionId("e0", attempt.vertex, attempt.subtask_index, attempt.attempt)


class Asked:
    """A request and what came of it."""

    def __init__(
        self,
        registry: PartitionRegistry,
        partition_id: PartitionId,
        first_row: int = 0,
        index: int = 0,
    ) -> None:
        self.reader = RecordingReader(1000)
        self.views: list[SubpartitionView] = []
        self.refused: list[PartitionUnavailable] = []
        registry.request(
            PartitionRequest(
                partition_id,
                index,
                self.reader,
                10,
                self.views.append,
                self.refused.append,
                first_row,
            )
        )


def test_a_consumer_reads_a_caching_partition_like_any_other_here_and_there() -> None:
    simulation = Simulation(1)
    producer, other = simulation.slot("p"), simulation.slot("c")
    partition = producer.partition(
        caching_edge(partitioning=graph_pb2.PARTITIONING_REBALANCE, count=2), attempt_id("v0")
    )
    gates = [
        slot.gate(input_edge([(producer.endpoint, attempt_id("v0"))], index))
        for index, slot in enumerate((producer, other))
    ]
    simulation.loop.run()
    got: list[list[Any]] = [[], []]

    def read() -> None:
        simulation.loop.run()
        for elements, gate in zip(got, gates, strict=True):
            elements += drain(gate)
        simulation.loop.run()

    partition.subpartitions[0].add(numbers(0, 5), 40)
    partition.subpartitions[1].add(numbers(5, 5), 40)
    partition.emit_control(CheckpointBarrier(1, 0))
    read()
    assert [position.rows for position in partition.positions()] == [5, 5]
    end(partition)
    read()
    assert [rows_of(elements) for elements in got] == [list(range(5)), list(range(5, 10))]
    assert all(elements[-1] == EndOfData() for elements in got)
    assert partition.is_drained()
    assert not producer.errors + other.errors


def test_attempts_stay_side_by_side_until_they_are_released() -> None:
    slot = Simulation(2).slot("p")
    attempts = [attempt_id("v0", attempt=number) for number in (1, 3)]
    partitions = [slot.partition(caching_edge(), attempt) for attempt in attempts]
    registry = slot.exchange.registry
    for number, partition in enumerate(partitions):
        partition.emit(numbers(100 * number, 10))
        partition.flush()
        end(partition)
    for number, attempt in enumerate(attempts):
        asked = Asked(registry, id_of(attempt), first_row=4)
        assert asked.reader.rows() == list(range(100 * number + 4, 100 * number + 10))
        assert asked.reader.offsets == [4]
        asked.views[0].detach(is_complete=True)
    (gone,) = Asked(registry, PartitionId("e0", "v0", 0, 2)).refused
    assert "replaced by attempt 3" in str(gone)
    slot.exchange.release_partitions([id_of(attempts[0])])
    assert registry.find(id_of(attempts[0])) is not None, "its attempt has not ended"
    partitions[0].retire()
    slot.exchange.release_partitions([id_of(attempts[0]), id_of(attempts[0])])
    (gone,) = Asked(registry, id_of(attempts[0])).refused
    assert gone.partition == id_of(attempts[0])
    assert Asked(registry, id_of(attempts[1]), first_row=10).views
    (gone,) = Asked(registry, id_of(attempts[1]), first_row=11).refused
    assert gone.partition == id_of(attempts[1])
    assert Asked(registry, PartitionId("e0", "v0", 0, 4)).refused == []
    assert registry.next_deadline_ns == 10


def test_a_restored_attempt_numbers_on() -> None:
    slot = Simulation(3).slot("p")
    attempt = attempt_id("v0", attempt=2)
    partition = slot.exchange.create_partition(
        attempt,
        caching_edge(),
        0,
        slot.counters,
        slot.wake,
        slot.errors.append,
        [checkpoint_pb2.ChannelPosition(edge_id="e0", index=0, rows=500)],
    )
    partition.emit(numbers(0, 10))
    partition.flush()
    end(partition)
    asked = Asked(slot.exchange.registry, id_of(attempt), first_row=500)
    assert asked.reader.offsets == [500]
    (gone,) = Asked(slot.exchange.registry, id_of(attempt), first_row=499).refused
    assert "rows 500 to 510" in str(gone)


def test_partitions_on_disk_are_looked_for() -> None:
    wanted = PartitionId("e0", "v0", 0, 1)
    slot: Slot = Simulation(4).slot("p")
    partition = slot.partition(caching_edge(), attempt_id("v0", attempt=1))
    partition.emit(numbers(0, 3))
    end(partition)
    found: dict[PartitionId, ReadablePartition] = {}

    def find(partition_id: PartitionId) -> ReadablePartition | None:
        if partition_id.attempt == 9:
            raise StoreCorrupt("its index is altered")
        return found.get(partition_id)

    registry = PartitionRegistry(find)
    asked = Asked(registry, wanted)
    assert not asked.views
    found[wanted] = partition
    registry.retry()
    assert asked.reader.rows() == [0, 1, 2]
    (damaged,) = Asked(registry, PartitionId("e0", "v0", 0, 9)).refused
    assert "its index is altered" in str(damaged)
    assert damaged.partition == PartitionId("e0", "v0", 0, 9)


def test_a_lost_connection_does_not_fail_a_producer_that_keeps_its_rows() -> None:
    slot = Simulation(5).slot("p")
    partition = slot.partition(caching_edge(), attempt_id("v0"))
    asked = Asked(slot.exchange.registry, id_of(attempt_id("v0")))
    end(partition)
    asked.views[0].connection_lost("reset")
    assert not slot.errors
    assert partition.is_drained(), "nobody waits for consumers of what is kept"
    again = Asked(slot.exchange.registry, id_of(attempt_id("v0")))
    assert not again.refused
