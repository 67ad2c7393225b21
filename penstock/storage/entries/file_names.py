"""What snapshots of databases call themselves and their files."""

from __future__ import annotations

from typing import Final

from penstock.pb import checkpoint_pb2

BACKEND: Final = "rocksdb"
"""What snapshots of databases say they are of."""
FORMAT_VERSION: Final = 4
FORMATS_READ: Final = (3, 4)
"""In 3 lists are not cut into chunks."""
SHARED_SUFFIX: Final = ".sst"
"""Files that never change once they are there."""


def local_name(file: checkpoint_pb2.StateFile) -> str:
    """What a file is called in the database's directory."""
    return file.name.rpartition("/")[2]
