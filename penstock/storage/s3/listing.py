"""What there is below a prefix: objects, names up to the first slash, uploads that have not ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import StoreNotFound
from penstock.storage.object_store import ObjectInfo
from penstock.storage.s3.requests import S3Requests


@dataclass(frozen=True, slots=True)
class FoundObject:
    """An object of a listing, by its whole key."""

    key: str
    size_bytes: int
    modified_at_ms: int
    etag: str


@dataclass(frozen=True, slots=True)
class FoundUpload:
    """A multipart upload that has been begun, and neither completed nor aborted."""

    key: str
    upload_id: str
    begun_at_ms: int


def objects(requests: S3Requests, prefix: str) -> Iterator[FoundObject]:
    """All objects whose key begins with the prefix, in the order of their keys."""
    for page in _pages(requests, prefix, {}):
        for one in page.get("Contents", ()):
            yield found_object(one["Key"], one["Size"], one)


def found_object(key: str, size_bytes: int, facts: Mapping[str, Any]) -> FoundObject:
    """An object as an entry of a listing or the answer to HeadObject describes it."""
    return FoundObject(key, int(size_bytes), _ms(facts["LastModified"]), str(facts["ETag"]))


def find(requests: S3Requests, key: str) -> FoundObject | None:
    """The object, without its content; None = there is none.

    Raises:
        StoreTransient: it cannot be looked at now.
    """
    with contextlib.suppress(StoreNotFound):
        return requests.call(
            "HeadObject", "read", key, then=lambda answer: _described(key, answer), Key=key
        )
    # The answer to HeadObject has no body, which would tell a bucket that is not there from an object.
    with contextlib.suppress(StoreNotFound):
        return requests.call(
            "GetObject", "read", key, then=lambda answer: _unread(key, answer), Key=key
        )
    return None


def _described(key: str, answer: Mapping[str, Any]) -> FoundObject:
    return found_object(key, answer["ContentLength"], answer)


def _unread(key: str, answer: Mapping[str, Any]) -> FoundObject:
    """It has come since it was looked at."""
    answer["Body"].close()
    return _described(key, answer)


def parts_below(requests: S3Requests, prefix: str) -> Iterator[str]:
    """What keys are called behind the prefix up to their next ``/``, each once a page."""
    for page in _pages(requests, prefix, {"Delimiter": "/"}):
        for one in page.get("Contents", ()):
            yield one["Key"][len(prefix) :]
        for one in page.get("CommonPrefixes", ()):
            yield one["Prefix"][len(prefix) : -1]


def uploads(requests: S3Requests, prefix: str) -> Iterator[FoundUpload]:
    """Uploads below the prefix that have not ended."""
    marks: dict[str, str] = {}
    while True:
        page = _list(requests, "ListMultipartUploads", prefix, marks)
        for one in page.get("Uploads", ()):
            yield FoundUpload(one["Key"], str(one["UploadId"]), _ms(one["Initiated"]))
        if not page.get("IsTruncated"):
            return
        marks = {
            "KeyMarker": page["NextKeyMarker"],
            "UploadIdMarker": page["NextUploadIdMarker"],
        }


def info_of(found: FoundObject, prefix: str) -> ObjectInfo:
    """The same, by its path behind a prefix."""
    return ObjectInfo(found.key[len(prefix) :], found.size_bytes, found.modified_at_ms)


def _pages(
    requests: S3Requests, prefix: str, arguments: dict[str, str]
) -> Iterator[dict[str, Any]]:
    marks: dict[str, str] = {}
    while True:
        page = _list(requests, "ListObjectsV2", prefix, {**arguments, **marks})
        yield page
        if not page.get("IsTruncated"):
            return
        marks = {"ContinuationToken": page["NextContinuationToken"]}


def _list(
    requests: S3Requests, operation: str, prefix: str, arguments: dict[str, Any]
) -> dict[str, Any]:
    return requests.call(
        operation, "listed", prefix, then=lambda answer: answer, Prefix=prefix, **arguments
    )


def _ms(moment: Any) -> int:
    return int(moment.timestamp() * 1000)
