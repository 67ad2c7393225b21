"""What slots tell of stores and spilled rows counts as their TaskManager's (pure but for the process' counts)."""

from __future__ import annotations

from common.pb import internal_pb2
from penstock.storage.request_counts import FILE_REQUESTS, S3_REQUESTS, RequestCounts
from taskmanager.partitions.spill_counts import SPILL


def count_traffic(metrics: internal_pb2.SlotMetrics) -> None:
    """Counts what a slot has reported with what its TaskManager has done itself."""
    _count(S3_REQUESTS, metrics.s3)
    _count(FILE_REQUESTS, metrics.files)
    spill = metrics.spill
    SPILL.add_written(spill.written_bytes, spill.write_seconds)
    SPILL.add_read(spill.read_bytes, spill.read_seconds)


def _count(counts: RequestCounts, traffic: internal_pb2.StoreTraffic) -> None:
    for one in traffic.requests:
        counts.add(one.operation, one.outcome, one.count)
    counts.add_bytes(traffic.sent_bytes, traffic.received_bytes)
