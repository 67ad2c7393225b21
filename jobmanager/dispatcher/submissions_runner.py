"""Submissions under way: those of one job id one behind another, and each to its end, whatever becomes of its client.

Invariant: of one job id one submission at a time is worked on. So what it finds claimed for its job is its own, and
what it gives back is nobody else's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

HasGone = Callable[[], bool]
"""Whether the client of a submission waits for it no more."""


@dataclass(slots=True)
class _Turn:
    """Of the submissions of one job id."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    count: int = 0


class SubmissionsRunner:
    """All of one JobManager.

    Args:
        start: runs something beside, until the JobManager ends.
    """

    def __init__(self, start: Callable[[Coroutine[None, None, None]], None]) -> None:
        self._start = start
        self._turns: dict[str, _Turn] = {}
        self._log = structlog.get_logger(__name__)

    async def take(
        self, job_id: str, work: Callable[[HasGone], Coroutine[None, None, None]]
    ) -> None:
        """Works on a submission behind the earlier ones of its id; goes on where nobody waits any more.

        Raises: as ``work``.
        """
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._start(self._answer(job_id, work, answer))
        await answer

    async def _answer(
        self,
        job_id: str,
        work: Callable[[HasGone], Coroutine[None, None, None]],
        answer: asyncio.Future[None],
    ) -> None:
        try:
            async with self.turn(job_id):
                await work(answer.cancelled)
        except Exception as error:  # noqa: BLE001 - raised by who waits for it
            if not answer.done():
                answer.set_exception(error)
            else:
                self._log.warning("job.not_accepted", job_id=job_id, reason=str(error))
        else:
            if not answer.done():
                answer.set_result(None)
        finally:
            answer.cancel()  # where the JobManager ends; else it is answered

    @asynccontextmanager
    async def turn(self, job_id: str) -> AsyncIterator[None]:
        """While one has it, no submission of that id is worked on."""
        turn = self._turns.setdefault(job_id, _Turn())
        turn.count += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.count -= 1
            if not turn.count:
                del self._turns[job_id]
