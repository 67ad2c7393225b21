"""Held partitions between messages and decisions."""

from __future__ import annotations

from collections.abc import Iterable

from common.pb import internal_pb2
from jobmanager.partitions.held_partitions import HeldPartition, Holdings
from jobmanager.partitions.promoted import PromotedPartitions, PromotedSet
from jobmanager.stores.shared_spill_store import partition_of
from penstock.pb import client_pb2


def holdings_of(holdings: internal_pb2.Holdings) -> Holdings:
    """What a TaskManager holds."""
    return Holdings(
        _partitions(holdings.partitions),
        holdings.count,
        holdings.size_bytes,
        tuple(
            PromotedSet(
                one.name,
                one.job_id,
                one.schema,
                one.partition_count,
                one.promoted_at_ms,
                one.confirmed,
                one.updates_of,
            )
            for one in holdings.promoted
        ),
        holdings.version,
    )


def persisted_details(found: PromotedPartitions) -> client_pb2.PersistedDetails:
    """What clients see of what outlives its job."""
    return client_pb2.PersistedDetails(
        name=found.whole.name,
        job_id=found.whole.job_id,
        partition_count=found.whole.partition_count,
        schema=found.whole.schema,
        rows=sum(part.rows for part in found.parts),
        size_bytes=sum(part.size_bytes for part in found.parts),
        persisted_at_ms=found.whole.promoted_at_ms,
        updates_of=found.whole.updates_of,
    )


def partition_details(taskmanager_id: str, held: HeldPartition) -> client_pb2.PartitionDetails:
    """What clients see."""
    return client_pb2.PartitionDetails(
        taskmanager_id=taskmanager_id,
        job_id=held.job_id,
        edge_id=held.partition_id.edge_id,
        vertex=held.partition_id.vertex,
        subtask_index=held.partition_id.subtask_index,
        attempt=held.partition_id.attempt,
        rows=held.rows,
        size_bytes=held.size_bytes,
        promoted_as=held.promoted_as,
    )


def _partitions(messages: Iterable[internal_pb2.HeldPartition]) -> tuple[HeldPartition, ...]:
    return tuple(
        HeldPartition(
            message.job_id,
            partition_of(message.partition),
            message.rows,
            message.size_bytes,
            message.promoted_as,
        )
        for message in messages
    )
