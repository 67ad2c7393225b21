"""Complete partitions on disk: what was written is read, by any number of consumers, from any row.

Files are written by the same functions that a producer uses; every byte of every file is flipped once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from common.elements import (
    ControlElement,
    EndOfData,
    EndOfPartition,
    StreamStatus,
    Watermark,
)
from penstock.errors import InvariantViolation, PartitionUnavailable, StoreCorrupt
from penstock.partition_id import PartitionId
from taskmanager.partitions.sealed_partition import SealedPartition
from taskmanager.partitions.sealed_store import SealedStore, write_index
from taskmanager.partitions.spill_files import write_spill_files
from taskmanager.partitions.spill_layout import (
    PartitionIndex,
    SpillFailed,
    SubpartitionIndex,
    file_name,
    partition_directory,
    subpartition_directory,
)
from tests.support.exchange_slots import numbers
from tests.support.subpartition_readers import RecordingReader

ID = PartitionId("e0", "v0", 2, 7)
END: tuple[ControlElement, ...] = (EndOfData(), EndOfPartition())
STRUCT = pa.struct([("a", pa.int64()), ("b", pa.list_(pa.dictionary(pa.int8(), pa.string())))])


def seal(
    root: Path,
    subpartitions: Sequence[Sequence[Sequence[pa.RecordBatch]]],
    controls: Sequence[tuple[int, ControlElement]] = (),
    partition_id: PartitionId = ID,
    first_row: int = 0,
) -> PartitionIndex:
    """A complete partition: of each subpartition, the batches of each write."""
    directory = partition_directory(root, "job", partition_id)
    parts = []
    for number, writes in enumerate(subpartitions):
        files, row = [], first_row
        for batches in writes:
            for file, _ in write_spill_files(
                subpartition_directory(directory, number), len(files), row, batches
            ):
                files.append(file)
                row = file.end_row
        ends = tuple((row, element) for element in END)
        parts.append(SubpartitionIndex(first_row, tuple(files), (*controls, *ends)))
    index = PartitionIndex("job", partition_id, tuple(parts))
    write_index(root, index)
    return index


def found(root: Path) -> SealedPartition:
    partition = SealedStore(root).find("job", ID)
    assert partition is not None
    return partition


def read(
    partition: SealedPartition, index: int = 0, first_row: int = 0, credit: int = 10**9
) -> RecordingReader:
    reader = RecordingReader(credit)
    partition.view(index, first_row, reader.unavailable.append).attach(reader)
    return reader


def test_every_consumer_reads_everything_from_the_row_it_asks_for(tmp_path: Path) -> None:
    seal(tmp_path, [[[numbers(0, 5), numbers(5, 3)], [numbers(8, 4)]], []])
    partition = found(tmp_path)
    for first_row in range(13):
        reader = read(partition, 0, first_row)
        assert reader.rows() == list(range(first_row, 12))
        assert reader.controls() == list(END)
        assert not reader.offsets or reader.offsets[0] == first_row
    assert read(partition, 1).got == list(END)


def test_readers_have_their_own_place_and_credit(tmp_path: Path) -> None:
    seal(tmp_path, [[[numbers(start, 2) for start in range(0, 20, 2)]]])
    partition = found(tmp_path)
    slow, fast = RecordingReader(1), RecordingReader(100)
    slow_view = partition.view(0, 0, slow.unavailable.append)
    slow_view.attach(slow)
    partition.view(0, 0, fast.unavailable.append).attach(fast)
    assert slow.rows() == [0, 1]
    assert fast.rows() == list(range(20))
    slow.credit = 3
    slow_view.serve()
    assert slow.rows() == list(range(8))
    slow_view.detach(is_complete=False)
    slow.credit = 3
    slow_view.serve()
    assert slow.rows() == list(range(8))


def test_control_elements_keep_their_place_and_hold_for_those_who_start_behind_them(
    tmp_path: Path,
) -> None:
    controls = [
        (2, Watermark(5)),
        (2, StreamStatus(active=False)),
        (3, Watermark(6)),
        (4, Watermark(7)),
    ]
    seal(tmp_path, [[[numbers(0, 4), numbers(4, 2)]]], controls)
    idle = StreamStatus(active=False)
    partition = found(tmp_path)
    assert read(partition).shapes() == [
        2,
        Watermark(5),
        idle,
        1,
        Watermark(6),
        1,
        Watermark(7),
        2,
        *END,
    ]
    assert read(partition, 0, 3).shapes() == [
        Watermark(5), idle, Watermark(6), 1, Watermark(7), 2, *END,
    ]  # fmt: skip
    assert read(partition, 0, 6).shapes() == [Watermark(7), idle, *END]


def test_rows_that_are_not_there_are_refused(tmp_path: Path) -> None:
    seal(tmp_path, [[[numbers(0, 4)]]], first_row=10)
    partition = found(tmp_path)
    assert read(partition, 0, 10).rows() == [0, 1, 2, 3]
    for index, first_row in ((0, 9), (0, 15), (1, 10), (-1, 10)):
        with pytest.raises(PartitionUnavailable) as caught:
            partition.view(index, first_row, list[Any]().append)
        assert caught.value.partition == ID


@pytest.mark.parametrize(
    "batches",
    [
        [
            pa.record_batch({"d": pa.array(values).dictionary_encode()})
            for values in (["a", "b"], ["a", "b"], ["c"], ["a", None])
        ],
        [
            pa.record_batch(
                {"s": pa.array([{"a": 1, "b": ["x"]}, None, {"a": 2, "b": text}], STRUCT)}
            )
            for text in (["x"], ["y", "z"], [])
        ],
        [numbers(0, 2), numbers(2, 2).replace_schema_metadata({"penstock.slice_ms": "10"})],
        [pa.record_batch({"b": [b"x" * (3 << 20)]}), pa.record_batch({"b": [b"", None]})],
        [pa.record_batch({"x": pa.array(range(1000))}).slice(10, 3)],
        [pa.RecordBatch.from_struct_array(pa.array([{}, {}], pa.struct([])))],
    ],
    ids=["dictionaries", "nested", "metadata", "large", "slices", "no columns"],
)
def test_batches_of_every_kind_come_back(tmp_path: Path, batches: list[pa.RecordBatch]) -> None:
    seal(tmp_path, [[batches]])
    reader = read(found(tmp_path))
    back = [element for element in reader.got if isinstance(element, pa.RecordBatch)]
    assert [batch.to_pylist() for batch in back] == [batch.to_pylist() for batch in batches]
    for after, before in zip(back, batches, strict=True):
        assert after.schema.equals(before.schema, check_metadata=True)


def test_a_partition_without_an_index_is_not_complete(tmp_path: Path) -> None:
    directory = partition_directory(tmp_path, "job", ID)
    write_spill_files(subpartition_directory(directory, 0), 0, 0, [numbers(0, 3)])
    (directory / ".index.tmp").write_bytes(b"half of an ind")
    store = SealedStore(tmp_path)
    assert store.find("job", ID) is None
    assert store.held() == []
    store.release("job", [ID])
    assert list(tmp_path.iterdir()) == []


def test_what_is_held_and_released(tmp_path: Path) -> None:
    other = PartitionId("e1", "v1", 0, 7)
    indices = [seal(tmp_path, [[[numbers(0, 4)]], []], partition_id=name) for name in (ID, other)]
    store = SealedStore(tmp_path)
    assert store.held() == [("job", index.partition_id, 4, index.size_bytes) for index in indices]
    view_of = store.find("job", ID)
    assert view_of is not None
    reader = RecordingReader(0)
    view = view_of.view(0, 0, reader.unavailable.append)
    view.attach(reader)
    store.release("job", [ID])
    assert store.find("job", ID) is None
    assert [held[1] for held in store.held()] == [other]
    store.release("job", [ID])
    reader.credit = 1
    view.serve()  # what has been mapped stays readable
    assert reader.rows() == [0, 1, 2, 3]
    store.release("job")
    store.release("job")
    assert store.held() == []
    assert list(tmp_path.iterdir()) == []


def test_an_index_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    seal(tmp_path, [[[numbers(0, 4)]]])
    store = SealedStore(tmp_path)
    assert store.held()[0][2] == 4
    seal(tmp_path, [[[numbers(0, 9)]]])
    assert store.held()[0][2] == 9


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    seal(tmp_path, [[[numbers(0, 4)]]], [(2, Watermark(3))])
    directory = partition_directory(tmp_path, "job", ID)
    index_path = directory / "index"
    file_path = subpartition_directory(directory, 0) / file_name(0)
    for path in (index_path, file_path):
        content = path.read_bytes()
        for position in range(len(content)):
            flipped = bytearray(content)
            flipped[position] ^= 1 << (position % 8)
            path.write_bytes(flipped)
            if path == index_path:
                with pytest.raises(StoreCorrupt, match="index"):
                    SealedStore(tmp_path).find("job", ID)
            else:
                reader = read(found(tmp_path))
                assert reader.rows() == []
                assert reader.unavailable[0].partition == ID
                assert str(path) in str(reader.unavailable[0])
        path.write_bytes(content)
    content = index_path.read_bytes()
    for size in range(len(content)):
        index_path.write_bytes(content[:size])
        with pytest.raises(StoreCorrupt):
            SealedStore(tmp_path).find("job", ID)


def test_a_missing_file_and_a_foreign_index(tmp_path: Path) -> None:
    seal(tmp_path, [[[numbers(0, 4)]]])
    directory = partition_directory(tmp_path, "job", ID)
    (subpartition_directory(directory, 0) / file_name(0)).unlink()
    reader = read(found(tmp_path))
    assert "00000000.arrow" in str(reader.unavailable[0])
    with pytest.raises(StoreCorrupt, match="is the index of e0 of v0/2"):
        SealedStore(tmp_path).find("job", PartitionId("e0", "v9", 2, 7))


def test_a_damaged_index_does_not_hide_the_others(tmp_path: Path) -> None:
    other = PartitionId("e1", "v1", 0, 7)
    for name in (ID, other):
        seal(tmp_path, [[[numbers(0, 4)]]], partition_id=name)
    (partition_directory(tmp_path, "job", ID) / "index").write_bytes(b"x" * 100)
    assert [held[1] for held in SealedStore(tmp_path).held()] == [other]


def test_a_disk_that_does_not_take_it(tmp_path: Path) -> None:
    (tmp_path / "sub=0").write_bytes(b"a file where a directory should be")
    with pytest.raises(SpillFailed, match=r"sub=0: .*taskmanager\.spill\.dir"):
        write_spill_files(tmp_path / "sub=0", 0, 0, [numbers(0, 3)])


def test_names_that_leave_the_directory_are_refused(tmp_path: Path) -> None:
    for job_id, edge_id in itertools.product(("job", "../x", "a/b", "", ".."), ("e0", "../e", "")):
        if (job_id, edge_id) != ("job", "e0"):
            with pytest.raises(InvariantViolation):
                partition_directory(tmp_path, job_id, PartitionId(edge_id, "v0", 0, 0))


def test_a_file_that_is_damaged_between_two_readers_is_noticed(tmp_path: Path) -> None:
    ((file, count),) = write_spill_files(tmp_path / "sub=0", 3, 100, [numbers(0, 2), numbers(2, 1)])
    assert (file.sequence, file.first_row, file.end_row, count) == (3, 100, 103, 2)
    path = tmp_path / "sub=0" / file_name(3)
    part = SubpartitionIndex(100, (file,), ())
    partition = SealedPartition(PartitionIndex("job", ID, (part,)), tmp_path)
    assert [row for row, _ in partition.elements(0, 100)] == [100, 102]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreCorrupt, match="is altered"):
        next(partition.elements(0, 100))
