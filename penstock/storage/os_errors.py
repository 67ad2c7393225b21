"""What a failed call of the operating system means for a store, in words that say what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

from penstock.errors import StoreTransient

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM})


def store_error(what: str, path: Path, error: OSError) -> StoreTransient:
    """The error to raise: the same call may succeed once somebody has acted.

    Args:
        what: what could not be done with the file: "written".
    """
    return StoreTransient(f"{path} cannot be {what}: {_reason(error)}; {_advice(error)}")


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _advice(error: OSError) -> str:
    number = error.errno
    if number in _FULL:
        return "free space on the disk, or use another directory"
    if number in _DENIED:
        return f"give user {os.geteuid()} access to it"
    if number == errno.EROFS:
        return "mount the file system writable, or use another directory"
    if number in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files (ulimit -n)"
    if number == errno.EFBIG:
        return "raise the limit of the size of files (ulimit -f)"
    if number in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY):
        return "something that is no object lies at that path: move it away"
    return "it is tried again; see whether the disk or the mount has a fault"
