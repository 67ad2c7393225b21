"""Columns of groups that keep one Arrow value per group: a position in a log.

See ``group_column`` for what they have in common with others.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.aggregates.aggregate_layout import GroupColumnSpec
from penstock.storage.key_types import Int64Array
from taskmanager.state.group_column import GroupColumn, valid_rows
from taskmanager.state.slot_arrays import grown
from taskmanager.state.value_log import FrozenStates, ValueLog
from taskmanager.state.wide_columns import wide_type

_COMPACT_ABOVE = 1 << 15


class SlotColumn(GroupColumn):
    """One value per group; a position of -1 = none."""

    def __init__(self, spec: GroupColumnSpec, value_type: pa.DataType | None = None) -> None:
        super().__init__(spec)
        self._value_type = value_type or self.state_type
        self._log = ValueLog(self._value_type)
        self._position = np.full(64, -1, np.int64)

    def _reserve(self, groups: Int64Array) -> None:
        self._position = grown(self._position, int(groups.max(initial=-1)) + 1, -1)

    def _store(self, groups: Int64Array, values: pa.Array) -> None:
        """Sets the value of each of the (different) groups."""
        first = self._log.append(values)
        self._position[groups] = np.arange(first, first + len(values))
        if len(self._log) > max(2 * len(self._position), _COMPACT_ABOVE):
            used = np.flatnonzero(self._position >= 0)
            self._log.keep(self._position[used])
            self._position[used] = np.arange(len(used))

    @override
    def clear(self, groups: Int64Array) -> None:
        self._reserve(groups)
        self._position[groups] = -1

    @override
    def results(self, groups: Int64Array) -> pa.Array:
        self._reserve(groups)
        values, kind = self._log.take(self._position[groups]), self.spec.output_type
        return values if values.type in (kind, wide_type(kind)) else values.cast(kind)

    @override
    def freeze(self, groups: Int64Array) -> FrozenStates:
        self._reserve(groups)
        positions, values = self._position[groups], self._log.view()
        return lambda rows: values.take(positions[rows])

    @override
    def restore(self, groups: Int64Array, states: pa.Array) -> None:
        self.clear(groups)
        rows = valid_rows(states)
        self._store(groups[rows], states.take(pa.array(rows)))

    @property
    @override
    def memory_bytes(self) -> int:
        return self._log.memory_bytes + self._position.nbytes


class SequencedColumn(SlotColumn):
    """The same, each with its place in the order of arrival."""

    def __init__(self, spec: GroupColumnSpec) -> None:
        super().__init__(spec, spec.input_type)
        self._sequence = np.zeros(64, np.int64)

    @override
    def _reserve(self, groups: Int64Array) -> None:
        super()._reserve(groups)
        self._sequence = grown(self._sequence, len(self._position))

    @override
    def freeze(self, groups: Int64Array) -> FrozenStates:
        self._reserve(groups)
        positions, sequence = self._position[groups], self._sequence[groups]
        values, kind = self._log.view(), self.state_type

        def states(rows: Int64Array) -> pa.Array:
            parts = [values.take(positions[rows]), pa.array(sequence[rows])]
            fields = [kind.field(0).with_type(parts[0].type), kind.field(1)]
            missing = pa.array(positions[rows] < 0)
            return pa.StructArray.from_arrays(parts, fields=fields, mask=missing)

        return states

    @override
    def restore(self, groups: Int64Array, states: pa.Array) -> None:
        self.clear(groups)
        rows = valid_rows(states)
        groups, states = groups[rows], states.take(pa.array(rows))
        self._sequence[groups] = states.field("sequence").to_numpy()
        self._store(groups, states.field("value"))

    @property
    @override
    def memory_bytes(self) -> int:
        return super().memory_bytes + self._sequence.nbytes
