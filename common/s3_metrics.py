"""How requests to S3 are shown to Prometheus, by both daemons under the same names."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from penstock.storage.s3.metrics import RequestCounts


class S3Collector(Collector):
    """Shows what a daemon has asked of S3, a TaskManager's slots included.

    Args:
        counts: of the process.
    """

    def __init__(self, counts: RequestCounts) -> None:
        self._counts = counts

    def describe(self) -> Iterable[Metric]:
        """Nothing: families are known only at a scrape."""
        return ()

    @override
    def collect(self) -> Iterable[Metric]:
        """The families."""
        requests = CounterMetricFamily(
            "penstock_s3_requests",
            "Requests to S3, repeated ones each; outcome is ok or the code of the error.",
            labels=("operation", "outcome"),
        )
        for one in self._counts.requests():
            requests.add_metric((one.operation, one.outcome), one.count)
        yield requests
        sent, received = self._counts.bytes()
        yield CounterMetricFamily("penstock_s3_sent_bytes", "Content written to S3.", value=sent)
        yield CounterMetricFamily(
            "penstock_s3_received_bytes", "Content read from S3.", value=received
        )
