"""What dead attempts have left in the checkpoint store is removed behind a restart, and tried until it is gone.

A sweep that fails is nobody else's before the next restart, which may be far away. What it removes stays removable:
checkpoints that complete meanwhile refer to none of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from penstock.errors import Fenced, StreamError

_LANE: Final = "checkpoint sweeps"
_WAITING_MAX: Final = 8
"""Sweeps of so many restarts wait for the store; the oldest are given up, and the next start of the whole job
does what they have not done."""
_FIRST_PAUSE_S: Final = 0.5
_LAST_PAUSE_S: Final = 30.0

Sweep = Callable[[], None]


class SweepsRunner:
    """The sweeps of one job, one at a time.

    Args:
        call: runs a blocking call to the store; raises a StreamError where it fails or the job has ended.
        in_order: runs actions of one lane one after the other.
    """

    def __init__(
        self,
        job_id: str,
        call: Callable[[str, Sweep], Awaitable[None]],
        in_order: Callable[[str, Callable[[], Awaitable[None]]], None],
        ended: asyncio.Event,
    ) -> None:
        self._log = structlog.get_logger(__name__).bind(job_id=job_id)
        self._call = call
        self._in_order = in_order
        self._ended = ended
        self._waiting: deque[Sweep] = deque()

    def begin(self, sweep: Sweep) -> None:
        """Takes a sweep behind those that were given before."""
        if len(self._waiting) == _WAITING_MAX:
            self._waiting.popleft()
            self._log.warning("checkpoint.sweep_given_up", reason="newer ones wait for the store")
        self._waiting.append(sweep)
        if len(self._waiting) == 1:
            self._in_order(_LANE, self._work)

    async def _work(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while self._waiting and not self._ended.is_set():
            sweep = self._waiting[0]
            try:
                await self._call("sweep", sweep)
            except Fenced as error:
                self._log.warning("checkpoint.not_swept", reason=str(error))
            except StreamError as error:
                self._log.warning("checkpoint.not_swept", retry_s=pause_s, reason=str(error))
                await self._pause(pause_s)
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
                continue
            pause_s = _FIRST_PAUSE_S
            if self._waiting and self._waiting[0] is sweep:
                self._waiting.popleft()
        self._waiting.clear()

    async def _pause(self, pause_s: float) -> None:
        try:
            await asyncio.wait_for(self._ended.wait(), pause_s)
        except TimeoutError:
            return
