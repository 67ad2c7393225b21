"""Aim: a subtask reads its own key-groups of a segment and little else, and any damage is told with file and part.

Method: segments are written and read through a reader that counts bytes; either backend writes a state of some megabytes,
which is restored by more and fewer subtasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StoreCorrupt
from penstock.pb import checkpoint_pb2
from penstock.storage import run_writer
from penstock.storage.run_columns import RUN_VERSION, sorted_batch, within
from penstock.storage.run_reader import SegmentPlace, chain_batches
from penstock.storage.run_writer import SegmentWriter
from penstock.storage.snapshot_files import StoreSnapshotReader
from taskmanager.kernels import AccumulatorKind, encode_keys
from taskmanager.state.backend import AggregateDescriptor
from tests.support.backend_history import Inputs
from tests.support.backend_job import BACKENDS, MAX_PARALLELISM
from tests.support.examples import examples
from tests.support.one_backend import KEYS, OneBackend
from tests.support.rocksdb_cluster import fast_directory

SCHEMA = pa.schema(
    [
        pa.field("__key_group", pa.uint16(), nullable=False),
        pa.field("__deleted", pa.bool_(), nullable=False),
        pa.field("key_0", pa.int64()),
        pa.field("value", pa.string()),
    ]
)
GROUPS = 64


def batch(groups: list[int], first: int = 0) -> pa.RecordBatch:
    count = len(groups)
    keys = pa.array(range(first, first + count), pa.int64())
    text = pa.array([f"value {n}" for n in range(first, first + count)])
    columns = [pa.repeat(False, count), keys, text]
    return sorted_batch(SCHEMA, np.array(groups, np.uint16), columns)


def written(*batches: pa.RecordBatch) -> tuple[bytes, SegmentWriter]:
    writer = SegmentWriter()
    return b"".join(bytes(piece) for piece in writer.write(batches)), writer


def place_of(content: bytes, writer: SegmentWriter) -> SegmentPlace:
    handle = checkpoint_pb2.StateHandle(inline=content, size_bytes=len(content))
    return SegmentPlace(handle, 0, len(content), tuple(writer.parts), "file run-7")


@given(
    st.lists(st.lists(st.integers(0, GROUPS - 1), max_size=40), max_size=6),
    st.integers(0, GROUPS),
    st.integers(0, GROUPS),
    st.sampled_from([1, 300, 1 << 20]),
    st.sampled_from([1, 200, 1 << 20]),
)
@examples(60)
def test_a_range_has_its_rows_in_the_order_in_which_they_were_written(
    parts: list[list[int]], one: int, other: int, sorted_bytes: int, part_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_writer, "SORTED_BYTES", sorted_bytes)
        patch.setattr(run_writer, "PART_BYTES", part_bytes)
        batches = [batch(groups, 100 * place) for place, groups in enumerate(parts)]
        content, writer = written(*batches)
    assert (writer.size_bytes, writer.row_count) == (len(content), sum(map(len, parts)))
    key_groups = range(min(one, other), max(one, other))
    reader = StoreSnapshotReader(None)
    found = [
        row
        for rows in chain_batches(reader, [place_of(content, writer)], key_groups)
        for row in within(rows, key_groups).to_pylist()
    ]
    wanted = [row for one in batches for row in one.to_pylist()]
    for group in range(GROUPS):
        expected = [row for row in wanted if row["__key_group"] == group and group in key_groups]
        assert [row for row in found if row["__key_group"] == group] == expected


def test_small_parts_come_together_as_far_as_their_key_groups_ascend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_writer, "SORTED_BYTES", 1)  # each batch is sorted by itself
    monkeypatch.setattr(run_writer, "PART_BYTES", 200)
    rows = [batch([n % GROUPS for n in range(400)], 400 * place) for place in range(3)]
    content, writer = written(*rows)
    assert len(writer.parts) > 60
    found = list(
        chain_batches(StoreSnapshotReader(None), [place_of(content, writer)], range(GROUPS))
    )
    assert [one.to_pydict() for one in found] == [one.to_pydict() for one in rows]


def test_damage_of_any_part_is_told_with_the_file_and_the_part() -> None:
    content, writer = written(batch([n % GROUPS for n in range(20_000)]))
    assert len(writer.parts) > 3
    start = 0
    for index, part in enumerate(writer.parts):
        damaged = bytearray(content)
        damaged[start + part.size_bytes // 2] ^= 1
        start += part.size_bytes
        place = place_of(bytes(damaged), writer)
        groups = f"key-groups {part.first_key_group} to {part.last_key_group}"
        with pytest.raises(StoreCorrupt, match=rf"part {index} of .*{groups}.*run-7"):
            list(chain_batches(StoreSnapshotReader(None), [place], range(GROUPS)))
        others = range(part.last_key_group + 1, GROUPS)
        list(chain_batches(StoreSnapshotReader(None), [place], others))


class CountingReader(StoreSnapshotReader):
    """Counts what is read."""

    bytes_read = 0

    def read_range(self, handle: Any, offset: int, size_bytes: int) -> bytes:
        self.bytes_read += size_bytes
        return super().read_range(handle, offset, size_bytes)


@pytest.fixture
def home(request: pytest.FixtureRequest) -> Iterator[OneBackend]:
    with fast_directory() as directory:
        home = OneBackend(request.param, directory)
        yield home
        home.close()


@pytest.mark.parametrize("home", BACKENDS, indirect=True)
@pytest.mark.parametrize("parallelism", [2, 4])
def test_a_subtask_reads_little_more_than_its_share(
    home: OneBackend, parallelism: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = AggregateDescriptor(KEYS, (AccumulatorKind.COUNT,), list)
    backend = home.open()
    count = 300_000
    keys = encode_keys([pa.array(np.arange(count) * 7919)])
    table = backend.group_table("counts", 0, descriptor)
    table.update(keys, Inputs([None], [None], [], np.arange(count)))
    snapshot = home.write(backend.snapshot(1, in_runs=True))
    assert snapshot.format_version == RUN_VERSION
    total = sum(segment.size_bytes for segment in snapshot.segments)
    assert total > 1 << 20
    readers: list[CountingReader] = []

    def counting(*args: Any) -> CountingReader:
        readers.append(CountingReader(*args))
        return readers[-1]

    monkeypatch.setattr("tests.support.one_backend.StoreSnapshotReader", counting)
    restored = [
        home.open(snapshot, subtask_index=index, parallelism=parallelism)
        for index in range(parallelism)
    ]
    found = [len(one.group_table("counts", 0, descriptor)) for one in restored]
    assert sum(found) == count
    for reader, one in zip(readers, restored, strict=True):
        share = len(one.key_groups) / MAX_PARALLELISM
        assert reader.bytes_read <= 1.2 * share * total


def test_a_segment_whose_parts_are_not_all_of_it_is_damage() -> None:
    content, writer = written(batch([n % GROUPS for n in range(100)]))
    handle = checkpoint_pb2.StateHandle(inline=content, size_bytes=len(content))
    for parts in (), tuple(writer.parts[:-1]):
        place = SegmentPlace(handle, 0, len(content), parts, "file run-7")
        with pytest.raises(StoreCorrupt, match=f"run-7.*it has {len(content)}"):
            list(chain_batches(StoreSnapshotReader(None), [place], range(GROUPS)))
