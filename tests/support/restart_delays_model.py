"""An independent model of when a job's restarts are due, and which failures belong to one.

It knows no groups and no phases: only which subtasks a restart has told to begin again, when its delay is over, and
which of them have begun since.
"""

from __future__ import annotations

from dataclasses import dataclass

from jobmanager.graph.execution_attempt import SubtaskId


@dataclass
class _Restart:
    """One failure, and all that has joined it.

    Attributes:
        subtasks: what has not begun again yet.
        due_ms: when its delay is over.
        is_due: its delay was over when the job looked.
    """

    subtasks: set[SubtaskId]
    due_ms: int
    is_due: bool = False


class RestartDelays:
    """The restarts of one job under one JobManager."""

    def __init__(self) -> None:
        self._restarts: list[_Restart] = []
        self.counted = 0
        """Failures that were no part of a restart before them."""

    def joins(self, failed: frozenset[SubtaskId] | None) -> bool:
        """Whether a failure belongs to a restart under way: its delay runs, or it is due and what has failed is
        still to end for it.

        Args:
            failed: None = everything.
        """
        return any(
            not restart.is_due or failed is None or bool(failed & restart.subtasks)
            for restart in self._restarts
        )

    def restarted(
        self,
        subtasks: frozenset[SubtaskId],
        failed: frozenset[SubtaskId] | None,
        now_ms: int,
        delay_ms: int,
    ) -> None:
        """A failure has subtasks begin again; what it joins is not prolonged."""
        waiting = [r for r in self._restarts if not r.is_due]
        waiting += [r for r in self._restarts if failed is None or failed & r.subtasks]
        for restart in self._restarts:
            restart.subtasks -= subtasks if restart not in waiting[:1] else set()
        if waiting:
            waiting[0].subtasks |= subtasks
        else:
            self.counted += 1
            self._restarts.append(_Restart(set(subtasks), now_ms + delay_ms))
        self._forget()

    def due(self, now_ms: int) -> None:
        """The job hears that a delay is over."""
        running = [restart for restart in self._restarts if not restart.is_due]
        assert len(running) == 1, "one delay runs, and it ends once"
        assert now_ms >= running[0].due_ms, f"due {running[0].due_ms - now_ms} ms too early"
        assert now_ms - running[0].due_ms <= LATE_MAX_MS, "something has prolonged the delay"
        running[0].is_due = True

    def begun(self, subtask: SubtaskId) -> None:
        """A subtask has a new attempt."""
        for restart in self._restarts:
            if subtask in restart.subtasks:
                assert restart.is_due, f"{subtask} begins before its delay is over"
                restart.subtasks.discard(subtask)
        self._forget()

    def _forget(self) -> None:
        self._restarts = [restart for restart in self._restarts if restart.subtasks]


LATE_MAX_MS = 100
"""The job's own queue is short."""
