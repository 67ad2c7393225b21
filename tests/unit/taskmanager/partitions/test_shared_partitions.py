"""Partitions on shared storage: what was written there is read by consumers themselves, from any row, as credit allows.

Files are written by the places that slots use, to a store in memory and to one in a directory; I/O threads are played
by the test, which lets what is asked for happen when it likes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from common.elements import EndOfData, EndOfPartition, Watermark
from penstock.errors import StoreCorrupt, StoreNotFound, StoreTransient, StreamError
from penstock.partition_id import PartitionId
from penstock.storage.local_store import LocalStore
from penstock.storage.memory_store import MemoryStore
from penstock.storage.object_store import ObjectStore
from taskmanager.network.kept_channel import (
    KeptChannelSpec,
    KeptInputChannel,
    RowPosition,
    SupplyListener,
)
from taskmanager.network.local_channel import LocalChannel
from taskmanager.network.partition_registry import PartitionRequest
from taskmanager.network.subpartition import SubpartitionView
from taskmanager.partitions.shared_calls_runner import (
    AT_ONCE_MAX,
    HANGING_MAX,
    SharedCallsRunner,
)
from taskmanager.partitions.shared_partitions import SharedPartitions
from taskmanager.partitions.spill_format import ARROW_FILES, FormatChoice, SpillFormat
from taskmanager.partitions.spill_layout import PartitionIndex, SpillFailed, SubpartitionIndex
from taskmanager.partitions.spill_places import SharedPlace
from taskmanager.partitions.spill_runner import SpillRunner
from tests.support.exchange_slots import numbers
from tests.support.subpartition_readers import RecordingReader

ID = PartitionId("e0", "v0", 2, 7)
END = (EndOfData(), EndOfPartition())
FORMATS = [ARROW_FILES, FormatChoice(SpillFormat.PARQUET)]


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return MemoryStore(1 << 20) if request.param == "memory" else LocalStore(tmp_path / "shared")


def place(store: ObjectStore, choice: FormatChoice = ARROW_FILES) -> SharedPlace:
    return SharedPlace(store, "somewhere", "job", ID, choice)


def seal(store: ObjectStore, choice: FormatChoice = ARROW_FILES) -> PartitionIndex:
    """Rows 0 to 11 in three files, and an empty subpartition."""
    files = []
    for sequence, first in enumerate((0, 5, 8)):
        count = (5, 3, 4)[sequence]
        written = place(store, choice).write(0, sequence, first, [numbers(first, count)])
        files += [file for file, _ in written]
    ends = tuple((12, element) for element in END)
    full = SubpartitionIndex(0, tuple(files), ((6, Watermark(3)), *ends))
    empty = SubpartitionIndex(0, (), tuple((0, element) for element in END))
    index = PartitionIndex("job", ID, (full, empty))
    place(store, choice).seal(index)
    return index


class Slot:
    """A consumer's process whose I/O happens when a test says so."""

    def __init__(self, store: ObjectStore) -> None:
        self.calls: list[Callable[[], None]] = []
        self.mail: list[Callable[[], None]] = []
        self.now_ns = 0
        shared_calls = SharedCallsRunner(
            self.mail.append, 1000, lambda: self.now_ns, self.calls.append
        )
        spill = self.spill = SpillRunner(
            Path("/nowhere"), "job", self.calls.append, self.mail.append, shared_calls,
            lambda _: store,
        )  # fmt: skip
        self.partitions = SharedPartitions("x", lambda wanted: spill.complete("job", wanted, "x"))
        self.views: list[SubpartitionView] = []
        self.lost: list[str] = []

    def ask(self, reader: RecordingReader, index: int = 0, first_row: int = 0) -> PartitionRequest:
        request = PartitionRequest(
            ID, index, reader, 0, self.views.append, reader.unavailable.append, first_row,
            lost=self.lost.append,
        )  # fmt: skip
        self.partitions.request(request)
        return request

    def run(self) -> None:
        while self.calls or self.mail:
            (self.calls or self.mail).pop(0)()


@pytest.mark.parametrize("choice", FORMATS, ids=["arrow", "parquet"])
def test_consumers_read_from_any_row(store: ObjectStore, choice: FormatChoice) -> None:
    seal(store, choice)
    slot = Slot(store)
    for first_row in range(13):
        reader = RecordingReader(10**9)
        slot.ask(reader, first_row=first_row)
        slot.run()
        assert reader.rows() == list(range(first_row, 12))
        assert reader.controls() == [Watermark(3), *END]
        assert not reader.offsets or reader.offsets[0] == first_row
    reader = RecordingReader(0)
    slot.ask(reader, index=1)
    slot.run()
    assert reader.got == list(END)


def test_credit_holds_rows_back_and_at_most_one_file_is_read_ahead(store: ObjectStore) -> None:
    seal(store)
    slot, reader = Slot(store), RecordingReader(1)
    slot.ask(reader)
    slot.run()
    assert reader.rows() == [0, 1, 2, 3, 4]
    assert not slot.calls, "the next file is there, the third is not asked for"
    for credit, rows in ((1, 6), (1, 8), (1, 12)):
        reader.credit += credit
        slot.views[0].serve()
        slot.run()
        assert reader.rows() == list(range(rows))
    assert reader.controls() == [Watermark(3), *END]


def test_who_has_gone_is_sent_nothing(store: ObjectStore) -> None:
    seal(store)
    slot, reader = Slot(store), RecordingReader(10**9)
    slot.partitions.withdraw(slot.ask(reader))
    slot.run()
    assert (reader.got, slot.views) == ([], [])
    slot.ask(reader)
    while not slot.views:
        (slot.calls or slot.mail).pop(0)()
    slot.views[0].detach(is_complete=False)
    slot.run()
    assert (reader.got, reader.unavailable) == ([], [])


def test_what_is_not_there_or_damaged_is_to_be_made_again(store: ObjectStore) -> None:
    slot = Slot(store)

    def refusal(index: int = 0, first_row: int = 0) -> str:
        reader = RecordingReader(10**9)
        slot.ask(reader, index, first_row)
        slot.run()
        (error,) = reader.unavailable
        assert error.partition == ID
        return str(error)

    assert "is it the same place for all TaskManagers" in refusal()
    seal(store)
    assert "rows 0 to 12" in refusal(first_row=13)
    assert "not one of index 2" in refusal(index=2)
    path = "job/e0-7/part=2/sub=0/00000001.arrow"
    content = store.get(path)
    store.put(path, [content[:-1]])
    assert "bytes" in refusal()
    store.put(path, [content[:100] + bytes([content[100] ^ 1]) + content[101:]])
    assert "is altered" in refusal()
    store.delete(path)
    assert "cannot be read" in refusal()
    store.put("job/e0-7/part=2/index", [b"x" * 100])
    assert "index" in refusal()
    assert slot.lost == []


def test_storage_that_does_not_answer_is_asked_again(tmp_path: Path) -> None:
    class Silent(LocalStore):
        is_silent = True

        def get(self, path: str) -> bytes:
            if self.is_silent:
                raise StoreTransient("no answer")
            return super().get(path)

    store = Silent(tmp_path)
    seal(store)
    slot, reader = Slot(store), RecordingReader(10**9)
    slot.ask(reader)
    slot.run()
    assert slot.lost == ["x cannot be read now: no answer"]
    store.is_silent = False
    slot.ask(reader)
    slot.calls.pop(0)()
    slot.mail.pop(0)()
    store.is_silent = True
    slot.run()
    assert len(slot.lost) == 2
    assert (reader.got, reader.unavailable) == ([], [])


def test_reads_that_hang_are_given_up_on_and_what_they_bring_late_is_dropped(
    store: ObjectStore,
) -> None:
    seal(store)
    slot, reader = Slot(store), RecordingReader(10**9)
    slot.ask(reader)
    assert slot.spill.next_deadline_ns == 1_000_000_000
    slot.now_ns = 999_999_999
    slot.spill.tick(slot.now_ns)
    assert slot.lost == []
    slot.now_ns += 1
    slot.spill.tick(slot.now_ns)
    (told,) = slot.lost
    assert "has not answered for 1 s (taskmanager.spill.shared-timeout)" in told
    assert slot.spill.next_deadline_ns is None
    slot.run()
    assert (reader.got, slot.views, len(slot.lost)) == ([], [], 1)
    slot.ask(reader)
    slot.run()
    assert reader.rows() == list(range(12))


def test_no_more_than_so_many_calls_hang(store: ObjectStore) -> None:
    seal(store)
    slot = Slot(store)
    readers = [RecordingReader(10**9) for _ in range(HANGING_MAX + 3)]
    for reader in readers:
        slot.ask(reader)
    assert len(slot.calls) == AT_ONCE_MAX
    for _ in range(HANGING_MAX // AT_ONCE_MAX):
        slot.now_ns += 10**9
        slot.spill.tick(slot.now_ns)
    assert len(slot.calls) == HANGING_MAX
    while slot.mail:
        slot.mail.pop(0)()
    assert len(slot.lost) == len(readers)
    assert "none is made before one of them does" in slot.lost[-1]
    slot.calls.pop(0)()  # one comes to itself
    slot.mail.pop(0)()
    slot.calls.clear()
    slot.ask(readers[0])
    slot.run()
    assert readers[0].rows() == list(range(12))
    assert all(reader.got == [] for reader in readers[1:])


def test_writes_that_hang_fail_the_attempt(store: ObjectStore) -> None:
    slot = Slot(store)
    files = slot.spill.partition(ID, ARROW_FILES, "somewhere").subpartition(0)
    written: list[object] = []
    failures: list[StreamError] = []
    files.write(0, 0, [numbers(0, 3)], written.append, failures.append)
    slot.now_ns = 10**9
    slot.spill.tick(slot.now_ns)
    (failure,) = failures
    assert isinstance(failure, SpillFailed)
    assert re.search(
        "cannot be written: somewhere/job/e0-7/part=2: it has not answered", str(failure)
    )
    slot.run()
    assert (len(failures), written) == (1, [])


class Listener(SupplyListener):
    """What a kept channel tells of its supply."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def subscribed(self, channel: KeptInputChannel) -> None:
        self.told.append("subscribed")

    def disconnected(self, channel: KeptInputChannel, reason: str) -> None:
        self.told.append("disconnected")

    def released(self, channel: KeptInputChannel) -> None:
        self.told.append("released")


def test_a_consumer_has_its_rows_only_when_some_have_come(tmp_path: Path) -> None:
    """Who asks again and again in vain gives up in the end: its waiting is not over because it has asked."""

    class Half(LocalStore):
        is_silent = True

        def get(self, path: str) -> bytes:
            if self.is_silent and path.endswith(".arrow"):
                raise StoreTransient("no answer")
            return super().get(path)

    store = Half(tmp_path)
    seal(store)
    slot, listener = Slot(store), Listener()
    behind_a_watermark = RowPosition(8, 0)
    spec = KeptChannelSpec("e0", 2, is_reproducible=False, start=behind_a_watermark)
    ignore: Any = lambda *_: None  # noqa: E731
    channel = KeptInputChannel(
        0, "a channel", 1 << 20, spec=spec, supply=listener, on_data=ignore, on_failure=ignore,
    )  # fmt: skip
    for _ in range(2):
        LocalChannel(channel, 1 << 20, slot.partitions, slot.mail.append).subscribe(ID, 0, 0, 0)
        slot.run()
    assert listener.told == ["disconnected", "disconnected"]
    store.is_silent = False
    LocalChannel(channel, 1 << 20, slot.partitions, slot.mail.append).subscribe(ID, 0, 0, 0)
    slot.run()
    assert listener.told[2:] == ["subscribed"]


@pytest.mark.parametrize("choice", FORMATS, ids=["arrow", "parquet"])
def test_a_partition_is_there_from_one_moment_to_the_next(
    store: ObjectStore, choice: FormatChoice
) -> None:
    own = place(store, choice)
    ((file, count),) = own.write(1, 0, 0, [numbers(0, 2), numbers(2, 1)])
    assert (file.format, file.rows, count) == (choice.wanted, 3, 2)
    assert [batch.num_rows for batch in own.read(1, file)] == [2, 1]
    with pytest.raises(StoreNotFound):
        own.index()
    own.seal(PartitionIndex("job", ID, (SubpartitionIndex(0, (file,), ()),)))
    assert own.index().rows == 3
    own.unlink(1, [file])
    with pytest.raises(StoreNotFound):
        own.read(1, file)
    own.remove()
    own.remove()
    assert store.list("") == []


def test_an_index_of_another_partition_is_refused(store: ObjectStore) -> None:
    seal(store)
    other = PartitionId("e0", "v0", 3, 7)
    store.put("job/e0-7/part=3/index", [store.get("job/e0-7/part=2/index")])
    with pytest.raises(StoreCorrupt, match="is that of e0 of v0/2"):
        SharedPlace(store, "somewhere", "job", other, ARROW_FILES).index()


def test_storage_that_takes_nothing_fails_the_attempt_and_keeps_nothing() -> None:
    store = MemoryStore(200 << 10)
    batches = [
        pa.record_batch({"x": range(20_000)}),
        pa.record_batch({"x": range(20_000)}, metadata={"a": "b"}),
    ]
    with pytest.raises(SpillFailed, match="somewhere/job/e0-7/part=2"):
        place(store).write(0, 0, 0, batches)
    assert store.list("") == []
