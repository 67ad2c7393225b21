"""The one way from the name of a store, as configurations and commands have it, to the store.

A store is named by the path of a directory, also as ``file:///path``, or by ``s3://bucket/prefix``. Other
kinds of stores are added here, and nowhere else.

How S3 is reached is a matter of the process, not of a job: where a process starts it says so once, with
``use_s3``, and whoever opens a store by its name needs to know nothing of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from penstock.errors import ConfigurationError
from penstock.storage.local_store import LocalStore
from penstock.storage.object_store import ObjectStore
from penstock.storage.s3.bucket import S3Bucket
from penstock.storage.s3.s3_store import S3Store
from penstock.storage.s3.settings import S3Settings
from penstock.storage.store_names import SCHEME, has_scheme, no_store

_s3: Callable[[], S3Settings] = S3Settings


def use_s3(settings: Callable[[], S3Settings]) -> None:
    """Says how this process reaches S3.

    Args:
        settings: asked for when a store there is opened.
    """
    global _s3  # noqa: PLW0603 - of the process, as its environment is
    _s3 = settings


def s3_settings() -> S3Settings:
    """How this process reaches S3."""
    return _s3()


def open_store(uri: str, *, is_private: bool = True) -> ObjectStore:
    """The store of that name; nothing is read or written yet.

    Args:
        uri: its name.
        is_private: as of ``LocalStore``; a bucket's policies are somebody else's.

    Raises:
        ConfigurationError: there is no such kind of store.
    """
    scheme = SCHEME.match(uri) if has_scheme(uri) else None
    if scheme is None:
        return LocalStore(Path(uri), is_private=is_private)
    path = uri[scheme.end() :]
    kind = scheme[1].lower()
    if kind == "file" and path.startswith("/"):
        return LocalStore(Path(path), is_private=is_private)
    if kind == "s3":
        bucket, _, prefix = path.partition("/")
        prefix = prefix.strip("/")
        if bucket and "//" in prefix:
            single = re.sub("/+", "/", prefix)
            raise ConfigurationError(
                f"{uri!r} has an empty part in its prefix, between two slashes, where nothing can be stored: "
                f"write s3://{bucket}/{single}"
            )
        if bucket:
            return S3Store(bucket, prefix, _s3())
    raise no_store(uri)


def directory_of(store: ObjectStore) -> Path | None:
    """The directory whose files the objects of a store are, for who hands them to others; None = they are no files."""
    return store.root if isinstance(store, LocalStore) else None


def is_s3(uri: str) -> bool:
    """Whether it names something on S3."""
    return uri[:5].lower() == "s3://"


def open_bucket(uri: str) -> tuple[S3Bucket, str]:
    """The bucket of ``s3://bucket/key``, and the key, which may be "".

    Raises:
        ConfigurationError: it names no bucket.
    """
    bucket, _, key = uri[len("s3://") :].partition("/")
    if not is_s3(uri) or not bucket:
        raise ConfigurationError(f"{uri!r} names no bucket: write s3://bucket/prefix")
    return S3Bucket(bucket, _s3()), key


def place_of(uri: str) -> str:
    """The one name of a place that may be spelt in several ways: links are followed. May block.

    Example:
        >>> place_of("file:///srv/kept/../kept/one/"), place_of("S3://bucket//prefix/")
        ('/srv/kept/one', 's3://bucket/prefix')
    """
    scheme = SCHEME.match(uri)
    if scheme is None:
        return os.path.realpath(uri) if uri else uri
    kind, path = scheme[1].lower(), uri[scheme.end() :]
    if kind == "file" and path.startswith("/"):
        return os.path.realpath(path)
    bucket, _, prefix = path.partition("/")
    return f"{kind}://{bucket}/{prefix.strip('/')}".rstrip("/")
