"""Requests to one bucket: repeated with growing pauses where that can help, within a deadline, and counted."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeVar

from penstock.errors import StoreNotFound, StoreTransient
from penstock.storage.request_counts import S3_REQUESTS
from penstock.storage.s3.client import S3Connection
from penstock.storage.s3.client import connection as connection_of
from penstock.storage.s3.errors import (
    client_errors,
    code_of,
    is_absent,
    is_retried,
    status_of,
    store_error,
)

_PAUSE_FIRST_S: Final = 0.05
_PAUSE_MAX_S: Final = 5.0

T = TypeVar("T")


class AnswerRefused(Exception):  # noqa: N818 - named after what happened
    """The server has answered with an error that a caller asked for.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class S3Requests:
    """What stores ask of a bucket. Any thread."""

    def __init__(self, connection: S3Connection, bucket: str) -> None:
        self.connection = connection
        self.bucket = bucket
        self._jitter = random.Random()

    def uri(self, key: str) -> str:
        """How an object is called in messages."""
        return f"s3://{self.bucket}/{key}"

    def check_answers(self, within_ms: int) -> None:
        """Says soon that there is no server, to a process that none has answered yet; of any later call nothing.

        Raises:
            StoreTransient: nothing has answered.
        """
        if self.connection.has_answered:
            return
        settings = replace(self.connection.settings, first_answer_ms=within_ms)
        hasty = S3Requests(connection_of(settings), self.bucket)
        try:
            hasty.call("HeadBucket", "reached", "", then=lambda _: None)
        except (StoreNotFound, StoreTransient):
            if not hasty.connection.has_answered:
                raise
        self.connection.has_answered = True

    def call(
        self,
        operation: str,
        what: str,
        key: str,
        *,
        then: Callable[[Any], T],
        is_repeated: bool = True,
        refusals: tuple[int, ...] = (),
        **arguments: Any,
    ) -> T:
        """Makes a request, and repeats it where that may help.

        Args:
            operation: as S3 calls it: ``GetObject``.
            what: what is being done, for messages: "read".
            key: of the object, or the prefix, for messages.
            then: makes the result of the answer; a body is read in here, so that it is asked for again.
            is_repeated: False = one attempt, whatever becomes of it.
            refusals: statuses that the caller understands.

        Raises:
            AnswerRefused: the answer has one of ``refusals``.
            StoreNotFound: the object is not there.
            StoreTransient: it failed, or too often.
        """
        connection, started = self.connection, time.monotonic()
        pause_max_s = _PAUSE_FIRST_S
        while True:
            method = getattr(connection.client(), _method_name(operation))
            try:
                result = then(method(Bucket=self.bucket, **arguments))
            except client_errors() as error:
                S3_REQUESTS.add(operation, code_of(error))
                connection.has_answered = connection.has_answered or bool(status_of(error))
                if status_of(error) in refusals:
                    raise AnswerRefused(status_of(error)) from error
                if is_absent(error):
                    raise StoreNotFound(f"{self.uri(key)} does not exist") from error
                pause_s = self._jitter.uniform(pause_max_s / 2, pause_max_s)
                is_late = time.monotonic() + pause_s > started + connection.patience_ms / 1000
                if not is_repeated or is_late or not is_retried(error):
                    raise store_error(what, self.uri(key), error) from error
            else:
                connection.has_answered = True
                S3_REQUESTS.add(operation, "ok")
                return result
            threading.Event().wait(pause_s)
            pause_max_s = min(2 * pause_max_s, _PAUSE_MAX_S)


def _method_name(operation: str) -> str:
    """``GetObject`` is ``get_object`` in Python."""
    words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in operation)
    return words.removeprefix("_")
