"""Paths of files as sources know them: whole, and the same however they are spelt.

Files are known by their paths in state, so that whoever names them must come to the same text.
"""

from __future__ import annotations

import os
from pathlib import Path

from penstock.connectors.globs import has_wildcard
from penstock.errors import JobRejected
from penstock.storage.open_store import is_s3
from penstock.storage.store_names import has_scheme


def whole_path(path: str | os.PathLike[str]) -> str:
    """What a user calls files or a directory, as every process understands it: a relative path is meant from here.

    Dots in it stay: ``normal_path`` takes them out.

    Raises:
        JobRejected: it is no path, or one of nothing that can be read.
    """
    if not isinstance(path, str | os.PathLike):
        raise JobRejected(f"a path is a text or a pathlib.Path, got {path!r}")
    text = os.fspath(path)
    has_scheme(text)  # s3:/bucket would be a directory of this one
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "file":
        text = rest
    elif is_s3(text):
        bucket, _, key = rest.partition("/")
        if not bucket:
            raise JobRejected(f"{text}: names no bucket; write s3://bucket/prefix")
        return f"s3://{bucket}/{key.strip('/')}".rstrip("/")
    elif separator:
        raise JobRejected(
            f"{text}: there are no files at {scheme}://; name a local path or s3://bucket/prefix"
        )
    if not text:
        raise JobRejected("the path is empty")
    return str(Path(text).expanduser().absolute())


def normal_path(path: str) -> str:
    """A whole path without ``..``, ``.`` and slashes that say nothing; links in it stay as they are spelt.

    What is above a link, or above what a wildcard matches, only the file system knows: such a ``..`` stays, too. Names
    of objects are what they are.

    Example:
        >>> normal_path("/srv/live/../in//"), normal_path("//srv/./*/../in"), normal_path("s3://bucket/a/../b")
        ('/srv/in', '/srv/*/../in', 's3://bucket/a/../b')
    """
    if is_s3(path):
        return path
    kept: list[str] = []
    for part in path.split("/"):
        if part in ("", "."):
            continue
        if part != ".." or (
            kept and (kept[-1] == ".." or has_wildcard(kept[-1]) or _is_link(kept))
        ):
            kept.append(part)
        elif kept:
            kept.pop()
    return "/" + "/".join(kept)


def _is_link(parts: list[str]) -> bool:
    # Path.is_symlink raises below a directory that may not be entered.
    return os.path.islink("/" + "/".join(parts))  # noqa: PTH114
