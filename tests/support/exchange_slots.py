"""Builds slot processes' exchanges for tests: identities, edges, counters, and a step-by-step mailbox."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from common.clock import SystemClock
from common.elements import OriginEnded
from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.pb import checkpoint_pb2, graph_pb2
from taskmanager.network.connection_runner import SocketTransport
from taskmanager.network.input_gate import InputGate
from taskmanager.network.result_partition import ResultPartition
from taskmanager.network.transport import Transport
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.processes.mailbox import Mailbox
from taskmanager.task.exchange import DataExchange, SlotIdentity
from tests.support.in_memory_network import InMemoryNetwork, SimulatedLoop

DEADLINE_S = 90.0
PIPELINED = graph_pb2.RESULT_PARTITION_TYPE_PIPELINED
CACHING = graph_pb2.RESULT_PARTITION_TYPE_CACHING
BLOCKING = graph_pb2.RESULT_PARTITION_TYPE_BLOCKING


def configuration(**values: object) -> Configuration:
    """Defaults but for the named attributes."""
    return Configuration.from_mapping({}).model_copy(update=values)


def identity(slot_id: str, **values: Any) -> SlotIdentity:
    """A slot of job "job" on host "host"."""
    fields: dict[str, Any] = {"job_id": "job", "host_id": "host", "leader_epoch": 3, "token": "t"}
    return SlotIdentity(slot_id=slot_id, **{**fields, **values})


def attempt_id(vertex: str, subtask_index: int = 0, attempt: int = 0) -> internal_pb2.AttemptId:
    """An execution attempt."""
    return internal_pb2.AttemptId(
        job_id="job", vertex=vertex, subtask_index=subtask_index, attempt=attempt
    )


def output_edge(
    partitioning: int = graph_pb2.PARTITIONING_FORWARD,
    count: int = 1,
    keys: Sequence[str] = (),
    edge_id: str = "e0",
    partition_type: graph_pb2.ResultPartitionType.ValueType = PIPELINED,
) -> internal_pb2.OutputEdge:
    """An edge from v0 to v1."""
    edge = graph_pb2.Edge(id=edge_id, key_columns=keys, partition_type=partition_type)
    edge.partitioning = partitioning  # type: ignore[assignment]
    return internal_pb2.OutputEdge(
        edge=edge, subpartition_count=count, target_parallelism=count, target_max_parallelism=128
    )


def input_edge(
    producers: Sequence[tuple[internal_pb2.DataEndpoint, internal_pb2.AttemptId]],
    subpartition_index: int = 0,
    edge_id: str = "e0",
    partition_type: graph_pb2.ResultPartitionType.ValueType = PIPELINED,
    reproducible: bool = True,
) -> internal_pb2.InputEdge:
    """One consumer's view of the edge."""
    channels = [
        internal_pb2.InputChannel(
            producer=endpoint,
            producer_attempt=attempt,
            edge_id=edge_id,
            subpartition_index=subpartition_index,
        )
        for endpoint, attempt in producers
    ]
    return internal_pb2.InputEdge(
        edge_id=edge_id,
        partition_type=partition_type,
        reproducible=reproducible,
        channels=channels,
    )


class Slot:
    """An exchange and what it told its tasks.

    Attributes:
        errors: what ``on_error`` was called with.
        wakes: how often ``on_available`` was called.
        unreachable: slot ids of the peers that were called so.
    """

    def __init__(self, exchange: DataExchange, endpoint: internal_pb2.DataEndpoint) -> None:
        self.exchange = exchange
        self.endpoint = endpoint
        self.counters = SubtaskCounters()
        self.errors: list[Exception] = []
        self.wakes = 0
        self.unreachable: list[str] = []

    def wake(self) -> None:
        """``on_available``."""
        self.wakes += 1

    def partition(
        self,
        edge: internal_pb2.OutputEdge,
        attempt: internal_pb2.AttemptId,
        positions: Sequence[checkpoint_pb2.ChannelPosition] = (),
    ) -> ResultPartition:
        """A partition of this slot."""
        return self.exchange.create_partition(
            attempt,
            edge,
            attempt.subtask_index,
            self.counters,
            self.wake,
            self.errors.append,
            positions,
        )

    def gate(
        self,
        *inputs: internal_pb2.InputEdge,
        positions: Sequence[checkpoint_pb2.ChannelPosition] = (),
        attempt: int = 0,
        first_checkpoint_id: int = 0,
    ) -> InputGate:
        """A gate of this slot."""
        return self.exchange.create_gate(
            attempt_id("v1", 0, attempt),
            inputs,
            self.counters,
            self.wake,
            self.errors.append,
            positions,
            first_checkpoint_id,
        )


class Simulation:
    """Slots in one process on simulated time."""

    def __init__(self, seed: int = 0) -> None:
        self.loop = SimulatedLoop()
        self.network = InMemoryNetwork(self.loop.call_later, self.loop.monotonic_ns, seed)
        self.slots: list[Slot] = []

    def slot(self, slot_id: str, config: Configuration | None = None, **values: Any) -> Slot:
        """One more slot process."""
        unreachable: list[str] = []
        exchange = DataExchange(
            config or configuration(),
            identity(slot_id, **values),
            self.loop.post,
            self.loop,
            self.network.transport(),
            on_unreachable=lambda peer, _reason: unreachable.append(peer.slot_id),
        )
        slot = Slot(exchange, exchange.listen(f"/{slot_id}", "", ""))
        slot.unreachable = unreachable
        self.slots.append(slot)
        return slot

    def kill(self, slot: Slot) -> None:
        """The process is gone: its connections break at their other ends."""
        self.slots.remove(slot)
        slot.exchange.close()

    def pass_time(self, delta_ns: int) -> None:
        """Moves time on: what happens meanwhile happens, and what has a deadline is told."""
        end_ns = self.loop.monotonic_ns() + delta_ns
        while True:
            now_ns = self.loop.monotonic_ns()
            for slot in self.slots:
                deadline_ns = slot.exchange.next_deadline_ns
                if deadline_ns is not None and deadline_ns <= now_ns:
                    slot.exchange.tick(now_ns)
            times = [slot.exchange.next_deadline_ns for slot in self.slots]
            next_ns = min(
                (at for at in (*times, self.loop.next_at_ns) if at is not None), default=end_ns
            )
            if next_ns > end_ns:
                break
            self.loop.advance(max(0, next_ns - now_ns))
            if next_ns >= end_ns:
                break
        self.loop.advance(end_ns - self.loop.monotonic_ns())


class ThreadedSlot(Slot):
    """A slot on real sockets; its mailbox is run by the thread of the test."""

    def __init__(
        self,
        slot_id: str,
        unix_path: str = "",
        tcp_host: str = "127.0.0.1",
        config: Configuration | None = None,
        transport: Transport | None = None,
        **values: Any,
    ) -> None:
        self.mail = Mailbox()
        exchange = DataExchange(
            config or configuration(),
            identity(slot_id, **values),
            self.mail.post,
            SystemClock(),
            transport or SocketTransport(),
        )
        super().__init__(exchange, exchange.listen(unix_path, tcp_host, tcp_host))

    def step(self) -> None:
        """Runs the mail that is there."""
        while (mail := self.mail.take()) is not None:
            mail()


def run_until(slots: Sequence[ThreadedSlot], condition: Callable[[], bool]) -> None:
    """Steps the slots' mailboxes until the condition holds; fails at a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    turn = 0
    while True:
        for slot in slots:
            slot.step()
        if condition():
            return
        assert time.monotonic() < deadline, "the condition did not come true in time"
        turn += 1
        # Waits for mail, not for time: the next mail of one of the slots ends it.
        if (mail := slots[turn % len(slots)].mail.wait(0.005)) is not None:
            mail()


def drain(gate: InputGate) -> list[Any]:
    """Everything the gate has now, ``OriginEnded`` left out."""
    elements = []
    while gate.has_data:
        element = gate.poll()
        if element is not None and not isinstance(element, OriginEnded):
            elements.append(element)
    return elements


def rows_of(elements: Sequence[Any], column: str = "x") -> list[Any]:
    """The values of a column over all batches."""
    return [
        value
        for element in elements
        if isinstance(element, pa.RecordBatch)
        for value in element.column(element.schema.get_field_index(column)).to_pylist()
    ]


def numbers(start: int, count: int) -> pa.RecordBatch:
    """A batch with the one column x = start, start + 1, ..."""
    return pa.record_batch([pa.array(range(start, start + count), pa.int64())], names=["x"])


def end(partition: ResultPartition) -> None:
    """Ends the data, then the partition."""
    partition.end_data()
    partition.finish()
