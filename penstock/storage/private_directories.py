"""Directories that only their user may look into, and files that only he may read; names that survive a crash."""

from __future__ import annotations

import os
import secrets
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


def replace_text(path: Path, text: str, mode: int) -> None:
    """Writes a file beside a path and puts it there; others may write in the directory, and no link of theirs is followed.

    Raises:
        OSError: it cannot be written; nothing is left.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, mode), "w", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            temporary.replace(path)
        except BaseException:
            temporary.unlink()
            raise


def sync_directory(directory: Path) -> None:
    """Makes names in a directory survive a crash of the machine.

    Raises:
        OSError: it cannot be synchronised.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
