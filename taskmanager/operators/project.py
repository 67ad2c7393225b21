"""Columnar operators: projection and filter by expressions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.types as pt
from typing_extensions import override

from common.elements import OperatorOutput
from penstock.errors import ExpressionError
from penstock.expressions import Expr, col
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME, schema_from_bytes
from taskmanager.operators.bad_records import BadRecordPolicy
from taskmanager.operators.operator import NOTHING, Handling, Operator, OperatorContext


class ProjectOperator(Operator):
    """Replaces the row by columns computed from it; the event time stays where it is carried."""

    handling = Handling.ONE_TO_ONE

    def __init__(self, spec: graph_pb2.Operator) -> None:
        given = schema_from_bytes(spec.input_schema)
        self._schema = schema_from_bytes(spec.output_schema)
        named = {c.name: Expr.from_proto(c.expression) for c in spec.project.columns}
        named.setdefault(EVENT_TIME, col(EVENT_TIME))
        self._columns = [named[name].compile(given) for name in self._schema.names]
        for field, column in zip(self._schema, self._columns, strict=True):
            if column.type != field.type:
                raise ExpressionError(
                    f"operator {spec.name}: {column.text} has type {column.type}, but its column "
                    f"{field.name!r} was planned as {field.type}; run client and cluster with the same "
                    "version of pyarrow"
                )
        self._policy = BadRecordPolicy(spec)

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._policy.open(context)

    @override
    def process(self, batch: pa.RecordBatch) -> Iterator[OperatorOutput]:
        return self._policy.apply(batch, self._project)

    def _project(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [column(batch) for column in self._columns]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


class FilterOperator(Operator):
    """Keeps the rows for which a predicate is true; null drops the row."""

    handling = Handling.ONE_TO_ONE

    def __init__(self, spec: graph_pb2.Operator) -> None:
        given = schema_from_bytes(spec.input_schema)
        self._schema = schema_from_bytes(spec.output_schema)
        self._predicate = Expr.from_proto(spec.filter.predicate).compile(given)
        if not pt.is_boolean(self._predicate.type) and not pt.is_null(self._predicate.type):
            raise ExpressionError(
                f"operator {spec.name}: the condition {self._predicate.text} has type "
                f"{self._predicate.type}, it must be bool"
            )
        self._is_narrower = given.names != self._schema.names
        self._policy = BadRecordPolicy(spec)

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._policy.open(context)

    @override
    def process(self, batch: pa.RecordBatch) -> Iterable[OperatorOutput]:
        constant = self._predicate.constant
        if constant is not None:
            return (self._selected(batch),) if constant.as_py() else NOTHING
        return self._policy.apply(batch, self._filter)

    def _filter(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        mask = self._predicate(batch)
        return self._selected(batch).filter(mask)

    def _selected(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.select(self._schema.names) if self._is_narrower else batch
