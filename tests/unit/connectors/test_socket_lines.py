"""Aim: a server's lines become rows until it closes; a silent or full reader holds nothing up.

Method: a real server on 127.0.0.1; the test waits on the reader's wake-up, with a deadline.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.connectors import socket_source
from penstock.connectors.source import END, Reader
from penstock.errors import BadRecord, TaskFailure

DEADLINE_S = 90


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(DEADLINE_S)
        yield listening


class Waiting:
    """A reader and the event its wake-up sets."""

    def __init__(self, harness: Any, port: int, host: str = "127.0.0.1") -> None:
        self.woken = threading.Event()
        harness.wake = self.woken.set
        source = harness.start(*socket_source(host, port))
        (split,) = harness.discover(source)
        self.reader: Reader = source.open(split, None)

    def lines(self, count: int, max_rows: int = 1000) -> list[str]:
        found: list[str] = []
        while len(found) < count:
            batch = self.next(max_rows)
            assert batch is not END
            found += batch.column("line").to_pylist()
        return found

    def next(self, max_rows: int = 1000) -> Any:
        while True:
            self.woken.clear()
            batch = self.reader.read(max_rows)
            if batch is not None:
                return batch
            if self.reader.next_read_at_ms() is None:
                assert self.woken.wait(DEADLINE_S), "nothing came"


def test_lines_until_the_server_closes(harness: Any, server: socket.socket) -> None:
    waiting = Waiting(harness, server.getsockname()[1])
    connection, _ = server.accept()
    assert waiting.reader.read(10) is None
    connection.sendall(b"one\r\ntwo\n\nthr")
    assert waiting.lines(3) == ["one", "two", ""]
    connection.sendall("ee é\nfour\nfive".encode())
    connection.close()
    assert waiting.lines(3, max_rows=1) == ["three é", "four", "five"]
    assert waiting.next() is END
    assert waiting.reader.position() == b""
    waiting.reader.close()


def test_text_that_is_no_utf8(skipping: Any, harness: Any, server: socket.socket) -> None:
    for here, expected in ((skipping, ["ok"]), (harness, None)):
        waiting = Waiting(here, server.getsockname()[1])
        connection, _ = server.accept()
        connection.sendall(b"\xff\nok\n")
        connection.close()
        if expected is None:
            with pytest.raises(BadRecord, match="not valid UTF-8"):
                waiting.lines(1)
        else:
            assert waiting.lines(1) == expected
        waiting.reader.close()
    assert skipping.bad[0][0].endswith(":1")


def test_nobody_listens(harness: Any, server: socket.socket) -> None:
    port = server.getsockname()[1]
    server.close()
    waiting = Waiting(harness, port)
    with pytest.raises(TaskFailure, match=f"socket 127.0.0.1:{port}: Connection refused"):
        waiting.next()
    waiting.reader.close()


def test_a_host_whose_name_is_none(harness: Any, server: socket.socket) -> None:
    """It was taken for a server that has said all: the job finished without a row."""
    waiting = Waiting(harness, server.getsockname()[1], "no..host")
    with pytest.raises(TaskFailure, match=r"socket no\.\.host:.*label empty or too long"):
        waiting.next()
    waiting.reader.close()


def test_closing_ends_the_thread(harness: Any, server: socket.socket) -> None:
    before = threading.active_count()
    waiting = Waiting(harness, server.getsockname()[1])
    connection, _ = server.accept()
    assert threading.active_count() == before + 1
    waiting.reader.close()
    assert threading.active_count() == before
    assert connection.recv(1) == b""
    connection.close()


def test_a_full_reader_holds_the_server_back(harness: Any, server: socket.socket) -> None:
    waiting = Waiting(harness, server.getsockname()[1])
    connection, _ = server.accept()
    connection.setblocking(False)
    chunk = (b"x" * 999 + b"\n") * 1000
    sent = 0
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    # Until the server's side takes nothing for a while: both buffers and the reader's are full.
    while sent < 64 * len(chunk) and poll.poll(300):
        sent += connection.send(chunk[sent % 1000 :])
    assert sent < 64 * len(chunk)
    assert len(waiting.lines(sent // 1000)) == sent // 1000
    waiting.reader.close()
    connection.close()
