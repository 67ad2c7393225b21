"""Aim: files that Spark has written are a partition as they are: each consumer reads its share of them, whole and from any row.

Method: real Parquet files with several row groups, in a blocking partition on a disk and on shared storage; what befalls the
files is done to them. The oracle is the rows that are in the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.elements import EndOfData, EndOfPartition, WrittenFiles
from common.pb import internal_pb2
from penstock.errors import PartitionUnavailable, StreamError
from penstock.partition_id import PartitionId
from penstock.pb import graph_pb2
from penstock.storage.local_store import LocalStore
from penstock.storage.memory_store import MemoryStore
from penstock.storage.object_store import ObjectStore
from taskmanager.network.partitioner import BroadcastPartitioner
from taskmanager.network.result_partition import PartitionContext, ResultPartition
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.partitions.dealt_files import dealt
from taskmanager.partitions.partition_factory import PartitionFactory
from taskmanager.partitions.sealed_store import SealedStore
from taskmanager.partitions.shared_calls_runner import SharedCallsRunner
from taskmanager.partitions.spill_runner import SpillRunner
from tests.support.exchange_slots import configuration
from tests.support.subpartition_readers import RecordingReader

ID = PartitionId("e0", "v0", 0, 3)
END = [EndOfData(), EndOfPartition()]


class Mailbox:
    """A slot process: I/O happens, and mail is read, in ``run``."""

    def __init__(self, root: Path, store: ObjectStore | None = None, disk_max: int = 0) -> None:
        self.calls: list[Callable[[], object]] = []
        self.errors: list[Exception] = []
        post = self.calls.append
        shared = SharedCallsRunner(post, 1000, lambda: 0, self.calls.append)
        self.spill = SpillRunner(root, "job", self.calls.append, post, shared, lambda _: store)  # type: ignore[arg-type,return-value]
        config = configuration(taskmanager_spill_max_bytes=disk_max)
        self.partitions = PartitionFactory(config, self.spill)
        self.shared = "x" if store is not None else ""
        self.counters = SubtaskCounters()

    def partition(
        self, consumers: int, spill_format: int = graph_pb2.SPILL_FORMAT_OF_SPARK
    ) -> ResultPartition:
        edge = graph_pb2.Edge(id="e0", partition_type=graph_pb2.RESULT_PARTITION_TYPE_BLOCKING)
        edge.spill_format = spill_format  # type: ignore[assignment]
        context = PartitionContext(
            ID,
            BroadcastPartitioner(consumers),
            subpartition_count=consumers,
            batch_rows=1000,
            batch_bytes_max=1 << 20,
            buffer_timeout_ms=0,
            counters=self.counters,
            now_ns=lambda: 0,
            on_available=lambda: None,
            on_error=self.errors.append,
            on_release=lambda: None,
        )
        written = internal_pb2.OutputEdge(edge=edge, shared_directory=self.shared)
        return self.partitions.create(context, written)

    def run(self) -> None:
        while self.calls:
            self.calls.pop(0)()


def spark_files(directory: Path, *numbers: range) -> WrittenFiles:
    """Files as Spark writes them: columns that are required, several row groups, checksums of pages."""
    directory.mkdir()
    listed = []
    for number, some in enumerate(numbers):
        path = directory / f"part-{number}.parquet"
        table = pa.table(
            {"x": pa.array(some, pa.int64()), "tags": [[f"{n}"] for n in some]},
            schema=pa.schema(
                [
                    pa.field("x", pa.int64(), nullable=False),
                    pa.field("tags", pa.list_(pa.field("element", pa.string(), nullable=False))),
                ],
                metadata={"org.apache.spark.version": "4.0"},
            ),
        )
        plain = {"compression": "none", "use_dictionary": False, "store_schema": False}
        pq.write_table(table, path, row_group_size=5, write_page_checksum=True, **plain)
        listed.append((str(path), len(some)))

    def read() -> Iterator[pa.RecordBatch]:
        raise AssertionError("nobody reads the rows")

    size_bytes = sum(Path(path).stat().st_size for path, _ in listed)
    return WrittenFiles(tuple(listed), read, size_bytes)


def read_local(root: Path, index: int, first_row: int = 0) -> RecordingReader:
    sealed = SealedStore(root).find("job", ID)
    assert sealed is not None
    reader = RecordingReader(10**9)
    sealed.view(index, first_row, reader.unavailable.append).attach(reader)
    return reader


def read_shared(mailbox: Mailbox, index: int, first_row: int = 0) -> RecordingReader:
    from taskmanager.network.partition_registry import PartitionRequest

    reader = RecordingReader(10**9)
    mailbox.partitions.shared("x", "job").request(
        PartitionRequest(
            ID, index, reader, 0, lambda view: None, reader.unavailable.append, first_row,
            lost=lambda reason: reader.unavailable.append(PartitionUnavailable(reason)),
        )
    )  # fmt: skip
    mailbox.run()
    return reader


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 5))
def test_every_file_is_dealt_out_once_and_fairly(rows: list[int], consumers: int) -> None:
    files = [(str(number), count) for number, count in enumerate(rows)]
    shares = dealt(files, consumers)
    if shares is None:
        assert consumers > 1
        return
    assert sorted(file for share in shares for file in share) == sorted(files)
    most = max(sum(count for _, count in share) for share in shares)
    assert most * consumers <= 1.25 * sum(rows)


@pytest.mark.parametrize("kind", ["disk", "memory", "directory"])
def test_each_consumer_reads_its_share_from_any_row(tmp_path: Path, kind: str) -> None:
    stores: dict[str, ObjectStore | None] = {
        "disk": None,
        "memory": MemoryStore(1 << 20),
        "directory": LocalStore(tmp_path / "shared"),
    }
    mailbox = Mailbox(tmp_path / "spill", stores[kind])
    written = spark_files(tmp_path / "out", range(12), range(12, 24), range(24, 25))
    partition = mailbox.partition(2)
    assert partition.takes_files(written)
    partition.emit_files(written)
    partition.end_data()
    assert not partition.is_drained(), "the files are being taken"
    mailbox.run()
    assert partition.is_drained()
    assert mailbox.errors == []
    assert mailbox.counters.records_out == 25
    for path, _ in written.files:
        Path(path).unlink()  # as the stage does at its end

    def read(index: int, first_row: int = 0) -> RecordingReader:
        if stores[kind] is not None:
            return read_shared(mailbox, index, first_row)
        return read_local(tmp_path / "spill", index, first_row)

    whole = [read(0), read(1)]
    assert sorted(whole[0].rows() + whole[1].rows()) == list(range(25))
    assert [reader.controls() for reader in whole] == [END, END]
    for batch in (one for one in whole[0].got if isinstance(one, pa.RecordBatch)):
        assert batch.schema == pa.schema([("x", pa.int64()), ("tags", pa.list_(pa.string()))])
        assert batch["tags"].to_pylist() == [[str(n)] for n in batch["x"].to_pylist()]
    for first_row in range(len(whole[1].rows()) + 1):
        again = read(1, first_row)
        assert again.rows() == whole[1].rows()[first_row:]
        assert not again.offsets or again.offsets[0] == first_row
    partition.release()
    mailbox.run()
    assert not [path for path in tmp_path.rglob("*.spark.parquet") if path.is_file()]


def test_rows_are_given_where_files_would_be_unfair_or_have_no_room(tmp_path: Path) -> None:
    written = spark_files(tmp_path / "out", range(12))
    assert Mailbox(tmp_path).partition(1).takes_files(written)
    assert not Mailbox(tmp_path).partition(2).takes_files(written)
    assert not Mailbox(tmp_path, disk_max=10).partition(1).takes_files(written)
    other = Mailbox(tmp_path).partition(1, graph_pb2.SPILL_FORMAT_UNSPECIFIED)
    assert not other.takes_files(written)


def test_no_rows_are_no_files(tmp_path: Path) -> None:
    mailbox = Mailbox(tmp_path)
    partition = mailbox.partition(3)
    written = WrittenFiles((), lambda: iter(()))
    assert partition.takes_files(written)
    partition.emit_files(written)
    partition.end_data()
    mailbox.run()
    assert [read_local(tmp_path, index).got for index in range(3)] == [END] * 3


def test_a_file_that_is_not_what_spark_had_said_fails_the_stage(tmp_path: Path) -> None:
    written = spark_files(tmp_path / "out", range(12))
    mailbox = Mailbox(tmp_path / "spill")
    partition = mailbox.partition(1)
    partition.emit_files(WrittenFiles(((written.files[0][0], 13),), written.read))
    partition.end_data()
    mailbox.run()
    [error] = mailbox.errors
    assert "12 rows, and had 13" in str(error)
    assert not partition.is_drained()
    partition.release()
    mailbox.run()
    assert not list((tmp_path / "spill").rglob("*.parquet"))


@pytest.mark.parametrize(
    ("befalls", "told"),
    [
        (Path.unlink, "is not there"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes"),
        (lambda path: path.write_bytes(_one_bit_off(path.read_bytes())), "cannot be read"),
    ],
)
@pytest.mark.parametrize("kind", ["disk", "directory"])
def test_what_is_lost_or_altered_is_a_partition_to_be_made_again(
    tmp_path: Path, kind: str, befalls: Callable[[Path], object], told: str
) -> None:
    store = LocalStore(tmp_path / "spill") if kind == "directory" else None
    mailbox = Mailbox(tmp_path / "spill", store)
    partition = mailbox.partition(1)
    partition.emit_files(spark_files(tmp_path / "out", range(12)))
    partition.end_data()
    mailbox.run()
    [file] = (tmp_path / "spill").rglob("*.spark.parquet")
    befalls(file)
    if store is None:
        reader = read_local(tmp_path / "spill", 0)
    else:
        reader = read_shared(mailbox, 0)
    [error] = reader.unavailable
    assert isinstance(error, StreamError)
    assert error.partition == ID
    assert told in str(error) or kind == "directory"


def _one_bit_off(content: bytes) -> bytes:
    """A row group in the middle has a value that is another one."""
    at = content.index((7).to_bytes(8, "little"))
    return content[:at] + bytes([content[at] ^ 0x20]) + content[at + 1 :]
