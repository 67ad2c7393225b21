"""Files that are read, on a file system or on S3."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from penstock.connectors.compacted import replaced_place
from penstock.connectors.objects import open_object
from penstock.storage.open_store import is_s3


def open_input(path: str) -> BinaryIO:
    """A file for reading; where it is far away, by ranges. One that was merged into another is where those are.

    Raises:
        OSError: it cannot be opened.
    """
    try:
        return _open(path)
    except FileNotFoundError as error:
        with suppress(FileNotFoundError):
            return _open(replaced_place(path))
        raise error from None


def _open(path: str) -> BinaryIO:
    return open_object(path) if is_s3(path) else Path(path).open("rb")
