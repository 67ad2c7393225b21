"""Files on S3 as sources see them: which objects a path names, and how one is read.

``s3://bucket/a`` is the object of that name where there is one, else all objects below ``a/``; with wildcards it
is a glob, whose ``*`` goes no further than the next ``/``. An object's ETag is its identity. Errors come as those of the operating system do.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache
from typing import BinaryIO, Protocol, cast

from penstock.connectors.globs import has_wildcard, is_hidden
from penstock.errors import StoreTransient
from penstock.storage.open_store import open_bucket
from penstock.storage.ranged_stream import RangedStream
from penstock.storage.s3.bucket import ObjectReplacedError
from penstock.storage.s3.listing import FoundObject
from penstock.storage.s3.ranges import ObjectRanges

_BUFFER_BYTES = 64 << 10


def is_object(path: str) -> bool:
    """Whether an object has exactly this name.

    Raises:
        OSError: it cannot be looked at.
    """
    bucket, key = open_bucket(path)
    with as_os_errors(path):
        return bool(key) and bucket.find(key) is not None


def objects_of(path: str, beside: str) -> tuple[list[FoundObject], list[str]]:
    """All objects that a path names, in the order of their keys; of a prefix there may be none.

    Args:
        beside: the name of hidden objects, whose keys are returned besides.

    Raises:
        OSError: they cannot be listed.
    """
    bucket, key = open_bucket(path)
    with as_os_errors(path):
        exact = bucket.find(key) if key else None
        if exact is not None:
            return [exact], []
        parts = key.split("/") if key else []
        fixed = next((i for i, part in enumerate(parts) if has_wildcard(part)), len(parts))
        prefix = "".join(f"{part}/" for part in parts[:fixed])
        listed = bucket.below(prefix)
    objects = [
        found
        for found in listed
        if not found.key.endswith("/")  # what consoles make in the place of directories
        and _matches(parts[fixed:], found.key[len(prefix) :].split("/"))
    ]
    return objects, [one.key for one in listed if one.key.endswith(f"/{beside}")]


def _matches(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether a key is what a pattern matches, or below it; hidden names are matched by none."""

    @cache
    def rest_matches(at: int, begin: int) -> bool:
        if at == len(pattern):
            return not any(map(is_hidden, parts[begin:]))
        if begin == len(parts):
            return False
        wanted, part = pattern[at], parts[begin]
        if wanted == "**":
            return rest_matches(at + 1, begin) or (
                not is_hidden(part) and rest_matches(at, begin + 1)
            )
        is_taken = (
            not is_hidden(part) and fnmatchcase(part, wanted)
            if has_wildcard(wanted)
            else part == wanted
        )
        return is_taken and rest_matches(at + 1, begin + 1)

    return rest_matches(0, 0)


def open_object(path: str) -> BinaryIO:
    """An object for reading, range by range.

    Raises:
        FileNotFoundError: there is none of the name.
        OSError: it cannot be looked at.
    """
    bucket, key = open_bucket(path)
    with as_os_errors(path):
        found = bucket.find(key)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "no such object", path)
    stream = object_stream(path, ObjectRanges(bucket, found), found.size_bytes)
    return cast("BinaryIO", io.BufferedReader(stream, _BUFFER_BYTES))


class Ranges(Protocol):
    """What reads an object."""

    def read(self, offset: int, length: int) -> bytes:
        """Bytes from an offset; fewer at the end of the object."""


def object_stream(path: str, ranges: Ranges, size_bytes: int) -> RangedStream:
    """An object as a seekable stream, whose errors are those of the operating system."""

    def read(offset: int, length: int) -> bytes:
        with as_os_errors(path):
            return ranges.read(offset, length)

    return RangedStream(read, size_bytes)


@contextmanager
def as_os_errors(path: str) -> Iterator[None]:
    """What a store says, as an error of the operating system."""
    try:
        yield
    except StoreTransient as error:
        raise OSError(errno.EIO, str(error), path) from error
    except ObjectReplacedError as error:
        raise OSError(errno.ESTALE, "another object has its name now", path) from error
