"""The declared states of a running function: bound to the backend, brought into reach bundle by bundle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import JobRejected, Unrecoverable
from penstock.processing.process_functions import ProcessKindInfo
from penstock.rows.column_values import short_repr, shown_value
from penstock.rows.conforming import conformed_column
from penstock.state.declarations import (
    BroadcastState,
    KeyedState,
    OperatorListState,
    State,
    StateScope,
    bind_attribute,
    check_states,
)
from penstock.storage.arrow_codecs import exact_array
from penstock.storage.codec import Stamped, StateError
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import Int64Array, key_array
from taskmanager.kernels import encode_keys
from taskmanager.operators.operator import OperatorContext
from taskmanager.state.descriptors import StateDescriptor, StateKind
from taskmanager.state.memory_check import MemoryCheck
from taskmanager.state.operator_state import BROADCAST, SPLIT, UNION

_SWEPT_PER_BUNDLE = 256
_SWEPT_WHEN_IDLE = 4096
_REDISTRIBUTION = {"split": SPLIT, "union": UNION}


class FunctionStates:
    """The states of one function.

    Args:
        function: gets its bound states as attributes.
        key_types: of the key columns; None = unkeyed.
        scope: what its states of keys look at.
        numbers: kinds of the states that a compiled function uses, by attribute.

    Attributes:
        by_name: the bound states.

    Raises:
        JobRejected: a state is declared wrongly.
        StateError: what was restored does not fit a declaration.
    """

    def __init__(
        self,
        function: Any,
        info: ProcessKindInfo,
        key_types: Sequence[pa.DataType] | None,
        scope: StateScope,
        context: OperatorContext,
        numbers: Mapping[str, str] | None = None,
    ) -> None:
        self._numbers = numbers or {}
        self._function = function
        self._attributes: dict[str, State] = {}
        self._scope = scope
        self._clock = context.clock
        self.by_name: dict[str, State] = {}
        self._keyed: list[KeyedState] = []
        self._broadcast: list[BroadcastState] = []
        self._space = None if key_types is None else context.state.key_space(key_types)
        self._memory = MemoryCheck(context.memory, context.clock)
        for attribute, state in check_states(function, info.states).items():
            if isinstance(state, KeyedState):
                kind = "" if state.ttl_ms else self._numbers.get(attribute, "")
                bound: Any = state.bind(self._column(state, kind), scope)
                self._keyed.append(bound)
            elif isinstance(state, BroadcastState):
                held = context.operator_state.list(state.name, BROADCAST)
                bound = state.bind(held, scope)
                self._broadcast.append(bound)
            else:
                assert isinstance(state, OperatorListState)
                redistribution = _REDISTRIBUTION[state.redistribute]
                held = context.operator_state.list(state.name, redistribution)
                held.redistribution = redistribution
                bound = state.bind(held)
            bind_attribute(function, attribute, bound)
            self._attributes[attribute] = bound
            self.by_name[state.name] = bound
        self._has_ttl = any(state.ttl_ms for state in self._keyed)
        if context.config.state_backend_type == "hashmap":
            for name, bound in self.by_name.items():
                if isinstance(bound, OperatorListState | BroadcastState):
                    self._memory.register(
                        f"{context.operator_name}: state {name}", bound.memory_bytes
                    )

    @property
    def has_lists(self) -> bool:
        """Whether it declares state that belongs to no key."""
        return any(
            isinstance(state, OperatorListState | BroadcastState) for state in self.by_name.values()
        )

    def _column(self, state: KeyedState, number_kind: str) -> Any:
        if self._space is None:
            raise JobRejected(f"state {state.name!r}: state per key needs a keyed stream")
        descriptor = StateDescriptor(
            name=state.name,
            kind=StateKind(state.kind),
            codec=Stamped(state.codec) if state.ttl_ms else state.codec,
            key_codec=state.key_codec,
            ttl_ms=state.ttl_ms,
            number_kind=number_kind,
        )
        if descriptor.kind is StateKind.VALUE:
            return self._space.value_column(descriptor)
        if descriptor.kind is StateKind.LIST:
            return self._space.list_column(descriptor)
        return self._space.map_column(descriptor)

    def enter(self, keys: KeyBatch) -> list[int]:
        """Brings n keys into reach; their slots."""
        slots: list[int] = self.enter_slots(keys).tolist()
        return slots

    def enter_slots(self, keys: KeyBatch) -> Int64Array:
        """The same, as int64[n]."""
        assert self._space is not None
        slots: Int64Array = self._space.enter(keys)
        for state in self._keyed:
            state.enter()
        return slots

    def peek(self, state: KeyedState, keys: KeyBatch) -> Iterator[KeyedState]:
        """Lets a tool look at a state of some keys, one after the other: reading renews no time to live.

        Yields:
            The state, once per key: it is that key's until the next one.
        """
        scope = self._scope
        slots = self.enter(keys)
        seen = copy.copy(state)
        seen._reads_stamp = False
        seen.enter()
        scope.now_ms = self._clock.now_ms()
        try:
            for slot in slots:
                scope.slot = slot
                yield seen
        finally:
            self.leave()

    def leave(self) -> None:
        """Ends the bundle, and looks at some entries that may have expired."""
        assert self._space is not None
        self._scope.slot = None
        self._space.leave()
        if self._has_ttl:
            self._space.sweep(self._clock.now_ms(), _SWEPT_PER_BUNDLE)

    def sweep(self) -> None:
        """Looks at more entries that may have expired: there is nothing else to do."""
        if self._has_ttl and self._space is not None:
            self._space.sweep(self._clock.now_ms(), _SWEPT_WHEN_IDLE)

    def snapshot(self) -> None:
        """Puts broadcast state where a snapshot takes it from."""
        for state in self._broadcast:
            state.snapshot()

    def check(self) -> None:
        """Called for every bundle.

        Raises:
            Unrecoverable: the states of the slot are larger than the limit, or the function has put something else
                in the place of one.
        """
        self._memory.check()
        for attribute, state in self._attributes.items():
            found = getattr(self._function, attribute, None)
            if found is not state:
                raise Unrecoverable(
                    f"{type(self._function).__name__}.{attribute} was {state!r} and is now {short_repr(found)}, which "
                    f"no checkpoint has and all keys share: change what a state holds by its methods, as in "
                    f"self.{attribute}.update(...)"
                )

    def close(self) -> None:
        """Their memory is not counted any more."""
        self._memory.close()

    def visit(
        self,
        state: Any,
        call: Callable[[Any, Any], object],
        keys_of: Callable[[KeyBatch], Sequence[Any]],
    ) -> None:
        """Calls ``call(key, state)`` for every key with content in the state.

        Args:
            keys_of: the keys of a part as the user sees them.

        Raises:
            StateError: it is no state of this function's keys.
        """
        if self._space is None or not any(state is own for own in self._keyed):
            raise StateError(
                f"ctx.apply_to_keyed_state() takes a state per key of this function, got {state!r}"
            )
        for part in list(self._space.keys()):  # visiting a key may remove it
            values = keys_of(part)
            slots = self.enter(part)
            try:
                for key, slot in zip(values, slots, strict=True):
                    if state.is_present(slot):
                        self._scope.slot = slot
                        call(key, state)
            finally:
                self.leave()


class BatchKeys:
    """Slots of the keys of a batch, for functions that ask for many keys at once.

    Args:
        keys: as the function is given them.
        slots: of each of them.
    """

    def __init__(self, keys: pa.Array, slots: list[int]) -> None:
        self._keys = keys
        self._slots = slots
        self._slot_array: Int64Array | None = None
        self._by_key: dict[bytes, int] | None = None
        self._asked: tuple[pa.Array, Sequence[int]] = keys, slots
        """The last question: what was got is often put next."""

    def slots_of(self, keys: pa.Array) -> Sequence[int]:
        """The slots of m keys.

        Raises:
            StateError: one is not among the keys of the batch.
        """
        if keys is self._keys:
            return self._slots
        asked, found = self._asked
        if keys is not asked:
            found = self._found(keys)
            if isinstance(keys, pa.Array):  # which never changes
                self._asked = keys, found
        return found

    def _found(self, keys: pa.Array) -> Sequence[int]:
        try:
            keys = _as_keys(keys, self._keys.type)
        except (ValueError, TypeError, LookupError) as error:
            raise StateError(
                f"got keys {short_repr(keys)}, and those of this batch are {self._keys.type}: {error}"
            ) from error
        if pa.types.is_struct(keys.type):
            return self._slots_of_structs(keys)
        positions = pc.index_in(key_array(keys), value_set=self._keys)
        if positions.null_count:
            raise self._unknown(keys, pc.index(positions.is_null(), True).as_py())
        if self._slot_array is None:
            self._slot_array = np.array(self._slots, np.int64)
        found: list[int] = self._slot_array[positions.to_numpy()].tolist()
        return found

    def _slots_of_structs(self, keys: pa.Array) -> Sequence[int]:
        if self._by_key is None:
            known = _bytes_of(self._keys)
            self._by_key = dict(zip(known, self._slots, strict=True))
        found = []
        for index, key in enumerate(_bytes_of(keys)):
            slot = self._by_key.get(key)
            if slot is None:
                raise self._unknown(keys, index)
            found.append(slot)
        return found

    def _unknown(self, keys: pa.Array, index: int) -> StateError:
        return StateError(
            f"the key {shown_value(keys[index])!r} is not among the keys of this batch: only their state is in "
            "reach"
        )


def _as_keys(keys: Any, type_: pa.DataType) -> pa.Array:
    """What a function gives as keys, as an array of their type; none is cut, so that it would be another."""
    if isinstance(keys, pa.ChunkedArray):
        keys = keys.combine_chunks()
    elif not isinstance(keys, pa.Array) and hasattr(keys, "__array__"):
        keys = pa.array(keys)
    if isinstance(keys, pa.Array):
        if keys.type == type_:
            return keys
        if pa.types.is_struct(type_):
            if not pa.types.is_struct(keys.type) or {*keys.type.names} != {*type_.names}:
                raise ValueError("they have other columns")
            given = dict(zip(keys.type.names, keys.flatten(), strict=True))
            columns = [conformed_column(given[field.name], field) for field in type_]
            return pa.StructArray.from_arrays(columns, fields=list(type_))
        return conformed_column(keys, pa.field("key", type_))
    if pa.types.is_struct(type_):
        found = list(keys)
        columns = [exact_array([key[field.name] for key in found], field.type) for field in type_]
        return pa.StructArray.from_arrays(columns, fields=list(type_))
    return exact_array(keys, type_)


def _bytes_of(keys: pa.StructArray) -> list[bytes]:
    encoded = encode_keys(keys.flatten())
    return [encoded.to_bytes(row) for row in range(len(encoded))]
