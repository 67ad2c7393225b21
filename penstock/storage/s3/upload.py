"""Objects whose size nobody knows beforehand: small ones in one request, others in parts.

What is held in memory for all uploads of the process lies under one budget. A part that is full is sent by
a thread while the next one is filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Final

from penstock.errors import StoreNotFound, StoreTransient
from penstock.storage.request_counts import S3_REQUESTS
from penstock.storage.s3.listing import find
from penstock.storage.s3.requests import S3Requests
from penstock.storage.s3.settings import PART_BYTES_MIN

_UNBOOKED_BYTES_MAX: Final = 256 << 10
"""Less than that is held by each thread that writes without asking the budget."""
_PARTS_MAX: Final = 10_000


def upload(requests: S3Requests, key: str, chunks: Iterable[bytes | memoryview]) -> int:
    """Writes an object; returns its size. Nothing is left where it fails.

    Raises:
        StoreTransient: it cannot be written.
    """
    buffer = _Buffer(requests)
    parts: _Parts | None = None
    size = 0
    try:
        for chunk in chunks:
            rest = memoryview(chunk).cast("B") if memoryview(chunk).nbytes else memoryview(b"")
            size += len(rest)
            while rest:
                rest = buffer.fill(rest)
                if rest:
                    parts = parts or _Parts(requests, key)
                    parts.send(*buffer.taken())
        if parts is None:
            _put(requests, key, buffer.content)
        else:
            parts.send(*buffer.taken())
            parts.complete(size)
    except BaseException:
        if parts is not None:
            parts.abandon()
        raise
    finally:
        buffer.close()
    return size


class ObjectWriter:
    """An object that grows as its bytes come; it appears when it is complete. One thread at a time.

    What is not a part's worth yet is in memory, which is for whoever writes to bound; parts on their way are under
    the budget of all uploads.

    Attributes:
        size_bytes: of what was written.
        etag: of the object, once it is complete.
    """

    def __init__(self, requests: S3Requests, key: str) -> None:
        self._requests = requests
        self._key = key
        self._content = bytearray()
        self._parts: _Parts | None = None
        self.size_bytes = 0
        self.etag = ""

    @property
    def unsent_bytes(self) -> int:
        """What is in memory."""
        return len(self._content)

    def write(self, data: memoryview) -> int:
        """Takes bytes, all of them."""
        part_bytes = self._requests.connection.settings.part_bytes
        for start in range(0, len(data), part_bytes):
            self._content += data[start : start + part_bytes]
            if len(self._content) >= part_bytes:
                part, self._content = self._content[:part_bytes], self._content[part_bytes:]
                self._send(part)
        self.size_bytes += len(data)
        return len(data)

    def send(self) -> None:
        """Sends what there is, if it is enough for a part."""
        if len(self._content) >= PART_BYTES_MIN:
            part, self._content = self._content, bytearray()
            self._send(part)

    def _send(self, part: bytearray) -> None:
        connection = self._requests.connection
        self._parts = self._parts or _Parts(self._requests, self._key)
        connection.upload_budget.take(len(part), connection.settings.retry_timeout_ms / 1000)
        self._parts.send(part, len(part))

    def complete(self) -> None:
        """The object appears.

        Raises:
            StoreTransient: it cannot be written.
        """
        content, self._content = self._content, bytearray()
        if self._parts is None:
            self.etag = _put(self._requests, self._key, content)
            return
        if content:
            self._send(content)
        self.etag = self._parts.complete(self.size_bytes)
        self._parts = None

    def abandon(self) -> None:
        """There will be no such object, unless it is complete."""
        self._content = bytearray()
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.abandon()


def _put(requests: S3Requests, key: str, content: bytearray) -> str:
    """Returns the etag."""
    etag = requests.call("PutObject", "written", key, then=_etag_of, Key=key, Body=content)
    S3_REQUESTS.add_bytes(sent=len(content))
    return etag


def _etag_of(answer: Mapping[str, Any]) -> str:
    return str(answer["ETag"])


class _Buffer:
    """The part that is being filled, and what it has booked of the budget."""

    def __init__(self, requests: S3Requests) -> None:
        connection = requests.connection
        self._budget = connection.upload_budget
        self._part_bytes = connection.settings.part_bytes
        self._timeout_s = connection.settings.retry_timeout_ms / 1000
        self._booked_bytes = 0
        self.content = bytearray()

    def fill(self, chunk: memoryview) -> memoryview:
        """Takes what fits; returns the rest."""
        if not self._booked_bytes and len(self.content) + len(chunk) > _UNBOOKED_BYTES_MAX:
            self._budget.take(self._part_bytes, self._timeout_s)
            self._booked_bytes = self._part_bytes
        room = self._part_bytes - len(self.content)
        self.content += chunk[:room]
        return chunk[room:]

    def taken(self) -> tuple[bytearray, int]:
        """The part and what it has booked, which belong to the caller now."""
        taken = self.content, self._booked_bytes
        self.content, self._booked_bytes = bytearray(), 0
        return taken

    def close(self) -> None:
        self.content = bytearray()
        if self._booked_bytes:
            self._budget.give_back(self._booked_bytes)
            self._booked_bytes = 0


class _Parts:
    """One multipart upload."""

    def __init__(self, requests: S3Requests, key: str) -> None:
        self._requests = requests
        self._key = key
        self._upload_id = begin(requests, key)
        self._sent: list[Future[dict[str, Any]]] = []
        self._booked: list[int] = []

    def send(self, content: bytearray, booked_bytes: int) -> None:
        """Sends the next part, and gives back what it has booked once it is there."""
        number = len(self._sent) + 1
        if number > _PARTS_MAX:
            self._give_back(booked_bytes)
            raise StoreTransient(
                f"{self._requests.uri(self._key)} would have more than {_PARTS_MAX} parts: "
                "raise s3.upload.part-size"
            )
        transfers = self._requests.connection.transfers
        self._sent.append(transfers.submit(self._send, number, content, booked_bytes))
        self._booked.append(booked_bytes)

    def complete(self, size_bytes: int) -> str:
        """The object appears; returns its etag."""
        return complete(
            self._requests,
            self._key,
            self._upload_id,
            [sent.result() for sent in self._sent],
            size_bytes,
        )

    def abandon(self) -> None:
        """There will be no such object; its parts go."""
        for sent, booked_bytes in zip(self._sent, self._booked, strict=True):
            if sent.cancel():
                self._give_back(booked_bytes)
        for sent in self._sent:
            if not sent.cancelled():
                sent.exception()  # waits: what arrives behind the end would stay
        abandon(self._requests, self._key, self._upload_id)

    def _send(self, number: int, content: bytearray, booked_bytes: int) -> dict[str, Any]:
        try:
            part = self._requests.call(
                "UploadPart",
                "written",
                self._key,
                then=lambda answer: {"PartNumber": number, "ETag": answer["ETag"]},
                Key=self._key,
                UploadId=self._upload_id,
                PartNumber=number,
                Body=content,
            )
        finally:
            self._give_back(booked_bytes)
        S3_REQUESTS.add_bytes(sent=len(content))
        return part

    def _give_back(self, booked_bytes: int) -> None:
        if booked_bytes:
            self._requests.connection.upload_budget.give_back(booked_bytes)


def begin(requests: S3Requests, key: str) -> str:
    """Begins an object of parts; returns the id of the upload."""
    return requests.call(
        "CreateMultipartUpload",
        "written",
        key,
        then=lambda answer: str(answer["UploadId"]),
        Key=key,
    )


def complete(
    requests: S3Requests, key: str, upload_id: str, parts: list[dict[str, Any]], size_bytes: int
) -> str:
    """Makes an object of its parts; returns its etag. A repetition that finds no upload any more looks at the object."""
    try:
        return requests.call(
            "CompleteMultipartUpload",
            "written",
            key,
            then=_etag_of,
            Key=key,
            UploadId=upload_id,
            MultipartUpload={"Parts": parts},
        )
    except StoreTransient:
        found = find(requests, key)
        if found is None or found.size_bytes != size_bytes:
            raise
        return found.etag


def abandon(requests: S3Requests, key: str, upload_id: str) -> None:
    """Removes what has been sent, as far as the server can be reached; the rest is swept later."""
    try:
        requests.call(
            "AbortMultipartUpload",
            "removed",
            key,
            then=lambda _: None,
            is_repeated=False,
            Key=key,
            UploadId=upload_id,
        )
    except (StoreTransient, StoreNotFound):
        return


def size_of(requests: S3Requests, key: str) -> int | None:
    """Of an object; None = there is none.

    Raises:
        StoreTransient: it cannot be looked at now.
    """
    found = find(requests, key)
    return None if found is None else found.size_bytes
