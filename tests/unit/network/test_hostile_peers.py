"""Whatever a peer sends ends its own connection, and nothing else.

Aim: a slot and a partition server outlive malformed greetings, random bytes, damaged frames and connections that
say nothing; memory is taken as bytes arrive. Method: the sockets of real slots, what is sent drawn from seeds; after
every attack a proper consumer reads its rows.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import select
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from common.clock import SystemClock
from penstock.client.protocol import DAEMON_PROTOCOL_VERSION
from penstock.partition_id import PartitionId
from taskmanager.network import connection_runner
from taskmanager.network.connection_pool import ConnectionPool
from taskmanager.network.connection_runner import SocketTransport
from taskmanager.network.endpoint_names import endpoint_name, endpoint_of
from taskmanager.network.frames import (
    BATCH_PAYLOAD_MAX,
    Frame,
    FrameDecoder,
    FrameError,
    FrameKind,
    encode_frame,
    encode_header,
)
from taskmanager.network.messages import Hello, HelloOk, Subscribe, encode_message
from taskmanager.network.peer_connection import PeerConnection
from taskmanager.partitions.server import PartitionShelf
from taskmanager.processes.mailbox import Mailbox
from tests.support.exchange_slots import (
    ThreadedSlot,
    attempt_id,
    configuration,
    drain,
    end,
    identity,
    input_edge,
    numbers,
    output_edge,
    rows_of,
    run_until,
)
from tests.support.fed_frames import fed
from tests.support.sealed_partitions import seal_rows

A = attempt_id("v0")
HELLO = Hello(DAEMON_PROTOCOL_VERSION, "job", "x", "x|h|/x|:0", 7, "t")
SUBSCRIBE = Subscribe("job", "e0", "v0", 0, 0, 0, 1 << 20, "c", 0, 0)


class PartitionServer:
    """The partition server's part of the exchange, run by the test."""

    def __init__(self, directory: Path) -> None:
        self.mailbox = Mailbox()
        self.pool = ConnectionPool(
            configuration(),
            identity("partitions", job_id=""),
            PartitionShelf(directory),
            self.mailbox.post,
            SystemClock(),
            SocketTransport(),
        )
        self.path = str(directory / "partitions.sock")
        self.pool.listen(self.path, "", "")

    def run(self) -> None:
        """Handles what has come, as the server does: an exception would be its end."""
        while (mail := self.mailbox.wait(0)) is not None:
            mail()

    def close(self) -> None:
        self.pool.close()
        self.run()


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ps-") as name:
        yield Path(name)


@pytest.fixture
def slot(directory: Path) -> Iterator[ThreadedSlot]:
    made = ThreadedSlot("p", str(directory / "p"))
    yield made
    made.exchange.close()


@pytest.fixture
def server(directory: Path) -> Iterator[PartitionServer]:
    made = PartitionServer(directory)
    yield made
    made.close()


def connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(path)
    return sock


def send(path: str, *pieces: bytes) -> None:
    with connect(path) as sock:
        try:
            for piece in pieces:
                sock.sendall(piece)
        except OSError:
            return  # it was sent away, as it should be


def hello(**fields: Any) -> bytes:
    values = {name: getattr(HELLO, name) for name in HELLO.__slots__} | fields
    return encode_frame(FrameKind.HELLO, 0, encode_message(Hello(**values)))


def subscribe(**fields: Any) -> bytes:
    values = {name: getattr(SUBSCRIBE, name) for name in SUBSCRIBE.__slots__} | fields
    return encode_frame(FrameKind.SUBSCRIBE, 1, encode_message(Subscribe(**values)))


def is_settled(slot: ThreadedSlot) -> bool:
    """Nobody but a proper peer is connected."""
    return not slot.exchange._connections._connections


def attack(draw: random.Random) -> bytes:
    """What one hostile connection sends: proper frames, some of them damaged, and noise."""
    frames = []
    for _ in range(draw.randrange(4)):
        kind = draw.choice(list(FrameKind))
        payload = draw.choice(
            [
                draw.randbytes(draw.randrange(64)),
                encode_message(SUBSCRIBE),
                encode_message(HELLO),
                b"\x93" * draw.randrange(2_000),
                b"",
            ]
        )
        frames.append(
            encode_header(
                kind,
                draw.choice([0, 1, 2**32 - 1]),
                draw.choice([len(payload), draw.randrange(2**32)]),
                flags=draw.choice([0, 1, 255]),
                schema_id=draw.choice([0, 2**32 - 1]),
                sequence=draw.choice([0, 1, 2**64 - 1]),
                row_offset=draw.choice([0, 2**64 - 1]),
            )
            + payload
        )
    for _ in range(draw.randrange(4)):
        number = draw.choice([-1, 0, 2**31, 2**63])
        field = draw.choice(["subtask_index", "attempt", "subpartition_index", "first_row"])
        try:
            frames.append(subscribe(**{field: number}))
        except OverflowError:
            continue
    if draw.random() < 0.1:
        frames.append(draw.randbytes(draw.randrange(200)))
    data = bytearray(b"".join(frames))
    for _ in range(draw.choice([0, 0, 1, 3])):
        data[draw.randrange(len(data)) if data else 0 :][:1] = draw.randbytes(1)
    if data and draw.random() < 0.3:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


@pytest.mark.parametrize(
    "endpoint",
    ["", "x", "|||", "a|b|c", "a|b|c|d", "a|b|c|d:x", "a|b|c|d:-1", "a|b|c|:99999", "a|b|c|d:1|e"],
)
def test_a_malformed_endpoint_ends_its_own_connection_only(
    slot: ThreadedSlot, server: PartitionServer, directory: Path, endpoint: str
) -> None:
    with pytest.raises(FrameError):
        endpoint_of(endpoint)
    for path in (str(directory / "p"), server.path):
        send(path, hello(endpoint=endpoint))
    run_until((slot,), lambda: is_settled(slot))
    server.run()
    proper_read(slot, directory)


OUTSIDE = [
    ("../outside", "e0"),
    ("job", "../../outside/job/e0"),
    ("job", ".."),
    ("", "e0"),
    (".", "e0"),
    ("job", "e0\0"),
    ("job", "x" * 5000),
]


@pytest.mark.parametrize(("job_id", "edge_id"), OUTSIDE)
def test_names_lead_to_nothing_outside_the_spill_directory(
    directory: Path, job_id: str, edge_id: str
) -> None:
    """The peer is refused the one partition, and nobody takes it for a failure of the server."""
    spill = directory / "spill"
    seal_rows(spill, "job", PartitionId("e0", "v0", 0, 0), 10)
    shutil.copytree(spill, directory / "outside")
    server = PartitionServer(spill)
    try:
        with connect(server.path) as sock:
            sock.sendall(hello())
            answer_of(server, sock)
            sock.sendall(subscribe(job_id=job_id, edge_id=edge_id))
            assert re.search(b"is not held here|cannot be read", answer_of(server, sock))
            # The connection is as good as before.
            sock.sendall(subscribe(edge_id="e1"))
            assert b"e1" in answer_of(server, sock)
    finally:
        server.close()


def answer_of(server: PartitionServer, sock: socket.socket) -> bytes:
    """What the server says next; it runs until it does."""
    while not select.select([sock], [], [], 0)[0]:
        mail = server.mailbox.wait(10)
        assert mail is not None
        mail()
        select.select([sock], [], [], 0.01)
    answer = sock.recv(1 << 16)
    assert answer, "the connection has ended"
    return answer


def test_names_of_endpoints_come_back() -> None:
    for name in ("p|host|/run/x.sock|10.0.0.1:7", "p|h||:0", "p|h||::1:80"):
        assert endpoint_name(endpoint_of(name)) == name


def proper_read(slot: ThreadedSlot, directory: Path) -> None:
    """A consumer reads rows over the same port."""
    partition = slot.partition(output_edge(), A)
    consumer = ThreadedSlot("c", str(directory / "c"))
    try:
        gate = consumer.gate(input_edge([(slot.endpoint, A)]))
        partition.emit(numbers(0, 1000))
        end(partition)
        got: list[Any] = []

        def read_all() -> bool:
            got.extend(drain(gate))
            return gate.is_finished

        run_until((slot, consumer), read_all)
        assert rows_of(got) == list(range(1000))
    finally:
        consumer.exchange.close()


@pytest.mark.parametrize("seed", range(3))
def test_random_frames_end_their_own_connection_only(
    slot: ThreadedSlot,
    server: PartitionServer,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    seen: dict[str, set[FrameKind]] = {"p": set(), "partitions": set()}
    handle = PeerConnection._channel_frame

    def noting(connection: PeerConnection, frame: Frame) -> None:
        seen[connection._owner.slot.slot_id].add(frame.kind)
        handle(connection, frame)

    monkeypatch.setattr(PeerConnection, "_channel_frame", noting)

    def run() -> None:
        server.run()
        run_until((slot,), lambda: True)

    draw = random.Random(seed)
    each_kind = [encode_frame(kind, 0, draw.randbytes(draw.randrange(64))) for kind in FrameKind]
    for data in [*each_kind, *(attack(draw) for _ in range(150))]:
        for path in (str(directory / "p"), server.path):
            if data not in each_kind and draw.random() < 0.3:
                send(path, hello() + data)  # it does not wait to be let in
            else:
                send_when_let_in(path, data, run)
        run()
    run_until((slot,), lambda: is_settled(slot))
    # Frames of every kind have got past the handshake, at either port.
    assert all(kinds == set(FrameKind) for kinds in seen.values())
    monkeypatch.undo()
    proper_read(slot, directory)


def send_when_let_in(path: str, data: bytes, run: Callable[[], None]) -> None:
    """Greets as it should, and then sends this."""
    with connect(path) as sock:
        sock.sendall(hello())
        while not select.select([sock], [], [], 0.001)[0]:
            run()
        assert fed(FrameDecoder(), sock.recv(1 << 16))[0].kind is FrameKind.HELLO_OK
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while True:
                run()
                if select.select([sock], [], [], 0.001)[0] and not sock.recv(1 << 16):
                    return
        except OSError:
            return  # it was sent away, as it should be


NewPool = Callable[..., ConnectionPool]


@pytest.fixture
def new_pool(directory: Path) -> Iterator[NewPool]:
    """Makes the connections of slots, and ends them."""
    with contextlib.ExitStack() as pools:

        def make(
            transport: SocketTransport, post: Any, slot_id: str = "p", **listeners: Any
        ) -> ConnectionPool:
            shelf = PartitionShelf(directory)
            pool = ConnectionPool(
                configuration(),
                identity(slot_id),
                shelf,
                post,
                SystemClock(),
                transport,
                **listeners,
            )
            pools.callback(pool.close)
            return pool

        yield make


@pytest.mark.parametrize("said", [b"", hello()[:10], hello()[:-1]])
def test_who_does_not_greet_in_time_is_sent_away_also_while_the_mailbox_is_busy(
    directory: Path, new_pool: NewPool, said: bytes
) -> None:
    # Nobody takes the mail: the slot's own work goes on all the while.
    pool = new_pool(SocketTransport(greeting_timeout_s=0.05), Mailbox().post)
    path = str(directory / "p")
    pool.listen(path, "", "")
    with connect(path) as sock:
        sock.sendall(said)
        assert sock.recv(1) == b""


def test_who_has_greeted_waits_as_long_as_the_mailbox_is_busy(
    directory: Path, new_pool: NewPool
) -> None:
    mailbox = Mailbox()
    pool = new_pool(SocketTransport(greeting_timeout_s=2.0), mailbox.post)
    path = str(directory / "p")
    pool.listen(path, "", "")
    with connect(path) as greeted, connect(path) as silent:
        # What it says behind the greeting is not even read before it has been let in.
        greeted.settimeout(0.2)
        with pytest.raises(TimeoutError):
            greeted.sendall(hello() * 500_000)
        assert silent.recv(1) == b"", "time has passed"
        (link,) = pool._transport._loop._links  # type: ignore[attr-defined]
        assert sum(map(len, link._inbox)) < 1_000
        greeted.setblocking(False)
        with pytest.raises(BlockingIOError):
            greeted.recv(1)
        while not (answers := select.select([greeted], [], [], 0)[0]):
            mail = mailbox.wait(10)
            assert mail is not None
            mail()
        assert answers


def test_who_is_let_in_at_once_has_greeted_in_time(directory: Path, new_pool: NewPool) -> None:
    pool = new_pool(
        SocketTransport(), lambda mail: mail()
    )  # before the I/O thread does anything else
    path = str(directory / "p")
    pool.listen(path, "", "")
    with connect(path) as sock:
        sock.sendall(hello())
        assert fed(FrameDecoder(), sock.recv(1 << 16))[0].kind is FrameKind.HELLO_OK
        # It is waited for no more, and is read on.
        assert not pool._transport._loop._silent  # type: ignore[attr-defined]
        sock.sendall(subscribe(edge_id="e1"))
        assert b"e1" in sock.recv(1 << 16)


def test_a_consumer_greets_while_its_mailbox_is_busy(directory: Path, new_pool: NewPool) -> None:
    consumer = new_pool(SocketTransport(), Mailbox().post, "c")  # nobody takes the mail
    path = str(directory / "p")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(10)
        consumer.connection_to(endpoint_of(f"p|{identity('c').host_id}|{path}|:0"))
        peer, _ = listener.accept()
        with peer:
            peer.settimeout(10)
            said = peer.recv(1 << 16)
            assert fed(FrameDecoder(), said)[0].kind is FrameKind.HELLO


def test_an_answer_may_come_before_the_mailbox_has_heard_of_the_connection(
    directory: Path, new_pool: NewPool
) -> None:
    mailbox = Mailbox()
    consumer = new_pool(SocketTransport(), mailbox.post, "c")
    path = str(directory / "p")
    name = f"p|{identity('c').host_id}|{path}|:0"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(10)
        connection = consumer.connection_to(endpoint_of(name))
        peer, _ = listener.accept()
        with peer:
            peer.settimeout(10)
            peer.recv(1 << 16)
            # It lets us in, and wants something of ours at once.
            answer = encode_frame(FrameKind.HELLO_OK, 0, encode_message(HelloOk("p", name)))
            wanted = encode_frame(FrameKind.SUBSCRIBE, 1, encode_message(SUBSCRIBE))
            peer.sendall(answer + wanted)
            link = connection.link
            while not link._inbox and not link._is_gone:  # type: ignore[attr-defined]
                threading.Event().wait(0.001)
            while (mail := mailbox.take()) is not None:
                mail()
            assert connection.is_established
            assert not connection.is_closed


def test_a_consumer_that_was_sent_away_for_being_held_up_greets_again_once(
    directory: Path, new_pool: NewPool
) -> None:
    mailbox = Mailbox()
    lost: list[str] = []
    consumer = new_pool(
        SocketTransport(),
        mailbox.post,
        "c",
        on_unreachable=lambda peer, reason: lost.append(reason),
    )
    path = str(directory / "p")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(10)
        consumer.connection_to(endpoint_of(f"p|{identity('c').host_id}|{path}|:0"))
        for _ in range(2):
            assert not lost
            select_and_run(mailbox, listener)
            peer, _ = listener.accept()
            peer.close()
        while not lost:
            mail = mailbox.wait(10)
            assert mail is not None
            mail()


def select_and_run(mailbox: Mailbox, listener: socket.socket) -> None:
    """Handles mail until somebody connects."""
    while not select.select([listener], [], [], 0.01)[0]:
        while (mail := mailbox.take()) is not None:
            mail()


def test_connections_that_say_nothing_are_bounded(directory: Path, new_pool: NewPool) -> None:
    pool = new_pool(SocketTransport(strangers_max=4), Mailbox().post)
    path = str(directory / "p")
    pool.listen(path, "", "")
    socks = [connect(path) for _ in range(6)]
    try:
        # Those that came first are sent away, however busy the mailbox is.
        assert [sock.recv(1) for sock in socks[:2]] == [b"", b""]
        for sock in socks[2:]:
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(1)
    finally:
        for sock in socks:
            sock.close()


def test_without_descriptors_nothing_spins_and_who_waits_is_let_in_later(
    directory: Path, new_pool: NewPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, room = 0, threading.Event()
    accept = socket.socket.accept

    def without_descriptors(listener: socket.socket) -> Any:
        nonlocal tries
        tries += 1
        if not room.is_set():
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(connection_runner, "_ACCEPT_PAUSE_S", 0.1)
    monkeypatch.setattr(socket.socket, "accept", without_descriptors)
    mailbox = Mailbox()
    pool = new_pool(SocketTransport(), mailbox.post)
    path = str(directory / "p")
    pool.listen(path, "", "")
    with connect(path) as sock:
        sock.sendall(hello())
        begun = SystemClock().monotonic_ns()
        assert mailbox.wait(0.5) is None
        waited_s = (SystemClock().monotonic_ns() - begun) / 1e9
        assert 1 <= tries <= waited_s / 0.1 + 2
        room.set()
        while not select.select([sock], [], [], 0)[0]:
            mail = mailbox.wait(10)
            assert mail is not None
            mail()
        assert fed(FrameDecoder(), sock.recv(1 << 16))[0].kind is FrameKind.HELLO_OK


def test_a_connection_that_is_lost_before_it_is_accepted_ends_nothing(
    directory: Path, new_pool: NewPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accept(2) gives errors of the network that are those of one connection; the I/O thread of the slot ended with them."""
    errors = [errno.EHOSTUNREACH, errno.EPROTO, errno.EPERM]
    accept = socket.socket.accept

    def lost_at_first(listener: socket.socket) -> Any:
        if errors:
            raise OSError(errors[0], os.strerror(errors.pop(0)))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", lost_at_first)
    mailbox = Mailbox()
    pool = new_pool(SocketTransport(), mailbox.post)
    path = str(directory / "p")
    pool.listen(path, "", "")
    with connect(path) as sock:
        sock.sendall(hello())
        while not select.select([sock], [], [], 0)[0]:
            mail = mailbox.wait(10)
            assert mail is not None
            mail()
        assert fed(FrameDecoder(), sock.recv(1 << 16))[0].kind is FrameKind.HELLO_OK


def test_a_length_that_is_only_announced_takes_no_memory() -> None:
    decoder = FrameDecoder()
    decoder.open_limits()
    before = pa.total_allocated_bytes()
    fed(decoder, encode_header(FrameKind.BATCH, 0, BATCH_PAYLOAD_MAX))
    assert pa.total_allocated_bytes() - before <= 4 << 20
    fed(decoder, bytes(9 << 20))
    assert pa.total_allocated_bytes() - before <= 16 << 20
    decoder.clear()
    assert pa.total_allocated_bytes() == before


@pytest.mark.parametrize("size", [40_000, 4 << 20, (4 << 20) + 1, (21 << 20) + 7])
def test_large_payloads_come_whole(size: int) -> None:
    decoder = FrameDecoder()
    decoder.open_limits()
    payload = random.Random(size).randbytes(size)
    stream = encode_frame(FrameKind.BATCH, 3, payload) + encode_frame(
        FrameKind.CREDIT, 4, b"12345678"
    )
    frames = []
    for start in range(0, len(stream), 700_001):
        frames += fed(decoder, stream[start : start + 700_001])
    assert [frame.channel for frame in frames] == [3, 4]
    assert bytes(frames[0].payload) == payload


def test_a_connection_that_ends_within_a_large_frame_keeps_no_memory(
    slot: ThreadedSlot, directory: Path
) -> None:
    before = pa.total_allocated_bytes()
    for _ in range(8):
        sender = threading.Thread(
            target=send,
            args=(
                str(directory / "p"),
                hello(),
                encode_header(FrameKind.BATCH, 0, BATCH_PAYLOAD_MAX),
                bytes(6 << 20),
            ),
        )
        sender.start()
        run_until((slot,), lambda sender=sender: not sender.is_alive())
        sender.join()
    run_until((slot,), lambda: is_settled(slot) and pa.total_allocated_bytes() <= before)
