"""What a job is, as it was accepted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from jobmanager.checkpoint.completed_checkpoint import CompletedCheckpoint
from jobmanager.checkpoint.coordinator import CheckpointCoordinator
from jobmanager.checkpoint.settings import CheckpointSettings
from jobmanager.checkpoint.statistics import KeptCheckpoints
from jobmanager.failover.failover_strategy import FailoverStrategyName, strategy_problem
from jobmanager.failover.failure_enricher import FailureLabels
from jobmanager.failover.rebuilt_regions import rebuild_problem
from jobmanager.failover.regions import RegionGraph
from jobmanager.failover.restart_settings import over_cluster
from jobmanager.graph.job_plan import JobPlan, plan_problem
from jobmanager.job.job_history import JobHistory
from jobmanager.job.job_options import JobOptions
from jobmanager.job.job_settings import JobSettings, job_settings
from jobmanager.rpc.graph_convert import plan_of
from jobmanager.scheduler.admission import CodeStamp, TaskManagerFacts, admission_problem
from jobmanager.stores.artifact_store import ArtifactStore
from jobmanager.traces.span import ReportSpan
from penstock.config import Configuration
from penstock.errors import ConfigurationError, JobRejected, StoreTransient, Unrecoverable
from penstock.graph.job_graph import validate
from penstock.graph.operator_checks import runs_on_spark
from penstock.graph.persisted import persist_sinks
from penstock.pb import graph_pb2
from penstock.storage.memory_store import MemoryStore
from penstock.storage.object_store import FIRST_ANSWER_MS, ObjectStore
from penstock.storage.open_store import open_store
from penstock.storage.savepoint_places import check_is_outside
from penstock.storage.store_names import substore

_JOB_ID = re.compile(r"[0-9a-f]{32}")
_CHECKPOINT = re.compile(r"chk-\d+")
_OWN_SETTINGS = ("jobmanager.", "taskmanager.", "security.", "log.", "s3.")


@dataclass(frozen=True, slots=True)
class JobDescription:
    """A job that can be run.

    Attributes:
        config: of the job, in force over the cluster's.
        settings: of its checkpoints and restarts.
        slot_config: what slot processes are told of it.
    """

    job_id: str
    graph: graph_pb2.JobGraph
    plan: JobPlan
    stamp: CodeStamp
    config: Configuration
    settings: JobSettings
    slot_config: dict[str, str]

    @property
    def checkpoint_directory(self) -> str:
        """Where tasks write their snapshots; "" = they travel inline, or there are none."""
        root = self.settings.directory
        if root and (claimed := claimed_directory(self.config)):
            return claimed
        return substore(root, self.job_id) if root else ""

    @property
    def writes_blocking(self) -> bool:
        """True when shared storage for blocking exchanges is something to it."""
        return any(edge.may_be_shared for edge in self.plan.edges)

    @property
    def goes_on(self) -> bool:
        """True when what one JobManager has deployed of it can run on under the next."""
        return not self.settings.keeps_in_jobmanager

    @property
    def outlives_jobmanager(self) -> bool:
        """True when another JobManager can go on with the job, or begin it again."""
        return self.goes_on or self.settings.begins_again

    def options(
        self,
        first_attempt: int = 0,
        is_recovered: bool = False,
        operations: bytes = b"",
        taskmanagers: Mapping[str, str] = MappingProxyType({}),
        history: JobHistory = JobHistory(),  # noqa: B008 - it is frozen
        *,
        has_committed: bool = False,
        leader_epoch: int,
        jitter: Callable[[], float],
        labels: FailureLabels,
        shares_spill: bool = False,
        report_span: ReportSpan | None = None,
    ) -> JobOptions:
        """How its machine runs it in the name of a leader; arguments as in ``JobOptions``."""
        checkpoints = self.settings.checkpoints
        return JobOptions(
            restart=self.settings.restart,
            failover_strategy=FailoverStrategyName(self.config.failover_strategy),
            coordinator=None
            if checkpoints is None
            else partial(_coordinator, checkpoints, leader_epoch, history.checkpoints),
            first_attempt=first_attempt,
            is_recovered=is_recovered,
            goes_on=self.goes_on,
            begins_again=self.settings.begins_again or not (first_attempt and taskmanagers),
            has_committed=has_committed,
            operations=operations,
            taskmanagers=taskmanagers,
            history=history,
            jitter=jitter,
            labels=labels,
            exceptions_max=self.config.jobmanager_exception_history_size,
            speculation=self.settings.speculation,
            retains_on_cancellation=self.settings.retains_on_cancellation,
            shares_spill=shares_spill and self.writes_blocking,
            report_span=report_span,
        )

    def checkpoint_store(self) -> ObjectStore | None:
        """The job's directory in the checkpoint store; None = it takes no checkpoints."""
        if self.settings.checkpoints is None:
            return None
        if self.checkpoint_directory:
            return open_store(self.checkpoint_directory)
        return MemoryStore(self.settings.memory_max_bytes)


def _coordinator(
    settings: CheckpointSettings,
    leader_epoch: int,
    kept: KeptCheckpoints,
    retained: tuple[CompletedCheckpoint, ...],
    next_checkpoint_id: int,
) -> CheckpointCoordinator:
    return CheckpointCoordinator(
        settings,
        retained=retained,
        next_checkpoint_id=next_checkpoint_id,
        leader_epoch=leader_epoch,
        kept=kept,
    )


def claimed_directory(config: Configuration) -> str:
    """The directory of another job's checkpoints that this one has claimed; "" = none."""
    path = config.execution_state_recovery_path
    is_claimed = config.execution_state_recovery_claim_mode == "claim"
    return path.rpartition("/")[0] if is_claimed and is_checkpoint_path(path) else ""


def is_checkpoint_path(path: str) -> bool:
    """Whether a path is called as one checkpoint of a job is."""
    return _CHECKPOINT.fullmatch(path.rpartition("/")[2]) is not None


def check_checkpoint_directory(job: JobDescription) -> None:
    """Makes the directory of a new job's checkpoints, or says at once that it cannot be.

    Raises:
        JobRejected: it cannot be made or written.
    """
    if not job.checkpoint_directory:
        return
    try:
        store = open_store(job.checkpoint_directory)
        store.check_answers(FIRST_ANSWER_MS)
        check_is_outside(job.checkpoint_directory)
        store.check_writable()
    except (StoreTransient, Unrecoverable, JobRejected) as error:
        raise JobRejected(
            f"job {job.graph.name!r}: its checkpoints cannot be kept in "
            f"{job.checkpoint_directory}: {error}; set "
            "execution.checkpointing.dir to a directory or prefix that the JobManager and every TaskManager can "
            "write, or execution.checkpointing.interval to none"
        ) from error


def _needs_java(graph: graph_pb2.JobGraph, config: Configuration) -> bool:
    """Whether slots start Spark for the job.

    Raises:
        JobRejected: Spark cannot run as the configuration says.
    """
    if not runs_on_spark(graph):
        return False
    try:
        config.check_spark()
    except ConfigurationError as error:
        raise JobRejected(f"job {graph.name!r} runs on Spark: {error}") from error
    return not config.spark_keys.get("spark.remote")


def _place_problem(settings: JobSettings, config: Configuration) -> str | None:
    """Why checkpoints cannot be kept where they are to be."""
    if not settings.keeps_in_jobmanager or config.high_availability_type == "none":
        return None
    return (
        "its checkpoints would end with the JobManager, and another one could not go on with it: "
        "set execution.checkpointing.storage: filesystem, or execution.checkpointing.interval: none"
    )


def describe(
    job_id: str,
    graph: graph_pb2.JobGraph,
    cluster_config: Configuration,
    artifacts: ArtifactStore,
    facts: Callable[[], list[TaskManagerFacts]],
) -> JobDescription:
    """Checks a job.

    Args:
        facts: what the cluster's TaskManagers say of themselves.

    Raises:
        JobRejected: the graph, its configuration or its code cannot be accepted.
        ProtocolMismatch: a TaskManager cannot read the job's code.
    """
    if not _JOB_ID.fullmatch(job_id):
        raise JobRejected(f"{job_id[:80]!r} is no job id: it must be 32 lower-case hex digits")
    plan = plan_of(graph)
    problem = plan_problem(plan)
    if problem is not None:
        raise JobRejected(f"job {graph.name!r}: {problem}")
    validate(graph)
    config = over_cluster(cluster_config, dict(graph.config))
    settings = job_settings(config)
    regions = RegionGraph(plan)
    strategy = FailoverStrategyName(config.failover_strategy)
    problem = _place_problem(settings, config) or strategy_problem(strategy, regions)
    if problem is None and settings.checkpoints is not None:
        problem = rebuild_problem(regions)
    if problem is not None:
        raise JobRejected(f"job {graph.name!r}: {problem}")
    if settings.checkpoints is not None and persist_sinks(graph):
        raise JobRejected(
            f"job {graph.name!r}: what it persists is made in one go, so it cannot go on from a checkpoint: "
            "set execution.checkpointing.interval to none"
        )
    missing = set(artifacts.missing(artifact.id for artifact in graph.artifacts))
    names = [f"{a.name} ({a.id})" for a in graph.artifacts if a.id in missing]
    if names:
        raise JobRejected(
            f"job {graph.name!r} names artifacts that were not uploaded: {', '.join(names)}"
        )
    stamp = CodeStamp(
        graph.python_version,
        graph.cloudpickle_version,
        tuple(graph.requirements),
        needs_java=_needs_java(graph, config),
    )
    refusal = admission_problem(stamp, facts())
    if refusal is not None:
        raise refusal
    shared = {
        key: value
        for key, value in cluster_config.to_mapping().items()
        if not key.startswith(_OWN_SETTINGS)
    }
    slot_config = shared | dict(graph.config)
    return JobDescription(job_id, graph, plan, stamp, config, settings, slot_config)
