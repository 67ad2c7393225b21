"""Watches the free space under the spill directory and acts on it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from common.clock import Clock
from common.log import get_logger
from penstock.errors import StreamError
from taskmanager.daemon.disk_guard import DiskGuard, DiskLimits, DiskState
from taskmanager.partitions.spilling import Spilling

_INTERVAL_S = 1.0


class DiskFullError(StreamError):
    """So little is left on the disk that this TaskManager ends."""


class DiskGuardRunner:
    """Looks once a second.

    Args:
        limits: below which free space something is done.
        clock: measures how long slots have waited for space.
        set_spilling: tells every slot whether it may write to the directory.
    """

    def __init__(
        self,
        directory: Path,
        limits: DiskLimits,
        clock: Clock,
        set_spilling: Callable[[Spilling], Awaitable[None]],
    ) -> None:
        self._directory = directory
        self._limits = limits
        self._guard = DiskGuard(limits)
        self._clock = clock
        self._set_spilling = set_spilling
        self._log = get_logger(__name__)
        self.free_bytes = 0

    async def run(self) -> None:
        """Watches until cancelled.

        Raises:
            DiskFullError: less than ``taskmanager.spill.hard-min-free`` is left.
        """
        while True:
            await self.look()
            await asyncio.sleep(_INTERVAL_S)

    async def look(self) -> None:
        """Compares the free space with the limits, once.

        Raises:
            DiskFullError: see ``run``.
        """
        # One system call; a disk that does not answer holds up everything else as well.
        file_system = os.statvfs(self._directory)
        self.free_bytes = file_system.f_bavail * file_system.f_frsize
        if not self._guard.observe(self.free_bytes, self._clock.monotonic_ns() // 1_000_000):
            return
        match self._guard.state:
            case DiskState.FULL:
                raise DiskFullError(
                    f"{self.free_bytes} bytes are free on the disk of {self._directory}, less than "
                    f"taskmanager.spill.hard-min-free ({self._limits.hard_min_free_bytes}): free "
                    "space there, or use another taskmanager.spill.dir"
                )
            case DiskState.NEARLY_FULL:
                self._log.warning(
                    "spill.stopped",
                    directory=str(self._directory),
                    free_bytes=self.free_bytes,
                    min_free_bytes=self._limits.min_free_bytes,
                    reason="less than taskmanager.spill.min-free is free",
                )
                await self._set_spilling(Spilling.STOPPED)
            case DiskState.TOO_LONG:
                self._log.error(
                    "spill.given_up",
                    directory=str(self._directory),
                    free_bytes=self.free_bytes,
                    reason="no space came within taskmanager.spill.wait-timeout: blocking exchanges fail",
                )
                await self._set_spilling(Spilling.GIVEN_UP)
            case DiskState.ROOM:
                self._log.info(
                    "spill.resumed", directory=str(self._directory), free_bytes=self.free_bytes
                )
                await self._set_spilling(Spilling.ALLOWED)
