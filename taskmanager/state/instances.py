"""What belongs to things that come and go (sessions, open count windows), by number.

The numbers are given out by the table of these things, which also exports what belongs to them: numbers
mean nothing outside of a process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from penstock.aggregates.stored_fields import accumulator_fields
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import Int64Array
from taskmanager.kernels import AccumulatorKind, RecordTable, Rows, encode_keys
from taskmanager.state.accumulator_columns import from_columns, to_column
from taskmanager.state.group_column import GroupColumn
from taskmanager.state.group_table import TableInputs, TableRows
from taskmanager.state.value_log import FrozenStates


class NumberPool:
    """Gives out the numbers 0, 1, 2, ...; those that were given back first."""

    def __init__(self) -> None:
        self.bound = 0
        self._free = np.empty(0, np.int64)

    def allocate(self, count: int) -> Int64Array:
        """``count`` different numbers that are not in use."""
        numbers = self.following(count)
        reused = min(count, len(self._free))
        self._free = self._free[: len(self._free) - reused]
        self.bound += count - reused
        return numbers

    def following(self, count: int) -> Int64Array:
        """What ``allocate`` gives out next, one after the other."""
        free = self._free[::-1][:count]
        return np.append(free, np.arange(self.bound, self.bound + count - len(free)))

    def release(self, numbers: Int64Array) -> None:
        """Takes numbers back."""
        self._free = np.append(self._free, numbers)


class InstanceState(Protocol):
    """State of numbered instances, exported and restored by the table that numbers them.

    The columns are the same everywhere: one array per field of ``state_fields``.
    """

    def state_fields(self) -> list[pa.Field]:
        """What an instance's state is; the names are unique within."""

    def freeze(self, groups: Int64Array) -> list[FrozenStates]:
        """The states of different instances as they are now, per field."""

    def restore(self, groups: Int64Array, states: list[pa.Array]) -> None:
        """Sets the states of n different instances."""

    def memory_bytes(self) -> int:
        """Approximate size."""


class InstanceTable:
    """Aggregates of numbered instances.

    Args:
        kinds: what the numbers are.
        columns: empty group columns.
        uses: per number what it is for.
    """

    def __init__(
        self,
        kinds: Sequence[AccumulatorKind],
        columns: list[GroupColumn],
        uses: Sequence[tuple[str, ...]] = (),
    ) -> None:
        self._kinds = tuple(kinds)
        self._uses = uses
        self._records = RecordTable([pa.int64()], kinds) if kinds else None
        self._columns = columns

    def memory_bytes(self) -> int:
        """Approximate size."""
        records = 0 if self._records is None else self._records.memory_bytes()
        return records + sum(column.memory_bytes for column in self._columns)

    def update(self, instances: Int64Array, inputs: TableInputs) -> None:
        """Adds n rows, each to its instance.

        Raises:
            AccumulatorOverflowError: a sum left the range of int64.
        """
        if self._records is not None:
            self._records.accumulate(_keys(instances), inputs.values, inputs.valid)
        for column, values in zip(self._columns, inputs.columns, strict=True):
            column.update(instances, inputs.sequence, values)

    def merge(self, source: Int64Array, target: Int64Array) -> None:
        """Adds instance ``source[i]`` to ``target[i]`` and empties the sources."""
        if self._records is not None:
            gathered = self._records.gather(_keys(source))
            self._records.merge_rows(Rows(_keys(target), gathered.accumulators, gathered.validity))
        for column in self._columns:
            column.merge(column, source, target)
        self.clear(source)

    def rows(self, instances: Int64Array, keys: list[pa.Array]) -> TableRows:
        """The state of instances that have rows, with the keys they belong to."""
        columns = [column.results(instances) for column in self._columns]
        if self._records is None:
            return TableRows(keys, [], [], columns)
        gathered = self._records.gather(_keys(instances))
        return TableRows(keys, gathered.accumulators, gathered.validity, columns)

    def clear(self, instances: Int64Array) -> None:
        """Empties the instances."""
        if self._records is not None:
            self._records.remove(_keys(instances))
        for column in self._columns:
            column.clear(instances)

    def state_fields(self) -> list[pa.Field]:
        """The accumulators, then the group columns."""
        numbers = accumulator_fields(self._kinds, self._uses)
        return [*numbers, *(column.state_field() for column in self._columns)]

    def freeze(self, groups: Int64Array) -> list[FrozenStates]:
        """The states of different instances as they are now."""
        frozen: list[FrozenStates] = []
        if self._records is not None:
            gathered = self._records.gather(_keys(groups))
            # An instance that has taken no rows yet has no record.
            for values, valid in zip(gathered.accumulators, gathered.validity, strict=True):
                mask = gathered.present if valid is None else gathered.present & valid
                frozen.append(to_column(values, mask))
        return frozen + [column.freeze(groups) for column in self._columns]

    def restore(self, groups: Int64Array, states: list[pa.Array]) -> None:
        """Sets the states of n different instances."""
        if self._records is not None:
            self._records.remove(_keys(groups))
            values, valid = from_columns(self._kinds, states[: len(self._kinds)])
            self._records.accumulate(_keys(groups), values, valid, merge=True)
        for column, column_states in zip(self._columns, states[len(self._kinds) :], strict=True):
            column.restore(groups, column_states)


def _keys(instances: Int64Array) -> KeyBatch:
    return encode_keys([pa.array(instances)])
