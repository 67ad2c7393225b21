"""Keyed objects in RocksDB against plain dicts: random bundles, freezes, evictions, crashes, rescales.

Method: as in ``test_rocksdb_groups``, with a value, a list and a map per key. What a bundle hands out is
changed in place where the contract allows it, so that a torn snapshot would show.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.storage.codec import Stamped, codec_of
from penstock.storage.key_groups import owners
from taskmanager.kernels import encode_keys
from taskmanager.state.descriptors import ABSENT, StateDescriptor, StateKind
from taskmanager.state.hashmap.key_space import KeySpace
from taskmanager.state.rocksdb.key_space import StoredKeySpace
from taskmanager.state.rocksdb.store import RocksDBStateBackend
from tests.support.rocksdb_cluster import MAX_PARALLELISM, Checkpoint, Cluster, fast_directory

KEY_TYPES = (pa.string(),)
INT64, TEXT = codec_of(pa.int64()), codec_of(pa.string())
VALUE = StateDescriptor("value", StateKind.VALUE, INT64)
ITEMS = StateDescriptor("items", StateKind.LIST, TEXT)
ENTRIES = StateDescriptor("entries", StateKind.MAP, INT64, key_codec=TEXT)

Cells = dict[str, Any]
"""value, items, entries of a key; what is missing is absent."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with fast_directory() as path:
        yield path


def key_values(space: KeySpace) -> list[Any]:
    parts = space.keys()
    return [key for part in parts for key in part.to_arrays()[0].to_pylist()]


class Space:
    """The key space of one subtask."""

    def __init__(self, backend: RocksDBStateBackend) -> None:
        self.space = backend.key_space(KEY_TYPES)
        self.value = self.space.value_column(VALUE)
        self.items = self.space.list_column(ITEMS)
        self.items.chunk_items = 2
        self.entries = self.space.map_column(ENTRIES)

    def read(self, keys: list[str | None]) -> dict[str | None, Cells]:
        slots = self.space.enter(encode_keys([pa.array(keys, pa.string())])).tolist()
        found: dict[str | None, Cells] = {}
        for key, slot in zip(keys, slots, strict=True):
            cells: Cells = {}
            if self.value.values[slot] is not ABSENT:
                cells["value"] = self.value.values[slot]
            if self.items.values[slot] is not ABSENT:
                cells["items"] = list(self.items.values[slot])
            entries = self.entries.items(slot)
            if entries:
                assert [k for k, _ in entries] == sorted(k for k, _ in entries)
                cells["entries"] = dict(entries)
            found[key] = cells
        self.space.leave()
        return found

    def all_keys(self) -> list[str | None]:
        found = key_values(self.space)
        assert len(found) == len(set(found)), "a key came out twice"
        return found


class History:
    """A cluster, its oracle, and random operations on both."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.cluster = Cluster(directory)
        self.content: dict[str | None, Cells] = {}
        self.open: list[Checkpoint] = []
        self.completed: Checkpoint | None = None
        self.start(self.random.choice([1, 2]), None)

    def start(self, parallelism: int, restored: Any) -> None:
        before = self.cluster.backends
        self.cluster.start(parallelism, restored)
        for backend in before:
            backend.close()
        self.spaces = [Space(backend) for backend in self.cluster.backends]

    def by_owner(self, keys: list[str | None]) -> dict[int, list[str | None]]:
        if not keys:
            return {}
        hashes = encode_keys([pa.array(keys, pa.string())]).hashes
        subtasks = owners(hashes, len(self.spaces), MAX_PARALLELISM).tolist()
        found: dict[int, list[str | None]] = {}
        for key, subtask in zip(keys, subtasks, strict=True):
            found.setdefault(subtask, []).append(key)
        return found

    def some_keys(self) -> list[str | None]:
        return [
            None if number == 0 else f"k{number}"
            for number in (self.random.randrange(40) for _ in range(self.random.randint(1, 12)))
        ]

    def bundle(self) -> None:
        for subtask, keys in self.by_owner(self.some_keys()).items():
            space = self.spaces[subtask]
            slots = space.space.enter(encode_keys([pa.array(keys, pa.string())])).tolist()
            for key, slot in zip(keys, slots, strict=True):
                self.change(space, slot, self.content.setdefault(key, {}))
            space.space.leave()

    def change(self, space: Space, slot: int, cells: Cells) -> None:
        choice = self.random.randrange(8)
        number, name = self.random.randrange(100), f"m{self.random.randrange(6)}"
        if choice <= 1:
            space.value.values[slot] = cells["value"] = number
            space.value.changed.append(slot)
        elif choice == 2:
            space.value.values[slot] = ABSENT
            space.value.changed.append(slot)
            cells.pop("value", None)
        elif choice == 3:
            if space.items.values[slot] is ABSENT:
                space.items.values[slot] = []
            space.items.values[slot].append(str(number))
            space.items.changed.append(slot)
            cells.setdefault("items", []).append(str(number))
        elif choice == 4:
            space.items.values[slot] = self.random.choice([ABSENT, []])
            space.items.changed.append(slot)
            space.items.replaced.append(slot)
            cells.pop("items", None)
        elif choice == 5:
            space.entries.put(slot, name, number)
            cells.setdefault("entries", {})[name] = number
        elif choice == 6:
            expected = cells.get("entries", {})
            assert space.entries.get(slot, name) == expected.get(name, ABSENT)
            space.entries.remove(slot, name)
            expected.pop(name, None)
        elif self.random.random() < 0.3:
            space.entries.clear(slot)
            cells.pop("entries", None)
        if cells.get("entries") == {}:
            del cells["entries"]

    def freeze(self) -> None:
        if len(self.open) < 3:
            checkpoint = self.cluster.freeze()
            checkpoint.content = copy.deepcopy(self.content)
            self.open.append(checkpoint)

    def write_step(self) -> None:
        self.random.choice(self.cluster.backends)._queue.write_next()

    def finish(self) -> None:
        if not self.open:
            return
        checkpoint = self.random.choice(self.open)
        number = checkpoint.checkpoint_id
        if self.random.random() < 0.6:
            self.cluster.write(checkpoint)
            self.completed = checkpoint
            self.open = [other for other in self.open if other.checkpoint_id > number]
            self.cluster.each(lambda backend: backend.checkpoint_completed(number))
        else:
            self.open.remove(checkpoint)
            for snapshot in checkpoint.pending:
                snapshot.discard()
            self.cluster.each(lambda backend: backend.checkpoint_aborted(number))

    def evict(self) -> None:
        self.random.choice(self.cluster.backends)._shrink(everything=self.random.random() < 0.5)

    def restore(self) -> None:
        if self.completed is None:
            return
        assert isinstance(self.completed.content, dict)
        self.open = []
        self.content = copy.deepcopy(self.completed.content)
        self.start(self.random.choice([1, 2, 3, len(self.spaces)]), self.completed.written)
        self.check()

    def check(self) -> None:
        expected = {key: cells for key, cells in self.content.items() if cells}
        keys = [key for space in self.spaces for key in space.all_keys()]
        assert set(keys) == set(expected)
        assert len(keys) == len(expected)
        found: dict[str | None, Cells] = {}
        for subtask, part in self.by_owner(list(self.content)).items():
            found |= self.spaces[subtask].read(part)
        assert {key: cells for key, cells in found.items() if cells} == expected

    def run(self, steps: int) -> None:
        choices = [self.bundle] * 8 + [self.freeze, self.write_step, self.finish] * 2
        choices += [self.evict, self.restore, self.check]
        for _ in range(steps):
            self.random.choice(choices)()
        self.check()
        self.restore()
        self.cluster.close()


@pytest.mark.parametrize("seed", range(10))
def test_any_history_equals_the_dict(directory: Path, seed: int) -> None:
    History(directory, seed).run(120)


def test_a_full_cache_forgets_keys_that_were_not_used(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is read before it comes again."""
    cluster = Cluster(directory, cache_bytes=400_000)
    cluster.start(1)
    space = Space(cluster.backends[0])
    read: list[bytes] = []
    database = cluster.backends[0]._database
    get_many = database.get_many
    monkeypatch.setattr(database, "get_many", lambda names: get_many(read.extend(names) or names))
    for start in range(0, 20_000, 500):
        keys = encode_keys([pa.array([f"k{n}" for n in range(start, start + 500)])])
        slots = space.space.enter(keys).tolist()
        for slot, number in zip(slots, range(start, start + 500), strict=True):
            assert space.value.values[slot] is ABSENT
            space.value.values[slot] = number
            space.value.changed.append(slot)
        space.space.leave()
        assert cluster.backends[0]._cache_bytes < 900_000
    assert len(read) < 1_500  # of two columns; a few are taken for others
    assert isinstance(space.space, StoredKeySpace)
    assert space.space.cached_keys < 5_000
    assert len(space.all_keys()) == 20_000
    assert space.read(["k3", "k19999"]) == {"k3": {"value": 3}, "k19999": {"value": 19999}}
    cluster.close()


@pytest.mark.parametrize("is_evicted", [False, True])
def test_what_has_expired_is_swept_and_not_written(directory: Path, is_evicted: bool) -> None:
    cluster = Cluster(directory)
    cluster.start(1)
    backend = cluster.backends[0]
    space = backend.key_space((pa.int64(),))
    far = 1 << 60
    value = space.value_column(StateDescriptor("v", StateKind.VALUE, Stamped(INT64), ttl_ms=far))
    items = space.list_column(StateDescriptor("l", StateKind.LIST, Stamped(INT64), ttl_ms=far))
    entries = space.map_column(
        StateDescriptor("m", StateKind.MAP, Stamped(INT64), key_codec=INT64, ttl_ms=far)
    )
    keys = encode_keys([pa.array(range(20))])
    for slot in space.enter(keys).tolist():
        value.values[slot] = (slot, slot)
        items.values[slot] = [(0, slot), (1, 1000)]
        value.changed.append(slot)
        items.changed.append(slot)
        entries.put(slot, 7, (slot, slot))
        entries.put(slot, 8, (slot, 1000))
    space.leave()
    if is_evicted:
        backend._shrink(everything=True)
    removed = [space.sweep(far + 9, 15) for _ in range(20)]
    assert sum(removed) == 30
    assert max(removed) < 30
    assert space.sweep(far + 9, 10_000) == 0
    slots = space.enter(keys).tolist()
    for key, slot in enumerate(slots):
        assert (value.values[slot] is ABSENT) == (key < 10)
        assert len(items.values[slot]) == (1 if key < 10 else 2)
        assert len(entries.items(slot)) == (1 if key < 10 else 2)
    space.leave()
    cluster.close()


@pytest.mark.parametrize("ttl_ms", [0, 1 << 60])
def test_a_cache_may_be_full_in_the_middle_of_a_bundle(directory: Path, ttl_ms: int) -> None:
    cluster = Cluster(directory)
    cluster.start(1)
    backend = cluster.backends[0]
    space = backend.key_space((pa.int64(),))
    codec: Any = Stamped(INT64) if ttl_ms else INT64
    stored: Any = (7, 7) if ttl_ms else 7
    value = space.value_column(StateDescriptor("v", StateKind.VALUE, codec, ttl_ms=ttl_ms))
    items = space.list_column(StateDescriptor("l", StateKind.LIST, codec, ttl_ms=ttl_ms))
    entries = space.map_column(
        StateDescriptor("m", StateKind.MAP, codec, key_codec=INT64, ttl_ms=ttl_ms)
    )
    keys = encode_keys([pa.array(range(3))])

    def change(slot: int, cell: Any, cells: Any) -> None:
        value.values[slot], items.values[slot] = cell, cells
        value.changed.append(slot)
        items.changed.append(slot)

    slots = space.enter(keys).tolist()
    for slot in slots:
        change(slot, stored, [stored])
        entries.put(slot, 1, stored)
    space.leave()
    slots = space.enter(keys).tolist()
    change(slots[0], ABSENT, ABSENT)
    entries.remove(slots[0], 1)
    change(slots[1], ABSENT, [])
    backend._shrink(everything=True)
    change(slots[1], stored, [stored, stored])
    entries.put(slots[1], 2, stored)
    space.leave()
    backend._shrink(everything=True)
    slots = space.enter(keys).tolist()
    assert [value.values[slot] for slot in slots] == [ABSENT, stored, stored]
    assert [items.values[slot] for slot in slots] == [ABSENT, [stored] * 2, [stored]]
    found = [dict(entries.items(slot)) for slot in slots]
    assert found == [{}, {1: stored, 2: stored}, {1: stored}]
    space.leave()
    cluster.close()
