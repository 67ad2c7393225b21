"""Which paths objects may have: what keeps every store's objects below its root.

A path is one or more parts joined by ``/``. No part is empty or begins with a dot: ``.`` and ``..``
never leave the store, and hidden names belong to the store itself (temporary and lock files).
"""

from __future__ import annotations

from typing import Final

PART_BYTES_MAX: Final = 240
"""What file systems take, 255, less what hidden names beside it add."""


def check_path(path: str) -> None:
    """Refuses what is no object's path.

    Raises:
        ValueError: it is not.
    """
    for part in path.split("/"):
        _check_part(path, part)


def check_prefix(prefix: str) -> None:
    """Refuses what no object's path can begin with; "" is the beginning of all.

    Raises:
        ValueError: it is refused.
    """
    directory, slash, beginning = prefix.rpartition("/")
    if slash:
        check_path(directory)
    if beginning:
        _check_part(prefix, beginning)


def _check_part(path: str, part: str) -> None:
    if not part:
        raise ValueError(f"{path!r} is no object's path: write parts with one '/' between them")
    if part.startswith("."):
        raise ValueError(f"{path!r} is no object's path: a part must not begin with a dot")
    if "\0" in part:
        raise ValueError(f"{path!r} is no object's path: it contains a zero byte")
    if len(part.encode(errors="surrogatepass")) > PART_BYTES_MAX:
        raise ValueError(f"{path!r} is no object's path: a part is too long")
