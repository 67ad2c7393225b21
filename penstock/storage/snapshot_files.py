"""How the blobs of a subtask's snapshot are stored: inline where they are few, else in one file.

``PackedSnapshotWriter`` collects blobs until they are more than fits inline; then it streams what it
has and all that follows into one object, with one ``put`` and so one fsync. What it holds in memory is
bounded by the inline limit and one chunk. ``StoreSnapshotReader`` checks all that it reads against size
and checksum.

The object's name says which attempt wrote it for which checkpoint, so that uploads of dead attempts,
which nothing refers to, can be told from those of living ones.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from typing_extensions import override

from penstock.errors import (
    InvariantViolation,
    StoreCorrupt,
    StoreFull,
    StoreNotFound,
    StoreTransient,
)
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import (
    Blob,
    HandleRange,
    SnapshotCopy,
    SnapshotReader,
    SnapshotWriter,
)
from penstock.storage.object_paths import check_path
from penstock.storage.object_store import ObjectStore, Range, ranges_of
from penstock.storage.open_store import open_store
from penstock.storage.store_names import substore

SHARED_DIRECTORY: Final = "shared"

TINY_BYTES_MAX: Final = 64
"""A blob of this size costs no more inline than a reference to it does."""

_NAME: Final = re.compile(
    r"(?P<checkpoint_id>\d{1,18})-(?P<vertex>[^/]+)-(?P<subtask_index>\d{1,9})"
    r"-(?P<attempt>\d{1,9})-(?P<unique>[0-9A-Za-z]+)"
)


@dataclass(frozen=True, slots=True)
class SnapshotFileName:
    """What the name of a snapshot file says: who wrote it for which checkpoint."""

    checkpoint_id: int
    vertex: str
    subtask_index: int
    attempt: int
    unique: str


def snapshot_file_name(
    checkpoint_id: int, vertex: str, subtask_index: int, attempt: int, unique: str
) -> str:
    """The name of the file with the snapshot of one attempt for one checkpoint.

    Args:
        unique: random letters and digits: attempts are numbered anew after a loss of the JobManager.

    Raises:
        ValueError: a part does not fit into a name.
    """
    quoted = quote(vertex, safe="")
    name = f"{checkpoint_id}-{quoted}-{subtask_index}-{attempt}-{unique}"
    expected = SnapshotFileName(checkpoint_id, vertex, subtask_index, attempt, unique)
    if parse_snapshot_file_name(name) != expected:
        raise ValueError(f"no name of a snapshot file can be made of {expected}")
    check_path(name)
    return name


def parse_snapshot_file_name(path: str) -> SnapshotFileName | None:
    """What the last part of a path says; None = it is not the name of a snapshot file."""
    found = _NAME.fullmatch(path.rpartition("/")[2])
    if found is None:
        return None
    return SnapshotFileName(
        int(found["checkpoint_id"]),
        unquote(found["vertex"]),
        int(found["subtask_index"]),
        int(found["attempt"]),
        found["unique"],
    )


class PackedSnapshotWriter(SnapshotWriter):
    """Writes one subtask's snapshot for one checkpoint.

    Args:
        store: the job's directory; None = there is none (checkpoint storage ``jobmanager``):
            everything is inline.
        name: of the file, see ``snapshot_file_name``.
        inline_max_bytes: with a store: all blobs are inline where they have no more than this together.
        total_inline_max_bytes: without a store: what all blobs may have together, else
            ``StoreFull``; None = no limit.
        begin_copy: makes the taker of a second copy of the file, by its path; None = there is none.
        directory: of the file in the store.

    Attributes:
        uploaded_bytes: what ``write`` has put into the store; 0 where all is inline.
    """

    def __init__(
        self,
        store: ObjectStore | None,
        name: str,
        inline_max_bytes: int,
        total_inline_max_bytes: int | None = None,
        begin_copy: Callable[[str], SnapshotCopy] | None = None,
        directory: str = SHARED_DIRECTORY,
    ) -> None:
        self._store = store
        self._path = f"{directory}/{name}"
        self._inline_max_bytes = inline_max_bytes
        self._total_inline_max_bytes = total_inline_max_bytes
        self._begin_copy = begin_copy
        self.uploaded_bytes = 0

    @override
    def write(self, blobs: Iterable[Blob]) -> Mapping[str, checkpoint_pb2.StateHandle]:
        remaining = iter(blobs)
        collected: list[tuple[str, bytes]] = []
        size = 0
        for blob in remaining:
            chunks = _bytes_of(blob)
            parts: list[bytes] = []
            for chunk in chunks:
                size += len(chunk)
                if self._store is None:
                    self._check_total(size)
                elif size > self._inline_max_bytes:
                    begun = blob.name, itertools.chain(parts, (chunk,), chunks)
                    return self._pack(self._store, collected, begun, remaining)
                parts.append(bytes(chunk))
            collected.append((blob.name, b"".join(parts)))
        handles = _Handles(self._path)
        for name, content in collected:
            handles.add_inline(name, content)
        return handles.by_name

    def _pack(
        self,
        store: ObjectStore,
        collected: Iterable[tuple[str, bytes]],
        begun: tuple[str, Iterator[bytes | memoryview]],
        remaining: Iterator[Blob],
    ) -> Mapping[str, checkpoint_pb2.StateHandle]:
        copy = None if self._begin_copy is None else self._begin_copy(self._path)
        handles = _Handles(self._path, copy)

        def stream() -> Iterator[bytes | memoryview]:
            inline_left = self._inline_max_bytes
            whole = ((name, iter((content,))) for name, content in collected)
            later = ((blob.name, _bytes_of(blob)) for blob in remaining)
            for name, chunks in itertools.chain(whole, (begun,), later):
                tiny, chunks = _tiny(chunks, min(TINY_BYTES_MAX, inline_left))
                if tiny is not None:
                    inline_left -= len(tiny)
                    handles.add_inline(name, tiny)
                else:
                    yield from handles.add_packed(name, chunks)

        try:
            self.uploaded_bytes = store.put(self._path, stream())
        except BaseException as error:
            if copy is not None:
                copy.abandon()
            if isinstance(error, StoreTransient):
                # It may be there all the same, and nobody will ever name it.
                with contextlib.suppress(StoreTransient):
                    store.delete(self._path)
            raise
        if copy is not None:
            copy.commit()
        return handles.by_name

    def _check_total(self, size_bytes: int) -> None:
        limit = self._total_inline_max_bytes
        if limit is not None and size_bytes > limit:
            raise StoreFull(
                f"the state of one subtask alone has more than {limit} bytes, too much for the "
                "JobManager's memory: use execution.checkpointing.storage: filesystem, or raise "
                "execution.checkpointing.jobmanager.max-size"
            )


class StoreSnapshotReader(SnapshotReader):
    """Reads what handles refer to. May be used from any thread.

    Args:
        store: the job's directory; None = there is none: all handles are inline, or name their store.
        opened: opens the stores that handles name.
    """

    def __init__(
        self, store: ObjectStore | None, opened: Callable[[str], ObjectStore] = open_store
    ) -> None:
        self._store = store
        self._opened = cache(opened)

    @override
    def read(self, handle: checkpoint_pb2.StateHandle) -> bytes:
        if handle.path:
            content = self._stored(handle, handle.offset, handle.size_bytes)
        else:
            content = handle.inline
        if len(content) != handle.size_bytes:
            raise StoreCorrupt(
                f"{_where(handle)}: {handle.size_bytes} bytes expected, {len(content)} found"
            )
        _check_checksum(handle, zlib.crc32(content))
        return content

    @override
    def fetch(self, handle: checkpoint_pb2.StateHandle, target: Path) -> None:
        if not handle.path:
            target.write_bytes(self.read(handle))
            return
        checksum = 0
        try:
            with _naming(handle), target.open("wb") as file:
                # What follows is on its way while the disk takes this.
                wanted = ranges_of(handle.path, handle.offset, handle.size_bytes)
                for part in self._store_of(handle).ranges(wanted):
                    checksum = zlib.crc32(part, checksum)
                    file.write(part)
            _check_checksum(handle, checksum)
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    @override
    def read_range(self, handle: checkpoint_pb2.StateHandle, offset: int, size_bytes: int) -> bytes:
        _check_within(handle, offset, size_bytes)
        if handle.path:
            return self._stored(handle, handle.offset + offset, size_bytes)
        return handle.inline[offset : offset + size_bytes]

    @override
    def read_ranges(self, wanted: Iterable[HandleRange]) -> Generator[bytes]:
        for store, group in itertools.groupby(wanted, lambda one: self._far_store(one[0])):
            if store is None:
                yield from (self.read_range(*one) for one in group)
            else:
                yield from store.ranges(_range_in_store(*one) for one in group)

    @override
    def fetch_all(self, wanted: Mapping[Path, checkpoint_pb2.StateHandle]) -> None:
        stores = (self._opened(one.store) if one.store else self._store for one in wanted.values())
        files_max = max((store.files_at_once for store in stores if store is not None), default=1)
        if files_max == 1:
            super().fetch_all(wanted)
            return
        with ThreadPoolExecutor(files_max, thread_name_prefix="fetch") as pool:
            # The first error ends the wait; what has not begun then never does.
            list(pool.map(self.fetch, wanted.values(), wanted))

    def _stored(self, handle: checkpoint_pb2.StateHandle, offset: int, size_bytes: int) -> bytes:
        store = self._store_of(handle)
        with _naming(handle):
            return store.read(handle.path, offset, size_bytes)

    def _far_store(self, handle: checkpoint_pb2.StateHandle) -> ObjectStore | None:
        """The store of a handle, where reading ahead helps."""
        store = self._store_of(handle) if handle.path else None
        return None if store is None or store.files_at_once == 1 else store

    def _store_of(self, handle: checkpoint_pb2.StateHandle) -> ObjectStore:
        store = self._opened(handle.store) if handle.store else self._store
        if store is None:
            raise StoreNotFound(
                f"{_where(handle)}: this checkpoint was kept in files, and there is no directory: "
                "set execution.checkpointing.dir to the one it was taken with"
            )
        return store


@contextlib.contextmanager
def _naming(handle: checkpoint_pb2.StateHandle) -> Iterator[None]:
    """Says which reference is damaged."""
    try:
        check_path(handle.path)
        yield
    except ValueError as error:
        raise StoreCorrupt(f"{_where(handle)}: the reference is damaged: {error}") from error


def _check_within(handle: checkpoint_pb2.StateHandle, offset: int, size_bytes: int) -> None:
    if min(offset, size_bytes) < 0 or offset + size_bytes > handle.size_bytes:
        raise StoreCorrupt(
            f"{_where(handle)} has {handle.size_bytes} bytes: {size_bytes} bytes at {offset} "
            "within it are referred to"
        )


def _range_in_store(handle: checkpoint_pb2.StateHandle, offset: int, size_bytes: int) -> Range:
    _check_within(handle, offset, size_bytes)
    with _naming(handle):
        if handle.offset < 0:
            raise ValueError(f"no range begins at {handle.offset}")
        return handle.path, handle.offset + offset, size_bytes


def _check_checksum(handle: checkpoint_pb2.StateHandle, found: int) -> None:
    if found != handle.checksum:
        raise StoreCorrupt(
            f"{_where(handle)}: the checksum of {handle.size_bytes} bytes is {found:08x}, "
            f"{handle.checksum:08x} expected"
        )


class _Handles:
    """Where the blobs of one write are, as they are written."""

    def __init__(self, path: str, copy: SnapshotCopy | None = None) -> None:
        self.by_name: dict[str, checkpoint_pb2.StateHandle] = {}
        self._path = path
        self._copy = copy
        self._offset = 0

    def add_inline(self, name: str, content: bytes) -> None:
        self._add(
            name,
            checkpoint_pb2.StateHandle(
                inline=content, size_bytes=len(content), checksum=zlib.crc32(content)
            ),
        )

    def add_packed(
        self, name: str, chunks: Iterable[bytes | memoryview]
    ) -> Iterator[bytes | memoryview]:
        """The chunks, on their way into the file."""
        offset, checksum, copy = self._offset, 0, self._copy
        if copy is not None:
            copy.begin_blob(offset)
        for chunk in chunks:
            checksum = zlib.crc32(chunk, checksum)
            if copy is not None:
                copy.write(chunk)
            self._offset += len(chunk)
            yield chunk
        self._add(
            name,
            checkpoint_pb2.StateHandle(
                path=self._path,
                offset=offset,
                size_bytes=self._offset - offset,
                checksum=checksum,
            ),
        )

    def _add(self, name: str, handle: checkpoint_pb2.StateHandle) -> None:
        if name in self.by_name:
            raise InvariantViolation(f"two blobs of one snapshot are called {name!r}")
        self.by_name[name] = handle


def _bytes_of(blob: Blob) -> Iterator[bytes | memoryview]:
    """The chunks of a blob, such that ``len`` is their size in bytes."""
    for chunk in blob.chunks():
        if isinstance(chunk, memoryview) and (chunk.itemsize != 1 or chunk.ndim != 1):
            chunk = chunk.cast("B")
        yield chunk


def _tiny(
    chunks: Iterator[bytes | memoryview], size_max: int
) -> tuple[bytes | None, Iterator[bytes | memoryview]]:
    """All that the chunks hold if it is at most ``size_max`` bytes, else None and the chunks."""
    begun: list[bytes | memoryview] = []
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > size_max:
            return None, itertools.chain(begun, (chunk,), chunks)
        begun.append(bytes(chunk))
    return b"".join(begun), iter(())


def _where(handle: checkpoint_pb2.StateHandle) -> str:
    if not handle.path:
        return "inline state"
    return f"{substore(handle.store, handle.path) if handle.store else handle.path} at offset {handle.offset}"
