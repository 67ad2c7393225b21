"""Watches what a job's failures restart, and compares it with an independent model.

Nothing but what was decided is cancelled or deployed again: who is to be restarted is known by the decisions,
each of which has to be what ``failover_model`` comes to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from jobmanager.failover.failover_strategy import FailoverStrategyName
from jobmanager.failover.regions import KeptOutput
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState, SubtaskId
from jobmanager.graph.execution_graph import ExecutionGraph
from jobmanager.graph.job_plan import JobPlan
from jobmanager.job import takeover
from jobmanager.job.failover import ALL, Failover, Recovery
from jobmanager.job.found_stages import unbegun
from jobmanager.partitions.partition_tracker import PartitionTracker
from tests.support.failover_model import Failure, Model, closure, failing
from tests.support.simulated_groups import GroupAudit


class FailoverAudit:
    """The failures of one job.

    Args:
        plan: its shape.
        strategy: how much a failure restarts.
        on_restart: takes what is decided, in words.
        groups: watches what becomes of that.
        fixed_delay_ms: of every restart that the strategy is asked for; None = it varies.

    Attributes:
        restarts: decisions to restart something.
        spared: of these, those that left something running or finished.
        backtracked: those that restarted a producer for a partition that is missing.
        takeovers: JobManagers with which what was deployed before has gone on.
        late: subtasks that they have found to wait for what they read, together.
    """

    def __init__(
        self,
        plan: JobPlan,
        strategy: FailoverStrategyName,
        on_restart: Callable[[str], None],
        groups: GroupAudit,
        fixed_delay_ms: int | None,
    ) -> None:
        self._model = Model(plan)
        self._groups = groups
        self._fixed_delay_ms = fixed_delay_ms
        self._on_restart = on_restart
        self._strategy = strategy
        self._decided: set[SubtaskId] = set()
        self._attempts: dict[SubtaskId, int] = {}
        self.restarts = 0
        self.spared = 0
        self.backtracked = 0
        self.takeovers = 0
        self.late = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Checks every decision that is made meanwhile."""
        decide = Failover.decide

        def audited(
            failover: Any,
            cause: Any,
            failed: Iterable[SubtaskId] | None,
            missing: Iterable[KeptOutput],
            now_ms: int,
            *,
            joins: bool,
            is_free: bool,
            resumes: bool,
            goes_back: bool,
            is_told: bool,
        ) -> Recovery:
            failed = failed if failed is ALL else frozenset(failed)
            missing = frozenset(missing)
            counted = failover.restarts
            recovery = decide(
                failover,
                cause,
                failed,
                missing,
                now_ms,
                joins=joins,
                is_free=is_free,
                resumes=resumes,
                goes_back=goes_back,
                is_told=is_told,
            )
            if recovery.delay_ms is not None:
                graph, partitions = failover._graph, failover._partitions
                cut = failover._pre_aggregating if failover._is_cut else frozenset()
                whole = failed is ALL and goes_back
                check = partial(
                    self._check, recovery, missing, graph, partitions, cut, failover._tied
                )
                check(failed, is_whole=whole)
                if resumes:
                    self._check_rest(recovery.delay_ms)
                else:
                    self._check_delay(recovery.delay_ms, joins=joins, is_free=is_free)
                is_new = not (joins or resumes)
                assert failover.restarts == counted + is_new, "what joins counts once"
            return recovery

        go_on = Failover.go_on
        late = frozenset[SubtaskId]()

        def found_late(*told: Any, **named: Any) -> frozenset[SubtaskId]:
            nonlocal late
            late = unbegun(*told, **named)
            return late

        def taken_over(failover: Any, **told: Any) -> None:
            go_on(failover, **told)
            self._decided = set(late)
            self.late += len(late)
            self.takeovers += 1

        with (
            mock.patch.object(Failover, "decide", audited),
            mock.patch.object(Failover, "go_on", taken_over),
            mock.patch.object(takeover, "unbegun", found_late),
        ):
            yield

    def _check(
        self,
        recovery: Recovery,
        missing: frozenset[KeptOutput],
        graph: ExecutionGraph,
        partitions: PartitionTracker,
        not_repeated: frozenset[str],
        tied: Collection[str],
        failed: frozenset[SubtaskId] | None,
        *,
        is_whole: bool,
    ) -> None:
        expected = graph.started
        if not is_whole and self._strategy is FailoverStrategyName.REGION:
            held = {channel.partition for channel in self._model.kept}
            finished = graph.in_state(AttemptState.FINISHED)
            failure = Failure(
                failed=failing(self._model, finished) if failed is ALL else failed,
                started=graph.started,
                finished=finished,
                available=frozenset(filter(partitions.is_available, held)),
                missing=missing,
                not_repeated=not_repeated,
            )
            expected = closure(self._model, failure)
            while more := {
                s
                for s in graph.started - expected
                if s.vertex in tied and any(one.vertex == s.vertex for one in expected)
            }:
                expected = closure(self._model, replace(failure, failed=expected | more))
        restarted = recovery.subtasks
        assert restarted == expected, f"{restarted} instead of {expected} for {recovery.cause}"
        names = " ".join(map(str, sorted(restarted)))
        self._on_restart(f"restart of {names}: {recovery.cause.message}")
        self._decided |= restarted
        self.restarts += 1
        self.spared += restarted < graph.started
        self.backtracked += bool(missing)

    def _check_delay(self, delay_ms: int, *, joins: bool, is_free: bool) -> None:
        if joins or is_free:
            assert delay_ms == 0, "nothing is waited for twice"
        elif self._fixed_delay_ms is not None:
            assert delay_ms == self._fixed_delay_ms
        self._groups.decided(delay_ms)

    def _check_rest(self, delay_ms: int) -> None:
        if self._fixed_delay_ms is not None:
            assert delay_ms <= self._fixed_delay_ms, "what has passed of it is not waited for again"
        self._groups.decided(delay_ms)

    def cancelled(self, keys: Iterable[AttemptKey]) -> None:
        """Attempts are told to end, although the job goes on."""
        for key in keys:
            assert key.subtask in self._decided, f"{key} is cancelled for nothing"

    def deployed(self, keys: Iterable[AttemptKey]) -> None:
        """Attempts begin."""
        for key in keys:
            last = self._attempts.get(key.subtask)
            assert last is None or key.subtask in self._decided, f"{key} begins for nothing"
            assert last is None or key.attempt > last, f"{key} begins again"
            self._attempts[key.subtask] = key.attempt
        self._decided -= {key.subtask for key in keys}

    def begin_again(self) -> None:
        """Another JobManager deploys everything anew, unless it finds what goes on."""
        self._decided = set(self._attempts)
        self._groups.begin_again()
