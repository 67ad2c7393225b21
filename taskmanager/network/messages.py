"""Payloads of the frames that are not batches: handshake, subscription, control elements (pure).

Messages are msgpack maps, so that a field can be added; control elements, which are frequent, are
packed with ``struct``. Whatever does not decode raises ``FrameError``.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack

from common.elements import (
    CheckpointBarrier,
    CheckpointCancelled,
    ControlElement,
    EndOfData,
    EndOfPartition,
    StreamStatus,
    Watermark,
)
from penstock.storage.checkpoint_properties import (
    BehindBarrier,
    CheckpointKind,
    CheckpointProperties,
    SavepointFormat,
)
from taskmanager.network.frames import Buffer, FrameError


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of the connecting side: who it is and for which job it speaks."""

    version: int
    job_id: str
    slot_id: str
    endpoint: str
    leader_epoch: int
    token: str


@dataclass(frozen=True, slots=True)
class HelloOk:
    """The accepting side lets the peer in and says who it is."""

    slot_id: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The accepting side does not talk to the peer; it closes the connection."""

    reason: str


@dataclass(frozen=True, slots=True)
class Subscribe:
    """A consumer asks for one subpartition; the frame's channel is the id it chose.

    Attributes:
        consumer: who asks, for messages.
        consumer_attempt: which attempt of it.
        first_row: the first row it wants, counted from the start of the job.
    """

    job_id: str
    edge_id: str
    vertex: str
    subtask_index: int
    attempt: int
    subpartition_index: int
    credit_bytes: int
    consumer: str
    consumer_attempt: int
    first_row: int


@dataclass(frozen=True, slots=True)
class ChannelError:
    """The producer's side cannot serve a channel."""

    message: str


Message = Hello | HelloOk | Refused | Subscribe | ChannelError
_M = TypeVar("_M", Hello, HelloOk, Refused, Subscribe, ChannelError)


def encode_message(message: Message) -> bytes:
    """The message as a payload."""
    packed: bytes = msgpack.packb(dataclasses.asdict(message), use_bin_type=True)
    return packed


def decode_message(kind: type[_M], payload: Buffer) -> _M:
    """Inverse of ``encode_message``; fields that this version does not know are ignored.

    Raises:
        FrameError: it is not a message of that kind.
    """
    try:
        fields: Any = msgpack.unpackb(payload, raw=False)
    except (ValueError, msgpack.exceptions.UnpackException, UnicodeDecodeError) as error:
        raise FrameError(f"a {kind.__name__} message that does not decode: {error}") from error
    if not isinstance(fields, dict):
        raise FrameError(f"a {kind.__name__} message that is not a map")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        value = fields.get(field.name)
        wanted = int if field.type == "int" else str
        is_negative = isinstance(value, int) and value < 0
        if not isinstance(value, wanted) or isinstance(value, bool) or is_negative:
            raise FrameError(f"a {kind.__name__} message whose {field.name} is {value!r}")
        values[field.name] = value
    return kind(**values)


# ---------------------------------------------------------------- control elements

_WATERMARK, _BARRIER, _STATUS, _END_OF_DATA, _END_OF_PARTITION, _CANCELLED = 1, 2, 4, 5, 6, 7
_TAG = struct.Struct("<B")
_TIMESTAMP = struct.Struct("<Bq")
_BARRIER_HEAD = struct.Struct("<BqqqBBBB")


def encode_control(element: ControlElement) -> bytes:
    """A control element as the payload of a CONTROL frame."""
    match element:
        case Watermark(timestamp_ms):
            return _TIMESTAMP.pack(_WATERMARK, timestamp_ms)
        case CheckpointBarrier():
            return _encode_barrier(element)
        case CheckpointCancelled(checkpoint_id):
            return _TIMESTAMP.pack(_CANCELLED, checkpoint_id)
        case StreamStatus(active):
            return _TIMESTAMP.pack(_STATUS, int(active))
        case EndOfData():
            return _TAG.pack(_END_OF_DATA)
        case EndOfPartition():
            return _TAG.pack(_END_OF_PARTITION)


def decode_control(payload: Buffer) -> ControlElement:
    """Inverse of ``encode_control``.

    Raises:
        FrameError: it is no control element.
    """
    data = bytes(payload)
    tag = data[0] if data else 0
    try:
        if tag == _WATERMARK:
            return Watermark(_TIMESTAMP.unpack(data)[1])
        if tag == _BARRIER:
            return _decode_barrier(data)
        if tag == _CANCELLED:
            return CheckpointCancelled(_TIMESTAMP.unpack(data)[1])
        if tag == _STATUS:
            return StreamStatus(bool(_TIMESTAMP.unpack(data)[1]))
    except (struct.error, ValueError) as error:
        raise FrameError(f"a control element (tag {tag}) that does not decode: {error}") from error
    if len(data) == 1 and tag == _END_OF_DATA:
        return EndOfData()
    if len(data) == 1 and tag == _END_OF_PARTITION:
        return EndOfPartition()
    raise FrameError(f"a control element of unknown tag {tag} ({len(data)} bytes)")


def _encode_barrier(barrier: CheckpointBarrier) -> bytes:
    properties = barrier.properties
    head = _BARRIER_HEAD.pack(
        _BARRIER,
        barrier.checkpoint_id,
        barrier.timestamp_ms,
        barrier.leader_epoch,
        properties.kind.value,
        properties.is_full,
        properties.behind.value,
        properties.format.value,
    )
    return head + properties.target.encode()


def _decode_barrier(data: bytes) -> CheckpointBarrier:
    head = _BARRIER_HEAD.unpack_from(data)
    _, checkpoint_id, timestamp_ms, epoch, kind, is_full, behind, format = head
    properties = CheckpointProperties(
        CheckpointKind(kind),
        data[_BARRIER_HEAD.size :].decode(),
        bool(is_full),
        BehindBarrier(behind),
        SavepointFormat(format),
    )
    return CheckpointBarrier(checkpoint_id, timestamp_ms, epoch, properties)


_CREDIT = struct.Struct("<Q")


def encode_credit(returned_bytes: int) -> bytes:
    """Payload of a CREDIT frame."""
    return _CREDIT.pack(returned_bytes)


def decode_credit(payload: Buffer) -> int:
    """Inverse of ``encode_credit``.

    Raises:
        FrameError: it is no amount of credit.
    """
    try:
        (returned_bytes,) = _CREDIT.unpack(payload)
    except struct.error as error:
        raise FrameError(f"a CREDIT frame that does not decode: {error}") from error
    return int(returned_bytes)


def encode_cancel(*, is_complete: bool) -> bytes:
    """Payload of CANCEL_CHANNEL; complete = the consumer has read the channel to its end."""
    return b"\x01" if is_complete else b"\x00"


def decode_cancel(payload: Buffer) -> bool:
    """Inverse of ``encode_cancel``.

    Raises:
        FrameError: it is neither of the two.
    """
    data = bytes(payload)
    if data not in (b"\x00", b"\x01"):
        raise FrameError(f"a CANCEL_CHANNEL frame with the payload {data[:16]!r}")
    return data == b"\x01"
