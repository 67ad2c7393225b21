"""Kept partitions one situation at a time: who waits, what is spilled, dropped, sealed, and read again.

The files of the first part happen when a test says so; those of the second are real.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import structlog

from common.cause_chain import cause_chain
from common.elements import (
    CheckpointBarrier,
    EndOfData,
    EndOfPartition,
    StreamStatus,
    Watermark,
)
from common.pb import internal_pb2
from penstock.errors import PartitionUnavailable, StreamError
from penstock.partition_id import PartitionId
from penstock.pb import checkpoint_pb2, graph_pb2
from taskmanager.network.partitioner import BroadcastPartitioner
from taskmanager.network.pipelined import PartitionLoad
from taskmanager.network.result_partition import PartitionContext, ResultPartition
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.partitions.exchange_cache import ExchangeCache
from taskmanager.partitions.kept_partition import KeptPartition
from taskmanager.partitions.kept_subpartition import KeptSubpartition
from taskmanager.partitions.partition_factory import PartitionFactory
from taskmanager.partitions.retention import Retention
from taskmanager.partitions.sealed_store import SealedStore
from taskmanager.partitions.spill_layout import SpillFailed
from taskmanager.partitions.spill_runner import SpillRunner
from taskmanager.partitions.spilling import Spilling
from tests.support.exchange_slots import configuration, numbers
from tests.support.kept_files import PendingFiles
from tests.support.subpartition_readers import RecordingReader

ID = PartitionId("e0", "v0", 0, 3)
END = [EndOfData(), EndOfPartition()]


class Case:
    """A subpartition whose batches of 80 bytes leave the collector at once."""

    def __init__(
        self,
        retention: Retention = Retention.CACHING,
        memory_max: int = 1 << 20,
        disk_max: int = 0,
        cache: ExchangeCache | None = None,
        is_shared: bool = False,
        **values: Any,
    ) -> None:
        self.files = PendingFiles()
        self.files.need_local_disk = not is_shared
        self.load = PartitionLoad()
        self.errors: list[Exception] = []
        self.woken = 0
        self.cache = cache or ExchangeCache(memory_max, disk_max, can_spill=retention.may_spill)
        self.subpartition = KeptSubpartition(
            retention,
            (1, 1 << 20),
            self.cache,
            self.files,
            self.load,
            on_sent=lambda size_bytes: None,
            on_unblocked=self.room_came,
            on_error=self.errors.append,
            **values,
        )
        self.row = self.subpartition.log.first_row

    @property
    def has_backlog(self) -> bool:
        return self.subpartition.has_backlog

    def room_came(self) -> None:
        self.woken += 1

    def is_available(self) -> bool:
        return not self.load.waiting_batches and not self.cache.blocks(self)

    def emit(self, batches: int = 1) -> None:
        for _ in range(batches):
            self.subpartition.add(numbers(self.row, 10), 80)
            self.row += 10

    def attach(self, row: int = 0, credit: int = 1000) -> tuple[RecordingReader, Any]:
        reader = RecordingReader(credit)
        view = self.subpartition.view(row, reader.unavailable.append)
        view.attach(reader)
        return reader, view


def test_a_reader_that_has_caught_up_holds_the_producer_back() -> None:
    case = Case()
    case.emit(3)
    assert case.is_available(), "nobody reads"
    reader, view = case.attach(credit=2)
    assert reader.rows() == list(range(20))
    case.emit()
    assert case.is_available(), "it has not read yet what was there"
    reader.credit = 10
    view.serve()
    reader.credit = 0
    case.emit()
    assert not case.is_available()
    woken = case.woken
    reader.credit = 1
    view.serve()
    assert case.is_available()
    assert case.woken == woken + 1


def test_a_reader_behind_a_faster_producer_slows_it_down_until_it_has_caught_up() -> None:
    case = Case()
    case.emit(10)
    reader, view = case.attach(credit=0)
    case.emit(40)
    emitted, reads = case.row, 0
    while not view.is_live:
        reader.credit = 1
        view.serve()
        reads += 1
        while case.is_available() and not view.is_live:
            case.emit()  # as fast as it may
            if reads < 10:
                break  # it holds nothing back until it has read what was there
        assert reads < 1000
    assert reader.rows() == list(range(case.row))
    assert case.row - emitted > 300, "the producer went on meanwhile"


def test_a_reader_starts_behind_the_state_that_holds_there() -> None:
    case = Case()
    case.subpartition.add_control(Watermark(1))
    case.subpartition.add_control(StreamStatus(active=False))
    case.emit()
    case.subpartition.add_control(Watermark(2))
    case.emit()
    state = [Watermark(1), StreamStatus(active=False)]
    assert case.attach(5)[0].shapes() == [*state, 5, Watermark(2), 10]
    assert case.attach(10)[0].shapes() == [*state, Watermark(2), 10]
    assert case.attach(20)[0].shapes() == [Watermark(2), StreamStatus(active=False)]
    with pytest.raises(PartitionUnavailable, match="rows 0 to 20"):
        case.attach(-1)


def test_a_reader_may_be_ahead_of_a_restarted_producer() -> None:
    case = Case()
    case.emit()
    ahead, _ = case.attach(25)
    case.emit()
    assert ahead.shapes() == []
    case.emit()
    assert ahead.shapes() == [5]
    case.subpartition.add_control(EndOfPartition())
    with pytest.raises(PartitionUnavailable, match="rows 0 to 30"):
        case.attach(31)


def test_a_reader_gets_barriers_from_before_it_while_their_checkpoints_are_pending() -> None:
    case = Case()
    case.subpartition.add_control(CheckpointBarrier(1, 0))
    case.subpartition.checkpoint_aborted(1)
    case.subpartition.add_control(CheckpointBarrier(2, 0))
    case.emit()
    slow, _ = case.attach(credit=0)
    assert slow.controls() == [CheckpointBarrier(2, 0)]
    second, _ = case.attach()
    assert second.controls() == [CheckpointBarrier(2, 0)]
    case.subpartition.add_control(CheckpointBarrier(3, 0))
    assert second.controls() == [CheckpointBarrier(2, 0), CheckpointBarrier(3, 0)]
    assert slow.controls() == [CheckpointBarrier(2, 0)]


def test_a_completed_checkpoint_lets_go_what_is_before_its_barrier() -> None:
    case = Case()
    case.emit(2)
    case.subpartition.add_control(Watermark(7))
    case.subpartition.add_control(CheckpointBarrier(1, 0))
    case.emit()
    case.subpartition.add_control(CheckpointBarrier(2, 0))
    assert case.subpartition.position == 30
    case.subpartition.checkpoint_aborted(2)
    case.subpartition.checkpoint_completed(1)
    assert case.cache.memory_bytes == 80
    assert case.attach(20)[0].shapes() == [Watermark(7), 10]
    with pytest.raises(PartitionUnavailable):
        case.attach(19)


def test_nothing_goes_that_a_reader_has_not_got() -> None:
    case = Case()
    case.emit(2)
    reader, view = case.attach(credit=1)
    case.subpartition.add_control(CheckpointBarrier(1, 0))
    case.subpartition.checkpoint_completed(1)
    assert case.cache.memory_bytes == 80
    reader.credit = 1
    view.serve()
    assert reader.rows() == list(range(20))
    assert case.cache.memory_bytes == 0


def test_what_does_not_fit_is_spilled_and_read_ahead() -> None:
    case = Case(memory_max=400)
    case.emit(4)
    assert len(case.files.pending) == 1
    while case.is_available():
        case.emit()
    assert case.cache.is_full
    case.files.run()
    assert case.woken
    assert case.is_available()
    assert case.files.files
    while len(case.files.files) < 4:
        case.emit()
        case.files.run()
    reader, view = case.attach(5)
    assert reader.rows() == []
    assert len(case.files.pending) == 2, "the file that is wanted, and the next"
    case.files.pending.pop(1)()
    assert reader.rows() == []
    case.files.run()
    assert reader.rows() == list(range(5, case.row))
    assert view.is_live
    case.subpartition.add_control(CheckpointBarrier(1, 0))
    case.subpartition.checkpoint_completed(1)
    assert not case.files.files
    assert (case.cache.memory_bytes, case.cache.disk_bytes) == (0, 0)


def test_rows_stay_readable_while_they_are_written_and_go_when_nobody_wants_the_file() -> None:
    case = Case(memory_max=400)
    case.emit(4)
    assert case.attach()[0].rows() == list(range(40))
    case.subpartition.add_control(CheckpointBarrier(1, 0))
    case.subpartition.checkpoint_completed(1)
    assert case.cache.memory_bytes > 0, "the write holds them"
    case.files.run()
    assert (case.cache.memory_bytes, case.files.files) == (0, {})


def test_a_full_disk_fails_the_producer() -> None:
    case = Case(memory_max=400)
    case.files.disk_is_full = True
    case.emit(4)
    case.files.run()
    (error,) = case.errors
    assert isinstance(error, SpillFailed)
    case.subpartition.release()
    assert case.cache.memory_bytes == 0


def test_a_write_that_fails_lets_those_go_on_who_waited_for_its_end() -> None:
    """An attempt that has finished cannot fail any more: nothing is released that would wake them."""
    finished = Case(memory_max=400)
    finished.emit(4)
    other = Case(cache=finished.cache)
    reader, _ = other.attach()
    other.emit()
    assert not other.is_available(), "memory is full, and a write is under way"
    finished.files.disk_is_full = True
    woken = other.woken
    finished.files.run()
    assert isinstance(finished.errors[0], SpillFailed)
    assert other.woken > woken
    for _ in range(10):
        other.files.run()
        assert other.is_available()
        other.emit()
    assert reader.rows() == list(range(110))


def test_a_file_that_cannot_be_read_is_the_consumers_affair() -> None:
    case = Case(memory_max=400)
    case.emit(4)
    case.files.run()
    reader, _ = case.attach()
    case.files.files.clear()
    case.files.run()
    assert "is not there" in str(reader.unavailable[0])
    assert not case.errors


def test_in_memory_the_oldest_goes_unless_a_reader_needs_it() -> None:
    case = Case(Retention.CACHING_MEMORY, memory_max=400)
    while case.is_available():
        case.emit()
    assert case.row == 50, "nobody has read it yet: it waits"
    reader, view = case.attach(credit=3)
    assert not case.cache.is_full, "what has been read makes room"
    assert case.is_available()
    while case.is_available():
        case.emit()
    reader.credit = 1000
    view.serve()
    case.emit(10)
    assert case.is_available()
    assert reader.rows() == list(range(case.row))
    assert case.cache.memory_bytes <= 400
    first_row = case.subpartition.log.first_row
    view.detach(is_complete=False)
    with pytest.raises(PartitionUnavailable, match="its producer must run again"):
        case.attach(first_row - 1)
    assert case.attach(first_row)[0].rows() == list(range(first_row, case.row))


def test_at_the_limit_of_the_disk_a_producer_waits_for_absent_readers_only() -> None:
    case = Case(memory_max=400, disk_max=250)
    for _ in range(50):
        if case.is_available():
            case.emit()
        case.files.run()
    assert not case.is_available()
    assert case.cache.disk_bytes <= 250
    held = case.row
    assert held < 500
    reader, _ = case.attach()
    case.files.run()
    assert reader.rows() == list(range(held))
    for _ in range(50):
        assert case.is_available()
        case.emit()
        case.files.run()
    assert reader.rows() == list(range(case.row))
    assert case.cache.disk_bytes <= 250


def test_a_disk_that_is_nearly_full_makes_producers_wait_until_it_has_room() -> None:
    case = Case(memory_max=400)
    case.cache.set_spilling(Spilling.STOPPED)
    while case.is_available():
        case.emit()
    assert case.cache.is_full
    assert not case.files.pending
    woken = case.woken
    case.cache.set_spilling(Spilling.ALLOWED)
    assert case.files.pending
    case.files.run()
    assert case.woken > woken
    assert case.is_available()
    reader, _ = case.attach()
    case.files.run()
    assert reader.rows() == list(range(case.row))


def test_rows_for_consumers_that_have_finished_are_only_counted() -> None:
    case = Case(first_row=100, is_unread=True)
    case.emit(2)
    case.subpartition.add_control(Watermark(1))
    case.subpartition.add_control(CheckpointBarrier(1, 0))
    case.emit()
    assert case.subpartition.position == 120
    assert case.subpartition.is_consumed
    assert case.cache.memory_bytes == 0
    with pytest.raises(PartitionUnavailable, match="has finished"):
        case.attach(130)


def test_watermarks_of_an_idle_stream_take_no_room() -> None:
    case = Case()
    reader, _ = case.attach()
    for time in range(1000):
        case.subpartition.add_control(Watermark(time))
    assert [element.timestamp_ms for element in reader.controls()] == list(range(1000))
    assert case.subpartition.log.end_index == 1


# ---------------------------------------------------------------- partitions with real files


class Mailbox:
    """I/O happens when asked for, its results come when asked for."""

    def __init__(self, root: Path) -> None:
        self.calls: list[Callable[[], None]] = []
        self.mail: list[Callable[[], None]] = []
        self.errors: list[Exception] = []
        self.woken = 0
        self.released = 0
        self.spill = SpillRunner(root, "job", self.calls.append, self.mail.append)

    def run(self) -> None:
        while self.calls or self.mail:
            for queue in (self.calls, self.mail):
                while queue:
                    queue.pop(0)()

    def partition(
        self,
        kind: int,
        *,
        count: int = 2,
        memory: int = 1 << 20,
        positions: tuple[checkpoint_pb2.ChannelPosition, ...] = (),
        finished: tuple[int, ...] = (),
        **values: object,
    ) -> ResultPartition:
        config = configuration(taskmanager_memory_exchange_cache_bytes=memory, **values)
        edge = internal_pb2.OutputEdge(
            edge=graph_pb2.Edge(id="e0"),
            subpartition_count=count,
            finished_subpartitions=finished,
        )
        edge.edge.partition_type = kind  # type: ignore[assignment]
        context = PartitionContext(
            ID,
            BroadcastPartitioner(count),
            subpartition_count=count,
            batch_rows=10,
            batch_bytes_max=1 << 20,
            buffer_timeout_ms=0,
            counters=SubtaskCounters(),
            now_ns=lambda: 0,
            on_available=self._wake,
            on_error=self.errors.append,
            on_release=self._release,
        )
        return PartitionFactory(config, self.spill).create(context, edge, positions)

    def _wake(self) -> None:
        self.woken += 1

    def _release(self) -> None:
        self.released += 1


def end(partition: ResultPartition) -> None:
    partition.end_data()
    partition.finish()


def test_a_blocking_partition_is_sealed_before_it_is_drained(tmp_path: Path) -> None:
    mailbox = Mailbox(tmp_path)
    partition = mailbox.partition(graph_pb2.RESULT_PARTITION_TYPE_BLOCKING, memory=500)
    rows = 0
    for number in range(20):
        partition.emit(numbers(rows, 7))
        rows += 7
        partition.emit_control(Watermark(number))
        partition.flush()
        if number == 9:
            partition.emit_control(CheckpointBarrier(1, 0))
            assert [position.rows for position in partition.positions()] == [70, 70]
        mailbox.run()
        assert SealedStore(tmp_path).held() == []
    end(partition)
    assert not partition.is_drained()
    assert partition.sealed_bytes == 0
    mailbox.run()
    assert partition.is_drained()
    assert mailbox.woken
    assert partition.sealed_bytes == sum(file.stat().st_size for file in tmp_path.rglob("*.arrow"))
    partition.retire()
    mailbox.run()
    assert mailbox.released == 1
    store = SealedStore(tmp_path)
    assert [held[:3] for held in store.held()] == [("job", ID, 2 * rows)]
    sealed = store.find("job", ID)
    assert sealed is not None
    for index in range(2):
        for first_row in (0, 13, rows):
            reader = RecordingReader(10**6)
            sealed.view(index, first_row, reader.unavailable.append).attach(reader)
            assert reader.rows() == list(range(first_row, rows))
            assert reader.controls()[-2:] == END
            assert Watermark(19) in reader.controls()
            assert not any(isinstance(e, CheckpointBarrier) for e in reader.controls())


def test_an_empty_blocking_partition_and_one_that_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    mailbox = Mailbox(tmp_path)
    position = checkpoint_pb2.ChannelPosition(edge_id="e0", index=1, rows=40)
    other = checkpoint_pb2.ChannelPosition(edge_id="e9", index=0, rows=7)
    partition = mailbox.partition(
        graph_pb2.RESULT_PARTITION_TYPE_BLOCKING, positions=(position, other)
    )
    end(partition)
    mailbox.run()
    assert partition.is_drained()
    sealed = SealedStore(tmp_path).find("job", ID)
    assert sealed is not None
    assert [part.first_row for part in sealed.index.subpartitions] == [0, 40]
    reader = RecordingReader(1)
    sealed.view(1, 40, reader.unavailable.append).attach(reader)
    assert reader.got == END


@pytest.mark.parametrize("rows", [pa.nulls(12), pa.array([b""] * 12, pa.binary(0))])
def test_rows_without_a_byte_are_sealed_as_others_are(rows: pa.Array, tmp_path: Path) -> None:
    mailbox = Mailbox(tmp_path)
    partition = mailbox.partition(graph_pb2.RESULT_PARTITION_TYPE_BLOCKING, memory=500)
    for row in rows:
        partition.emit(pa.record_batch({"x": pa.array([row.as_py()], rows.type)}))
        partition.flush()
    end(partition)
    mailbox.run()
    partition.retire()
    mailbox.run()
    sealed = SealedStore(tmp_path).find("job", ID)
    assert sealed is not None
    reader = RecordingReader(10**6)
    sealed.view(1, 0, reader.unavailable.append).attach(reader)
    batches = [element for element in reader.got if isinstance(element, pa.RecordBatch)]
    assert pa.Table.from_batches(batches)["x"].to_pylist() == rows.to_pylist()


def test_a_producer_that_dies_before_the_index_leaves_nothing_complete(tmp_path: Path) -> None:
    mailbox = Mailbox(tmp_path)
    partition = mailbox.partition(graph_pb2.RESULT_PARTITION_TYPE_BLOCKING)
    partition.emit(numbers(0, 100))
    end(partition)
    while mailbox.calls:
        mailbox.calls.pop(0)()  # the rows are written, and nobody is left to hear of it
    assert list(tmp_path.rglob("*.arrow"))
    assert SealedStore(tmp_path).held() == []


def test_a_failed_attempt_takes_its_files_with_it(tmp_path: Path) -> None:
    for kind in (
        graph_pb2.RESULT_PARTITION_TYPE_BLOCKING,
        graph_pb2.RESULT_PARTITION_TYPE_CACHING,
    ):
        mailbox = Mailbox(tmp_path)
        partition = mailbox.partition(kind, memory=200)
        for start in range(0, 100, 10):
            partition.emit(numbers(start, 10))
            if start < 70:
                mailbox.run()
        assert list(tmp_path.rglob("*.arrow"))
        partition.release()  # while something is being written
        mailbox.run()
        assert not list(tmp_path.rglob("*.arrow"))
        assert mailbox.released == 1


def test_a_blocking_partition_beyond_the_limit_of_the_disk_fails(tmp_path: Path) -> None:
    mailbox = Mailbox(tmp_path)
    partition = mailbox.partition(
        graph_pb2.RESULT_PARTITION_TYPE_BLOCKING, memory=400, taskmanager_spill_max_bytes=1000
    )
    for start in range(0, 1000, 10):
        if mailbox.errors:
            break
        partition.emit(numbers(start, 10))
        mailbox.run()
    error = mailbox.errors[0]
    assert isinstance(error, StreamError)
    assert "taskmanager.spill.max-size is 1000" in str(error)
    assert "StoreFull" in cause_chain(error), "the label of the failure says that space ran out"
    partition.release()


@pytest.mark.parametrize("is_ended", [False, True])
def test_a_blocking_partition_fails_when_it_has_waited_for_the_disk_in_vain(
    is_ended: bool,
) -> None:
    case = Case(Retention.BLOCKING, memory_max=400)
    case.cache.set_spilling(Spilling.STOPPED)
    if is_ended:
        case.emit()
        case.subpartition.seal()
    else:
        while case.is_available():
            case.emit()
    assert not case.errors
    assert not case.files.pending
    case.cache.set_spilling(Spilling.GIVEN_UP)
    (error,) = case.errors
    assert isinstance(error, SpillFailed)
    assert "taskmanager.spill.wait-timeout" in str(error)
    assert "StoreFull" in cause_chain(error), "the label of the failure says that space ran out"
    assert not case.files.pending


@pytest.mark.parametrize("spilling", [Spilling.STOPPED, Spilling.GIVEN_UP])
def test_what_goes_to_shared_storage_knows_no_limit_of_the_disk(spilling: Spilling) -> None:
    case = Case(Retention.BLOCKING, memory_max=400, disk_max=10, is_shared=True)
    local = Case(Retention.BLOCKING, cache=case.cache)
    local.emit()
    case.cache.set_spilling(spilling)
    case.emit(4)
    case.files.run()
    local.subpartition.seal()
    case.subpartition.seal()
    case.files.run()
    assert case.subpartition.is_on_disk
    assert len(case.files.files) >= 1
    assert (case.errors, case.cache.disk_bytes) == ([], 0)
    assert not local.files.pending
    assert len(local.errors) == (spilling is Spilling.GIVEN_UP)


def test_a_caching_partition_goes_on_waiting_for_its_reader_when_the_disk_stays_full() -> None:
    case = Case(memory_max=400)
    case.cache.set_spilling(Spilling.STOPPED)
    while case.is_available():
        case.emit()
    case.cache.set_spilling(Spilling.GIVEN_UP)
    assert not case.errors
    assert not case.is_available()
    reader, _ = case.attach()
    assert reader.rows() == list(range(case.row))
    assert case.is_available()


def test_a_caching_partition_outlives_its_attempt(tmp_path: Path) -> None:
    mailbox = Mailbox(tmp_path)
    partition = mailbox.partition(
        graph_pb2.RESULT_PARTITION_TYPE_CACHING, memory=300, finished=(1,)
    )
    assert isinstance(partition, KeptPartition)
    for start in range(0, 100, 10):
        partition.emit(numbers(start, 10))
        mailbox.run()
    end(partition)
    assert partition.is_drained(), "it is kept, read or not"

    def read(row: int) -> RecordingReader:
        reader = RecordingReader(1000)
        view = partition.view(0, row, reader.unavailable.append)
        view.attach(reader)
        mailbox.run()
        assert reader.controls() == END
        view.detach(is_complete=True)
        return reader

    assert read(0).rows() == list(range(100))
    assert partition.is_drained()
    partition.retire()
    assert not mailbox.released
    assert read(55).rows() == list(range(55, 100))
    with pytest.raises(PartitionUnavailable) as caught:
        partition.view(1, 0, [].append)
    assert caught.value.partition == ID
    partition.release()
    mailbox.run()
    assert mailbox.released == 1
    assert not list(tmp_path.rglob("*.arrow"))


def test_a_disk_that_fills_up_after_an_attempt_has_finished_is_told_and_loses_nothing(
    tmp_path: Path,
) -> None:
    mailbox = Mailbox(tmp_path / "spill")
    partition = mailbox.partition(graph_pb2.RESULT_PARTITION_TYPE_CACHING, count=1, memory=400)
    for start in range(0, 40, 10):
        partition.emit(numbers(start, 10))
    end(partition)
    partition.retire()
    (tmp_path / "spill").write_text("no directory can be made here")
    with structlog.testing.capture_logs() as logs:
        mailbox.run()
    assert [line["event"] for line in logs] == ["partition.not_written"]
    reader = RecordingReader(100)
    partition.view(0, 0, reader.unavailable.append).attach(reader)
    mailbox.run()
    assert reader.rows() == list(range(40))
    partition.release()
    mailbox.run()


def test_dictionaries_and_metadata_survive_spilling(tmp_path: Path) -> None:
    mailbox = Mailbox(tmp_path)
    partition = mailbox.partition(graph_pb2.RESULT_PARTITION_TYPE_CACHING, count=1, memory=100)
    batches = [
        pa.record_batch({"d": pa.array(["a", "b"] * 6).dictionary_encode()}),
        pa.record_batch({"d": pa.array(["c"] * 12).dictionary_encode()}),
        numbers(0, 12).replace_schema_metadata({"penstock.slice_ms": "10"}),
        numbers(0, 12),
    ]
    for batch in batches:
        partition.emit(batch)
        mailbox.run()
    reader = RecordingReader(100)
    partition.view(0, 0, reader.unavailable.append).attach(reader)
    mailbox.run()
    assert [batch.to_pylist() for batch in reader.got] == [batch.to_pylist() for batch in batches]
    assert reader.got[2].schema.metadata == {b"penstock.slice_ms": b"10"}
