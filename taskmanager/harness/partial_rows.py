"""Partial rows that wait in front of an exchange, cut to those that a subtask under test stands for.

In a cluster all of them go on to whoever owns their keys. A harness keeps what its own subtask owns: of the rows
that were restored as of those that are pushed, and of those that an earlier harness held only those that it had owned
itself, since the harnesses beside it held the others as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from penstock.pb import graph_pb2
from taskmanager.network.partitioner import HashPartitioner

PARTIAL_ROWS = "partial_rows/1"
"""The codec of their lists: each item is a stream of batches."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A subtask behind the exchange."""

    subtask_index: int
    parallelism: int


def owned(
    item: bytes, edge: graph_pb2.Edge, max_parallelism: int, owners: Iterable[Owner]
) -> bytes:
    """The partial rows whose keys all the owners own.

    Args:
        edge: by which the rows leave.
        max_parallelism: of the operator behind it.
    """
    sink = pa.BufferOutputStream()
    with (
        pa.ipc.open_stream(pa.py_buffer(item)) as reader,
        pa.ipc.new_stream(sink, reader.schema) as writer,
    ):
        for batch in reader:
            left = _owned(batch, edge, max_parallelism, owners)
            if left.num_rows:
                writer.write_batch(left)
    return sink.getvalue().to_pybytes()


def _owned(
    batch: pa.RecordBatch, edge: graph_pb2.Edge, max_parallelism: int, owners: Iterable[Owner]
) -> pa.RecordBatch:
    for owner in owners:
        if owner.parallelism == 1 or not batch.num_rows:
            continue
        partitioner = HashPartitioner(
            edge.id, list(edge.key_columns), owner.parallelism, max_parallelism
        )
        pieces = dict(partitioner.partition(batch))
        batch = pieces.get(owner.subtask_index, batch.slice(0, 0))
    return batch
