"""Runs one subtask of every vertex of a planned job in the calling thread, on a clock that is moved by hand.

What runs are the executions, chains, operators, gates and state backends that run in a slot, and their
snapshots are taken as there. What is replaced is what surrounds them: the exchange hands batches over
directly, I/O threads are calls, and the JobManager is this class. Nothing happens by itself: a call runs
everything to rest before it returns, so that the same calls always have the same results.

Rows come in by *inputs*, operators of the graph that are sources only in name: they get what is pushed.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import pyarrow as pa
from typing_extensions import override

from common.done_splits import NOTHING_DONE
from common.elements import (
    MIN_TIMESTAMP_MS,
    CheckpointBarrier,
    EndOfData,
    OperatorOutput,
    SideOutput,
    Watermark,
)
from common.pb import internal_pb2
from common.split_cuts import in_one_cut
from penstock.client.job_result import job_failed
from penstock.config import Configuration
from penstock.connectors.source import PART_OF
from penstock.errors import CheckpointAborted, InvariantViolation, JobRejected, StreamError
from penstock.pb import checkpoint_pb2, client_pb2, graph_pb2
from penstock.rows.schema import schema_from_bytes
from penstock.storage.manifest import encode_manifest, take_done_names
from taskmanager.harness.direct_exchange import DirectChannel, DirectExchange
from taskmanager.harness.inspection import state_of, timers_of
from taskmanager.harness.manual_clock import ManualClock
from taskmanager.harness.planned_graph import (
    feeds_what_is_loaded_first,
    fingerprint,
    in_order,
    with_passes,
)
from taskmanager.harness.restore import RestoredState, StateAssignment
from taskmanager.harness.tested_task import TestedTask, deployment_of, make_task
from taskmanager.operators.operator import Operator
from taskmanager.state.memory import ManagedMemory
from taskmanager.task.exchange import DataExchange
from taskmanager.task.execution import Execution
from taskmanager.task.slot_services import SlotServices
from taskmanager.task.subtask import Progress

_JOB_ID = "test"

_T = TypeVar("_T")


class _AtOnce(Executor):
    """Runs what it is given before it returns."""

    @override
    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        future: Future[_T] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class HarnessRunner:
    """One job of one subtask per vertex.

    Args:
        graph: planned for the parallelism that the subtasks are to see.
        inputs: uids of the operators whose output is what is pushed, in order.
        output: uid of the operator whose output is kept; "" = there is none.
        config: of the job.
        now_ms: where the clock starts.
        subtask_index: which of the parallel subtasks are run.
        snapshots: what the job starts from.
        assignment: deals out what is in them.

    Attributes:
        input_schemas: of the batches to be pushed, with the event-time column where there is one.
        batches: what has come out, until it is cleared.
        sides: the same by the tag of a side output.
        watermark_ms: the last watermark that has come out.
    """

    def __init__(
        self,
        graph: graph_pb2.JobGraph,
        *,
        inputs: Sequence[str],
        output: str,
        config: Configuration,
        now_ms: int,
        subtask_index: int,
        snapshots: Sequence[bytes],
        assignment: StateAssignment,
    ) -> None:
        self.clock = ManualClock(now_ms)
        self.batches: list[pa.RecordBatch] = []
        self.sides: dict[str, list[pa.RecordBatch]] = {}
        self.watermark_ms = MIN_TIMESTAMP_MS
        self._output = output
        self._subtask_index = subtask_index
        self._restored = RestoredState(snapshots, assignment)
        self._given: dict[str, set[str]] = {}
        """By source the splits that it has been told of here."""
        self._restored.check(graph)
        self._done = dict(self._restored.done)
        """Splits that snapshots which are complete know as read to their end, by operator uid."""
        self._checkpoint_id = self._restored.checkpoint_id
        self._acknowledged: dict[str, checkpoint_pb2.SubtaskSnapshot] = {}
        self._declined = ""
        self._failure: StreamError | None = None
        self._failed: client_pb2.FailureCause | None = None
        self._mail: deque[Callable[[], None]] = deque()
        self._directory = Path(tempfile.mkdtemp(prefix="penstock-testing-"))
        self._graph = with_passes(graph, inputs, output)
        self._vertices = {vertex.id: vertex for vertex in self._graph.vertices}
        schemas = {op.uid: op.output_schema for v in graph.vertices for op in v.operators}
        self.input_schemas = [schema_from_bytes(schemas[uid]) for uid in inputs]
        self._exchange = DirectExchange(
            self._index_of,
            self.clock.now_ms,
            is_exactly_once=config.execution_checkpointing_mode == "exactly-once",
        )
        self._services = self._make_services(config)
        self._inputs = [self._exchange.channel(uid) for uid in inputs]
        self._tasks = [self._task(vertex, frozenset(inputs)) for vertex in in_order(self._graph)]
        self._by_vertex = {task.vertex.id: task for task in self._tasks}
        try:
            self._start()
            if self._restored.checkpoint_id:
                # There is no snapshot before what is loaded first has been read whole.
                loaded = [feeds_what_is_loaded_first(self._graph, uid) for uid in inputs]
                if any(loaded):
                    self._end_inputs(index for index, is_loaded in enumerate(loaded) if is_loaded)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------ making

    def _make_services(self, config: Configuration) -> SlotServices:
        return SlotServices(
            config=config,
            clock=self.clock,
            exchange=cast("DataExchange", self._exchange),
            executor=_AtOnce(),
            background_executor=_AtOnce(),
            snapshot_executor=_AtOnce(),
            memory=ManagedMemory(config.taskmanager_memory_managed_bytes),
            work_directory=self._directory,
            post=self._mail.append,
            report=self._reported,
            artifact_paths={},
            open_store=_no_store,
        )

    def _index_of(self, vertex_id: str) -> int:
        """The subtask of a vertex that runs here: of one without parallelism it is the only one."""
        return min(self._subtask_index, self._vertices[vertex_id].parallelism - 1)

    def _task(self, vertex: graph_pb2.Vertex, inputs: frozenset[str]) -> TestedTask:
        restored = self._restored
        attempt = internal_pb2.AttemptId(
            job_id=_JOB_ID,
            vertex=vertex.id,
            subtask_index=self._index_of(vertex.id),
            # Like that of a restart, a number that nobody has used: files are named by it.
            attempt=restored.checkpoint_id,
        )
        deployment = deployment_of(self._graph, vertex, attempt, inputs)
        if restored.checkpoint_id:
            deployment.restore.CopyFrom(
                restored.task_of(self._graph, vertex, attempt.subtask_index)
            )
        head = vertex.operators[0].uid
        return make_task(
            deployment,
            self._services,
            self._tapped,
            (self._exchange.channel(head),) if head in inputs else (),
            tuple(e.source_vertex for e in self._graph.edges if e.target_vertex == vertex.id),
        )

    def _start(self) -> None:
        for task in self._tasks:
            task.execution.start()
        for task in reversed(self._tasks):
            while task.parts.subtask is None and not task.execution.has_ended:
                task.execution.step()
                self._deliver_mail()
        self._settle()

    # ------------------------------------------------------------ running

    def push(self, batch: pa.RecordBatch, input_index: int) -> None:
        """Hands a batch, of the input's schema, to the job."""
        self._open_input(input_index).send(batch)
        self._settle()

    def watermark(self, timestamp_ms: int, input_index: int | None) -> None:
        """Hands a watermark to one input, or to all of them."""
        self._check()
        indices = range(len(self._inputs)) if input_index is None else [input_index]
        for channel in [self._open_input(index) for index in indices]:
            channel.send_control(Watermark(timestamp_ms))
        self._settle()

    def _open_input(self, input_index: int) -> DirectChannel:
        self._check()
        channel = self._inputs[input_index]
        if channel.has_ended:
            raise JobRejected("the input has ended (end() was called): nothing can follow")
        return channel

    def advance(self, to_ms: int) -> None:
        """Moves the clock, and lets everything happen that is due on the way, in order."""
        self._check()
        while (due_ms := self._next_deadline_ms()) is not None and due_ms <= to_ms:
            self.clock.time_ms = max(self.clock.time_ms, due_ms)
            self._settle(with_sources=True)
        self.clock.time_ms = to_ms
        self._settle()

    def _next_deadline_ms(self) -> int | None:
        now_ms, now_ns = self.clock.now_ms(), self.clock.monotonic_ns()
        calls = (task.execution.next_call_ns(now_ms, now_ns) for task in self._tasks)
        return min((ns // 1_000_000 for ns in calls if ns is not None), default=None)

    def end(self, input_index: int | None) -> None:
        """Ends one input, or all of them: then windows and timers fire, sinks commit."""
        self._check()
        self._end_inputs(range(len(self._inputs)) if input_index is None else [input_index])
        if input_index is None:
            self._commit()

    def _end_inputs(self, indices: Iterable[int]) -> None:
        for channel in (self._inputs[index] for index in indices):
            if not channel.has_ended:
                channel.has_ended = True
                channel.send_control(EndOfData())
        self._settle(with_sources=True)

    def _commit(self) -> None:
        """The checkpoint behind the end of the data, where a sink waits for one."""
        if any(operator.needs_commit for _, operator in self._opened()):
            self.snapshot(is_completed=True)

    def read(self, rows_max: int | None) -> None:
        """Lets sources read until they have nothing more for now, or have brought enough rows."""
        self._check()
        before = self._rows()
        for task in self._tasks:
            while task.source and not task.has_ended_outputs:
                progress = _step(task.execution)
                self._settle()
                is_enough = rows_max is not None and self._rows() - before >= rows_max
                if is_enough or progress is not Progress.MORE:
                    break
        self._commit()

    def _rows(self) -> int:
        return sum(batch.num_rows for batch in self.batches)

    def _settle(self, *, with_sources: bool = False) -> None:
        """Runs everything until nothing is left to do."""
        has_moved = True
        while has_moved:
            has_moved = self._deliver_mail()
            for task in self._tasks:
                if task.source and not with_sources:
                    continue
                while _step(task.execution) is Progress.MORE:
                    has_moved = True
            self._check()

    def _deliver_mail(self) -> bool:
        """Runs what was posted; False when there was nothing."""
        has_mail = bool(self._mail)
        while self._mail:
            self._mail.popleft()()
        return has_mail

    def _check(self) -> None:
        """Raises what has failed, again and again: nothing goes on behind it."""
        if self._failed is not None and self._failure is None:
            graph = self._graph
            details = client_pb2.JobDetails(
                summary=client_pb2.JobSummary(job_id=_JOB_ID, name=graph.name),
                vertices=[client_pb2.VertexDetails(id=v.id, name=v.name) for v in graph.vertices],
                failure=self._failed,
            )
            self._failure = job_failed(details)
            error = next((t.execution.error for t in self._tasks if t.execution.error), None)
            if isinstance(error, KeyboardInterrupt):
                raise error
            raise self._failure from error
        if self._failure is not None:
            raise self._failure

    # ------------------------------------------------------------ what subtasks report

    def _tapped(self, spec: graph_pb2.Operator, element: OperatorOutput) -> None:
        if isinstance(element, SideOutput):
            if element.batch.num_rows:
                self.sides.setdefault(element.tag, []).append(element.batch)
        elif spec.uid != self._output:
            return
        elif isinstance(element, pa.RecordBatch):
            self.batches.append(element)
        elif isinstance(element, Watermark):
            self.watermark_ms = element.timestamp_ms

    def _reported(self, report: internal_pb2.SlotReport) -> None:
        event = report.task_event
        match event.WhichOneof("event"):
            case "state_changed" if event.state_changed.HasField("failure"):
                self._failed = self._failed or event.state_changed.failure
            case "splits_discovered":
                self._mail.append(partial(self._assign, event.attempt, event.splits_discovered))
            case "checkpoint_acknowledged":
                acknowledged = event.checkpoint_acknowledged.snapshot
                self._acknowledged[acknowledged.vertex] = acknowledged
            case "checkpoint_declined":
                self._declined = event.checkpoint_declined.reason
            case _:
                pass  # metrics, and states on the way

    def _assign(
        self, attempt: internal_pb2.AttemptId, discovered: internal_pb2.SplitsDiscovered
    ) -> None:
        """Gives a source its share of the splits that no snapshot knows."""
        uid = discovered.operator_uid
        known = self._restored.split_ids(uid)
        done = self._done.get(uid, NOTHING_DONE)
        given = self._given.setdefault(uid, set())
        wholes = {id.partition(PART_OF)[0] for id in (*known, *given)}
        splits = in_one_cut(
            discovered.splits,
            lambda ids: [
                held or id in wholes for id, held in zip(ids, done.holds(ids), strict=True)
            ],
        )
        admitted = done.admits([one.id for one in splits])
        new = [
            split
            for split, is_admitted in zip(splits, admitted, strict=True)
            if is_admitted and split.id not in known
        ]
        given.update(split.id for split in new)
        parallelism = self._vertices[attempt.vertex].parallelism
        added = internal_pb2.AddSplits(
            operator_uid=discovered.operator_uid,
            splits=new[attempt.subtask_index :: parallelism],
            final=discovered.final,
        )
        command = internal_pb2.TaskCommand(attempt=attempt, add_splits=added)
        self._by_vertex[attempt.vertex].execution.handle(command)

    # ------------------------------------------------------------ snapshots

    def snapshot(self, *, is_completed: bool) -> bytes:
        """Takes a checkpoint.

        Args:
            is_completed: sinks and backends hear that it is complete; else they hear nothing, as if the
                job had failed right behind it.

        Returns:
            The manifest, with all state in it.

        Raises:
            CheckpointAborted: it could not be taken.
            JobRejected: a subtask has done all its work, so there is nothing to take a snapshot of.
        """
        self._check()
        self._check_is_loaded()
        self._checkpoint_id += 1
        barrier = CheckpointBarrier(self._checkpoint_id, self.clock.time_ms)
        self._acknowledged, self._declined = {}, ""
        for task in self._tasks:
            self._send_barrier(task, barrier)
        for task in self._tasks:
            while task.source and task.vertex.id not in self._acknowledged and not self._declined:
                if _step(task.execution) is not Progress.MORE:
                    break
        self._settle()
        if self._declined:
            raise CheckpointAborted(self._checkpoint_id, self._declined)
        missing = self._by_vertex.keys() - self._acknowledged.keys()
        if missing:
            raise InvariantViolation(f"the barrier was lost on its way to {sorted(missing)}")
        manifest = checkpoint_pb2.CheckpointManifest(
            job_id=_JOB_ID,
            job_name=self._graph.name,
            checkpoint_id=self._checkpoint_id,
            triggered_at_ms=self.clock.time_ms,
            completed_at_ms=self.clock.time_ms,
            vertices=[fingerprint(vertex) for vertex in self._graph.vertices],
            subtasks=[self._acknowledged[task.vertex.id] for task in self._tasks],
        )
        sources = [(task.vertex.id, task.source) for task in self._tasks]
        done = self._done | {
            uid: self._done.get(uid, NOTHING_DONE).with_ids(ids)
            for (_, uid), ids in take_done_names(manifest, sources).items()
        }
        manifest.done_splits.extend(
            checkpoint_pb2.DoneSplits(operator_uid=uid, loose=held.loose.tobytes())
            for uid, held in done.items()
        )
        content = encode_manifest(manifest)
        if is_completed:
            self._done = done
            completed = internal_pb2.CheckpointCompleted(checkpoint_id=self._checkpoint_id)
            for task in self._tasks:
                command = internal_pb2.TaskCommand(checkpoint_completed=completed)
                task.execution.handle(command)
            self._settle()
        return content

    def _check_is_loaded(self) -> None:
        for task in self._tasks:
            if task.parts.is_loading:
                raise CheckpointAborted(
                    self._checkpoint_id + 1,
                    f"{task.vertex.name} reads its broadcast side first (load_first), and that has not ended: "
                    "call end(input=...) for it before",
                )

    def _send_barrier(self, task: TestedTask, barrier: CheckpointBarrier) -> None:
        if task.execution.has_ended:
            raise JobRejected(
                "snapshot: the source has been read to its end, and everything has finished"
            )
        if task.inputs:
            for channel in task.inputs:
                channel.send_control(barrier)
        elif all(self._by_vertex[vertex].has_ended_outputs for vertex in task.producers):
            trigger = internal_pb2.TriggerCheckpoint(
                checkpoint_id=barrier.checkpoint_id, timestamp_ms=barrier.timestamp_ms
            )
            command = internal_pb2.TaskCommand(trigger_checkpoint=trigger)
            task.execution.handle(command)

    # ------------------------------------------------------------ looking

    def _opened(self) -> Iterable[tuple[graph_pb2.Operator, Operator]]:
        return [pair for task in self._tasks for pair in task.parts.opened]

    def state(self, name: str, key: Any, operator: str | None) -> Any:
        """The content of a state; see ``inspection.state_of``."""
        self._check()
        return state_of(self._opened(), name, key, operator)

    def timers(
        self, domain: Literal["event", "processing"], key: Any, operator: str | None
    ) -> list[int]:
        """Times of timers; see ``inspection.timers_of``."""
        self._check()
        return timers_of(self._opened(), domain, key, operator)

    def count(self, counter: str) -> int:
        """The sum of a counter of ``SubtaskCounters`` over all subtasks."""
        return sum(getattr(task.parts.counters, counter) for task in self._tasks)

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Ends everything where it stands and removes its files; repeatable."""
        for task in getattr(self, "_tasks", ()):
            task.execution.cancel()
        shutil.rmtree(self._directory, ignore_errors=True)


def _no_store(directory: str) -> Any:
    raise InvariantViolation(f"snapshots are inline, and {directory!r} was asked for")


def _step(execution: Execution) -> Progress:
    """A step; what it leaves held back is sent at once."""
    progress = execution.step()
    return execution.flush() if progress is Progress.IDLE else progress
