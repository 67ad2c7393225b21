"""Rows of several slices, aggregated per slice and key until somebody asks for them.

Partial rows come out slice after slice, in each in the order in which the keys first appeared; what was
restored counts as having appeared first. Numbers are added up row by row, so they are the same to the
bit however rows were cut into batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from penstock.aggregates.stored_fields import accumulator_fields, used_for
from penstock.graph.window_schemas import ROWS, SLICE, partial_schema, value_column
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_from_bytes
from penstock.storage.key_encoding import KeyBatch
from taskmanager.kernels import AccumulatorKind, AccumulatorOverflowError, RecordTable
from taskmanager.operators.aggregation import AggregateInputs, Aggregation, accumulator_columns
from taskmanager.operators.key_columns import KeyColumns
from taskmanager.operators.partial_keys import PartialKeys, parts_of
from taskmanager.state.aggregate_change import aggregate_change


class SliceBundle:
    """One table per slice that has rows.

    Args:
        spec: the operator; both its schemas are those of the rows.
        aggregates: those that partial rows can stand for.
    """

    def __init__(
        self,
        spec: graph_pb2.Operator,
        keys: Sequence[str],
        aggregates: Sequence[graph_pb2.Aggregate],
    ) -> None:
        schema = schema_from_bytes(spec.input_schema)
        self._aggregation = Aggregation(aggregates, spec, KeyColumns(keys, schema))
        layout = self._aggregation.layout
        self._schema = partial_schema(layout, schema, keys, is_window=True)
        values = [value_column(spec) for spec in layout.group_columns]
        self._parts = parts_of(keys, layout.counted_columns(), schema)
        self._kept_parts = parts_of(keys, values, self._schema)
        self._keys = PartialKeys(self._parts)
        self.generation = 0
        """Words of keys are valid as long as this is the same."""
        self._kept_schema = _kept_schema(self._schema, self._aggregation)
        # The last one counts the rows that each partial row stands for.
        self._kinds = [*self._aggregation.kinds, AccumulatorKind.COUNT]
        self._slices: dict[int, RecordTable] = {}
        self._spare: list[RecordTable] = []

    @property
    def row_bytes(self) -> int:
        """What a partial row takes, apart from keys that are not of fixed length: all its numbers, and a hash."""
        return 8 * (len(self._kinds) + 2)

    def __contains__(self, start: int) -> bool:
        return start in self._slices

    @property
    def first(self) -> int | None:
        """Start of the first slice, None = there is none."""
        return min(self._slices, default=None)

    @property
    def groups(self) -> int:
        """Partial rows that ``take`` would give."""
        return sum(len(table) for table in self._slices.values())

    def parts_of(self, batch: pa.RecordBatch) -> list[KeyBatch]:
        """What the keys of the rows of a batch are made of."""
        return [part.encode(batch) for part in self._parts]

    def keys_of(self, parts: Sequence[KeyBatch]) -> KeyBatch:
        """The keys of rows, for ``add``, until all has left (``generation``)."""
        return self._keys.words(parts)

    def inputs_of(self, batch: pa.RecordBatch) -> AggregateInputs:
        """What is aggregated of the rows of a batch."""
        inputs = self._aggregation.numbers(batch)
        inputs.values.append(None)
        inputs.valid.append(None)
        return inputs

    def add(self, start: int, keys: KeyBatch, inputs: AggregateInputs) -> None:
        """Adds rows of one slice.

        Raises:
            BadRecord: a sum leaves the range of int64.
        """
        self._accumulate(start, keys, inputs, merge=False)

    def take(self, before: int | None = None) -> list[pa.RecordBatch]:
        """The partial rows of the slices that start before a time, of all where it is None; they are out."""
        starts = sorted(start for start in self._slices if before is None or start < before)
        batches = [self._partial_batch(start) for start in starts]
        for start in starts:
            table = self._slices.pop(start)
            table.clear()
            self._spare.append(table)
        if before is None:
            self._keys.clear()
            self.generation += 1
        return batches

    def to_bytes(self) -> bytes:
        """What ``take`` would give, all of which stays."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._kept_schema) as writer:
            for start in sorted(self._slices):
                columns = self._partial_batch(start).columns
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._kept_schema))
        return sink.getvalue().to_pybytes()

    def restore(self, data: bytes) -> None:
        """Adds what another bundle held.

        Raises:
            BadRecord: a sum leaves the range of int64.
            TaskFailure: it held other things.
        """
        with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
            change = aggregate_change(reader.schema, self._kept_schema)
            for kept in reader:
                columns = kept.columns
                if change is not None:
                    columns = change.columns(columns, kept.num_rows)
                batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
                inputs = self._aggregation.partial_inputs(batch)
                inputs.values.append(batch.column(ROWS).to_numpy())
                inputs.valid.append(None)
                start = batch.column(SLICE)[0].as_py()
                keys = self._keys.words([part.encode(batch) for part in self._kept_parts])
                self._accumulate(start, keys, inputs, merge=True)

    def _accumulate(
        self, start: int, keys: KeyBatch, inputs: AggregateInputs, *, merge: bool
    ) -> None:
        table = self._slices.get(start)
        if table is None:
            table = self._spare.pop() if self._spare else self._new_table()
            self._slices[start] = table
        try:
            table.accumulate(keys, inputs.values, inputs.valid, merge=merge)
        except AccumulatorOverflowError as error:
            raise self._aggregation.overflow(error, self._keys.parts(keys)[0]) from error

    def _new_table(self) -> RecordTable:
        # The index remembers the order in which keys appeared; that of the slots depends on the table's past.
        return RecordTable(self._keys.types, self._kinds, with_index=True)

    def _partial_batch(self, start: int) -> pa.RecordBatch:
        rows = self._slices[start].rows()
        arrays = [
            *self._keys.arrays(rows.keys),
            pa.repeat(pa.scalar(start, pa.int64()), len(rows.keys)),
            pa.array(rows.accumulators[-1]),
            *accumulator_columns(rows.accumulators[:-1], rows.validity[:-1]),
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _kept_schema(partial: pa.Schema, aggregation: Aggregation) -> pa.Schema:
    """Schema of partial rows in a snapshot, whose values and numbers say what they are for."""
    layout = aggregation.layout
    numbers = accumulator_fields(aggregation.kinds, layout.slot_uses())
    fields = list(partial)[: len(partial) - len(numbers)]
    for spec in layout.group_columns:
        place = partial.get_field_index(value_column(spec))
        fields[place] = used_for(fields[place], f"value {spec.name}")
    return pa.schema([*fields, *numbers])
