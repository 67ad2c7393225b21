"""What the parts of one job's machine share: its subtasks, attempts, slots, partitions, splits and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from jobmanager.checkpoint import messages as c
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.regions import KeptOutput, RegionGraph
from jobmanager.graph.deployment import DeploymentPlanner
from jobmanager.graph.execution_attempt import ON_TASKMANAGER, AttemptKey, SubtaskId
from jobmanager.graph.execution_graph import ExecutionGraph
from jobmanager.graph.job_plan import JobPlan
from jobmanager.job.checkpoint_wiring import CheckpointWiring, WiredEffect
from jobmanager.job.failover import Failover
from jobmanager.job.groups import Groups
from jobmanager.job.job_options import JobOptions
from jobmanager.job.slot_lease import SlotLease
from jobmanager.job.source_splits import SourceSplits
from jobmanager.job.speculation import Speculation
from jobmanager.messages import job_effects, job_events
from jobmanager.partitions.partition_tracker import PartitionTracker


@dataclass(frozen=True, slots=True)
class Failed:
    """Subtasks have failed: what follows from it is the job's own to decide.

    Attributes:
        failed: whose attempts are over, or ``ALL``.
        missing: what could not be read.
        is_free: the restart goes on from another checkpoint, or a TaskManager was told to end: the strategy is
            not asked for it.
        ended: what has ended with it of what begins again anyway.
        resumes: it belongs to a restart that an earlier JobManager has counted.
        goes_back: to a checkpoint that is older than what others have gone on from.
        was_cancelled: they were told to end before.
    """

    cause: FailureCause
    failed: frozenset[SubtaskId] | None
    missing: tuple[KeptOutput, ...] = ()
    is_free: bool = False
    ended: frozenset[SubtaskId] = frozenset()
    resumes: bool = False
    goes_back: bool = False
    was_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Dropped:
    """What has come is of no use: it came too late, twice, or from nobody who was asked."""


PartEffect = WiredEffect | Failed | Dropped
"""What a part wants done, by the job or outside of it."""


@dataclass(slots=True)
class JobParts:
    """The parts of one job.

    Attributes:
        wiring: None = it takes no checkpoints.
        restored_checkpoint_id: of the groups that have gone on last; 0 = none.
        unusable: checkpoints that tasks have found damaged, by id, with what was said last.
        was_taken_over: what another JobManager has deployed goes on.
        is_taken_over: it does, and no checkpoint has been begun since.
        drained: TaskManagers that it is to leave; True = what they keep is made again.
        has_left: some of its subtasks have left a TaskManager, and begun elsewhere.
    """

    plan: JobPlan
    options: JobOptions
    regions: RegionGraph
    graph: ExecutionGraph
    groups: Groups
    partitions: PartitionTracker
    failover: Failover
    lease: SlotLease
    deployments: DeploymentPlanner
    splits: SourceSplits
    speculation: Speculation
    wiring: CheckpointWiring | None
    now_ms: int = 0
    restored_checkpoint_id: int = 0
    unusable: dict[int, str] = field(default_factory=dict)
    was_taken_over: bool = False
    is_taken_over: bool = False
    drained: dict[str, bool] = field(default_factory=dict)
    has_left: bool = False

    @classmethod
    def of(cls, plan: JobPlan, options: JobOptions) -> JobParts:
        """The parts of a job that has not begun."""
        graph, regions = ExecutionGraph(plan, options.first_attempt), RegionGraph(plan)
        keeps_all = options.coordinator is not None
        partitions = PartitionTracker(
            regions, graph, keeps_all=keeps_all, shares_spill=options.shares_spill
        )
        lease = SlotLease(plan)
        deployments = DeploymentPlanner(graph, lease)
        return cls(
            plan,
            options,
            regions,
            graph,
            Groups(list(graph.subtasks())),
            partitions,
            Failover(options, regions, graph, partitions),
            lease,
            deployments,
            SourceSplits(plan),
            Speculation(options, regions, graph, lease, partitions, deployments),
            CheckpointWiring(options.coordinator, graph) if options.coordinator else None,
        )

    def sent(self, commands: Iterable[job_effects.Command]) -> list[PartEffect]:
        """Sends what is for attempts that a TaskManager may know."""
        by_taskmanager: dict[str, list[job_effects.Command]] = {}
        for command in commands:
            key: AttemptKey = command.key
            attempt = self.graph.find_current(key)
            if attempt is not None and attempt.state in ON_TASKMANAGER:
                by_taskmanager.setdefault(attempt.taskmanager_id, []).append(command)
        return [job_effects.SendCommands(id, tuple(own)) for id, own in by_taskmanager.items()]

    @property
    def is_done(self) -> bool:
        """Whether every attempt has finished, and nothing is lost that is needed."""
        return self.graph.all_finished and not self.partitions.needed_and_missing()

    @property
    def dropped(self) -> dict[str, int]:
        """What parts have dropped: part -> events."""
        if self.wiring is None:
            return {}
        dropped = {"stale checkpoint reports": self.wiring.stale_reports}
        if (coordinator := self.wiring.coordinator) is not None:
            dropped["checkpoints"] = coordinator.dropped_events
            dropped["checkpoint reports to other leaders"] = coordinator.fenced_events
        return dropped

    def take_checkpoint_event(
        self, event: job_events.CheckpointEvent, *, has_ended: bool
    ) -> list[PartEffect]:
        """An event for the coordinator; who asks for a checkpoint is answered where there is none."""
        if self.wiring is not None and not has_ended:
            return [*self.wiring.take(event, self.splits)]
        if isinstance(event, c.CheckpointRequested):
            refused = c.RequestRefused.NOT_RUNNING if self.wiring else c.RequestRefused.DISABLED
            return [c.AnswerRequest(event.request_id, 0, refused)]
        return [Dropped()]

    def release_over(self) -> list[job_effects.JobEffect]:
        """What no checkpoint that can be restored has anybody read again is kept no longer."""
        coordinator = self.wiring.coordinator if self.wiring is not None else None
        retained = coordinator.retained if coordinator is not None else ()
        return self.partitions.release_over(self.failover.over_in(retained))

    def start_checkpoints(self) -> list[WiredEffect]:
        """All that has begun runs; checkpoints are taken unless one would lose what others are to do yet."""
        graph, wiring = self.graph, self.wiring
        if (
            wiring is None
            or graph.all_finished
            or graph.waits_to_resume
            or graph.waits_to_load
            or self.failover.will_read_from_the_start(graph.unstarted)
        ):
            return []
        at_once, self.is_taken_over = self.is_taken_over, False
        return wiring.started(self.splits, self.now_ms, at_once=at_once)

    def stop_checkpoints(self) -> list[WiredEffect]:
        """Those who go on are told what is void."""
        return [] if self.wiring is None else self.wiring.stopped(self.splits, self.now_ms)
