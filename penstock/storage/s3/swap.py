"""Compare-and-swap by conditional writes, and whether a server honours their conditions.

A swap reads the object with its ETag, compares, and writes under the condition that the object is still
that one, or that there still is none. The write is made once: its lost answer must not come back as a
refusal of its own repetition. What a write has done whose answer was lost, the caller finds out.
"""

from __future__ import annotations

import random
import threading
import uuid
from dataclasses import dataclass
from typing import Final

from penstock.errors import StoreNotFound, StoreTransient, Unrecoverable
from penstock.storage.object_store import SwapUnanswered
from penstock.storage.s3.errors import is_refused
from penstock.storage.s3.requests import AnswerRefused, S3Requests

_CONFLICTS_MAX: Final = 12
_PAUSE_FIRST_S: Final = 0.01
_PAUSE_MAX_S: Final = 1.0
_NOT_FOUND: Final = 404
_CONFLICT: Final = 409
_PRECONDITION_FAILED: Final = 412
_NOT_IMPLEMENTED: Final = 501
_PROBE_NAME: Final = ".probe-"


@dataclass(frozen=True, slots=True)
class Conditions:
    """How a server takes conditions.

    Attributes:
        is_quoted: an ETag is compared with its quotation marks; older servers want it without.
    """

    is_quoted: bool

    def etag(self, answered: str) -> str:
        """What ``If-Match`` is to say, of an ETag as it was answered."""
        bare = answered.strip('"')
        return f'"{bare}"' if self.is_quoted else bare


def swap(
    requests: S3Requests, key: str, expected: bytes | None, new: bytes, conditions: Conditions
) -> bool:
    """See ``ObjectStore.compare_and_swap``."""
    jitter = random.Random()
    pause_max_s = _PAUSE_FIRST_S
    for _ in range(_CONFLICTS_MAX):
        content, etag = _read(requests, key)
        if content != expected:
            return False
        try:
            _write(requests, key, new, None if etag is None else conditions.etag(etag))
        except AnswerRefused as refusal:
            if refusal.status != _CONFLICT:
                return False
        except StoreTransient as error:
            if is_refused(error.__cause__):
                raise
            raise SwapUnanswered(str(error)) from error
        else:
            return True
        threading.Event().wait(jitter.uniform(0, pause_max_s))
        pause_max_s = min(2 * pause_max_s, _PAUSE_MAX_S)
    raise StoreTransient(
        f"{requests.uri(key)} cannot be replaced: {_CONFLICTS_MAX} times others wrote it at the same time"
    )


def prove_conditions(requests: S3Requests, prefix: str) -> Conditions:
    """Makes sure that the server refuses a write whose condition does not hold, and makes one whose does.

    Args:
        prefix: where an object may be made for it, and removed again.

    Raises:
        Unrecoverable: it ignores conditions, or refuses them.
        StoreTransient: it does not answer, or nothing can be written.
    """
    key = f"{prefix}{_PROBE_NAME}{uuid.uuid4().hex}"
    try:
        etag = _probe(requests, key, None)
        if etag is None or _probe(requests, key, None) is not None:
            raise _unfit(requests, "If-None-Match")
        for conditions in (Conditions(is_quoted=False), Conditions(is_quoted=True)):
            if _probe(requests, key, conditions.etag("0" * 32)) is not None:
                break
            if _probe(requests, key, conditions.etag(etag)) is not None:
                return conditions
        raise _unfit(requests, "If-Match")
    finally:
        requests.call("DeleteObject", "removed", key, then=lambda _: None, Key=key)


def _probe(requests: S3Requests, key: str, etag: str | None) -> str | None:
    """The ETag of what was written; None = the server refused it."""
    for _ in range(_CONFLICTS_MAX):
        try:
            return _write(requests, key, b"conditional write", etag)
        except AnswerRefused as refusal:
            if refusal.status != _CONFLICT:
                return None
    raise StoreTransient(f"{requests.uri(key)} cannot be written: others write it")


def _unfit(requests: S3Requests, header: str) -> Unrecoverable:
    return Unrecoverable(
        f"the server of {requests.uri('')} does not honour conditional writes ({header} of PutObject), so two "
        "JobManagers could overwrite each other's checkpoints: use a server that does, or a file system for "
        "execution.checkpointing.dir"
    )


def _read(requests: S3Requests, key: str) -> tuple[bytes | None, str | None]:
    try:
        return requests.call(
            "GetObject",
            "read",
            key,
            then=lambda answer: (answer["Body"].read(), str(answer["ETag"])),
            Key=key,
        )
    except StoreNotFound:
        return None, None


def _write(requests: S3Requests, key: str, content: bytes, etag: str | None) -> str:
    """Writes under the condition; returns the new ETag.

    Args:
        etag: of what must be there; None = nothing.
    """
    condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
    refusals = (_CONFLICT, _PRECONDITION_FAILED, _NOT_IMPLEMENTED)
    return requests.call(
        "PutObject",
        "replaced",
        key,
        then=lambda answer: str(answer["ETag"]),
        is_repeated=False,
        refusals=refusals if etag is None else (*refusals, _NOT_FOUND),
        Key=key,
        Body=content,
        **condition,
    )
