"""The TaskManager's copies of snapshots: kept over restarts of the daemon, removed when their job leaves.

Copies are a cache, so removing too many is harmless. They go when the last slot of their job is freed, and
when no checkpoint of their subtask has completed here for ``taskmanager.local-state.retention``: that
finds the jobs that ended while the daemon was away, subtasks that moved, and TaskManagers that are gone.

Each TaskManager has a directory ``local-state-<id>`` in each configured one, the same after a restart. A
configured directory may hold other things: nothing is removed there but what looks like our copies, in
directories of that name.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from common.clock import Clock
from common.log import get_logger
from common.names import require_name
from taskmanager.snapshot.local_copies_store import remove_copies

_INTERVAL_S = 60.0
_PREFIX = "local-state-"


def local_state_roots(
    configured: Sequence[Path], directory: Path, taskmanager_id: str
) -> list[Path]:
    """The directories for copies: the same for every daemon of this id.

    Args:
        configured: ``execution.checkpointing.local-backup.dirs``, [] = below ``directory``.
        directory: where the work directories of TaskManagers are made.
    """
    parents = configured or [directory / "local-state"]
    return [parent / f"{_PREFIX}{taskmanager_id}" for parent in parents]


class LocalStateKeeper:
    """Removes copies that nobody will read.

    Args:
        roots: of this TaskManager; those of the same prefix next to them belong to others of the host.
        clock: tells how old copies are.
        retention_ms: how long copies are kept that nobody touches.
        has_slots: whether a job holds slots here.
    """

    def __init__(
        self,
        roots: Sequence[Path],
        clock: Clock,
        retention_ms: int,
        has_slots: Callable[[str], bool],
    ) -> None:
        self._roots = roots
        self._clock = clock
        self._retention_ms = retention_ms
        self._has_slots = has_slots
        self._log = get_logger(__name__)

    async def run(self) -> None:
        """Looks once a minute, until cancelled."""
        while True:
            try:
                await self.look()
            except OSError as error:
                self._log.warning("local_state.not_read", reason=str(error))
            await asyncio.sleep(_INTERVAL_S)

    async def look(self) -> None:
        """Removes what nobody has touched for long.

        Raises:
            OSError: the disk does not let it.
        """
        for path in await asyncio.to_thread(self._sweep):
            self._log.info("local_state.swept", path=str(path))

    async def slots_freed(self, job_id: str) -> None:
        """Removes the copies of a job that holds no slots here any more."""
        require_name("job id", job_id)
        if not self._has_slots(job_id):
            await asyncio.to_thread(self._remove_job, job_id)

    def _remove_job(self, job_id: str) -> None:
        for root in self._roots:
            shutil.rmtree(root / job_id, ignore_errors=True)

    def _sweep(self) -> list[Path]:
        """Of dead TaskManagers too: the names of those that nobody chose are not used again."""
        swept: list[Path] = []
        oldest_s = (self._clock.now_ms() - self._retention_ms) / 1000
        for parent in {root.parent for root in self._roots}:
            for root in _directories(parent):
                if not root.name.startswith(_PREFIX):
                    continue
                for job in _directories(root):
                    old = [path for path in _directories(job) if _is_older(path, oldest_s)]
                    swept += filter(remove_copies, old)
                    _remove_if_empty(job)
                _remove_if_empty(root)
        return swept


def _directories(parent: Path) -> list[Path]:
    """Directories in it, symbolic links to some left out; [] = it is gone, or not ours to read."""
    try:
        with os.scandir(parent) as entries:
            return [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _is_older(path: Path, time_s: float) -> bool:
    try:
        return path.stat().st_mtime < time_s
    except FileNotFoundError:
        return False


def _remove_if_empty(directory: Path) -> None:
    try:
        directory.rmdir()
    except OSError:
        return  # it is in use
