"""How far a job as a whole is, beside the state that users see; how far its subtasks are is told by ``groups``.

Invariant: what JOB_TRANSITIONS does not name does not happen.
"""

from __future__ import annotations

import enum

from penstock.errors import InvariantViolation


class JobPhase(enum.Enum):
    """What the job waits for."""

    NEW = "new"
    ADOPTING = "goes on after another JobManager: what was done before may be adopted"
    ACTIVE = "active"
    COMMITTED = "its output is being committed: whatever fails now ends it"
    ENDING = "ending"
    ENDING_FOR_GOOD = "ending, and nobody ever goes on with it"
    PROMOTING = "promoting what outlives the job"
    ENDED = "ended"


class JobTurn(enum.Enum):
    """What moves the job as a whole."""

    STARTED = "it begins"
    RECOVERED = "it goes on after another JobManager"
    BEGUN = "attempts of this JobManager begin"
    ALL_DONE = "all data is read, and no checkpoint will commit it"
    STOPPED = "it fails, is suspended or cancelled"
    STOPPED_FOR_GOOD = "it is cancelled, and nobody ever goes on with it"
    ALL_OVER = "every attempt is over"
    ALL_FINISHED = "every attempt has finished, and something outlives the job"
    NOT_PROMOTED = "what was to outlive the job cannot"
    LEFT = "this JobManager stops, and leaves it to the next"


_P, _T = JobPhase, JobTurn
BEGUN = (_P.ADOPTING, _P.ACTIVE, _P.COMMITTED)
"""Its groups move."""
STOPPING = (_P.ENDING, _P.ENDING_FOR_GOOD)
"""It waits until every attempt is over."""
_ALIVE = (_P.NEW, *BEGUN)

JOB_TRANSITIONS: dict[tuple[JobPhase, JobTurn], JobPhase] = {
    (_P.NEW, _T.STARTED): _P.ACTIVE,
    (_P.NEW, _T.RECOVERED): _P.ADOPTING,
    (_P.ADOPTING, _T.BEGUN): _P.ACTIVE,
    (_P.ACTIVE, _T.ALL_DONE): _P.COMMITTED,
    **{(phase, _T.STOPPED): _P.ENDING for phase in (*_ALIVE, _P.ENDING)},
    **{(phase, _T.STOPPED_FOR_GOOD): _P.ENDING_FOR_GOOD for phase in (*_ALIVE, *STOPPING)},
    **{(phase, _T.ALL_FINISHED): _P.PROMOTING for phase in (_P.ACTIVE, _P.COMMITTED, *STOPPING)},
    (_P.PROMOTING, _T.NOT_PROMOTED): _P.ACTIVE,
    **{(phase, _T.LEFT): _P.ENDED for phase in _ALIVE},
    **{(phase, _T.ALL_OVER): _P.ENDED for phase in (*_ALIVE, *STOPPING, _P.PROMOTING)},
}


def next_phase(phase: JobPhase, turn: JobTurn) -> JobPhase:
    """The phase that follows.

    Raises:
        InvariantViolation: none does.

    Example: whoever cancels a job that is failing can say that nobody ever goes on with it.
        >>> next_phase(JobPhase.ENDING, JobTurn.STOPPED_FOR_GOOD).name
        'ENDING_FOR_GOOD'
    """
    following = JOB_TRANSITIONS.get((phase, turn))
    if following is None:
        raise InvariantViolation(f"job: {turn.name} in {phase.name}")
    return following
