"""Speculative execution: beside an attempt that is slow runs a rival; the first to be done with its data counts.

    slow -> a spare slot is granted: SCHEDULED -> its process runs: DEPLOYING -> ... RUNNING
    done first, or the other one fails: it *wins*, and is the current attempt from then on
    the other one is done first: *lost*; over before: *failed*; the subtask is restarted or cancelled, or the
    job needs slots: *ended*

An attempt that does not count is not cancelled: its slot is given back, which ends it within a second even
where it is stuck. A rival has a slot to itself. When it wins, the subtask's seat moves there, and the slot
that the seat had is given back as soon as nothing that counts runs in it any more.

Invariants:
- nothing here fails the job, or keeps it waiting: rivals have spare slots, which go back when the job itself
  asks for slots, and what becomes of rivals and of those that they replace is no failure of the job;
- a rival is asked for, and gets its number, only while nothing of the job stops or waits to begin;
- the number was reserved, where another JobManager may go on with the job;
- a subtask has at most ``_RIVALS_MAX`` rivals from one restart to the next: failures that rivals make good
  come to an end.

Source: FLIP-168; Flink, SpeculativeScheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import assert_never

from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.regions import RegionGraph
from jobmanager.graph.deployment import DeploymentPlanner
from jobmanager.graph.execution_attempt import (
    ON_TASKMANAGER,
    AttemptState,
    ExecutionAttempt,
    SubtaskId,
)
from jobmanager.graph.execution_graph import ExecutionGraph
from jobmanager.graph.job_plan import Exchange, VertexPlan
from jobmanager.job.job_options import JobOptions
from jobmanager.job.slot_lease import SlotLease, free_stray
from jobmanager.job.source_splits import SourceSplits
from jobmanager.messages import job_effects, job_events
from jobmanager.partitions.partition_tracker import PartitionTracker
from jobmanager.scheduler.slow_task_detector import SlowTaskDetector, is_at_work

_RIVALS_MAX = 3


class Speculation:
    """The rivals of one job.

    Args:
        graph: its attempts; keeps the rivals too.
        partitions: what attempts have written.
        deployments: what attempts are told.

    Attributes:
        started: rivals that there have been.
        won: those that have become current.

    Example: a job whose subtasks may have rivals looks every now and then who is slow.
        >>> from jobmanager.graph.job_plan import JobPlan
        >>> from jobmanager.scheduler.slow_task_detector import SlowTaskSettings
        >>> plan = JobPlan((VertexPlan("v1", parallelism=2, allows_rivals=True),), is_batch=True)
        >>> regions, graph, lease = RegionGraph(plan), ExecutionGraph(plan), SlotLease(plan)
        >>> options = JobOptions(speculation=SlowTaskSettings(check_interval_ms=100))
        >>> partitions = PartitionTracker(regions, graph, keeps_all=False)
        >>> deployments = DeploymentPlanner(graph, lease)
        >>> rivals = Speculation(options, regions, graph, lease, partitions, deployments)
        >>> rivals.deployed([SubtaskId("v1", 0), SubtaskId("v1", 1)])
        [PostLater(delay_ms=100, event=StragglersDue())]
    """

    def __init__(
        self,
        options: JobOptions,
        regions: RegionGraph,
        graph: ExecutionGraph,
        lease: SlotLease,
        partitions: PartitionTracker,
        deployments: DeploymentPlanner,
    ) -> None:
        self.started = options.history.rivals_started
        self.won = options.history.rivals_won
        self._settings = options.speculation
        self._regions = regions
        self._graph = graph
        self._lease = lease
        self._partitions = partitions
        self._deployments = deployments
        takes_part = self._settings is not None and options.coordinator is None
        self._vertices = [v for v in graph.plan.vertices if takes_part and self._may_have_rivals(v)]
        self._numbers_end = 0 if options.survives else None
        """Below it numbers are reserved; None = nobody else gives out any."""
        self._looks = False
        self._counts: Counter[SubtaskId] = Counter()
        self._replaced: list[ExecutionAttempt] = []
        """By their rivals; their slots are not given back yet."""

    @property
    def is_used(self) -> bool:
        """Whether subtasks of the job may have rivals."""
        return bool(self._vertices)

    # ------------------------------------------------------------ what happens

    def deployed(self, subtasks: Iterable[SubtaskId]) -> list[job_effects.JobEffect]:
        """Subtasks have begun, or begun again."""
        for subtask in subtasks:
            del self._counts[subtask]
        if self._looks or not self._vertices:
            return []
        self._looks = True
        return [self._look_later()]

    def take(
        self,
        event: job_events.SpeculationEvent,
        splits: SourceSplits,
        now_ms: int,
        *,
        may_begin: bool,
    ) -> list[job_effects.JobEffect] | None:
        """Takes an event that is about rivals; None = it is stale.

        Args:
            may_begin: nothing of the job stops, or waits to begin.
        """
        match event:
            case job_events.StragglersDue():
                asked = self._ask(splits, now_ms) if may_begin else []
                return [*asked, self._look_later()]
            case job_events.AttemptsReserved(end):
                self._numbers_end = end
                return []
            case job_events.SpareSlotGranted():
                if may_begin and self._can_use(event, splits):
                    return self._start(event, splits, now_ms)
                return free_stray((event.slot,))
            case job_events.RivalStarted():
                return self._note_started(event)
            case job_events.RivalNotStarted():
                rival = self._graph.rival_of(event.key.subtask)
                if rival is None or rival.key != event.key:
                    return None
                return self._drop(rival, job_effects.RivalFate.FAILED, event.cause.message)
            case _:
                assert_never(event)

    def done(self, attempt: ExecutionAttempt, now_ms: int) -> list[job_effects.JobEffect]:
        """An attempt, current or a rival, is done with its data: it counts. Harmless to repeat."""
        attempt.done_at_ms = attempt.done_at_ms or now_ms
        rival = self._graph.rival_of(attempt.key.subtask)
        if rival is None:
            return []
        if rival is attempt:
            return self._replace(rival)
        return self._drop(rival, job_effects.RivalFate.LOST)

    def survive(
        self, attempt: ExecutionAttempt, cause: FailureCause, *, misses_input: bool
    ) -> list[job_effects.JobEffect] | None:
        """An attempt, current or a rival, is over before its time; None = nobody else does its work.

        Args:
            misses_input: what it was to read is not there, and has to be made again.
        """
        rival = self._graph.rival_of(attempt.key.subtask)
        if rival is None:
            return None
        if rival is attempt:
            return self._drop(rival, job_effects.RivalFate.FAILED, cause.message)
        if misses_input or rival.state not in ON_TASKMANAGER:
            return None
        return self._replace(rival, cause.message)

    def lose_taskmanager(
        self, taskmanager_id: str, cause: FailureCause
    ) -> list[job_effects.JobEffect]:
        """A TaskManager, or all that the job has had there, is gone, its slots included."""
        return self._drop_all(
            [r for r in self._graph.rivals() if r.taskmanager_id == taskmanager_id],
            job_effects.RivalFate.FAILED,
            cause.message,
        )

    def end(self, subtasks: Iterable[SubtaskId]) -> list[job_effects.JobEffect]:
        """Subtasks begin again, or end."""
        ended = frozenset(subtasks)
        rivals = [r for r in self._graph.rivals() if r.key.subtask in ended]
        return self._drop_all(rivals, job_effects.RivalFate.ENDED, "its subtask is cancelled")

    def yield_slots(self) -> list[job_effects.JobEffect]:
        """The job itself asks for slots."""
        rivals = self._graph.rivals()
        return self._drop_all(rivals, job_effects.RivalFate.ENDED, "the job needs slots")

    def settle(self) -> list[job_effects.JobEffect]:
        """Gives back the slots apart in which nothing runs that counts, and what others have written there."""
        apart = set(self._lease.apart) if self._vertices else set()
        if not apart:
            self._replaced.clear()  # if there were any, they have gone with their slots
            return []
        attempts = [*self._graph.current(), *self._graph.rivals()]
        unneeded = apart - {attempt.slot_id for attempt in attempts if self._is_needed(attempt)}
        effects = self._lease.give_back(unneeded)
        for attempt in self._replaced:
            if attempt.slot_id in unneeded:
                effects += self._partitions.release_output(attempt)
        self._replaced = [a for a in self._replaced if a.slot_id in apart - unneeded]
        return effects

    def _is_needed(self, attempt: ExecutionAttempt) -> bool:
        """It runs, or has finished and may still be read by those of its region that run."""
        if attempt.state is not AttemptState.FINISHED:
            return not attempt.terminal
        return not self._graph.all_terminal(self._regions.region_of(attempt.key.subtask).subtasks)

    # ------------------------------------------------------------ the beginning of a rival

    def _may_have_rivals(self, vertex: VertexPlan) -> bool:
        """Whether it was said so, its subtasks are regions of their own, and no slot of the job keeps rows."""
        edges = self._graph.plan.edges
        own = (SubtaskId(vertex.id, index) for index in range(vertex.parallelism))
        return (
            vertex.allows_rivals
            and all(len(self._regions.region_of(subtask).subtasks) == 1 for subtask in own)
            and all(edge.exchange in (Exchange.BLOCKING, Exchange.PIPELINED) for edge in edges)
        )

    def _look_later(self) -> job_effects.JobEffect:
        assert self._settings is not None, "who looks has settings"
        return job_effects.PostLater(self._settings.check_interval_ms, job_events.StragglersDue())

    def _ask(self, splits: SourceSplits, now_ms: int) -> list[job_effects.JobEffect]:
        slow = self._slow(splits, now_ms)
        if not slow:
            return []
        if not self._has_number:
            return [job_effects.ReserveAttempts(self._graph.attempt + 1)]
        return [
            job_effects.RequestSpareSlots(tuple((a.key.subtask, a.taskmanager_id) for a in slow))
        ]

    def _slow(self, splits: SourceSplits, now_ms: int) -> list[ExecutionAttempt]:
        assert self._settings is not None, "who looks has settings"
        detector = SlowTaskDetector(self._settings)
        return [
            attempt
            for vertex in self._vertices
            for attempt in detector.slow(self._graph.attempts_of_vertex(vertex), now_ms)
            if self._wants_rival(attempt, splits)
        ]

    def _wants_rival(self, attempt: ExecutionAttempt, splits: SourceSplits) -> bool:
        subtask = attempt.key.subtask
        return (
            is_at_work(attempt)
            and self._graph.rival_of(subtask) is None
            and self._counts[subtask] < _RIVALS_MAX
            # What is assigned while both run would reach one of them only.
            and splits.is_discovered(subtask.vertex)
            and self._has_inputs(subtask)
        )

    def _has_inputs(self, subtask: SubtaskId) -> bool:
        """Whether all that it reads can be read from the start: a producer may be making it again."""
        region = self._regions.region_of(subtask)
        return all(map(self._partitions.is_complete, self._regions.consumed_by(region)))

    @property
    def _has_number(self) -> bool:
        return self._numbers_end is None or self._graph.attempt + 1 < self._numbers_end

    def _can_use(self, event: job_events.SpareSlotGranted, splits: SourceSplits) -> bool:
        attempt = self._graph.current_of(event.subtask)
        is_elsewhere = attempt.taskmanager_id != event.slot.taskmanager_id
        return is_elsewhere and self._has_number and self._wants_rival(attempt, splits)

    def _start(
        self, event: job_events.SpareSlotGranted, splits: SourceSplits, now_ms: int
    ) -> list[job_effects.JobEffect]:
        slot = event.slot
        rival = self._graph.add_rival(event.subtask)
        rival.slot_id, rival.taskmanager_id = slot.slot_id, slot.taskmanager_id
        rival.deployed_at_ms = now_ms
        rival.become(AttemptState.SCHEDULED)
        self._lease.take_apart(slot, rival.key.attempt)
        self._counts[event.subtask] += 1
        self.started += 1
        task = self._deployments.task(rival)
        return [
            job_effects.StartRival(
                slot.taskmanager_id, task, tuple(splits.told_to_rival(rival.key))
            ),
            self._report(rival, job_effects.RivalFate.STARTED),
        ]

    def _note_started(self, event: job_events.RivalStarted) -> list[job_effects.JobEffect] | None:
        rival = self._graph.rival_of(event.key.subtask)
        if rival is None or rival.key != event.key:
            return None
        if event.partition_endpoint is not None:
            self._lease.note_partition_endpoint(rival.taskmanager_id, event.partition_endpoint)
        rival.become(AttemptState.DEPLOYING)
        return []

    # ------------------------------------------------------------ the end of a rival

    def _replace(self, rival: ExecutionAttempt, reason: str = "") -> list[job_effects.JobEffect]:
        report = self._report(rival, job_effects.RivalFate.WON, reason)
        replaced = self._graph.replace_by_rival(rival.key.subtask)
        self._lease.reseat(rival.key.subtask, rival.slot_id)
        if replaced.slot_id in self._lease.apart:  # else it is lost, and what was written there too
            self._replaced.append(replaced)
            self._partitions.disown(replaced)
        self.won += 1
        return [report]

    def _drop_all(
        self, rivals: Iterable[ExecutionAttempt], fate: job_effects.RivalFate, reason: str
    ) -> list[job_effects.JobEffect]:
        return [effect for rival in rivals for effect in self._drop(rival, fate, reason)]

    def _drop(
        self, rival: ExecutionAttempt, fate: job_effects.RivalFate, reason: str = ""
    ) -> list[job_effects.JobEffect]:
        report = self._report(rival, fate, reason)
        self._graph.drop_rival(rival.key.subtask)
        freed = self._lease.give_back([rival.slot_id])
        written = self._partitions.release_output(rival) if freed else []
        return [*freed, *written, report]

    def _report(
        self, rival: ExecutionAttempt, fate: job_effects.RivalFate, reason: str = ""
    ) -> job_effects.JobEffect:
        beside = self._graph.current_of(rival.key.subtask)
        return job_effects.ReportRival(rival.key, beside.key, fate, reason)
