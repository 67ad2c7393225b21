"""The same exchange over real Unix sockets and TCP: threads, partial writes, lost peers."""

from __future__ import annotations

import errno
import socket
import stat
import struct
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from common.elements import CheckpointBarrier, EndOfData, Watermark
from common.pb import internal_pb2
from penstock.errors import TaskFailure
from penstock.pb import graph_pb2
from taskmanager.network.connection_runner import SocketTransport, _Loop
from taskmanager.network.frames import FrameDecoder, FrameKind, encode_frame
from taskmanager.network.messages import Hello, Refused, decode_message, encode_message
from tests.support.exchange_slots import (
    DEADLINE_S,
    ThreadedSlot,
    attempt_id,
    configuration,
    drain,
    end,
    input_edge,
    numbers,
    output_edge,
    rows_of,
    run_until,
)
from tests.support.fed_frames import fed

A = attempt_id("v0")


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ps-") as name:
        yield Path(name)


@pytest.fixture
def slots(directory: Path) -> Iterator[Any]:
    made: list[ThreadedSlot] = []

    def make(slot_id: str, **values: Any) -> ThreadedSlot:
        made.append(ThreadedSlot(slot_id, str(directory / slot_id), **values))
        return made[-1]

    yield make
    for slot in made:
        slot.exchange.close()
        slot.exchange.close()
    assert not [t for t in threading.enumerate() if t.name == "network-io"]
    assert not list(directory.iterdir())


@pytest.fixture(params=["unix", "tcp", "tcp by configuration"])
def pair(request: pytest.FixtureRequest, slots: Any) -> tuple[ThreadedSlot, ThreadedSlot]:
    producer = slots("p")
    if request.param == "unix":
        return producer, slots("c")
    if request.param == "tcp":
        return producer, slots("c", host_id="another host")
    return producer, slots("c", config=configuration(taskmanager_local_sockets=False))


def test_everything_arrives_in_order(pair: tuple[ThreadedSlot, ThreadedSlot]) -> None:
    producer, consumer = pair
    partition = producer.partition(output_edge(), A)
    gate = consumer.gate(input_edge([(producer.endpoint, A)]))
    generator = np.random.default_rng(5)
    got: list[Any] = []
    sent = 0

    def has_room() -> bool:
        got.extend(drain(gate))  # what is in flight takes credit until it is read
        return partition.is_available()

    while sent < 400_000:
        run_until(pair, has_room)
        rows = int(generator.choice([1, 50, 3000, 70_000]))
        partition.emit(numbers(sent, rows))
        sent += rows
        if rows == 50:
            partition.emit_control(Watermark(sent))
        if rows == 1:
            partition.flush()
    end(partition)

    def read_all() -> bool:
        got.extend(drain(gate))
        return gate.is_finished

    run_until(pair, read_all)
    assert rows_of(got) == list(range(sent))
    assert got[-1] == EndOfData()
    run_until(pair, partition.is_drained)
    assert producer.counters.bytes_out == consumer.counters.bytes_in
    assert not producer.errors + consumer.errors


def test_a_slow_consumer_bounds_what_the_sender_takes(
    pair: tuple[ThreadedSlot, ThreadedSlot],
) -> None:
    producer, consumer = pair
    partition = producer.partition(output_edge(), A)
    gate = consumer.gate(input_edge([(producer.endpoint, A)]))
    run_until(pair, lambda: partition.subpartitions[0].has_reader)
    sent = 0
    while partition.is_available():
        partition.emit(numbers(sent, 10_000))
        sent += 10_000
        assert sent * 8 < 3 * (2 << 20), "more than credit, collected and waiting batch"
    run_until(pair, lambda: gate.channels[0].credit.held_bytes > 1 << 20)
    assert not partition.is_available()
    partition.emit_control(CheckpointBarrier(1, 0))
    got: list[Any] = []

    def read_to_barrier() -> bool:
        got.extend(drain(gate))
        return CheckpointBarrier(1, 0) in got

    run_until(pair, read_to_barrier)
    assert rows_of(got) == list(range(sent))
    run_until(pair, partition.is_available)
    assert producer.wakes


def test_both_ways_with_back_pressure_on_one_connection(slots: Any) -> None:
    """Each of two slots sends to both: more than sockets take at once, in both directions."""
    made = [slots("one"), slots("two")]
    attempts = [attempt_id("v0", index) for index in range(2)]
    producers = [(slot.endpoint, attempt) for slot, attempt in zip(made, attempts, strict=True)]
    gates = [slot.gate(input_edge(producers, index)) for index, slot in enumerate(made)]
    edge = output_edge(graph_pb2.PARTITIONING_HASH, 2, ["x"])
    parts = [slot.partition(edge, attempt) for slot, attempt in zip(made, attempts, strict=True)]
    sent, goal = [0, 0], 1_000_000
    got: list[list[pa.RecordBatch]] = [[], []]

    def step() -> bool:
        for index, part in enumerate(parts):
            while part.is_available() and sent[index] < goal:
                part.emit(numbers(sent[index], 20_000))
                sent[index] += 20_000
                if sent[index] == goal:
                    end(part)
        for index, gate in enumerate(gates):
            got[index] += drain(gate)
        return all(gate.is_finished for gate in gates)

    run_until(made, step)
    keys = [
        np.concatenate([b.column(0).to_numpy() for b in part if isinstance(b, pa.RecordBatch)])
        for part in got
    ]
    assert len(keys[0]) + len(keys[1]) == 2 * goal
    assert not np.intersect1d(keys[0], keys[1]).size
    assert np.array_equal(np.unique(np.concatenate(keys)), np.arange(goal))


@pytest.mark.parametrize("host_id", ["host", "another host"])
def test_a_refused_handshake_says_why(slots: Any, host_id: str) -> None:
    producer, consumer = slots("p"), slots("c", token="no", host_id=host_id)
    consumer.gate(input_edge([(producer.endpoint, A)]))
    run_until([producer, consumer], lambda: bool(consumer.errors))
    assert "token is wrong" in str(consumer.errors[0])
    assert isinstance(consumer.errors[0], TaskFailure)


def test_a_peer_that_dies_fails_its_consumers(pair: tuple[ThreadedSlot, ThreadedSlot]) -> None:
    producer, consumer = pair
    partition = producer.partition(output_edge(), A)
    gate = consumer.gate(input_edge([(producer.endpoint, A)]))
    partition.emit(numbers(0, 5))
    partition.flush()
    run_until(pair, lambda: gate.has_data)
    producer.exchange.close()
    run_until(pair, lambda: bool(consumer.errors))
    assert "the connection to slot p" in str(consumer.errors[0])
    assert rows_of(drain(gate)) == list(range(5))


def test_a_consumer_that_dies_does_not_fail_the_producer(
    pair: tuple[ThreadedSlot, ThreadedSlot],
) -> None:
    producer, consumer = pair
    partition = producer.partition(output_edge(), A)
    consumer.gate(input_edge([(producer.endpoint, A)]))
    subpartition = partition.subpartitions[0]
    run_until(pair, lambda: subpartition.has_reader)
    consumer.exchange.close()
    sent = 0
    while partition.is_available():  # writes into a socket that nobody reads
        partition.emit(numbers(sent, 10_000))
        sent += 10_000
    run_until([producer], lambda: not subpartition.has_reader)
    assert not producer.errors
    assert not partition.is_drained()
    partition.release()


def test_nobody_listens_there(slots: Any, directory: Path) -> None:
    consumer = slots("c")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    for endpoint in (
        internal_pb2.DataEndpoint(slot_id="u", host_id="host", unix_path=str(directory / "none")),
        internal_pb2.DataEndpoint(slot_id="t", host_id="x", tcp_host="127.0.0.1", tcp_port=port),
        internal_pb2.DataEndpoint(slot_id="n", host_id="x", tcp_host="host.invalid", tcp_port=1),
    ):
        consumer.gate(input_edge([(endpoint, A)]))
    run_until([consumer], lambda: len(consumer.errors) == 3)
    assert all("cannot be reached" in str(error) for error in consumer.errors)


def test_a_resolver_that_hangs_holds_up_nobody_else(
    slots: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer, look_up, answered = slots("c"), socket.getaddrinfo, threading.Event()

    def hangs(host: str, *args: Any, flags: int = 0, **options: Any) -> Any:
        if host == "slow.invalid" and not flags & socket.AI_NUMERICHOST:
            answered.wait(30)
        return look_up(host, *args, flags=flags, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    for name, host in (("s", "slow.invalid"), ("o", "other.invalid")):
        endpoint = internal_pb2.DataEndpoint(slot_id=name, host_id="x", tcp_host=host, tcp_port=1)
        consumer.gate(input_edge([(endpoint, A)]))
    run_until([consumer], lambda: len(consumer.errors) == 1)
    assert "other.invalid:1 cannot be reached" in str(consumer.errors[0])
    answered.set()
    run_until([consumer], lambda: len(consumer.errors) == 2)
    assert "slow.invalid:1 cannot be reached" in str(consumer.errors[1])


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n0123456789",
        encode_frame(FrameKind.SUBSCRIBE, 0, b"x"),
        encode_frame(FrameKind.HELLO, 0, b"\xc1"),
        encode_frame(FrameKind.HELLO_OK, 0, b""),
    ],
)
def test_strangers_are_disconnected(slots: Any, data: bytes) -> None:
    slot = slots("p")
    with socket.create_connection(("127.0.0.1", slot.endpoint.tcp_port), timeout=10) as client:
        client.sendall(data)
        client.setblocking(False)
        run_until([slot], lambda: _has_ended(client))


def _has_ended(client: socket.socket) -> bool:
    try:
        return client.recv(100) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_a_refusal_reaches_a_peer_of_another_version(slots: Any, directory: Path) -> None:
    slot = slots("p")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(directory / "p"))
        hello = Hello(99, "job", "x", "x", 3, "t")
        client.sendall(encode_frame(FrameKind.HELLO, 0, encode_message(hello)))
        client.setblocking(False)
        decoder, frames = FrameDecoder(), []

        def read() -> bool:
            try:
                frames.extend(fed(decoder, client.recv(1000)))
            except BlockingIOError:
                return False
            return bool(frames)

        run_until([slot], read)
    assert "version 99" in decode_message(Refused, frames[0].payload).reason


@pytest.mark.parametrize("is_held_up", [False, True])
def test_a_reset_connection_is_a_lost_one(
    slots: Any, monkeypatch: pytest.MonkeyPatch, is_held_up: bool
) -> None:
    """A peer that takes the connection and resets it; it is greeted once more, also where this process is held up, and
    learns only behind that that there was one."""
    is_reset, connected = threading.Event(), _Loop._connected

    def late(*arguments: Any) -> None:
        is_reset.wait(DEADLINE_S)
        connected(*arguments)

    if is_held_up:
        monkeypatch.setattr(_Loop, "_connected", late)
    consumer = slots("c")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        endpoint = internal_pb2.DataEndpoint(
            slot_id="p", host_id="x", tcp_host="127.0.0.1", tcp_port=server.getsockname()[1]
        )
        consumer.gate(input_edge([(endpoint, A)]))
        accepted: list[socket.socket] = []

        def accept() -> bool:
            try:
                accepted.append(server.accept()[0])
            except BlockingIOError:
                return False
            return True

        for _ in range(2):
            run_until([consumer], accept)
            sock = accepted.pop()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
            is_reset.set()
        run_until([consumer], lambda: bool(consumer.errors))
    assert "the connection to slot p" in str(consumer.errors[0])


def test_listening(slots: Any, directory: Path) -> None:
    slot = slots("p")
    path = directory / "p"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = SocketTransport()
    with pytest.raises(OSError, match="in use"):
        other.listen(str(path), "", 0)
    with pytest.raises(OSError, match="shorter TMPDIR") as raised:
        other.listen("/tmp/" + "x" * 120, "", 0)
    assert raised.value.errno == errno.ENAMETOOLONG
    port = slot.endpoint.tcp_port
    assert other.listen("", "127.0.0.1", port) > port  # the next free one
    other.close()


def test_many_connections_at_once(slots: Any) -> None:
    producer = slots("p")
    edge = output_edge(graph_pb2.PARTITIONING_BROADCAST, 12)
    partition = producer.partition(edge, A)
    consumers = [slots(f"c{index}") for index in range(12)]
    gates = [
        slot.gate(input_edge([(producer.endpoint, A)], index))
        for index, slot in enumerate(consumers)
    ]
    partition.emit(numbers(0, 100))
    end(partition)
    got: list[list[Any]] = [[] for _ in gates]

    def step() -> bool:
        for rows, gate in zip(got, gates, strict=True):
            rows += rows_of(drain(gate))
        return all(gate.is_finished for gate in gates) and partition.is_drained()

    run_until([producer, *consumers], step)
    assert got == [list(range(100))] * 12
