"""Aim: whatever has happened to a file of state, a restore gives the rows that were written, or an error that names it.

Method: bits are flipped, bytes overwritten, ends cut off and ends added, at random: of the objects of a checkpoint of either
backend, and, without the checksums of whole objects around them, of segments and of files that RocksDB takes in.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rocksdict import IngestExternalFileOptions

from penstock.errors import StoreCorrupt, StoreTransient
from penstock.pb import checkpoint_pb2
from penstock.storage.codec import codec_of
from penstock.storage.entries.byte_strings import ByteStrings, SstEntries
from penstock.storage.run_columns import sorted_batch
from penstock.storage.run_reader import SegmentPlace, chain_batches
from penstock.storage.run_writer import SegmentWriter
from penstock.storage.snapshot_files import StoreSnapshotReader
from taskmanager.kernels import AccumulatorKind, encode_keys
from taskmanager.state.backend import AggregateDescriptor
from taskmanager.state.descriptors import StateDescriptor, StateKind
from taskmanager.state.memory import ManagedMemory
from taskmanager.state.rocksdb.database_store import Database
from taskmanager.state.rocksdb.slot_memory_store import SlotMemory
from taskmanager.state.rocksdb.sst_file import sst_file
from taskmanager.state.row_table import RowDescriptor, part_rows
from tests.support.backend_job import BACKENDS
from tests.support.examples import number_of
from tests.support.one_backend import KEYS, Cells, OneBackend, add_counts, counts_of
from tests.support.rocksdb_cluster import fast_directory

VALUE = StateDescriptor("value", StateKind.VALUE, codec_of(pa.string()))
COUNTS = AggregateDescriptor(KEYS, (AccumulatorKind.COUNT,), list)
ROWS = RowDescriptor(pa.schema({"key": pa.string(), "n": pa.int64()}), ("key",))
GROUPS = 128
FOOTER_BYTES = 53
BEHIND = b"\xff" * 40


@pytest.fixture
def directory() -> Iterator[Path]:
    with fast_directory() as path:
        yield path


def damaged(data: bytes, generator: random.Random) -> bytes:
    """The bytes with one thing done to them; never the same ones."""
    at = generator.randrange(len(data))
    match generator.randrange(5):
        case 0 | 1:
            return data[:at] + bytes([data[at] ^ 1 << generator.randrange(8)]) + data[at + 1 :]
        case 2:
            found = data[:at] + generator.randbytes(len(data[at : at + 16])) + data[at + 16 :]
            return found if found != data else data[:-1]
        case 3:
            return data[:at]
        case _:
            return data + generator.randbytes(generator.randrange(1, 40))


def contents(backend: Any) -> tuple[object, ...]:
    timers, due = backend.timer_table("timers", KEYS), []
    while (part := timers.take_due(1 << 40, 50)) is not None:
        due += part[1].tolist()
    rows = part_rows([backend.row_table("rows", 5, ROWS)], 0, 1).to_pylist()
    return counts_of(backend, COUNTS), Cells(backend, VALUE).all(), rows, due


def filled(home: OneBackend) -> Any:
    backend = home.open()
    add_counts(backend, COUNTS, [key % 300 for key in range(1000)])
    Cells(backend, VALUE).set({key: "v" * (key % 50) for key in range(300)})
    batch = pa.record_batch({"key": [f"k{n % 7}" for n in range(300)], "n": range(300)})
    backend.row_table("rows", 5, ROWS).add(batch, np.arange(300))
    keys = encode_keys([pa.array(range(300))])
    backend.timer_table("timers", KEYS).register(keys, np.arange(300) * 1000)
    return backend


@pytest.mark.parametrize(("kind", "in_runs"), list(product(BACKENDS, [False, True])))
def test_a_checkpoint_with_a_damaged_object_is_refused(
    directory: Path, kind: str, in_runs: bool
) -> None:
    home = OneBackend(kind, directory)
    backend = filled(home)
    written = home.write(backend.snapshot(1, in_runs=in_runs))
    backend.checkpoint_completed(1)
    expected = contents(home.open(written))
    generator = random.Random(kind)
    whole = {one.path: home.store.read(one.path, 0, one.size_bytes) for one in home.store.list("")}
    inline = [file for file in written.files if file.handle.inline]
    refused = 0
    for _ in range(number_of(75)):
        other = checkpoint_pb2.KeyedStateSnapshot()
        other.CopyFrom(written)
        place = generator.randrange(len(whole) + len(inline))
        path = sorted(whole)[place] if place < len(whole) else ""
        if path:
            home.store.put(path, [damaged(whole[path], generator)])
        else:
            index = list(written.files).index(inline[place - len(whole)])
            handle = other.files[index].handle
            handle.inline = damaged(handle.inline, generator)
        told = ""
        try:
            found = contents(home.open(other))
        except StoreCorrupt as error:
            told, refused = str(error), refused + 1
        assert (
            path in told if told else found == expected
        )  # what is added behind an object is none of it
        while len(home.opened) > 2:
            home.opened.pop().close()
        if path:
            home.store.put(path, [whole[path]])
    assert refused > number_of(75) // 2
    home.close()


def test_a_damaged_segment_is_refused() -> None:
    schema = pa.schema([("__key_group", pa.uint16()), ("n", pa.int64()), ("text", pa.string())])
    groups = np.arange(20_000, dtype=np.uint16) % GROUPS
    columns = [pa.array(np.arange(20_000)), pa.array([f"t{n % 100}" for n in range(20_000)])]
    writer = SegmentWriter()
    content = b"".join(writer.write([sorted_batch(schema, groups, columns)]))
    assert len(writer.parts) > 3
    generator = random.Random(1)
    for _ in range(number_of(900)):
        data = damaged(content, generator)
        handle = checkpoint_pb2.StateHandle(inline=data, size_bytes=len(data))
        place = SegmentPlace(handle, 0, len(content), tuple(writer.parts), "file run-7")
        if data.startswith(content):
            assert list(chain_batches(StoreSnapshotReader(None), [place], range(GROUPS)))
            continue
        with pytest.raises(StoreCorrupt):
            list(chain_batches(StoreSnapshotReader(None), [place], range(GROUPS)))


def entries(count: int, *, is_uniform: bool) -> SstEntries:
    names = [number.to_bytes(8, "big") for number in range(count)]
    values = [b"v" * (16 if is_uniform else number % 40) for number in range(count)]
    gone = None if is_uniform else np.arange(count) % 5 == 0
    return SstEntries(ByteStrings.of(names), ByteStrings.of(values), gone)


@pytest.mark.parametrize("is_uniform", [True, False])
@pytest.mark.parametrize("where", ["anywhere", "behind the blocks of entries", "the footer"])
def test_rocksdb_refuses_a_damaged_file_of_ours(
    directory: Path, is_uniform: bool, where: str
) -> None:
    """The checksums of blocks are all there is: who restores has looked at those of whole objects, disks go on ageing."""
    content = entries(1500, is_uniform=is_uniform)
    data = b"".join(bytes(part) for part in sst_file(content))
    kept = len(data) - {"the footer": FOOTER_BYTES, "anywhere": len(data)}.get(where, 900)
    memory = SlotMemory(ManagedMemory(16 << 20))
    generator = random.Random(where)
    expected = None
    refused = 0
    for round_ in range(number_of(90)):
        database = Database(directory / f"db-{round_}", directory / "in", memory)
        path = directory / "incoming.sst"
        path.write_bytes(data[:kept] + damaged(data[kept:], generator) if round_ else data)
        try:
            with database._writing():
                options = IngestExternalFileOptions()
                database._rocks.ingest_external_file([str(path)], options)
            found = [
                pair for part in database.scan(b"", BEHIND) for pair in zip(*part, strict=True)
            ]
        except StoreTransient:
            refused += 1
        else:
            expected = expected or found
            assert found == expected
        database.close()
    assert len(expected or ()) == (1500 if is_uniform else 1200)
    assert refused > number_of(90) // 2
