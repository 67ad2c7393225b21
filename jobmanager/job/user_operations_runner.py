"""What users ask of the checkpoints of one job: one now, a savepoint, a stop with one.

What is asked while tasks that another JobManager has had do not run here yet waits until they do, as what had been
asked of that one; at any other time it is refused where tasks do not run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from uuid import uuid4

import structlog

from jobmanager.checkpoint.prepared_checkpoints import PreparedCheckpoints
from jobmanager.job.checkpoint_requests_runner import (
    CheckpointRequestsRunner,
    JobLeavesError,
    TasksNotRunningError,
)
from jobmanager.job.job_calls_runner import JobCallsRunner, pause_s
from jobmanager.job.job_operation import (
    JobOperation,
    OperationKind,
    savepoint_operation,
    stop_operation,
)
from jobmanager.job.operations_runner import OperationsRunner
from jobmanager.job.savepoints_runner import SavepointsRunner
from penstock.errors import InvariantViolation, JobRejected, StoreTransient
from penstock.storage.checkpoint_properties import (
    PLAIN,
    BehindBarrier,
    CheckpointProperties,
    SavepointFormat,
)


class UserOperationsRunner:
    """Begins them, and goes on with those that another JobManager had begun.

    Args:
        operations: keeps them.
        savepoints: takes them; None = the job takes no checkpoints.
        calls: to the store.
        savepoint_directory: in which savepoints are made where nobody names another; "" = there is none.
        is_recovered: the job was another JobManager's.
    """

    def __init__(
        self,
        job_id: str,
        operations: OperationsRunner,
        requests: CheckpointRequestsRunner,
        savepoints: SavepointsRunner | None,
        calls: JobCallsRunner,
        *,
        savepoint_directory: str,
        is_recovered: bool,
    ) -> None:
        self._job_id = job_id
        self.operations = operations
        self._requests = requests
        self._savepoints = savepoints
        self._calls = calls
        self._savepoint_directory = savepoint_directory
        self._inherited = operations.under_way() if is_recovered else []
        """What another JobManager had begun, and has not been gone on with."""
        self._has_run = not is_recovered
        self._log = structlog.get_logger(__name__).bind(job_id=job_id)

    def checkpoint(self, operation_id: str = "") -> JobOperation:
        """Begins to take a checkpoint now; its end says what came of it.

        Args:
            operation_id: chosen by who asks; "" = nobody asks again.

        Raises:
            JobRejected: the id is not one.
        """
        self._requests.check_open()
        wanted = JobOperation(operation_id or uuid4().hex, OperationKind.CHECKPOINT)
        return self._begin(wanted, self._take_checkpoint)

    def savepoint(self, operation_id: str, directory: str, format: SavepointFormat) -> JobOperation:
        """Begins to take a savepoint; its end says what came of it.

        Args:
            operation_id: chosen by who asks.
            directory: gets a directory for it; "" = as configured.
            format: of its keyed state.

        Raises:
            JobRejected: the job takes none, the id is not one, or there is no directory.
        """
        refused = f"no savepoint of job {self._job_id} was taken"
        savepoints, directory = self._place_of_savepoint(directory, refused)
        wanted = savepoint_operation(self._job_id, operation_id, directory, format)
        return self._begin(wanted, lambda operation: savepoints.take(operation, format))

    def stop(
        self, operation_id: str, directory: str, format: SavepointFormat, *, drain: bool
    ) -> JobOperation:
        """Begins to stop the job with a savepoint; its end says what came of it.

        Args:
            operation_id: chosen by who asks.
            directory: as of ``savepoint``.
            format: as of ``savepoint``.
            drain: event time ends first, so that windows fire.

        Raises:
            JobRejected: as ``savepoint``.
        """
        refused = f"job {self._job_id} was not stopped, and runs on"
        savepoints, directory = self._place_of_savepoint(directory, refused)
        behind = BehindBarrier.DRAIN if drain else BehindBarrier.HOLD
        wanted = stop_operation(self._job_id, operation_id, directory, format, drain=drain)
        return self._begin(wanted, lambda operation: savepoints.stop(operation, behind, format))

    def _begin(
        self, wanted: JobOperation, work: Callable[[JobOperation], Awaitable[None]]
    ) -> JobOperation:
        passing = JobLeavesError if self._has_run else TasksNotRunningError
        return self.operations.begin(wanted, partial(self._once_tasks_run, work, passing))

    def note_running(self) -> None:
        """The job's tasks run."""
        self._has_run = True

    def _place_of_savepoint(self, directory: str, refused: str) -> tuple[SavepointsRunner, str]:
        self._requests.check_open()
        savepoints = self._savepoints
        if savepoints is None:
            raise JobRejected(
                f"{refused}: it takes no checkpoints: set execution.checkpointing.interval, and "
                "execution.checkpointing.dir"
            )
        directory = directory or self._savepoint_directory
        if not directory:
            raise JobRejected(
                f"{refused}: name a directory for its savepoint, or set "
                "execution.checkpointing.savepoint-dir"
            )
        return savepoints, directory

    @property
    def may_move(self) -> bool:
        """Whether the job takes checkpoints, and so can leave a TaskManager with one."""
        return self._savepoints is not None

    async def move(self, request_id: str) -> None:
        """Takes a checkpoint with which the job leaves the TaskManagers that are drained.

        Raises:
            TasksNotRunningError: it is beginning, again or still.
            StreamError: it was not taken; the job runs on where it is.
        """
        properties = CheckpointProperties(behind=BehindBarrier.MOVE)
        await self._requests.request(request_id, properties)

    async def _take_checkpoint(self, operation: JobOperation) -> None:
        operation.checkpoint_id = await self._requests.request(operation.operation_id, PLAIN)

    def resume(self, found: PreparedCheckpoints) -> None:
        """What another JobManager had begun is brought to its end."""
        savepoints = self._savepoints
        if savepoints is None:
            return
        newest = found.retained[-1] if found.retained else None
        stopped_id = newest.checkpoint_id if newest is not None and newest.is_stop else 0
        inherited, self._inherited = self._inherited, []
        for operation in inherited:
            work = partial(self._resumed, savepoints, stopped_id)
            self.operations.go_on(operation, work)

    async def _resumed(
        self, savepoints: SavepointsRunner, stopped_id: int, operation: JobOperation
    ) -> None:
        def work(one: JobOperation) -> Awaitable[None]:
            match one.kind:
                case OperationKind.CHECKPOINT:
                    return self._take_checkpoint(one)
                case OperationKind.SAVEPOINT:
                    return savepoints.take(one, SavepointFormat[one.wanted])
                case OperationKind.STOP:
                    return savepoints.settle_stop(one, stopped_id)
                case OperationKind.DRAIN:
                    raise InvariantViolation("drains are the cluster's, and no job's")

        for attempt in count():
            try:
                await self._once_tasks_run(work, TasksNotRunningError, operation)
            except StoreTransient as error:  # what has become of it is not known yet
                self._log.warning(
                    "operation.not_resumed",
                    operation_id=operation.operation_id,
                    retry_s=pause_s(attempt),
                    reason=str(error),
                )
                if not await self._calls.pause_after(attempt):
                    raise
            else:
                return

    async def _once_tasks_run(
        self,
        work: Callable[[JobOperation], Awaitable[None]],
        passing: type[TasksNotRunningError],
        operation: JobOperation,
    ) -> None:
        """Does it again as long as it fails of what passes."""
        for attempt in count():
            try:
                await work(operation)
            except passing as error:
                # Who leaves does so within moments, and is not what is slow.
                tries = 0 if isinstance(error, JobLeavesError) else attempt
                if not await self._calls.pause_after(tries):
                    raise
            else:
                return
