"""The parts of the RocksDB backend by themselves: files, keys, the queue, names of files, memory."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import rocksdict
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StoreFull, StoreTransient
from penstock.pb import checkpoint_pb2
from penstock.storage.entries.byte_strings import ByteStrings, SstEntries
from penstock.storage.entries.entry_keys import (
    decoded_keys,
    entry_keys,
    entry_order,
    group_bounds,
    moved_to,
    partition_bounds,
    string_order,
)
from penstock.storage.entries.entry_values import decoded_rows, encoded_rows
from penstock.storage.key_groups import key_group_of
from taskmanager.kernels import AccumulatorKind, encode_keys
from taskmanager.state.memory import ManagedMemory
from taskmanager.state.rocksdb.cgroup_client import cgroup_memory_limit
from taskmanager.state.rocksdb.database_store import Database
from taskmanager.state.rocksdb.file_ledger import FileLedger
from taskmanager.state.rocksdb.memory_shares import memory_shares, parse_cgroup_limit
from taskmanager.state.rocksdb.slot_memory_store import SlotMemory, slot_memory
from taskmanager.state.rocksdb.sst_file import sst_file
from taskmanager.state.rocksdb.write_queue_runner import Freeze, FreezeLostError, WriteQueue
from tests.support.examples import examples
from tests.support.rocksdb_cluster import fast_directory


@pytest.fixture
def directory() -> Iterator[Path]:
    with fast_directory() as path:
        yield path


def entries_of(content: dict[bytes, bytes | None]) -> SstEntries:
    names = sorted(content)
    gone = np.array([content[name] is None for name in names])
    values = ByteStrings.of([content[name] or b"" for name in names])
    return SstEntries(ByteStrings.of(names), values, gone if gone.any() else None)


@pytest.mark.parametrize("seed", range(4))
def test_rocksdb_reads_our_files_as_its_own(directory: Path, seed: int) -> None:
    generator = random.Random(seed)
    memory = SlotMemory(ManagedMemory(16 << 20))
    database = Database(directory / "db", directory / "in", memory)
    expected: dict[bytes, bytes] = {}
    for turn in range(4):
        content: dict[bytes, bytes | None] = {}
        for _ in range(generator.choice([1, 20, 3000])):
            key = generator.randbytes(generator.choice([1, 2, 19, 200]))
            size = generator.choice([0, 1, 16, 127, 128, 300, 20_000 if turn % 2 else 5])
            content[key] = None if generator.random() < 0.2 else generator.randbytes(size)
        database.ingest(entries_of(content))
        for key, value in content.items():
            if value is None:
                expected.pop(key, None)
            else:
                expected[key] = value
    scanned = [
        pair for part in database.scan(b"", b"\xff" * 300) for pair in zip(*part, strict=True)
    ]
    assert scanned == sorted(expected.items())
    asked = sorted({*list(expected)[::3], b"nothing"})
    assert database.get_many(asked) == [expected.get(key) for key in asked]
    database.link(directory / "copy")
    database.close()
    copied = rocksdict.Rdict(str(directory / "copy"), rocksdict.Options(raw_mode=True))
    copied.compact_range(None, None)
    assert dict(copied.items()) == expected
    copied.close()


def test_a_file_of_several_chunks_is_whole(directory: Path) -> None:
    count = 100_000
    names = [number.to_bytes(4, "big") for number in range(count)]
    entries = SstEntries(ByteStrings.of(names), ByteStrings.of(names), None)
    assert sum(1 for _ in sst_file(entries)) > 6
    memory = SlotMemory(ManagedMemory(16 << 20))
    database = Database(directory / "db", directory / "in", memory)
    database.ingest(entries)
    rows = [
        name for part, values in database.scan(b"", b"\xff" * 5) for name in part if part == values
    ]
    assert rows == names
    database.close()


@pytest.mark.parametrize("is_large", [False, True])
def test_blocks_are_kept_where_the_cache_can_hold_all(directory: Path, is_large: bool) -> None:
    memory = SlotMemory(ManagedMemory(16 << 20))
    database = Database(directory / "db", directory / "in", memory)
    value_bytes = 2 * memory.block_cache_bytes // 1000 if is_large else 1000
    names = [number.to_bytes(4, "big") for number in range(1000)]
    values = [name * (value_bytes // 4) for name in names]
    database.ingest(SstEntries(ByteStrings.of(names), ByteStrings.of(values), None))
    before = memory.block_cache.get_usage()
    assert database.get_many(names) == values
    assert (memory.block_cache.get_usage() - before > 500_000) == (not is_large)
    database.close()


@pytest.mark.parametrize("bit", [0, 7])
def test_a_block_that_has_changed_on_disk_is_never_read(directory: Path, bit: int) -> None:
    names = [number.to_bytes(4, "big") for number in range(3000)]
    entries = SstEntries(ByteStrings.of(names), ByteStrings.of(names), None)
    data = bytearray(b"".join(bytes(part) for part in sst_file(entries)))
    data[len(data) // 2] ^= (
        1 << bit
    )  # neither in the first block nor in the last: those are read at once
    changed = directory / "changed.sst"
    changed.write_bytes(data)
    memory = SlotMemory(ManagedMemory(16 << 20))
    database = Database(directory / "db", directory / "in", memory)
    options = rocksdict.IngestExternalFileOptions()
    database._rocks.ingest_external_file([str(changed)], options)
    with pytest.raises(StoreTransient, match="block checksum mismatch"):
        list(database.scan(b"", b"\xff" * 5))
    with pytest.raises(StoreTransient, match="block checksum mismatch"):
        database.get_many(names)
    with pytest.raises(StoreTransient, match="block checksum mismatch"):
        list(database.scan_prefixes(names))
    database.close()


@examples(25)
@given(
    content=st.dictionaries(
        st.binary(min_size=1, max_size=300),
        st.one_of(st.none(), st.binary(max_size=40), st.integers(0, 30_000).map(bytes)),
        min_size=1,
        max_size=80,
    ),
    width=st.sampled_from([None, 1, 16, 200]),
)
def test_rocksdb_verifies_and_reads_any_file_of_ours(
    content: dict[bytes, bytes | None], width: int | None
) -> None:
    """Values of one width are written by columns, others one by one."""
    if width is not None:
        content = {key.ljust(300, b"\0"): bytes([key[0]]) * width for key in content}
    with fast_directory() as directory:
        memory = SlotMemory(ManagedMemory(16 << 20))
        database = Database(directory / "db", directory / "in", memory)
        database.ingest(entries_of(content))
        expected = sorted((key, value) for key, value in content.items() if value is not None)
        scanned = database.scan(b"", b"\xff" * 301)
        assert [pair for part in scanned for pair in zip(*part, strict=True)] == expected
        database._rocks.compact_range(None, None)  # reads every block, and its checksum
        asked = sorted(content)
        assert database.get_many(asked) == [content[key] for key in asked]
        database.close()


KEY_COLUMNS = st.one_of(
    st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))).map(
        lambda c: [pa.array(c, pa.int64())]
    ),
    st.lists(st.one_of(st.none(), st.text(max_size=6))).map(lambda c: [pa.array(c, pa.string())]),
    st.lists(
        st.tuples(st.one_of(st.none(), st.text(max_size=3)), st.one_of(st.none(), st.booleans()))
    ).map(
        lambda rows: [
            pa.array([row[0] for row in rows], pa.string()),
            pa.array([row[1] for row in rows], pa.bool_()),
        ]
    ),
)


@examples(150)
@given(columns=KEY_COLUMNS, max_parallelism=st.sampled_from([1, 7, 128, 32768]))
def test_entry_keys_are_ordered_distinct_and_decodable(
    columns: list[pa.Array], max_parallelism: int
) -> None:
    keys = encode_keys(columns)
    types = [column.type for column in columns]
    names = entry_keys(5, keys, max_parallelism)
    found = names.to_list()
    order = entry_order(keys, max_parallelism).tolist()
    assert [found[row] for row in order] == sorted(found)
    rows = list(zip(*[column.to_pylist() for column in columns], strict=True))
    assert len(set(found)) == len(set(rows))
    decoded = decoded_keys(types, names)
    assert [array.to_pylist() for array in decoded.to_arrays()] == [c.to_pylist() for c in columns]
    assert decoded.hashes.tolist() == keys.hashes.tolist()
    groups = key_group_of(keys.hashes, max_parallelism).tolist()
    for name, group in zip(found, groups, strict=True):
        low, high = group_bounds(5, range(group, group + 1))
        assert partition_bounds(5)[0] <= low <= name < high <= partition_bounds(5)[1]
    assert moved_to(9, names).to_list() == entry_keys(9, keys, max_parallelism).to_list()


@examples(100)
@given(st.sets(st.binary(max_size=25)), st.binary(max_size=20))
def test_strings_are_sorted_whatever_they_share(strings: set[bytes], prefix: bytes) -> None:
    # Shorter ones are filled up for sorting, so all have at least the fixed part of an entry key.
    items = [prefix.ljust(18, b"\0") + text for text in strings]
    if items:
        assert [items[row] for row in string_order(items)] == sorted(items)


@examples(60)
@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.none() | st.floats()), min_size=1))
def test_values_come_back(rows: list[tuple[int, float | None]]) -> None:
    kinds = (AccumulatorKind.SUM_INT64, AccumulatorKind.MIN_FLOAT64)
    numbers = np.array([row[0] for row in rows])
    floats = np.array([0.0 if row[1] is None else row[1] for row in rows])
    valid = np.array([row[1] is not None for row in rows])
    plain = encoded_rows([numbers, floats], [None, None]).to_list()
    marked = encoded_rows([numbers, floats], [None, valid]).to_list()
    accumulators, validity = decoded_rows([kind.dtype for kind in kinds], plain + marked)
    assert accumulators[0].tolist() == [*numbers, *numbers]
    assert accumulators[1].tobytes() == np.concatenate([floats, floats]).tobytes()
    assert validity[0] is None
    expected = [True] * len(rows) + valid.tolist()
    assert (expected if validity[1] is None else validity[1].tolist()) == expected
    assert validity[1] is not None or all(expected)


@dataclass
class Part:
    """Changes that are one entry, and a record of what happened to them."""

    partition: int
    content: dict[bytes, bytes | None]
    dropped_range: tuple[bytes, bytes] | None = None
    events: list[str] = field(default_factory=list)

    def entries(self) -> list[SstEntries]:
        return [entries_of(self.content)]

    def written(self) -> None:
        self.events.append("written")

    def release(self) -> None:
        self.events.append("released")


@dataclass
class Writer:
    """Writes down what it is given; fails, or stops, where a test says so."""

    log: list[Any] = field(default_factory=list)
    error: Exception | None = None
    reached: threading.Event | None = None
    go_on: threading.Event = field(default_factory=threading.Event)

    def ingest(self, entries: SstEntries) -> None:
        if self.reached is not None:
            self.reached.set()
            assert self.go_on.wait(10)
        if self.error is not None:
            raise self.error
        self.log.append(entries.keys.to_list())

    def drop_range(self, begin: bytes, end: bytes) -> None:
        self.log.append(("drop", int.from_bytes(begin[:8], "big")))

    def link(self, directory: Path) -> None:
        self.log.append(("link", directory.name))


def part(partition: int) -> Part:
    return Part(partition, {partition_bounds(partition)[0] + b"k": b"v"})


def name(partition: int) -> bytes:
    return partition_bounds(partition)[0] + b"k"


def test_freezes_are_written_in_order_with_what_was_dropped_before_them() -> None:
    writer = Writer()
    queue = WriteQueue(writer)
    first = queue.add([part(2), part(1)], Path("a"))
    queue.drop(1)
    second = queue.add([part(3)], Path("b"))
    queue.drop(2)
    queue.write_until(second)
    queue.write_until(first)
    assert writer.log == [
        [name(1), name(2)], ("link", "a"), [name(3)], ("drop", 1), ("link", "b"),
    ]  # fmt: skip
    assert not queue.write_next()
    queue.add([], None)
    queue.write_all()
    assert writer.log[-1] == ("drop", 2)


def test_a_discarded_freeze_leaves_its_drops_to_the_next() -> None:
    writer = Writer()
    queue = WriteQueue(writer)
    lost = part(1)
    queue.drop(7)
    first = queue.add([lost], Path("a"))
    queue.drop(8)
    second = queue.add([part(2)], Path("b"))
    queue.discard(first)
    queue.discard(first)
    assert lost.events == ["released"]
    with pytest.raises(FreezeLostError):
        queue.write_until(first)
    queue.discard(second)
    third = queue.add([], Path("c"))
    queue.write_until(third)
    assert writer.log == [("drop", 7), ("drop", 8), ("link", "c")]


def test_a_freeze_that_cannot_be_written_is_lost_and_the_next_goes_on() -> None:
    writer = Writer(error=StoreFull("full"))
    queue = WriteQueue(writer)
    failed = part(1)
    first = queue.add([failed], Path("a"))
    second = queue.add([part(2)], Path("b"))
    with pytest.raises(StoreFull):
        queue.write_until(second)
    assert first.is_lost
    assert failed.events == ["released"]
    writer.error = None
    queue.write_until(second)
    assert writer.log == [[name(2)], ("link", "b")]


def test_discarding_or_closing_does_not_disturb_the_step_that_is_running() -> None:
    writer = Writer(reached=threading.Event())
    queue = WriteQueue(writer)
    written = part(1)
    freeze = queue.add([written], Path("a"))
    errors: list[BaseException] = []

    def write() -> None:
        try:
            queue.write_until(freeze)
        except FreezeLostError as error:
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    assert writer.reached is not None
    assert writer.reached.wait(10)
    queue.discard(freeze)
    assert written.events == []
    writer.go_on.set()
    queue.close()
    thread.join(10)
    # Its entries are in the database, but it is not the snapshot's any more.
    assert written.events == ["written", "released"]
    assert writer.log == [[name(1)]]
    assert len(errors) == 1


class DiscardedWhileLinking(Writer):
    """Its snapshot is given up while the links are being made."""

    queue: WriteQueue
    freeze: Freeze

    def link(self, directory: Path) -> None:
        self.queue.discard(self.freeze)
        directory.mkdir()


def test_links_that_are_made_for_a_discarded_freeze_do_not_stay(directory: Path) -> None:
    writer = DiscardedWhileLinking()
    writer.queue = WriteQueue(writer)
    writer.freeze = writer.queue.add([part(1)], directory / "links")
    with pytest.raises(FreezeLostError):
        writer.queue.write_until(writer.freeze)
    assert not (directory / "links").exists()


def handle(path: str) -> checkpoint_pb2.StateHandle:
    return checkpoint_pb2.StateHandle(path=path, size_bytes=1)


def test_the_first_confirmed_copy_of_a_file_counts() -> None:
    ledger = FileLedger("opening", "first", threading.Lock())
    for number in (1, 2):
        assert ledger.to_upload(["1.sst", "CURRENT"]) == ({}, ["1.sst", "CURRENT"])
        ledger.described(number, [ledger.uploaded("1.sst", handle(f"copy-{number}"))])
    ledger.completed(1)
    ledger.completed(2)
    known, missing = ledger.to_upload(["1.sst", "2.sst"])
    assert missing == ["2.sst"]
    assert known["1.sst"].handle.path == "copy-1"
    assert known["1.sst"].name == "opening/1.sst"
    ledger.described(3, [ledger.uploaded("2.sst", handle("two"))])
    ledger.completed(3)
    assert ledger.to_upload(["1.sst", "2.sst"])[1] == ["1.sst"]


def test_late_and_aborted_checkpoints_change_nothing() -> None:
    ledger = FileLedger("opening", "first", threading.Lock())
    ledger.described(1, [ledger.uploaded("1.sst", handle("a"))])
    ledger.described(2, [ledger.uploaded("2.sst", handle("b"))])
    ledger.described(3, [ledger.uploaded("3.sst", handle("c"))])
    ledger.aborted(3)
    ledger.completed(2)
    ledger.completed(1)
    ledger.completed(3)
    assert ledger.to_upload(["1.sst", "2.sst", "3.sst"])[1] == ["1.sst", "3.sst"]


def test_memory_is_divided_below_both_limits() -> None:
    shares = memory_shares(1 << 30, None)
    assert (shares.block_cache_bytes, shares.cache_bytes) == (64 << 20, 576 << 20)
    assert shares.write_buffer_bytes == 32 << 20
    small = memory_shares(1 << 30, 256 << 20)
    assert small == memory_shares(128 << 20, None)
    assert small.cache_bytes == 72 << 20
    tiny = memory_shares(1 << 20, None)
    assert tiny.cache_bytes == 4 << 20


def test_databases_of_a_slot_share_one_budget() -> None:
    memory = ManagedMemory(64 << 20)
    shared = slot_memory(memory)
    assert slot_memory(memory) is shared
    shared.join()
    alone = shared.cache_bytes
    shared.join()
    assert shared.cache_bytes == alone // 2
    shared.leave()
    assert shared.cache_bytes == alone


@pytest.mark.parametrize(
    ("text", "limit"),
    [("max\n", None), ("1048576\n", 1 << 20), ("9223372036854771712\n", None)],
)
def test_limits_of_containers(text: str, limit: int | None) -> None:
    assert parse_cgroup_limit(text) == limit


def test_the_smallest_limit_of_the_groups_above_counts(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "self"
    group = root / "pod" / "container"
    group.mkdir(parents=True)
    own.write_text("0::/pod/container\n")
    assert cgroup_memory_limit(root, own) is None
    (group / "memory.max").write_text("max\n")
    (root / "pod" / "memory.max").write_text("4096\n")
    assert cgroup_memory_limit(root, own) == 4096
    v1 = root / "memory" / "job"
    v1.mkdir(parents=True)
    (v1 / "memory.limit_in_bytes").write_text("2048\n")
    own.write_text("5:cpu:/x\n4:memory:/job\n0::/pod/container\n")
    assert cgroup_memory_limit(root, own) == 2048
    assert cgroup_memory_limit(root, tmp_path / "missing") is None


def test_a_database_that_cannot_be_written_says_why(directory: Path) -> None:
    memory = SlotMemory(ManagedMemory(16 << 20))
    database = Database(directory / "db", directory / "in", memory)
    (directory / "taken").mkdir()
    with pytest.raises(StoreTransient, match="cannot be written"):
        database.link(directory / "taken")
    (directory / "in").rmdir()
    with pytest.raises(StoreTransient, match="cannot be written"):
        database.ingest(entries_of({b"k": b"v"}))
    database.close()
