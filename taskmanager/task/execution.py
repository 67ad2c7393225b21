"""One execution attempt as the daemon sees it: its states, its failure, its log.

This is the boundary of a task: whatever user code, connectors or operators raise ends this attempt
as FAILED with a cause, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol, TextIO

import structlog

from common.clock import Clock, steady_ms
from common.elements import CheckpointBarrier
from common.outage_log import OutageLog
from common.pb import internal_pb2
from penstock.errors import TaskFailure
from penstock.pb import checkpoint_pb2, client_pb2
from penstock.pb.client_pb2 import (
    ATTEMPT_STATE_CANCELED,
    ATTEMPT_STATE_CANCELING,
    ATTEMPT_STATE_DEPLOYING,
    ATTEMPT_STATE_FAILED,
    ATTEMPT_STATE_FINISHED,
    ATTEMPT_STATE_INITIALIZING,
    ATTEMPT_STATE_RUNNING,
)
from penstock.storage.manifest import properties_of
from taskmanager.alignment.void_checkpoints import void_ids
from taskmanager.operators.collect_sink import CollectOperator
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.operators.source import SourceOperator
from taskmanager.snapshot.subtask_snapshot import LastStates
from taskmanager.task.attempt_failure import cause_of, missing_partition, readable
from taskmanager.task.lifecycle import Lifecycle
from taskmanager.task.restore_silence import RestoreSilence, end_process
from taskmanager.task.subtask import Progress, Subtask
from taskmanager.task.written_partitions import written_by
from taskmanager.user_code.user_output import AttemptOutput

_log = structlog.get_logger()

_LEAVE_AGAIN_NS = 1_000_000_000


class SubtaskParts(Protocol):
    """What a deployment is turned into, step by step."""

    counters: SubtaskCounters

    def create_partitions(self, execution: Execution) -> None:
        """Makes the outputs."""

    def open_state(self, execution: Execution, when_open: Callable[[], None]) -> None:
        """Gives the operators their state (state INITIALIZING), on an I/O thread where that may take
        long; ``when_open`` is then called on the mailbox thread, unless the attempt has ended."""

    def build(self, execution: Execution) -> Subtask:
        """Opens gate and operators (state INITIALIZING)."""

    @property
    def source(self) -> SourceOperator | None:
        """The source at the head of the chain, once built."""

    @property
    def collects(self) -> list[CollectOperator]:
        """The collect sinks of the chain, once built."""

    @property
    def is_loading(self) -> bool:
        """Whether inputs wait for another one to be read whole, once built."""

    @property
    def restore_limit_ms(self) -> int:
        """How long its state may be opened without another byte being read."""

    @property
    def restored_bytes(self) -> int:
        """What has been read of it so far."""

    def replace_producer(self, channel: internal_pb2.InputChannel) -> None:
        """Reads an edge that keeps its rows from a new attempt."""

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """Tells the backends, the gate and the outputs that a checkpoint is complete."""

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Tells the backends and the outputs that a checkpoint will not complete."""

    def take_last_states(
        self, when_written: Callable[[LastStates | None], None]
    ) -> LastStates | None:
        """The lists of functions as the subtask leaves them, for the checkpoints to come; None = they are
        being written, and ``when_written`` is called with them on the mailbox thread, with None where that
        did not work."""

    def gauges(self) -> internal_pb2.SubtaskGauges:
        """What metrics endpoints show beside the counters."""

    def close(self) -> list[BaseException]:
        """Closes the state, after the operators; returns what went wrong on the way."""

    def release(self) -> None:
        """Releases the outputs: the attempt has not finished."""


class Execution:
    """Runs one attempt from its deployment to its terminal state."""

    def __init__(
        self,
        deployment: internal_pb2.TaskDeployment,
        parts: SubtaskParts,
        *,
        report: Callable[[internal_pb2.SlotReport], None],
        clock: Clock,
        taskmanager_id: str,
        post: Callable[[Callable[[], None]], None],
        schedule: Callable[[], None],
        deadline_moved: Callable[[], None] = lambda: None,
        output: AttemptOutput | None = None,
        open_log: Callable[[], TextIO] | None = None,
    ) -> None:
        self.attempt = deployment.attempt
        self._vertex_name = deployment.vertex.name
        self._parts = parts
        self._report = report
        self._clock = clock
        self._taskmanager_id = taskmanager_id
        self._post = post
        self._schedule = schedule
        self._deadline_moved = deadline_moved
        self._output = output
        self._open_log = open_log
        self._log_file: TextIO | None = None
        self._lifecycle = Lifecycle()
        self._declines = OutageLog(
            _log, "checkpoint.declined", "checkpoint.acknowledged_again", "warning"
        )
        self._subtask: Subtask | None = None
        self._silence: RestoreSilence | None = None
        self._early: list[internal_pb2.TaskCommand] = []
        self._has_reported_end = False
        self._is_loading = False
        self._is_leaving = False
        self._leaves_again_at_ns: int | None = None

    @property
    def has_ended(self) -> bool:
        """True in a terminal state."""
        return self._lifecycle.is_terminal

    @property
    def passed_checkpoint_id(self) -> int:
        """Of the newest barrier that has passed it; 0 = none has."""
        return 0 if self._subtask is None else self._subtask.passed_checkpoint_id

    # -- work

    def start(self) -> None:
        """Opens the log and makes the outputs, so that consumers find them."""
        with self._boundary():
            if self._open_log is not None:
                self._log_file = self._open_log()
            self._parts.create_partitions(self)

    def step(self, turn_ns: int = 0) -> Progress:
        """Does one bounded piece of work, and goes on while there is more and less than ``turn_ns`` have passed."""
        if self.has_ended:
            return Progress.ENDED
        with self._boundary():
            if self._lifecycle.state == ATTEMPT_STATE_DEPLOYING:
                self._move_to(ATTEMPT_STATE_INITIALIZING)
                return Progress.MORE
            if self._subtask is None:
                self._open_state()
                return Progress.IDLE
            progress = self._subtask.step(turn_ns)
            if self._is_loading and not self._parts.is_loading:
                self._is_loading = False
                self._report_event(internal_pb2.TaskEvent(side_loaded=internal_pb2.SideLoaded()))
            if progress is Progress.WAITING and not self._has_reported_end:
                self._has_reported_end = True
                reached = internal_pb2.EndOfDataReached(written=written_by(self._subtask))
                self._report_event(internal_pb2.TaskEvent(end_of_data=reached))
            elif progress is Progress.ENDED:
                self._leave()
            return progress
        return Progress.ENDED

    def flush(self) -> Progress:
        """Sends what is held back while the slot has something else to do."""
        if not self.has_ended and self._subtask is not None and self._subtask.holds_back:
            with self._boundary():
                return self._subtask.flush()
        return Progress.IDLE

    def _open_state(self) -> None:
        now_ms, parts = steady_ms(self._clock), self._parts
        if self._silence is None:
            self._silence = RestoreSilence(parts.restore_limit_ms, now_ms)
            parts.open_state(self, self._build)
        elif self._silence.look(parts.restored_bytes, now_ms):
            self._post(end_process)  # behind what this attempt has to say of its own end
            raise self._silence.error()

    def _build(self) -> None:
        self._subtask = self._parts.build(self)
        self._is_loading = self._parts.is_loading
        self._move_to(ATTEMPT_STATE_RUNNING)
        early, self._early = self._early, []
        for command in early:
            self.handle(command)
        self._schedule()

    def run(self, action: Callable[[], None]) -> None:
        """Runs an action for this attempt within its boundary; nothing once it has ended."""
        if not self.has_ended:
            with self._boundary():
                action()
            self._deadline_moved()

    def handle(self, command: internal_pb2.TaskCommand) -> None:
        """Carries out a command of the JobManager; one that comes before the operators are open waits.

        Splits are such: subtask 0 may have found them while another slot is still building its chain. A cancellation
        waits for nothing.
        """
        if command.HasField("cancel"):
            self.cancel(is_final=command.cancel.is_final)
            return
        if self._subtask is None:
            self._early.append(command)
            return
        kind = command.WhichOneof("command")
        if kind == "add_splits":
            self.run(lambda: self._add_splits(command.add_splits))
        elif kind == "commit_output":
            self.run(self._subtask.commit_output)
        elif kind == "trigger_checkpoint":
            self.run(partial(self._trigger, command.trigger_checkpoint))
        elif kind == "replace_producer":
            self.run(partial(self._parts.replace_producer, command.replace_producer.channel))
        elif kind == "checkpoint_completed":
            completed = command.checkpoint_completed
            if completed.savepoint:
                # What it covers joins the next checkpoint, as what an aborted one does; its output stays in doubt.
                self.run(partial(self._parts.checkpoint_aborted, completed.checkpoint_id))
            else:
                self._complete_checkpoint(completed)
        elif kind == "checkpoint_aborted":
            aborted = command.checkpoint_aborted
            for checkpoint_id in void_ids(aborted):
                self._abort_checkpoint(checkpoint_id, is_known=not aborted.first_checkpoint_id)
        self._schedule()

    def results_taken(self, taken: internal_pb2.ResultsTaken) -> None:
        """A chunk of a collect sink has arrived."""
        for collect in self._parts.collects:
            if collect.collect_id == taken.collect_id:
                collect.on_results_taken(taken)

    def _trigger(self, wanted: internal_pb2.TriggerCheckpoint) -> None:
        assert self._subtask is not None, "commands wait until the operators are open"
        fields = wanted.checkpoint_id, wanted.timestamp_ms, wanted.leader_epoch
        self._subtask.trigger(CheckpointBarrier(*fields, properties_of(wanted.properties)))

    def _add_splits(self, command: internal_pb2.AddSplits) -> None:
        source = self._parts.source
        if source is None:
            raise TaskFailure(f"splits for {self._vertex_name}, which has no source running")
        source.add_splits(command)

    def _complete_checkpoint(self, completed: internal_pb2.CheckpointCompleted) -> None:
        """The backends hear of it first: what operators then do may ask for the next snapshot."""
        checkpoint_id = completed.checkpoint_id

        def end() -> None:
            assert self._subtask is not None, "commands wait until the operators are open"
            self._parts.checkpoint_completed(checkpoint_id)
            self._subtask.checkpoint_completed(checkpoint_id)
            if completed.awaited:
                committed = internal_pb2.CheckpointCommitted(checkpoint_id=checkpoint_id)
                self._report_event(internal_pb2.TaskEvent(checkpoint_committed=committed))

        self.run(end)

    def _abort_checkpoint(self, checkpoint_id: int, *, is_known: bool) -> None:
        def abort() -> None:
            assert self._subtask is not None, "commands wait until the operators are open"
            self._parts.checkpoint_aborted(checkpoint_id)
            self._subtask.checkpoint_aborted(checkpoint_id, is_known=is_known)

        self.run(abort)

    # -- deadlines

    def deadline_ns(self, now_ms: int, now_ns: int) -> int | None:
        """Monotonic time of the earliest of both: a step that it wants, and a batch that has to leave."""
        times = (self.next_call_ns(now_ms, now_ns), self.flush_deadline_ns())
        return min((at_ns for at_ns in times if at_ns is not None), default=None)

    def next_call_ns(self, now_ms: int, now_ns: int) -> int | None:
        """Monotonic time at which it wants a step, even where nothing comes."""
        if self._leaves_again_at_ns is not None:
            return self._leaves_again_at_ns
        if self._subtask is None:
            return None if self._silence is None else self._silence.due_ms * 1_000_000
        return self._subtask.next_call_ns(now_ms, now_ns)

    def flush_deadline_ns(self) -> int | None:
        """Monotonic time at which a batch that is being filled has to leave."""
        return self._subtask.flush_deadline_ns() if self._subtask is not None else None

    def flush_if_due(self, now_ns: int) -> None:
        """Sends batches that have waited for the buffer timeout."""
        if self._subtask is not None:
            self.run(partial(self._subtask.flush_if_due, now_ns))

    # -- ends

    def cancel(self, *, is_final: bool = False) -> None:
        """Ends the attempt where it stands.

        Args:
            is_final: the job is never gone on with.
        """
        if self.has_ended:
            return
        self._move_to(ATTEMPT_STATE_CANCELING)
        if is_final and self._subtask is not None:
            self._subtask.discard_output()
        with self._capturing():
            self._close()
        self._move_to(ATTEMPT_STATE_CANCELED)

    def fail(self, error: BaseException) -> None:
        """Ends the attempt as FAILED with this cause; to be called from its own work only."""
        if self.has_ended:
            return
        cause = self._cause_of(error)
        if self._log_file is not None:
            with suppress(OSError):  # a full disk must not hide the cause
                self._log_file.write(f"{cause.traceback or cause.message}\n")
        self._close()
        self._move_to(ATTEMPT_STATE_FAILED, cause, missing_partition(error))

    def fail_later(self, error: BaseException) -> None:
        """Ends the attempt as FAILED as soon as what runs now has come to its end; any thread."""

        def fail() -> None:
            raise error

        self._post(lambda: self.run(fail))

    def _leave(self) -> None:
        """All is done: what its functions keep without a key outlives the attempt."""
        if self._is_leaving:
            return
        self._is_leaving, self._leaves_again_at_ns = True, None
        states = self._parts.take_last_states(self._left)
        if states is not None:
            self._finish(states)

    def _left(self, states: LastStates | None) -> None:
        if states is not None:
            self.run(partial(self._finish, states))
        else:
            again_at_ns = self._clock.monotonic_ns() + _LEAVE_AGAIN_NS
            self._is_leaving, self._leaves_again_at_ns = False, again_at_ns
            self._deadline_moved()

    def _finish(self, last_states: LastStates) -> None:
        errors = self._close(has_finished=True)
        if errors:
            self._parts.release()
            self._move_to(ATTEMPT_STATE_FAILED, self._cause_of(errors[0]))
        else:
            self._move_to(ATTEMPT_STATE_FINISHED, last_states=last_states)

    def _close(self, *, has_finished: bool = False) -> list[BaseException]:
        errors: list[BaseException] = []
        if self._subtask is not None:
            errors += self._subtask.close(has_finished=has_finished)
        else:
            self._parts.release()
        errors += self._parts.close()
        for error in errors:
            _log.warning("subtask.close_failed", reason=repr(error), **self._names())
        if self._log_file is not None:
            if self._output is not None:
                self._output.switch_to(None)
            with suppress(OSError):
                self._log_file.close()
            self._log_file = None
        return errors

    @contextmanager
    def _boundary(self) -> Iterator[None]:
        """Whatever is raised within ends the attempt."""
        with self._capturing():
            try:
                yield
            except BaseException as error:  # noqa: BLE001 - the boundary of a task
                self.fail(error)

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """What is printed within goes to the attempt's log."""
        if self._output is not None:
            self._output.switch_to(self._log_file)
        try:
            yield
        finally:
            if self._output is not None:
                self._output.switch_to(None)

    # -- reports

    def _names(self) -> dict[str, object]:
        return {
            "job_id": self.attempt.job_id,
            "vertex": self.attempt.vertex,
            "subtask_index": self.attempt.subtask_index,
            "attempt": self.attempt.attempt,
        }

    def settle_waiting(self) -> None:
        """Brings the times of waiting in the counters up to now."""
        if self._subtask is not None:
            self._subtask.settle_waiting()

    def metrics(self) -> internal_pb2.AttemptMetrics:
        """The counters of this attempt."""
        metrics, gauges = self._parts.counters.to_proto(), self._parts.gauges()
        return internal_pb2.AttemptMetrics(attempt=self.attempt, metrics=metrics, gauges=gauges)

    def report_splits(self, discovered: internal_pb2.SplitsDiscovered) -> None:
        """Sends discovered splits to the JobManager."""
        self._report_event(internal_pb2.TaskEvent(splits_discovered=discovered))

    def acknowledge(
        self, barrier: CheckpointBarrier, snapshot: checkpoint_pb2.SubtaskSnapshot
    ) -> None:
        """Tells the JobManager that the snapshot of a checkpoint is safe; any thread."""
        self._declines.worked(**self._names())
        acknowledged = internal_pb2.CheckpointAcknowledged(
            checkpoint_id=barrier.checkpoint_id,
            snapshot=snapshot,
            leader_epoch=barrier.leader_epoch,
        )
        self._report_event(internal_pb2.TaskEvent(checkpoint_acknowledged=acknowledged))

    def decline(self, barrier: CheckpointBarrier, reason: str) -> None:
        """Tells the JobManager that there will be no snapshot for a checkpoint; any thread."""
        self.decline_as(barrier, internal_pb2.CheckpointDeclined(reason=readable(reason)))

    def decline_as(
        self, barrier: CheckpointBarrier, declined: internal_pb2.CheckpointDeclined
    ) -> None:
        """Declines a checkpoint in the words of the wire, whatever else they say beside the reason."""
        if declined.is_comparing:
            _log.info("checkpoint.declined", reason=declined.reason, **self._names())
        else:
            self._declines.failed(reason=declined.reason, **self._names())
        declined.checkpoint_id = barrier.checkpoint_id
        declined.leader_epoch = barrier.leader_epoch
        self._report_event(internal_pb2.TaskEvent(checkpoint_declined=declined))

    def _move_to(
        self,
        state: client_pb2.AttemptState.ValueType,
        failure: client_pb2.FailureCause | None = None,
        missing_partition: internal_pb2.PartitionId | None = None,
        last_states: LastStates = (),
    ) -> None:
        self._lifecycle.move_to(state)
        if self._lifecycle.is_terminal:  # the last counters go ahead of the end
            metrics = internal_pb2.SlotMetrics(attempts=[self.metrics()])
            self._report(internal_pb2.SlotReport(metrics=metrics))
        changed = internal_pb2.AttemptStateChanged(
            state=state,
            failure=failure,
            missing_partition=missing_partition,
            last_states=last_states,
            written=written_by(self._subtask) if state == ATTEMPT_STATE_FINISHED else (),
        )
        self._report_event(internal_pb2.TaskEvent(state_changed=changed))
        if self._lifecycle.is_terminal:
            self._schedule()  # one more turn, in which the slot forgets the attempt

    def _report_event(self, event: internal_pb2.TaskEvent) -> None:
        event.attempt.CopyFrom(self.attempt)
        self._report(internal_pb2.SlotReport(task_event=event))

    def _cause_of(self, error: BaseException) -> client_pb2.FailureCause:
        return cause_of(error, self.attempt, self._taskmanager_id, self._clock.now_ms())
