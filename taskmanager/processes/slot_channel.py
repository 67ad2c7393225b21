"""Messages between the daemon and a slot process: length (uint32, little endian), then protobuf."""

from __future__ import annotations

import asyncio
import socket
import struct

from google.protobuf.message import DecodeError

from common.pb import internal_pb2
from penstock.client.protocol import MESSAGE_SIZE_MAX_BYTES
from penstock.errors import StreamError

_LENGTH = struct.Struct("<I")


class SlotChannel:
    """The daemon's end of a slot's socket pair.

    ``send`` waits while the slot does not read (its socket's buffer is the bound), ``receive`` reads
    one message at a time, so that a slot that reports faster than the daemon can take waits too.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._send_lock = asyncio.Lock()

    @classmethod
    async def open(cls, control: socket.socket) -> SlotChannel:
        """Takes over the socket."""
        return cls(*await asyncio.open_unix_connection(sock=control))

    async def send(self, command: internal_pb2.SlotCommand) -> None:
        """Sends one command, whole.

        Raises:
            ConnectionError: the slot process has ended.
        """
        payload = command.SerializeToString()
        async with self._send_lock:
            # One piece, so that a cancelled sender never leaves half a message.
            self._writer.write(_LENGTH.pack(len(payload)) + payload)
            await self._writer.drain()

    async def receive(self) -> internal_pb2.SlotReport | None:
        """The next report, None at the end.

        Raises:
            StreamError: what the slot sent is no report.
        """
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MESSAGE_SIZE_MAX_BYTES:
                raise StreamError(f"a slot process sent a message of {length} bytes")
            return internal_pb2.SlotReport.FromString(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        except DecodeError as error:
            raise StreamError("a slot process sent what is no report") from error

    def close(self) -> None:
        """Closes the socket, which ends the slot process."""
        self._writer.close()
