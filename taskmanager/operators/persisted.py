"""Both ends of what outlives a job under a name: the sink that leaves it, and the source that reads it.

The rows themselves go through a blocking partition behind the one, and through blocking channels in front of
the other. Event time is not kept: whoever reads says what his event time is, as of any source.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pyarrow as pa
from typing_extensions import override

from common.elements import OperatorOutput, StreamStatus, Watermark
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_from_bytes, user_batch
from taskmanager.operators.operator import NOTHING, Operator, OperatorContext
from taskmanager.operators.row_sorter import RowSorter

_SORT_MEMORY_BYTES: Final = 64 << 20


class PersistOperator(Operator):
    """Passes on the user's columns, and nothing that depends on when they came; in order, where that is asked for."""

    def __init__(self, spec: graph_pb2.Operator) -> None:
        self._sort_by = tuple(spec.sink.persist.sort_by)
        self._sorter: RowSorter | None = None

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        if self._sort_by:
            assert context.work_directory is not None, "tasks have one"
            self._sorter = RowSorter(self._sort_by, context.work_directory, _SORT_MEMORY_BYTES)

    @override
    def process(self, batch: pa.RecordBatch) -> Iterable[OperatorOutput]:
        if self._sorter is None:
            return (user_batch(batch),)
        self._sorter.add(user_batch(batch))
        return NOTHING

    @override
    def on_end_of_data(self) -> Iterable[OperatorOutput]:
        return NOTHING if self._sorter is None else self._sorter.ordered()

    @override
    def on_watermark(self, watermark: Watermark) -> Iterable[OperatorOutput]:
        return NOTHING

    @override
    def on_stream_status(self, status: StreamStatus) -> Iterable[OperatorOutput]:
        return NOTHING

    @override
    def close(self) -> None:
        if self._sorter is not None:
            self.context.submit(self._sorter.close)


class PersistedSourceOperator(Operator):
    """Passes on the columns that the job needs."""

    def __init__(self, spec: graph_pb2.Operator) -> None:
        self._names = schema_from_bytes(spec.output_schema).names

    @override
    def process(self, batch: pa.RecordBatch) -> Iterable[OperatorOutput]:
        if batch.schema.names == self._names:
            return (batch,)
        return (batch.select(self._names),)


def reads_partitions(operator: graph_pb2.Operator) -> bool:
    """Whether it is a source without splits: its rows come in by channels."""
    return operator.source.WhichOneof("kind") == "persisted"
