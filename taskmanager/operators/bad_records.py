"""What happens to a record that an operator cannot process: the user's ``on_error``.

Fail raises at once; skip drops the record and counts it; a side output gets the operator's input row
with the column ``error``. A record is never dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from common.elements import SideOutput
from penstock.errors import BadRecord, TaskFailure
from penstock.expressions import evaluate_each
from penstock.graph.operator_checks import ERROR_COLUMN, side_schema
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_from_bytes
from taskmanager.operators.operator import OperatorContext


class BadRecordPolicy:
    """Applies an operator's error policy.

    Args:
        spec: the operator; its input schema is that of the batches.
    """

    def __init__(self, spec: graph_pb2.Operator) -> None:
        self._action = spec.on_error.action
        self._tag = spec.on_error.tag
        self._operator = spec.name
        self._pending: list[tuple[int, str]] = []
        if self._action == graph_pb2.ERROR_ACTION_SIDE_OUTPUT:
            self._schema = side_schema(spec, schema_from_bytes(spec.input_schema), self._tag)

    def open(self, context: OperatorContext) -> None:
        """Called once before anything else."""
        self._counters = context.counters

    def handle(self, index: int, failure: Callable[[], TaskFailure]) -> None:
        """Takes note of a bad record, or raises its failure.

        Args:
            index: the record's row in the batch that ``side_output`` will be called with.
            failure: says what is wrong with it; not called where nobody would read it.
        """
        if self._action == graph_pb2.ERROR_ACTION_FAIL:
            raised = self._named(failure())
            raised.row_index = index if raised.row else -1  # without a row it is about them all
            raise raised
        self._counters.bad_records += 1
        if self._action == graph_pb2.ERROR_ACTION_SIDE_OUTPUT:
            self._pending.append((index, str(failure())))

    def side_output(self, batch: pa.RecordBatch) -> Iterator[SideOutput]:
        """The bad records since the last call, rows of ``batch``; nothing where there are none."""
        if not self._pending:
            return
        indexes, errors = zip(*self._pending, strict=True)
        self._pending = []
        rows = batch.take(pa.array(indexes, pa.int64()))
        columns = [
            pa.array(errors, field.type) if field.name == ERROR_COLUMN else rows.column(field.name)
            for field in self._schema
        ]
        yield SideOutput(self._tag, pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def apply(
        self, batch: pa.RecordBatch, function: Callable[[pa.RecordBatch], pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch | SideOutput]:
        """The results of a columnar function; rows it cannot be computed for go the policy's way."""
        try:
            yield function(batch)
            return
        except BadRecord as e:
            if self._action == graph_pb2.ERROR_ACTION_FAIL:
                raise self._named(e) from e.__cause__
        results, bad = evaluate_each(batch, function)
        for index, error in bad:
            self.handle(index, lambda error=error: error)  # type: ignore[misc]
        yield from (result for result in results if result.num_rows)
        yield from self.side_output(batch)

    def _named(self, failure: TaskFailure) -> TaskFailure:
        failure.operator = failure.operator or self._operator
        return failure
