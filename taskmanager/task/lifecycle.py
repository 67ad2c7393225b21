"""States of an execution attempt on the TaskManager's side (pure).

DEPLOYING -> INITIALIZING -> RUNNING -> FINISHED, with CANCELING/CANCELED and FAILED from each of
them. An attempt reaches exactly one terminal state.
"""

from __future__ import annotations

from penstock.errors import InvariantViolation
from penstock.pb.client_pb2 import (
    ATTEMPT_STATE_CANCELED,
    ATTEMPT_STATE_CANCELING,
    ATTEMPT_STATE_DEPLOYING,
    ATTEMPT_STATE_FAILED,
    ATTEMPT_STATE_FINISHED,
    ATTEMPT_STATE_INITIALIZING,
    ATTEMPT_STATE_RUNNING,
    AttemptState,
)

TERMINAL = frozenset({ATTEMPT_STATE_FINISHED, ATTEMPT_STATE_CANCELED, ATTEMPT_STATE_FAILED})

_ENDINGS = frozenset({ATTEMPT_STATE_CANCELING, ATTEMPT_STATE_CANCELED, ATTEMPT_STATE_FAILED})

_TRANSITIONS: dict[AttemptState.ValueType, frozenset[AttemptState.ValueType]] = {
    ATTEMPT_STATE_DEPLOYING: frozenset({ATTEMPT_STATE_INITIALIZING}) | _ENDINGS,
    ATTEMPT_STATE_INITIALIZING: frozenset({ATTEMPT_STATE_RUNNING}) | _ENDINGS,
    ATTEMPT_STATE_RUNNING: frozenset({ATTEMPT_STATE_FINISHED}) | _ENDINGS,
    ATTEMPT_STATE_CANCELING: frozenset({ATTEMPT_STATE_CANCELED, ATTEMPT_STATE_FAILED}),
}


class Lifecycle:
    """The state of one attempt and how it came to it."""

    def __init__(self) -> None:
        self.story: list[AttemptState.ValueType] = [ATTEMPT_STATE_DEPLOYING]

    @property
    def state(self) -> AttemptState.ValueType:
        """The current state."""
        return self.story[-1]

    @property
    def is_terminal(self) -> bool:
        """True when nothing follows."""
        return self.state in TERMINAL

    def move_to(self, state: AttemptState.ValueType) -> None:
        """Goes to the next state.

        Raises:
            InvariantViolation: the table has no such step; the story is in the message.
        """
        if state not in _TRANSITIONS.get(self.state, frozenset()):
            story = " -> ".join(AttemptState.Name(step) for step in self.story)
            raise InvariantViolation(f"{story} -/-> {AttemptState.Name(state)}")
        self.story.append(state)
