"""The one way from the name of a store, as configurations and commands have it, to the store.

A store is named by the path of a directory, also as ``file:///path``. Other kinds of stores are added here,
and nowhere else.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from penstock.errors import ConfigurationError
from penstock.storage.local_store import LocalStore
from penstock.storage.object_store import ObjectStore

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def open_store(uri: str) -> ObjectStore:
    """The store of that name; nothing is read or written yet.

    Raises:
        ConfigurationError: there is no such kind of store.
    """
    scheme = _SCHEME.match(uri)
    if scheme is None:
        return LocalStore(Path(uri))
    path = uri[scheme.end() :]
    if scheme[1].lower() == "file" and path.startswith("/"):
        return LocalStore(Path(path))
    raise ConfigurationError(
        f"{uri!r} names no store: give the path of a directory, or file:// and an absolute path"
    )


def substore(uri: str, name: str) -> str:
    """What the store is named whose objects are those of another one below ``name``."""
    return f"{uri.rstrip('/')}/{name}"
