"""The user's own aggregate: one Python accumulator per group.

Accumulators are live Python objects, so they are encoded at once when they are frozen for a snapshot.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from itertools import islice
from typing import Any

import pyarrow as pa
from typing_extensions import override

from penstock.aggregates.aggregate_layout import GroupColumnSpec
from penstock.errors import TaskFailure
from penstock.functions.user_code import display_name
from penstock.rows.column_values import ValueMismatch, decode, encode, short_repr
from penstock.rows.handed_over import handed_over_whole
from penstock.rows.rows import rows_of
from penstock.storage.codec import StateCodec, codec_of
from penstock.storage.key_types import Int64Array
from taskmanager.state.group_column import GroupColumn
from taskmanager.state.value_log import FrozenStates
from taskmanager.user_code.user_failure import user_failure

MSGPACK = "msgpack"
_CODECS = {MSGPACK: "msgpack/1", "pickle": "pickle/1"}

_SIZE_SAMPLES = 8
_SIZE_EVERY = 64
_SIZED_OBJECTS_MAX = 1000
_BYTES_PER_ENTRY = 100
"""Of the dictionary and the number of the group."""


class CustomAggregate(GroupColumn):
    """Calls ``create_accumulator``, ``add``, ``merge`` and ``result`` of the user's object."""

    def __init__(self, spec: GroupColumnSpec, operator: str) -> None:
        super().__init__(spec)
        self._function = spec.custom
        self._operator = operator
        self._accumulators: dict[int, Any] = {}
        self._codec = _codec_of(spec, operator)
        self._bytes_each = 0
        self._asked_for_size = 0

    @override
    def update(self, groups: Int64Array, sequence: Int64Array, values: Any) -> None:
        accumulators, add = self._accumulators, self._function.add
        value: Any = None
        try:
            rows = rows_of(values) if isinstance(values, pa.RecordBatch) else decode(values)
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
                # A merge may change what it is given, or make its parts those of the result, and a slice is merged
                # into several windows: only what is forgotten behind it is given as it is.
                if to_group not in accumulators:
                    accumulators[to_group] = function.create_accumulator()
                held, added = accumulators[to_group], theirs[from_group]
                merging = held, added if other is self else copy.deepcopy(added)
                accumulators[to_group] = _returned(function.merge(*merging), held, "merge")
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
                values.append(handed_over_whole(function.result(held)))
        except Exception as error:
            raise self._failure(error, "result", held) from error
        return self._encode(values)

    @override
    def state_field(self) -> pa.Field:
        # The codec is part of the name: states of another one must not be read with this.
        field = super().state_field()
        return field.with_name(f"{field.name}_{self._codec.name}")

    @property
    @override
    def state_type(self) -> pa.DataType:
        return self._codec.column_type

    @override
    def freeze(self, groups: Int64Array) -> FrozenStates:
        accumulators, to_stored = self._accumulators, self._codec.to_stored
        stored: list[Any] = [None] * len(groups)
        held: Any = None
        try:
            for index, group in enumerate(groups.tolist()):
                if group in accumulators:
                    held = accumulators[group]
                    stored[index] = to_stored(held)
        except ValueError as error:
            raise TaskFailure(
                f"operator {self._operator!r}: an accumulator of {display_name(self._function)} cannot be "
                f"part of a checkpoint: it is {short_repr(held)}, {error}. Make accumulators plain "
                "Python values, or set accumulator_codec = 'pickle' on the class",
                operator=self._operator,
                row=short_repr(held),
            ) from error
        states = self._codec.column(stored)
        return lambda rows: states.take(pa.array(rows))

    @override
    def restore(self, groups: Int64Array, states: pa.Array) -> None:
        to_value = self._codec.to_value
        for group, stored in zip(groups.tolist(), self._codec.stored(states), strict=True):
            if stored is None:
                self._accumulators.pop(group, None)
            else:
                self._accumulators[group] = to_value(stored)

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
        if self._asked_for_size % _SIZE_EVERY == 0 and self._accumulators:
            step = max(1, len(self._accumulators) // _SIZE_SAMPLES)
            sample = list(islice(self._accumulators.values(), 0, None, step))[:_SIZE_SAMPLES]
            self._bytes_each = sum(map(object_bytes, sample)) // len(sample) + _BYTES_PER_ENTRY
        self._asked_for_size += bool(self._accumulators)
        return self._bytes_each * len(self._accumulators)


def object_bytes(value: object) -> int:
    """Approximate size of an object with what it holds; large ones by their first parts."""
    total, counted = 0, 0
    waiting = [value]
    seen: set[int] = set()
    while waiting and counted < _SIZED_OBJECTS_MAX:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        counted += 1
        total += sys.getsizeof(found, _BYTES_PER_ENTRY)
        if isinstance(found, dict):
            waiting += [*found.keys(), *found.values()]
        elif isinstance(found, (list, tuple, set, frozenset)):
            waiting += found
        elif hasattr(found, "__dict__"):
            waiting.append(vars(found))
    return total * (counted + len(waiting)) // max(counted, 1)


def _codec_of(spec: GroupColumnSpec, operator: str) -> StateCodec:
    codec = getattr(spec.custom, "accumulator_codec", MSGPACK)
    if codec not in _CODECS:
        raise TaskFailure(
            f"operator {operator!r}: {display_name(spec.custom)} has accumulator_codec = {codec!r}; it "
            f"must be one of {', '.join(map(repr, _CODECS))}",
            operator=operator,
        )
    return codec_of(_CODECS[codec])


def _returned(accumulator: Any, given: Any, method: str) -> Any:
    """What a method returned; refuses a forgotten ``return``."""
    if accumulator is None and given is not None:
        raise TypeError(f"{method} returned None: it must return the accumulator")
    return accumulator
