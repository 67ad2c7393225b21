"""What operators keep per key of the rows they have seen: the contract of aggregates and of ``reduce``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from typing_extensions import override

from penstock.errors import BadRecord
from penstock.graph.window_schemas import is_partial
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME, schema_from_bytes
from penstock.storage.key_encoding import KeyBatch
from taskmanager.kernels import AccumulatorOverflowError
from taskmanager.operators.aggregation import AggregateInputs, Aggregation
from taskmanager.operators.key_columns import KeyColumns
from taskmanager.operators.operator import OperatorContext
from taskmanager.operators.window_contents import Rows
from taskmanager.state.backend import AggregateDescriptor
from taskmanager.state.group_table import TableRows
from taskmanager.state.wide_columns import narrow_batches


@dataclass(frozen=True, slots=True)
class AggregateRows:
    """Keys and inputs of a batch."""

    keys: KeyBatch
    inputs: AggregateInputs

    def select(self, rows: Rows | None) -> AggregateRows:
        """Some of the rows, None = all."""
        if rows is None:
            return self
        if isinstance(rows, slice):
            return AggregateRows(self.keys.slice(rows.start, rows.stop), self.inputs.select(rows))
        return AggregateRows(self.keys.take(rows), self.inputs.select(rows))


class Accumulation(ABC):
    """One accumulator per key, with the keys and the output schema of its operator.

    Attributes:
        descriptor: of the tables that hold the accumulators.
        has_event_time: results carry an event time.
    """

    descriptor: AggregateDescriptor

    def __init__(self, operator: graph_pb2.Operator, keys: Sequence[str]) -> None:
        self.keys = KeyColumns(keys, schema_from_bytes(operator.input_schema))
        self.schema = schema_from_bytes(operator.output_schema)
        self.has_event_time = EVENT_TIME in self.schema.names

    @abstractmethod
    def open(self, context: OperatorContext) -> None:
        """Called once before anything else."""

    def close(self) -> None:
        """Called once at the end, whatever the end."""

    @abstractmethod
    def prepare_snapshot(self) -> None:
        """Puts what is kept outside of the tables into the operator's lists."""

    @abstractmethod
    def inputs(self, batch: pa.RecordBatch) -> AggregateInputs:
        """What the accumulators read of a batch of rows or partial rows."""

    @abstractmethod
    def values(self, rows: TableRows) -> list[pa.Array]:
        """The output columns of some keys, without those of the key and the window."""

    @abstractmethod
    def overflow(self, error: AccumulatorOverflowError, keys: KeyBatch | None) -> BadRecord:
        """The error of a sum that left the range of int64; ``keys`` = those that were added, where they are known."""

    def prepare(self, batch: pa.RecordBatch) -> AggregateRows:
        """Keys and inputs of a batch of rows or partial rows."""
        inputs = self.inputs(batch)
        return AggregateRows(self.keys.encode(batch), inputs)

    def results(
        self, rows: TableRows, window: list[pa.Array], event_times: pa.Array | None
    ) -> Iterator[pa.RecordBatch]:
        """The output of some keys: keys, window columns, values, event times; one batch, or as many as text and
        lists of more than 2 GiB take."""
        arrays = [*self.keys.outputs(rows.keys), *window, *self.values(rows)]
        if event_times is not None:
            arrays.append(event_times)
        return narrow_batches(arrays, self.schema)


class BoundAggregation(Accumulation):
    """The aggregates of an operator."""

    def __init__(
        self,
        operator: graph_pb2.Operator,
        keys: Sequence[str],
        aggregates: Sequence[graph_pb2.Aggregate],
    ) -> None:
        super().__init__(operator, keys)
        self._aggregation = Aggregation(aggregates, operator, self.keys)
        self.descriptor = AggregateDescriptor(
            tuple(self.keys.types),
            tuple(self._aggregation.kinds),
            self._aggregation.new_columns,
            tuple(self._aggregation.layout.slot_uses()),
        )

    @override
    def open(self, context: OperatorContext) -> None:
        self._aggregation.open(context)

    @override
    def prepare_snapshot(self) -> None:
        self._aggregation.prepare_snapshot()

    @override
    def inputs(self, batch: pa.RecordBatch) -> AggregateInputs:
        if is_partial(batch.schema):
            return self._aggregation.partial_inputs(batch)
        return self._aggregation.inputs(batch)

    @override
    def values(self, rows: TableRows) -> list[pa.Array]:
        return self._aggregation.results(rows)

    @override
    def overflow(self, error: AccumulatorOverflowError, keys: KeyBatch | None) -> BadRecord:
        if keys is None:
            return self._aggregation.overflow_in(error.accumulator, "")
        return self._aggregation.overflow(error, keys)
