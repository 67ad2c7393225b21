"""Tells the next JobManager which TaskManagers run a job's attempts, so that it knows whom to wait for.

Attempts are deployed behind that: what the next one does not know of, it begins again. Storage that does not answer holds
them up for a short time only; of a job that nobody may begin again nothing is deployed that is not noted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Final

import structlog

from jobmanager.checkpoint.store_calls_runner import StoreCallsRunner
from jobmanager.scheduler.cluster_runner import ClusterRunner
from jobmanager.stores.job_store import JobStore
from penstock.errors import StoreTransient, StreamError

_LANE: Final = "taskmanagers in use"
_PATIENCE_S: Final = 2.0
_PATIENCE_WHERE_NEEDED_S: Final = 30.0
_CALL_TIMEOUT_MS: Final = 30_000


class TaskManagersInUseRunner:
    """The TaskManagers of one job.

    Args:
        noted: what the job's record says.
        cluster: knows where they are called.
        jobs: keeps the record; None where the job ends with this JobManager.
        in_order: runs actions of one lane one after the other.
    """

    def __init__(
        self,
        job_id: str,
        noted: Iterable[str],
        cluster: ClusterRunner,
        jobs: JobStore | None,
        in_order: Callable[[str, Callable[[], Awaitable[None]]], None],
    ) -> None:
        self._job_id = job_id
        self._noted = frozenset(noted)
        self._cluster = cluster
        self._jobs = jobs
        self._in_order = in_order
        self._calls = StoreCallsRunner(
            f"job {job_id}", _CALL_TIMEOUT_MS, self._go_on, hanging_max=1
        )
        self._wanted: Mapping[str, str] = {}
        self._under_way = 0
        self._begun_at_s = 0.0
        self._why_not = ""
        self._are_noted = asyncio.Event()
        self._are_noted.set()
        self._log = structlog.get_logger(__name__).bind(job_id=job_id)

    def note(self, taskmanager_ids: Iterable[str]) -> None:
        """These have attempts of the job, or are about to; begins to note them if it is news."""
        jobs, addresses = self._jobs, self._cluster.addresses(taskmanager_ids)
        if jobs is None or not addresses or addresses.keys() == self._noted:
            return
        self._wanted = addresses
        self._begin(jobs)

    def _go_on(self) -> None:
        """A call that was given up on has returned: what could not be noted meanwhile can be now."""
        if self._jobs is not None and not self._calls.hanging and not self._noted:
            with contextlib.suppress(StreamError):  # the job has ended
                self._begin(self._jobs)

    def _begin(self, jobs: JobStore) -> None:
        addresses = self._wanted
        self._noted = frozenset(addresses)
        self._under_way += 1
        self._are_noted.clear()
        self._begun_at_s = asyncio.get_running_loop().time()
        self._why_not = "storage does not answer"

        async def note() -> None:
            try:
                write = partial(jobs.note_taskmanagers, self._job_id, addresses)
                await self._calls.run("note the TaskManagers", write)
                self._why_not = ""
            except StreamError as error:
                self._noted, self._why_not = frozenset(), str(error)
                self._log.warning("taskmanagers.not_noted", reason=str(error))
            finally:
                self._under_way -= 1
                if not self._under_way:
                    self._are_noted.set()

        self._in_order(_LANE, note)

    async def until_noted(self, *, is_needed: bool) -> None:
        """Waits until all are noted, or could not be; not for long.

        Args:
            is_needed: the next JobManager would run twice what it does not know of.

        Raises:
            StreamError: that, and they could not be noted.
        """
        patience_s = _PATIENCE_WHERE_NEEDED_S if is_needed else _PATIENCE_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._begun_at_s + patience_s):
                await self._are_noted.wait()
        if is_needed and self._why_not:
            raise StoreTransient(
                "nothing of a job that must not run twice is deployed before its record names its "
                f"TaskManagers, which could not be written: {self._why_not}"
            )
