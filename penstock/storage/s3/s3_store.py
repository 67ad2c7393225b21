"""Objects below a prefix of a bucket.

An object appears whole or not at all, since S3 says so of each write; a multipart upload that nobody has
completed is what a writer that died leaves (``temporaries``).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import Future
from itertools import chain
from typing import ClassVar, Final
from urllib.parse import quote, unquote

from typing_extensions import override

from penstock.errors import StoreCorrupt, StoreNotFound, StoreTransient
from penstock.storage.object_paths import check_path, check_prefix
from penstock.storage.object_store import (
    FIRST_ANSWER_MS,
    RANGE_BYTES,
    TEMPORARY_AGE_MAX_MS,
    ObjectInfo,
    ObjectStore,
    Range,
    ranges_of,
)
from penstock.storage.request_counts import S3_REQUESTS
from penstock.storage.s3.client import S3Connection, connection
from penstock.storage.s3.copying import copy
from penstock.storage.s3.deleting import DELETED_AT_ONCE, delete_at_once
from penstock.storage.s3.listing import info_of, objects, parts_below, uploads
from penstock.storage.s3.requests import AnswerRefused, S3Requests
from penstock.storage.s3.settings import S3Settings
from penstock.storage.s3.swap import Conditions, prove_conditions, swap
from penstock.storage.s3.upload import abandon, size_of, upload

_PARTS_AHEAD: Final = 4
"""Of one reader: with three files at once more than there are threads for."""
_RANGE_NOT_SATISFIABLE: Final = 416
_UPLOAD_MARK: Final = "/.upload-"


class S3Store(ObjectStore):
    """An ``ObjectStore`` on S3.

    Args:
        bucket: must be there.
        prefix: of the keys of all objects, without a slash at its ends; "" = they begin at the bucket's top.
        settings: how S3 is reached.
    """

    files_at_once: ClassVar[int] = 3
    """So that one is checked and written while others are on their way."""

    def __init__(self, bucket: str, prefix: str, settings: S3Settings) -> None:
        self._prefix = f"{prefix}/" if prefix else ""
        self._connection = connection(settings)
        self._requests = S3Requests(self._connection, bucket)

    @override
    def __repr__(self) -> str:
        return f"S3Store({self._requests.uri(self._prefix)!r})"

    @override
    def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        return upload(self._requests, self._key(path), chunks)

    @override
    def get(self, path: str) -> bytes:
        key = self._key(path)
        content: bytes = self._requests.call(
            "GetObject", "read", key, then=lambda answer: answer["Body"].read(), Key=key
        )
        S3_REQUESTS.add_bytes(received=len(content))
        return content

    @override
    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        if offset < 0 or size_bytes < 0:
            raise ValueError(f"{path!r}: no range of {size_bytes} bytes begins at {offset}")
        key = self._key(path)
        if size_bytes == 0:
            self._check_end(key, offset, 0)
            return b""
        if size_bytes <= RANGE_BYTES:
            return self._range(key, offset, size_bytes)
        [content] = self.ranges([(path, offset, size_bytes)])
        return content

    @override
    def ranges(self, wanted: Iterable[Range]) -> Generator[bytes]:
        transfers, following = self._connection.transfers, iter(wanted)
        begun: deque[list[Future[bytes]]] = deque()
        try:
            while True:
                while sum(map(len, begun)) < _PARTS_AHEAD and (one := next(following, None)):
                    key = self._key(one[0])
                    begun.append(
                        [
                            transfers.submit(self._range, key, offset, size)
                            for _, offset, size in ranges_of(*one)
                        ]
                    )
                if not begun:
                    return
                parts_of_one = [part.result() for part in begun[0]]
                begun.popleft()
                yield parts_of_one[0] if len(parts_of_one) == 1 else b"".join(parts_of_one)
        finally:
            for part in chain.from_iterable(begun):
                part.cancel()

    @override
    def sizes(self, paths: Iterable[str]) -> Mapping[str, int]:
        transfers = self._connection.transfers
        begun = {path: transfers.submit(size_of, self._requests, self._key(path)) for path in paths}
        try:
            found = {path: one.result() for path, one in begun.items()}
        finally:
            for one in begun.values():
                one.cancel()
        return {path: size for path, size in found.items() if size is not None}

    @override
    def list(self, prefix: str) -> list[ObjectInfo]:
        check_prefix(prefix)
        found = objects(self._requests, f"{self._prefix}{prefix}")
        infos = [info_of(one, self._prefix) for one in found]
        return sorted((info for info in infos if _is_path(info.path)), key=lambda info: info.path)

    @override
    def delete(self, path: str) -> None:
        key = self._key(path)
        self._requests.call("DeleteObject", "removed", key, then=lambda _: None, Key=key)

    @override
    def delete_many(self, paths: Iterable[str]) -> dict[str, StoreTransient]:
        left: dict[str, StoreTransient] = {}
        wanted = list(dict.fromkeys(paths))
        for first in range(0, len(wanted), DELETED_AT_ONCE):
            some = wanted[first : first + DELETED_AT_ONCE]
            keys = {self._key(path): path for path in some}
            try:
                refused = delete_at_once(self._requests, list(keys))
            except StoreTransient as error:
                left.update(dict.fromkeys(some, error))
                continue
            for key, reason in refused.items():
                left[keys[key]] = StoreTransient(
                    f"{self._requests.uri(key)} cannot be removed: {reason}"
                )
        return left

    @override
    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        key = self._key(path)
        return swap(self._requests, key, expected, new, self._conditions())

    @override
    def can_copy_from(self, source: ObjectStore) -> bool:
        return isinstance(source, S3Store) and source._connection is self._connection

    @override
    def copy_from(self, source: ObjectStore, paths: Mapping[str, str]) -> None:
        assert isinstance(source, S3Store), "as can_copy_from says"
        transfers = self._connection.transfers
        begun = [
            transfers.submit(
                copy, source._requests, source._key(one), self._requests, self._key(path)
            )
            for one, path in paths.items()
        ]
        try:
            for copied in begun:
                copied.result()
        finally:
            for copied in begun:
                copied.cancel()

    @override
    def first_parts(self) -> tuple[str, ...]:
        found = set(parts_below(self._requests, self._prefix))
        if not found:
            raise StoreNotFound(f"{self._requests.uri(self._prefix)}: nothing is there")
        return tuple(sorted(part for part in found if not part.startswith(".")))

    @override
    def check_answers(self, within_ms: int) -> None:
        self._requests.check_answers(within_ms)

    @override
    def check_writable(self) -> None:
        self.check_answers(FIRST_ANSWER_MS)
        self._prove()

    @override
    def temporaries(self) -> tuple[ObjectInfo, ...]:
        found = [
            ObjectInfo(
                f"{one.key[len(self._prefix) :]}{_UPLOAD_MARK}{quote(one.upload_id, safe='~')}",
                0,
                one.begun_at_ms,
            )
            for one in uploads(self._requests, self._prefix)
        ]
        return tuple(sorted(found, key=lambda info: info.path))

    @override
    def remove_temporary(self, path: str) -> None:
        target, mark, upload_id = path.rpartition(_UPLOAD_MARK)
        if not mark:
            raise ValueError(f"{path!r} is not a temporary object")
        abandon(self._requests, self._key(target), unquote(upload_id))

    @override
    def sweep_temporaries(self, age_min_ms: int = TEMPORARY_AGE_MAX_MS) -> tuple[str, ...]:
        latest_ms = time.time_ns() // 1_000_000 - age_min_ms
        swept = [
            info.path
            for info in self.temporaries()
            if not age_min_ms or info.modified_at_ms <= latest_ms
        ]
        for path in swept:
            self.remove_temporary(path)
        return tuple(swept)

    @override
    def remove_remains(self) -> None:
        self.sweep_temporaries(0)

    def _key(self, path: str) -> str:
        check_path(path)
        return f"{self._prefix}{path}"

    def _range(self, key: str, offset: int, size_bytes: int) -> bytes:
        try:
            content: bytes = self._requests.call(
                "GetObject",
                "read",
                key,
                then=lambda answer: answer["Body"].read(),
                refusals=(_RANGE_NOT_SATISFIABLE,),
                Key=key,
                Range=f"bytes={offset}-{offset + size_bytes - 1}",
            )
        except AnswerRefused:
            content = b""
        S3_REQUESTS.add_bytes(received=len(content))
        if len(content) != size_bytes:
            self._check_end(key, offset, size_bytes)
            raise StoreCorrupt(
                f"{self._requests.uri(key)}: {len(content)} bytes came at offset {offset}, "
                f"{size_bytes} were asked for"
            )
        return content

    def _check_end(self, key: str, offset: int, size_bytes: int) -> None:
        found = size_of(self._requests, key)
        if found is None:
            raise StoreNotFound(f"{self._requests.uri(key)} does not exist")
        if offset + size_bytes > found:
            raise StoreCorrupt(
                f"{self._requests.uri(key)} ends at {found} bytes: {size_bytes} bytes at offset {offset} "
                "were to be read"
            )

    def _conditions(self) -> Conditions:
        """Proved once per process and bucket, so once per leader."""
        with _proved_lock:
            proved = _proved.get((self._connection, self._requests.bucket))
        return self._prove() if proved is None else proved

    def _prove(self) -> Conditions:
        proved = prove_conditions(self._requests, self._prefix)
        with _proved_lock:
            _proved[self._connection, self._requests.bucket] = proved
        return proved


_proved: dict[tuple[S3Connection, str], Conditions] = {}
_proved_lock = threading.Lock()


def _is_path(path: str) -> bool:
    """Whether a key is an object's: probes and what consoles make in the place of directories are not."""
    try:
        check_path(path)
    except ValueError:
        return False
    return True
