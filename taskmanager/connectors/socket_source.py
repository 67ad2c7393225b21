"""Lines from a TCP server. Not replayable: what a socket has said, it does not say again.

One thread per reader receives; it stops receiving while a megabyte of lines waits to be read, so that
back-pressure reaches the server. The server's end of the connection is the end of the split.
"""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from itertools import islice

import pyarrow as pa
from typing_extensions import override

from penstock.connectors.messages import os_reason
from penstock.connectors.source import END, EndOfSplit, Reader, Source, SourceContext, Split
from penstock.connectors.streams import SOCKET_SCHEMA
from penstock.errors import TaskFailure
from penstock.pb import graph_pb2

_WAITING_BYTES_MAX = 1 << 20
_LINE_OVERHEAD_BYTES = 48
_LINE_BYTES_MAX = 16 << 20
_RECEIVE_BYTES = 64 << 10
_CONNECT_TIMEOUT_S = 10.0
_JOIN_TIMEOUT_S = 5.0


class SocketSource(Source):
    """One split: the connection."""

    bounded = False

    def __init__(self, spec: graph_pb2.SocketSource) -> None:
        self._host, self._port = spec.host, spec.port
        self._context: SourceContext | None = None

    @property
    @override
    def schema(self) -> pa.Schema:
        return SOCKET_SCHEMA

    @override
    def start(self, ctx: SourceContext) -> None:
        self._context = ctx

    @override
    def discover(self, ctx: SourceContext) -> list[Split]:
        return [Split(id=f"{self._host}:{self._port}")]

    @override
    def open(self, split: Split, position: bytes | None) -> Reader:
        assert self._context is not None, "start() comes before open()"
        receiver = _Receiver(self._host, self._port, self._context.wake)
        return _SocketReader(receiver, split.id, self._context.bad_record)


class _Receiver:
    """The receiving thread and the lines it has got."""

    def __init__(self, host: str, port: int, wake: Callable[[], None]) -> None:
        self._host, self._port, self._wake = host, port, wake
        self._state = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._ended = False
        self._failure: TaskFailure | None = None
        self._stopped = False
        self._stop_receiver, self._stop_sender = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name=f"socket-{host}:{port}", daemon=True)
        self._thread.start()

    def take(self, max_lines: int) -> list[bytes] | None:
        """Lines that have come; None = the connection has ended.

        Raises:
            TaskFailure: it ended with an error.
        """
        with self._state:
            lines = list(islice(self._lines, max_lines))
            for line in lines:
                self._lines.popleft()
                self._waiting_bytes -= len(line) + _LINE_OVERHEAD_BYTES
            self._state.notify()
            if lines or not self._ended:
                return lines
            if self._failure is not None:
                raise self._failure
            return None

    def stop(self) -> None:
        """Ends the thread and closes the connection."""
        with self._state:
            self._stopped = True
            self._state.notify()
        self._stop_sender.close()
        self._thread.join(_JOIN_TIMEOUT_S)
        self._stop_receiver.close()

    # ------------------------------------------------------------ on the thread

    def _run(self) -> None:
        try:
            self._receive()
        except OSError as error:
            self._failure = TaskFailure(
                f"socket {self._host}:{self._port}: {os_reason(error)}; is the server running?"
            )
        except TaskFailure as failure:
            self._failure = failure
        except Exception as error:  # noqa: BLE001 - a thread's boundary: unsaid it would be the end of the lines
            self._failure = TaskFailure(f"socket {self._host}:{self._port}: {error}")
        finally:
            with self._state:
                self._ended = True
            self._wake()

    def _receive(self) -> None:
        with socket.create_connection((self._host, self._port), _CONNECT_TIMEOUT_S) as connection:
            connection.setblocking(False)
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            poll.register(self._stop_receiver, select.POLLIN)
            rest = b""
            while self._has_room():
                if any(fd == self._stop_receiver.fileno() for fd, _ in poll.poll()):
                    return
                data = connection.recv(_RECEIVE_BYTES)
                *lines, rest = (rest + data).split(b"\n")
                if not data and rest:
                    lines.append(rest)
                self._put(lines)
                if not data:
                    return
                if len(rest) > _LINE_BYTES_MAX:
                    raise TaskFailure(
                        f"socket {self._host}:{self._port}: a line is longer than {_LINE_BYTES_MAX} "
                        "bytes; lines end with a line feed"
                    )

    def _has_room(self) -> bool:
        """Waits until lines may come again; False = stopped."""
        with self._state:
            self._state.wait_for(lambda: self._stopped or self._waiting_bytes < _WAITING_BYTES_MAX)
            return not self._stopped

    def _put(self, lines: list[bytes]) -> None:
        if not lines:
            return
        with self._state:
            self._lines.extend(lines)
            self._waiting_bytes += sum(map(len, lines)) + _LINE_OVERHEAD_BYTES * len(lines)
        self._wake()


class _SocketReader(Reader):
    def __init__(
        self, receiver: _Receiver, name: str, bad_record: Callable[[str, str, str], None]
    ) -> None:
        self._receiver = receiver
        self._name = name
        self._bad_record = bad_record
        self._lines_read = 0
        self._only_bad_lines = False

    @override
    def read(self, max_rows: int) -> pa.RecordBatch | EndOfSplit | None:
        lines = self._receiver.take(max_rows)
        if lines is None:
            return END
        texts = self._decode([line.removesuffix(b"\r") for line in lines])
        self._only_bad_lines = bool(lines) and not texts
        if not texts:
            return None
        return pa.RecordBatch.from_arrays([texts], schema=SOCKET_SCHEMA)

    def _decode(self, lines: list[bytes]) -> pa.Array:
        first = self._lines_read + 1
        self._lines_read += len(lines)
        try:
            return pa.array(lines, pa.binary()).cast(pa.string())
        except pa.ArrowInvalid:
            return pa.array(self._decode_each(lines, first), pa.string())

    def _decode_each(self, lines: list[bytes], first: int) -> list[str]:
        texts: list[str] = []
        for number, line in enumerate(lines, first):
            try:
                texts.append(line.decode())
            except UnicodeDecodeError:
                where = f"socket {self._name}:{number}"
                self._bad_record(where, line.decode(errors="replace"), "not valid UTF-8")
        return texts

    @override
    def next_read_at_ms(self) -> int | None:
        return 0 if self._only_bad_lines else None

    @override
    def position(self) -> bytes:
        return b""

    @override
    def close(self) -> None:
        self._receiver.stop()
