"""Objects in the memory of this process, up to a limit: checkpoint storage ``jobmanager``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from typing_extensions import override

from penstock.errors import StoreCorrupt, StoreFull, StoreNotFound
from penstock.storage.object_paths import check_path, check_prefix
from penstock.storage.object_store import TEMPORARY_AGE_MAX_MS, ObjectInfo, ObjectStore


@dataclass(frozen=True, slots=True)
class _Object:
    content: bytes
    modified_at_ms: int


class MemoryStore(ObjectStore):
    """An ``ObjectStore`` of limited size that ends with the process.

    Invariant: the sizes of all objects sum up to at most ``limit_bytes``. What is over it is refused
    with ``StoreFull`` and changes nothing.

    Args:
        limit_bytes: of all objects together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Size of all objects."""
        return self._used_bytes

    @override
    def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        check_path(path)
        parts = []
        size = 0
        for chunk in chunks:
            part = bytes(chunk)
            size += len(part)
            if size > self.limit_bytes:
                raise self._full(path, size)
            parts.append(part)
        content = b"".join(parts)
        with self._lock:
            self._set(path, content)
        return size

    @override
    def get(self, path: str) -> bytes:
        check_path(path)
        with self._lock:
            found = self._objects.get(path)
        if found is None:
            raise StoreNotFound(f"{path} is not in the JobManager's memory")
        return found.content

    @override
    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        if offset < 0 or size_bytes < 0:
            raise ValueError(f"{path!r}: no range of {size_bytes} bytes begins at {offset}")
        content = self.get(path)
        part = content[offset : offset + size_bytes]
        if len(part) < size_bytes:
            raise StoreCorrupt(
                f"{path} ends at {len(content)} bytes: {size_bytes} bytes at offset {offset} "
                "were to be read"
            )
        return part

    @override
    def sizes(self, paths: Iterable[str]) -> Mapping[str, int]:
        with self._lock:
            return {
                path: len(self._objects[path].content) for path in paths if path in self._objects
            }

    @override
    def list(self, prefix: str) -> list[ObjectInfo]:
        check_prefix(prefix)
        with self._lock:
            return [
                ObjectInfo(path, len(found.content), found.modified_at_ms)
                for path, found in sorted(self._objects.items())
                if path.startswith(prefix)
            ]

    @override
    def delete(self, path: str) -> None:
        check_path(path)
        with self._lock:
            found = self._objects.pop(path, None)
            if found is not None:
                self._used_bytes -= len(found.content)

    @override
    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        check_path(path)
        with self._lock:
            found = self._objects.get(path)
            if (None if found is None else found.content) != expected:
                return False
            self._set(path, bytes(new))
            return True

    @override
    def first_parts(self) -> tuple[str, ...]:
        return tuple(sorted({info.path.partition("/")[0] for info in self.list("")}))

    @override
    def check_writable(self) -> None:
        pass  # memory always is

    @override
    def temporaries(self) -> tuple[ObjectInfo, ...]:
        return ()  # an object is written in one step

    @override
    def remove_temporary(self, path: str) -> None:
        raise ValueError(f"{path!r} is not a temporary: memory has none")

    @override
    def sweep_temporaries(self, age_min_ms: int = TEMPORARY_AGE_MAX_MS) -> tuple[str, ...]:
        return ()

    @override
    def remove_remains(self) -> None:
        pass  # ends with the process

    def _set(self, path: str, content: bytes) -> None:
        replaced = self._objects.get(path)
        used_bytes = self._used_bytes + len(content)
        if replaced is not None:
            used_bytes -= len(replaced.content)
        if used_bytes > self.limit_bytes:
            raise self._full(path, len(content))
        self._objects[path] = _Object(content, time.time_ns() // 1_000_000)
        self._used_bytes = used_bytes

    def _full(self, path: str, size_bytes: int) -> StoreFull:
        return StoreFull(
            f"{path} with at least {size_bytes} bytes does not fit into the JobManager's memory: "
            f"{self._used_bytes} of {self.limit_bytes} bytes are taken by retained checkpoints; "
            "use execution.checkpointing.storage: filesystem, or raise "
            "execution.checkpointing.jobmanager.max-size"
        )
