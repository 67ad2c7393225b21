"""How subtask metrics are shown to Prometheus.

Both daemons show subtasks under the same names: a TaskManager those it runs, the JobManager those
of all jobs. Counters restart at 0 with each attempt, which is a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from common.elements import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS
from common.pb import internal_pb2

_LABELS = ("job_id", "job_name", "vertex", "operator", "subtask_index", "attempt")

_COUNTERS: tuple[tuple[str, str, str, float], ...] = (
    # field of SubtaskMetrics, metric name, help, factor to base units
    ("records_in", "records_in", "Rows read by the subtask.", 1),
    ("records_out", "records_out", "Rows written by the subtask.", 1),
    ("bytes_in", "in_bytes", "Bytes read by the subtask.", 1),
    ("bytes_out", "out_bytes", "Bytes written by the subtask.", 1),
    ("busy_ms", "busy_seconds", "Time the subtask spent working.", 1e-3),
    ("idle_ms", "idle_seconds", "Time the subtask had nothing to do.", 1e-3),
    ("back_pressured_ms", "back_pressured_seconds", "Time the subtask's output was full.", 1e-3),
    ("late_records", "late_records", "Rows that came too late for their window.", 1),
    ("bad_records", "bad_records", "Records skipped or sent to a side output.", 1),
    ("restored_local_bytes", "restored_local_bytes", "State restored from local copies.", 1),
    ("restored_store_bytes", "restored_store_bytes", "State read from the checkpoint store.", 1),
    (
        "local_backup_failures",
        "local_backup_failures",
        "Snapshots without a local copy: it could not be written.",
        1,
    ),
)


@dataclass(frozen=True, slots=True)
class NamedMetrics:
    """The latest metrics of an execution attempt, with the names that people know.

    Attributes:
        operator: name of the vertex, which tells the operators of its chain.
    """

    job_name: str
    operator: str
    entry: internal_pb2.AttemptMetrics

    @property
    def labels(self) -> tuple[str, ...]:
        """Values of the labels, in their order."""
        attempt = self.entry.attempt
        return (
            attempt.job_id,
            self.job_name,
            attempt.vertex,
            self.operator,
            str(attempt.subtask_index),
            str(attempt.attempt),
        )


class AttemptMetricsCollector(Collector):
    """Shows the latest metrics of execution attempts as Prometheus families.

    Args:
        snapshot: called on the endpoint's thread at each scrape; must return a sequence that nobody
            changes afterwards.
    """

    def __init__(self, snapshot: Callable[[], Sequence[NamedMetrics]]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Metric]:
        """Nothing: families are known only at a scrape."""
        return ()

    @override
    def collect(self) -> Iterable[Metric]:
        """The families, one sample per attempt."""
        attempts = self._snapshot()
        labels = [named.labels for named in attempts]
        for field_name, name, help_text, factor in _COUNTERS:
            family = CounterMetricFamily(f"penstock_subtask_{name}", help_text, labels=_LABELS)
            for named, values in zip(attempts, labels, strict=True):
                family.add_metric(values, getattr(named.entry.metrics, field_name) * factor)
            yield family
        watermark = GaugeMetricFamily(
            "penstock_subtask_watermark_timestamp_seconds",
            "Event-time watermark in seconds since the epoch; +Inf after the last row.",
            labels=_LABELS,
        )
        for named, values in zip(attempts, labels, strict=True):
            watermark_ms = named.entry.metrics.watermark_ms
            if watermark_ms != MIN_TIMESTAMP_MS:
                ended = watermark_ms == MAX_TIMESTAMP_MS
                watermark.add_metric(values, float("inf") if ended else watermark_ms / 1000)
        yield watermark
