"""Rows of aggregates that were stored for other aggregates than those that are declared now (pure).

A column of the rows is known by the aggregates that it is for, not by its place: it may have another one, columns of
aggregates that are gone are left out, and those of aggregates that have come since begin empty.

Example: a sum is found again behind another one that is new.
    >>> from penstock.aggregates.stored_fields import accumulator_fields
    >>> kind = AccumulatorKind.SUM_INT64
    >>> stored = pa.schema(accumulator_fields([kind], [("a",)]))
    >>> declared = pa.schema(accumulator_fields([kind, kind], [("b",), ("a",)]))
    >>> change = aggregate_change(stored, declared)
    >>> change.columns([pa.array([7])], 1)[1].to_pylist()
    [7]
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.aggregates.aggregate_layout import BEGUN
from penstock.aggregates.stored_fields import USES
from penstock.errors import TaskFailure
from taskmanager.kernels import AccumulatorKind

_NUMBER: Final = "number_"


@dataclass(frozen=True, slots=True)
class AggregateChange:
    """What makes stored rows those of the aggregates that are declared.

    Attributes:
        places: per declared column its place among the stored ones; None = it is new.
        schema: of the declared rows.
    """

    places: tuple[int | None, ...]
    schema: pa.Schema

    def changes(self, stored: pa.Schema) -> bool:
        """Whether anything is another than it was."""
        return self.places != tuple(range(len(stored)))

    def batches(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Stored rows as they are declared."""
        for batch in batches:
            columns = self.columns(batch.columns, batch.num_rows)
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def columns(self, stored: list[pa.Array], count: int) -> list[pa.Array]:
        """The declared columns of ``count`` rows."""
        return [
            _empty(field, count) if place is None else stored[place]
            for field, place in zip(self.schema, self.places, strict=True)
        ]


def aggregate_change(stored: pa.Schema, declared: pa.Schema) -> AggregateChange | None:
    """What makes stored rows those that are declared; None = the declared ones are not of aggregates.

    Args:
        stored: schema of the rows as they were written.
        declared: schema of the rows of the aggregates as they are declared.

    Raises:
        TaskFailure: nothing does.
    """
    if not any(_uses(field) for field in declared):
        return None
    for field in stored:
        if not (_uses(field) or any(_is_same(other, field) for other in declared)):
            raise TaskFailure(f"{field.name} ({field.type}) was stored, and is not declared")
    return AggregateChange(tuple(_place(field, stored) for field in declared), declared)


def _place(field: pa.Field, stored: pa.Schema) -> int | None:
    found = [place for place, other in enumerate(stored) if _is_same(field, other)]
    if len(found) > 1:
        names = ", ".join(sorted(_uses(field)))
        raise TaskFailure(
            f"one number ({names}) was stored as {len(found)}, which may differ: columns that could be null then cannot "
            "now"
        )
    is_new = not any(_uses(field) & _uses(other) for other in stored)
    if not found and not (is_new and _uses(field)):
        raise TaskFailure(f"{field.name} ({field.type}) is declared, and was not stored")
    return found[0] if found else None


def number_kinds(fields: Iterable[pa.Field]) -> tuple[AccumulatorKind, ...] | None:
    """What the columns count, where all of them are numbers of aggregates; else None."""
    columns = list(fields)
    if not columns or not all(field.name.startswith(_NUMBER) for field in columns):
        return None
    return tuple(AccumulatorKind(_kind(field)) for field in columns)


def _is_same(declared: pa.Field, stored: pa.Field) -> bool:
    uses = _uses(declared)
    if not uses:
        return bool(declared.equals(stored, check_metadata=True))
    return (
        _kind(declared) == _kind(stored)
        and declared.type == stored.type
        and not uses.isdisjoint(_uses(stored))
    )


def _kind(field: pa.Field) -> str:
    """The name without the place of a number."""
    name: str = field.name
    return name.split("_", 2)[2] if name.startswith(_NUMBER) else name


def _uses(field: pa.Field) -> frozenset[str]:
    return _decoded((field.metadata or {}).get(USES, b"[]"))


@lru_cache(maxsize=1024)
def _decoded(uses: bytes) -> frozenset[str]:
    """Each column is compared with each, in each group of keys that is restored."""
    return frozenset(json.loads(uses))


def _empty(field: pa.Field, count: int) -> pa.Array:
    """What restored groups have of an aggregate that has seen nothing of them."""
    if any(use.startswith(BEGUN) for use in _uses(field)):
        return pa.array(np.ones(count, np.int64))
    if field.name.startswith(_NUMBER) and _kind(field) == AccumulatorKind.COUNT.value:
        return pa.array(np.zeros(count, np.int64))
    return pa.nulls(count, field.type)
