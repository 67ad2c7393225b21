"""Aim: whatever comes in at the gRPC ports of both daemons, they answer everybody else, and their memory stays bounded.

Method: real daemons, what is sent drawn from seeds: bytes, HTTP/2 frames in and out of order, and to every method
of every service messages of its type with fields from the edges of their ranges and beyond, messages of other types,
and bytes that are no message; with and without the token, and with the fences that let a call in. After each round
both daemons must be the processes that they were, take no more memory than a bound, and run a job.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pyarrow as pa
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

import penstock as ps
from common.pb import internal_pb2
from penstock.client.client import Client
from penstock.client.protocol import MESSAGE_SIZE_MAX_BYTES
from penstock.pb import client_pb2
from tests.support.processes import DaemonCluster, site

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

CALL_TIMEOUT_S = 2.0
ROUND_CALLS = 400
GROWTH_MAX_BYTES = 256 << 20
"""Of a daemon's memory, over all that is sent; a message may have a quarter of it."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
JOBMANAGER = [
    *client_pb2.DESCRIPTOR.services_by_name["JobManager"].methods,
    *internal_pb2.DESCRIPTOR.services_by_name["JobManagerInternal"].methods,
]
TASKMANAGER = [*internal_pb2.DESCRIPTOR.services_by_name["TaskManagerInternal"].methods]
INTEGERS = [-(2**63), -(2**31), -1, 0, 1, 2, 7, 2**31 - 1, 2**32, 2**63 - 1, 2**64 - 1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonCluster]:
    """A JobManager and a TaskManager; all rounds go at the same processes."""
    with site(tmp_path_factory.mktemp("hostile")) as place:
        cluster = DaemonCluster(place)
        cluster.start(slots=2, heartbeat_interval="200ms", jobmanager_taskmanagers_max="20")
        yield cluster
        cluster.stop()
        place.assert_nothing_left()


class Target:
    """One daemon, and what is known of it."""

    def __init__(self, cluster: DaemonCluster, role: str) -> None:
        self._cluster = cluster
        (self._daemon,) = cluster.daemons(role)
        self.methods = JOBMANAGER if role == "jobmanager" else TASKMANAGER
        host, _, port = str(self._daemon["address"]).rpartition(":")
        self.host, self.port = host, int(port)
        self.token = (cluster.directory / "token").read_text().strip()
        self._before = self.memory_bytes()

    def memory_bytes(self) -> int:
        """What the process has in memory; fails where it has ended."""
        return int(psutil.Process(self._daemon["pid"]).memory_info().rss)

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), CALL_TIMEOUT_S)

    def known(self) -> dict[str, list[Any]]:
        """By field: values with which a call gets further."""
        registered = self._cluster.wait_for_log("jobmanager", "taskmanager.registered")
        with Client(self._cluster.jobmanager) as client:
            epoch = client.hello().leader_epoch
            jobs = [job.job_id for job in client.jobs()]
        return {
            "leader_epoch": [epoch],
            "incarnation": [registered["incarnation"], "other"],
            "taskmanager_id": [registered["taskmanager_id"]],
            "rpc_address": [registered["address"], "127.0.0.1:1", "a..b:1", "nothing"],
            "job_id": [*jobs, "0" * 32, "../x"],
            "slot_id": [f"{registered['taskmanager_id']}-0"],
            "slot_ids": [f"{registered['taskmanager_id']}-0", "x"],
            "allocation_id": [1, 2, 2**62],
            "slots": [1, 1_024, 2**31 - 1],
            "protocol_version": [1],
            # Nothing outside of the test's own places may be named.
            "directory": ["", "nowhere", "no/where"],
            "path": ["", "nowhere"],
        }

    def assert_bounded(self) -> None:
        grown = self.memory_bytes() - self._before
        assert grown < GROWTH_MAX_BYTES, f"{grown >> 20} MB more than before"


@pytest.fixture
def jobmanager(cluster: DaemonCluster) -> Target:
    return Target(cluster, "jobmanager")


@pytest.fixture
def taskmanager(cluster: DaemonCluster) -> Target:
    return Target(cluster, "taskmanager")


def assert_serves(cluster: DaemonCluster, tmp_path: Path) -> None:
    """A job gets its slots and is exact; what the calls have left waiting is cancelled first."""
    with Client(cluster.jobmanager) as client:
        for job in client.jobs():
            client.cancel(job.job_id)
    with ps.Environment(cluster.jobmanager, parallelism=2) as env:
        rows = env.from_arrow(pa.table({"a": range(1_000)})).filter(ps.col("a") % 2 == 0)
        rows.rebalance().write_json(str(tmp_path / "out"))
        assert env.execute("proper").status == "FINISHED"
    files = (tmp_path / "out").rglob("*.json")
    assert sum(len(file.read_text().splitlines()) for file in files) == 500


# ---------------------------------------------------------------- bytes and HTTP/2


def http2_frame(draw: random.Random) -> bytes:
    payload = draw.randbytes(draw.choice([0, 1, 4, 5, 6, 8, 9, 64, 1_000, 16_384]))
    length = draw.choice([len(payload), len(payload), 0, 2**24 - 1])
    kind = draw.choice([*range(10), 99])
    stream = draw.choice([0, 1, 2, 3, 2**31 - 1, 2**32 - 1])
    header = struct.pack(">I", length)[1:] + bytes([kind, draw.choice([0, 1, 4, 5, 255])])
    return header + struct.pack(">I", stream) + payload


def hostile_bytes(draw: random.Random) -> bytes:
    match draw.randrange(4):
        case 0:
            return draw.randbytes(draw.choice([0, 1, 24, 1_000, 100_000]))
        case 1:
            return PREFACE[: draw.randrange(len(PREFACE))]
        case 2:
            frames = b"".join(http2_frame(draw) for _ in range(draw.randrange(1, 20)))
            return PREFACE + frames
        case _:
            # Settings first, as it should be, then a flood of one kind.
            return PREFACE + bytes(3) + b"\x04" + bytes(5) + http2_frame(draw) * 500


@pytest.mark.parametrize("role", ["jobmanager", "taskmanager"])
def test_bytes_that_are_no_calls(cluster: DaemonCluster, tmp_path: Path, role: str) -> None:
    target, draw = Target(cluster, role), random.Random(role)
    with contextlib.ExitStack() as left_open:
        for number in range(200):
            sock = target.connect()
            if number % 4:
                left_open.callback(sock.close)
            with contextlib.suppress(OSError):  # it was sent away, as it should be
                sock.sendall(hostile_bytes(draw))
            if not number % 4:
                sock.close()
        # While all of them are still connected.
        assert_serves(cluster, tmp_path)
        target.assert_bounded()


# ---------------------------------------------------------------- messages


def value_of(draw: random.Random, field: FieldDescriptor, known: dict[str, list[Any]]) -> Any:
    if field.name in known and draw.random() < 0.8:
        return draw.choice(known[field.name])
    if field.name in ("directory", "path"):
        return ""
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            texts = ["", "a", "../x", "x" * 5_000, "\0", "é\n", "tm-1", "127.0.0.1:1", "1s"]
            return draw.choice(texts)
        case FieldDescriptor.TYPE_BYTES:
            return draw.randbytes(draw.choice([0, 1, 100, 100_000]))
        case FieldDescriptor.TYPE_BOOL:
            return draw.random() < 0.5
        case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
            return draw.choice([0.0, -1.0, 1e300, float("inf"), float("nan")])
        case FieldDescriptor.TYPE_ENUM:
            return draw.choice([0, 1, 2, 99, -1])
        case _:
            return draw.choice(INTEGERS)


def fill(
    draw: random.Random, message: Message, known: dict[str, list[Any]], depth: int = 0
) -> None:
    """Sets some fields; what the field cannot hold is left out."""
    for field in message.DESCRIPTOR.fields:
        if draw.random() > (0.9 if depth == 0 else 0.4):
            continue
        count = draw.choice([0, 1, 2, 50]) if field.is_repeated and depth < 3 else 1
        for _ in range(count):
            with contextlib.suppress(ValueError, TypeError):
                if field.message_type is None:
                    value = value_of(draw, field, known)
                    if field.is_repeated:
                        getattr(message, field.name).append(value)
                    else:
                        setattr(message, field.name, value)
                elif field.message_type.GetOptions().map_entry:
                    getattr(message, field.name)["execution.checkpointing.interval"] = "x"
                elif depth < 4:
                    inner = getattr(message, field.name)
                    inner = inner.add() if field.is_repeated else inner
                    inner.SetInParent() if not field.is_repeated else None
                    fill(draw, inner, known, depth + 1)


def hostile_request(
    draw: random.Random, method: MethodDescriptor, target: Target, known: dict[str, list[Any]]
) -> bytes:
    match draw.randrange(10):
        case 0:
            return draw.randbytes(draw.choice([1, 10, 1_000, 100_000]))
        case 1:
            other = draw.choice(target.methods).input_type
        case 2 if draw.random() < 0.1:
            return b"\x0a\xff\xff\xff\x0f" + bytes(MESSAGE_SIZE_MAX_BYTES)  # too large a message
        case _:
            other = method.input_type
    message = message_factory.GetMessageClass(other)()
    fill(draw, message, known)
    return bytes(message.SerializeToString())


def make_call(
    draw: random.Random,
    channel: grpc.Channel,
    method: MethodDescriptor,
    requests: list[bytes],
    token: str,
) -> grpc.StatusCode:
    """One call, its answer read for a while; how it ended."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
    }
    made = kinds[method.client_streaming, method.server_streaming](path)
    metadata = [("authorization", f"Bearer {token}")]
    timeout_s = draw.choice([0.05, CALL_TIMEOUT_S])
    asked = iter(requests) if method.client_streaming else requests[0]
    try:
        answer = made(asked, timeout=timeout_s, metadata=metadata)
        if method.server_streaming:
            for _ in zip(range(5), answer, strict=False):
                pass
            answer.cancel()
    except grpc.RpcError as error:
        return error.code()  # type: ignore[no-any-return,attr-defined]
    return grpc.StatusCode.OK


@pytest.mark.parametrize("role", ["jobmanager", "taskmanager"])
@pytest.mark.parametrize("seed", range(2))
def test_messages_of_right_and_wrong_types(
    cluster: DaemonCluster, tmp_path: Path, role: str, seed: int
) -> None:
    target, draw = Target(cluster, role), random.Random(f"{role}-{seed}")
    known = target.known()
    codes: dict[grpc.StatusCode, int] = {}
    with grpc.insecure_channel(f"{target.host}:{target.port}") as channel:
        for _ in range(ROUND_CALLS):
            method = draw.choice(target.methods)
            requests = [
                hostile_request(draw, method, target, known) for _ in range(draw.choice([1, 3]))
            ]
            token = target.token if draw.random() < 0.9 else "x"
            code = make_call(draw, channel, method, requests, token)
            codes[code] = codes.get(code, 0) + 1
    # Whoever reads this wants to know that the calls got somewhere.
    assert grpc.StatusCode.UNAUTHENTICATED in codes, codes
    assert grpc.StatusCode.INVALID_ARGUMENT in codes or grpc.StatusCode.OK in codes, codes
    target.assert_bounded()
    assert_serves(cluster, tmp_path)
    target.assert_bounded()
