"""States of a job and how they follow each other."""

from __future__ import annotations

import enum


class JobState(enum.IntEnum):
    """States of a job; the numbers are those of the protocol."""

    CREATED = 0
    RUNNING = 1
    RESTARTING = 2
    FAILING = 3
    FAILED = 4
    CANCELLING = 5
    CANCELED = 6
    FINISHED = 7
    SUSPENDED = 8


_S = JobState

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    _S.CREATED: frozenset({_S.RUNNING, _S.RESTARTING, _S.FAILING, _S.CANCELLING, _S.SUSPENDED}),
    _S.RUNNING: frozenset({_S.FINISHED, _S.RESTARTING, _S.FAILING, _S.CANCELLING, _S.SUSPENDED}),
    # FINISHED: every attempt had finished, output committed, before the cancellation reached it.
    _S.RESTARTING: frozenset({_S.RUNNING, _S.FINISHED, _S.FAILING, _S.CANCELLING, _S.SUSPENDED}),
    # CANCELLING: whoever cancels a job is not told that it has failed instead, whatever it failed of.
    _S.FAILING: frozenset({_S.FAILED, _S.CANCELLING}),
    _S.CANCELLING: frozenset({_S.CANCELED, _S.FINISHED}),
    _S.FAILED: frozenset(),
    _S.CANCELED: frozenset(),
    _S.FINISHED: frozenset(),
    # The JobManager has stopped; its successor goes on, from RESTARTING.
    _S.SUSPENDED: frozenset({_S.RESTARTING, _S.FINISHED}),
}

ENDING = frozenset({_S.FAILING, _S.CANCELLING, _S.SUSPENDED})
"""The job is on its way to an end; its attempts are being cancelled."""


def is_terminal(state: JobState) -> bool:
    """True for the states that are never left."""
    return not TRANSITIONS[state]
