"""Calls of one job to the store of its checkpoints: bounded in time, and waited for by nobody once the job has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from jobmanager.checkpoint.store_calls_runner import StoreCallsRunner, StoreSilent
from jobmanager.job.checkpoint_gauges import CheckpointGauges

_FIRST_PAUSE_S: Final = 0.5
_LAST_PAUSE_S: Final = 30.0
"""Between calls to a store that does not say what is needed."""

_ResultT = TypeVar("_ResultT")


class JobCallsRunner:
    """Makes the calls of one job.

    Args:
        timeout_ms: how long a call may take.
        gauges: are told of calls that were given up on.

    Attributes:
        calls: those that are made whether the job has ended or not.
        timeout_ms: how long each may take.
    """

    def __init__(self, job_id: str, timeout_ms: int, gauges: CheckpointGauges) -> None:
        self._job_id = job_id
        self._gauges = gauges
        self.timeout_ms = timeout_ms
        self.calls = StoreCallsRunner(
            f"job {job_id}", timeout_ms, self._note_calls, "execution.checkpointing.timeout"
        )
        self.ended = asyncio.Event()
        self._until_end: dict[asyncio.Future[None], None] = {}

    def end(self) -> None:
        """The job has ended."""
        self.ended.set()
        for waiting in self._until_end:
            if not waiting.done():
                waiting.set_result(None)

    async def run(self, what: str, work: Callable[[], _ResultT]) -> _ResultT:
        """A call that nobody waits for any more once the job has ended.

        Raises:
            StoreSilent: it takes too long, or the job has ended.
        """
        if self.ended.is_set():
            raise StoreSilent(f"job {self._job_id} has ended")
        no_longer = asyncio.get_running_loop().create_future()
        self._until_end[no_longer] = None
        try:
            return await self.calls.run(what, work, no_longer)
        finally:
            del self._until_end[no_longer]

    async def pause(self, pause_s: float) -> bool:
        """Waits; False where the job has ended meanwhile."""
        try:
            async with asyncio.timeout(pause_s):
                await self.ended.wait()
        except TimeoutError:
            return True
        return False

    async def pause_after(self, attempt: int) -> bool:
        """Waits after a call that has said nothing, the longer the more of them there were; False as of ``pause``."""
        return await self.pause(pause_s(attempt))

    def _note_calls(self) -> None:
        self._gauges.note_calls(self.calls.given_up, self.calls.hanging)


def pause_s(attempt: int) -> float:
    """How long to wait behind an attempt, counted from 0."""
    return min(_FIRST_PAUSE_S * 2 ** min(attempt, 16), _LAST_PAUSE_S)
