"""How requests to stores are shown to Prometheus, by both daemons under the same names."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from penstock.storage.request_counts import FILE_REQUESTS, S3_REQUESTS, RequestCounts


class StoreCollector(Collector):
    """Shows what a daemon has asked of stores of one kind, a TaskManager's slots included.

    Args:
        kind: begins the names.
        help_text: of the requests.
        sent: what bytes are that went there.
        received: what bytes are that came from there.
        counts: of the process.
    """

    def __init__(
        self, kind: str, help_text: str, sent: str, received: str, counts: RequestCounts
    ) -> None:
        self._kind = kind
        self._help = help_text
        self._sent = sent
        self._received = received
        self._counts = counts

    def describe(self) -> Iterable[Metric]:
        """Nothing: families are known only at a scrape."""
        return ()

    @override
    def collect(self) -> Iterable[Metric]:
        name = f"penstock_{self._kind}"
        requests = CounterMetricFamily(
            f"{name}_requests", self._help, labels=("operation", "outcome")
        )
        for one in self._counts.requests():
            requests.add_metric((one.operation, one.outcome), one.count)
        yield requests
        sent, received = self._counts.bytes()
        yield CounterMetricFamily(
            f"{name}_{self._sent}_bytes", "Content of objects written.", value=sent
        )
        yield CounterMetricFamily(
            f"{name}_{self._received}_bytes", "Content of objects read.", value=received
        )


def show_stores(registry: CollectorRegistry) -> None:
    """Shows what this process has asked of S3 and of stores on file systems."""
    registry.register(
        StoreCollector(
            "s3",
            "Requests to S3, repeated ones each; outcome is ok or the code of the error.",
            "sent",
            "received",
            S3_REQUESTS,
        )
    )
    registry.register(
        StoreCollector(
            "file_store",
            "Requests to stores on file systems; outcome is ok or the class of the error.",
            "written",
            "read",
            FILE_REQUESTS,
        )
    )
