"""``KeyedBatchFunction``: the user's function over whole batches of a keyed stream, with state.

What it emits has the event times of the input rows that it names for it (``out.emit(batch, rows)``), or
row by row those of the input where there are as many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from typing_extensions import override

from common.elements import OperatorOutput, SideOutput
from penstock.errors import StoreCorrupt, StoreNotFound, StoreTransient, TaskFailure
from penstock.pb import graph_pb2
from penstock.processing.process_functions import BatchCollector
from penstock.rows.schema import EVENT_TIME, schema_from_bytes, user_batch, user_schema
from taskmanager.operators.bad_records import BadRecordPolicy
from taskmanager.operators.batch_results import result_columns
from taskmanager.operators.operator import NOTHING, Handling, OperatorContext
from taskmanager.operators.process_base import StatefulOperator
from taskmanager.operators.process_state import BatchKeys
from taskmanager.operators.returned_rows import emit_returned

_FATAL = (StoreCorrupt, StoreNotFound, StoreTransient)


class BatchProcessOperator(StatefulOperator):
    """Calls ``process_batch`` once per batch."""

    handling = Handling.AT_ONCE

    def __init__(self, spec: graph_pb2.Operator) -> None:
        super().__init__(spec)
        self._policy = BadRecordPolicy(spec)
        self._schema = schema_from_bytes(spec.output_schema)
        self._visible = user_schema(self._schema)
        self._side_schema = user_schema(schema_from_bytes(spec.input_schema))
        self._time_position = self._schema.get_field_index(EVENT_TIME)

    @override
    def open(self, context: OperatorContext) -> None:
        self._policy.open(context)
        super().open(context)

    @override
    def process(self, batch: pa.RecordBatch) -> Iterable[OperatorOutput]:
        return self._process(batch) if batch.num_rows else NOTHING

    def _process(self, batch: pa.RecordBatch) -> Iterator[OperatorOutput]:
        assert self._keys is not None
        ctx, out = self._ctx, BatchCollector()
        columns = self._keys.arrays(batch)
        slots = self._states.enter(self._keys.encode(batch))
        keys = columns[0]
        if len(columns) > 1:
            keys = pa.StructArray.from_arrays(columns, names=list(self._keys.names))
        ctx.begin(None, None)
        ctx.absence = "in process_batch(): use get_many() and put_many()"
        ctx.slots_of = BatchKeys(keys, slots).slots_of
        try:
            returned = self._handle.function.process_batch(keys, user_batch(batch), out)
            if returned is not None:
                emit_returned(returned, out.emit, "batch")
        except Exception as error:
            failure = self._handle.failure(error, method="process_batch")
            if isinstance(error, _FATAL):
                raise failure from error
            out = BatchCollector()
            for index in range(batch.num_rows):
                self._policy.handle(index, lambda: failure)
        finally:
            ctx.slots_of = None
            ctx.end()
        self._states.check()
        self._states.leave()
        yield from self._emitted(batch, out)
        yield from self._policy.side_output(batch)

    def _emitted(self, batch: pa.RecordBatch, out: BatchCollector) -> Iterator[OperatorOutput]:
        for emitted, rows in out.batches:
            if not emitted.num_rows:
                continue
            columns = result_columns(emitted, self._visible, self._wrong)
            if self._time_position >= 0:
                columns.insert(self._time_position, self._times(batch, emitted.num_rows, rows))
            yield pa.RecordBatch.from_arrays(columns, schema=self._schema)
        for tag, side in out.sides:
            columns = result_columns(side, self._side_schema, self._wrong)
            yield SideOutput(tag, pa.RecordBatch.from_arrays(columns, schema=self._side_schema))

    def _times(self, batch: pa.RecordBatch, count: int, rows: Any) -> pa.Array:
        """Event times of ``count`` emitted rows."""
        times = batch.column(EVENT_TIME)
        if rows is None and count == len(times):
            return times
        if rows is None:
            raise self._wrong(
                f"emitted {count} rows for {len(times)}, and event time is needed further down: say which "
                "row of the input each was made from, out.emit(batch, rows)"
            )
        try:
            taken = times.take(_indexes(rows))
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise self._wrong(f"emitted a batch with rows={rows!r}: {error}") from error
        if taken.null_count:
            raise self._wrong("emitted a batch with rows= that has a null in it")
        if len(taken) != count:
            raise self._wrong(
                f"emitted {count} rows and named {len(taken)} rows of the input for them"
            )
        return taken

    def _wrong(self, what: str) -> TaskFailure:
        return TaskFailure(
            f"operator {self._name!r}: {self._handle.name}.process_batch {what}",
            operator=self._name,
        )


def _indexes(rows: Any) -> pa.Array:
    """Numbers of rows. Of a mask or of fractions Arrow would make some, and rows would get times of others.

    >>> _indexes(range(2)).to_pylist(), _indexes([]).type
    ([0, 1], DataType(int64))
    """
    indexes = rows if isinstance(rows, pa.Array) else pa.array(rows)
    if not len(indexes):
        return indexes.cast(pa.int64())
    if not pa.types.is_integer(indexes.type):
        raise TypeError(f"they are {indexes.type}, and must be integers: rows of the input, from 0")
    return indexes
