"""The execution graph: each subtask of a job and the attempts to execute it.

Invariants: a subtask has at least one attempt, numbered from 0, and only the last one, the current
attempt, may be alive.
"""

from __future__ import annotations

from collections.abc import Iterator

from jobmanager.graph.execution_attempt import (
    AttemptKey,
    AttemptState,
    ExecutionAttempt,
    SubtaskId,
)
from jobmanager.graph.job_plan import JobPlan


class ExecutionGraph:
    """Subtask -> attempts.

    Args:
        plan: shape of the job.
    """

    def __init__(self, plan: JobPlan) -> None:
        self.plan = plan
        self._attempts: dict[SubtaskId, list[ExecutionAttempt]] = {
            SubtaskId(vertex.id, index): [ExecutionAttempt(AttemptKey(vertex.id, index, 0))]
            for vertex in plan.vertices
            for index in range(vertex.parallelism)
        }

    def subtasks(self) -> Iterator[SubtaskId]:
        """Every subtask, in the order of the plan's vertices."""
        return iter(self._attempts)

    def current(self) -> Iterator[ExecutionAttempt]:
        """The current attempt of each subtask, in the same order."""
        return (attempts[-1] for attempts in self._attempts.values())

    def current_of(self, subtask: SubtaskId) -> ExecutionAttempt:
        """The current attempt of one subtask."""
        return self._attempts[subtask][-1]

    def find_current(self, key: AttemptKey) -> ExecutionAttempt | None:
        """The attempt, if it is known and current; None = it is stale or no attempt of this job."""
        attempts = self._attempts.get(key.subtask)
        if attempts is None or attempts[-1].key != key:
            return None
        return attempts[-1]

    def on_taskmanager(self, taskmanager_id: str) -> list[ExecutionAttempt]:
        """Current attempts that are bound to a TaskManager and not over."""
        return [
            attempt
            for attempt in self.current()
            if attempt.taskmanager_id == taskmanager_id and not attempt.terminal
        ]

    @property
    def all_terminal(self) -> bool:
        """True when nothing is alive any more."""
        return all(attempt.terminal for attempt in self.current())

    @property
    def all_finished(self) -> bool:
        """True when each subtask has finished."""
        return all(attempt.state is AttemptState.FINISHED for attempt in self.current())

    @property
    def all_running_or_finished(self) -> bool:
        """True when no subtask is still on its way to RUNNING."""
        states = {attempt.state for attempt in self.current()}
        return states <= {AttemptState.RUNNING, AttemptState.FINISHED}

    @property
    def all_done_or_waiting(self) -> bool:
        """True when the end of the data has been reached everywhere."""
        return all(attempt.done_or_waiting for attempt in self.current())

    def check(self) -> None:
        """Asserts the invariants named at the head of the file."""
        for subtask, attempts in self._attempts.items():
            assert [attempt.key.attempt for attempt in attempts] == list(range(len(attempts)))
            assert all(attempt.terminal for attempt in attempts[:-1]), subtask
