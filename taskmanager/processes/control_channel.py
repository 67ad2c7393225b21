"""A slot process's line to its daemon: length-prefixed messages on a socket pair.

One thread reads commands and writes reports; the mailbox thread only appends to a queue. The end of
the line is the end of the slot: nobody is left to run it for.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable

from common.pb import internal_pb2

_LENGTH = struct.Struct("<I")
_MESSAGE_BYTES_MAX = 64 << 20
_REPORTS_QUEUED_MAX = 4096
_READ_BYTES = 1 << 16


def read_command(connection: socket.socket) -> internal_pb2.SlotCommand | None:
    """Reads one command, waiting for it; None when the line has ended."""
    header = _read_exactly(connection, _LENGTH.size)
    if header is None:
        return None
    body = _read_exactly(connection, _LENGTH.unpack(header)[0])
    return internal_pb2.SlotCommand.FromString(body) if body is not None else None


def _read_exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


class ControlChannel:
    """Reads commands and writes reports on a thread of its own.

    Args:
        connection: the slot's end of the socket pair.
        on_command: called on the channel's thread for each command.
        on_closed: called on the channel's thread when the line has ended, or can be used no longer.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_command: Callable[[internal_pb2.SlotCommand], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._on_command = on_command
        self._on_closed = on_closed
        self._lock = threading.Lock()
        self._outgoing: deque[memoryview] = deque()
        self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = False
        self._incoming = bytearray()
        self._thread = threading.Thread(target=self._run, name="slot-control", daemon=True)

    def start(self) -> None:
        """Begins to read and write."""
        self._connection.setblocking(False)
        self._thread.start()

    def send(self, report: internal_pb2.SlotReport) -> None:
        """Queues a report; metrics are dropped when the daemon does not read."""
        body = report.SerializeToString()
        with self._lock:
            if (
                len(self._outgoing) > _REPORTS_QUEUED_MAX
                and report.WhichOneof("report") == "metrics"
            ):
                return
            self._outgoing.append(memoryview(_LENGTH.pack(len(body)) + body))
        os.eventfd_write(self._wake_descriptor, 1)

    def close(self, timeout_s: float) -> None:
        """Writes what is queued, ends the thread and the line."""
        self._is_closing = True
        os.eventfd_write(self._wake_descriptor, 1)
        self._thread.join(timeout_s)
        self._connection.close()
        os.close(self._wake_descriptor)

    def _run(self) -> None:
        try:
            self._carry()
        finally:  # whatever has ended it: a slot that hears nothing must not go on
            if not self._is_closing:
                self._on_closed()

    def _carry(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_descriptor, selectors.EVENT_READ)
            selector.register(self._connection, selectors.EVENT_READ)
            is_open = True
            while is_open and not (self._is_closing and not self._outgoing):
                events = selectors.EVENT_READ
                if self._outgoing:
                    events |= selectors.EVENT_WRITE
                selector.modify(self._connection, events)
                for key, mask in selector.select():
                    if key.fd == self._wake_descriptor:
                        os.eventfd_read(self._wake_descriptor)
                    else:
                        is_open = self._serve(mask)

    def _serve(self, mask: int) -> bool:
        try:
            if mask & selectors.EVENT_WRITE:
                self._write()
            return not mask & selectors.EVENT_READ or self._read()
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _write(self) -> None:
        while self._outgoing:
            message = self._outgoing[0]
            sent = self._connection.send(message)
            with self._lock:
                if sent == len(message):
                    self._outgoing.popleft()
                else:
                    self._outgoing[0] = message[sent:]

    def _read(self) -> bool:
        data = self._connection.recv(_READ_BYTES)
        if not data:
            return False
        self._incoming += data
        while len(self._incoming) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._incoming)
            if size > _MESSAGE_BYTES_MAX:
                return False
            end = _LENGTH.size + size
            if len(self._incoming) < end:
                break
            command = internal_pb2.SlotCommand.FromString(bytes(self._incoming[_LENGTH.size : end]))
            del self._incoming[:end]
            self._on_command(command)
        return True
