"""Aim: what a snapshot writer was given is what a reader returns, or an error; never anything else.

Method: random blobs, inline or packed, on both stores; every byte of what is stored is altered once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from penstock.errors import (
    InvariantViolation,
    StoreCorrupt,
    StoreFull,
    StoreNotFound,
    StoreTransient,
)
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import Blob
from penstock.storage.local_store import LocalStore
from penstock.storage.memory_store import MemoryStore
from penstock.storage.object_store import ObjectStore
from penstock.storage.snapshot_files import (
    TINY_BYTES_MAX,
    PackedSnapshotWriter,
    SnapshotFileName,
    StoreSnapshotReader,
    parse_snapshot_file_name,
    snapshot_file_name,
)
from tests.support.examples import examples


def blob(name: str, *chunks: bytes) -> Blob:
    return Blob(name, lambda: iter(chunks))


BLOBS = st.dictionaries(
    st.text(max_size=5), st.lists(st.binary(max_size=200), max_size=4), max_size=6
)


@examples(150)
@given(blobs=BLOBS, inline_max=st.integers(0, 400), views=st.booleans())
def test_what_was_written_is_read(
    blobs: dict[str, list[bytes]], inline_max: int, views: bool
) -> None:
    store = MemoryStore(1 << 20)
    writer = PackedSnapshotWriter(store, "f", inline_max)
    reused = bytearray(200)

    def chunks(parts: list[bytes]) -> Iterator[bytes | memoryview]:
        for part in parts:
            if views:  # a producer may use its buffer again
                reused[: len(part)] = part
                yield memoryview(reused)[: len(part)]
                reused[:] = bytes(200)
            else:
                yield part

    handles = writer.write(
        Blob(name, functools.partial(chunks, parts)) for name, parts in blobs.items()
    )
    reader = StoreSnapshotReader(store)
    assert {name: reader.read(handle) for name, handle in handles.items()} == {
        name: b"".join(parts) for name, parts in blobs.items()
    }
    total = sum(len(part) for parts in blobs.values() for part in parts)
    stored = store.list("")
    if total <= inline_max:
        assert stored == []
        assert writer.uploaded_bytes == 0
    else:
        assert [info.path for info in stored] == ["shared/f"]
        assert stored[0].size_bytes == writer.uploaded_bytes
    inline = sum(len(handle.inline) for handle in handles.values())
    assert inline <= inline_max
    assert inline + writer.uploaded_bytes == total
    for handle in handles.values():
        if handle.path and handle.size_bytes > 2:
            part = reader.read_range(handle, 1, handle.size_bytes - 2)
            assert part == reader.read(handle)[1:-1]


def test_tiny_blobs_stay_inline_beside_a_file() -> None:
    store = MemoryStore(1 << 20)
    tiny, small = b"t" * TINY_BYTES_MAX, b"s" * (TINY_BYTES_MAX + 1)
    handles = PackedSnapshotWriter(store, "f", 1000).write(
        [blob("a", tiny), blob("b", b"x" * 2000), blob("c", small), blob("d", tiny), blob("e")]
    )
    assert {name: bool(handle.path) for name, handle in handles.items()} == {
        "a": False,
        "b": True,
        "c": True,
        "d": False,
        "e": False,
    }
    assert store.get("shared/f") == b"x" * 2000 + small


def test_blobs_are_generated_once_and_while_they_are_written() -> None:
    story: list[str] = []

    class Recorder(MemoryStore):
        @override
        def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
            story.append("put")
            return super().put(path, (self._seen(chunk) for chunk in chunks))

        def _seen(self, chunk: bytes | memoryview) -> bytes | memoryview:
            story.append(f"store {len(chunk)}")
            return chunk

    def chunks(name: str) -> Iterator[bytes]:
        for size in (100, 200):
            story.append(f"{name} {size}")
            yield b"x" * size

    def blobs() -> Iterator[Blob]:
        for name in "ab":
            story.append(f"blob {name}")
            yield Blob(name, functools.partial(chunks, name))

    PackedSnapshotWriter(Recorder(1 << 20), "f", 150).write(blobs())
    assert story == [
        *("blob a", "a 100", "a 200", "put", "store 100", "store 200"),
        *("blob b", "b 100", "store 100", "b 200", "store 200"),
    ]


def test_without_a_store_all_is_inline_up_to_a_limit() -> None:
    blobs = [blob("a", b"1" * 50_000), blob("b", b"2" * 50_000)]
    handles = PackedSnapshotWriter(None, "f", 10, 100_000).write(blobs)
    assert [len(handle.inline) for handle in handles.values()] == [50_000] * 2
    assert StoreSnapshotReader(None).read(handles["b"]) == b"2" * 50_000
    assert len(PackedSnapshotWriter(None, "f", 10).write(blobs)) == 2
    with pytest.raises(StoreFull, match=r"99999 bytes.*filesystem.*jobmanager\.max-size"):
        PackedSnapshotWriter(None, "f", 10, 99_999).write(blobs)
    with pytest.raises(StoreNotFound, match=r"shared/x at offset 3.*execution\.checkpointing\.dir"):
        StoreSnapshotReader(None).read(
            checkpoint_pb2.StateHandle(path="shared/x", offset=3, size_bytes=1)
        )


@pytest.mark.parametrize("size", [1, 100])
def test_names_are_unique(size: int) -> None:
    store = MemoryStore(1 << 20)
    with pytest.raises(InvariantViolation, match="'a'"):
        PackedSnapshotWriter(store, "f", 50).write([blob("a", b"1" * size)] * 2)
    assert store.list("") == []


def test_a_failing_backend_leaves_nothing(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x" * 100
        raise OSError(5, "the database is broken")

    store = LocalStore(tmp_path)
    with pytest.raises((OSError, StoreTransient), match="broken"):
        PackedSnapshotWriter(store, "f", 10).write([blob("a", b"y" * 100), Blob("b", chunks)])
    assert list(tmp_path.iterdir()) == []


def written(store: ObjectStore, inline_max: int) -> checkpoint_pb2.StateHandle:
    blobs = [blob("before", b"b" * 90), blob("a", bytes(range(100))), blob("after", b"c" * 90)]
    return PackedSnapshotWriter(store, "f", inline_max).write(blobs)["a"]


def test_every_altered_byte_is_seen(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    handle = written(store, 0)
    reader = StoreSnapshotReader(store)
    content = bytearray(store.get("shared/f"))
    for position in range(len(content)):
        content[position] ^= 1 << position % 8
        (tmp_path / "shared/f").write_bytes(content)
        if 90 <= position < 190:
            with pytest.raises(
                StoreCorrupt, match=r"shared/f at offset 90: the checksum of 100"
            ) as e:
                reader.read(handle)
            assert f"{handle.checksum:08x} expected" in str(e.value)
            with pytest.raises(StoreCorrupt, match=re.escape(str(e.value))):
                reader.fetch(handle, tmp_path / "fetched")
            assert not (tmp_path / "fetched").exists()
        else:
            assert reader.read(handle) == bytes(range(100))
            reader.fetch(handle, tmp_path / "fetched")
            assert (tmp_path / "fetched").read_bytes() == bytes(range(100))
            (tmp_path / "fetched").unlink()
        content[position] ^= 1 << position % 8
    (tmp_path / "shared/f").write_bytes(content[:150])
    with pytest.raises(StoreCorrupt, match=r"shared/f ends at 150 bytes"):
        reader.read(handle)
    (tmp_path / "shared/f").unlink()
    with pytest.raises(StoreNotFound, match="shared/f"):
        reader.read(handle)


def test_every_altered_inline_byte_is_seen() -> None:
    handle = written(MemoryStore(1000), 1000)
    reader = StoreSnapshotReader(None)
    assert reader.read(handle) == bytes(range(100))
    for position in range(100):
        altered = bytearray(handle.inline)
        altered[position] ^= 0x10
        other = checkpoint_pb2.StateHandle()
        other.CopyFrom(handle)
        other.inline = bytes(altered)
        with pytest.raises(StoreCorrupt, match="inline state: the checksum"):
            reader.read(other)
    other = checkpoint_pb2.StateHandle()
    other.CopyFrom(handle)
    other.inline = handle.inline[:99]
    with pytest.raises(StoreCorrupt, match="100 bytes expected, 99 found"):
        reader.read(other)


class FarStore(MemoryStore):
    """One that is far away: what is read of it is asked for ahead."""

    files_at_once = 3


@pytest.mark.parametrize("kind", [MemoryStore, FarStore])
def test_ranges_of_many_handles_come_in_order(kind: type[MemoryStore]) -> None:
    stores = {name: kind(1 << 20) for name in ("", "other")}
    reader = StoreSnapshotReader(stores[""], stores.__getitem__)
    handles, content = [], bytes(range(200))
    for number, name in enumerate(("", "", "other", "")):
        writer = PackedSnapshotWriter(stores[name], f"f{number}", 0)
        handle = writer.write([blob("a", b"x" * 70), blob("b", content)])["b"]
        handle.store = name
        handles.append(handle)
    handles.insert(2, checkpoint_pb2.StateHandle(inline=content, size_bytes=len(content)))
    wanted = [(handle, start, 50) for handle in handles for start in (0, 150)]
    assert [*reader.read_ranges(wanted)] == [content[:50], content[150:]] * 5
    for offset, size, damage in ((0, 10, -100), (-1, 1, 0), (0, 201, 0)):
        wrong = checkpoint_pb2.StateHandle()
        wrong.CopyFrom(handles[1])
        wrong.offset += damage
        contents = reader.read_ranges([(handles[0], 0, 1), (wrong, offset, size)])
        with pytest.raises(StoreCorrupt, match="shared/f1"):
            list(contents)


def test_references_that_cannot_be_are_damage(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    handle = written(store, 0)
    reader = StoreSnapshotReader(store)
    for offset, size in ((-1, 1), (0, 101), (100, 1), (1, -1)):
        with pytest.raises(StoreCorrupt, match="has 100 bytes"):
            reader.read_range(handle, offset, size)
    assert reader.read_range(handle, 100, 0) == b""
    for path, offset in (("../../etc/passwd", 0), ("shared/f", -1)):
        with pytest.raises(StoreCorrupt, match="the reference is damaged"):
            reader.read(checkpoint_pb2.StateHandle(path=path, offset=offset, size_bytes=1))


@given(
    checkpoint_id=st.integers(0, 10**15),
    vertex=st.text(min_size=1, max_size=12),
    subtask=st.integers(0, 40_000),
    attempt=st.integers(0, 10**6),
    unique=st.from_regex(r"[0-9a-z]{1,16}", fullmatch=True),
)
def test_names_say_who_wrote(
    checkpoint_id: int, vertex: str, subtask: int, attempt: int, unique: str
) -> None:
    name = snapshot_file_name(checkpoint_id, vertex, subtask, attempt, unique)
    expected = SnapshotFileName(checkpoint_id, vertex, subtask, attempt, unique)
    assert parse_snapshot_file_name(name) == expected
    assert parse_snapshot_file_name(f"shared/{name}") == expected
    MemoryStore(1).put(f"shared/{name}", ())


def test_names_that_are_none() -> None:
    for name in ("", "HEAD", "chk-1/manifest", "1-v-2-3", "x-v-1-2-a", "1-v-2-3-", "1--2-3-a"):
        assert parse_snapshot_file_name(name) is None
    for arguments in (
        (-1, "v", 0, 0, "a"),
        (1, "", 0, 0, "a"),
        (1, "v", 0, 0, "a-b"),
        (1, "v", 0, 0, ""),
    ):
        with pytest.raises(ValueError, match="no name of a snapshot file"):
            snapshot_file_name(*arguments)


def test_a_file_whose_upload_seems_to_have_failed_is_removed() -> None:
    class LosesAnswers(MemoryStore):
        @override
        def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
            super().put(path, chunks)
            raise StoreTransient("the answer is lost")

    store = LosesAnswers(1 << 20)
    with pytest.raises(StoreTransient):
        written(store, 0)
    assert not store.list("")
