"""Aim: a snapshot in the run format leaves the backend as it was, and can be restored from by either one, also where a
restore fails on its way. Method: single backends by hand; what all kinds of state become is in
``test_backend_histories`` (``cross``)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import CheckpointAborted, StoreTransient, Unrecoverable
from penstock.pb import checkpoint_pb2
from penstock.storage.codec import codec_of
from penstock.storage.entries.byte_strings import SstEntries
from penstock.storage.run_columns import ROW_KEYS
from penstock.storage.snapshot_files import StoreSnapshotReader
from taskmanager.state.descriptors import StateDescriptor, StateKind
from taskmanager.state.rocksdb import entry_batches
from taskmanager.state.rocksdb.database_store import Database
from taskmanager.state.row_table import RowDescriptor, part_rows
from tests.support.backend_job import BACKENDS
from tests.support.one_backend import Cells, OneBackend
from tests.support.rocksdb_cluster import fast_directory

VALUE = StateDescriptor("value", StateKind.VALUE, codec_of(pa.int64()))
ROWS = RowDescriptor(pa.schema({"key": pa.string(), "n": pa.int64()}), ("key",))


@pytest.fixture
def homes() -> Iterator[dict[str, OneBackend]]:
    with fast_directory() as directory:
        found = {kind: OneBackend(kind, directory / kind) for kind in BACKENDS}
        for home in found.values():
            home.store = found[BACKENDS[0]].store
        yield found
        for home in found.values():
            home.close()


def filled(home: OneBackend, count: int = 100) -> tuple[object, Cells]:
    backend = home.open()
    cells = Cells(backend, VALUE)
    cells.set({key: key * key for key in range(count)})
    batch = pa.record_batch({"key": [f"k{n % 7}" for n in range(count)], "n": range(count)})
    backend.row_table("rows", 5, ROWS).add(batch, np.arange(count))
    backend.row_table("rows", 6, ROWS).add(batch.slice(0, 3), np.arange(3))
    return backend, cells


@pytest.mark.parametrize(("before", "after"), list(product(BACKENDS, BACKENDS)))
def test_either_backend_is_restored_from_it(
    homes: dict[str, OneBackend], before: str, after: str
) -> None:
    backend, _ = filled(homes[before])
    written = homes[before].write(backend.snapshot(1, in_runs=True))
    assert written.backend == "hashmap"
    parts = [homes[after].open(written, subtask_index=index, parallelism=2) for index in (0, 1)]
    values = {key: found for part in parts for key, found in Cells(part, VALUE).all().items()}
    assert values == {key: key * key for key in range(100)}
    rows = [part_rows([part.row_table("rows", 5, ROWS)], 0, 1).to_pylist() for part in parts]
    assert sorted(row["n"] for part in rows for row in part) == list(range(100))
    assert {row["key"] for row in rows[0]}.isdisjoint(row["key"] for row in rows[1])
    assert [part.namespaces("rows") for part in parts] == [[5, 6]] * 2
    # What nobody has asked for in between is there all the same.
    last = OneBackend(before, homes[before].directory / "last")
    last.store = homes[before].store
    again = [homes[before].write(part.snapshot(2, in_runs=True)) for part in parts]
    assert Cells(last.open(*again), VALUE).all() == values
    last.close()


@pytest.mark.parametrize("kind", BACKENDS)
def test_the_next_checkpoint_builds_on_what_it_did_before(
    homes: dict[str, OneBackend], kind: str
) -> None:
    home = homes[kind]
    backend, cells = filled(home)
    first = home.checkpoint(backend, 1)
    savepoint = home.write(backend.snapshot(2, in_runs=True))
    backend.checkpoint_aborted(2)
    cells.set({7: -7})
    second = home.checkpoint(backend, 3)
    before = {file.handle.path for file in first.files if file.shared}
    assert before & {file.handle.path for file in second.files}
    home.keep_only([first, second])
    assert not {file.handle.path for file in savepoint.files} & {
        stored.path for stored in home.store.list("")
    }
    assert Cells(home.open(second), VALUE).read(6, 7) == [36, -7]


def test_one_that_is_discarded_on_its_way_ends(homes: dict[str, OneBackend]) -> None:
    home = homes["rocksdb"]
    backend, cells = filled(home, 5000)
    snapshot = backend.snapshot(1, in_runs=True)
    (blob,) = snapshot.blobs()
    chunks = iter(blob.chunks())
    next(chunks)
    snapshot.discard()
    with pytest.raises(CheckpointAborted, match="discarded"):
        list(chunks)
    assert not list(home.work_directory().glob("links-*"))
    cells.set({1: 11})
    assert Cells(home.open(home.checkpoint(backend, 2)), VALUE).read(1, 2) == [11, 4]


def test_a_restore_that_fails_on_its_way_begins_anew(
    homes: dict[str, OneBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, _ = filled(homes["hashmap"], 3000)
    written = homes["hashmap"].write(backend.snapshot(1, in_runs=True))
    read, calls = StoreSnapshotReader.read_range, iter([False, False, True])

    def failing(reader: StoreSnapshotReader, *args: object) -> bytes:
        if next(calls):
            raise StoreTransient("the store is away")
        return read(reader, *args)  # type: ignore[arg-type]

    home = homes["rocksdb"]
    with monkeypatch.context() as patch:
        patch.setattr(StoreSnapshotReader, "read_range", failing)
        with pytest.raises(StoreTransient):
            home.open(written)
    assert Cells(home.open(written), VALUE).all() == {key: key * key for key in range(3000)}


def test_rows_whose_key_is_not_known_are_refused_with_the_remedy(
    homes: dict[str, OneBackend],
) -> None:
    backend, _ = filled(homes["hashmap"])
    written = homes["hashmap"].write(backend.snapshot(1, in_runs=True))
    old = checkpoint_pb2.KeyedStateSnapshot()
    old.CopyFrom(written)
    for table in old.tables:
        schema = pa.ipc.read_schema(pa.py_buffer(table.schema))
        if ROW_KEYS in (schema.metadata or {}):
            table.schema = schema.remove_metadata().serialize().to_pybytes()
    with pytest.raises(Unrecoverable, match=r"state.backend.type: hashmap"):
        homes["rocksdb"].open(old)
    assert len(homes["hashmap"].open(old).row_table("rows", 5, ROWS)) == 100


def test_many_small_partitions_are_written_a_bounded_number_of_bytes_at_a_time(
    homes: dict[str, OneBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pa.record_batch({"key": ["k" * 1000] * 20, "n": range(20)})
    backend = homes["hashmap"].open()
    for namespace in range(50):
        backend.row_table("rows", namespace, ROWS).add(rows, np.arange(20))
    written = homes["hashmap"].write(backend.snapshot(1, in_runs=True))
    sizes, ingest = [], Database.ingest

    def counted(database: Database, entries: SstEntries) -> None:
        sizes.append(int(entries.values.lengths().sum()))
        ingest(database, entries)

    monkeypatch.setattr(entry_batches, "SHARED_BYTES", 100_000)
    monkeypatch.setattr(Database, "ingest", counted)
    again = homes["rocksdb"].open(written)
    assert sum(sizes) >= 50 * 20 * 1000
    assert max(sizes) <= 100_000
    assert len(sizes) <= 20
    del sizes[:]
    for namespace in range(50):
        again.row_table("rows", namespace, ROWS).add(rows, np.arange(20, 40))
    homes["rocksdb"].write(again.snapshot(1))
    assert sum(sizes) >= 50 * 20 * 1000
    assert max(sizes) <= 100_000
    assert len(sizes) <= 20
