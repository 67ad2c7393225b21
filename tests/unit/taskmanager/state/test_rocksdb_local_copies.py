"""A database that is opened from local copies: nothing is read before it is asked for, and damage costs one start.

Method: one backend with a store in memory and copies in a directory, of which a byte is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from common.clock import SystemClock
from common.pb import internal_pb2
from penstock.errors import StoreTransient
from penstock.pb import checkpoint_pb2
from penstock.storage.memory_store import MemoryStore
from taskmanager.kernels import AccumulatorKind, encode_keys
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.snapshot import local_first_store
from taskmanager.snapshot.local_copies_store import LocalCopies
from taskmanager.snapshot.snapshot_files_store import SnapshotFiles
from taskmanager.state.backend import AggregateDescriptor, BackendEnvironment
from taskmanager.state.memory import ManagedMemory
from taskmanager.state.rocksdb.store import RocksDBStateBackend
from tests.support.rocksdb_cluster import fast_directory
from tests.unit.taskmanager.state.test_rocksdb_groups import Inputs

KEYS = 5000
DESCRIPTOR = AggregateDescriptor((pa.int64(),), (AccumulatorKind.COUNT,), list)
ATTEMPT = internal_pb2.AttemptId(job_id="job", vertex="v", subtask_index=0, attempt=1)


class Home:
    """Where one subtask writes its checkpoints, and is restored from its copies."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = MemoryStore(64 << 20)
        self.copies = LocalCopies([directory / "copies"], "job")
        self.opened = 0

    def files(self) -> SnapshotFiles:
        """Those of a new attempt."""
        counters = SubtaskCounters()
        return SnapshotFiles(
            self.store, ATTEMPT, 0, backups=self.copies, local=self.copies, counters=counters
        )

    @contextmanager
    def open(
        self, *restored: checkpoint_pb2.KeyedStateSnapshot, files: SnapshotFiles | None = None
    ) -> Iterator[RocksDBStateBackend]:
        """A backend, which is closed behind it."""
        self.opened += 1
        backend = RocksDBStateBackend(
            BackendEnvironment(
                operator_uid="uid",
                operator_name="operator",
                subtask_index=0,
                parallelism=1,
                max_parallelism=8,
                clock=SystemClock(),
                memory=ManagedMemory(64 << 20),
                work_directory=self.directory / f"work-{self.opened}",
                restored=restored,
                reader=(files or self.files()).reader,
            )
        )
        yield backend
        backend.close()

    def checkpoint(self, backend: RocksDBStateBackend) -> checkpoint_pb2.KeyedStateSnapshot:
        """A completed one."""
        snapshot = backend.snapshot(1)
        return snapshot.describe(dict(self.files().writer(1).write(snapshot.blobs())))

    def table_copy(self, written: checkpoint_pb2.KeyedStateSnapshot) -> Path:
        """The copy of the largest file."""
        path = self.copies.file_of(max(written.files, key=lambda one: one.handle.size_bytes).handle)
        assert path is not None
        return path


def add(backend: RocksDBStateBackend) -> None:
    keys = encode_keys([pa.array(range(KEYS))])
    backend.group_table("state", 0, DESCRIPTOR).update(keys, Inputs([None], [None]))


def counts(backend: RocksDBStateBackend) -> int:
    keys = encode_keys([pa.array(range(KEYS))])
    rows = backend.group_table("state", 0, DESCRIPTOR).rows(keys)
    return int(rows.accumulators[0].sum())


def change(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.unlink()  # others have names for the file
    path.write_bytes(data)


@pytest.fixture
def home() -> Iterator[Home]:
    with fast_directory() as directory:
        yield Home(directory)


@pytest.fixture
def written(home: Home) -> checkpoint_pb2.KeyedStateSnapshot:
    with home.open() as backend:
        add(backend)
        return home.checkpoint(backend)


def test_nothing_of_the_copies_is_read_to_open_them(
    home: Home, written: checkpoint_pb2.KeyedStateSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    monkeypatch.setattr(local_first_store, "_matches", lambda path, _: bool(read.append(path)))
    files = home.files()
    with home.open(written, files=files) as backend:
        assert not read
        assert files.count_restored()[1] == 0
        assert counts(backend) == KEYS


def test_damage_that_is_read_late_costs_one_start(
    home: Home, written: checkpoint_pb2.KeyedStateSnapshot
) -> None:
    path = home.table_copy(written)
    change(path, 30_000)
    with home.open(written) as backend:
        with pytest.raises(StoreTransient, match=r"cannot be read.*newest checkpoint"):
            counts(backend)
        assert not path.exists()
        with pytest.raises(StoreTransient):  # instead of declined checkpoints for ever
            backend.snapshot(2)
    files = home.files()
    with home.open(written, files=files) as backend:
        assert counts(backend) == KEYS
        assert files.count_restored()[1] == path_size(written)


def test_damage_that_lets_no_table_be_opened_costs_none(
    home: Home, written: checkpoint_pb2.KeyedStateSnapshot
) -> None:
    path = home.table_copy(written)
    change(path, path_size(written) - 3)
    files = home.files()
    with home.open(written, files=files) as backend:
        assert counts(backend) == KEYS
    local, stored = files.count_restored()
    assert stored == path_size(written)
    assert 0 <= local < stored
    assert not path.exists()


def test_damage_that_is_read_while_it_is_opened_costs_none(
    home: Home, written: checkpoint_pb2.KeyedStateSnapshot
) -> None:
    path = home.table_copy(written)
    change(path, 50)
    with home.open(written) as backend:
        assert counts(backend) == KEYS
    assert not path.exists()


@pytest.mark.parametrize("size_bytes", [0, 4096])
def test_a_copy_of_another_size_is_none(
    home: Home, written: checkpoint_pb2.KeyedStateSnapshot, size_bytes: int
) -> None:
    path = home.table_copy(written)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:size_bytes])
    with home.open(written) as backend:
        assert counts(backend) == KEYS


def test_what_others_removed_meanwhile_is_not_damaged(
    home: Home, written: checkpoint_pb2.KeyedStateSnapshot
) -> None:
    files = home.files()
    with home.open(written, files=files) as backend:
        home.table_copy(written).unlink()
        assert not files.reader.remove_damaged()
        assert counts(backend) == KEYS
        add(backend)
        assert counts(backend) == 2 * KEYS


def path_size(written: checkpoint_pb2.KeyedStateSnapshot) -> int:
    return int(np.max([one.handle.size_bytes for one in written.files]))
