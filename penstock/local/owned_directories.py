"""Directories that live as long as the daemon that owns them.

Each holds a lock file that its owner keeps locked; the kernel unlocks it when the owner ends, however
it ends. So a directory whose lock is free is left over from a dead process and may be removed, also
when that process lived in another pid namespace.

Daemons that start at the same time look at each other's directories. Who makes one, or moves a dead one out of the
way, holds a lock on the directory that they are in, so that nobody takes a look for an owner, or removes
what has just been made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from penstock.errors import ConfigurationError
from penstock.storage.file_locks import LOCK_WAIT_MAX_S, lock

_LOCK_NAME = ".lock"
_DEAD_PREFIX = ".dead-"
_RUNTIME_PREFIX = "penstock-"
_SOCKET_PATH_MAX_BYTES = 100
_SOCKET_NAME_MAX_BYTES = len("/4294967295.sock")


class OwnedDirectory:
    """A directory of this process, removed by ``remove`` or, later, by a sweep."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, path: Path) -> Self:
        """Makes the directory, private and locked; what a dead process left under its name goes.

        Raises:
            ConfigurationError: a living process owns it, or it cannot be made.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path.parent):
                dead = _set_aside_if_dead(path) if path.exists() else None
                if path.exists():
                    raise ConfigurationError(
                        f"{path} belongs to a running process: choose another taskmanager.id or --dir"
                    )
                # Made under another name, so that no sweep finds it without its lock.
                temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=path.parent))
                own = os.open(temporary / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
                temporary.rename(path)
        except OSError as error:
            raise ConfigurationError(f"the directory {path} cannot be made: {error}") from error
        if dead is not None:
            shutil.rmtree(dead, ignore_errors=True)
        return cls(path, own)

    def remove(self) -> None:
        """Removes the directory and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def create_runtime_directory(name: str) -> OwnedDirectory:
    """A private directory for Unix sockets, with a path short enough for them.

    Raises:
        ConfigurationError: neither the temporary directory nor /tmp will do.
    """
    for parent in (Path(tempfile.gettempdir()), Path("/tmp")):
        path = parent / f"{_RUNTIME_PREFIX}{name}"
        if len(os.fsencode(path)) + _SOCKET_NAME_MAX_BYTES < _SOCKET_PATH_MAX_BYTES:
            return OwnedDirectory.create(path)
    raise ConfigurationError(f"no directory for sockets has a short enough path: {name!r} is long")


def sweep_runtime_directories() -> list[Path]:
    """Removes the socket directories of this user's dead processes; returns what was removed."""
    parents = {Path(tempfile.gettempdir()), Path("/tmp")}
    return [path for parent in parents for path in sweep_owned_directories(parent, _RUNTIME_PREFIX)]


def sweep_work_directories(
    directory: Path, see: Callable[[Path], None] = lambda _: None
) -> list[Path]:
    """Removes the work directories of dead TaskManagers; returns what was removed.

    Args:
        see: is shown each of them before.
    """
    return sweep_owned_directories(directory, "taskmanager-", see)


def sweep_owned_directories(
    parent: Path, prefix: str, see: Callable[[Path], None] = lambda _: None
) -> list[Path]:
    """Removes those of this user's dead processes whose names begin with ``prefix``.

    Args:
        see: is shown each of them before it goes, where it lies by then.

    Returns:
        What was removed.
    """
    swept = []
    for path in sorted(parent.glob(f"{prefix}*")):
        if not _is_own(path):
            continue
        try:
            with _locked(parent):
                dead = _set_aside_if_dead(path)
        except TimeoutError:
            break  # whoever holds it is at this too, and so is the next daemon that starts
        if dead is not None:
            swept.append(path)
            see(dead)
            shutil.rmtree(dead, ignore_errors=True)
    for dead in parent.glob(f"{_DEAD_PREFIX}*"):  # of a sweep that was killed, or is under way
        if _is_own(dead):
            shutil.rmtree(dead, ignore_errors=True)
    return swept


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keeps others from making or sweeping owned directories in it.

    Raises:
        TimeoutError: somebody else does so for too long.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock(descriptor, directory, time.monotonic() + LOCK_WAIT_MAX_S)
        yield
    finally:
        # A child that was forked meanwhile has the descriptor too: closing alone would not do.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _is_own(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and path.is_dir() and not path.is_symlink()


def _set_aside_if_dead(path: Path) -> Path | None:
    """Moves the directory of a dead process out of the way; None = it lives, or is none of ours."""
    try:
        descriptor = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return path.rename(path.parent / f"{_DEAD_PREFIX}{secrets.token_hex(8)}")
    except BlockingIOError:
        return None
    finally:
        os.close(descriptor)
