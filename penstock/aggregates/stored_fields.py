"""The columns that hold what aggregates keep per key, wherever that is stored: their names, types and what they are for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from penstock.aggregates.accumulator_kind import AccumulatorKind
from penstock.aggregates.aggregate_layout import GroupColumnSpec

USES: Final = b"uses"
"""Metadata of a field: what it is for, a JSON list of texts."""
_SUM_DIGITS: Final = 75
"""Digits of a sum of decimals on its way: one less than the most, so that two of them can be added."""
_SEQUENCE: Final = pa.field("sequence", pa.int64(), nullable=False)


def used_for(field: pa.Field, *uses: str) -> pa.Field:
    """The field, with what it is for."""
    return field.with_metadata({USES: json.dumps(uses)})


def accumulator_fields(
    kinds: Sequence[AccumulatorKind], uses: Sequence[tuple[str, ...]] = ()
) -> list[pa.Field]:
    """One field per accumulator; its kind is in the name, so that another kind does not fit.

    Args:
        uses: per accumulator what it is for (``AggregateLayout.slot_uses``); () = there is one set for ever.
    """
    fields = [
        pa.field(f"number_{index}_{kind.value}", kind.arrow_type)
        for index, kind in enumerate(kinds)
    ]
    return [used_for(field, *uses[index]) for index, field in enumerate(fields)] if uses else fields


def group_field(spec: GroupColumnSpec, kind: pa.DataType) -> pa.Field:
    """The field of what is kept where a number is not enough."""
    name = f"column_{spec.name}_{spec.function}"
    return used_for(pa.field(name, kind), f"value {spec.name}")


def group_type(spec: GroupColumnSpec) -> pa.DataType:
    """Type of what a built-in aggregate, or a reduction of whole rows, keeps there."""
    kind = spec.input_type
    assert kind is not None
    if spec.function in ("first", "last", "reduce"):
        return pa.struct([pa.field("value", kind), _SEQUENCE])
    if spec.function == "collect_list":
        return sequenced_lists(kind)
    if spec.function == "count_distinct":
        return pa.list_(kind)
    return pa.decimal256(_SUM_DIGITS, kind.scale) if spec.function == "sum" else kind


def sequenced_lists(kind: pa.DataType) -> pa.DataType:
    """Lists of values, each with its place in the order of arrival."""
    item = pa.struct([_SEQUENCE, pa.field("value", kind)])
    return pa.list_(pa.field("item", item, nullable=False))
