"""Objects that the server copies itself; nothing of them passes through here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.errors import StoreNotFound
from penstock.storage.s3.requests import AnswerRefused, S3Requests
from penstock.storage.s3.upload import abandon, begin, complete, size_of

_PART_BYTES: Final = 1 << 30
_TOO_LARGE: Final = 400
"""What servers answer where an object is larger than 5 GB, among other things."""


def copy(source: S3Requests, source_key: str, target: S3Requests, key: str) -> None:
    """Copies an object on the same server; one that is there is replaced. May be repeated at any time.

    Raises:
        StoreNotFound: there is none.
        StoreTransient: it cannot be copied now.
    """
    origin = {"Bucket": source.bucket, "Key": source_key}
    try:
        target.call(
            "CopyObject",
            "copied",
            key,
            then=lambda _: None,
            refusals=(_TOO_LARGE,),
            Key=key,
            CopySource=origin,
        )
    except StoreNotFound as error:
        raise StoreNotFound(f"{source.uri(source_key)} does not exist") from error
    except AnswerRefused:  # what it is refused for otherwise, the next request is as well
        copy_in_parts(source, source_key, target, key)


def copy_in_parts(
    source: S3Requests,
    source_key: str,
    target: S3Requests,
    key: str,
    part_bytes: int = _PART_BYTES,
) -> None:
    """As ``copy``, of an object that one request does not copy.

    Args:
        part_bytes: of each part but the last.

    Raises:
        StoreNotFound: there is none.
        StoreTransient: it cannot be copied now.
    """
    size = size_of(source, source_key)
    if size is None:
        raise StoreNotFound(f"{source.uri(source_key)} does not exist")
    origin = {"Bucket": source.bucket, "Key": source_key}
    upload_id = begin(target, key)
    try:
        parts = [
            _copy_part(
                target, key, upload_id, origin, number, offset, min(part_bytes, size - offset)
            )
            for number, offset in enumerate(range(0, size, part_bytes), 1)
        ]
        complete(target, key, upload_id, parts, size)
    except BaseException:
        abandon(target, key, upload_id)
        raise


def _copy_part(
    target: S3Requests,
    key: str,
    upload_id: str,
    origin: Mapping[str, str],
    number: int,
    offset: int,
    size_bytes: int,
) -> dict[str, Any]:
    return target.call(
        "UploadPartCopy",
        "copied",
        key,
        then=lambda answer: {"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]},
        Key=key,
        UploadId=upload_id,
        PartNumber=number,
        CopySource=origin,
        CopySourceRange=f"bytes={offset}-{offset + size_bytes - 1}",
    )
