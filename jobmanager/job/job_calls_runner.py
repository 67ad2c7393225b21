"""Calls of one job to the store of its checkpoints: bounded in time, and waited for by nobody once the job has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    async def run(
        self, what: str, work: Callable[[], _ResultT], until: asyncio.Future[None] | None = None
    ) -> _ResultT:
        """A call that nobody waits for any more once the job has ended, or ``until`` is done.

        Raises:
            StoreSilent: it takes too long, or is waited for no longer.
        """
        if not self.ended.is_set():
            try:
                with self._no_longer(until) as no_longer:
                    return await self.calls.run(what, work, no_longer)
            except StoreSilent:
                if not self.ended.is_set():
                    raise
        raise StoreSilent(f"job {self._job_id} has ended")

    async def pause(self, pause_s: float, until: asyncio.Future[None] | None = None) -> bool:
        """Waits, until ``until`` is done at most; False where the job has ended meanwhile."""
        if not self.ended.is_set():
            with self._no_longer(until) as no_longer:
                await asyncio.wait({no_longer}, timeout=pause_s)
        return not self.ended.is_set()

    async def pause_after(self, attempt: int, until: asyncio.Future[None] | None = None) -> bool:
        """Waits after a call that has said nothing, the longer the more of them there were; as ``pause`` does."""
        return await self.pause(pause_s(attempt), until)

    @contextmanager
    def _no_longer(self, until: asyncio.Future[None] | None) -> Iterator[asyncio.Future[None]]:
        """Done with the job's end, or with ``until``."""
        no_longer = asyncio.get_running_loop().create_future()

        def give_up(_: object) -> None:
            if not no_longer.done():
                no_longer.set_result(None)

        self._until_end[no_longer] = None
        if until is not None:
            until.add_done_callback(give_up)
        try:
            yield no_longer
        finally:
            del self._until_end[no_longer]
            if until is not None:
                until.remove_done_callback(give_up)

    def _note_calls(self) -> None:
        self._gauges.note_calls(self.calls.given_up, self.calls.hanging)


def pause_s(attempt: int) -> float:
    """How long to wait behind an attempt, counted from 0."""
    return min(_FIRST_PAUSE_S * 2 ** min(attempt, 16), _LAST_PAUSE_S)
