"""Watches the groups of a job's subtasks: what happens to them in which phase, and when they begin again.

Due times and what joins a restart are compared with an independent model (``restart_delays_model``).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from unittest import mock

from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.execution_graph import ExecutionGraph
from jobmanager.job import groups
from jobmanager.job.groups import Group, GroupEvent, GroupPhase, Groups
from tests.support.restart_delays_model import RestartDelays


def group_point(phase: GroupPhase) -> str:
    """Passed by every group that comes to a phase: faults may wait for it."""
    return f"group {phase.name}"


class GroupAudit:
    """The groups of one job.

    Args:
        now_ms: what time it is for the job.

    Attributes:
        met: what has happened, in which phase.
        beside: phases that a group was in while something else failed.
        delays: what is known of restarts without any group.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._entered: list[GroupPhase] = []
        self._failed: frozenset[SubtaskId] | None = None
        self._delay_ms = 0
        self.met: Counter[tuple[GroupPhase, GroupEvent]] = Counter()
        self.beside: set[GroupPhase] = set()
        self.delays = RestartDelays()

    def begin_again(self) -> None:
        """Another JobManager knows of no restart."""
        self.delays = RestartDelays()

    def decided(self, delay_ms: int) -> None:
        """A failure restarts something, so much later."""
        self._delay_ms = delay_ms

    def entered(self) -> list[GroupPhase]:
        """Phases that groups have come to since this was asked last."""
        entered, self._entered = self._entered, []
        return entered

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Checks every step of groups that is made meanwhile."""
        with contextlib.ExitStack() as stack:

            def replace(target: object, name: str, replacement: object) -> None:
                stack.enter_context(mock.patch.object(target, name, replacement))

            self._watch_groups(replace)
            self._watch_restarts(replace)
            yield

    def _watch_groups(self, replace: Callable[[object, str, object], None]) -> None:
        follows, take, join = groups.next_phase, Groups.take, Groups.join

        def next_phase(group: Group, event: GroupEvent) -> GroupPhase:
            phase = follows(group, event)
            self.met[group.phase, event] += 1
            if phase is not group.phase:
                self._entered.append(phase)
            if event is GroupEvent.DUE:
                self.delays.due(self._now_ms())
            return phase

        def failed(all_groups: Groups, subtasks: frozenset[SubtaskId]) -> None:
            self.beside |= {g.phase for g in all_groups if g.subtasks.isdisjoint(subtasks)}
            self.delays.restarted(subtasks, self._failed, self._now_ms(), self._delay_ms)

        def watched_take(
            all_groups: Groups, subtasks: frozenset[SubtaskId], event: GroupEvent
        ) -> Group:
            if event is GroupEvent.FAILED:
                failed(all_groups, subtasks)
            elif event is GroupEvent.ENDED:
                self.begin_again()
            return take(all_groups, subtasks, event)

        def watched_join(all_groups: Groups, group: Group, subtasks: frozenset[SubtaskId]) -> None:
            failed(all_groups, subtasks)
            join(all_groups, group, subtasks)

        replace(groups, "next_phase", next_phase)
        replace(Groups, "take", watched_take)
        replace(Groups, "join", watched_join)

    def _watch_restarts(self, replace: Callable[[object, str, object], None]) -> None:
        restarted_with, begin_again = Groups.restarted_with, ExecutionGraph.begin_again

        def watched_question(
            all_groups: Groups, failed: frozenset[SubtaskId] | None
        ) -> Group | None:
            found, self._failed = restarted_with(all_groups, failed), failed
            assert (found is not None) is self.delays.joins(failed), "it joins what it belongs to"
            return found

        def watched_begin(graph: ExecutionGraph, subtasks: Collection[SubtaskId]) -> None:
            for subtask in subtasks:
                self.delays.begun(subtask)
            begin_again(graph, subtasks)

        replace(Groups, "restarted_with", watched_question)
        replace(ExecutionGraph, "begin_again", watched_begin)
