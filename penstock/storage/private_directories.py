"""Directories that only their user may look into."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def make_private(directory: Path) -> None:
    """Makes a directory with mode 0700, and takes from one of this user's what others may do in it.

    Raises:
        OSError: it cannot be made.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077:
        directory.chmod(0o700)


def is_private(directory: Path) -> bool:
    """Whether it is a directory of this user's that nobody else may look into."""
    try:
        status = directory.lstat()
    except OSError:
        return False
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_own and not stat.S_IMODE(status.st_mode) & 0o077
