"""One execution attempt of a subtask and its states.

Invariants: states follow ``TRANSITIONS``; a terminal state is never left; ``reached_end_of_data``
stays once it is set.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from typing_extensions import override

from penstock.errors import InvariantViolation


class AttemptState(enum.IntEnum):
    """States of an attempt; the numbers are those of the protocol."""

    CREATED = 0
    SCHEDULED = 1
    DEPLOYING = 2
    INITIALIZING = 3
    RUNNING = 4
    FINISHED = 5
    CANCELING = 6
    CANCELED = 7
    FAILED = 8


_S = AttemptState
_ENDS = frozenset({_S.FINISHED, _S.CANCELED, _S.FAILED})

TRANSITIONS: dict[AttemptState, frozenset[AttemptState]] = {
    _S.CREATED: frozenset({_S.SCHEDULED, _S.CANCELED, _S.FAILED}),
    _S.SCHEDULED: frozenset({_S.DEPLOYING, _S.CANCELED, _S.FAILED}),
    # Forward jumps are legal: a report may be lost with its connection, the last one counts.
    _S.DEPLOYING: _ENDS | {_S.INITIALIZING, _S.RUNNING, _S.CANCELING},
    _S.INITIALIZING: _ENDS | {_S.RUNNING, _S.CANCELING},
    _S.RUNNING: _ENDS | {_S.CANCELING},
    _S.CANCELING: _ENDS,
    _S.FINISHED: frozenset(),
    _S.CANCELED: frozenset(),
    _S.FAILED: frozenset(),
}

REPORTABLE = frozenset({_S.INITIALIZING, _S.RUNNING}) | _ENDS
"""What a TaskManager may report; the other states are the JobManager's own decisions."""

ON_TASKMANAGER = frozenset({_S.DEPLOYING, _S.INITIALIZING, _S.RUNNING, _S.CANCELING})
"""States in which a TaskManager may know the attempt."""


def is_terminal(state: AttemptState) -> bool:
    """True for the states that are never left."""
    return not TRANSITIONS[state]


@dataclass(frozen=True, slots=True, order=True)
class SubtaskId:
    """One of the parallel instances of a vertex."""

    vertex: str
    subtask_index: int

    @override
    def __str__(self) -> str:
        return f"{self.vertex}/{self.subtask_index}"


@dataclass(frozen=True, slots=True, order=True)
class AttemptKey:
    """One execution of a subtask; ``attempt`` counts from 0."""

    vertex: str
    subtask_index: int
    attempt: int

    @property
    def subtask(self) -> SubtaskId:
        """The subtask it executes."""
        return SubtaskId(self.vertex, self.subtask_index)

    @override
    def __str__(self) -> str:
        return f"{self.vertex}/{self.subtask_index} (attempt {self.attempt})"


@dataclass(slots=True)
class ExecutionAttempt:
    """State of one attempt.

    Attributes:
        restored_from: checkpoint that it goes on from, 0 = from none.
        deployed_at_ms: wall clock; 0 = it was not.
        done_at_ms: when it had reached the end of its data; 0 = it has not.
        has_loaded: the side that it reads first has been read to its end.
        written: edge and size in bytes of what is complete for consumers that begin with that.

    Example: a report that was lost may be skipped; what is over stays over.
        >>> attempt = ExecutionAttempt(AttemptKey("v1", 0, 0), AttemptState.DEPLOYING)
        >>> attempt.become(AttemptState.RUNNING)
        >>> attempt.become(AttemptState.FINISHED)
        >>> attempt.can_become(AttemptState.FAILED), attempt.done_or_waiting
        (False, True)
    """

    key: AttemptKey
    state: AttemptState = field(default=_S.CREATED)
    taskmanager_id: str = ""
    slot_id: str = ""
    reached_end_of_data: bool = False
    restored_from: int = 0
    deployed_at_ms: int = 0
    done_at_ms: int = 0
    has_loaded: bool = False
    written: tuple[tuple[str, int], ...] = ()

    @property
    def terminal(self) -> bool:
        """True when the attempt is over."""
        return is_terminal(self.state)

    @property
    def is_starting(self) -> bool:
        """True from its deployment until it has its state and runs."""
        return self.state in (_S.DEPLOYING, _S.INITIALIZING)

    @property
    def done_or_waiting(self) -> bool:
        """True when it has finished, or waits for the commit with all its input consumed."""
        waiting = self.reached_end_of_data and self.state is _S.RUNNING
        return waiting or self.state is _S.FINISHED

    def can_become(self, state: AttemptState) -> bool:
        """Whether the transition is legal."""
        return state in TRANSITIONS[self.state]

    def become(self, state: AttemptState) -> None:
        """Makes the transition.

        Raises:
            InvariantViolation: it is illegal.
        """
        if not self.can_become(state):
            raise InvariantViolation(f"{self.key}: {self.state.name} cannot become {state.name}")
        self.state = state
