"""``map_batches``: the user's function over whole batches, for pandas, Polars and models.

The function sees no event time. Where event time is needed further down, row i of the output has that
of row i of the input, so the function must return as many rows as it was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
from typing_extensions import override

from common.elements import OperatorOutput
from penstock.errors import TaskFailure
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME, schema_from_bytes, user_batch, user_schema
from taskmanager.operators.bad_records import BadRecordPolicy
from taskmanager.operators.batch_results import result_columns
from taskmanager.operators.operator import NOTHING, Handling, Operator, OperatorContext
from taskmanager.operators.user_function import UserFunctionHandle


class BatchFunctionOperator(Operator):
    """Calls ``fn(RecordBatch) -> RecordBatch`` once per batch."""

    handling = Handling.AT_ONCE

    def __init__(self, spec: graph_pb2.Operator) -> None:
        self._name = spec.name
        self._schema = schema_from_bytes(spec.output_schema)
        self._visible = user_schema(self._schema)
        self._carries_event_time = EVENT_TIME in self._schema.names
        self._handle = UserFunctionHandle(spec.name, spec.batch_function.function)
        self._policy = BadRecordPolicy(spec)

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._policy.open(context)
        self._handle.open(context)

    @override
    def close(self) -> None:
        self._handle.close()

    @override
    def process(self, batch: pa.RecordBatch) -> Iterable[OperatorOutput]:
        return self._process(batch) if batch.num_rows else NOTHING

    def _process(self, batch: pa.RecordBatch) -> Iterator[OperatorOutput]:
        try:
            result = self._handle.function(user_batch(batch))
        except Exception as e:  # noqa: BLE001 - the user's code may raise anything; the policy decides
            failure = self._handle.failure(e)
            for index in range(batch.num_rows):
                self._policy.handle(index, lambda: failure)
            yield from self._policy.side_output(batch)
            return
        columns = result_columns(result, self._visible, self._wrong)
        if self._carries_event_time:
            rows = len(columns[0])
            if rows != batch.num_rows:
                raise self._wrong(
                    f"returned {rows} rows for {batch.num_rows}, and event time is needed further "
                    "down: which row has which is not known. Return as many rows as come in (filter "
                    "afterwards with .filter), or call .with_event_time(...) after map_batches"
                )
            columns.append(batch.column(EVENT_TIME))
        if len(columns[0]):
            yield pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _wrong(self, what: str) -> TaskFailure:
        return TaskFailure(
            f"operator {self._name!r}: {self._handle.name} {what}", operator=self._name
        )
