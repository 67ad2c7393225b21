"""The index of a complete partition, as far as both daemons read it."""

from __future__ import annotations

from typing import Any, Final

import msgpack

from penstock.errors import StoreCorrupt
from penstock.storage.framing import FrameFormat, decode_frame

INDEX_FORMAT: Final = FrameFormat("an index of a result partition", b"PSTKPART", 2)
"""Version 1 knew Arrow files only."""


def index_totals(content: bytes, path: str) -> tuple[int, int]:
    """Rows and bytes of all files that an index names.

    Raises:
        StoreCorrupt: it is not what was written.
    """
    _, payload = decode_frame(INDEX_FORMAT, content, path)
    try:
        fields: Any = msgpack.unpackb(payload, raw=False)
        files = [file for part in fields["subpartitions"] for file in part["files"]]
        return sum(int(file[2]) for file in files), sum(int(file[3]) for file in files)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise StoreCorrupt(f"{path} does not make sense: {error!r}") from error
