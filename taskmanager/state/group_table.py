"""Aggregates per key: numbers in a record table, everything else in group columns beside it.

Group columns are addressed by the dense index that the record table gives every key. Without group
columns no index is kept.

Snapshots: numbers alone are exported in the background, record by record as the table goes on changing;
with group columns the changed keys are copied when the table is sealed, the values of the columns are
not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.aggregates.stored_fields import accumulator_fields
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import BoolArray, Int64Array
from penstock.storage.run_columns import key_fields, keyed_schema
from penstock.storage.run_merge import latest
from taskmanager.kernels import AccumulatorKind, RecordTable, Rows, encode_keys
from taskmanager.kernels.record_versions import RecordExport
from taskmanager.state.accumulator_columns import from_columns, to_column
from taskmanager.state.group_column import GroupColumn
from taskmanager.state.keyed_rows import checked_rows, sealed_batches
from taskmanager.state.run_format import plain_keys, split_tombstones
from taskmanager.state.sealed_records import record_batches
from taskmanager.state.snapshot_table import SealedTable

Values = npt.NDArray[Any]

_BYTES_PER_KEY_MAX = 512
"""A table with more than that is too large for what it held."""


class TableInputs(Protocol):
    """What a table takes of n rows (``AggregateInputs``)."""

    values: list[Values | None]
    valid: list[BoolArray | None]
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
        kinds: what the numbers are.
        columns: empty group columns.
        uses: per number what it is for.
        with_versions: the table can be sealed.
    """

    def __init__(
        self,
        key_types: Sequence[pa.DataType],
        kinds: Sequence[AccumulatorKind],
        columns: list[GroupColumn],
        *,
        uses: Sequence[tuple[str, ...]] = (),
        with_versions: bool = False,
    ) -> None:
        self._key_count = len(key_types)
        self._kinds = tuple(kinds)
        self._records = RecordTable(
            key_types, kinds, with_index=bool(columns), with_versions=with_versions
        )
        content = [*accumulator_fields(kinds, uses), *(column.state_field() for column in columns)]
        self._schema = keyed_schema(key_fields(key_types), content)
        self._columns = columns

    kind = "group"

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
        if self._kinds or not self._columns:
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
        for part in other.tables() if only is None else (other,):
            self._merge(part, only)

    def use_common_order(self) -> None:
        """This empty table takes in other whole tables only: that is faster between tables that say so."""
        self._records.use_common_order()

    def tables(self) -> Iterator[GroupTable]:
        """Tables that together have all keys, each key once."""
        yield self

    def _merge(self, other: GroupTable, only: KeyBatch | None) -> None:
        """Adds what another table has in memory."""
        if only is None:
            self._records.make_room_in_order(other._records)
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
            if not self._kinds:
                return TableRows(keys.to_arrays(), [], [], columns)
        gathered = self._records.gather(keys)
        return TableRows(keys.to_arrays(), gathered.accumulators, gathered.validity, columns)

    def chunks(self, size: int) -> Iterator[TableRows]:
        """All keys with their state, at most ``size`` at once; the table must not change meanwhile."""
        rows, columns = self._records.rows(), self._columns
        keys, count = rows.keys.to_arrays(), len(rows.keys)
        for start in range(0, count, size):
            stop = min(start + size, count)
            groups = np.arange(start, stop)
            yield TableRows(
                [array.slice(start, stop - start) for array in keys],
                [values[start:stop] for values in rows.accumulators],
                [None if valid is None else valid[start:stop] for valid in rows.validity],
                [column.results(groups) for column in columns],
            )

    def clear(self) -> None:
        """Empties a table without group columns, keeping its memory."""
        assert not self._columns, "group columns are not emptied"
        self._records.clear()

    def is_reusable(self) -> bool:
        """True where a table of the same kind would do well to start with this one's memory."""
        return not self._columns and len(self) * _BYTES_PER_KEY_MAX >= self.memory_bytes()

    def schema(self) -> pa.Schema:
        """Schema of the exported rows."""
        return self._schema

    def is_changed(self, since_version: int) -> bool:
        """Keys have changed after that version."""
        return self._records.versions.is_changed(since_version)

    def seal(self, since_version: int, max_parallelism: int) -> SealedTable:
        """Freezes the keys that changed after ``since_version``."""
        export = self._records.seal(since_version)
        if self._columns:
            read = self._sealed_with_columns(export, max_parallelism)
            return SealedTable(export.since_version, export.version, read)
        read = partial(
            record_batches,
            self._records,
            export,
            self._schema,
            self._key_count,
            max_parallelism,
            self._numbers,
        )
        return SealedTable(export.since_version, export.version, read, export.release)

    def forget(self, version: int) -> None:
        """Tombstones up to the version may go."""
        self._records.versions.forget(version)

    def load(self, batches: Iterable[pa.RecordBatch], rows_max: int) -> None:
        """Adds restored keys."""
        self._records.reserve(len(self._records) + rows_max)
        if self._columns:
            # Values of group columns are only added to: each key is restored once.
            checked = [checked_rows(batch, self._schema) for batch in batches]
            batches = latest(checked, self._schema.names[2 : 2 + self._key_count])
        for batch in batches:
            removed, rows = split_tombstones(batch, self._key_count)
            if removed is not None:
                self._records.discard(removed)
            if rows is not None:
                self._restore(rows.columns[2:])

    def _restore(self, columns: list[pa.Array]) -> None:
        keys = encode_keys(columns[: self._key_count])
        numbers_stop = self._key_count + len(self._kinds)
        values, valid = from_columns(self._kinds, columns[self._key_count : numbers_stop])
        self._records.put(Rows(keys, [v for v in values if v is not None], valid))
        if self._columns:
            groups = self._records.lookup(keys)
            for column, states in zip(self._columns, columns[numbers_stop:], strict=True):
                column.restore(groups, states)

    def _numbers(self, rows: Rows) -> list[pa.Array]:
        return [
            pa.array(values, mask=None if valid is None else ~valid)
            for values, valid in zip(rows.accumulators, rows.validity, strict=True)
        ]

    def _sealed_with_columns(
        self, export: RecordExport, max_parallelism: int
    ) -> Callable[[], Iterator[pa.RecordBatch]]:
        """Copies the changed keys and their numbers, and freezes the columns."""
        records = self._records
        keys = records.changed_keys(export)
        gathered = records.gather(keys)
        states = [
            to_column(values, valid)
            for values, valid in zip(gathered.accumulators, gathered.validity, strict=True)
        ]
        groups = records.lookup(keys)
        states += [column.freeze(groups) for column in self._columns]
        return partial(
            sealed_batches,
            self._schema,
            self._key_count,
            max_parallelism,
            plain_keys(keys).to_arrays(),
            lambda rows: [state(rows) for state in states],
        )
