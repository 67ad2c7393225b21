"""The user's own aggregate: one Python accumulator per group."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import override

from penstock.aggregate_layout import GroupColumnSpec
from penstock.column_values import ValueMismatch, decode, encode, short_repr
from penstock.errors import TaskFailure
from penstock.rows import rows_of
from penstock.user_code import display_name
from taskmanager.operators.user_failure import user_failure
from taskmanager.state.group_columns import GroupColumn

Int64Array = npt.NDArray[np.int64]

_BYTES_PER_ACCUMULATOR = 512  # a guess: the size of a user's object is not known


class CustomAggregate(GroupColumn):
    """Calls ``create_accumulator``, ``add``, ``merge`` and ``result`` of the user's object."""

    def __init__(self, spec: GroupColumnSpec, operator: str) -> None:
        super().__init__(spec)
        self._function = spec.custom
        self._operator = operator
        self._accumulators: dict[int, Any] = {}

    @override
    def update(self, groups: Int64Array, sequence: Int64Array, values: Any) -> None:
        rows = rows_of(values) if isinstance(values, pa.RecordBatch) else decode(values)
        accumulators, add = self._accumulators, self._function.add
        value: Any = None
        try:
            for group, value in zip(groups.tolist(), rows, strict=True):
                if group in accumulators:
                    held = accumulators[group]
                else:
                    held = self._function.create_accumulator()
                accumulators[group] = _returned(add(held, value), held, "add")
        except Exception as error:
            raise self._failure(error, "add", value) from error

    @override
    def merge(self, other: GroupColumn, source: Int64Array, target: Int64Array) -> None:
        assert isinstance(other, CustomAggregate)
        function, accumulators, theirs = self._function, self._accumulators, other._accumulators
        merging: Any = None
        try:
            for from_group, to_group in zip(source.tolist(), target.tolist(), strict=True):
                if from_group not in theirs:
                    continue
                # A merge may change what it is given, and a slice is merged into several windows:
                # the first argument is always an accumulator of the target's own.
                if to_group not in accumulators:
                    accumulators[to_group] = function.create_accumulator()
                merging = accumulators[to_group], theirs[from_group]
                merged = _returned(function.merge(*merging), merging[0], "merge")
                # The other part stays in use: it must not be shared with the merged one.
                accumulators[to_group] = copy.deepcopy(merged) if merged is merging[1] else merged
        except Exception as error:
            raise self._failure(error, "merge", merging) from error

    @override
    def clear(self, groups: Int64Array) -> None:
        for group in groups.tolist():
            self._accumulators.pop(group, None)

    @override
    def results(self, groups: Int64Array) -> pa.Array:
        function, values = self._function, []
        held: Any = None
        try:
            for group in groups.tolist():
                held = self._accumulators.get(group)
                if group not in self._accumulators:
                    held = function.create_accumulator()
                values.append(function.result(held))
        except Exception as error:
            raise self._failure(error, "result", held) from error
        return self._encode(values)

    def _encode(self, values: Sequence[Any]) -> pa.Array:
        try:
            return encode(values, pa.field(self.spec.name, self.spec.output_type))
        except ValueMismatch as error:
            raise TaskFailure(
                f"operator {self._operator!r}: the result of {display_name(self._function)} does not "
                f"fit: {error}; return such a value, or declare another type=",
                operator=self._operator,
                row=short_repr(values[error.index]) if error.index >= 0 else "",
            ) from error

    def _failure(self, error: Exception, method: str, row: object) -> TaskFailure:
        function = f"{display_name(self._function)}.{method}"
        return user_failure(error, operator=self._operator, function=function, row=row)

    @property
    @override
    def memory_bytes(self) -> int:
        return _BYTES_PER_ACCUMULATOR * len(self._accumulators)


def _returned(accumulator: Any, given: Any, method: str) -> Any:
    """What a method returned; refuses a forgotten ``return``."""
    if accumulator is None and given is not None:
        raise TypeError(f"{method} returned None: it must return the accumulator")
    return accumulator
