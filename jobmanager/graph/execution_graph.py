"""The execution graph: each subtask of a job and its current execution attempt.

Beside the current attempt a subtask may have a *rival*: a speculative attempt that does the same work. It
takes the place of the current one, or is dropped.

Invariants: subtasks that are restarted together get attempts of the same number, which none of the job has
had; so does each rival; numbers only grow; an attempt is replaced when it is over, or by its rival; a subtask
whose attempt is over or done has no rival.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from jobmanager.graph.execution_attempt import (
    ON_TASKMANAGER,
    AttemptKey,
    AttemptState,
    ExecutionAttempt,
    SubtaskId,
)
from jobmanager.graph.job_plan import JobPlan, VertexPlan
from penstock.errors import require_invariant


class ExecutionGraph:
    """Subtask -> current attempt."""

    def __init__(self, plan: JobPlan, attempt: int = 0) -> None:
        self.plan = plan
        self.attempt = attempt
        self._attempts: dict[SubtaskId, ExecutionAttempt] = {
            SubtaskId(vertex.id, index): ExecutionAttempt(AttemptKey(vertex.id, index, attempt))
            for vertex in plan.vertices
            for index in range(vertex.parallelism)
        }
        self._rivals: dict[SubtaskId, ExecutionAttempt] = {}
        self._resumed: set[SubtaskId] = set()

    def begin_again(self, subtasks: Collection[SubtaskId]) -> None:
        """New attempts in the place of those that are over."""
        self.attempt += 1
        for subtask in subtasks:
            assert self._attempts[subtask].terminal, "only what is over is replaced"
            self._renew(subtask, self.attempt)
        self._resumed.update(subtasks)

    def renumber(self, subtasks: Iterable[SubtaskId], number: int) -> None:
        """Those that have not begun are no older than what they may read."""
        for attempt in self.attempts_of(subtasks):
            if attempt.state is AttemptState.CREATED and attempt.key.attempt < number:
                self._renew(attempt.key.subtask, number)

    def _renew(self, subtask: SubtaskId, number: int) -> None:
        key = AttemptKey(subtask.vertex, subtask.subtask_index, number)
        self._attempts[subtask] = ExecutionAttempt(key)

    # ------------------------------------------------------------ rivals

    def add_rival(self, subtask: SubtaskId) -> ExecutionAttempt:
        """A second attempt of a subtask, with a number of its own."""
        assert subtask not in self._rivals, "one rival at a time"
        self.attempt += 1
        key = AttemptKey(subtask.vertex, subtask.subtask_index, self.attempt)
        rival = self._rivals[subtask] = ExecutionAttempt(key)
        return rival

    def rivals(self) -> list[ExecutionAttempt]:
        """All of them, the oldest first."""
        return list(self._rivals.values())

    def rival_of(self, subtask: SubtaskId) -> ExecutionAttempt | None:
        """The rival of a subtask's current attempt, if it has one."""
        return self._rivals.get(subtask)

    def drop_rival(self, subtask: SubtaskId) -> None:
        """It has lost, or is over."""
        del self._rivals[subtask]

    def replace_by_rival(self, subtask: SubtaskId) -> ExecutionAttempt:
        """The rival becomes the current attempt; returns the one that was."""
        replaced = self._attempts[subtask]
        self._attempts[subtask] = self._rivals.pop(subtask)
        return replaced

    def find(self, key: AttemptKey) -> ExecutionAttempt | None:
        """The attempt, if it is current or a rival; None = it is stale or no attempt of this job."""
        rival = self._rivals.get(key.subtask)
        return rival if rival is not None and rival.key == key else self.find_current(key)

    # ------------------------------------------------------------ attempts

    def adopt(self, adopted: ExecutionAttempt) -> None:
        """An attempt of an earlier JobManager, which has done its work or goes on with it."""
        subtask = adopted.key.subtask
        assert self._attempts[subtask].state is AttemptState.CREATED, "nothing has begun yet"
        self._attempts[subtask] = adopted

    def resume(self, subtasks: Iterable[SubtaskId]) -> None:
        """These have state in the checkpoint that the job goes on from."""
        self._resumed.update(subtasks)

    def cancel(
        self, subtasks: Iterable[SubtaskId], *, again: bool = False
    ) -> dict[str, list[AttemptKey]]:
        """Begins to cancel what a TaskManager may have, and ends what none has.

        Args:
            subtasks: whose attempts.
            again: those that are being cancelled are to be told once more.

        Returns:
            TaskManager -> the attempts it has to cancel.
        """
        to_cancel: dict[str, list[AttemptKey]] = {}
        for attempt in self.attempts_of(subtasks):
            if attempt.state is AttemptState.CANCELING and not again:
                continue
            if attempt.state in ON_TASKMANAGER:
                if attempt.state is not AttemptState.CANCELING:
                    attempt.become(AttemptState.CANCELING)
                to_cancel.setdefault(attempt.taskmanager_id, []).append(attempt.key)
            elif not attempt.terminal:
                attempt.become(AttemptState.CANCELED)
        return to_cancel

    def give_up(self, subtasks: Iterable[SubtaskId]) -> list[ExecutionAttempt]:
        """Counts as cancelled what of these was to be cancelled and has not ended in time."""
        attempts = self.attempts_of(subtasks)
        overdue = [attempt for attempt in attempts if attempt.state is AttemptState.CANCELING]
        for attempt in overdue:
            attempt.become(AttemptState.CANCELED)
        return overdue

    def attempts_of(self, subtasks: Iterable[SubtaskId]) -> list[ExecutionAttempt]:
        """The current attempts of some subtasks, in the order of the plan."""
        wanted = frozenset(subtasks)
        return [attempt for subtask, attempt in self._attempts.items() if subtask in wanted]

    def attempts_of_vertex(self, vertex: VertexPlan) -> list[ExecutionAttempt]:
        """The current attempts of all subtasks of a vertex, by index."""
        indices = range(vertex.parallelism)
        return [self._attempts[SubtaskId(vertex.id, index)] for index in indices]

    def subtasks(self) -> Iterator[SubtaskId]:
        """Every subtask, in the order of the plan's vertices."""
        return iter(self._attempts)

    def current(self) -> Iterator[ExecutionAttempt]:
        """The current attempt of each subtask, in the same order."""
        return iter(self._attempts.values())

    def current_of(self, subtask: SubtaskId) -> ExecutionAttempt:
        """The current attempt of one subtask."""
        return self._attempts[subtask]

    def find_current(self, key: AttemptKey) -> ExecutionAttempt | None:
        """The attempt, if it is known and current; None = it is stale or no attempt of this job."""
        attempt = self._attempts.get(key.subtask)
        return attempt if attempt is not None and attempt.key == key else None

    def on_taskmanager(self, taskmanager_id: str) -> list[ExecutionAttempt]:
        """Current attempts that are bound to a TaskManager and not over."""
        return [
            attempt
            for attempt in self.current()
            if attempt.taskmanager_id == taskmanager_id and not attempt.terminal
        ]

    def in_slots(self, slot_ids: Collection[str]) -> list[ExecutionAttempt]:
        """Current attempts that are bound to one of these slots and not over."""
        return [
            attempt
            for attempt in self.current()
            if attempt.slot_id in slot_ids and not attempt.terminal
        ]

    @property
    def waits_to_resume(self) -> bool:
        """True while something that had begun before waits for its inputs: a checkpoint without it would
        lose what it has done."""
        return any(self._attempts[s].state is AttemptState.CREATED for s in self._resumed)

    @property
    def waits_to_load(self) -> bool:
        """True in streaming mode while something that loads a side first waits for that: a checkpoint would
        be one of a job that is loading."""
        if self.plan.is_batch or not (loading := self.plan.loading):
            return False
        return any(s.vertex in loading for s in self.in_state(AttemptState.CREATED))

    @property
    def started(self) -> frozenset[SubtaskId]:
        """Subtasks that have been scheduled at least once."""
        return frozenset(
            subtask
            for subtask, attempt in self._attempts.items()
            if attempt.state is not AttemptState.CREATED
        )

    @property
    def unstarted(self) -> frozenset[SubtaskId]:
        """Subtasks whose current attempt waits for what it reads."""
        return self.in_state(AttemptState.CREATED)

    def in_state(self, state: AttemptState) -> frozenset[SubtaskId]:
        """Subtasks whose current attempt is in a state."""
        return frozenset(s for s, attempt in self._attempts.items() if attempt.state is state)

    def all_terminal(self, subtasks: Iterable[SubtaskId]) -> bool:
        """True when nothing of these is alive any more."""
        return all(attempt.terminal for attempt in self.attempts_of(subtasks))

    @property
    def all_finished(self) -> bool:
        """True when each subtask has finished."""
        return all(attempt.state is AttemptState.FINISHED for attempt in self.current())

    @property
    def all_done_or_waiting(self) -> bool:
        """True when the end of the data has been reached everywhere."""
        return all(attempt.done_or_waiting for attempt in self.current())

    @property
    def has_rivals(self) -> bool:
        """Whether any slow attempt has a second one beside it."""
        return bool(self._rivals)

    def check_step(self, subtask: SubtaskId) -> None:
        """The part of ``check`` that is about one subtask: run after each step that is about it.

        Raises:
            InvariantViolation: it does not hold.
        """
        current = self._attempts.get(subtask)
        if current is None:
            return  # of another job, or none at all
        require_invariant(
            current.key.subtask == subtask and current.key.attempt <= self.attempt,
            "a subtask has an attempt of its own, which is numbered",
        )
        rival = self._rivals.get(subtask)
        if rival is None:
            return
        require_invariant(
            current.key.attempt < rival.key.attempt <= self.attempt,
            "a rival is newer than the attempt that it may replace",
        )
        for attempt in (current, rival):
            require_invariant(
                not attempt.terminal and not attempt.reached_end_of_data,
                "a subtask whose attempt has ended or is done has no rival",
            )

    def check(self) -> None:
        """Asserts the invariants named at the head of the file."""
        for subtask in self._attempts:
            self.check_step(subtask)
        assert self._rivals.keys() <= self._attempts.keys()
