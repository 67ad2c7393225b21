"""What a JobManager, leader or standby, shows Prometheus of who leads."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from jobmanager.leadership.leadership_numbers import LeadershipNumbers, ZookeeperState


class LeadershipCollector(Collector):
    """Shows who leads, as far as this JobManager knows.

    Args:
        own_epoch: of this JobManager; 0 = it does not lead.
        numbers: what it has heard of others.
    """

    def __init__(self, own_epoch: Callable[[], int], numbers: LeadershipNumbers) -> None:
        self._own_epoch = own_epoch
        self._numbers = numbers

    def describe(self) -> Iterable[Metric]:
        """Nothing: families are known only at a scrape."""
        return ()

    @override
    def collect(self) -> Iterable[Metric]:
        numbers, own = self._numbers, self._own_epoch()
        yield GaugeMetricFamily(
            "penstock_jobmanager_leading", "1 = this JobManager leads.", value=own > 0
        )
        yield GaugeMetricFamily(
            "penstock_jobmanager_leader_epoch",
            "Epoch of the leader that is known; 0 = none is.",
            value=max(own, numbers.epoch),
        )
        yield CounterMetricFamily(
            "penstock_jobmanager_leader_changes",
            "Leaders that this JobManager has heard of, but for the first.",
            value=numbers.changes,
        )
        state = GaugeMetricFamily(
            "penstock_jobmanager_zookeeper_state",
            "1 for the state of the connection to ZooKeeper.",
            labels=("state",),
        )
        if numbers.zookeeper is not None:
            for one in ZookeeperState:
                state.add_metric((one.value,), one is numbers.zookeeper)
        yield state
