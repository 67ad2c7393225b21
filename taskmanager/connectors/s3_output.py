"""Output below a prefix on S3: objects below ``_pending/``, copied to their final names by the server at commit.

An object has no second name and cannot be renamed: a commit copies it and removes what was copied, and may be
repeated from any point of that. Names carry job, sink, subtask and attempt, as those in directories do; what others have below
``_pending/`` is left alone.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from typing_extensions import override

from penstock.connectors.compacted import ReplacedFiles, replaced_place
from penstock.connectors.sink import SinkContext
from penstock.errors import StoreNotFound
from penstock.storage.open_store import open_bucket
from penstock.storage.s3.bucket import S3Bucket
from penstock.storage.s3.ranges import BLOCK_BYTES, ObjectRanges
from taskmanager.connectors.hidden_files import output_tag
from taskmanager.connectors.output_place import FileNames, FoundFile, HiddenFile, OutputPlace

_PENDING: Final = "_pending"
_HELD: Final = "_held"


class S3Output(OutputPlace):
    """A prefix on S3.

    Args:
        directory: ``s3://bucket/prefix``.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory.rstrip("/")

    @override
    def open(self, context: SinkContext) -> None:
        self._context = context
        self._bucket, prefix = open_bucket(self._directory)
        self._prefix = f"{prefix}/"
        self._tag = output_tag(context.job_id, context.operator_uid)
        self._own = f"part-{self._tag}-{context.subtask_index}-{context.attempt}"
        self._final_stem = f"part-{context.subtask_index}-{context.attempt}"
        probe = f"{self._prefix}{_PENDING}/{self._own}-probe"
        self._bucket.put(probe, b"")
        self._bucket.delete([probe])

    @override
    def names(self, directory: str, number: int, extension: str) -> FileNames:
        pending = f"{self._directory}/{_PENDING}/{self._own}-{number}.{extension}"
        below = f"{directory}/" if directory else ""
        final = f"{self._final_stem}-{number}-{self._tag}.{extension}"
        return FileNames(pending, pending, f"{self._directory}/{below}{final}")

    @override
    def create(self, names: FileNames) -> HiddenFile:
        bucket, key = open_bucket(names.pending)
        return _ObjectFile(bucket, key)

    @override
    def sync(self, directory: Path) -> None:
        """What the server has answered is safe."""

    @override
    def commit(self, pairs: Sequence[tuple[str, str]], *, is_repeated: bool) -> list[str]:
        keys = [(_key(pending), _key(final)) for pending, final in pairs]
        done = self._done([final for _, final in keys]) if is_repeated else frozenset()
        left = [(pending, final) for pending, final in keys if final not in done]
        gone = self._bucket.copy(left)
        there = self._done(gone)
        missing = [final for final in gone if final not in there]
        self._bucket.delete(pending for pending, _ in keys)
        return [self._bucket.uri(final) for final in missing]

    def _done(self, keys: Iterable[str]) -> frozenset[str]:
        """Those of the final keys that were given already, whether the objects have been merged into others or not."""
        keys = list(keys)
        there = frozenset(self._bucket.which(keys))
        left = {self._bucket.uri(key): key for key in keys if key not in there}
        return there | {left[uri] for uri in ReplacedFiles().among(left)}

    @override
    def found(self, names: Collection[str]) -> Mapping[str, FoundFile]:
        found = self._bucket.which(map(_key, names))
        return {
            name: FoundFile(one.size_bytes, one.etag)
            for name in names
            if (one := found.get(_key(name))) is not None
        }

    @override
    def checksum(self, name: str) -> int:
        found = self._bucket.find(_key(name))
        if found is None:
            raise StoreNotFound(f"{name} is gone")
        ranges, checksum = ObjectRanges(self._bucket, found, range(found.size_bytes)), 0
        for offset in range(0, found.size_bytes, BLOCK_BYTES):
            checksum = zlib.crc32(ranges.read(offset, BLOCK_BYTES), checksum)
        return checksum

    @override
    def held_name(self, pending: str, final: str, savepoint_id: int) -> str:
        below = final.removeprefix(f"{self._directory}/")
        return f"{self._directory}/{_HELD}/{self._tag}/{savepoint_id}/{below}"

    @override
    def keep_held(self, pending: str, final: str, savepoint_id: int) -> None:
        held = _key(self.held_name(pending, final, savepoint_id))
        if self._bucket.copy([(_key(pending), held)]):
            gone = self._bucket.copy([(_key(final), held)])  # it has been committed meanwhile
            if gone and self._bucket.copy([(replaced_place(_key(final)), held)]):
                raise StoreNotFound(f"{pending} is gone, and {final} is not there")

    @override
    def let_go(self, pending: str, final: str, savepoint_id: int) -> None:
        self._bucket.delete([_key(self.held_name(pending, final, savepoint_id))])

    @override
    def remove_pending(self, names: Collection[str]) -> None:
        self._bucket.delete(_key(name) for name in names)

    @override
    def remove_leftovers(self) -> None:
        def is_left(name: str) -> bool:
            match = _NAME.match(name)
            assert match is not None, name
            subtask_index, attempt = int(match[1]), int(match[2])
            return (
                subtask_index % self._context.parallelism == self._context.subtask_index
                and attempt < self._context.attempt
            )

        _remove(self._bucket, f"{self._prefix}{_PENDING}/part-{self._tag}-", is_left)
        if self._context.subtask_index == 0:
            self._let_go_of_committed()

    def _let_go_of_committed(self) -> None:
        """What has been committed is in doubt no more."""
        place = f"{self._prefix}{_HELD}/{self._tag}/"
        held = {
            found.key: self._prefix + found.key[len(place) :].partition("/")[2]
            for found in self._bucket.below(place)
        }
        there = self._done(held.values())
        self._bucket.delete(key for key, final in held.items() if final in there)


_NAME: Final = re.compile(r"(\d+)-(\d+)-")


def sweep_objects(directory: str, tag: str, kept: Collection[str] = ()) -> int:
    """Removes what a sink has not committed below a prefix; returns how many objects that were.

    Args:
        kept: last parts of the names of objects that stay.

    Raises:
        StoreTransient: they cannot be removed now.
    """
    bucket, prefix = open_bucket(directory.rstrip("/"))
    own = f"part-{tag}-"
    return _remove(bucket, f"{prefix}/{_PENDING}/{own}", lambda name: own + name not in kept)


def _remove(bucket: S3Bucket, prefix: str, is_left: Callable[[str], bool]) -> int:
    """Removes objects below a prefix, and uploads that nobody will end, by what follows it in their names."""
    keys = [one.key for one in bucket.below(prefix) if is_left(one.key[len(prefix) :])]
    bucket.delete(keys)
    begun = [one for one in bucket.uploads(prefix) if is_left(one.key[len(prefix) :])]
    for upload in begun:
        bucket.abandon(upload)
    return len(keys) + len(begun)


def _key(uri: str) -> str:
    return open_bucket(uri)[1]


class _ObjectFile(HiddenFile):
    """An object that is being written, as a file is."""

    def __init__(self, bucket: S3Bucket, key: str) -> None:
        self._bucket = bucket
        self._key = key
        self._writer = writer = bucket.writer(key)
        super().__init__(
            lambda data: writer.write(memoryview(data).cast("B")), lambda: writer.size_bytes
        )

    @property
    @override
    def etag(self) -> str:
        return self._writer.etag

    @property
    @override
    def unsent_bytes(self) -> int:
        return self._writer.unsent_bytes

    @override
    def send(self) -> None:
        self._writer.send()

    @override
    def complete(self) -> None:
        self._writer.complete()

    @override
    def release(self) -> None:
        self._writer.abandon()

    @override
    def remove(self) -> None:
        self.release()
        self._bucket.delete([self._key])
