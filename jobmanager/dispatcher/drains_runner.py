"""Drains: TaskManagers that are given no more tasks, and are emptied.

asked for -> looked at, refused where it cannot be done -> no more slots of it are given -> each job that has any
there leaves, one after the other -> nothing of it is in use -> it stays drained until it ends or is taken in use again

Drains are operations under ids of their own: asked for twice, one is done once; they are kept for the next JobManager
before anything is done, which goes on with those that had not ended. One that fails leaves the TaskManager in use.

Invariant: a TaskManager that a completed drain has emptied is given no task as long as it is registered as the same
incarnation, whoever leads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import structlog

from common.pb import job_record_pb2
from jobmanager.checkpoint.store_calls_runner import StoreCallsRunner
from jobmanager.dispatcher.known_jobs import KnownJobs
from jobmanager.graph.execution_attempt import AttemptState
from jobmanager.job.checkpoint_requests_runner import TasksNotRunningError
from jobmanager.job.job_master_runner import JobMasterRunner
from jobmanager.job.job_operation import JobOperation, OperationKind
from jobmanager.job.operations_runner import OperationsRunner, left
from jobmanager.messages import job_events
from jobmanager.messages.job_state import ENDING
from jobmanager.scheduler.cluster_runner import ClusterRunner
from jobmanager.scheduler.drain_demand import JobThere, drain_problem, offered_slots
from jobmanager.stores.drains_store import DrainsStore
from penstock.errors import (
    JobRejected,
    StoreCorrupt,
    StoreNotFound,
    StreamError,
    TaskManagerLost,
)

_PAUSE_S: Final = 0.2
_RETRY_S: Final = 1.0
_STORE_TIMEOUT_MS: Final = 20_000
_FAILURES_MAX: Final = 5
"""Checkpoints of one job in a row that have failed, until the drain does."""
_LEAVES = (AttemptState.DEPLOYING, AttemptState.INITIALIZING, AttemptState.RUNNING)
WAIT, REMAKE = "wait", "remake"
"""What becomes of partitions that a TaskManager keeps."""


class DrainsRunner:
    """The drains of the cluster.

    Args:
        store: keeps what the next JobManager must know.
    """

    def __init__(self, jobs: KnownJobs, cluster: ClusterRunner, store: DrainsStore) -> None:
        self._jobs = jobs
        self._cluster = cluster
        self._store = store
        self._calls = StoreCallsRunner("the drains", _STORE_TIMEOUT_MS, lambda: None)
        self._tasks: asyncio.TaskGroup | None = None
        self._writing = asyncio.Lock()
        self._operations = self._known(b"")
        self._log = structlog.get_logger(__name__)

    def _known(self, kept: bytes) -> OperationsRunner:
        return OperationsRunner(
            "the cluster",
            lambda _lane, action: self._start(action),
            self._keep,
            kept,
            when_over=left,
        )

    def _start(self, action: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            await action()

        assert self._tasks is not None, "it is asked while it runs"
        self._tasks.create_task(run())

    async def run(self, started: asyncio.Event) -> None:
        """Goes on with what an earlier JobManager had begun; runs until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            kept = await self._read()
            self._cluster.drained.update(kept.drained)
            self._operations = self._known(kept.operations)
            started.set()
            for operation in self._operations.under_way():
                self._operations.go_on(operation, self._resumed)
            await asyncio.Event().wait()

    async def _read(self) -> job_record_pb2.StoredDrains:
        while True:
            try:
                return await self._calls.run("read", self._store.read)
            except (StoreCorrupt, StoreNotFound) as error:
                self._log.error("drains.unreadable", reason=str(error))
                return job_record_pb2.StoredDrains()
            except StreamError as error:
                self._log.warning("drains.not_read", retry_s=_RETRY_S, reason=str(error))
                await asyncio.sleep(_RETRY_S)

    async def _keep(self, _operations: bytes) -> None:
        """One after the other, each as it is then: what was decided first must not be written last."""
        async with self._writing:
            known = self._cluster.drained.items()
            drained = {id: incarnation for id, incarnation in known if incarnation}
            kept = job_record_pb2.StoredDrains(operations=self._operations.kept(), drained=drained)
            await self._calls.run("write", partial(self._store.write, kept))

    # ------------------------------------------------------------ what clients ask

    async def drain(
        self, taskmanager_id: str, operation_id: str, *, makes_again: bool
    ) -> JobOperation:
        """Drains a TaskManager; returns when nothing of it is in use.

        Args:
            operation_id: chosen by who asks.
            makes_again: what it keeps for consumers is made again elsewhere, and not waited for.

        Raises:
            JobRejected: it is not registered, or what runs there has no place elsewhere.
            StreamError: it was not drained, and is in use.
        """
        wanted = JobOperation(
            operation_id,
            OperationKind.DRAIN,
            taskmanager_id,
            REMAKE if makes_again else WAIT,
        )
        if self.find(taskmanager_id, operation_id) is None:
            await self._once_settled(lambda: self._check(wanted))
        return await self._operations.begin(wanted, self._begun).result()

    async def undo(self, taskmanager_id: str) -> None:
        """Takes a TaskManager in use again; what drains it fails.

        Raises:
            JobRejected: it is not registered.
            StoreTransient: that cannot be kept now.
        """
        await self._once_settled(lambda: self._check_registered(taskmanager_id))
        self._use(taskmanager_id)
        await self._operations.keep()

    def find(self, taskmanager_id: str, operation_id: str) -> JobOperation | None:
        """The drain of this id; None = there is none, or it was one of another TaskManager."""
        try:
            found = self._operations.find(operation_id)
        except StreamError:
            return None
        return found if found.path == taskmanager_id else None

    async def _once_settled(self, check: Callable[[], None]) -> None:
        """Refuses what a check refuses once all TaskManagers have had time to register with a new leader."""
        while True:
            try:
                return check()
            except JobRejected:
                try:
                    async with asyncio.timeout(self._cluster.settles_in_s):
                        await self._cluster.wait_for_registration()
                except TimeoutError:
                    return check()

    def _check_registered(self, taskmanager_id: str) -> None:
        if not self._cluster.addresses([taskmanager_id]):
            raise JobRejected(
                f"no TaskManager {taskmanager_id!r} is registered: `penstock taskmanagers` lists those that are"
            )

    def _check(self, wanted: JobOperation) -> None:
        """Raises JobRejected where a drain cannot come to its end."""
        taskmanager_id = wanted.path
        self._check_registered(taskmanager_id)
        own_total, own_free = self._cluster.offered(taskmanager_id)
        counts, drained = self._cluster.counts, self._drained_beside(wanted)
        leaving = sum(job.slots for id in drained for job in self._jobs_there(id))
        problem = drain_problem(
            taskmanager_id,
            self._jobs_there(taskmanager_id),
            makes_again=wanted.wanted == REMAKE,
            free_elsewhere=max(counts.free - own_free - leaving, 0),
            total_elsewhere=counts.total - own_total,
            drained_elsewhere=drained,
        )
        if problem:
            raise JobRejected(problem)

    def _jobs_there(self, taskmanager_id: str) -> list[JobThere]:
        return [
            JobThere(job_id, slots, runner.checkpoints.asked.may_move, runner.master.plan.is_batch)
            for job_id, runner, slots in self._users(taskmanager_id)
            if not runner.master.ended and runner.master.state not in ENDING
        ]

    def _drained_beside(self, drain: JobOperation) -> list[str]:
        """Others that offer nothing, since they are drained."""
        drained = [id for id, own in self._cluster.drained.items() if own and id != drain.path]
        return sorted(id for id in drained if self._cluster.addresses([id]))

    def _users(self, taskmanager_id: str) -> list[tuple[str, JobMasterRunner, int]]:
        """Jobs that have slots there, and how many."""
        return [
            (job_id, runner, len(slots))
            for job_id, runner in self._jobs.running()
            if (slots := self._cluster.held_slots(job_id).get(taskmanager_id))
        ]

    # ------------------------------------------------------------ the drain

    async def _begun(self, drain: JobOperation) -> None:
        self._check(drain)  # another one may have been begun since it was asked for
        self._cluster.drain(drain.path, is_drained=True)
        await self._brought_to_end(drain)

    async def _resumed(self, drain: JobOperation) -> None:
        """Another JobManager had begun it; the TaskManager may not have registered here yet."""
        while not self._cluster.addresses([drain.path]) and self._cluster.settles_in_s > 0:
            drain.progress = f"TaskManager {drain.path} has not registered yet"
            await asyncio.sleep(_PAUSE_S)
        if self._cluster.addresses([drain.path]):
            self._cluster.drain(drain.path, is_drained=True)
        await self._brought_to_end(drain)

    async def _brought_to_end(self, drain: JobOperation) -> None:
        try:
            await self._operations.keep()
            await self._empty(drain)
        except StreamError:
            if self._cluster.addresses([drain.path]):
                self._use(drain.path)
            raise
        finally:
            drain.progress = ""

    def _use(self, taskmanager_id: str) -> None:
        self._cluster.drain(taskmanager_id, is_drained=False)
        for _, runner in self._jobs.running():
            runner.post(job_events.TaskManagerInUse(taskmanager_id))

    async def _empty(self, drain: JobOperation) -> None:
        """Returns when nothing of a TaskManager is in use."""
        failures: dict[str, int] = {}
        while True:
            self._check_still(drain)
            users, keeps = self._users(drain.path), self._kept_for(drain) | self._unread(drain.path)
            if not users and not keeps:
                return
            named = ", ".join(sorted({job_id for job_id, _, _ in users} | keeps))
            drain.progress = f"tasks or partitions of job {named} are still there"
            for job_id, runner, _ in users:
                try:
                    await self._leave(drain, runner, failures.get(job_id, 0))
                except TasksNotRunningError:
                    continue  # it begins, again perhaps; what fails there begins elsewhere
                except StreamError as error:
                    failures[job_id] = failures.get(job_id, 0) + 1
                    is_over = not any(job_id == known for known, _ in self._jobs.running())
                    if failures[job_id] >= _FAILURES_MAX and not is_over:
                        raise StreamError(f"job {job_id} does not leave it: {error}") from error
                    self._log.warning("drain.job_stays", job_id=job_id, reason=str(error))
            await asyncio.sleep(_PAUSE_S)

    def _check_still(self, drain: JobOperation) -> None:
        if not self._cluster.addresses([drain.path]):
            raise TaskManagerLost(f"TaskManager {drain.path} was lost before it was drained")
        if not self._cluster.drained.get(drain.path):
            raise StreamError(
                f"TaskManager {drain.path} was taken in use again before it was drained"
            )

    def _kept_for(self, drain: JobOperation) -> set[str]:
        """Jobs whose partitions are waited for."""
        if drain.wanted == REMAKE:
            return set()
        held = self._cluster.partitions.of(drain.path).partitions
        return {
            one.job_id for one in held if not one.promoted_as and self._jobs.has_unended(one.job_id)
        }

    def _unread(self, taskmanager_id: str) -> set[str]:
        """Jobs that run there and cannot be read yet: they leave once they can."""
        return {
            job_id
            for job_id, job in self._jobs.items()
            if job.unreadable is not None and taskmanager_id in self._cluster.held_slots(job_id)
        }

    async def _leave(self, drain: JobOperation, runner: JobMasterRunner, failures: int) -> None:
        """Has a job leave, as far as it can now.

        Raises:
            TasksNotRunningError: it is beginning.
            StreamError: its checkpoint was not taken, or it has ended.
        """
        makes_again = drain.wanted == REMAKE
        runner.post(job_events.TaskManagerDrained(drain.path, makes_again))
        attempts = runner.master.graph.on_taskmanager(drain.path)
        if runner.checkpoints.asked.may_move and any(one.state in _LEAVES for one in attempts):
            slots, counts = {one.slot_id for one in attempts}, self._cluster.counts
            if len(slots) > counts.free:
                offered = offered_slots(counts.free, counts.total, self._drained_beside(drain))
                raise StreamError(f"it needs {len(slots)} free slots elsewhere, and {offered}")
            await runner.checkpoints.asked.move(f"{drain.operation_id} leave {failures}")
