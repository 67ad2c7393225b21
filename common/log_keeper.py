"""Keeps the logs of a daemon within a size, whoever writes them.

Every log is opened for appending, so it can be cut under its writers: what is there moves to a file with ``.1`` behind
its name, in place of what that held, and the log begins anew. (Lines that come in between are lost, as with
logrotate's ``copytruncate``.) Where all logs together are too large, or too many, those that were written to longest ago go first; one
that may still be written to is emptied instead, since a file without a name would grow unseen.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from common.log import get_logger

OLDER = ".1"
_INTERVAL_S = 2.0
_SHARE_MAX = 8
"""One file is cut when it is larger than this part of the whole: it and what was cut are a quarter."""
_BLOCK_BYTES = 4096
FILES_MAX = 10_000
"""Each is looked at every time: small jobs leave small logs, and the time and memory of that has a bound as well."""


class LogKeeper:
    """Cuts and removes logs.

    Args:
        find: the logs, those that were cut included.
        size_max_bytes: of all of them.
        is_open: whether one may still be written to.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[Path]],
        size_max_bytes: int,
        is_open: Callable[[Path], bool],
    ) -> None:
        self._find = find
        self._size_max_bytes = size_max_bytes
        self._is_open = is_open
        self._log = get_logger(__name__)

    async def run(self) -> None:
        """Keeps them within the size until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self.look)
            except OSError as error:
                self._log.warning("logs.not_kept", reason=str(error))
            await asyncio.sleep(_INTERVAL_S)

    def look(self) -> None:
        """Cuts and removes what is too large now."""
        found: list[tuple[float, int, Path]] = []
        for path in self._find():
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            size_bytes = status.st_size
            if path.suffix != OLDER and size_bytes > self._size_max_bytes // _SHARE_MAX:
                self._cut(path)
                found.append((status.st_mtime, size_bytes, _older(path)))
                size_bytes = 0
            found.append((status.st_mtime, size_bytes, path))
        # Also an empty file takes its place in a directory.
        found = [(time, max(size, _BLOCK_BYTES), path) for time, size, path in found]
        total_bytes, count = sum(size for _, size, _ in found), len(found)
        for _, size_bytes, path in sorted(found):
            if total_bytes <= self._size_max_bytes and count <= FILES_MAX:
                return
            self._remove(path)
            total_bytes, count = total_bytes - size_bytes, count - 1

    def _cut(self, path: Path) -> None:
        part = path.with_name(f"{path.name}.part")
        # Never more than is to stay, however fast its writers are.
        with path.open("rb") as source, part.open("wb") as target:
            os.fchmod(target.fileno(), 0o600)
            size_bytes = os.fstat(source.fileno()).st_size
            source.seek(max(0, size_bytes - self._size_max_bytes // _SHARE_MAX))
            shutil.copyfileobj(source, target)
        os.truncate(path, 0)
        part.replace(_older(path))

    def _remove(self, path: Path) -> None:
        if path.suffix != OLDER and self._is_open(path):
            os.truncate(path, 0)
            return
        path.unlink(missing_ok=True)
        directory = path.parent
        if not any(directory.iterdir()):
            directory.rmdir()


def _older(path: Path) -> Path:
    return path.with_name(path.name + OLDER)
