"""The metrics endpoint of a daemon, and peers that misuse it.

Aim: idle, slow and malformed connections cost a bounded number of descriptors, no threads, and end by a deadline;
``/health`` says whether the daemon serves. Method: a server with a short deadline, real sockets.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry, Gauge

from common.metrics_server import CONNECTIONS_MAX, MetricsServer, Pages
from tests.support.jobs import DEADLINE_S

why = [""]


@pytest.fixture
def port() -> Iterator[int]:
    registry = CollectorRegistry()
    Gauge("some", "A gauge.", registry=registry).set(7)
    server = MetricsServer(Pages(registry, lambda: why[0]), "127.0.0.1", 0, deadline_s=0.5)
    yield server.start()
    server.stop()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)


def page(port: int, path: str) -> tuple[int, str]:
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=DEADLINE_S) as found:
            return found.status, found.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(65536) == b""
    except ConnectionResetError:
        return True


def test_pages(port: int) -> None:
    status, text = page(port, "/metrics")
    assert (status, "some 7.0" in text) == (200, True)
    assert page(port, "/health") == (200, "serving\n")
    why[0] = "it is stopping"
    try:
        assert page(port, "/health") == (503, "it is stopping\n")
    finally:
        why[0] = ""
    assert page(port, "/other")[0] == 404


def test_idle_connections_are_bounded_cost_no_thread_and_end(port: int) -> None:
    threads = threading.active_count()
    socks = [connect(port) for _ in range(3 * CONNECTIONS_MAX)]
    assert threading.active_count() <= threads  # one of another test may end meanwhile
    assert all(ended(sock) for sock in socks), "what is too many at once, the rest by the deadline"
    for sock in socks:
        sock.close()
    assert page(port, "/health")[0] == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /metr",
        b"x" * 100_000,
        b"\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\n\r\n",
        b"\xff\xfe\r\n\r\n",
    ],
)
def test_malformed_requests_end_their_own_connection_only(port: int, request_bytes: bytes) -> None:
    send(port, request_bytes)
    assert page(port, "/health")[0] == 200


def test_random_requests_end_their_own_connection_only(port: int) -> None:
    draw = random.Random(7)
    for _ in range(50):
        send(port, draw.randbytes(draw.randrange(1, 300)) + b"\r\n\r\n")
    assert page(port, "/metrics")[0] == 200


def send(port: int, data: Any) -> None:
    with connect(port) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while not ended(sock):
                continue
        except OSError:
            return
