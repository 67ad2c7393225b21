"""Objects that are removed many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from penstock.storage.s3.requests import S3Requests

DELETED_AT_ONCE: Final = 1000


def delete_at_once(requests: S3Requests, keys: Sequence[str]) -> dict[str, str]:
    """Removes up to ``DELETED_AT_ONCE`` objects; returns those that the server refuses, each with what it says.

    Raises:
        StoreTransient: none can be removed now.
    """

    def refused(answer: Any) -> dict[str, str]:
        return {
            one["Key"]: f"{one.get('Code', '')}: {one.get('Message', '')}"
            for one in answer.get("Errors", ())
            if one.get("Code") != "NoSuchKey"
        }

    return requests.call(
        "DeleteObjects",
        "removed",
        keys[0],
        then=refused,
        Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True},
    )
