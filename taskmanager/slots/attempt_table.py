"""The execution attempts in one slot process and their last known states (pure).

It decides which of a slot's reports go on to the JobManager, and what is reported for attempts that
can no longer speak for themselves. A process outlives many attempts: of those that have ended, only the newest
of each subtask is kept; older ones are known by their numbers. Invariant: each attempt gets exactly one
terminal event.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from common.pb import internal_pb2
from penstock.pb import client_pb2
from penstock.pb.client_pb2 import (
    ATTEMPT_STATE_CANCELED,
    ATTEMPT_STATE_CANCELING,
    ATTEMPT_STATE_DEPLOYING,
    ATTEMPT_STATE_FAILED,
    ATTEMPT_STATE_FINISHED,
    AttemptState,
)
from taskmanager.slots.attempt_history import AttemptHistory
from taskmanager.task.lifecycle import TERMINAL

JobAttemptKey = tuple[str, str, int, int]
"""Job, vertex, subtask index, attempt."""


def key_of(attempt: internal_pb2.AttemptId) -> JobAttemptKey:
    """The attempt's id as a key of mappings."""
    return (attempt.job_id, attempt.vertex, attempt.subtask_index, attempt.attempt)


def describe(attempt: internal_pb2.AttemptId) -> str:
    """The attempt as a person reads it."""
    return f"{attempt.vertex}/{attempt.subtask_index} (attempt {attempt.attempt})"


@dataclass(slots=True)
class _Record:
    attempt: internal_pb2.AttemptId
    history: AttemptHistory
    state: AttemptState.ValueType = field(default=ATTEMPT_STATE_DEPLOYING)
    is_cancelled: bool = False
    is_final: bool = False


def state_event(
    attempt: internal_pb2.AttemptId,
    state: AttemptState.ValueType,
    failure: client_pb2.FailureCause | None = None,
) -> internal_pb2.TaskEvent:
    """The event that an attempt has reached a state."""
    return internal_pb2.TaskEvent(
        attempt=attempt,
        state_changed=internal_pb2.AttemptStateChanged(state=state, failure=failure),
    )


class AttemptTable:
    """The attempts of one slot process.

    Example: an attempt ends once; what its process takes with it is told by others.
        >>> attempt = internal_pb2.AttemptId(job_id="job", vertex="v1")
        >>> deployment = internal_pb2.TaskDeployment(attempt=attempt)
        >>> table = AttemptTable()
        >>> table.deployed(deployment), table.deployed(deployment)
        (True, False)
        >>> [told] = table.process_ended("killed by signal 9", "tm-1", now_ms=5, is_asked_for=False)
        >>> told.state_changed.failure.message
        'killed by signal 9'
        >>> table.observe(state_event(attempt, ATTEMPT_STATE_FAILED))
        False
    """

    def __init__(self) -> None:
        self._records: dict[JobAttemptKey, _Record] = {}
        self._newest: dict[tuple[str, str, int], int] = {}
        """Subtask -> number of its newest attempt here."""
        self._has_ended = False

    def deployed(self, deployment: internal_pb2.TaskDeployment) -> bool:
        """Takes in an attempt; False when it is here already (a repeated call)."""
        attempt = deployment.attempt
        if self.contains(attempt):
            return False
        *subtask, number = key_of(attempt)
        self._records = {
            key: record
            for key, record in self._records.items()
            if [*key[:3]] != subtask or record.state not in TERMINAL
        }
        self._newest[key_of(attempt)[:3]] = number
        # A copy: the message it is part of would stay in memory with it.
        own = internal_pb2.AttemptId()
        own.CopyFrom(attempt)
        self._records[key_of(attempt)] = _Record(own, AttemptHistory(deployment))
        return True

    def told(self, command: internal_pb2.TaskCommand) -> None:
        """The JobManager has something for an attempt that has not ended."""
        record = self._records.get(key_of(command.attempt))
        if record is not None:
            record.history.told(command)

    def arrived(self, event: internal_pb2.TaskEvent) -> None:
        """The JobManager has taken an event over."""
        record = self._records.get(key_of(event.attempt))
        if record is not None:
            record.history.arrived(event)

    def sent_rows(self, attempt: internal_pb2.AttemptId) -> None:
        """The JobManager has taken rows that an attempt brings back."""
        record = self._records.get(key_of(attempt))
        if record is not None:
            record.history.sent_rows = True

    def held(
        self, endpoint: internal_pb2.DataEndpoint, leader_epoch: int
    ) -> list[internal_pb2.HeldAttempt]:
        """What a JobManager that takes the job over must know.

        Args:
            leader_epoch: of the leader under which it was started.
        """
        held = []
        for record in self._records.values():
            message = record.history.message()
            message.attempt.CopyFrom(record.attempt)
            message.endpoint.CopyFrom(endpoint)
            message.leader_epoch = leader_epoch
            is_ending = record.is_cancelled and record.state not in TERMINAL
            message.state = ATTEMPT_STATE_CANCELING if is_ending else record.state
            held.append(message)
        return held

    def cancelled(self, attempt: internal_pb2.AttemptId, *, is_final: bool = False) -> bool:
        """Notes that an attempt shall end; False when it is unknown, has ended, or knows.

        Args:
            is_final: its job is never gone on with, which one that is ending already may not know.
        """
        record = self._records.get(key_of(attempt))
        if record is None or record.state in TERMINAL:
            return False
        if record.is_cancelled and (record.is_final or not is_final):
            return False
        record.is_cancelled = True
        record.is_final = is_final
        return True

    def contains(self, attempt: internal_pb2.AttemptId) -> bool:
        """True when the attempt was deployed here, whatever its state."""
        return attempt.attempt <= self._newest.get(key_of(attempt)[:3], -1)

    def is_terminal(self, attempt: internal_pb2.AttemptId) -> bool:
        """True when the attempt has ended."""
        record = self._records.get(key_of(attempt))
        return self.contains(attempt) if record is None else record.state in TERMINAL

    def observe(self, event: internal_pb2.TaskEvent) -> bool:
        """Takes in what the slot reports.

        Returns:
            True when it goes on to the JobManager; what an unknown or ended attempt says does not,
            except that it has written a snapshot: somebody must know of the file.
        """
        if not self.contains(event.attempt):
            return False
        kind = event.WhichOneof("event")
        record = self._records.get(key_of(event.attempt))
        if record is None or record.state in TERMINAL:
            return kind == "checkpoint_acknowledged"
        record.history.said(event)
        if kind == "state_changed":
            record.state = event.state_changed.state
        return True

    def process_ended(
        self,
        cause: str,
        taskmanager_id: str,
        now_ms: int,
        *,
        is_asked_for: bool,
        is_overdue: bool = False,
    ) -> list[internal_pb2.TaskEvent]:
        """What is to be said of the attempts that the process took with it, once.

        Those that had finished have lost what they kept for their consumers; the others get their
        terminal events.

        Args:
            cause: how the process ended.
            taskmanager_id: where it ran.
            now_ms: when.
            is_asked_for: the JobManager gave the slot up, so that nothing has failed.
            is_overdue: it was killed because attempts had not obeyed their cancellation: these have not
                failed either. A process that ends for another reason has failed with all that was in it.
        """
        events: list[internal_pb2.TaskEvent] = []
        if not (is_asked_for or self._has_ended):
            # First: who restarts the others has to know what is gone.
            events += [
                internal_pb2.TaskEvent(
                    attempt=record.attempt, kept_rows_lost=internal_pb2.KeptRowsLost(reason=cause)
                )
                for record in self._records.values()
                if record.state == ATTEMPT_STATE_FINISHED
            ]
        self._has_ended = True
        for record in self._open():
            if is_asked_for or (is_overdue and record.is_cancelled):
                record.state = ATTEMPT_STATE_CANCELED
                events.append(state_event(record.attempt, record.state))
                continue
            record.state = ATTEMPT_STATE_FAILED
            failure = client_pb2.FailureCause(
                error_class="TaskFailure",
                message=cause,
                vertex=record.attempt.vertex,
                subtask_index=record.attempt.subtask_index,
                attempt=record.attempt.attempt,
                taskmanager_id=taskmanager_id,
                timestamp_ms=now_ms,
            )
            events.append(state_event(record.attempt, record.state, failure))
        return events

    def attempt_keys(self) -> tuple[JobAttemptKey, ...]:
        """Attempts in the process, and the newest that have ended."""
        return tuple(self._records)

    def _open(self) -> Iterable[_Record]:
        return [record for record in self._records.values() if record.state not in TERMINAL]
