"""A JobManager on simulated time: the real daemon with its one job, and the job's client.

It can die between any two events and in the midst of a store call; then it is never heard of again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from jobmanager.assembly_runner import RunningJobManager, serving
from jobmanager.dispatcher.dispatcher_runner import DispatcherRunner
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.job.job_master_runner import JobMasterRunner
from jobmanager.job.job_record import JobRecord
from jobmanager.messages import job_events
from jobmanager.stores.directory_lock import DirectoryLock
from penstock.config import Configuration
from penstock.errors import StoreNotFound, StreamError
from penstock.pb import graph_pb2
from tests.support.simulated_event_loop import SimulatedEventLoop
from tests.support.simulated_rpc import SimulatedRpc
from tests.support.simulated_savepoints import Asked, SimulatedSavepoints
from tests.support.simulated_store import Countdown, StoreAccess
from tests.support.simulated_taskmanager import JOBMANAGER_PORT
from tests.support.simulated_threads import ProcessHost


class JobManagerHost(ProcessHost, Protocol):
    """What a JobManager needs of the simulation."""

    graph: graph_pb2.JobGraph
    config: Configuration
    work_directory: Path
    rpc: SimulatedRpc
    rows: dict[str, list[pa.RecordBatch]]
    has_lost_rows: bool
    is_submitted: bool
    job_id: str
    savepoints: SimulatedSavepoints

    def open_jobmanager_store(self) -> StoreAccess:
        """The checkpoint store, for one more JobManager."""

    def open_jobmanager_savepoint(self, uri: str, countdown: Countdown) -> StoreAccess:
        """The directory of a savepoint, for one more call of a JobManager."""

    def jobmanager_dies(self) -> None:
        """It has died in a store call."""

    def jobmanager_stopped(self) -> None:
        """It has ended as it was told to."""


class SimulatedJobManager:
    """One leader's life.

    Args:
        name: unlike that of any other process of the simulation.
    Attributes:
        unanswered: requests for checkpoints that wait for their answers.
    """

    def __init__(self, host: JobManagerHost, name: str) -> None:
        self._host = host
        self.name = name
        self.port = JOBMANAGER_PORT
        self.store = host.open_jobmanager_store()
        self.lock: DirectoryLock | None = None
        self.running: RunningJobManager | None = None
        self.unanswered: set[int] = set()
        self.requested = 0
        self.is_stopping = False
        self._stop = asyncio.Event()
        self.loop = SimulatedEventLoop(host, host.rpc.connects, host.jobmanager_dies)
        self.loop.owner = self
        self._main = self.loop.create_task(self._run())
        self._main.add_done_callback(lambda _: self._note_end())

    async def _run(self) -> None:
        host = self._host
        directory = host.work_directory / "jobmanager"
        async with serving(host.config, directory, host.loop) as self.running:
            if not host.is_submitted:  # the client asks the next one until it is answered
                await self.running.dispatcher.submit(host.job_id, host.graph)
                host.is_submitted = True
            for asked in host.savepoints.unanswered:
                self.ask(asked)
            for collect_id in self.record.collect_limits if self.record else ():
                self.loop.create_task(self._fetch(collect_id))
            await self._stop.wait()

    def _note_end(self) -> None:
        if not self.loop.is_alive:
            return
        error = None if self._main.cancelled() else self._main.exception()
        if error is not None or not self.is_stopping:
            self._host.broke(error or AssertionError("the JobManager has ended"))
        self._host.rpc.process_gone(self.loop)
        self.loop.die()
        self._host.jobmanager_stopped()

    async def _fetch(self, collect_id: str) -> None:
        """The client reads what a collect sink brings."""
        results = self.dispatcher._results
        try:
            async for chunk in results.fetch(self._host.job_id, collect_id):
                with pa.ipc.open_stream(chunk.arrow) as reader:
                    self._host.rows.setdefault(collect_id, []).extend(reader)
        except StoreNotFound:
            self._host.has_lost_rows = True

    # ------------------------------------------------------------ what it says

    @property
    def is_alive(self) -> bool:
        """Whether it has neither died nor ended."""
        return self.loop.is_alive

    @property
    def dispatcher(self) -> DispatcherRunner:
        """Its jobs."""
        assert self.running is not None, "it serves"
        return self.running.dispatcher

    @property
    def record(self) -> JobRecord | None:
        """Its job; None before it knows it."""
        if self.running is None:
            return None
        job = self.dispatcher.jobs.get(self._host.job_id)
        return None if job is None else job.record

    @property
    def runner(self) -> JobMasterRunner | None:
        """The job's actor; None before and after its life."""
        job = None if self.running is None else self.dispatcher.jobs.get(self._host.job_id)
        return None if job is None else job.runner

    @property
    def has_ended_job(self) -> bool:
        """The job has ended here."""
        return self.record is not None and self.record.ended

    @property
    def is_done(self) -> bool:
        """The job has ended here and nothing is done for it any more."""
        return self.has_ended_job and self.runner is None

    @property
    def is_at_rest(self) -> bool:
        """The job runs, and no call, checkpoint or deletion is under way, and none is to be repeated."""
        runner = self.runner
        if not self.is_alive or runner is None:
            return False
        if not runner._lanes.are_empty or len(runner._inbox):
            return False
        coordinator = runner.master.coordinator
        return (
            coordinator is not None
            and not coordinator.pending
            and not coordinator._files.deletions.paths()
            and not self.loop.threads.count
        )

    # ------------------------------------------------------------ what is done to it

    def request_checkpoint(self) -> None:
        """A user asks for a checkpoint; ``unanswered`` has who waits."""
        if self.running is not None:
            self.requested += 1
            self.unanswered.add(self.requested)
            self.loop.create_task(self._checkpoint(self.requested))

    async def _checkpoint(self, request: int) -> None:
        with contextlib.suppress(StreamError):  # an answer, too
            await self.dispatcher.operations.checkpoint(self._host.job_id)
        self.unanswered.discard(request)

    def ask(self, asked: Asked) -> None:
        """A user asks for a savepoint; who comes next is asked again where this one does not answer."""
        if self.running is not None and self._host.is_submitted:
            self.loop.create_task(
                asked.ask(self.dispatcher, self._host.job_id, lambda: self.is_stopping)
            )

    def open_savepoint(self, uri: str) -> StoreAccess:
        """The directory of a savepoint, whose calls count as those of the checkpoint store do."""
        return self._host.open_jobmanager_savepoint(uri, self.store.countdown)

    def cancel_job(self, *, is_stored_at_once: bool) -> None:
        """A user cancels the job.

        Args:
            is_stored_at_once: the job's machine hears of it now, not only once the storage has answered.
        """
        if self.runner is not None and is_stored_at_once:
            self.dispatcher._store.note_cancellation(self._host.job_id)
            self.runner.post(job_events.CancelRequested())
        elif self.record is not None:
            self.loop.create_task(self.dispatcher.cancel(self._host.job_id))

    def fail_job(self) -> None:
        """Something of its own fails, on behalf of the whole job."""
        if self.is_alive and self.runner is not None:
            self.runner.post(
                job_events.FailureRequested(FailureCause("Simulated", "all begins again"))
            )

    def stop(self) -> None:
        """It is told to end."""
        self.is_stopping = True
        self.loop.call_soon(self._stop.set)

    def die(self) -> None:
        """It ends like after SIGKILL."""
        self.loop.die()
        self._host.rpc.process_gone(self.loop)
        if self.lock is not None:  # the kernel lets go of it
            self.lock.close()
            self.lock.descriptor = os.open(os.devnull, os.O_RDONLY)
