"""Directories that only their user may look into, and files that only he may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


def make_private(directory: Path) -> None:
    """Makes a directory with mode 0700, and takes from one of this user's what others may do in it.

    Raises:
        OSError: it cannot be made.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077:
        directory.chmod(0o700)


def make_directories(directory: Path, mode: int = 0o700) -> None:
    """Makes a directory and what is missing above it, each with this mode; what is there keeps its own.

    (``Path.mkdir`` gives those above it the mode of the umask, which in slots is the user's.)

    Raises:
        OSError: it cannot be made.
    """
    try:
        directory.mkdir(mode, exist_ok=True)
    except FileNotFoundError:
        if directory == directory.parent:
            raise
        make_directories(directory.parent, mode)
        directory.mkdir(mode, exist_ok=True)


def open_private(path: Path) -> BinaryIO:
    """A file to be written, of mode 0600 where it is new.

    Raises:
        OSError: it cannot be opened.
    """
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600))


def is_private(directory: Path) -> bool:
    """Whether it is a directory of this user's that nobody else may look into."""
    try:
        status = directory.lstat()
    except OSError:
        return False
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_own and not stat.S_IMODE(status.st_mode) & 0o077
