"""Running aggregates: the new values of every key that a batch touched, once per batch.

In the final phase rows and partial rows both come in. A result has the event time of its key's last row
in the batch; results come in the order of these rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from typing_extensions import override

from common.elements import OperatorOutput
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME
from taskmanager.kernels import AccumulatorOverflowError, distinct
from taskmanager.operators.accumulation import BoundAggregation
from taskmanager.operators.operator import Operator, OperatorContext
from taskmanager.operators.pre_aggregate import RunningPreAggregateOperator, last_rows
from taskmanager.state.group_table import GroupTable

_STATE = "running"
_WHOLE = 0


class RunningAggregateOperator(Operator):
    """Keeps one record per key and emits it after every change."""

    def __init__(
        self,
        spec: graph_pb2.Operator,
        keys: Sequence[str],
        aggregates: Sequence[graph_pb2.Aggregate],
    ) -> None:
        self._bound = BoundAggregation(spec, keys, aggregates)

    @override
    def restore(self, context: OperatorContext) -> None:
        for namespace in context.state.namespaces(_STATE):
            context.state.group_table(_STATE, namespace, self._bound.descriptor)

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._bound.open(context)

    @override
    def prepare_snapshot(self, checkpoint_id: int) -> None:
        self._bound.prepare_snapshot()

    @override
    def process(self, batch: pa.RecordBatch) -> tuple[OperatorOutput, ...]:
        bound = self._bound
        prepared = bound.prepare(batch)
        table: GroupTable = self.context.state.group_table(_STATE, _WHOLE, bound.descriptor)
        try:
            table.update(prepared.keys, prepared.inputs)
        except AccumulatorOverflowError as error:
            raise bound.overflow(error, prepared.keys) from error
        first, group_of = distinct(prepared.keys)
        rows = np.sort(last_rows(group_of, len(first)))
        event_times = None
        if bound.has_event_time:
            event_times = batch.column(EVENT_TIME).take(pa.array(rows))
        return tuple(bound.results(table.rows(prepared.keys.take(rows)), [], event_times))


def running_aggregate_operator(spec: graph_pb2.Operator) -> Operator:
    """The operator of a ``RunningAggregateSpec``."""
    aggregate = spec.running_aggregate
    keys, aggregates = list(aggregate.keys), list(aggregate.aggregates)
    if aggregate.phase == graph_pb2.AGGREGATION_PHASE_PARTIAL:
        return RunningPreAggregateOperator(spec, keys, aggregates)
    return RunningAggregateOperator(spec, keys, aggregates)
