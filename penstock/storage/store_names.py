"""Names of stores: the path of a directory, also as ``file:///path``, or ``s3://bucket/prefix``; what they are of is opened elsewhere."""

from __future__ import annotations

import os
import re
from typing import Final

from penstock.errors import ConfigurationError

SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_MISSPELT: Final = re.compile(r"(file|s3[an]?):(?!//)", re.IGNORECASE)


def has_scheme(uri: str) -> bool:
    """Whether a name says what kind of store it is; else it is a path.

    Raises:
        ConfigurationError: it begins as such a name does, and would be a directory called ``s3:``.
    """
    if _MISSPELT.match(uri):
        raise no_store(uri)
    return SCHEME.match(uri) is not None


def no_store(uri: str) -> ConfigurationError:
    """It names none."""
    return ConfigurationError(
        f"{uri!r} names no store: give the path of a directory, file:// and an absolute path, or "
        "s3://bucket/prefix"
    )


def whole_name(path: str | os.PathLike[str]) -> str:
    """What a user calls a store, as every process understands it: a relative path is meant from here.

    Raises:
        ConfigurationError: it is empty, or names nothing.

    Example:
        >>> whole_name("/srv/kept/../one/"), whole_name("s3://bucket/one/")
        ('/srv/one', 's3://bucket/one/')
    """
    text = os.fspath(path)
    if not text.strip():
        raise ConfigurationError("the path is empty: name a directory, or s3://bucket/prefix")
    if has_scheme(text):
        return text
    return os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111 - text in, text out


def without_slash(uri: str) -> str:
    """The same name without slashes at its end; those of a root stay, since without them it would be another place.

    Example:
        >>> without_slash("/srv/kept/"), without_slash("s3://bucket/"), without_slash("s3://"), without_slash("/")
        ('/srv/kept', 's3://bucket', 's3://', '/')
    """
    scheme = SCHEME.match(uri)
    start = scheme.end() if scheme else 0
    rest = uri[start:]
    return uri[:start] + (rest.rstrip("/") or rest[:1])


def substore(uri: str, name: str) -> str:
    """What the store is named whose objects are those of another one below ``name``.

    Example:
        >>> substore("s3://bucket/", "job"), substore("s3://", "job"), substore("/", "job")
        ('s3://bucket/job', 's3:///job', '/job')
    """
    scheme = SCHEME.match(uri)
    start = scheme.end() if scheme else 0
    return f"{uri[:start]}{uri[start:].rstrip('/')}/{name}"
