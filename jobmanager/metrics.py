"""What the JobManager shows Prometheus. Collected on the endpoint's thread from values that the
event loop replaces as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from common.daemon_metrics import SwapCollector, show_gauge, show_uptime
from common.metrics import AttemptMetricsCollector
from common.store_metrics import show_stores
from jobmanager.dispatcher.dispatcher_runner import DispatcherRunner
from jobmanager.job.checkpoint_gauges import JobCheckpointNumbers
from jobmanager.liveness.loss_reason import LossReason
from jobmanager.messages.job_state import JobState
from jobmanager.scheduler.cluster_runner import ClusterRunner
from jobmanager.scheduler.registered_client import SlotCounts
from penstock.storage.swap_counts import SWAPS

_JOB_LABELS = ("job_id", "job_name")
_Numbers = tuple[tuple[str, str, Callable[[JobCheckpointNumbers], float]], ...]
_COUNTERS: _Numbers = (
    ("restarts", "Restarts of a job.", lambda job: job.restarts),
    (
        "speculative_attempts",
        "Second attempts that slow subtasks were given.",
        lambda job: job.speculative_attempts,
    ),
    (
        "speculative_attempts_won",
        "Second attempts that took the place of the first.",
        lambda job: job.speculative_attempts_won,
    ),
    (
        "checkpoints_completed",
        "Completed checkpoints.",
        lambda job: job.checkpoints.completed,
    ),
    ("checkpoints_failed", "Failed checkpoints.", lambda job: job.checkpoints.failed),
    (
        "output_repeated",
        "Starts from an older checkpoint than one whose output had been committed.",
        lambda job: job.checkpoints.repeated_output,
    ),
    (
        "store_calls_given_up",
        "Calls to the storage of checkpoints that were waited for in vain.",
        lambda job: job.checkpoints.store_calls_given_up,
    ),
)
_GAUGES: _Numbers = (
    (
        "store_calls_hanging",
        "Calls that were given up on and have not returned: each holds a thread.",
        lambda job: job.checkpoints.store_calls_hanging,
    ),
    (
        "last_checkpoint_duration_seconds",
        "From the trigger of the last completed checkpoint to its end.",
        lambda job: job.checkpoints.last_duration_ms / 1000,
    ),
    (
        "last_checkpoint_state_bytes",
        "Size of all state of the last completed checkpoint.",
        lambda job: job.checkpoints.last_state_bytes,
    ),
    (
        "last_checkpoint_uploaded_bytes",
        "What was written for the last completed checkpoint.",
        lambda job: job.checkpoints.last_uploaded_bytes,
    ),
    (
        "last_checkpoint_in_flight_bytes",
        "Input processed while its barriers came, of all subtasks.",
        lambda job: job.checkpoints.last_parts.aligned_bytes,
    ),
    (
        "last_checkpoint_start_delay_seconds",
        "From its trigger to the first barrier, of the subtask that it reached last.",
        lambda job: job.checkpoints.last_parts.start_delay_ms / 1000,
    ),
    (
        "last_checkpoint_alignment_seconds",
        "From the first barrier to the last, of the subtask that aligned longest.",
        lambda job: job.checkpoints.last_parts.alignment_ms / 1000,
    ),
    (
        "last_checkpoint_sync_seconds",
        "How long it held up the subtask that it held up longest.",
        lambda job: job.checkpoints.last_parts.sync_ms / 1000,
    ),
    (
        "last_checkpoint_async_seconds",
        "How long the subtask that took longest wrote beside the processing.",
        lambda job: job.checkpoints.last_parts.async_ms / 1000,
    ),
)


class ClusterCollector(Collector):
    """Jobs by state, slots, TaskManagers and what they hold.

    Args:
        jobs: state's name -> jobs in it.
        slots: the current counts.
        losses: how many TaskManagers were lost, by reason.
        partitions: number and bytes of the complete partitions that are held.
        dropped_reports: reports that no job took.
    """

    def __init__(
        self,
        jobs: Callable[[], Mapping[str, int]],
        slots: Callable[[], SlotCounts],
        losses: Callable[[], Mapping[LossReason, int]],
        partitions: Callable[[], tuple[int, int]],
        dropped_reports: Callable[[], int],
    ) -> None:
        self._dropped_reports = dropped_reports
        self._jobs = jobs
        self._slots = slots
        self._losses = losses
        self._partitions = partitions

    @override
    def collect(self) -> Iterable[Metric]:
        jobs = self._jobs()
        family = GaugeMetricFamily(
            "penstock_jobmanager_jobs", "Known jobs by state.", labels=("state",)
        )
        for state in JobState:
            family.add_metric((state.name,), jobs.get(state.name, 0))
        yield family
        slots, (held, held_bytes) = self._slots(), self._partitions()
        for name, help_text, value in (
            ("slots", "Slots of all TaskManagers.", slots.total),
            ("slots_free", "Slots that no job has.", slots.free),
            ("taskmanagers", "Registered TaskManagers.", slots.taskmanagers),
            ("jobs_waiting_for_slots", "Jobs that wait for slots.", slots.waiting_jobs),
            ("held_partitions", "Complete result partitions on TaskManagers.", held),
            ("held_partitions_bytes", "Size of these.", held_bytes),
        ):
            yield GaugeMetricFamily(f"penstock_jobmanager_{name}", help_text, value=value)
        losses = self._losses()
        lost = CounterMetricFamily(
            "penstock_jobmanager_taskmanagers_lost",
            "TaskManagers lost since the start, by how it was noticed.",
            labels=("reason",),
        )
        for reason in LossReason:
            lost.add_metric((reason.value,), losses.get(reason, 0))
        yield lost
        dropped = CounterMetricFamily(
            "penstock_jobmanager_dropped_events",
            "Reports of attempts of no known job, and slots given back by who did not hold them.",
            labels=("part",),
        )
        dropped.add_metric(("reports",), self._dropped_reports())
        dropped.add_metric(("slots",), slots.dropped_events)
        yield dropped


class CheckpointCollector(Collector):
    """Checkpoints and restarts of the jobs that run or ended a short while ago."""

    def __init__(
        self, jobs: Callable[[], Iterable[JobCheckpointNumbers]], now_ms: Callable[[], int]
    ) -> None:
        self._jobs = jobs
        self._now_ms = now_ms

    @override
    def collect(self) -> Iterable[Metric]:
        jobs = tuple(self._jobs())
        for name, help_text, count in _COUNTERS:
            counter = CounterMetricFamily(f"penstock_job_{name}", help_text, labels=_JOB_LABELS)
            for job in jobs:
                counter.add_metric((job.job_id, job.name), count(job))
            yield counter
        by_region = CounterMetricFamily(
            "penstock_job_region_restarts",
            "Restarts of a region, named after its first subtask; of regions that had any.",
            labels=(*_JOB_LABELS, "region"),
        )
        for job in jobs:
            for region, restarts in job.restarts_by_region.items():
                by_region.add_metric((job.job_id, job.name, region), restarts)
        yield by_region
        dropped = CounterMetricFamily(
            "penstock_job_dropped_events",
            "Events that came too late, twice, or from nobody who was asked, by who dropped them.",
            labels=(*_JOB_LABELS, "part"),
        )
        for job in jobs:
            for part, number in job.dropped.items():
                dropped.add_metric((job.job_id, job.name, part), number)
        yield dropped
        taking = [job for job in jobs if job.checkpoints.safe_since_ms]
        for name, help_text, value in _GAUGES:
            gauge = GaugeMetricFamily(f"penstock_job_{name}", help_text, labels=_JOB_LABELS)
            for job in taking:
                gauge.add_metric((job.job_id, job.name), value(job))
            yield gauge
        at_risk = GaugeMetricFamily(
            "penstock_job_work_at_risk_seconds",
            "Work that a failure now would repeat: time since the last checkpoint was triggered.",
            labels=_JOB_LABELS,
        )
        for job in taking:
            if job.has_ended:
                continue
            at_risk_ms = max(0, self._now_ms() - job.checkpoints.safe_since_ms)
            at_risk.add_metric((job.job_id, job.name), at_risk_ms / 1000)
        yield at_risk


def build_registry(dispatcher: DispatcherRunner, cluster: ClusterRunner) -> CollectorRegistry:
    """All metrics of the JobManager."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(
        ClusterCollector(
            lambda: dispatcher.jobs.counts,
            lambda: cluster.counts,
            lambda: cluster.losses,
            lambda: cluster.partitions.counts,
            lambda: dispatcher.dropped_reports,
        )
    )
    registry.register(CheckpointCollector(dispatcher.checkpoint_numbers, dispatcher.now_ms))
    registry.register(AttemptMetricsCollector(dispatcher.recent_metrics))
    show_stores(registry)
    registry.register(SwapCollector(SWAPS))
    show_uptime(registry, "jobmanager")
    show_gauge(
        registry,
        "penstock_jobmanager_heartbeat_age_seconds",
        "Time since the last heartbeat of the TaskManager that was heard of longest ago.",
        lambda: cluster.heartbeat_age_ms / 1000,
    )
    return registry
