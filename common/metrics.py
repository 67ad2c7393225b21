"""How subtask metrics are shown to Prometheus.

Both daemons show subtasks under the same names: a TaskManager those it runs, the JobManager those
of all jobs. Counters restart at 0 with each attempt, which is a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from typing_extensions import override

from common.clock import SystemClock
from common.elements import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS
from common.pb import internal_pb2

_Labels = dict[str, str]
"""One for all samples of an attempt: they are written once (``metrics_text``)."""

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
# The same of subtasks whose state is in databases: fields of DatabaseNumbers.
_DATABASE_GAUGES: tuple[tuple[str, str, str, float], ...] = (
    ("memtable_bytes", "rocksdb_memtable_bytes", "Memory of RocksDB for what is not in files.", 1),
    ("level0_files", "rocksdb_level0_files", "Files of RocksDB that are not merged yet.", 1),
    (
        "pending_compaction_bytes",
        "rocksdb_pending_compaction_bytes",
        "What RocksDB is still to merge, as it estimates.",
        1,
    ),
    ("file_bytes", "rocksdb_file_bytes", "Files of RocksDB on disk.", 1),
)
_DATABASE_COUNTERS: tuple[tuple[str, str, str, float], ...] = (
    ("cache_hits", "rocksdb_block_cache_hits", "Blocks that RocksDB found in memory.", 1),
    ("cache_misses", "rocksdb_block_cache_misses", "Blocks that RocksDB read from disk.", 1),
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
    def labels(self) -> _Labels:
        """The labels of its samples."""
        attempt = self.entry.attempt
        return {
            "job_id": attempt.job_id,
            "job_name": self.job_name,
            "vertex": attempt.vertex,
            "operator": self.operator,
            "subtask_index": str(attempt.subtask_index),
            "attempt": str(attempt.attempt),
        }


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
        attempts = [(named.labels, named.entry) for named in self._snapshot()]
        metrics = [(labels, entry.metrics) for labels, entry in attempts]
        gauges = [(labels, entry.gauges) for labels, entry in attempts]
        yield from _families("counter", _COUNTERS, metrics)
        yield from _families("gauge", _GAUGES, metrics)
        yield from _families("gauge", _INTERNAL_GAUGES, gauges)
        yield _family(
            "gauge",
            "state_memory_bytes",
            "Memory that a state takes; of one in a database: caches and memtables.",
            [
                ({**labels, "state": state.state}, state.memory_bytes)
                for labels, one in gauges
                for state in one.states
            ],
        )
        databases = [(labels, one.database) for labels, one in gauges if one.HasField("database")]
        yield from _families("gauge", _DATABASE_GAUGES, databases)
        yield from _families("counter", _DATABASE_COUNTERS, databases)
        yield from self._watermarks(
            [
                (labels, one.watermark_ms)
                for labels, one in metrics
                if one.watermark_ms != MIN_TIMESTAMP_MS
            ]
        )

    def _watermarks(self, found: Sequence[tuple[_Labels, int]]) -> Iterable[Metric]:
        now_ms = self._now_ms()
        moving = [(labels, at_ms) for labels, at_ms in found if at_ms != MAX_TIMESTAMP_MS]
        ended = [labels for labels, at_ms in found if at_ms == MAX_TIMESTAMP_MS]
        yield _family(
            "gauge",
            "watermark_timestamp_seconds",
            "Event-time watermark in seconds since the epoch; +Inf after the last row.",
            [(labels, at_ms / 1000) for labels, at_ms in moving]
            + [(labels, float("inf")) for labels in ended],
        )
        yield _family(
            "gauge",
            "watermark_lag_seconds",
            "How far the event-time watermark is behind the clock.",
            [(labels, (now_ms - at_ms) / 1000) for labels, at_ms in moving],
        )


def _families(
    kind: Literal["counter", "gauge"],
    numbers: Sequence[tuple[str, str, str, float]],
    messages: Sequence[tuple[_Labels, Any]],
) -> Iterable[Metric]:
    """A family for each number: its field in the messages, its name, its help, its factor to base units."""
    for field_name, name, help_text, factor in numbers:
        values = [(labels, getattr(message, field_name) * factor) for labels, message in messages]
        yield _family(kind, name, help_text, values)


def _family(
    kind: Literal["counter", "gauge"],
    name: str,
    help_text: str,
    values: Sequence[tuple[_Labels, float]],
) -> Metric:
    family = Metric(f"penstock_subtask_{name}", help_text, kind)
    sample_name = f"{family.name}_total" if kind == "counter" else family.name
    family.samples = [Sample(sample_name, labels, value) for labels, value in values]
    return family
