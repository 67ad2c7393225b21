"""States with one value per key: ``ValueState``, ``ReducingState``, ``AggregatingState``.

``ValueState.value`` and ``update`` are the hot path of functions with state: a look into a list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

import pyarrow as pa
import pyarrow.types as pt
from typing_extensions import override

from penstock.aggregates.aggregates import CUSTOM, Aggregate
from penstock.aggregates.state_aggregates import BUILT_IN_ACCUMULATORS
from penstock.errors import JobRejected
from penstock.state.base import KeyedState, StateScope, Ttl
from penstock.storage.codec import ABSENT, StateError

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class CellState(KeyedState):
    """Base of the states with one value per key."""

    kind: ClassVar[Literal["value", "list", "map"]] = "value"
    _values: Any = None
    _changed: Any = None
    _removed: Any = None

    @override
    def bind(self, column: Any, scope: StateScope) -> Self:
        bound = super().bind(column, scope)
        column.removed = bound._removed = []
        return bound

    def clear(self) -> None:
        """Removes the key's value; none is no error."""
        self._remove(self._slot("clear"))

    @override
    def enter(self) -> None:
        self._values = self._column.values
        self._changed = self._column.changed

    @override
    def is_present(self, slot: int) -> bool:
        return self._values[slot] is not ABSENT

    def _load(self, slot: int) -> Any:
        """The value of a slot, ABSENT where there is none or it has expired."""
        stored = self._values[slot]
        if self._is_plain or stored is ABSENT:
            return stored
        if self._ttl_ms:
            stored, stamp_ms = stored
            if self._is_expired(stamp_ms):
                if not self._returns_expired:
                    self._remove(slot)
                    return ABSENT
            elif self._reads_stamp and stamp_ms != self._scope.now_ms:
                self._values[slot] = (stored, self._scope.now_ms)
                self._changed.append(slot)
        return self.codec.to_value(stored)

    def _save(self, slot: int, value: Any) -> None:
        stored = self._stored(value, self.codec)
        self._values[slot] = (stored, self._scope.now_ms) if self._ttl_ms else stored
        self._changed.append(slot)

    def _remove(self, slot: int) -> None:
        if self._values[slot] is not ABSENT:
            self._values[slot] = ABSENT
            self._changed.append(slot)
            self._removed.append(slot)

    def _put_many(self, keys: pa.Array, values: pa.Array) -> None:
        """Sets the values of n keys of the batch; null removes, and the last of equal keys counts."""
        if self._is_plain and _is_own_form(values, self.codec.value_type):
            slots, cells = self._slots(keys, "put_many"), self._values
            self._check_counts(len(slots), len(values), "put_many")
            for slot, value in zip(slots, values.to_pylist(), strict=True):
                cells[slot] = value
            self._changed += slots
            return
        for slot, value in self._pairs(keys, values, self.codec.value_type, "put_many"):
            if value is None:
                self._remove(slot)
            else:
                self._save(slot, value)

    def _load_many(self, keys: pa.Array) -> list[Any]:
        """The values of n keys, None where there is none."""
        slots = self._slots(keys, "get_many")
        if self._is_plain:
            values = self._values
            found = [values[slot] for slot in slots]
            if ABSENT not in found:
                return found
        else:
            found = [self._load(slot) for slot in slots]
        return [None if value is ABSENT else value for value in found]


def _is_own_form(values: object, type_: pa.DataType | None) -> bool:
    """Arrow's values of the type, none of them null, are what is stored, as they are."""
    if not isinstance(values, pa.Array) or values.type != type_ or values.null_count:
        return False
    return (
        pt.is_integer(type_)
        or pt.is_boolean(type_)
        or (pt.is_floating(type_) and not pt.is_float16(type_))
        or pt.is_string(type_)
        or pt.is_binary(type_)
    )


class ValueState(CellState):
    """One value per key: ``value()``, ``update(value)``, ``clear()``.

    A value that can be changed (a list, a dict) is the caller's own copy: ``update`` it to keep a change.

    Args:
        name: unique within the function.
        type: of the value, see ``KeyedState``.
        default: what ``value()`` gives where there is none.
    """

    def __init__(
        self,
        name: str,
        type: Any = None,
        *,
        default: Any = None,
        ttl: Ttl | None = None,
        codec: str | None = None,
        queryable: bool = False,
    ) -> None:
        super().__init__(name, type, ttl=ttl, codec=codec, queryable=queryable)
        self._default: Any = None
        if default is not None:
            try:
                self._default = self._stored(default, self.codec, ": its default")
            except StateError as error:
                raise JobRejected(str(error)) from error
        # The type of values that are their own stored form; integers of it must be within 64 bits.
        is_int64 = self.codec.value_type == pa.int64()
        exact = int if is_int64 else self.codec.exact_type
        self._exact = exact if self._is_plain else None
        self._returns_default = self._default is None or self.codec.is_immutable

    @property
    def default(self) -> Any:
        """What ``value()`` gives where there is none."""
        return None if self._default is None else self.codec.to_value(self._default)

    def value(self) -> Any:
        """The key's value; the default (None) where there is none."""
        try:
            stored = self._values[self._scope.slot]
        except TypeError:
            self._no_key("value")
        if stored is not ABSENT:
            if self._is_plain:
                return stored
            value = self._load(self._scope.slot)
            if value is not ABSENT:
                return value
        return self._default if self._returns_default else self.codec.to_value(self._default)

    def update(self, value: Any) -> None:
        """Sets the key's value; None removes it.

        Raises:
            StateError: the value is not of the state's type.
        """
        slot, kind = self._scope.slot, type(value)
        if kind is not self._exact or (kind is int and not _INT64_MIN <= value <= _INT64_MAX):
            if slot is None:
                self._no_key("update")
            if value is None:
                self._remove(slot)
                return
            try:
                value = self.codec.to_stored(value)
            except ValueError as error:
                raise self._misfit(value, self.codec, error) from error
            if self._ttl_ms:
                value = (value, self._scope.now_ms)
        try:
            self._values[slot] = value
        except TypeError:
            self._no_key("update")
        self._changed.append(slot)

    def get_many(self, keys: pa.Array) -> pa.Array:
        """The values of n keys of the batch, null (or the default) where there is none."""
        found = self._load_many(keys)
        if self._default is not None:
            default = self.codec.to_value(self._default)
            found = [default if value is None else value for value in found]
        return self._array(found, self.codec.value_type)

    def put_many(self, keys: pa.Array, values: pa.Array) -> None:
        """Sets the values of n keys of the batch; null removes, and the last of equal keys counts."""
        self._put_many(keys, values)

    @property
    def column(self) -> Any:
        """Of the state backend; for compiled functions."""
        return self._column

    def values_in(self, slots: list[int]) -> list[Any]:
        """The values in slots, None where there is none; for compiled functions."""
        if self._is_plain:
            values = self._values
            found = [values[slot] for slot in slots]
        else:
            found = [self._load(slot) for slot in slots]
        return found if ABSENT not in found else [None if v is ABSENT else v for v in found]

    def put_in(self, slots: list[int], values: list[Any]) -> None:
        """Sets the values in slots, None removes; for compiled functions, whose numbers are of the state's type."""
        if self._is_plain:
            cells = self._values
            for slot, value in zip(slots, values, strict=True):
                if value is None:
                    self._remove(slot)
                else:
                    cells[slot] = value
            self._changed += slots
            return
        for slot, value in zip(slots, values, strict=True):
            if value is None:
                self._remove(slot)
            else:
                self._save(slot, value)


class ReducingState(CellState):
    """What a function makes of all values added: ``add(value)``, ``get()``, ``clear()``.

    Args:
        name: unique within the function.
        type: of the values and of what they are reduced to.
        reduce: ``(reduced, value) -> reduced``; the first value is taken as it is. It may come in front
            of the type.
    """

    def __init__(
        self,
        name: str,
        type: Any,
        reduce: Callable[[Any, Any], Any],
        *,
        ttl: Ttl | None = None,
        codec: str | None = None,
        queryable: bool = False,
    ) -> None:
        if _is_type(reduce) and not _is_type(type):
            type, reduce = reduce, type
        super().__init__(name, type, ttl=ttl, codec=codec, queryable=queryable)
        if not callable(reduce):
            raise JobRejected(
                f"state {name!r}: {reduce!r} cannot be called; give a function (a, b) -> reduced"
            )
        self._reduce = reduce

    def add(self, value: Any) -> None:
        """Reduces one more value into the key's."""
        self._add(self._slot("add"), value)

    def get(self) -> Any:
        """What the key's values were reduced to; None where there were none."""
        value = self._load(self._slot("get"))
        return None if value is ABSENT else value

    def get_many(self, keys: pa.Array) -> pa.Array:
        """What the values of n keys of the batch were reduced to; null where there were none."""
        return self._array(self._load_many(keys), self.codec.value_type)

    def add_many(self, keys: pa.Array, values: pa.Array) -> None:
        """Reduces n values into those of their keys, in order; null is skipped."""
        for slot, value in self._pairs(keys, values, self.codec.value_type, "add_many"):
            if value is not None:
                self._add(slot, value)

    def put_many(self, keys: pa.Array, values: pa.Array) -> None:
        """Replaces what n keys of the batch hold; null removes."""
        self._put_many(keys, values)

    def _add(self, slot: int, value: Any) -> None:
        before = self._load(slot)
        if before is not ABSENT:
            value = self._reduce(before, value)
        if value is None:
            raise StateError(
                f"state {self.name!r}: None was added, or its reduce function returned None; it must "
                "return the reduced value"
            )
        self._save(slot, value)


class AggregatingState(CellState):
    """An aggregate of all values added: ``add(value)``, ``get()``, ``clear()``.

    Args:
        name: unique within the function.
        aggregate: an object of a class like ``ps.AggregateFunction``, ``ps.aggregate(...)``, a built-in
            such as ``ps.sum("x")`` (its column is not looked at: ``add`` is given the value), or the name
            of one.
        type: of the accumulator; plain Python values where it is not given. It may come in front of the
            aggregate.

    Attributes:
        built_in: which built-in aggregate it is; "" = the user's own.
    """

    def __init__(
        self,
        name: str,
        aggregate: Any,
        type: Any = None,
        *,
        ttl: Ttl | None = None,
        codec: str | None = None,
        queryable: bool = False,
    ) -> None:
        if type is not None and _is_type(aggregate) and not _is_type(type):
            type, aggregate = aggregate, type
        super().__init__(name, type, ttl=ttl, codec=codec, queryable=queryable)
        self._function = _aggregate_function(name, aggregate)
        named = (
            one for one, built_in in BUILT_IN_ACCUMULATORS.items() if built_in is self._function
        )
        self.built_in = next(named, "")

    def add(self, value: Any) -> None:
        """Adds one value to the key's aggregate."""
        self._add(self._slot("add"), value)

    def get(self) -> Any:
        """The aggregate of the key's values; None where there were none."""
        held = self._load(self._slot("get"))
        return None if held is ABSENT else self._function.result(held)

    def get_many(self, keys: pa.Array) -> pa.Array:
        """The aggregates of n keys of the batch, null where there is none."""
        results = [
            None if held is None else self._function.result(held) for held in self._load_many(keys)
        ]
        return pa.array(results)

    def add_many(self, keys: pa.Array, values: pa.Array) -> None:
        """Adds n values to the aggregates of their keys, in order."""
        for slot, value in self._pairs(keys, values, None, "add_many"):
            self._add(slot, value)

    def _add(self, slot: int, value: Any) -> None:
        held = self._load(slot)
        if held is ABSENT:
            held = self._function.create_accumulator()
        added = self._function.add(held, value)
        if added is None and held is not None:
            raise StateError(
                f"state {self.name!r}: add() of {type(self._function).__name__} returned None: it must "
                "return the accumulator"
            )
        self._save(slot, added)


def _is_type(given: Any) -> bool:
    """True for what the type of a state can be, other than by its name."""
    return isinstance(given, pa.DataType) or given in (bool, int, float, str, bytes, dict, list)


def _aggregate_function(state: str, aggregate: Any) -> Any:
    if isinstance(aggregate, Aggregate):
        aggregate = aggregate.custom if aggregate.function == CUSTOM else aggregate.function
    if isinstance(aggregate, str):
        if aggregate not in BUILT_IN_ACCUMULATORS:
            raise JobRejected(
                f"state {state!r}: there is no aggregate {aggregate!r}; built in are "
                f"{', '.join(BUILT_IN_ACCUMULATORS)}"
            )
        return BUILT_IN_ACCUMULATORS[aggregate]
    missing = [m for m in ("create_accumulator", "add", "result") if not hasattr(aggregate, m)]
    if missing or isinstance(aggregate, type):
        raise JobRejected(
            f"state {state!r}: {aggregate!r} is no aggregate: give an object of a class derived from "
            "ps.AggregateFunction, or a built-in such as ps.count()"
        )
    return aggregate
