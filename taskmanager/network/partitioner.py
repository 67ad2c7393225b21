"""Which consumer of an edge gets which rows (pure).

One ``take`` per batch brings the rows into the order of their consumers, slices of it (no copies)
go to them; rows of one consumer keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from common.pb import internal_pb2
from penstock.errors import InvariantViolation
from penstock.pb import graph_pb2
from penstock.storage.key_groups import owners
from taskmanager.kernels import hash_columns, partition_order

Pieces = Sequence[tuple[int, pa.RecordBatch]]
"""(subpartition index, rows for it); every piece has at least one row."""


class Partitioner(Protocol):
    """Splits batches among consumers."""

    def partition(self, batch: pa.RecordBatch) -> Pieces:
        """The rows of the batch (at least one), each with its consumers."""


class ForwardPartitioner(Partitioner):
    """Everything goes to the one consumer."""

    @override
    def partition(self, batch: pa.RecordBatch) -> Pieces:
        """The batch untouched."""
        return ((0, batch),)


class BroadcastPartitioner(Partitioner):
    """Everything goes to every consumer."""

    def __init__(self, consumer_count: int) -> None:
        self._consumers = range(consumer_count)

    @override
    def partition(self, batch: pa.RecordBatch) -> Pieces:
        """The batch untouched, once per consumer."""
        return [(index, batch) for index in self._consumers]


class RoundRobinPartitioner(Partitioner):
    """Spreads rows evenly: after any sequence of batches consumers differ by one row at most.

    A batch is cut into as many runs of consecutive rows as there are consumers; the consumers that
    get one row more than the others take turns.

    Args:
        consumer_count: consumers of the edge (rebalance) or of this producer's group (rescale).
        first: the consumer to begin with; producers differ in it, so that the first rows of all
            producers do not meet at one consumer.

    Example: seven rows for three consumers, whose turns go on with the next batch.
        >>> rows = pa.record_batch({"n": range(7)})
        >>> partitioner = RoundRobinPartitioner(3, first=0)
        >>> [(index, piece.num_rows) for index, piece in partitioner.partition(rows)]
        [(0, 3), (1, 2), (2, 2)]
        >>> [(index, piece.num_rows) for index, piece in partitioner.partition(rows.slice(0, 1))]
        [(1, 1)]
    """

    def __init__(self, consumer_count: int, first: int) -> None:
        self._count = consumer_count
        self._next = first % consumer_count

    @override
    def partition(self, batch: pa.RecordBatch) -> Pieces:
        """Runs of consecutive rows."""
        count, first, rows = self._count, self._next, batch.num_rows
        share, extra = divmod(rows, count)
        self._next = (first + extra) % count
        if share == 0 and extra == 1:
            return ((first, batch),)
        pieces: list[tuple[int, pa.RecordBatch]] = []
        start = 0
        for turn in range(count if share else extra):
            length = share + (turn < extra)
            pieces.append(((first + turn) % count, batch.slice(start, length)))
            start += length
        return pieces


class HashPartitioner(Partitioner):
    """Rows of one key go to the consumer that owns the key's key-group.

    Args:
        edge_id: for messages.
        key_columns: names of the key's columns; partial aggregates carry them too.
        parallelism: of the consuming vertex.
        max_parallelism: of the consuming vertex.
    """

    def __init__(
        self, edge_id: str, key_columns: Sequence[str], parallelism: int, max_parallelism: int
    ) -> None:
        self._edge_id = edge_id
        self._key_columns = tuple(key_columns)
        self._parallelism = parallelism
        self._max_parallelism = max_parallelism

    @override
    def partition(self, batch: pa.RecordBatch) -> Pieces:
        """The batch untouched where all rows have one owner, else slices of one ``take``."""
        consumers: npt.NDArray[np.uint16] = owners(
            hash_columns(self._keys(batch)), self._parallelism, self._max_parallelism
        )
        order, bounds = partition_order(consumers, self._parallelism)
        ends: list[int] = bounds.tolist()
        rows = batch.num_rows
        pieces: list[tuple[int, pa.RecordBatch]] = []
        ordered: pa.RecordBatch | None = None
        for index in range(self._parallelism):
            start = ends[index]
            length = ends[index + 1] - start
            if length == rows:
                return ((index, batch),)
            if length:
                if ordered is None:
                    # The order is a permutation of the rows: nothing to check, a third less time.
                    ordered = pc.take(batch, pa.array(order), boundscheck=False)
                pieces.append((index, ordered.slice(start, length)))
        return pieces

    def _keys(self, batch: pa.RecordBatch) -> list[pa.Array]:
        schema = batch.schema
        columns: list[pa.Array] = []
        for name in self._key_columns:
            index = schema.get_field_index(name)
            if index < 0:
                raise InvariantViolation(
                    f"edge {self._edge_id}: a batch with the columns {schema.names} has no key"
                    f" column {name!r}"
                )
            columns.append(batch.column(index))
        return columns


def partitioner_of(edge: internal_pb2.OutputEdge, subtask_index: int) -> Partitioner:
    """The partitioner of an output edge, for one producing subtask.

    Raises:
        InvariantViolation: the deployment contradicts itself.
    """
    kind = edge.edge.partitioning
    count = edge.subpartition_count
    if count < 1:
        raise InvariantViolation(f"edge {edge.edge.id} was deployed with {count} consumers")
    if kind == graph_pb2.PARTITIONING_HASH:
        if count != edge.target_parallelism or not edge.edge.key_columns:
            raise InvariantViolation(
                f"hash edge {edge.edge.id} was deployed with {count} consumers for parallelism"
                f" {edge.target_parallelism} and the key columns {list(edge.edge.key_columns)}"
            )
        if count == 1:
            return ForwardPartitioner()
        return HashPartitioner(
            edge.edge.id, list(edge.edge.key_columns), count, edge.target_max_parallelism
        )
    if kind == graph_pb2.PARTITIONING_FORWARD and count != 1:
        raise InvariantViolation(f"forward edge {edge.edge.id} was deployed with {count} consumers")
    makers: dict[int, Callable[[], Partitioner]] = {
        graph_pb2.PARTITIONING_FORWARD: ForwardPartitioner,
        graph_pb2.PARTITIONING_REBALANCE: lambda: RoundRobinPartitioner(count, subtask_index),
        graph_pb2.PARTITIONING_RESCALE: lambda: RoundRobinPartitioner(count, subtask_index),
        graph_pb2.PARTITIONING_BROADCAST: lambda: BroadcastPartitioner(count),
    }
    make = makers.get(kind)
    if make is None:
        raise InvariantViolation(f"edge {edge.edge.id} has the unknown partitioning {kind}")
    return ForwardPartitioner() if count == 1 else make()
