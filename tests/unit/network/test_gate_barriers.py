"""Barriers at an input gate: which channels wait, what that does to their producers, and who goes on when."""

from __future__ import annotations

from typing import Any

import pytest

from common.elements import (
    CheckpointBarrier,
    CheckpointCancelled,
    EndOfData,
    StreamStatus,
    Watermark,
)
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


class Exchange:
    """Producers and one gate that reads them all, in one slot or in two."""

    def __init__(self, producers: int, *, local: bool = True, **config: Any) -> None:
        self.simulation = Simulation(3)
        configured = configuration(network_buffer_timeout_ms=0, **config)
        producer = self.simulation.slot("p", configured)
        self.consumer: Slot = producer if local else self.simulation.slot("c", configured)
        attempts = [attempt_id("v0", index) for index in range(producers)]
        self.partitions: list[ResultPartition] = [
            producer.partition(output_edge(), attempt) for attempt in attempts
        ]
        self.gate: InputGate = self.consumer.gate(
            input_edge([(producer.endpoint, attempt) for attempt in attempts])
        )
        self.simulation.loop.run()

    def rows(self, producer: int, start: int, count: int = 1) -> None:
        self.partitions[producer].emit(numbers(start, count))
        self.partitions[producer].flush()

    def barrier(self, producer: int, checkpoint_id: int) -> None:
        self.partitions[producer].emit_control(CheckpointBarrier(checkpoint_id, 0))

    def read(self) -> list[Any]:
        """All that the gate lets through now: numbers and control elements."""
        self.simulation.loop.run()
        found: list[Any] = []
        for element in drain(self.gate):
            found += rows_of([element]) or ([element] if not hasattr(element, "num_rows") else [])
        self.simulation.loop.run()
        return found


@pytest.fixture(params=[True, False], ids=["local", "remote"])
def local(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_channels_that_have_delivered_wait_for_the_others(local: bool) -> None:
    exchange = Exchange(3, local=local)
    exchange.rows(0, 1)
    exchange.barrier(0, 1)
    exchange.rows(0, 2)
    exchange.rows(1, 11)
    assert sorted(exchange.read()) == [1, 11]
    exchange.rows(1, 12)
    exchange.barrier(1, 1)
    exchange.rows(1, 13)
    exchange.rows(2, 21)
    assert sorted(exchange.read()) == [12, 21]
    assert not exchange.gate.has_data
    exchange.barrier(2, 1)
    exchange.rows(2, 22)
    found = exchange.read()
    assert found[0] == CheckpointBarrier(1, 0)
    assert sorted(found[1:]) == [2, 13, 22]


def test_the_credit_of_a_blocked_channel_stays_ungranted(local: bool) -> None:
    exchange = Exchange(2, local=local, network_credit_bytes=4096)
    exchange.barrier(0, 1)
    assert exchange.read() == []
    sent = 0
    while exchange.partitions[0].is_available() and sent < 10_000:
        exchange.rows(0, sent, 100)
        exchange.simulation.loop.run()
        sent += 100
    assert sent < 10_000, "its producer must be stopped"
    held = exchange.gate.channels[0].credit.held_bytes
    assert held > 0
    others = 0
    for start in range(20_000, 21_000, 100):
        assert exchange.partitions[1].is_available()
        exchange.rows(1, start, 100)
        others += len(exchange.read())
    assert others == 1000
    assert exchange.gate.channels[0].credit.held_bytes == held
    assert not exchange.partitions[0].is_available()
    wakes = exchange.consumer.wakes
    exchange.barrier(1, 1)
    exchange.simulation.loop.run()
    assert exchange.consumer.wakes > wakes
    assert [*exchange.read(), *exchange.read()] == [CheckpointBarrier(1, 0), *range(sent)]
    assert exchange.partitions[0].is_available()
    assert not exchange.consumer.errors


def test_unblocked_channels_take_turns_from_the_first_on() -> None:
    exchange = Exchange(4)
    for producer in (3, 1, 0):
        exchange.barrier(producer, 1)
        exchange.rows(producer, producer * 10)
        exchange.rows(producer, producer * 10 + 1)
        assert exchange.read() == []
    exchange.barrier(2, 1)
    exchange.rows(2, 20)
    assert exchange.read() == [CheckpointBarrier(1, 0), 0, 10, 30, 20, 1, 11, 31]


def test_what_came_behind_a_barrier_can_be_control_elements() -> None:
    exchange = Exchange(2)
    exchange.barrier(0, 1)
    exchange.partitions[0].emit_control(Watermark(50))
    exchange.partitions[1].emit_control(Watermark(70))
    assert exchange.read() == [], "the watermark of the blocked channel counts behind its barrier"
    exchange.barrier(1, 1)
    assert exchange.read() == [CheckpointBarrier(1, 0), Watermark(50)]
    exchange.barrier(0, 2)
    exchange.partitions[0].emit_control(StreamStatus(active=False))
    assert exchange.read() == []
    exchange.barrier(1, 2)
    found = exchange.read()
    assert found[0] == CheckpointBarrier(2, 0)
    assert found[-1] == Watermark(70)


def test_two_checkpoints_in_a_row_on_a_blocked_channel() -> None:
    exchange = Exchange(2)
    for checkpoint_id in (1, 2):
        exchange.barrier(0, checkpoint_id)
        exchange.rows(0, checkpoint_id)
    assert exchange.read() == []
    exchange.barrier(1, 1)
    assert exchange.read() == [CheckpointBarrier(1, 0), 1]
    exchange.barrier(1, 2)
    assert exchange.read() == [CheckpointBarrier(2, 0), 2]


def test_at_least_once_blocks_nothing() -> None:
    exchange = Exchange(2, execution_checkpointing_mode="at-least-once")
    exchange.barrier(0, 1)
    exchange.rows(0, 1)
    exchange.barrier(0, 2)
    exchange.rows(0, 2)
    assert exchange.read() == [1, 2]
    exchange.rows(1, 11)
    exchange.barrier(1, 1)
    exchange.rows(1, 12)
    exchange.barrier(1, 2)
    assert exchange.read() == [11, CheckpointBarrier(1, 0), 12, CheckpointBarrier(2, 0)]


@pytest.mark.parametrize("how", ["abort", "cancelled"])
def test_a_checkpoint_that_is_given_up_unblocks(how: str) -> None:
    exchange = Exchange(3)
    exchange.barrier(0, 1)
    exchange.rows(0, 1)
    exchange.barrier(1, 1)
    exchange.rows(1, 11)
    assert exchange.read() == []
    if how == "abort":
        exchange.gate.abort_checkpoint(1)
        assert exchange.read() == [1, 11]
    else:
        exchange.partitions[2].emit_control(CheckpointCancelled(1))
        assert exchange.read() == [CheckpointCancelled(1), 1, 11]
    exchange.barrier(2, 1)
    exchange.rows(2, 21)
    assert exchange.read() == [21]
    for producer in range(3):
        exchange.barrier(producer, 2)
    assert exchange.read() == [CheckpointBarrier(2, 0)]


def test_an_ended_channel_stands_for_its_barrier(local: bool) -> None:
    exchange = Exchange(2, local=local)
    exchange.barrier(0, 1)
    exchange.rows(0, 1)
    exchange.partitions[1].emit_control(EndOfData())
    assert exchange.read() == [], "the end of its data is not the end of its barriers"
    exchange.partitions[1].finish()
    assert exchange.read() == [CheckpointBarrier(1, 0), 1]
    assert not exchange.gate.is_finished
    exchange.barrier(0, 2)
    assert exchange.read() == [CheckpointBarrier(2, 0)]
    end(exchange.partitions[0])
    assert exchange.read() == [EndOfData()]
    assert exchange.gate.is_finished


def test_a_trigger_comes_out_behind_the_ends_of_all_channels(local: bool) -> None:
    """The coordinator starts a checkpoint here: all producers have finished, their ends may be on the way."""
    exchange = Exchange(2, local=local)
    exchange.rows(0, 1)
    end(exchange.partitions[0])
    exchange.gate.trigger(CheckpointBarrier(5, 0))
    assert exchange.read() == [1]
    exchange.rows(1, 2)
    end(exchange.partitions[1])
    exchange.simulation.loop.run()
    assert exchange.read() == [2, EndOfData(), CheckpointBarrier(5, 0)]
    assert exchange.gate.is_finished
    exchange.gate.trigger(CheckpointBarrier(6, 0))
    assert not exchange.gate.is_finished, "the barrier has to be read before the end"
    assert exchange.read() == [CheckpointBarrier(6, 0)]
    assert exchange.gate.is_finished


def test_how_long_an_alignment_took_and_what_came_meanwhile() -> None:
    exchange = Exchange(2)
    exchange.rows(0, 0, 10)
    exchange.read()
    before = exchange.consumer.counters.bytes_in
    exchange.simulation.loop.advance(5_000_000)
    exchange.barrier(0, 1)
    exchange.read()
    first_at_ms = exchange.simulation.loop.now_ms()
    exchange.simulation.loop.advance(50_000_000)
    exchange.rows(1, 10, 10)
    exchange.barrier(1, 1)
    assert exchange.read()[-1] == CheckpointBarrier(1, 0)
    started = exchange.gate.last_start
    assert started is not None
    assert (started.first_at_ms, started.first_bytes) == (first_at_ms, before)
    assert exchange.consumer.counters.bytes_in > before
