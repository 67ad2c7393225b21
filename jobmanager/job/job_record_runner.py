"""The record of one job, as its actor reads and writes it: one call after the other, on a thread of its own.

Invariant: attempt numbers are reserved, in blocks, before they are used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from jobmanager.failover.failure_cause import FailureCause
from jobmanager.rpc.graph_convert import cause_of_error
from jobmanager.stores.job_store import JobStore
from penstock.errors import Fenced, StreamError, Unrecoverable

_ATTEMPTS_RESERVED_AT_ONCE: Final = 16

_ResultT = TypeVar("_ResultT")


class JobRecordRunner:
    """Every method may raise what the store does.

    Args:
        jobs: has the record; None where the job ends with this JobManager.
    """

    def __init__(self, job_id: str, jobs: JobStore | None) -> None:
        self._job_id = job_id
        self._jobs = jobs
        self._attempts_end = 0
        self._thread = ThreadPoolExecutor(1, f"record-{job_id[:8]}")

    def close(self) -> None:
        """Nothing more will be asked."""
        self._thread.shutdown(wait=False)

    async def reserve_attempts(self, attempt: int) -> int:
        """Reserves numbers up to this one at least; returns the first that is not reserved."""
        return await self._run(lambda: self._reserved(attempt))

    async def note_commit(self) -> None:
        """The job begins to commit its output: it is not run again."""
        if (jobs := self._jobs) is not None:
            await self._run(lambda: jobs.note_commit(self._job_id))

    async def has_checkpoints(self) -> bool:
        """Whether there has been a HEAD."""
        jobs = self._jobs
        return jobs is not None and await self._run(lambda: jobs.has_checkpoints(self._job_id))

    async def note_checkpoints(self, root: str) -> None:
        """There is a HEAD from now on, in the checkpoint store of this root."""
        if (jobs := self._jobs) is not None:
            await self._run(lambda: jobs.note_checkpoints(self._job_id, root))

    async def repeated(self) -> bytes:
        """What is known of output that may be there twice."""
        jobs = self._jobs
        return b"" if jobs is None else await self._run(lambda: jobs.repeated(self._job_id))

    async def note_repeated(self, content: bytes) -> None:
        """Replaces what is known of output that may be there twice."""
        if (jobs := self._jobs) is not None:
            await self._run(lambda: jobs.note_repeated(self._job_id, content))

    async def note_operations(self, content: bytes) -> None:
        """Replaces what is known of operations."""
        if (jobs := self._jobs) is not None:
            await self._run(lambda: jobs.note_operations(self._job_id, content))

    def cause_of(self, error: StreamError, now_ms: int) -> FailureCause:
        """What the job fails with; an error that says that another JobManager leads is told to this one as well."""
        if not isinstance(error, Fenced):
            return cause_of_error(error, now_ms)
        if self._jobs is not None:
            self._jobs.met(error)
        taken = Unrecoverable(f"another JobManager has taken the job over: {error}")
        return cause_of_error(taken, now_ms)

    def _reserved(self, attempt: int) -> int:
        if self._jobs is not None and attempt >= self._attempts_end:
            end = attempt + _ATTEMPTS_RESERVED_AT_ONCE
            self._jobs.reserve_attempts(self._job_id, end)
            self._attempts_end = end
        return self._attempts_end

    async def _run(self, work: Callable[[], _ResultT]) -> _ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
