"""Aggregates in RocksDB against plain dicts: random updates, freezes, writes, crashes, rescales.

Method: a random history of operations on all subtasks of an operator, with the background part of each
checkpoint run at random later points, and a dict per namespace as the oracle. A checkpoint remembers the
oracle as it was when it was frozen; a restore must bring back exactly that.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import CheckpointAborted
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_groups import owners
from taskmanager.kernels import AccumulatorKind, encode_keys
from taskmanager.state.backend import AggregateDescriptor
from taskmanager.state.group_table import GroupTable, TableRows
from taskmanager.state.rocksdb.group_rows import StoredGroupTable
from taskmanager.state.rocksdb.store import RocksDBStateBackend
from tests.support.rocksdb_cluster import MAX_PARALLELISM, Checkpoint, Cluster, fast_directory

INT_KEY = (pa.int64(),)
WIDE_KEY = (pa.string(), pa.int32())
KINDS = (AccumulatorKind.COUNT, AccumulatorKind.SUM_INT64, AccumulatorKind.MAX_FLOAT64)

Content = dict[int, dict[tuple[Any, ...], tuple[int, int | None, float | None]]]


@pytest.fixture
def directory() -> Iterator[Path]:
    with fast_directory() as path:
        yield path


@dataclass
class Inputs:
    values: list[Any]
    valid: list[Any]
    columns: list[Any] = field(default_factory=list)
    sequence: Any = None
    is_partial: bool = False


def descriptor(key_types: tuple[pa.DataType, ...] = INT_KEY) -> AggregateDescriptor:
    return AggregateDescriptor(key_types, KINDS, list)


def encode(key_types: tuple[pa.DataType, ...], keys: list[tuple[Any, ...]]) -> KeyBatch:
    columns = list(zip(*keys, strict=True)) if keys else [()] * len(key_types)
    return encode_keys([pa.array(list(c), t) for c, t in zip(columns, key_types, strict=True)])


def update(
    backend: RocksDBStateBackend,
    namespace: int,
    key_types: tuple[pa.DataType, ...],
    rows: Sequence[tuple[tuple[Any, ...], int | None]],
) -> None:
    """Adds rows of key and value; a value of None counts, but adds nothing."""
    keys = encode(key_types, [key for key, _ in rows])
    valid = np.array([value is not None for _, value in rows])
    values = np.array([value or 0 for _, value in rows], np.int64)
    inputs = Inputs([None, values, values.astype(np.float64)], [None, valid, valid])
    backend.group_table("state", namespace, descriptor(key_types)).update(keys, inputs)


def as_dict(parts: list[TableRows]) -> dict[tuple[Any, ...], Any]:
    found: dict[tuple[Any, ...], Any] = {}
    for part in parts:
        keys = zip(*[array.to_pylist() for array in part.keys], strict=True)
        columns: list[list[Any]] = []
        for values, valid in zip(part.accumulators, part.validity, strict=True):
            present = np.ones(len(values), bool) if valid is None else valid
            columns.append(
                [v if ok else None for v, ok in zip(values.tolist(), present, strict=True)]
            )
        for key, *numbers in zip(keys, *columns, strict=True):
            assert key not in found, "a key came out twice"
            found[key] = tuple(numbers)
    return found


def content_of(table: GroupTable) -> dict[tuple[Any, ...], Any]:
    assert isinstance(table, StoredGroupTable)
    parts = list(table.chunks(1 << 16))
    return as_dict(parts)


class History:
    """A cluster, its oracle, and random operations on both."""

    def __init__(self, directory: Path, seed: int, key_types: tuple[pa.DataType, ...]) -> None:
        self.random = random.Random(seed)
        self.key_types = key_types
        self.descriptor = descriptor(key_types)
        self.cluster = Cluster(directory)
        self.cluster.start(self.random.choice([1, 2]))
        self.content: Content = {}
        self.open: list[Checkpoint] = []
        self.completed: Checkpoint | None = None

    def key(self) -> tuple[Any, ...]:
        number = self.random.choice([None, *range(60)])
        if self.key_types == INT_KEY:
            return (number,)
        text = None if number is None else "x" * (number % 7)
        return (text, number if number is None else number % 11)

    def owner(self, key: tuple[Any, ...]) -> RocksDBStateBackend:
        hashes = encode(self.key_types, [key]).hashes
        parallelism = len(self.cluster.backends)
        return self.cluster.backends[int(owners(hashes, parallelism, MAX_PARALLELISM)[0])]

    def update(self) -> None:
        namespace = self.random.randrange(4)
        rows: dict[RocksDBStateBackend, list[Any]] = {}
        for _ in range(self.random.randint(1, 30)):
            key, value = self.key(), self.random.choice([None, *range(-5, 5)])
            rows.setdefault(self.owner(key), []).append((key, value))
            count, total, largest = self.content.setdefault(namespace, {}).get(key, (0, None, None))
            if value is not None:
                total = (total or 0) + value
                largest = float(value) if largest is None else max(largest, float(value))
            self.content[namespace][key] = (count + 1, total, largest)
        for backend, part in rows.items():
            update(backend, namespace, self.key_types, part)

    def merge(self) -> None:
        if len(self.content) < 2:
            return
        source, target = self.random.sample(sorted(self.content), 2)
        for backend in self.cluster.backends:
            backend.group_table("state", target, self.descriptor).merge(
                backend.group_table("state", source, self.descriptor)
            )
        for key, (count, total, largest) in self.content[source].items():
            before = self.content[target].get(key, (0, None, None))
            totals = [value for value in (total, before[1]) if value is not None]
            maxima = [value for value in (largest, before[2]) if value is not None]
            self.content[target][key] = (
                count + before[0],
                sum(totals) if totals else None,
                max(maxima) if maxima else None,
            )

    def drop(self) -> None:
        if self.content:
            namespace = self.random.choice(sorted(self.content))
            del self.content[namespace]
            self.cluster.each(lambda backend: backend.drop("state", namespace))

    def freeze(self) -> None:
        if len(self.open) < 3:
            checkpoint = self.cluster.freeze()
            checkpoint.content = copy.deepcopy(self.content)
            self.open.append(checkpoint)

    def write_step(self) -> None:
        self.random.choice(self.cluster.backends)._queue.write_next()

    def write(self) -> None:
        waiting = [checkpoint for checkpoint in self.open if checkpoint.written is None]
        if waiting:
            self.cluster.write(self.random.choice(waiting))

    def finish(self) -> None:
        if not self.open:
            return
        checkpoint = self.random.choice(self.open)
        number = checkpoint.checkpoint_id
        if checkpoint.written is not None and self.random.random() < 0.7:
            self.completed = checkpoint
            older = [other for other in self.open if other.checkpoint_id < number]
            for other in older:
                self.abort(other)
            self.open.remove(checkpoint)
            self.cluster.each(lambda backend: backend.checkpoint_completed(number))
        else:
            self.abort(checkpoint)

    def abort(self, checkpoint: Checkpoint) -> None:
        self.open.remove(checkpoint)
        if checkpoint.written is None:
            for snapshot in checkpoint.pending:
                snapshot.discard()
                snapshot.discard()
        self.cluster.each(lambda b: b.checkpoint_aborted(checkpoint.checkpoint_id))

    def shrink(self) -> None:
        self.random.choice(self.cluster.backends)._shrink(everything=self.random.random() < 0.5)

    def restore(self) -> None:
        if self.completed is None:
            return
        self.open = []
        parallelism = self.random.choice([1, 2, 3, len(self.cluster.backends)])
        content = self.completed.content
        assert isinstance(content, dict)
        self.content = copy.deepcopy(content)
        before = self.cluster.backends
        self.cluster.start(parallelism, self.completed.written)
        for backend in before:
            backend.close()
        self.check()

    def check(self) -> None:
        for namespace, expected in self.content.items():
            found: dict[tuple[Any, ...], Any] = {}
            for backend in self.cluster.backends:
                table = backend.group_table("state", namespace, self.descriptor)
                part = content_of(table)
                assert len(table) == len(part)
                assert all(self.owner(key) is backend for key in part)
                found |= part
                asked = [key for key in expected if key in part][:5]
                if asked:
                    rows = as_dict([table.rows(encode(self.key_types, asked))])
                    assert rows == {key: expected[key] for key in asked}
            assert found == expected

    def run(self, steps: int) -> None:
        choices = [self.update] * 8 + [self.freeze, self.write_step, self.write, self.finish] * 3
        choices += [self.merge, self.drop, self.shrink, self.restore, self.check]
        for _ in range(steps):
            self.random.choice(choices)()
        self.check()
        while self.open:
            self.finish()
        self.restore()
        self.cluster.close()


@pytest.mark.parametrize("key_types", [INT_KEY, WIDE_KEY], ids=["int", "wide"])
@pytest.mark.parametrize("seed", range(8))
def test_any_history_equals_the_dict(
    directory: Path, seed: int, key_types: tuple[pa.DataType, ...]
) -> None:
    History(directory, seed, key_types).run(80)


@pytest.mark.parametrize("filter_bytes", [0, 40_000, 1 << 20])
def test_a_full_cache_goes_out_and_comes_back(directory: Path, filter_bytes: int) -> None:
    """New keys are told from stored ones never, until the filter is full, and always."""
    cluster = Cluster(directory, cache_bytes=200_000)
    cluster.start(1)
    backend = cluster.backends[0]
    backend._slot_memory._filter_bytes = filter_bytes
    expected: dict[tuple[Any, ...], Any] = {}
    generator = random.Random(1)
    for _ in range(30):
        rows = [((generator.randrange(20_000),), 1) for _ in range(1_000)]
        update(backend, 0, INT_KEY, rows)
        for key, _ in rows:
            count = expected.get(key, (0, 0, 0.0))[0] + 1
            expected[key] = (count, count, 1.0)
        assert backend._cache_bytes <= 200_000
    assert backend._cache_bytes > 180_000  # the table takes what there is, whatever its size
    table = backend.group_table("state", 0, descriptor())
    assert len(table) == len(expected)
    assert as_dict(list(table.chunks(777))) == expected
    cluster.close()
    assert not any(directory.iterdir())


def test_a_table_beside_a_full_one_gets_room(directory: Path) -> None:
    cluster = Cluster(directory, cache_bytes=200_000)
    cluster.start(1)
    backend = cluster.backends[0]
    rows = [((key,), 1) for key in range(3_500)]
    for namespace in (0, 1):
        for start in range(0, len(rows), 500):
            update(backend, namespace, INT_KEY, rows[start : start + 500])
            assert backend._cache_bytes <= 200_000
    first, second = (backend.group_table("state", i, descriptor()) for i in range(2))
    assert len(second._records) > 1_500
    assert content_of(first) == content_of(second) == {key: (1, 1, 1.0) for key, _ in rows}
    cluster.close()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_half_of_a_small_table_stays(directory: Path, count: int) -> None:
    cluster = Cluster(directory)
    cluster.start(1)
    backend = cluster.backends[0]
    table = backend.group_table("state", 0, descriptor())
    update(backend, 0, INT_KEY, [((key,), 1) for key in range(count)])
    backend._slot_memory._cache_bytes = -1
    backend._shrink()
    assert len(table._records) == count // 2
    assert len(content_of(table)) == count
    cluster.close()


@pytest.mark.parametrize("key_types", [INT_KEY, WIDE_KEY], ids=["int", "wide"])
def test_new_keys_are_not_read(
    directory: Path, monkeypatch: pytest.MonkeyPatch, key_types: tuple[pa.DataType, ...]
) -> None:
    cluster = Cluster(directory, cache_bytes=200_000)
    cluster.start(1)
    backend = cluster.backends[0]
    read = 0
    get_many = backend._database.get_many

    def counted(names: list[bytes]) -> list[bytes | None]:
        nonlocal read
        read += len(names)
        return get_many(names)

    monkeypatch.setattr(backend._database, "get_many", counted)
    count = 20_000
    keys = [(key,) if key_types is INT_KEY else (f"key {key}", key) for key in range(count)]
    for start in range(0, count, 1000):
        update(backend, 0, key_types, [(key, 1) for key in keys[start : start + 1000]])
    assert len(backend.group_table("state", 0, descriptor(key_types))._records) < count // 2
    assert read < count * 0.03
    update(backend, 0, key_types, [(key, 1) for key in keys[:1000]])
    assert read > 900
    cluster.close()


@pytest.mark.parametrize("is_stored", [False, True])
def test_what_goes_out_of_memory_meanwhile_is_handed_out_once(
    directory: Path, is_stored: bool
) -> None:
    cluster = Cluster(directory)
    cluster.start(1)
    backend = cluster.backends[0]
    update(backend, 0, INT_KEY, [((key,), key) for key in range(100)])
    if is_stored:
        backend._shrink(everything=True)
        update(backend, 0, INT_KEY, [((key,), 0) for key in range(90, 120)])
    table = backend.group_table("state", 0, descriptor())
    before = content_of(table)
    handed_out: list[TableRows] = []
    for part in table.chunks(16):
        handed_out.append(part)
        backend._shrink(everything=len(handed_out) % 2 == 1)
    assert sum(len(part.keys[0]) for part in handed_out) == len(before)
    assert as_dict(handed_out) == before
    cluster.close()


def test_a_table_in_memory_takes_over_a_stored_one(directory: Path) -> None:
    cluster = Cluster(directory)
    cluster.start(1)
    backend = cluster.backends[0]
    update(backend, 0, INT_KEY, [((key,), key) for key in range(10)])
    backend._shrink(everything=True)
    stored = backend.group_table("state", 0, descriptor())
    whole, some = GroupTable(INT_KEY, KINDS, []), GroupTable(INT_KEY, KINDS, [])
    whole.merge(stored)
    some.merge(stored, encode(INT_KEY, [(3,), (77,)]))
    assert as_dict(list(whole.chunks(100))) == content_of(stored)
    assert as_dict(list(some.chunks(100))) == {(3,): (1, 3, 3.0)}
    stored.merge(some)
    assert content_of(stored)[(3,)] == (2, 6, 3.0)
    cluster.close()


def test_only_new_files_are_uploaded_and_restored_ones_keep_their_names(directory: Path) -> None:
    cluster = Cluster(directory)
    cluster.start(1)
    update(cluster.backends[0], 0, INT_KEY, [((key,), 1) for key in range(1000)])
    first = cluster.checkpoint()
    update(cluster.backends[0], 0, INT_KEY, [((5,), 1)])
    second = cluster.checkpoint()
    shared = [
        {f.name: f.handle.path for f in c.snapshots[0].files if f.shared} for c in (first, second)
    ]
    assert len(shared[0]) == 1
    assert len(shared[1]) == 2
    assert shared[0].items() < shared[1].items()

    cluster.start(1, second.snapshots)
    cluster.store.uploaded.clear()
    third = cluster.checkpoint()
    assert third.snapshots[0].instance == second.snapshots[0].instance
    assert {f.name: f.handle.path for f in third.snapshots[0].files if f.shared} == shared[1]
    assert not [name for name in cluster.store.uploaded if name.endswith(".sst")]
    update(cluster.backends[0], 0, INT_KEY, [((6,), 1)])
    fourth = cluster.checkpoint()
    new = {f.name for f in fourth.snapshots[0].files if f.shared} - set(shared[1])
    assert len(new) == 1
    assert new.pop().split("/")[0] not in {name.split("/")[0] for name in shared[1]}
    cluster.close()


def test_files_of_unconfirmed_and_aborted_checkpoints_are_uploaded_again(directory: Path) -> None:
    cluster = Cluster(directory)
    cluster.start(1)
    update(cluster.backends[0], 0, INT_KEY, [((1,), 1)])
    first = cluster.freeze()
    cluster.write(first)
    second = cluster.freeze()
    cluster.write(second)
    cluster.each(lambda backend: backend.checkpoint_aborted(first.checkpoint_id))
    third = cluster.freeze()
    cluster.write(third)
    assert len([name for name in cluster.store.uploaded if name.endswith(".sst")]) == 3
    cluster.each(lambda backend: backend.checkpoint_completed(second.checkpoint_id))
    fourth = cluster.freeze()
    cluster.write(fourth)
    assert len([name for name in cluster.store.uploaded if name.endswith(".sst")]) == 3
    paths = [
        [f.handle.path for f in checkpoint.snapshots[0].files if f.shared]
        for checkpoint in (second, fourth)
    ]
    assert paths[0] == paths[1]
    cluster.close()


def test_full_snapshots_share_nothing(directory: Path) -> None:
    cluster = Cluster(directory, is_incremental=False)
    cluster.start(1)
    update(cluster.backends[0], 0, INT_KEY, [((1,), 1)])
    cluster.checkpoint()
    checkpoint = cluster.checkpoint()
    assert not any(file.shared for file in checkpoint.snapshots[0].files)
    assert len([name for name in cluster.store.uploaded if name.endswith(".sst")]) == 2
    cluster.close()


def test_too_many_freezes_are_declined_and_discarded_ones_make_room(directory: Path) -> None:
    cluster = Cluster(directory)
    cluster.start(1)
    update(cluster.backends[0], 0, INT_KEY, [((1,), 1)])
    waiting = [cluster.freeze() for _ in range(3)]
    with pytest.raises(CheckpointAborted, match="3 snapshots"):
        cluster.freeze()
    waiting[1].pending[0].discard()
    update(cluster.backends[0], 0, INT_KEY, [((2,), 1)])
    last = cluster.freeze()
    with pytest.raises(Exception, match="discarded"):
        cluster.write(waiting[1])
    cluster.write(last)
    cluster.start(1, last.snapshots)
    table = cluster.backends[0].group_table("state", 0, descriptor())
    assert sorted(content_of(table)) == [(1,), (2,)]
    cluster.close()


def test_a_dropped_namespace_leaves_the_database(directory: Path) -> None:
    cluster = Cluster(directory)
    cluster.start(1)
    backend = cluster.backends[0]
    update(backend, 0, INT_KEY, [((key,), 1) for key in range(100)])
    cluster.checkpoint()
    backend.drop("state", 0)
    assert backend.namespaces("state") == []
    update(backend, 0, INT_KEY, [((7,), 1)])
    assert sorted(content_of(backend.group_table("state", 0, descriptor()))) == [(7,)]
    cluster.checkpoint()
    entries = [key for keys, _ in backend._database.scan(b"", b"\xff" * 9) for key in keys]
    assert len(entries) == 1
    cluster.close()
