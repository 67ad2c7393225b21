"""Wire format of the data exchange: length-prefixed frames (pure).

A frame is a header of 32 bytes and a payload::

    magic u16 | kind u8 | flags u8 | payload length u32 | channel u32 | schema id u32
    | sequence u64 | row offset u64                                    (little endian)

``sequence`` numbers what a producer sends on a channel from 0 (SCHEMA, BATCH, CONTROL); other
frames carry 0. ``row offset`` is the number of rows the channel carried before this batch.

``FrameDecoder`` turns a byte stream cut anywhere into frames. It names the memory to read into, so
that the payload of a large frame goes from the socket straight into an Arrow buffer, which the record batch
then refers to without another copy. A buffer is at most twice as large as what has arrived of its payload, or
4 MiB: a length that is only announced takes no memory.

Invariants: frames come out whole and in order whatever the cuts; anything malformed or larger than
allowed raises ``FrameError``, after which the connection must be closed.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.errors import StreamError

MAGIC = 0x5350
HEADER = struct.Struct("<HBBIIIQQ")
HEADER_BYTES = HEADER.size

HANDSHAKE_PAYLOAD_MAX = 8 * 1024
"""Largest payload before the peer has identified itself."""
MESSAGE_PAYLOAD_MAX = 16 * 1024 * 1024
"""Largest payload of anything but a batch."""
BATCH_PAYLOAD_MAX = 2**31 - 1

FLAG_STREAM = 1
"""The payload of a BATCH is a whole IPC stream (schema, dictionaries, batch), not a bare message."""

_READ_AHEAD_BYTES = 32 * 1024
_PAYLOAD_FIRST_BYTES = 4 * 1024 * 1024
"""Memory taken for a payload of which nothing has come; a larger one doubles it as its bytes arrive."""

Buffer = bytes | bytearray | memoryview | Any
"""Anything with the buffer protocol; ``Any`` stands for ``pyarrow.Buffer``."""


class FrameError(StreamError):
    """Bytes that are not frames of this protocol: the connection is closed."""


class FrameKind(enum.IntEnum):
    """What a frame is; the comment says who sends it."""

    HELLO = 1  # connecting side
    HELLO_OK = 2  # accepting side
    REFUSED = 3  # accepting side
    SUBSCRIBE = 4  # consumer
    SCHEMA = 5  # producer
    BATCH = 6  # producer
    CONTROL = 7  # producer
    CREDIT = 8  # consumer
    CANCEL_CHANNEL = 10  # consumer
    CHANNEL_ERROR = 11  # producer
    RELEASED = 12  # producer: its attempt is over, and the rows are gone with it


_KINDS = {int(kind): kind for kind in FrameKind}
_HANDSHAKE_KINDS = frozenset({FrameKind.HELLO, FrameKind.HELLO_OK, FrameKind.REFUSED})


@dataclass(slots=True)
class Frame:
    """One frame as received; ``payload`` has the buffer protocol."""

    kind: FrameKind
    channel: int
    payload: Buffer
    flags: int = 0
    schema_id: int = 0
    sequence: int = 0
    row_offset: int = 0


def encode_header(
    kind: FrameKind,
    channel: int,
    payload_bytes: int,
    *,
    flags: int = 0,
    schema_id: int = 0,
    sequence: int = 0,
    row_offset: int = 0,
) -> bytes:
    """The header that stands before a payload of the given length."""
    return HEADER.pack(MAGIC, kind, flags, payload_bytes, channel, schema_id, sequence, row_offset)


def encode_frame(
    kind: FrameKind, channel: int, payload: bytes = b"", *, sequence: int = 0
) -> bytes:
    """A small frame in one piece."""
    return encode_header(kind, channel, len(payload), sequence=sequence) + payload


class FrameDecoder:
    """Cuts a byte stream into frames.

    Use: fill ``targets()`` from its first byte on, in order, then call ``received`` with the number
    of bytes that came.
    """

    def __init__(self) -> None:
        self._ahead = bytearray(_READ_AHEAD_BYTES)
        self._ahead_view = memoryview(self._ahead)
        self._end = 0  # filled part of the read-ahead; it always starts with a header
        self._payload: Any = None  # pyarrow.Buffer being filled
        self._payload_view: memoryview = memoryview(b"")
        self._length = 0  # of the payload
        self._filled = 0
        self._frame: Frame | None = None
        self._is_open = False

    def open_limits(self) -> None:
        """The peer has identified itself: every kind of frame and large payloads are allowed."""
        self._is_open = True

    @property
    def is_between_frames(self) -> bool:
        """True when the stream may end here without having lost a part of a frame."""
        return self._frame is None and self._end == 0

    def targets(self) -> list[memoryview]:
        """Writable memory for the next bytes of the stream."""
        if self._frame is not None:
            rest = self._payload_view[self._filled :]
            is_whole = len(self._payload_view) == self._length
            return [rest, self._ahead_view] if is_whole else [rest]
        return [self._ahead_view[self._end :]]

    def received(self, count: int) -> list[Frame]:
        """Takes ``count`` bytes that were written to ``targets()``.

        Raises:
            FrameError: they are not frames of this protocol.
        """
        frames: list[Frame] = []
        if self._frame is not None:
            part = min(count, len(self._payload_view) - self._filled)
            self._filled += part
            count -= part
            if self._filled < self._length:
                if self._filled == len(self._payload_view):
                    self._grow()
                return frames
            self._frame.payload = self._payload
            frames.append(self._frame)
            self._frame = self._payload = None
        self._end += count
        self._cut(frames)
        return frames

    def _grow(self) -> None:
        """The buffer is full, and its payload is longer."""
        grown = pa.allocate_buffer(min(self._length, 2 * self._filled), resizable=True)
        view = memoryview(grown).cast("B")
        view[: self._filled] = self._payload_view
        self._payload, self._payload_view = grown, view

    def clear(self) -> None:
        """The stream has ended: nothing of a frame that has not come whole is kept."""
        was_large = len(self._payload_view) > _PAYLOAD_FIRST_BYTES
        self._frame = self._payload = None
        self._payload_view = memoryview(b"")
        self._end = 0
        if was_large:
            pa.default_memory_pool().release_unused()

    def _cut(self, frames: list[Frame]) -> None:
        view = self._ahead_view
        start = 0
        while self._end - start >= HEADER_BYTES:
            frame, length = self._header(start)
            body = start + HEADER_BYTES
            if self._end - body >= length:
                frame.payload = bytes(view[body : body + length])
                frames.append(frame)
                start = body + length
                continue
            if HEADER_BYTES + length <= _READ_AHEAD_BYTES // 2:
                break  # a small frame: wait for the rest of it in the read-ahead
            self._length = length
            self._payload = pa.allocate_buffer(min(length, _PAYLOAD_FIRST_BYTES), resizable=True)
            self._payload_view = memoryview(self._payload).cast("B")
            self._filled = self._end - body
            self._payload_view[: self._filled] = view[body : self._end]
            self._frame = frame
            start = self._end
        rest = self._end - start
        if start and rest:
            self._ahead[:rest] = self._ahead[start : self._end]
        self._end = rest

    def _header(self, start: int) -> tuple[Frame, int]:
        magic, kind_number, flags, length, channel, schema_id, sequence, row_offset = (
            HEADER.unpack_from(self._ahead, start)
        )
        if magic != MAGIC:
            raise FrameError(
                f"a frame starts with 0x{magic:04x}, not 0x{MAGIC:04x}:"
                " the peer does not speak this protocol"
            )
        kind = _KINDS.get(kind_number)
        if kind is None:
            raise FrameError(f"a frame of unknown kind {kind_number}")
        if not self._is_open:
            if kind not in _HANDSHAKE_KINDS:
                raise FrameError(f"a {kind.name} frame before the handshake")
            limit = HANDSHAKE_PAYLOAD_MAX
        else:
            limit = BATCH_PAYLOAD_MAX if kind is FrameKind.BATCH else MESSAGE_PAYLOAD_MAX
        if length > limit:
            raise FrameError(f"a {kind.name} frame of {length} bytes; at most {limit} are allowed")
        return Frame(kind, channel, b"", flags, schema_id, sequence, row_offset), length
