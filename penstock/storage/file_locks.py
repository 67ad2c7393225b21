"""Locks between processes: on a file that may be removed while others wait for it, or on whatever is open."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final, Self

LOCK_WAIT_MAX_S: Final = 10.0
_POLL_S: Final = 0.005


def lock(descriptor: int, path: Path, deadline: float) -> None:
    """Locks what is open, exclusively.

    Args:
        descriptor: of a file or a directory.
        path: its name, for the error.
        deadline: monotonic time until which to wait for another holder.

    Raises:
        TimeoutError: another holder kept it for longer.
        OSError: it cannot be locked.
    """
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{path} has been locked by another process for too long: is one of them paused?"
                ) from None
            time.sleep(_POLL_S)


class LockedFile:
    """Holds the lock within a ``with`` block; the kernel gives it back when the holder dies.

    The holder may unlink the file: whoever waited for it then finds that the lock it got is on a file
    without a name, and starts again with the file that has it.

    Args:
        path: the lock file, in a directory that exists; made where it is missing.
        wait_max_s: how long to wait for another holder.
        mode: of the file where it is made.

    Raises:
        TimeoutError: another holder kept it for longer.
        OSError: the file cannot be opened or locked.
    """

    def __init__(self, path: Path, wait_max_s: float = LOCK_WAIT_MAX_S, mode: int = 0o600) -> None:
        self._path = path
        self._wait_max_s = wait_max_s
        self._mode = mode
        self._descriptor = -1

    def __enter__(self) -> Self:
        deadline = time.monotonic() + self._wait_max_s
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, self._mode)
            try:
                lock(descriptor, self._path, deadline)
                if self._has_name(descriptor):
                    self._descriptor = descriptor
                    return self
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def __exit__(self, *_: object) -> None:
        # A child that was forked meanwhile has the descriptor too: closing alone would not do.
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            os.close(self._descriptor)

    def _has_name(self, descriptor: int) -> bool:
        try:
            named = self._path.stat()
        except FileNotFoundError:
            return False
        held = os.fstat(descriptor)
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)
