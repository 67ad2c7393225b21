"""Aim: a subtask that restores some key-groups of databases reads the files that have some of them, and no others.

Method: a database whose files are small and do not overlap, restored by fewer key-groups and by those of two snapshots, through a
reader that counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.pb import checkpoint_pb2
from penstock.storage.codec import codec_of
from penstock.storage.entries import database_reader_store
from penstock.storage.entries.byte_strings import SstEntries
from penstock.storage.snapshot_files import StoreSnapshotReader
from taskmanager.kernels import AccumulatorKind, encode_keys
from taskmanager.state.backend import AggregateDescriptor
from taskmanager.state.descriptors import StateDescriptor, StateKind
from taskmanager.state.rocksdb import database_store
from taskmanager.state.rocksdb.database_store import Database
from tests.support.backend_history import Inputs
from tests.support.backend_job import MAX_PARALLELISM
from tests.support.one_backend import KEYS, Cells, OneBackend
from tests.support.rocksdb_cluster import fast_directory

COUNT = 120_000
COUNTS = AggregateDescriptor(KEYS, (AccumulatorKind.COUNT,), list)
VALUE = StateDescriptor("value", StateKind.VALUE, codec_of(pa.int64()))


class CountingReader(StoreSnapshotReader):
    """Counts what is read."""

    bytes_read = 0

    def read(self, handle: checkpoint_pb2.StateHandle) -> bytes:
        self.bytes_read += handle.size_bytes
        return super().read(handle)


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[CountingReader]:
    found: list[CountingReader] = []

    def counting(*args: Any) -> CountingReader:
        found.append(CountingReader(*args))
        return found[-1]

    monkeypatch.setattr(database_store, "FILE_BYTES", 32 << 10)
    monkeypatch.setattr("tests.support.one_backend.StoreSnapshotReader", counting)
    return found


@pytest.fixture
def home() -> Iterator[OneBackend]:
    with fast_directory() as directory:
        home = OneBackend("rocksdb", Path(directory))
        yield home
        home.close()


def filled(home: OneBackend) -> Any:
    """A backend whose state is in files that do not overlap."""
    backend = home.open()
    numbers = np.arange(COUNT) * 7919
    keys = encode_keys([pa.array(numbers)])
    table = backend.group_table("counts", 0, COUNTS)
    table.update(keys, Inputs([None], [None], [], np.arange(COUNT)))
    Cells(backend, VALUE).set({key: key + 1 for key in range(2_000)})
    timers = backend.timer_table("timers", KEYS)
    timers.register(keys.slice(0, 500), np.arange(500))
    backend._shrink(everything=True)
    return backend


def restored(home: OneBackend, parts: list[Any], parallelism: int) -> list[Any]:
    return [
        home.open(*parts, subtask_index=index, parallelism=parallelism)
        for index in range(parallelism)
    ]


@pytest.mark.parametrize("parallelism", [2, 4])
def test_a_part_of_a_database_is_read_for_a_part_of_its_key_groups(
    home: OneBackend, readers: list[CountingReader], parallelism: int
) -> None:
    backend = filled(home)
    snapshot = home.write(backend.snapshot(1))
    tables = [file for file in snapshot.files if file.name.endswith(".sst")]
    assert len(tables) > 40
    total = sum(file.handle.size_bytes for file in tables)
    besides = sum(file.handle.size_bytes for file in snapshot.files) - total
    del readers[:]
    subtasks = restored(home, [snapshot], parallelism)
    for subtask, reader in zip(subtasks, readers, strict=True):
        share = len(subtask.key_groups) / MAX_PARALLELISM
        assert reader.bytes_read - besides <= 1.2 * share * total
    assert sum(len(one.group_table("counts", 0, COUNTS)) for one in subtasks) == COUNT
    values = {key: found for one in subtasks for key, found in Cells(one, VALUE).all().items()}
    assert values == {key: key + 1 for key in range(2_000)}
    timers = [one.timer_table("timers", KEYS) for one in subtasks]
    assert sum(len(one) for one in timers) == 500
    # Together again, each from its own database and from parts of those of the others.
    again = [home.write(one.snapshot(2)) for one in subtasks]
    (last,) = restored(home, again, 1)
    assert len(last.group_table("counts", 0, COUNTS)) == COUNT
    assert len(Cells(last, VALUE).all()) == 2_000


def test_large_values_are_copied_a_bounded_number_of_bytes_at_a_time(
    home: OneBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {key: f"{key}" * 1000 for key in range(100_000, 100_600)}
    text = StateDescriptor("text", StateKind.VALUE, codec_of(pa.string()))
    backend = home.open()
    Cells(backend, text).set(wanted)
    halves = restored(home, [home.write(backend.snapshot(1))], 2)
    sizes, ingest = [], Database.ingest

    def counted(database: Database, entries: SstEntries) -> None:
        sizes.append(int(entries.values.lengths().sum()))
        ingest(database, entries)

    monkeypatch.setattr(database_reader_store, "SCAN_BYTES", 64 << 10)
    monkeypatch.setattr(Database, "ingest", counted)
    (last,) = restored(home, [home.write(one.snapshot(2)) for one in halves], 1)
    assert Cells(last, text).all() == wanted
    assert sum(sizes) > 1_000_000
    assert max(sizes) <= 2 * 64 << 10
