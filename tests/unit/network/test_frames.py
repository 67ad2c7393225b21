"""Wire format: whatever is encoded comes back however it is cut; anything else is a FrameError."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.elements import (
    CheckpointBarrier,
    EndOfData,
    EndOfPartition,
    StreamStatus,
    Watermark,
)
from taskmanager.network.batch_codec import (
    SizeEstimator,
    decode_batch,
    decode_schema,
    encode_batch,
    has_dictionary,
)
from taskmanager.network.frames import (
    FLAG_STREAM,
    HANDSHAKE_PAYLOAD_MAX,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MESSAGE_PAYLOAD_MAX,
    Frame,
    FrameDecoder,
    FrameError,
    FrameKind,
    encode_frame,
    encode_header,
)
from taskmanager.network.messages import (
    ChannelError,
    Hello,
    HelloOk,
    Message,
    Refused,
    Subscribe,
    decode_cancel,
    decode_control,
    decode_credit,
    decode_message,
    encode_cancel,
    encode_control,
    encode_credit,
    encode_message,
)
from tests.support.examples import examples
from tests.support.fed_frames import fed

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
PAYLOADS = st.one_of(
    st.binary(max_size=200),
    st.integers(0, 90_000).map(lambda size: bytes(index % 251 for index in range(size))),
)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    return Frame(
        draw(st.sampled_from(FrameKind)),
        draw(U32),
        draw(PAYLOADS),
        draw(st.integers(0, 255)),
        draw(U32),
        draw(U64),
        draw(U64),
    )


def bytes_of(frame: Frame) -> bytes:
    header = encode_header(
        frame.kind,
        frame.channel,
        len(frame.payload),
        flags=frame.flags,
        schema_id=frame.schema_id,
        sequence=frame.sequence,
        row_offset=frame.row_offset,
    )
    return header + frame.payload


def open_decoder() -> FrameDecoder:
    decoder = FrameDecoder()
    decoder.open_limits()
    return decoder


@examples(60)
@given(st.lists(frames(), max_size=6), st.data())
def test_frames_survive_any_cut(sent: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(bytes_of(frame) for frame in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    decoder = open_decoder()
    got: list[Frame] = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got.extend(fed(decoder, stream[start:stop]))
    assert decoder.is_between_frames
    for frame in got:
        frame.payload = bytes(frame.payload)
    assert got == sent


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_garbage_is_a_frame_error_or_waits_for_more(data: bytes) -> None:
    for decoder in (FrameDecoder(), open_decoder()):
        for prefix in (b"", encode_frame(FrameKind.HELLO, 0, b"x")):
            try:
                fed(decoder, prefix + data)
            except FrameError:
                break


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_garbage_messages_are_frame_errors(data: bytes) -> None:
    kinds: tuple[Any, ...] = (Hello, HelloOk, Refused, Subscribe, ChannelError)
    for kind in kinds:
        with pytest.raises(FrameError):
            decode_message(kind, data)
    for decode in (decode_control, decode_credit, decode_cancel, decode_schema):
        try:
            decode(data)
        except FrameError:
            continue


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (HEADER.pack(MAGIC + 1, 1, 0, 0, 0, 0, 0, 0), "does not speak"),
        (HEADER.pack(MAGIC, 99, 0, 0, 0, 0, 0, 0), "unknown kind 99"),
        (HEADER.pack(MAGIC, FrameKind.BATCH, 0, 8, 0, 0, 0, 0), "before the handshake"),
        (
            HEADER.pack(MAGIC, FrameKind.HELLO, 0, HANDSHAKE_PAYLOAD_MAX + 1, 0, 0, 0, 0),
            "at most",
        ),
    ],
)
def test_malformed_headers_before_the_handshake(header: bytes, words: str) -> None:
    with pytest.raises(FrameError, match=words):
        fed(FrameDecoder(), header)


def test_oversized_frames_are_refused_before_memory_is_taken() -> None:
    for kind, size in ((FrameKind.SCHEMA, MESSAGE_PAYLOAD_MAX + 1), (FrameKind.BATCH, 2**32 - 1)):
        with pytest.raises(FrameError, match="at most"):
            fed(open_decoder(), encode_header(kind, 1, size))


def test_large_payloads_are_read_into_memory_of_their_own() -> None:
    payload = bytes(100_000)
    decoder = open_decoder()
    stream = encode_frame(FrameKind.BATCH, 1, payload)
    assert fed(decoder, stream[: HEADER_BYTES + 10]) == []
    targets = decoder.targets()
    if len(targets) == 1:  # the head still lies in the read-ahead
        fed(decoder, stream[HEADER_BYTES + 10 : 50_000])
        targets = decoder.targets()
        assert len(targets[0]) == HEADER_BYTES + len(payload) - 50_000
    else:
        assert len(targets[0]) == len(payload) - 10


@pytest.mark.parametrize(
    "message",
    [
        Hello(1, "job", "slot", "slot|/x|h:1", 4, "secret"),
        HelloOk("slot", "endpoint"),
        Refused("because"),
        Subscribe("job", "e0", "v0", 3, 1, 2, 1 << 21, "v1/0", 4, 700),
        ChannelError("gone"),
    ],
)
def test_messages_round_trip(message: Message) -> None:
    kind: Any = type(message)
    assert decode_message(kind, encode_message(message)) == message


def test_a_message_with_a_wrong_field_is_refused() -> None:
    with pytest.raises(FrameError, match="reason"):
        decode_message(Refused, encode_message(HelloOk("slot", "endpoint")))


@given(
    st.one_of(
        st.builds(Watermark, st.integers(-(2**63), 2**63 - 1)),
        st.builds(CheckpointBarrier, st.integers(0, 2**62), st.integers(0, 2**62)),
        st.builds(StreamStatus, st.booleans()),
        st.just(EndOfData()),
        st.just(EndOfPartition()),
    )
)
def test_control_elements_round_trip(element: object) -> None:
    assert decode_control(encode_control(element)) == element  # type: ignore[arg-type]


def test_credit_and_cancel_round_trip() -> None:
    assert decode_credit(encode_credit(123456)) == 123456
    assert decode_cancel(encode_cancel(is_complete=True)) is True
    assert decode_cancel(encode_cancel(is_complete=False)) is False


BATCHES = {
    "numbers": pa.record_batch({"a": pa.array([1, None, 3]), "b": pa.array([1.5, 2.5, None])}),
    "strings": pa.record_batch({"s": pa.array(["a", None, "longer than the rest"])}),
    "nested": pa.record_batch({"l": pa.array([[1], None, [2, 3]]), "st": pa.array([{"x": 1}] * 3)}),
    "dictionary": pa.record_batch({"d": pa.array(["a", "b", "a"]).dictionary_encode()}),
    "nested dictionary": pa.record_batch(
        {"l": pa.ListArray.from_arrays([0, 1, 2, 3], pa.array(["a", "b", "a"]).dictionary_encode())}
    ),
    "metadata": pa.record_batch({"a": [1, 2, 3]}).replace_schema_metadata(
        {b"penstock.partial": b"1"}
    ),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=list(BATCHES))
def test_batches_round_trip_whole_and_sliced(batch: pa.RecordBatch) -> None:
    for piece in (batch, batch.slice(1, 2), batch.slice(2)):
        schema = decode_schema(piece.schema.serialize())
        as_stream = has_dictionary(schema)
        payload = encode_batch(piece, as_stream=as_stream)
        got = decode_batch(bytes(payload), schema, FLAG_STREAM if as_stream else 0)
        got.validate(full=True)
        assert got.equals(piece)
        assert got.schema.equals(piece.schema, check_metadata=True)


def test_a_payload_of_garbage_is_a_frame_error() -> None:
    for flags in (0, FLAG_STREAM):
        for payload in (b"", b"\xff" * 64, bytes(64)):
            with pytest.raises(FrameError):
                decode_batch(payload, BATCHES["numbers"].schema, flags)


def test_sizes_are_those_of_the_columns() -> None:
    estimator = SizeEstimator()
    fixed = pa.record_batch({"a": list(range(1000)), "b": [0.5] * 1000})
    assert estimator.size_bytes(fixed) == 16_000
    assert estimator.size_bytes(fixed.slice(10, 20)) == 320
    strings = pa.record_batch({"s": ["x" * 100] * 1000})
    assert 100_000 <= estimator.size_bytes(strings) <= 110_000
