"""What the dispatcher knows of one job, running or ended, and how it shows it.

Invariants: ``changed`` is set, and replaced, at each change of the job's state; timestamps are
written once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final

from common.metrics import NamedMetrics
from common.pb import internal_pb2, job_record_pb2
from jobmanager.checkpoint.repeated_output import RepeatedOutput
from jobmanager.failover.exceptions_history import ExceptionEntry
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.failure_enricher import FailureLabels
from jobmanager.graph.execution_attempt import AttemptKey, ExecutionAttempt
from jobmanager.job.checkpoint_views import (
    add_last_checkpoint,
    checkpoints_of,
    newest_checkpoint,
)
from jobmanager.job.exception_views import exception_entry, exceptions_of, repeated_message
from jobmanager.job.job_description import is_checkpoint_path
from jobmanager.job.job_master import JobMaster
from jobmanager.job.operations_runner import OperationsRunner
from jobmanager.messages.job_state import JobState, is_terminal
from jobmanager.rpc.graph_convert import attempt_key, cause_message
from penstock.graph.persisted import persisted_sources
from penstock.graph.start_command import start_command
from penstock.pb import checkpoint_pb2, client_pb2, graph_pb2
from penstock.storage.prepared_output import PreparedOutput

DETAILS_BYTES_MAX: Final = 256 * 1024
PATH_KEY: Final = "execution.state-recovery.path"
_SAID_BEFORE: Final = {
    PreparedOutput.COMMITTED_HERE.value: "commit",
    PreparedOutput.LEFT.value: "leave",
}
"""What was said of the output of a savepoint, by what became of that: it is asked for again."""


class JobRecord:
    """One job as clients see it.

    Args:
        graph: its graph; only what is shown is kept.
        master: its machine; None for a job that ended with an earlier JobManager.
        submitted_at_ms: when it was accepted.
        checkpoint_directory: its own in the checkpoint store, "" = none.
        slot_wait: what it waits for of the slot pool; None = for nothing.
        problem: why it cannot be gone on with yet; "" = it can.
        repeated: output that may be there twice; grows.
        operations: what users have asked of it.
        has_discarded: its checkpoints are not kept.
        started_from: what it was started from; None = from nothing.
        published: a savepoint of its own whose output another job commits, behind which it had gone back; "" = which is
            gone; None = there is none.
        history: what has become of it, for the next JobManager.
        stored: of a job that ended with an earlier JobManager, what that has left of it.
    """

    def __init__(
        self,
        job_id: str,
        graph: graph_pb2.JobGraph,
        master: JobMaster | None,
        submitted_at_ms: int,
        checkpoint_directory: str = "",
        slot_wait: Callable[[], client_pb2.SlotWait | None] = lambda: None,
        problem: Callable[[], str] = lambda: "",
        repeated: Collection[RepeatedOutput] = (),
        operations: OperationsRunner | None = None,
        has_discarded: Callable[[], bool] = lambda: False,
        started_from: Callable[[], checkpoint_pb2.StartedFrom | None] = lambda: None,
        published: Callable[[], str | None] = lambda: None,
        history: Callable[[], job_record_pb2.StoredHistory | None] = lambda: None,
        stored: job_record_pb2.StoredJob | None = None,
    ) -> None:
        self.job_id = job_id
        self.name = graph.name
        self.reads = frozenset((one.name, one.job_id) for one in persisted_sources(graph))
        """Of what other jobs have left: name and job."""
        self.state = JobState.CREATED
        self.submitted_at_ms = submitted_at_ms
        self.ended_at_ms = 0
        self.end_cause: FailureCause | None = None
        """What ended it where that was not its machine."""
        self.left: str | None = None
        """What it can be started from again, as was looked up; "" = nothing, or another job has claimed it."""
        self.unstored = ""
        """Why something of its end cannot be stored yet; "" = it is."""
        self.artifact_ids = frozenset(artifact.id for artifact in graph.artifacts)
        self.metrics: dict[AttemptKey, internal_pb2.AttemptMetrics] = {}
        self._operators = {vertex.id: vertex.name for vertex in graph.vertices}
        self.changed = asyncio.Event()
        self.collect_limits = {
            operator.sink.collect.collect_id: operator.sink.collect.limit
            for vertex in graph.vertices
            for operator in vertex.operators
            if operator.sink.HasField("collect")
        }
        self._master = master
        self._checkpoint_directory = checkpoint_directory
        self._slot_wait = slot_wait
        self._problem = problem
        self._repeated = repeated
        self.operations = operations or OperationsRunner(f"job {job_id}")
        self._has_discarded = has_discarded
        self._started_from = started_from
        self._published = published
        self.begins_with = graph.config.get(PATH_KEY, "")
        self._run_options = list(graph.run_options)
        self._run_arguments = list(graph.run_arguments)
        self._vertices = [_shown(vertex) for vertex in graph.vertices]
        self.history = history
        self._stored = stored or job_record_pb2.StoredJob()
        self.running_at_ms = self._stored.history.running_at_ms

    @property
    def ended(self) -> bool:
        """True when the job has reached a terminal state."""
        return is_terminal(self.state)

    @property
    def failure(self) -> FailureCause | None:
        """The last failure, whether or not it ended the job."""
        if self.end_cause is not None or self._master is None:
            return self.end_cause
        return self._master.failure

    def enter(self, state: JobState, now_ms: int) -> None:
        """The job's state has changed."""
        self.state = state
        if state is JobState.RUNNING and not self.running_at_ms:
            self.running_at_ms = now_ms
        if is_terminal(state) and not self.ended_at_ms:
            self.ended_at_ms = now_ms
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def note_metrics(self, metrics: internal_pb2.AttemptMetrics) -> None:
        """The latest counters of an attempt; those of unknown attempts are ignored."""
        key = attempt_key(metrics.attempt)
        if self._master is not None and self._master.graph.find(key) is not None:
            for known in [known for known in self.metrics if known.subtask == key.subtask]:
                if self._master.graph.find(known) is None:
                    del self.metrics[known]
            self.metrics[key] = metrics

    def named_metrics(self) -> list[NamedMetrics]:
        """The metrics with the names of job and operators; any thread may ask."""
        return [
            NamedMetrics(self.name, self._operators[entry.attempt.vertex], entry)
            for entry in tuple(self.metrics.values())
        ]

    def taskmanagers_of(self, vertex: str, subtask_index: int) -> list[str]:
        """Where attempts of a job ran; "" = all vertices, -1 = all subtasks."""
        if self._master is None:
            return []
        return sorted(
            {
                attempt.taskmanager_id
                for attempt in (*self._master.graph.current(), *self._master.graph.rivals())
                if attempt.taskmanager_id
                and vertex in ("", attempt.key.vertex)
                and subtask_index in (-1, attempt.key.subtask_index)
            }
        )

    def has_subtask(self, vertex: str, subtask_index: int) -> bool:
        """Whether "" or a vertex, and -1 or a subtask of it, belong to the job."""
        return any(
            vertex in ("", shown.id) and -1 <= subtask_index < shown.parallelism
            for shown in self._vertices
        )

    def summary(self) -> client_pb2.JobSummary:
        """One line of the list of jobs."""
        return client_pb2.JobSummary(
            job_id=self.job_id,
            name=self.name,
            state=client_pb2.JobState.ValueType(self.state.value),
            submitted_at_ms=self.submitted_at_ms,
            running_at_ms=self.running_at_ms,
            ended_at_ms=self.ended_at_ms if self.ended else 0,
            restarts=self._restarts,
            problem=self._problem() or self._unstored_problem(),
            restorable_from=self.restorable_from(),
        )

    @property
    def _restarts(self) -> int:
        if self._master is not None:
            return self._master.restarts
        counts = self._stored.history.restarts
        return counts.counted + counts.uncounted

    def _unstored_problem(self) -> str:
        return f"how the job ended cannot be stored yet: {self.unstored}" if self.unstored else ""

    def needs(self) -> str:
        """What it was started from, as long as a failure takes it back there; "" = nothing of others."""
        if self.ended:
            return ""
        started_from = self._started_from()
        if started_from is None:  # or its HEAD has not been read yet
            return self.begins_with
        is_independent = started_from.independent_since_checkpoint_id or started_from.taken_over
        return "" if is_independent else started_from.path

    def claimed(self) -> str:
        """What it was started from and has made its own; "" = nothing, or that is not known (any more)."""
        started_from = self._started_from()
        return started_from.path if started_from is not None and started_from.claimed else ""

    def restorable_from(self) -> str:
        """What a job that has ended can be started from again; "" = nothing."""
        if not self.ended or self.state is JobState.FINISHED:
            return ""
        if self._has_discarded():
            return ""
        if self.left is not None or self._master is None:
            return self.left or ""
        if (published := self._published()) is not None:
            return published
        own = newest_checkpoint(self._master, self._checkpoint_directory)
        started_from = self._started_from()
        if own or started_from is None:
            return own
        is_damaged = started_from.checkpoint_id in self._master.unusable_checkpoints
        return "" if is_damaged else started_from.path

    def checkpoints(self) -> client_pb2.ListCheckpointsResponse:
        """The last checkpoints, the newest first."""
        if self._master is None:
            return self._stored.history.checkpoints
        return checkpoints_of(self._master, self._checkpoint_directory)

    def exceptions(self) -> client_pb2.ListExceptionsResponse:
        """The last failures, the newest first."""
        entries = self._entries
        has_end = bool(entries) and entries[0].ended_job
        if self.state is JobState.FAILED and self.end_cause is not None and not has_end:
            end = ExceptionEntry(self.end_cause, FailureLabels().of(self.end_cause))
            entries = (end, *entries)
        shown = exceptions_of(entries, self._repeated)
        shown.repeated_output.extend(self._stored.end.details.repeated_output)
        return shown

    @property
    def _entries(self) -> tuple[ExceptionEntry, ...]:
        if self._master is not None:
            return self._master.exceptions.entries
        return tuple(map(exception_entry, self._stored.history.exceptions))

    def details(self) -> client_pb2.JobDetails:
        """Everything a client may see."""
        details = client_pb2.JobDetails(
            summary=self.summary(),
            vertices=self._vertices,
            repeated_output=map(repeated_message, self._repeated),
        )
        if self._stored.end.HasField("details"):
            details.CopyFrom(self._stored.end.details)
            details.summary.CopyFrom(self.summary())
        if self.failure is not None:
            details.failure.CopyFrom(cause_message(self.failure))
        if (started_from := self._started_from()) is not None:
            details.started_from.CopyFrom(started_from)
        if path := details.summary.restorable_from:
            details.start_again = self._start_again(path, details.started_from)
        if (slot_wait := self._slot_wait()) is not None:
            details.slot_wait.CopyFrom(slot_wait)
        if self._master is None:
            return details
        add_last_checkpoint(details, self._master)
        vertices = {vertex.id: vertex for vertex in details.vertices}
        for attempt in self._master.graph.current():
            vertices[attempt.key.vertex].subtasks.append(self._attempt(attempt))
        for rival in self._master.graph.rivals():
            vertices[rival.key.vertex].speculative_attempts.append(self._attempt(rival))
        return details

    def _start_again(self, path: str, started_from: checkpoint_pb2.StartedFrom) -> str:
        """The command for that, which says of a savepoint what has to be said."""
        is_begin = path == self.begins_with
        if is_begin and started_from.is_savepoint:
            in_doubt = _SAID_BEFORE.get(started_from.output, "")
        else:
            in_doubt = "" if is_checkpoint_path(path) else "leave"  # another job commits its output
        return start_command(
            self.name,
            path,
            self._run_options,
            self._run_arguments,
            in_doubt=in_doubt,
            ignores_unclaimed=is_begin and bool(started_from.dropped_states),
        )

    def details_at_end(self) -> client_pb2.JobDetails:
        """What is kept of them when the job has ended, so long at most as ``DETAILS_BYTES_MAX``."""
        details = self.details()
        details.ClearField("summary")
        details.ClearField("start_again")
        details.ClearField("slot_wait")
        if details.ByteSize() > DETAILS_BYTES_MAX:
            for vertex in details.vertices:
                for subtask in vertex.subtasks:
                    subtask.ClearField("metrics")
        if details.ByteSize() > DETAILS_BYTES_MAX:
            for vertex in details.vertices:
                vertex.ClearField("subtasks")
                vertex.ClearField("speculative_attempts")
        return details

    def _attempt(self, attempt: ExecutionAttempt) -> client_pb2.SubtaskDetails:
        metrics = self.metrics.get(attempt.key)
        return client_pb2.SubtaskDetails(
            subtask_index=attempt.key.subtask_index,
            attempt=attempt.key.attempt,
            state=client_pb2.AttemptState.ValueType(attempt.state.value),
            taskmanager_id=attempt.taskmanager_id,
            slot_id=attempt.slot_id,
            metrics=None if metrics is None else metrics.metrics,
        )


def _shown(vertex: graph_pb2.Vertex) -> client_pb2.VertexDetails:
    return client_pb2.VertexDetails(
        id=vertex.id,
        name=vertex.name,
        parallelism=vertex.parallelism,
        max_parallelism=vertex.max_parallelism,
        operators=[operator.name for operator in vertex.operators],
        is_source=any(operator.HasField("source") for operator in vertex.operators),
        is_sink=any(operator.HasField("sink") for operator in vertex.operators),
    )
