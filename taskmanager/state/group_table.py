"""Aggregates per key: numbers in a record table, everything else in group columns beside it.

Group columns are addressed by the dense index that the record table gives every key. Without group
columns no index is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.storage.key_encoding import KeyBatch
from taskmanager.kernels import AccumulatorKind, RecordTable, Rows
from taskmanager.state.group_columns import GroupColumn

Int64Array = npt.NDArray[np.int64]
Values = npt.NDArray[Any]
BoolArray = npt.NDArray[np.bool_]

_BYTES_PER_KEY_MAX = 512
"""A table with more than that is too large for what it held."""


class TableInputs(Protocol):
    """What a table takes of n rows (``AggregateInputs``)."""

    values: list[Values | None]
    valid: list[npt.NDArray[np.bool_] | None]
    columns: list[Any]
    sequence: Int64Array
    is_partial: bool


@dataclass(slots=True)
class TableRows:
    """Some keys of a table with their state.

    Attributes:
        keys: per key column n values.
        accumulators: per accumulator n numbers.
        validity: per accumulator bool[n], False where it has no value; None where all have.
        columns: per group column n results.
    """

    keys: list[pa.Array]
    accumulators: list[Values]
    validity: list[BoolArray | None]
    columns: list[pa.Array]


class GroupTable:
    """State of the aggregates of one namespace (a slice of a window, or everything).

    Args:
        key_types: types of the key columns.
        kinds: what the numbers are.
        columns: empty group columns.
        home: name of the state it was made for.

    Attributes:
        emitted_rows: rows that ``chunks`` has handed out: they are no longer part of the state.
    """

    def __init__(
        self,
        key_types: Sequence[pa.DataType],
        kinds: Sequence[AccumulatorKind],
        columns: list[GroupColumn],
        home: str = "",
    ) -> None:
        self.home = home
        self._records = RecordTable(key_types, kinds, with_index=bool(columns))
        self._columns = columns
        self.emitted_rows = 0

    def __len__(self) -> int:
        return len(self._records)

    def memory_bytes(self) -> int:
        """Approximate size."""
        columns = sum(column.memory_bytes for column in self._columns)
        return self._records.memory_bytes() + columns

    def update(self, keys: KeyBatch, inputs: TableInputs) -> None:
        """Adds n rows, or n partial rows.

        Raises:
            AccumulatorOverflowError: a sum left the range of int64.
        """
        self._records.accumulate(keys, inputs.values, inputs.valid, merge=inputs.is_partial)
        if self._columns:
            groups = self._records.lookup_or_insert(keys)
            for column, values in zip(self._columns, inputs.columns, strict=True):
                column.update(groups, inputs.sequence, values)

    def merge(self, other: GroupTable, only: KeyBatch | None = None) -> None:
        """Adds the state of another table.

        Args:
            other: stays as it is.
            only: restricts the merge to these (different) keys.

        Raises:
            AccumulatorOverflowError: a sum left the range of int64.
        """
        if only is None:
            rows = other._records.rows()
        else:
            only = other.keys(only)
            gathered = other._records.gather(only)
            rows = Rows(only, gathered.accumulators, gathered.validity)
        if not len(rows.keys):
            return
        self._records.merge_rows(rows)
        if self._columns:
            source = other._records.lookup(rows.keys)
            target = self._records.lookup_or_insert(rows.keys)
            for mine, theirs in zip(self._columns, other._columns, strict=True):
                mine.merge(theirs, source, target)

    def keys(self, only: KeyBatch | None = None) -> KeyBatch:
        """The keys of the table, or those of ``only`` that are in it."""
        if only is None:
            return self._records.key_batch()
        return only.take(np.flatnonzero(self._records.contains(only)))

    def rows(self, keys: KeyBatch) -> TableRows:
        """The state of keys that are in the table."""
        columns: list[pa.Array] = []
        if self._columns:
            groups = self._records.lookup(keys)
            columns = [column.results(groups) for column in self._columns]
        gathered = self._records.gather(keys)
        return TableRows(keys.to_arrays(), gathered.accumulators, gathered.validity, columns)

    def chunks(self, size: int) -> Iterator[TableRows]:
        """All keys with their state, at most ``size`` at once, and counts them as emitted.

        The table must not change while it is read.
        """
        rows = self._records.rows()
        keys = rows.keys.to_arrays()
        for start in range(0, len(self), size):
            stop = min(start + size, len(self))
            groups = np.arange(start, stop)
            self.emitted_rows = stop
            yield TableRows(
                [array.slice(start, stop - start) for array in keys],
                [values[start:stop] for values in rows.accumulators],
                [None if valid is None else valid[start:stop] for valid in rows.validity],
                [column.results(groups) for column in self._columns],
            )

    def clear(self) -> None:
        """Empties a table without group columns, keeping its memory."""
        assert not self._columns, "group columns are not emptied"
        self._records.clear()
        self.emitted_rows = 0

    def is_reusable(self) -> bool:
        """True where a table of the same kind would do well to start with this one's memory."""
        return not self._columns and len(self) * _BYTES_PER_KEY_MAX >= self.memory_bytes()
