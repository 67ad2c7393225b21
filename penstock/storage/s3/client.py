"""The client library, and what all stores of a process that reach the same S3 share.

The library never repeats a request by itself: how often, how long and which ones is decided in
``requests``, and a conditional write must not be repeated at all (its lost answer would come back as a
refusal).
"""

from __future__ import annotations

import base64
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Final

from penstock.storage.s3.budget import ByteBudget
from penstock.storage.s3.settings import S3Settings

_TRANSFER_THREADS: Final = 8
_CONNECTIONS_MAX: Final = 32


class S3Connection:
    """One per process and settings; lives as long as the process.

    Attributes:
        upload_budget: for the parts of all uploads.
        transfers: threads for parts and ranges; what runs there never waits for another transfer.
        has_answered: the server has answered a request.
    """

    def __init__(self, settings: S3Settings) -> None:
        self.settings = settings
        self.upload_budget = ByteBudget(max(settings.upload_bytes_max, settings.part_bytes))
        self.transfers = ThreadPoolExecutor(_TRANSFER_THREADS, thread_name_prefix="s3-transfer")
        self.has_answered = False
        self._lock = threading.Lock()

    @property
    def patience_ms(self) -> int:
        """How long a call is repeated."""
        first_ms = 0 if self.has_answered else self.settings.first_answer_ms
        return first_ms or self.settings.retry_timeout_ms

    def client(self) -> Any:
        """The library's client, which before the first answer is less patient; any thread."""
        with self._lock:  # making one is not safe in several threads, using one is
            return self._client if self.has_answered else self._first_client

    @cached_property
    def _session(self) -> Any:
        # Slow, and most processes never need it.
        from penstock.storage.s3.library import new_session

        return new_session()

    @cached_property
    def _client(self) -> Any:
        return self._made(self.settings.request_timeout_ms)

    @cached_property
    def _first_client(self) -> Any:
        timeout_ms, first_ms = self.settings.request_timeout_ms, self.settings.first_answer_ms
        return self._made(first_ms) if 0 < first_ms < timeout_ms else self._client

    def _made(self, timeout_ms: int) -> Any:
        from botocore.config import Config

        settings = self.settings
        timeout_s = timeout_ms / 1000
        client = self._session.client(
            "s3",
            endpoint_url=settings.endpoint or None,
            region_name=settings.region or None,
            aws_access_key_id=settings.access_key or None,
            aws_secret_access_key=settings.secret_key or None,
            config=Config(
                connect_timeout=timeout_s,
                read_timeout=timeout_s,
                max_pool_connections=_CONNECTIONS_MAX,
                # `max_attempts: 1` would repeat once.
                retries={"total_max_attempts": 1, "mode": "standard"},
                request_checksum_calculation=settings.checksums,
                response_checksum_validation=settings.checksums,
                s3={"addressing_style": "path" if settings.is_path_style else "auto"},
            ),
        )
        client.meta.events.register("before-sign.s3.DeleteObjects", _add_md5)
        return client


def _add_md5(request: Any, **_: Any) -> None:
    """Older servers demand this header, which the library no longer sends, with a list of deletions."""
    body = request.body if isinstance(request.body, bytes) else str(request.body).encode()
    digest = hashlib.md5(body, usedforsecurity=False).digest()
    del request.headers["Content-MD5"]
    request.headers["Content-MD5"] = base64.b64encode(digest).decode()


_connections: dict[S3Settings, S3Connection] = {}
_connections_lock = threading.Lock()


def connection(settings: S3Settings) -> S3Connection:
    """The one of this process."""
    with _connections_lock:
        found = _connections.get(settings)
        if found is None:
            found = _connections[settings] = S3Connection(settings)
        return found
