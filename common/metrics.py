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

from common.clock import SystemClock
from common.elements import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS
from common.pb import internal_pb2

_LABELS = ("job_id", "job_name", "vertex", "operator", "subtask_index", "attempt")

# Field of SubtaskMetrics, metric name, help, factor to base units.
_COUNTERS: tuple[tuple[str, str, str, float], ...] = (
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
# The same of what is not summed up: the last checkpoint that the subtask took part in.
_GAUGES: tuple[tuple[str, str, str, float], ...] = (
    (
        "checkpoint_start_delay_ms",
        "checkpoint_start_delay_seconds",
        "From the trigger of the last checkpoint to its first barrier.",
        1e-3,
    ),
    (
        "checkpoint_alignment_ms",
        "checkpoint_alignment_seconds",
        "From the first barrier of the last checkpoint to its last.",
        1e-3,
    ),
    (
        "checkpoint_aligned_bytes",
        "checkpoint_in_flight_bytes",
        "Input processed while the barriers of the last checkpoint came.",
        1,
    ),
    ("state_bytes", "state_bytes", "State in the last snapshot.", 1),
)
# The same of what only the daemons know: fields of SubtaskGauges.
_INTERNAL_GAUGES: tuple[tuple[str, str, str, float], ...] = (
    (
        "checkpoint_sync_ms",
        "checkpoint_sync_seconds",
        "How long the last snapshot held up the subtask.",
        1e-3,
    ),
    (
        "checkpoint_async_ms",
        "checkpoint_async_seconds",
        "How long the last snapshot was written beside the processing.",
        1e-3,
    ),
    (
        "checkpoint_uploaded_bytes",
        "checkpoint_uploaded_bytes",
        "What was written for the last snapshot.",
        1,
    ),
    ("in_queued_bytes", "in_queued_bytes", "Input that has come and is not taken yet.", 1),
    (
        "in_credit_bytes",
        "in_credit_bytes",
        "Input that may have come, or be on its way, at most.",
        1,
    ),
    ("out_waiting_batches", "out_waiting_batches", "Batches of outputs that wait for credit.", 1),
)
# Of subtasks whose state is in databases: fields of DatabaseNumbers.
_DATABASE_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("memtable_bytes", "rocksdb_memtable_bytes", "Memory of RocksDB for what is not in files."),
    ("level0_files", "rocksdb_level0_files", "Files of RocksDB that are not merged yet."),
    (
        "pending_compaction_bytes",
        "rocksdb_pending_compaction_bytes",
        "What RocksDB is still to merge, as it estimates.",
    ),
    ("file_bytes", "rocksdb_file_bytes", "Files of RocksDB on disk."),
)
_DATABASE_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("cache_hits", "rocksdb_block_cache_hits", "Blocks that RocksDB found in memory."),
    ("cache_misses", "rocksdb_block_cache_misses", "Blocks that RocksDB read from disk."),
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
        now_ms: the wall clock; None = the system's.
    """

    def __init__(
        self,
        snapshot: Callable[[], Sequence[NamedMetrics]],
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        self._snapshot = snapshot
        self._now_ms = now_ms or SystemClock().now_ms

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
        for field_name, name, help_text, factor in _GAUGES:
            gauge = GaugeMetricFamily(f"penstock_subtask_{name}", help_text, labels=_LABELS)
            for named, values in zip(attempts, labels, strict=True):
                gauge.add_metric(values, getattr(named.entry.metrics, field_name) * factor)
            yield gauge
        for field_name, name, help_text, factor in _INTERNAL_GAUGES:
            gauge = GaugeMetricFamily(f"penstock_subtask_{name}", help_text, labels=_LABELS)
            for named, values in zip(attempts, labels, strict=True):
                gauge.add_metric(values, getattr(named.entry.gauges, field_name) * factor)
            yield gauge
        yield from _states(attempts, labels)
        yield from self._watermarks(attempts, labels)

    def _watermarks(
        self, attempts: Sequence[NamedMetrics], labels: Sequence[tuple[str, ...]]
    ) -> Iterable[Metric]:
        now_ms = self._now_ms()
        lag = GaugeMetricFamily(
            "penstock_subtask_watermark_lag_seconds",
            "How far the event-time watermark is behind the clock.",
            labels=_LABELS,
        )
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
                if not ended:
                    lag.add_metric(values, (now_ms - watermark_ms) / 1000)
        yield watermark
        yield lag


def _states(
    attempts: Sequence[NamedMetrics], labels: Sequence[tuple[str, ...]]
) -> Iterable[Metric]:
    memory = GaugeMetricFamily(
        "penstock_subtask_state_memory_bytes",
        "Memory that a state takes; of one in a database: caches and memtables.",
        labels=(*_LABELS, "state"),
    )
    databases = []
    for named, values in zip(attempts, labels, strict=True):
        gauges = named.entry.gauges
        for state in gauges.states:
            memory.add_metric((*values, state.state), state.memory_bytes)
        if gauges.HasField("database"):
            databases.append((values, gauges.database))
    yield memory
    for kind, fields in (
        (GaugeMetricFamily, _DATABASE_GAUGES),
        (CounterMetricFamily, _DATABASE_COUNTERS),
    ):
        for field_name, name, help_text in fields:
            family = kind(f"penstock_subtask_{name}", help_text, labels=_LABELS)
            for values, database in databases:
                family.add_metric(values, getattr(database, field_name))
            yield family
