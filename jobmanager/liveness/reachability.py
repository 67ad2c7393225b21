"""What it means that a TaskManager was probed.

A refused connection proves that nobody listens any more: the kernel answers, the process does not exist.
Nothing else proves anything. A daemon that is busy or paused still has its connections accepted by
the kernel until its backlog is full, and then they are not answered, never refused; a packet filter, a
route or a machine that is gone does not answer either.

Example: one that is paused is doubted by those who could not reach it only.
    >>> doubts(Reachability.SILENT, ["tm-2"])
    ('tm-2',)
    >>> doubts(Reachability.UNREACHABLE, ["tm-2"])
    ('jobmanager', 'tm-2')
    >>> doubts(Reachability.ANSWERED, ["tm-2"])
    ()
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

JOBMANAGER = "jobmanager"
"""The witness that the JobManager is itself; TaskManagers are witnesses by their ids."""


class Reachability(enum.Enum):
    """What a probe found."""

    ANSWERED = "answered"
    """The daemon answered a call."""
    SILENT = "silent"
    """Its kernel takes connections, the daemon does not answer."""
    UNREACHABLE = "unreachable"
    """No connection in time."""
    REFUSED = "refused"
    """Nobody listens at its address."""


def doubts(found: Reachability, reporters: Iterable[str]) -> tuple[str, ...]:
    """Who doubts that a TaskManager lives, after a probe that does not decide it.

    A daemon that does not answer although its machine does may be paused, which is what
    ``heartbeat.timeout`` is for; peers that cannot reach it at the same time make it doubtful.

    Args:
        found: by the probe.
        reporters: TaskManagers that could not reach it; none where the JobManager probed of its own.
    """
    match found:
        case Reachability.UNREACHABLE:
            return (JOBMANAGER, *sorted(reporters))
        case Reachability.SILENT:
            return tuple(sorted(reporters))
        case Reachability.ANSWERED | Reachability.REFUSED:
            return ()
