"""What the JobManager shows Prometheus. Collected on the endpoint's thread from values that the
event loop replaces as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from common.metrics import AttemptMetricsCollector
from jobmanager.dispatcher.dispatcher_runner import DispatcherRunner
from jobmanager.dispatcher.job_state import JobState
from jobmanager.scheduler.cluster_runner import ClusterRunner, SlotCounts


class ClusterCollector(Collector):
    """Jobs by state, slots and TaskManagers.

    Args:
        jobs: state's name -> jobs in it.
        slots: the current counts.
    """

    def __init__(
        self, jobs: Callable[[], Mapping[str, int]], slots: Callable[[], SlotCounts]
    ) -> None:
        self._jobs = jobs
        self._slots = slots

    @override
    def collect(self) -> Iterable[Metric]:
        """The families."""
        jobs = self._jobs()
        family = GaugeMetricFamily(
            "penstock_jobmanager_jobs", "Known jobs by state.", labels=("state",)
        )
        for state in JobState:
            family.add_metric((state.name,), jobs.get(state.name, 0))
        yield family
        slots = self._slots()
        for name, help_text, value in (
            ("slots", "Slots of all TaskManagers.", slots.total),
            ("slots_free", "Slots that no job has.", slots.free),
            ("taskmanagers", "Registered TaskManagers.", slots.taskmanagers),
            ("jobs_waiting_for_slots", "Jobs that wait for slots.", slots.waiting_jobs),
        ):
            yield GaugeMetricFamily(f"penstock_jobmanager_{name}", help_text, value=value)


def build_registry(dispatcher: DispatcherRunner, cluster: ClusterRunner) -> CollectorRegistry:
    """All metrics of the JobManager."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(ClusterCollector(lambda: dispatcher.counts, lambda: cluster.counts))
    registry.register(AttemptMetricsCollector(dispatcher.recent_metrics))
    return registry
