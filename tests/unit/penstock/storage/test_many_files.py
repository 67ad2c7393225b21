"""Aim: files of a store far away are fetched several at once, and the first error ends it. Method: a store in memory that
says it is far away, and notes what is read at the same time."""

from __future__ import annotations

import zlib
from pathlib import Path
from threading import Barrier

import pytest

from penstock.errors import StoreNotFound
from penstock.pb import checkpoint_pb2
from penstock.storage.memory_store import MemoryStore
from penstock.storage.snapshot_files import StoreSnapshotReader

FILES = 6


class FarStore(MemoryStore):
    """Answers only when two are asked for at once."""

    files_at_once = 2

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.both = Barrier(2)

    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        self.both.wait(10.0)
        return super().read(path, offset, size_bytes)


def wanted(store: MemoryStore, directory: Path) -> dict[Path, checkpoint_pb2.StateHandle]:
    found = {}
    for number in range(FILES):
        content = bytes([number]) * 100
        store.put(f"shared/{number}", [content])
        found[directory / f"{number}.sst"] = checkpoint_pb2.StateHandle(
            path=f"shared/{number}", size_bytes=len(content), checksum=zlib.crc32(content)
        )
    return found


def test_files_of_a_store_far_away_are_fetched_several_at_once(tmp_path: Path) -> None:
    store = FarStore()
    files = wanted(store, tmp_path)
    StoreSnapshotReader(store).fetch_all(files)
    assert [path.read_bytes() for path in files] == [bytes([n]) * 100 for n in range(FILES)]


def test_a_file_that_is_missing_is_told(tmp_path: Path) -> None:
    store = FarStore()
    files = wanted(store, tmp_path)
    store.delete("shared/3")
    with pytest.raises(StoreNotFound, match="shared/3"):
        StoreSnapshotReader(store).fetch_all(files)


def test_others_are_fetched_one_after_the_other(tmp_path: Path) -> None:
    store = MemoryStore(1 << 20)
    files = wanted(store, tmp_path)
    StoreSnapshotReader(store).fetch_all(files)
    assert len(list(tmp_path.iterdir())) == FILES
