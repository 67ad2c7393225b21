"""What the machine of a job wants done about checkpoints: preparing starts, storing, deleting, answering.

Calls to the store are bounded by the checkpoint's timeout. What prepares a start, what stores (and settles)
a checkpoint and what deletes go on beside each other, each in its own order. A start waits for a checkpoint
that is being stored, since it must not go on from an older one that is about to be subsumed; where that takes
too long, HEAD is claimed again, and the checkpoint settled. Everything that comes back is an event in the
job's inbox.

Invariants: attempt numbers are reserved, in blocks, before ``StartPrepared`` is posted; each request of
a user is answered once, at the latest when the job's actor ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Final, TypeVar, assert_never
from uuid import uuid4

import structlog

from common.clock import Clock
from common.pb import internal_pb2
from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_store_runner import (
    CheckpointStoreRunner,
    CheckpointsUnreadable,
)
from jobmanager.checkpoint.prepared_checkpoints import PreparedCheckpoints
from jobmanager.checkpoint.repeated_output import RepeatedOutput
from jobmanager.checkpoint.store_calls_runner import StoreCallsRunner, StoreSilent
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.rebuilt_regions import rebuilt_vertices
from jobmanager.failover.regions import RegionGraph
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.job.checkpoint_gauges import CheckpointGauges
from jobmanager.job.collect_sinks import CollectSinks
from jobmanager.job.exception_views import decode_repeated, encode_repeated
from jobmanager.job.job_operation import JobOperation, OperationKind
from jobmanager.job.operations_runner import OperationsRunner
from jobmanager.job.restored_tasks import RestoredTasks, restored_checkpoint, restored_tasks
from jobmanager.job.savepoints_runner import SavepointsRunner
from jobmanager.job.sweeps_runner import SweepsRunner
from jobmanager.messages import job_effects, job_events
from jobmanager.results.results_store import ResultsStore
from jobmanager.rpc.graph_convert import cause_of_error, plan_of
from jobmanager.stores.job_store import JobStore
from penstock.errors import (
    CheckpointAborted,
    Fenced,
    JobRejected,
    StoreTransient,
    StreamError,
    Unrecoverable,
)
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.checkpoint_properties import (
    PLAIN,
    BehindBarrier,
    CheckpointProperties,
    SavepointFormat,
)
from penstock.storage.head import HeadOutcomeUnknown
from penstock.storage.open_store import substore
from penstock.storage.savepoint import savepoint_name

_ATTEMPTS_RESERVED_AT_ONCE: Final = 16
_RECORD_LANE: Final = "job record"
_START_LANE: Final = "checkpoint starts"
_STORE_LANE: Final = "checkpoint store"
_DELETION_LANE: Final = "checkpoint deletions"
_SAVEPOINT_LANE: Final = "savepoints"
_STORE_PATIENCE_S: Final = 10.0
"""How long a start waits for a checkpoint that is being stored."""
_FIRST_PAUSE_S: Final = 0.5
_REPEATED_MAX: Final = 16
_LAST_PAUSE_S: Final = 30.0
"""Between calls to a store that does not say what is needed."""

_ResultT = TypeVar("_ResultT")

CheckpointEffect = (
    job_effects.PrepareStart
    | job_effects.ReserveAttempts
    | job_effects.NoteCommit
    | job_effects.WriteManifest
    | job_effects.DiscardCheckpoints
    | job_effects.CheckpointEffect
)


class _NotRunningError(StreamError):
    """A checkpoint cannot be taken yet."""


class JobCheckpointsRunner:
    """The checkpoints of one job, as its actor sees them.

    Args:
        job_id: the job.
        graph: its graph.
        store: where its checkpoints are kept; None = it takes none.
        timeout_ms: how long a call to the store may take.
        jobs: keeps the attempt numbers; None where the job ends with this JobManager.
        results: rows of its collect sinks.
        clock: where the time comes from.
        savepoint_directory: in which savepoints are made where nobody names another; "" = there is none.
        post: takes events for the job's machine.
        in_order: runs actions of one lane one after the other.
        leaves_output: what is prepared in what the job is started from is not committed.
        is_recovered: the job was another JobManager's: until it has been prepared once, what cannot be read
            is tried again, and fails nothing.
        operations: what the job's record has of them.
    """

    def __init__(
        self,
        job_id: str,
        graph: graph_pb2.JobGraph,
        store: CheckpointStoreRunner | None,
        timeout_ms: int,
        jobs: JobStore | None,
        results: ResultsStore,
        clock: Clock,
        post: Callable[[job_events.JobEvent], None],
        in_order: Callable[[str, Callable[[], Awaitable[None]]], None],
        *,
        savepoint_directory: str = "",
        leaves_output: bool = False,
        is_recovered: bool = False,
        operations: bytes = b"",
    ) -> None:
        self._leaves_output = leaves_output
        self._job_id = job_id
        self._graph = graph
        self._store = store
        self._jobs = jobs
        self._results = results
        self._collects = CollectSinks(graph)
        self._rebuilt = (
            rebuilt_vertices(RegionGraph(plan_of(graph))) if store is not None else frozenset()
        )
        self._clock = clock
        self._post = post
        self._in_order = in_order
        self._log = structlog.get_logger(__name__).bind(job_id=job_id)
        self.gauges = CheckpointGauges()
        self._record_thread = ThreadPoolExecutor(1, f"record-{job_id[:8]}")
        self.calls = StoreCallsRunner(f"job {job_id}", timeout_ms, self._note_calls)
        self._patience_s = min(_STORE_PATIENCE_S, timeout_ms / 1000)
        self._storing = 0
        """The checkpoint that is being stored; 0 = none is, or it is settled."""
        self._is_stored = asyncio.Event()
        self._is_stored.set()
        self._given_up: asyncio.Future[None] | None = None
        """Done where the checkpoint that is being stored is waited for no longer."""
        self._until_end: dict[asyncio.Future[None], None] = {}
        self._ended = asyncio.Event()
        self._sweeps = SweepsRunner(job_id, self._call, in_order, self._ended)
        self._restored: RestoredTasks = {}
        self._attempts_end = 0
        self._timer: asyncio.TimerHandle | None = None
        self._answers: dict[str, asyncio.Future[int]] = {}
        self._savepoint_directory = savepoint_directory
        self._completed_id = 0
        """Of the newest checkpoint that has completed since this was made."""
        self._ended_id = 0
        """Of the newest that has completed or been aborted since."""
        self.operations = OperationsRunner(
            job_id, in_order, self._keep_operations if jobs is not None else None, operations
        )
        """What users have asked for."""
        self._savepoints = (
            None
            if store is None
            else SavepointsRunner(
                job_id,
                store,
                self.calls,
                clock,
                request=self._request,
                post=post,
                fail=self._fail,
                pause=self._pause,
                completed_id=lambda: self._completed_id,
            )
        )
        self._closed = False
        self._may_be_unreadable = is_recovered
        self.problem = ""
        """Why the job cannot be gone on with yet."""
        self.repeated: deque[RepeatedOutput] = deque(maxlen=_REPEATED_MAX)
        """Output that may be there twice, the newest last."""
        self._has_read_repeated = False
        self._has_gone_on = not is_recovered
        self.is_discarded = False
        """The job has ended, and its checkpoints are to be deleted once nobody writes any."""

    @property
    def started_from(self) -> checkpoint_pb2.StartedFrom | None:
        """What the job was started from; None = from nothing."""
        return None if self._store is None else self._store.started_from

    def restored(self, subtask: SubtaskId) -> internal_pb2.RestoredTask | None:
        """What the next attempt of a subtask starts from; None = from nothing."""
        return self._restored.get(subtask)

    def end(self) -> None:
        """The job has ended: what it was still storing matters to nobody; who still waits is told so."""
        self._ended.set()
        self._give_up_storing()
        if self._savepoints is not None:
            self._savepoints.give_up()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(StreamError(f"job {self._job_id} has ended"))
        for waiting in self._until_end:
            if not waiting.done():
                waiting.set_result(None)
        if self._store is not None:
            self._store.stop()

    def close(self) -> None:
        """Nothing more will be asked."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.end()
        self._record_thread.shutdown(wait=False)

    def note_running(self) -> None:
        """The job's tasks run."""
        if self._store is not None:
            self.gauges.note_started(self._clock.now_ms())

    def checkpoint(self, operation_id: str = "") -> JobOperation:
        """Begins to take a checkpoint now; its end says what came of it.

        Args:
            operation_id: chosen by who asks; "" = nobody asks again.

        Raises:
            JobRejected: the id is not one.
        """
        self._check_open()
        wanted = JobOperation(operation_id or uuid4().hex, OperationKind.CHECKPOINT)
        return self.operations.begin(wanted, self._take_checkpoint)

    def savepoint(self, operation_id: str, directory: str, format: SavepointFormat) -> JobOperation:
        """Begins to take a savepoint; its end says what came of it.

        Args:
            operation_id: chosen by who asks.
            directory: gets a directory for it; "" = as configured.
            format: of its keyed state.

        Raises:
            JobRejected: the job takes none, the id is not one, or there is no directory.
        """
        savepoints, path = self._place_of_savepoint(operation_id, directory)
        wanted = JobOperation(operation_id, OperationKind.SAVEPOINT, path, format.name)
        return self.operations.begin(wanted, lambda operation: savepoints.take(operation, format))

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
        savepoints, path = self._place_of_savepoint(operation_id, directory)
        behind = BehindBarrier.DRAIN if drain else BehindBarrier.HOLD
        wanted = JobOperation(operation_id, OperationKind.STOP, path, behind.name)
        return self.operations.begin(
            wanted, lambda operation: savepoints.stop(operation, behind, format)
        )

    def _place_of_savepoint(
        self, operation_id: str, directory: str
    ) -> tuple[SavepointsRunner, str]:
        self._check_open()
        savepoints = self._savepoints
        if savepoints is None:
            raise JobRejected(
                f"no savepoint of job {self._job_id} was taken: it takes no checkpoints: set "
                "execution.checkpointing.interval, and execution.checkpointing.dir"
            )
        directory = directory or self._savepoint_directory
        if not directory:
            raise JobRejected(
                f"no savepoint of job {self._job_id} was taken: name a directory for it, or set "
                "execution.checkpointing.savepoint-dir"
            )
        return savepoints, substore(directory, savepoint_name(self._job_id, operation_id))

    def _check_open(self) -> None:
        if self._closed or self._ended.is_set():
            raise JobRejected(f"job {self._job_id} has ended")

    async def _take_checkpoint(self, operation: JobOperation) -> None:
        operation.checkpoint_id = await self._request(operation.operation_id, PLAIN)

    async def _request(self, request_id: str, properties: CheckpointProperties) -> int:
        """Has the coordinator take a checkpoint or savepoint; returns its id when it is complete.

        Raises:
            JobRejected: the job takes none, or has ended.
            CheckpointAborted: it began and did not complete.
            StreamError: it could not begin.
        """
        self._check_open()
        answer = asyncio.get_running_loop().create_future()
        self._answers[request_id] = answer
        try:
            self._post(c.CheckpointRequested(request_id, self._clock.now_ms(), properties))
            checkpoint_id: int = await answer
            return checkpoint_id
        finally:
            del self._answers[request_id]

    # ------------------------------------------------------------ effects

    def perform(self, effect: CheckpointEffect) -> None:  # noqa: C901 - one case per effect
        """Begins to do what the machine wants."""
        match effect:
            case job_effects.PrepareStart():
                self._in_order(_START_LANE, lambda: self._prepare(effect))
            case job_effects.ReserveAttempts(attempt):
                self._in_order(_RECORD_LANE, lambda: self._reserve(attempt))
            case job_effects.NoteCommit():
                self._in_order(_RECORD_LANE, self._note_commit)
            case job_effects.WriteManifest() if effect.stored.properties.is_savepoint:
                self._in_order(_SAVEPOINT_LANE, lambda: self._store_savepoint(effect))
            case job_effects.WriteManifest():
                # At once: a start that comes next waits for it.
                self._storing = effect.stored.checkpoint_id
                self._is_stored.clear()
                self._given_up = asyncio.get_running_loop().create_future()
                self._in_order(_STORE_LANE, lambda: self._store_checkpoint(effect))
            case job_effects.DiscardCheckpoints():
                self.is_discarded = True
            case c.SettleCheckpoint():
                self._log.warning(
                    "checkpoint.unsettled",
                    checkpoint_id=effect.checkpoint_id,
                    reason=effect.reason,
                )
                if self._savepoints is None or not self._savepoints.give_up(effect.checkpoint_id):
                    self._give_up_storing()
            case c.ReserveIds():
                # In the order of starts, which claim HEAD as well.
                self._in_order(_START_LANE, self._reserve_ids)
            case c.DeleteFiles():
                self._in_order(_DELETION_LANE, lambda: self._delete(effect))
            case c.DiscardSavepoint():
                assert self._savepoints is not None, "savepoints are taken where there is a store"
                discard = self._savepoints.discard
                self._in_order(_SAVEPOINT_LANE, lambda: discard(effect))
            case c.CallAt():
                self._call_at(effect.at_ms)
            case c.AnswerRequest():
                self._answer(effect)
            case c.ReportAborted():
                self._note_aborted(effect)
            case c.ReportCompleted():
                self._note_completed(effect)
            case _:
                assert_never(effect)

    async def _in_record(self, work: Callable[[], _ResultT]) -> _ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._record_thread, work)

    # ------------------------------------------------------------ the store

    async def _prepare(self, effect: job_effects.PrepareStart) -> None:
        attempt = effect.attempt
        try:
            event = await self._prepared_at_last(effect)
        except Fenced as error:
            self._post(job_events.StartNotPrepared(attempt, self._fenced(error)))
        except StreamError as error:
            self._log.warning("job.start_not_prepared", attempt=attempt, reason=str(error))
            cause = cause_of_error(error, self._clock.now_ms())
            self._post(job_events.StartNotPrepared(attempt, cause))
        else:
            sequences = self._collects.restored(self._restored, effect.subtasks)
            self._results.restart(self._job_id, attempt, sequences)
            if event.restored is not None:
                self._log.info(
                    "job.restoring", attempt=attempt, checkpoint_id=event.restored.checkpoint_id
                )
            self._post(event)

    async def _prepared_at_last(self, effect: job_effects.PrepareStart) -> job_events.StartPrepared:
        """Where storage that is not there yet is no end of the job, it is waited for."""
        attempt = 0
        while True:
            try:
                event = await self._prepared(effect)
            except (CheckpointsUnreadable, StoreTransient) as error:
                if not self._may_be_unreadable or self._ended.is_set():
                    raise
                self.problem = f"the job cannot be gone on with yet: {error}"
                pause_s = _pause_s(attempt)
                self._log.warning("job.unreadable", retry_s=pause_s, reason=str(error))
                await self._pause(pause_s)
                attempt += 1
            else:
                self._may_be_unreadable, self.problem = False, ""
                return event

    async def _pause(self, pause_s: float) -> bool:
        """Waits; False where the job has ended meanwhile."""
        try:
            async with asyncio.timeout(pause_s):
                await self._ended.wait()
        except TimeoutError:
            return True
        return False

    async def _prepared(self, effect: job_effects.PrepareStart) -> job_events.StartPrepared:
        attempt = effect.attempt
        await self._in_record(lambda: self._reserved(attempt))
        if self._store is None:
            return job_events.StartPrepared(attempt)
        await self._wait_for_storing()
        found = await self._found(self._store, effect)
        restored, brought = None, list[str]()
        if self._savepoints is not None:
            restored_id = found.newest.checkpoint_id if found.newest else 0
            await self.operations.keep_taken_back(self._savepoints.note_restored(restored_id))
            self._resume_operations(self._savepoints, found)
        await self._note_repeated(found.repeated)
        tasks: RestoredTasks = {}
        if found.newest is not None:
            tasks = restored_tasks(
                found.newest,
                self._graph,
                effect.subtasks,
                self._rebuilt,
                is_of_another=found.is_of_another,
                leaves_output=self._leaves_output,
            )
            if found.is_of_another:
                store, of_another = self._store, tasks
                brought = await self._call("bring lists", lambda: store.bring_lists(of_another))
            if found.retained and found.retained[-1].is_stop:
                for task in tasks.values():
                    task.stopped = True
            restored = restored_checkpoint(
                found.newest.checkpoint_id, tasks, self._graph, found.done
            )
        # What is about to be deployed goes on from what it was prepared for.
        kept = {s: task for s, task in self._restored.items() if s in effect.kept}
        others = {s: task for s, task in tasks.items() if s not in effect.kept}
        self._restored = others | kept
        if (sweep := found.sweep) is not None:
            # Behind the start, which waits for no listing.
            self._sweeps.begin(lambda: sweep(brought))
        return job_events.StartPrepared(
            attempt, restored, found.retained, found.next_checkpoint_id, found.goes_back
        )

    def _resume_operations(self, savepoints: SavepointsRunner, found: PreparedCheckpoints) -> None:
        """What another JobManager had begun is brought to its end."""
        if self._has_gone_on:
            return
        self._has_gone_on = True
        newest = found.retained[-1] if found.retained else None
        stopped_id = newest.checkpoint_id if newest is not None and newest.is_stop else 0
        for operation in self.operations.under_way():
            work = partial(self._resumed, savepoints, stopped_id)
            self.operations.go_on(operation, work)

    async def _resumed(
        self, savepoints: SavepointsRunner, stopped_id: int, operation: JobOperation
    ) -> None:
        for attempt in count():
            try:
                match operation.kind:
                    case OperationKind.CHECKPOINT:
                        await self._take_checkpoint(operation)
                    case OperationKind.SAVEPOINT:
                        await savepoints.take(operation, SavepointFormat[operation.wanted])
                    case OperationKind.STOP:
                        await savepoints.settle_stop(operation, stopped_id)
            except _NotRunningError:
                if not await self._pause(_pause_s(attempt)):
                    raise
            else:
                return

    async def _keep_operations(self, content: bytes) -> None:
        jobs = self._jobs
        assert jobs is not None, "there is a record to keep them in"
        if self._ended.is_set():
            return  # with the job, or with this JobManager, behind which the next one goes on with them
        await self._in_record(lambda: jobs.note_operations(self._job_id, content))

    async def _note_repeated(self, repeated: RepeatedOutput | None) -> None:
        jobs, job_id = self._jobs, self._job_id
        if jobs is not None and not self._has_read_repeated:
            known = await self._in_record(lambda: jobs.repeated(job_id))
            for each in decode_repeated(known):
                self.repeated.append(each)
                self.gauges.note_repeated()
            self._has_read_repeated = True
        newest = self.repeated[-1] if self.repeated else None
        if repeated is None or repeated == newest:
            return  # another restart before the next checkpoint: nothing more was committed
        if jobs is not None:
            content = encode_repeated([*self.repeated, repeated])
            await self._in_record(lambda: jobs.note_repeated(job_id, content))
        self.repeated.append(repeated)
        self.gauges.note_repeated()
        self._log.error(
            "checkpoint.output_repeated",
            from_checkpoint_id=repeated.from_checkpoint_id,
            to_checkpoint_id=repeated.to_checkpoint_id,
            files=repeated.files,
            file_count=repeated.file_count,
            places=repeated.places,
            reason=str(repeated),
        )

    async def _found(
        self, store: CheckpointStoreRunner, effect: job_effects.PrepareStart
    ) -> PreparedCheckpoints:
        jobs, job_id = self._jobs, self._job_id
        must_exist = jobs is not None and await self._in_record(
            lambda: jobs.has_checkpoints(job_id)
        )
        preparation = store.begin_preparation()
        found = await self._call(
            "prepare",
            lambda: store.prepare(
                effect.unusable,
                must_exist=must_exist,
                alone=effect.subtasks,
                preparation=preparation,
                ended_id=self._ended_id,
                first_attempt=effect.first_attempt,
            ),
        )
        if jobs is not None:
            await self._in_record(lambda: jobs.note_checkpoints(job_id))
        return found

    async def _wait_for_storing(self) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await self._is_stored.wait()
        except TimeoutError:
            self._give_up_storing()

    def _give_up_storing(self) -> None:
        """Whoever prepares, or settles, claims HEAD again, and finds what has become of the checkpoint."""
        if self._store is not None and self._storing:
            self._store.give_up(self._storing)
        if self._given_up is not None and not self._given_up.done():
            self._given_up.set_result(None)

    async def _call(self, what: str, work: Callable[[], _ResultT]) -> _ResultT:
        """A call that nobody waits for any more once the job has ended."""
        if self._ended.is_set():
            raise StoreSilent(f"job {self._job_id} has ended")
        no_longer = asyncio.get_running_loop().create_future()
        self._until_end[no_longer] = None
        try:
            return await self.calls.run(what, work, no_longer)
        finally:
            del self._until_end[no_longer]

    def _note_calls(self) -> None:
        self.gauges.note_calls(self.calls.given_up, self.calls.hanging)

    async def _reserve(self, attempt: int) -> None:
        try:
            end = await self._in_record(lambda: self._reserved(attempt))
        except StreamError as error:
            # Who needs the number asks again.
            self._log.warning("attempts.not_reserved", attempt=attempt, reason=str(error))
        else:
            self._post(job_events.AttemptsReserved(end))

    def _reserved(self, attempt: int) -> int:
        """Reserves numbers up to this one at least; returns the first that is not reserved."""
        if self._jobs is not None and attempt >= self._attempts_end:
            end = attempt + _ATTEMPTS_RESERVED_AT_ONCE
            self._jobs.reserve_attempts(self._job_id, end)
            self._attempts_end = end
        return self._attempts_end

    async def _note_commit(self) -> None:
        jobs = self._jobs
        try:
            if jobs is not None:
                await self._in_record(lambda: jobs.note_commit(self._job_id))
        except StreamError as error:
            self._post(job_events.FailureRequested(cause_of_error(error, self._clock.now_ms())))
        else:
            self._post(job_events.CommitNoted())

    async def _store_checkpoint(self, effect: job_effects.WriteManifest) -> None:
        assert self._store is not None, "checkpoints are stored where there is a store"
        store = self._store
        states = self._collects.last_states(key.subtask for key in effect.stored.finished)
        try:
            event = await self.calls.run(
                "store",
                lambda: store.store(effect.stored, effect.done_splits, states, effect.done_before),
                self._given_up,
            )
        except (HeadOutcomeUnknown, StoreSilent) as error:
            await self._settle(effect.stored, error)
        except StreamError as error:
            self._fail(error)
        else:
            self._note_stored(effect.stored, event)
        finally:
            self._storing = 0
            self._is_stored.set()

    async def _store_savepoint(self, effect: job_effects.WriteManifest) -> None:
        assert self._savepoints is not None, "savepoints are taken where there is a store"
        states = self._collects.last_states(key.subtask for key in effect.stored.finished)
        await self._savepoints.store(effect, states)

    async def _reserve_ids(self) -> None:
        assert self._store is not None, "ids are reserved where there is a store"
        event: c.IdsReserved | c.IdsNotReserved
        try:
            end = await self._call("reserve ids", self._store.reserve_ids)
        except StoreTransient as error:
            self._log.warning("checkpoint.ids_not_reserved", reason=str(error))
            event = c.IdsNotReserved(str(error), self._clock.now_ms())
        except StreamError as error:
            self._fail(error)
            return
        else:
            event = c.IdsReserved(end, self._clock.now_ms())
        self._post(event)

    async def _settle(self, wanted: c.StoreCheckpoint, unknown: StreamError) -> None:
        """Finds out what has become of a checkpoint, however long that takes; the job's tasks run on."""
        assert self._store is not None, "checked by the caller"
        store, checkpoint_id = self._store, wanted.checkpoint_id
        store.give_up(checkpoint_id)
        now_ms = self._clock.now_ms()
        self._post(c.StoreOutcomeUnknown(checkpoint_id, str(unknown), now_ms))
        self._is_stored.set()
        for attempt in count():
            try:
                event = await self._call("settle", lambda: store.settle(checkpoint_id))
            except StoreTransient as error:
                self._log.warning(
                    "checkpoint.not_settled", checkpoint_id=checkpoint_id, reason=str(error)
                )
            except StreamError as error:
                self._fail(error)
                return
            else:
                self._log.info(
                    "checkpoint.settled",
                    checkpoint_id=checkpoint_id,
                    is_stored=isinstance(event, c.CheckpointStored),
                )
                self._note_stored(wanted, event)
                return
            if not await self._pause(_pause_s(attempt)):
                return

    def _note_stored(
        self, wanted: c.StoreCheckpoint, event: c.CheckpointStored | c.CheckpointNotStored
    ) -> None:
        if isinstance(event, c.CheckpointStored):
            sequences = self._collects.committed(wanted.snapshots)
            self._results.commit(self._job_id, sequences)
        self._post(event)

    def _fail(self, error: StreamError) -> None:
        cause = (
            self._fenced(error)
            if isinstance(error, Fenced)
            else cause_of_error(error, self._clock.now_ms())
        )
        self._post(job_events.FailureRequested(cause))

    async def _delete(self, effect: c.DeleteFiles) -> None:
        assert self._store is not None, "files are deleted where there is a store"
        store = self._store
        try:
            event = await self._call("delete", lambda: store.delete(effect.paths))
        except StoreSilent as error:
            self._log.warning("checkpoint.not_deleted", reason=str(error))
            event = c.FilesDeleted(effect.paths, self._clock.now_ms())
        self._post(event)

    def _fenced(self, error: Fenced) -> FailureCause:
        if self._jobs is not None:
            self._jobs.met(error)
        return cause_of_error(
            Unrecoverable(f"another JobManager has taken the job over: {error}"),
            self._clock.now_ms(),
        )

    # ------------------------------------------------------------ time, answers, reports

    def _call_at(self, at_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0, at_ms - self._clock.now_ms()) / 1000
        self._timer = asyncio.get_running_loop().call_later(
            delay_s, lambda: self._post(c.TimeReached(self._clock.now_ms()))
        )

    def _answer(self, effect: c.AnswerRequest) -> None:
        answer = self._answers.get(effect.request_id)
        if answer is None or answer.done():
            return  # who asked has gone
        if effect.refused is None:
            answer.set_result(effect.checkpoint_id)
            return
        reason = effect.detail or effect.refused.value
        message = f"no checkpoint of job {self._job_id} was taken: {reason}"
        error: StreamError
        if effect.refused in (c.RequestRefused.DISABLED, c.RequestRefused.BLOCKING_EXCHANGE):
            error = JobRejected(message)
        elif effect.refused in (c.RequestRefused.NOT_RUNNING, c.RequestRefused.LOADING):
            error = _NotRunningError(message)
        elif effect.refused is c.RequestRefused.ABORTED and effect.checkpoint_id:
            error = CheckpointAborted(effect.checkpoint_id, reason)
        else:
            error = StreamError(message)
        answer.set_exception(error)

    def _note_aborted(self, effect: c.ReportAborted) -> None:
        self.gauges.note_aborted(effect)
        self._ended_id = max(self._ended_id, effect.checkpoint_id)
        note = self._log.warning if effect.reason.counts else self._log.info
        note(
            "checkpoint.aborted",
            checkpoint_id=effect.checkpoint_id,
            reason=effect.reason.value,
            detail=effect.detail,
            failed_in_a_row=effect.failed_in_a_row,
            at_risk_ms=effect.at_risk_ms,
        )

    def _note_completed(self, effect: c.ReportCompleted) -> None:
        self.gauges.note_completed(effect)
        self._completed_id = effect.checkpoint.checkpoint_id
        self._ended_id = max(self._ended_id, self._completed_id)
        self._log.info(
            "checkpoint.completed",
            checkpoint_id=effect.checkpoint.checkpoint_id,
            duration_ms=effect.duration_ms,
            size_bytes=effect.checkpoint.state_bytes,
            uploaded_bytes=effect.summary.uploaded_bytes,
            alignment_ms=effect.summary.alignment_ms,
            sync_ms=effect.summary.sync_ms,
        )


def _pause_s(attempt: int) -> float:
    return min(_FIRST_PAUSE_S * 2 ** min(attempt, 16), _LAST_PAUSE_S)
