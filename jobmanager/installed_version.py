"""Which version of Penstock runs here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final


def _found() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "unknown"


_VERSION: Final = _found()
"""Looked for once, as this is imported: directories are listed for it."""


def penstock_version() -> str:
    """The installed version, "unknown" in a source tree that was not installed."""
    return _VERSION
