"""One JobManager uses a directory at a time: what decides who leads where there is no election."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

from penstock.errors import ConfigurationError
from penstock.storage.private_directories import make_private

_EARLIER: Final = "leader_epoch"


class DirectoryLock:
    """The lock of a JobManager's directory; the kernel gives it back when the holder dies.

    Args:
        directory: made when missing, private to its user: graphs hold users' code.

    Raises:
        ConfigurationError: another JobManager uses the directory, it cannot be written, or holds jobs of a Penstock
            that kept them otherwise.
    """

    def __init__(self, directory: Path) -> None:
        try:
            make_private(directory)
            self.descriptor = os.open(
                directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
        except OSError as error:
            raise ConfigurationError(
                f"the JobManager cannot write to {directory}: {error.strerror}; choose another --dir"
            ) from error
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self.descriptor)
            raise ConfigurationError(
                f"another JobManager is running in {directory}: stop it or choose another --dir"
            ) from error

        if (directory / _EARLIER).exists():
            os.close(self.descriptor)
            raise ConfigurationError(
                f"{directory} holds the jobs of an earlier version of Penstock, which this one cannot read: stop "
                "them with savepoints under that version, choose another --dir, and start them from there"
            )

    def close(self) -> None:
        """Lets another JobManager use the directory."""
        os.close(self.descriptor)
