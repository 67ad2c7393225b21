"""What a Spark driver notes of its session on a server of Spark Connect, for whoever outlives it.

The note is there before the session, and goes when that has been closed. Who finds one knows of a session that has been left:
the server goes on with what it has under way.
"""

from __future__ import annotations

from pathlib import Path

from penstock.storage.private_directories import open_private

SLOTS = "slots"
"""Of the work directory of a TaskManager: holds those of its slots."""

_NAME = "session"
_IN_SLOT = "spark/driver"


def note_session(directory: Path, address: str) -> None:
    """Notes a session that is about to be opened.

    Args:
        directory: of the driver's own files.
        address: that leads to the session; it may hold a token.
    """
    with open_private(directory / _NAME) as file:
        file.write(address.encode())


def forget_session(directory: Path) -> None:
    """The session has been closed; harmless where none is noted."""
    (directory / _NAME).unlink(missing_ok=True)


def noted_session(slot: Path) -> str:
    """The address of the session that a slot has left, "" = none."""
    try:
        return (slot / _IN_SLOT / _NAME).read_text()
    except FileNotFoundError:
        return ""
