"""A bucket's objects by their whole keys, for those who read files that others have put there.

A range comes with the ETag of the object it is of: so who reads an object range by range notices that it was
replaced in between, without asking once more.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Final

from penstock.errors import StoreNotFound, StoreTransient
from penstock.storage.s3.client import connection
from penstock.storage.s3.listing import FoundObject, found_object, objects
from penstock.storage.s3.metrics import REQUESTS
from penstock.storage.s3.requests import AnswerRefused, S3Requests
from penstock.storage.s3.settings import S3Settings

_RANGE_NOT_SATISFIABLE: Final = 416


class ObjectReplacedError(Exception):
    """Another object has the key now, or none."""


class S3Bucket:
    """The objects of one bucket. Any thread.

    Args:
        name: of the bucket.
        settings: how S3 is reached.
    """

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
        try:
            return self._requests.call(
                "HeadObject",
                "read",
                key,
                then=lambda answer: found_object(key, answer["ContentLength"], answer),
                Key=key,
            )
        except StoreNotFound:
            return None

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
        REQUESTS.add_bytes(received=len(content))
        if len(content) != size_bytes:
            raise StoreTransient(
                f"{self.uri(found.key)}: {len(content)} bytes came at offset {offset}, "
                f"{size_bytes} were asked for"
            )
        return content

    def begin_read(self, found: FoundObject, offset: int, size_bytes: int) -> Future[bytes]:
        """As ``read``, on a thread for transfers."""
        return self._connection.transfers.submit(self.read, found, offset, size_bytes)
