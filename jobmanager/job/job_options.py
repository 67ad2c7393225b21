"""How a job is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jobmanager.failover.exceptions_history import DEFAULT_SIZE
from jobmanager.failover.failover_strategy import FailoverStrategyName
from jobmanager.failover.failure_enricher import FailureLabels
from jobmanager.failover.restart_settings import RestartSettings
from jobmanager.job.checkpoint_wiring import CoordinatorFactory
from jobmanager.job.job_history import JobHistory
from jobmanager.messages.job_state import JobState
from jobmanager.scheduler.slow_task_detector import SlowTaskSettings
from jobmanager.traces.span import ReportSpan


def no_jitter() -> float:
    """Delays are as they were configured."""
    return 0.0


@dataclass(frozen=True, slots=True)
class JobOptions:
    """How a job is to be run.

    Attributes:
        restart: when it is restarted.
        failover_strategy: how much of it.
        coordinator: makes its checkpoint coordinator; None = it takes no checkpoints.
        first_attempt: number of its first attempts here.
        is_recovered: an earlier JobManager has run it.
        goes_on: what one JobManager has deployed runs on under the next.
        begins_again: where nothing of it does, it is run again.
        has_committed: the earlier one had begun to make its output visible, without checkpoints.
        operations: what its record has of what users have asked of it.
        taskmanagers: which have run its attempts under the earlier one, and where they are called.
        jitter: of its restarts' delays, uniform in -1..1.
        exceptions_max: entries of its exceptions history.
        speculation: when subtasks are so slow that they get rivals; None = never.
        history: what has become of it under earlier ones.
        retains_on_cancellation: its checkpoints stay when it is cancelled, and what they let be committed.
        shares_spill: its blocking partitions are written to shared storage.
        report_span: takes what is traced of it; None = nothing is.
    """

    restart: RestartSettings = field(default_factory=RestartSettings)
    failover_strategy: FailoverStrategyName = FailoverStrategyName.REGION
    coordinator: CoordinatorFactory | None = None
    first_attempt: int = 0
    is_recovered: bool = False
    goes_on: bool = False
    begins_again: bool = True
    has_committed: bool = False
    operations: bytes = b""
    taskmanagers: Mapping[str, str] = field(default_factory=dict)
    jitter: Callable[[], float] = no_jitter
    labels: FailureLabels = field(default_factory=FailureLabels)
    exceptions_max: int = DEFAULT_SIZE
    speculation: SlowTaskSettings | None = None
    history: JobHistory = field(default_factory=JobHistory)
    retains_on_cancellation: bool = False
    shares_spill: bool = False
    report_span: ReportSpan | None = None

    @property
    def seeks_attempts(self) -> bool:
        """True when what an earlier JobManager has deployed may run."""
        return self.is_recovered and self.goes_on

    @property
    def has_begun(self) -> bool:
        """False while no earlier JobManager has deployed anything of it, as where it has waited for slots."""
        return bool(self.taskmanagers)

    @property
    def first_state(self) -> JobState:
        """In which the job is shown at first: what has only waited for slots still does."""
        has_run = self.has_begun or bool(self.history.running_at_ms)
        return JobState.RESTARTING if self.is_recovered and has_run else JobState.CREATED

    @property
    def survives(self) -> bool:
        """True when the job goes on after the end of its JobManager."""
        return self.coordinator is not None or self.restart.restarts or self.goes_on
