"""An object on S3 as a source reads it: range by range, all of one object, whoever replaces it meanwhile."""

from __future__ import annotations

import io
from typing import BinaryIO, cast

import pyarrow as pa
from typing_extensions import override

from penstock.connectors.compacted import replaced_place
from penstock.connectors.objects import object_stream
from penstock.errors import StoreTransient, TaskFailure
from penstock.storage.open_store import is_s3, open_bucket
from penstock.storage.ranged_stream import RangedStream
from penstock.storage.s3.bucket import ObjectReplacedError, S3Bucket
from penstock.storage.s3.listing import FoundObject
from penstock.storage.s3.ranges import ObjectRanges
from taskmanager.connectors.file_identity import IN_PARTS, LocalFile, OpenedFile, replaced

_BUFFER_BYTES = 64 << 10


def open_file(path: str, in_order: range = range(0)) -> OpenedFile:
    """A file for reading.

    Args:
        path: local, or ``s3://bucket/key``.
        in_order: what will be read in order: of an object it is fetched ahead.

    Raises:
        TaskFailure: it cannot be opened.
    """
    return OpenedObject(path, in_order) if is_s3(path) else LocalFile(path)


class OpenedObject(OpenedFile):
    """An object on S3. Its ranges are all of the object that was opened, or there is an error.

    Raises:
        TaskFailure: it cannot be looked at, or is not there.
    """

    is_known_by_version = True

    def __init__(self, path: str, in_order: range) -> None:
        self.path = path
        bucket, key = open_bucket(path)
        try:
            found = bucket.find(key) or bucket.find(replaced_place(key))
        except StoreTransient as error:
            raise TaskFailure(str(error)) from error
        if found is None:
            raise TaskFailure(f"{path}: is not there any more; it was removed while the job ran")
        self.version = found.etag
        self._size_bytes = found.size_bytes
        self._ranges = _CheckedRanges(path, bucket, found, in_order)

    @override
    def _version_now(self) -> str:
        return self.version  # of every range that was read

    @override
    def is_another_file(self, version: str) -> bool:
        return version != self.version

    @override
    def size(self) -> int:
        return self._size_bytes

    @override
    def read(self, offset: int, length: int) -> bytes:
        return self._ranges.read(offset, length)

    @override
    def check_part(self, version: str, host: str, found_ms: int) -> None:
        if version != self.version:
            raise replaced(self.path, IN_PARTS)

    @override
    def check_untouched(self) -> None:
        """What was read is of one object."""

    @override
    def stream(self) -> BinaryIO:
        return cast("BinaryIO", io.BufferedReader(self._raw(), _BUFFER_BYTES))

    @override
    def arrow_file(self) -> pa.NativeFile:
        return pa.PythonFile(self._raw(), "r")

    def _raw(self) -> RangedStream:
        return object_stream(self.path, self._ranges, self._size_bytes)

    @override
    def close(self) -> None:
        self._ranges.close()


class _CheckedRanges:
    """Ranges whose failures are those of a task; where the object is merged into another one meanwhile, they are read
    from where it was moved to."""

    def __init__(self, path: str, bucket: S3Bucket, found: FoundObject, in_order: range) -> None:
        self._path = path
        self._bucket = bucket
        self._found = found
        self._in_order = in_order
        self._ranges = ObjectRanges(bucket, found, in_order)

    def read(self, offset: int, length: int) -> bytes:
        try:
            try:
                return self._ranges.read(offset, length)
            except ObjectReplacedError:
                if not self._is_found_again():
                    raise
                return self._ranges.read(offset, length)
        except StoreTransient as error:
            raise TaskFailure(str(error)) from error
        except ObjectReplacedError as error:
            raise replaced(self._path, "what was opened is not there any more") from error

    def _is_found_again(self) -> bool:
        moved = self._bucket.find(replaced_place(open_bucket(self._path)[1]))
        if moved is None or moved.etag != self._found.etag:
            return False
        self._ranges.close()
        self._ranges = ObjectRanges(self._bucket, moved, self._in_order)
        return True

    def close(self) -> None:
        self._ranges.close()
