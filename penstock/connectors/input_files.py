"""Files that are read, on a file system or on S3."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from penstock.connectors.objects import open_object
from penstock.storage.open_store import is_s3


def open_input(path: str) -> BinaryIO:
    """A file for reading; where it is far away, by ranges.

    Raises:
        OSError: it cannot be opened.
    """
    return open_object(path) if is_s3(path) else Path(path).open("rb")
