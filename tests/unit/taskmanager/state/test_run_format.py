"""Segments come back as they were written, in types of any width, and those of version 1 as well."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pb.checkpoint_pb2 import StateHandle, StatePart
from penstock.storage.blobs import SnapshotReader
from penstock.storage.run_columns import CODEC, sorted_batch
from penstock.storage.run_reader import SegmentPlace, chain_batches
from penstock.storage.run_writer import SegmentWriter
from tests.support.examples import examples

INTEGERS = [pa.int64(), pa.uint64(), pa.int32(), pa.uint16(), pa.int8()]
OTHERS = [pa.float64(), pa.bool_(), pa.string(), pa.timestamp("ms"), pa.list_(pa.int64())]
PLACES = st.sampled_from([0, 7, 8, 15, 16, 31, 32, 63, 64])
SIGNS = st.sampled_from([1, 1, -1])


def numbers(kind: pa.DataType) -> st.SearchStrategy[int]:
    """Around the limits of narrower types."""
    signed = pa.types.is_signed_integer(kind)
    lowest = -(1 << kind.bit_width - 1) if signed else 0
    highest = (1 << kind.bit_width - int(signed)) - 1
    near = st.builds(lambda p, d, sign: sign * (1 << p) + d, PLACES, st.integers(-1, 1), SIGNS)
    return near.map(lambda n: min(max(n, lowest), highest))


VALUES = {
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(max_size=5),
    pa.timestamp("ms"): st.integers(0, 1 << 40),
    pa.list_(pa.int64()): st.lists(st.integers(-5, 5), max_size=3),
}


@st.composite
def columns(draw: st.DrawFn, rows: int) -> pa.Array:
    kind = draw(st.sampled_from([*INTEGERS, *OTHERS]))
    value = VALUES[kind] if kind in VALUES else numbers(kind)
    if draw(st.booleans()):
        value = value | st.none()
    return pa.array(draw(st.lists(value, min_size=rows, max_size=rows)), kind)


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    rows = draw(st.integers(0, 6))
    groups = np.array(draw(st.lists(st.integers(0, 300), min_size=rows, max_size=rows)), np.uint16)
    content = [draw(columns(rows)) for _ in range(draw(st.integers(1, 3)))]
    fields = [pa.field("__key_group", pa.uint16(), nullable=False)]
    fields += [
        pa.field(f"c{i}", column.type, metadata={CODEC: b"plain"} if i else None)
        for i, column in enumerate(content)
    ]
    schema = pa.schema(fields, metadata={b"ttl_ms": b"5"})
    return sorted_batch(schema, groups, content)


class Inline(SnapshotReader):
    """Reads what is in the handle."""

    def read(self, handle: StateHandle) -> bytes:
        return handle.inline

    def read_range(self, handle: StateHandle, offset: int, size_bytes: int) -> bytes:
        return handle.inline[offset : offset + size_bytes]


def read(data: bytes, parts: Sequence[StatePart]) -> list[pa.RecordBatch]:
    place = SegmentPlace(StateHandle(inline=data), 0, len(data), parts, "a segment")
    return list(chain_batches(Inline(), [place], range(1 << 16)))


def one_part(data: bytes) -> list[StatePart]:
    return [StatePart(last_key_group=9, size_bytes=len(data), checksum=zlib.crc32(data))]


@examples(300)
@given(batches())
def test_what_is_read_is_what_was_written(written: pa.RecordBatch) -> None:
    writer = SegmentWriter()
    back = read(b"".join(writer.write([written])), writer.parts)
    assert sum(batch.num_rows for batch in back) == written.num_rows
    for batch in back:
        assert batch.schema.equals(written.schema, check_metadata=True)
        assert batch.equals(written)


@examples(200)
@given(batches(), st.data())
def test_rows_are_sorted_by_key_group_and_keep_their_order_otherwise(
    batch: pa.RecordBatch, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(batch.num_rows)))
    mixed = batch.take(pa.array(order, pa.int64()))
    again = sorted_batch(batch.schema, mixed.column(0).to_numpy(), mixed.columns[1:])
    expected = sorted(mixed.to_pylist(), key=lambda row: row["__key_group"])
    assert again.to_pylist() == expected


def test_small_numbers_take_little_room_without_being_compressed() -> None:
    count = 10_000
    rng = np.random.default_rng(3)
    schema = pa.schema([("__key_group", pa.uint16()), ("n", pa.int64()), ("sum", pa.int64())])
    small = [pa.array(rng.integers(0, 100, count)), pa.array(rng.integers(-30_000, 30_000, count))]
    groups = np.full(count, 7, np.uint16)
    (piece,) = SegmentWriter().write([sorted_batch(schema, groups, small)])
    assert count * (1 + 1 + 2) < len(piece) < count * (1 + 1 + 2) + 2_000
    with pa.ipc.open_stream(piece) as reader:
        assert reader.schema.types == [pa.uint8(), pa.uint8(), pa.int16()]


def test_wide_columns_are_compressed() -> None:
    schema = pa.schema([("__key_group", pa.uint16()), ("text", pa.string())])
    rows = sorted_batch(schema, np.zeros(1000, np.uint16), [pa.array(["the same"] * 1000)])
    (piece,) = SegmentWriter().write([rows])
    assert len(piece) < 1000 * (1 + 4 + 8) / 2


def test_segments_of_version_1_are_read() -> None:
    """One stream of all batches, compressed, in the types of the schema."""
    schema = pa.schema([("__key_group", pa.uint16()), ("n", pa.int64())])
    written = [
        sorted_batch(schema, np.arange(3, dtype=np.uint16), [pa.array([1, None, 1 << 40])]),
        sorted_batch(schema, np.arange(2, dtype=np.uint16), [pa.array([5, 6])]),
    ]
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        for batch in written:
            writer.write_batch(batch)
    data = sink.getvalue().to_pybytes()
    assert read(data, one_part(data)) == written


def test_bytes_that_are_no_segment_are_refused() -> None:
    data = b"these are no streams of batches"
    with pytest.raises(pa.ArrowInvalid):
        read(data, one_part(data))
