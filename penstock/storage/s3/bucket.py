"""A bucket's objects by their whole keys, for those who read and write files there.

A range comes with the ETag of the object it is of: so who reads an object range by range notices that it was
replaced in between, without asking once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Final

from penstock.errors import StoreNotFound, StoreTransient
from penstock.storage.request_counts import S3_REQUESTS
from penstock.storage.s3.client import connection
from penstock.storage.s3.copying import copy
from penstock.storage.s3.deleting import DELETED_AT_ONCE, delete_at_once
from penstock.storage.s3.listing import (
    FoundObject,
    FoundUpload,
    find,
    objects,
    uploads,
)
from penstock.storage.s3.requests import AnswerRefused, S3Requests
from penstock.storage.s3.settings import S3Settings
from penstock.storage.s3.upload import ObjectWriter, abandon

_RANGE_NOT_SATISFIABLE: Final = 416


class ObjectReplacedError(Exception):
    """Another object has the key now, or none."""


class S3Bucket:
    """The objects of one bucket. Any thread."""

    def __init__(self, name: str, settings: S3Settings) -> None:
        self._connection = connection(settings)
        self._requests = S3Requests(self._connection, name)

    def uri(self, key: str) -> str:
        """How an object is called in messages."""
        return self._requests.uri(key)

    def below(self, prefix: str) -> list[FoundObject]:
        """All objects whose key begins with the prefix, in the order of their keys.

        Raises:
            StoreTransient: they cannot be listed now.
        """
        return list(objects(self._requests, prefix))

    def find(self, key: str) -> FoundObject | None:
        """The object, without its content; None = there is none.

        Raises:
            StoreTransient: it cannot be looked at now.
        """
        return find(self._requests, key)

    def read(self, found: FoundObject, offset: int, size_bytes: int) -> bytes:
        """A range of the object that was found.

        Raises:
            ObjectReplacedError: it is not there any more.
            StoreTransient: it cannot be read now.
        """

        def content_of(answer: Any) -> bytes:
            if str(answer["ETag"]) != found.etag:
                answer["Body"].close()
                raise ObjectReplacedError
            content: bytes = answer["Body"].read()
            return content

        try:
            content = self._requests.call(
                "GetObject",
                "read",
                found.key,
                then=content_of,
                refusals=(_RANGE_NOT_SATISFIABLE,),
                Key=found.key,
                Range=f"bytes={offset}-{offset + size_bytes - 1}",
            )
        except (StoreNotFound, AnswerRefused) as error:
            raise ObjectReplacedError from error
        S3_REQUESTS.add_bytes(received=len(content))
        if len(content) != size_bytes:
            raise StoreTransient(
                f"{self.uri(found.key)}: {len(content)} bytes came at offset {offset}, "
                f"{size_bytes} were asked for"
            )
        return content

    def begin_read(self, found: FoundObject, offset: int, size_bytes: int) -> Future[bytes]:
        """As ``read``, on a thread for transfers."""
        return self._connection.transfers.submit(self.read, found, offset, size_bytes)

    def which(self, keys: Iterable[str]) -> dict[str, FoundObject]:
        """The objects that have these keys, as far as they are there.

        Raises:
            StoreTransient: one cannot be looked at now.
        """
        begun = {key: self._connection.transfers.submit(self.find, key) for key in set(keys)}
        found = {key: one.result() for key, one in begun.items()}
        return {key: one for key, one in found.items() if one is not None}

    def put(self, key: str, content: bytes) -> None:
        """Writes a small object.

        Raises:
            StoreTransient: it cannot be written.
        """
        writer = self.writer(key)
        writer.write(memoryview(content))
        writer.complete()

    def writer(self, key: str) -> ObjectWriter:
        """Writes an object as its bytes come."""
        return ObjectWriter(self._requests, key)

    def copy(self, keys: Iterable[tuple[str, str]]) -> list[str]:
        """Has the server copy objects within the bucket; may be repeated.

        Args:
            keys: (what is copied, where to).

        Returns:
            Where to, of those that are not there.

        Raises:
            StoreTransient: one cannot be copied now.
        """
        begun = [
            (target, self._connection.transfers.submit(self._copy, key, target))
            for key, target in keys
        ]
        try:
            return [target for target, one in begun if not one.result()]
        finally:
            for _, one in begun:
                one.cancel()

    def _copy(self, key: str, target: str) -> bool:
        try:
            copy(self._requests, key, self._requests, target)
        except StoreNotFound:
            return False
        return True

    def delete(self, keys: Iterable[str]) -> None:
        """Removes objects; those that are not there are no error.

        Raises:
            StoreTransient: some cannot be removed now.
        """
        wanted = list(dict.fromkeys(keys))
        for first in range(0, len(wanted), DELETED_AT_ONCE):
            refused = delete_at_once(self._requests, wanted[first : first + DELETED_AT_ONCE])
            for key, reason in refused.items():
                raise StoreTransient(f"{self.uri(key)} cannot be removed: {reason}")

    def uploads(self, prefix: str) -> list[FoundUpload]:
        """Uploads below a prefix that have not ended.

        Raises:
            StoreTransient: they cannot be listed now.
        """
        return list(uploads(self._requests, prefix))

    def abandon(self, upload: FoundUpload) -> None:
        """Ends an upload: there will be no such object."""
        abandon(self._requests, upload.key, upload.upload_id)
