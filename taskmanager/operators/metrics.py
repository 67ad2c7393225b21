"""Counters of one subtask: plain integers that only the mailbox thread writes."""

from __future__ import annotations

from dataclasses import dataclass

from common.elements import MIN_TIMESTAMP_MS
from common.pb import internal_pb2
from penstock.pb import client_pb2


@dataclass(slots=True)
class SubtaskCounters:
    """What a subtask did since its attempt began; times in nanoseconds of the mailbox thread."""

    records_in: int = 0
    records_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    busy_ns: int = 0
    idle_ns: int = 0
    back_pressured_ns: int = 0
    watermark_ms: int = MIN_TIMESTAMP_MS
    late_records: int = 0
    bad_records: int = 0
    checkpoint_alignment_ms: int = 0
    checkpoint_start_delay_ms: int = 0
    checkpoint_aligned_bytes: int = 0
    checkpoint_sync_ms: float = 0.0
    checkpoint_async_ms: int = 0
    checkpoint_uploaded_bytes: int = 0
    state_bytes: int = 0
    restored_local_bytes: int = 0
    restored_store_bytes: int = 0
    local_backup_failures: int = 0

    def to_proto(self) -> client_pb2.SubtaskMetrics:
        """The counters as they are reported."""
        return client_pb2.SubtaskMetrics(
            records_in=self.records_in,
            records_out=self.records_out,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            busy_ms=self.busy_ns // 1_000_000,
            idle_ms=self.idle_ns // 1_000_000,
            back_pressured_ms=self.back_pressured_ns // 1_000_000,
            watermark_ms=self.watermark_ms,
            late_records=self.late_records,
            bad_records=self.bad_records,
            checkpoint_alignment_ms=self.checkpoint_alignment_ms,
            checkpoint_start_delay_ms=self.checkpoint_start_delay_ms,
            checkpoint_aligned_bytes=self.checkpoint_aligned_bytes,
            state_bytes=self.state_bytes,
            restored_local_bytes=self.restored_local_bytes,
            restored_store_bytes=self.restored_store_bytes,
            local_backup_failures=self.local_backup_failures,
        )

    def gauges(self) -> internal_pb2.SubtaskGauges:
        """What only metrics endpoints show."""
        return internal_pb2.SubtaskGauges(
            checkpoint_sync_ms=self.checkpoint_sync_ms,
            checkpoint_async_ms=self.checkpoint_async_ms,
            checkpoint_uploaded_bytes=self.checkpoint_uploaded_bytes,
        )
