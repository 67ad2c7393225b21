"""A test's two ends of a running job: lines that go in, rows that come out, each as it happens.

``LineServer`` is what ``env.read_socket`` connects to, ``RowReceiver`` what ``SocketSink`` sends to. Both
block with a deadline, so that a test waits for what it wants to see and for nothing else.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from collections.abc import Iterable
from typing import Any, Self

import pyarrow as pa
from typing_extensions import override

import penstock as ps

DEADLINE_S = 90.0


class LineServer:
    """Sends lines to the one client that connects."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(DEADLINE_S)
        self._connection: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._listener.close()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def accept(self) -> None:
        """Waits until the source has connected."""
        if self._connection is None:
            self._connection, _ = self._listener.accept()
            self._connection.settimeout(DEADLINE_S)

    def send(self, *lines: str) -> None:
        """Sends lines as they are."""
        self.accept()
        assert self._connection is not None
        self._connection.sendall("".join(f"{line}\n" for line in lines).encode())

    def send_rows(self, rows: Iterable[dict[str, Any]]) -> None:
        """Sends rows as JSON lines."""
        self.send(*(json.dumps(row) for row in rows))

    def end(self) -> None:
        """Closes the connection: the end of the data."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class RowReceiver:
    """Takes the rows of a ``SocketSink`` while the job runs."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._rows: queue.Queue[dict[str, Any]] = queue.Queue()
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(DEADLINE_S)
        for connection in self._connections:
            with contextlib.suppress(OSError):  # its thread has closed it
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join(DEADLINE_S)

    def sink(self) -> SocketSink:
        """A sink that sends here."""
        return SocketSink(int(self._listener.getsockname()[1]))

    def take(self, count: int) -> list[dict[str, Any]]:
        """The next rows, as many as asked for."""
        return [self._rows.get(timeout=DEADLINE_S) for _ in range(count)]

    @property
    def is_empty(self) -> bool:
        """True when no row waits to be taken."""
        return self._rows.empty()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            thread = threading.Thread(target=self._receive, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _receive(self, connection: socket.socket) -> None:
        with connection, connection.makefile() as lines:
            for line in lines:
                self._rows.put(json.loads(line))


class SocketSink(ps.Sink):
    """Sends each row as a JSON line; times as text."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: socket.socket | None = None

    @override
    def open(self, ctx: ps.SinkContext) -> None:
        self._connection = socket.create_connection(("127.0.0.1", self._port), DEADLINE_S)

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        assert self._connection is not None
        lines = [json.dumps(row, default=str) + "\n" for row in batch.to_pylist()]
        self._connection.sendall("".join(lines).encode())

    @override
    def flush(self) -> None:
        """Nothing is kept back."""

    @override
    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
