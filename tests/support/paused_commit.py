"""A process that commits the output of a file sink on S3 and stops itself (SIGSTOP) in the middle of it:

    python -m tests.support.paused_commit ENDPOINT DIRECTORY [POINT ...]

For each point it writes three files into DIRECTORY/POINT, tells what it has prepared in one line (JSON), stops there, and
goes on when it is let to. ``POINTS`` says where.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

from penstock.connectors.files import file_sink
from penstock.errors import StreamError
from penstock.storage.open_store import use_s3
from penstock.storage.s3.bucket import S3Bucket
from tests.integration.s3.conftest import settings_of
from tests.support.file_sinks import batch, opened, prepare

POINTS: Final = ("before", "between", "copied")
"""Before the first copy; when one of three is made; when all are, and what was copied is still there."""

_copy, _delete = S3Bucket.copy, S3Bucket.delete


def main(endpoint: str, directory: str, *points: str) -> None:
    """See the module."""
    use_s3(lambda: settings_of(endpoint))
    for point in points:
        writer = opened(file_sink("json", f"{directory}/{point}", roll=1_000))
        for start in range(0, 300, 100):
            writer.write(batch(start))
        committables = prepare(writer)
        print(json.dumps([one.decode() for one in committables]), flush=True)
        S3Bucket.copy, S3Bucket.delete = _stopping(point)  # type: ignore[method-assign]
        try:
            writer.commit(committables)
            print("committed", flush=True)
        except StreamError as error:
            print(f"{error!r}", flush=True)
        finally:
            S3Bucket.copy, S3Bucket.delete = _copy, _delete  # type: ignore[method-assign]


def _stopping(point: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What the sink calls in the place of copying and deleting."""

    def copy(bucket: S3Bucket, keys: Iterable[tuple[str, str]]) -> list[str]:
        keys = list(keys)
        count = {"before": 0, "between": 1, "copied": len(keys)}[point]
        gone = _copy(bucket, keys[:count])
        if count < len(keys):
            _stop()
        return gone + _copy(bucket, keys[count:])

    def delete(bucket: S3Bucket, keys: Iterable[str]) -> None:
        if point == "copied":
            _stop()
        _delete(bucket, keys)

    return copy, delete


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    main(*sys.argv[1:])
