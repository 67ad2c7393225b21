"""Which version of Penstock runs here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def penstock_version() -> str:
    """The installed version, "unknown" in a source tree that was not installed."""
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "unknown"
