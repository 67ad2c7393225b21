"""The RocksDB backend as a whole: what is kept in memory beside it, threads, what a kill leaves behind."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import StreamError
from penstock.pb import checkpoint_pb2
from penstock.storage.codec import codec_of
from penstock.storage.key_groups import owners
from taskmanager.kernels import AccumulatorKind, encode_keys
from taskmanager.state.backend import AggregateDescriptor
from taskmanager.state.descriptors import StateDescriptor, StateKind
from taskmanager.state.rocksdb.file_ledger import FileLedger
from taskmanager.state.rocksdb.store import RocksDBStateBackend
from tests.support.rocksdb_cluster import MAX_PARALLELISM, Cluster, fast_directory
from tests.support.two_threads import Interrupted

INT_KEY = (pa.int64(),)
COUNTS = AggregateDescriptor(INT_KEY, (AccumulatorKind.COUNT,), list)


class Rows:
    """Rows that count."""

    values = (None,)
    valid = (None,)
    columns = ()
    sequence = None
    is_partial = False


@pytest.fixture
def directory() -> Iterator[Path]:
    with fast_directory() as path:
        yield path


def count(backend: RocksDBStateBackend, namespace: int, keys: list[int]) -> None:
    table = backend.group_table("counts", namespace, COUNTS)
    table.update(encode_keys([pa.array(keys, pa.int64())]), Rows())  # type: ignore[arg-type]


def counts(backend: RocksDBStateBackend, namespace: int) -> dict[int, int]:
    found: dict[int, int] = {}
    for part in backend.group_table("counts", namespace, COUNTS).chunks(1000):
        found |= zip(part.keys[0].to_pylist(), part.accumulators[0].tolist(), strict=True)
    return found


@pytest.mark.parametrize("parallelism", [1, 2])
def test_timers_go_to_the_subtasks_of_their_keys(directory: Path, parallelism: int) -> None:
    cluster = Cluster(directory)
    cluster.start(1)
    backend = cluster.backends[0]
    keys = encode_keys([pa.array(range(50))])
    backend.timer_table("timers", INT_KEY).register(keys, np.arange(50))
    count(backend, 3, list(range(50)))
    cluster.checkpoint()
    backend.timer_table("timers", INT_KEY).register(keys, np.full(50, 100))
    checkpoint = cluster.checkpoint()
    (snapshot,) = checkpoint.snapshots
    assert {table.kind for table in snapshot.tables} == {"group", "timers"}
    for _ in range(2):  # and once more from what was restored
        cluster.start(parallelism, checkpoint.snapshots)
        found: list[tuple[int, int]] = []
        for subtask, restored in enumerate(cluster.backends):
            assert restored.namespaces("counts") == [3]
            timers = restored.timer_table("timers", INT_KEY)
            while (due := timers.take_due(1000, 7)) is not None:
                found += zip(due[0].to_arrays()[0].to_pylist(), due[1].tolist(), strict=True)
                owner = owners(due[0].hashes, parallelism, MAX_PARALLELISM)
                assert (owner == subtask).all()
        assert sorted(found) == sorted([(k, k) for k in range(50)] + [(k, 100) for k in range(50)])
        if parallelism == 1:
            break
        cluster.start(parallelism, checkpoint.snapshots)
        checkpoint = cluster.checkpoint()
    cluster.close()


def test_names_of_all_files_are_unique_and_known_to_one_instance(directory: Path) -> None:
    cluster = Cluster(directory)
    cluster.start(1)
    count(cluster.backends[0], 0, [1])
    (snapshot,) = cluster.checkpoint().snapshots
    names = [file.name for file in snapshot.files]
    assert len(names) == len(set(names))
    used = {segment.file for segment in snapshot.segments if segment.file}
    assert used <= set(names)
    cluster.close()


def test_writing_on_another_thread_does_not_tear_snapshots(directory: Path) -> None:
    """Every bundle adds one to the same keys of a table and a column: snapshots show whole bundles."""
    cluster = Cluster(directory)
    cluster.start(1)
    backend = cluster.backends[0]
    space = backend.key_space(INT_KEY)
    descriptor = StateDescriptor("items", StateKind.LIST, codec_of(pa.int64()))
    items = space.list_column(descriptor)
    generator = random.Random(3)
    failures: list[BaseException] = []
    written: list[tuple[int, checkpoint_pb2.KeyedStateSnapshot]] = []
    thread: threading.Thread | None = None
    batch = list(range(3000))
    keys = encode_keys([pa.array(batch)])
    for turn in range(1, 60):
        count(backend, 0, batch)
        for slot in space.enter(keys.slice(0, 50)).tolist():
            if not isinstance(items.values[slot], list):
                items.values[slot] = []
            items.values[slot].append(turn)
            items.changed.append(slot)
        space.leave()
        if generator.random() < 0.1:
            backend._shrink(everything=generator.random() < 0.5)
        if thread is None or not thread.is_alive():
            checkpoint = cluster.freeze()

            def write(turn: int = turn, checkpoint: object = checkpoint.pending[0]) -> None:
                try:
                    written.append((turn, cluster.store.write(checkpoint)))  # type: ignore[arg-type]
                except BaseException as error:
                    failures.append(error)

            thread = threading.Thread(target=write)
            thread.start()
    assert thread is not None
    thread.join(20)
    assert not failures
    for turn, snapshot in random.Random(4).sample(written, 3):
        cluster.start(1, [snapshot])
        restored = cluster.backends[0]
        assert set(counts(restored, 0).values()) == {turn}
        space = restored.key_space(INT_KEY)
        items = space.list_column(descriptor)
        slots = space.enter(keys.slice(0, 50)).tolist()
        assert all(items.values[slot] == list(range(1, turn + 1)) for slot in slots)
        space.leave()
    cluster.close()


def test_a_snapshot_is_described_while_another_completes() -> None:
    """They are described on I/O threads; completions come on the mailbox thread."""
    ledger = FileLedger("opening", "opening", threading.Lock())
    files = [checkpoint_pb2.StateFile(name=f"opening/{n}.sst", shared=True) for n in (1, 2)]
    ledger.described(1, files[:1])
    ledger.described(2, files[:1])
    pending = Interrupted(ledger._pending, lambda: ledger.described(3, files))
    ledger._pending = pending
    ledger.completed(2)
    pending.end()
    ledger.completed(3)
    assert list(ledger.to_upload(["1.sst", "2.sst"])[0]) == ["1.sst", "2.sst"]


def test_what_a_killed_process_left_is_replaced(directory: Path) -> None:
    cluster = Cluster(directory)
    cluster.start(1)
    count(cluster.backends[0], 0, [1, 2])
    checkpoint = cluster.checkpoint()
    cluster.close()
    left = directory / "2" / "db"
    left.mkdir(parents=True)
    (left / "LOCK").touch()
    (left / "CURRENT").write_text("garbage")
    cluster.start(1, checkpoint.snapshots)
    assert counts(cluster.backends[0], 0) == {1: 1, 2: 1}
    cluster.close()
    cluster.close()
    assert not any(directory.iterdir())


def test_a_missing_file_is_an_error(directory: Path) -> None:
    cluster = Cluster(directory)
    cluster.start(1)
    count(cluster.backends[0], 0, [1])
    checkpoint = cluster.checkpoint()
    cluster.store.files = {
        path: data for path, data in cluster.store.files.items() if ".sst" not in path
    }
    with pytest.raises(StreamError):
        cluster.start(1, checkpoint.snapshots)


@pytest.mark.parametrize("parallelism", [1, 2])
def test_what_cannot_be_opened_leaves_nothing(directory: Path, parallelism: int) -> None:
    """An attempt may be restored many times until its state can be read: each takes as much disk."""
    cluster = Cluster(directory)
    cluster.start(parallelism)
    for backend in cluster.backends:
        count(backend, 0, list(range(100)))
    checkpoint = cluster.checkpoint()
    cluster.close()
    files, failed = cluster.store.files, 0
    for lost in sorted(files):
        cluster.store.files = {path: data for path, data in files.items() if path != lost}
        try:
            cluster.start(1, checkpoint.snapshots)
        except StreamError:
            failed += 1
        else:
            cluster.close()
        assert not any(directory.iterdir()), f"left without {lost}"
        assert not open_files_below(directory), f"open without {lost}"
    assert failed >= 3 * parallelism


def open_files_below(directory: Path) -> list[str]:
    """Also those that are deleted."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(str(descriptor.readlink()))
    return [path for path in found if path.startswith(str(directory))]


def test_memory_is_in_the_ledger_of_the_slot(directory: Path) -> None:
    cluster = Cluster(directory)
    cluster.start(1)
    backend = cluster.backends[0]
    memory = backend._environment.memory
    before = memory.used_bytes()
    count(backend, 0, list(range(50_000)))
    assert memory.used_bytes() - before > 50_000 * 16
    assert backend.memory_bytes() >= memory.used_bytes() - before
    backend.drop("counts", 0)
    assert memory.used_bytes() - before < 10_000
    cluster.close()
    assert memory.used_bytes() == 0
