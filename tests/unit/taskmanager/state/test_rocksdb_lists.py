"""Aim: of a long list in RocksDB what was added is written, and every reader finds it whole.

Method: real databases and checkpoints; the oracle is a dict of lists. Random histories of short chunks are in
``test_rocksdb_key_space`` and ``test_backend_histories``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from penstock.pb import checkpoint_pb2
from penstock.storage.codec import codec_of
from penstock.storage.entries.list_entries import CHUNK_ITEMS
from taskmanager.kernels import encode_keys
from taskmanager.state.descriptors import ABSENT, StateDescriptor, StateKind
from taskmanager.state.rocksdb.store import RocksDBStateBackend
from tests.support.rocksdb_cluster import Cluster, fast_directory

KEYS = (pa.int64(),)
LISTS = StateDescriptor("lists", StateKind.LIST, codec_of(pa.string()))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with fast_directory() as path:
        cluster = Cluster(path)
        cluster.start(1)
        yield cluster
        cluster.close()


class Lists:
    """A subtask with lists, and what should be in them."""

    def __init__(self, backend: RocksDBStateBackend) -> None:
        self.backend = backend
        self.space = backend.key_space(KEYS)
        self.column = self.space.list_column(LISTS)

    def change(self, model: dict[int, list[str]]) -> None:
        """Sets lists, or adds to them where what is there is how they begin."""
        keys = encode_keys([pa.array(list(model), pa.int64())])
        for wanted, slot in zip(model.values(), self.space.enter(keys).tolist(), strict=True):
            held = self.column.values[slot]
            if held is not ABSENT and wanted[: len(held)] == held:
                held.extend(wanted[len(held) :])
            else:
                self.column.values[slot] = list(wanted) or ABSENT
                self.column.replaced.append(slot)
            self.column.changed.append(slot)
        self.space.leave()

    def content(self, keys: list[int]) -> dict[int, list[str]]:
        slots = self.space.enter(encode_keys([pa.array(keys, pa.int64())])).tolist()
        found = {
            key: list(self.column.values[slot])
            for key, slot in zip(keys, slots, strict=True)
            if self.column.values[slot] is not ABSENT
        }
        self.space.leave()
        return found

    def keys(self) -> list[int]:
        parts = iter(self.space.keys())
        return [key for part in parts for key in part.to_arrays()[0].to_pylist()]


def texts(count: int, since: int = 0) -> list[str]:
    return [f"an event with number {place}" for place in range(since, count)]


def new_bytes(snapshot: checkpoint_pb2.KeyedStateSnapshot, known: dict[str, int]) -> int:
    sizes = {
        file.name: file.handle.size_bytes or len(file.handle.inline) for file in snapshot.files
    }
    added = sum(size for name, size in sizes.items() if name not in known)
    known |= sizes
    return added


def test_what_is_added_to_a_long_list_is_written_alone(cluster: Cluster) -> None:
    lists, known = Lists(cluster.backends[0]), dict[str, int]()
    model = {key: texts(400) for key in range(300)}
    lists.change(model)
    whole = new_bytes(cluster.checkpoint().snapshots[0], known)
    for round_ in range(1, 4):
        model = {key: texts(400 + round_) for key in model}
        lists.change(model)
        checkpoint = cluster.checkpoint()
        added = new_bytes(checkpoint.snapshots[0], known)
        assert added < whole / 4, (whole, added)
    lists.backend._shrink(everything=True)
    assert lists.content(list(model)) == model
    cluster.start(2, checkpoint.snapshots)
    found: dict[int, list[str]] = {}
    for backend in cluster.backends:
        mine = Lists(backend).keys()
        found |= Lists(backend).content(mine)
    assert found == model


@pytest.mark.parametrize("is_evicted", [False, True])
def test_chunks_come_and_go_with_their_list(cluster: Cluster, is_evicted: bool) -> None:
    lists, size = Lists(cluster.backends[0]), CHUNK_ITEMS
    sizes = [1, size, size + 1, 3 * size, 3 * size + 2, 0, 2 * size, 2 * size + 1, 5, 7 * size]
    for turn in range(len(sizes)):
        model = {
            key: texts(sizes[(turn + key) % len(sizes)] + turn, since=turn if key % 2 else 0)
            for key in range(3 * len(sizes))
        }
        for key in (0, 1, 2):  # only ever added to, around the ends of chunks
            model[key] = texts(1 + turn * (size - 1 + key))
        lists.change(model)
        if is_evicted:
            lists.backend._shrink(everything=True)
        checkpoint = cluster.checkpoint()
        wanted = {key: held for key, held in model.items() if held}
        assert lists.content(list(model)) == wanted
    cluster.start(1, checkpoint.snapshots)
    lists = Lists(cluster.backends[0])
    listed = lists.keys()
    assert sorted(listed) == sorted(wanted)
    assert lists.content(list(model)) == wanted
