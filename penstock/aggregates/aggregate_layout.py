"""How a set of aggregates is kept: which numbers per group, and what else.

Numbers live in *slots* (a count, a sum, an extreme), which the kernels update a batch at a time and
which partial batches carry between the two phases of an aggregation; equal slots are shared, so a mean
and a sum of one column count its values once. What is no number (first, last, lists, strings, the
user's own) lives in *group columns*. Both phases derive the same layout from the same input schema.

An aggregate that was added when a job was started from state shares nothing with those that have seen more. Beside it,
one number tells the groups that had begun by then: it is 1 in all that were restored, and rows add nothing to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as pt

from penstock.aggregates.accumulator_kind import AccumulatorKind
from penstock.aggregates.aggregates import Aggregate, input_type, output_field, plain_type

BEGUN: Final = "begun "
"""Begins what is said of the slot that tells which groups had begun."""


@dataclass(frozen=True, slots=True)
class AccumulatorSlot:
    """One number per group.

    Attributes:
        column: the input column; None = every row counts (``COUNT`` only).
        since: of the aggregates that share it.
        tells_begun: no row counts (``COUNT`` only): it is not 0 in groups that had begun before.
    """

    kind: AccumulatorKind
    column: str | None
    since: int = 0
    tells_begun: bool = False


@dataclass(frozen=True, slots=True)
class SlotResult:
    """A result that is computed of slots.

    Attributes:
        slot: the number itself.
        divisor: a mean's slot that counts the values in ``slot``, else -1.
        output_type: type of the result column.
    """

    name: str
    slot: int
    divisor: int
    output_type: pa.DataType


@dataclass(frozen=True, slots=True)
class GroupColumnSpec:
    """What is kept per group where a number is not enough.

    Attributes:
        column: the input column, None = the row.
        input_type: type of the column's values, None for rows.
        output_type: type of the result column.
        custom: the user's object ("custom" only).
    """

    name: str
    function: str
    column: str | None
    input_type: pa.DataType | None
    output_type: pa.DataType
    custom: Any = None


@dataclass(frozen=True, slots=True)
class AggregateLayout:
    """Slots and group columns, and how the results come of them, in the order of the aggregates.

    Attributes:
        results: a ``SlotResult``, or the index of a group column.
        begun: per result the slot that tells the groups that had begun before it was added; -1 = it has seen all.
    """

    slots: tuple[AccumulatorSlot, ...]
    group_columns: tuple[GroupColumnSpec, ...]
    results: tuple[SlotResult | int, ...]
    begun: tuple[int, ...]

    def counted_columns(self) -> list[str]:
        """The columns whose different values are counted, where all that is no number does that."""
        return [spec.column for spec in self.group_columns if spec.column is not None]

    def slot_uses(self) -> list[tuple[str, ...]]:
        """Per slot what it is for: by that it is found again, whatever slots there are beside it."""
        uses: list[list[str]] = [
            [f"{BEGUN}{slot.since}"] if slot.tells_begun else [] for slot in self.slots
        ]
        for result in self.results:
            if isinstance(result, SlotResult):
                uses[result.slot].append(f"value {result.name}")
                if result.divisor >= 0:
                    uses[result.divisor].append(f"count {result.name}")
        return [tuple(names) for names in uses]


def aggregate_layout(
    aggregates: Mapping[str, Aggregate], input_schema: pa.Schema
) -> AggregateLayout:
    """The layout of aggregates over rows of a schema.

    Raises:
        ExpressionError: an aggregate does not fit the schema.
    """
    slots: dict[AccumulatorSlot, int] = {}
    group_columns: list[GroupColumnSpec] = []
    results: list[SlotResult | int] = []
    begun: list[int] = []
    for name, aggregate in aggregates.items():
        kind = input_type(aggregate, name, input_schema)
        output_type = output_field(aggregate, name, input_schema).type
        column = aggregate.input_column
        if aggregate.decomposable(kind):
            nullable = column is not None and input_schema.field(column).nullable
            results.append(_slot_result(name, aggregate, kind, nullable, output_type, slots))
        else:
            results.append(len(group_columns))
            group_columns.append(
                GroupColumnSpec(
                    name,
                    aggregate.function,
                    column,
                    None if kind is None else plain_type(kind),
                    output_type,
                    aggregate.custom,
                )
            )
        if aggregate.since:
            told = AccumulatorSlot(AccumulatorKind.COUNT, None, aggregate.since, tells_begun=True)
            begun.append(slots.setdefault(told, len(slots)))
        else:
            begun.append(-1)
    return AggregateLayout(tuple(slots), tuple(group_columns), tuple(results), tuple(begun))


def _slot_result(
    name: str,
    aggregate: Aggregate,
    kind: pa.DataType | None,
    nullable: bool,
    output_type: pa.DataType,
    slots: dict[AccumulatorSlot, int],
) -> SlotResult:
    def index_of(slot: AccumulatorSlot) -> int:
        return slots.setdefault(slot, len(slots))

    column, since = aggregate.input_column, aggregate.since
    counted = AccumulatorSlot(AccumulatorKind.COUNT, column if nullable else None, since)
    if aggregate.function == "count" or kind is None:
        return SlotResult(name, index_of(counted), -1, output_type)
    slot = index_of(
        AccumulatorSlot(_slot_kind(aggregate.function, plain_type(kind)), column, since)
    )
    divisor = index_of(counted) if aggregate.function == "mean" else -1
    return SlotResult(name, slot, divisor, output_type)


def _slot_kind(function: str, kind: pa.DataType) -> AccumulatorKind:
    if function == "mean":
        return AccumulatorKind.SUM_FLOAT64
    if pt.is_floating(kind):
        return AccumulatorKind(f"{function}_float64")
    if pt.is_uint64(kind) and function != "sum":
        return AccumulatorKind(f"{function}_uint64")
    return AccumulatorKind(f"{function}_int64")
