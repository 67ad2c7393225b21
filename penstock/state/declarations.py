"""State of functions: what users declare, and how the declarations of a function are found.

``declared_states`` is used where graphs are built and again where functions are opened, so that a wrong
declaration never gets to run.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.errors import JobRejected
from penstock.state.base import MSGPACK, PICKLE, KeyedState, State, StateScope, Ttl
from penstock.state.lists_and_maps import ListState, MapState
from penstock.state.operator_state import BroadcastState, OperatorListState
from penstock.state.values import AggregatingState, ReducingState, ValueState

__all__ = [
    "MSGPACK",
    "PICKLE",
    "AggregatingState",
    "BroadcastState",
    "KeyedState",
    "ListState",
    "MapState",
    "OperatorListState",
    "ReducingState",
    "State",
    "StateScope",
    "Ttl",
    "ValueState",
    "bind_attribute",
    "check_states",
    "declared_states",
]


def declared_states(function: object) -> dict[str, State]:
    """The states of a function: attribute -> declaration, in order of declaration.

    Declared on its class or a base of it, or set on the instance in ``__init__``.

    Raises:
        JobRejected: two of them have the same name.
    """
    found: dict[str, State] = {}
    for kind in reversed(type(function).__mro__):
        for attribute, value in vars(kind).items():
            if isinstance(value, State):
                found[attribute] = value
            else:
                found.pop(attribute, None)  # overridden by something else
    for attribute, value in getattr(function, "__dict__", {}).items():
        if isinstance(value, State):
            found[attribute] = value.declaration
    attributes: dict[str, str] = {}
    for attribute, state in found.items():
        other = attributes.setdefault(state.name, attribute)
        if other != attribute:
            raise JobRejected(
                f"{type(function).__name__}: the states {other} and {attribute} have the same name "
                f"{state.name!r}; names are unique within a function"
            )
    return found


def check_states(function: object, allowed: Iterable[type[State]]) -> dict[str, State]:
    """The states of a function, all of which must be of allowed kinds.

    Raises:
        JobRejected: one is not, or two have the same name.
    """
    kinds = tuple(allowed)
    states = declared_states(function)
    for attribute, state in states.items():
        if isinstance(state, kinds):
            continue
        hint = ""
        if isinstance(state, KeyedState):
            hint = "state per key needs a keyed stream: .key_by(...) and a ps.KeyedProcessFunction"
        elif isinstance(state, BroadcastState):
            hint = "broadcast state needs .connect(other.broadcast()) and a function for that"
        raise JobRejected(
            f"{type(function).__name__}.{attribute}: a function of this kind cannot have a "
            f"{type(state).__name__}; {hint}"
        )
    return states


def bind_attribute(function: object, attribute: str, state: State) -> None:
    """Makes bound state an attribute of the instance, whatever ``__setattr__`` the class has."""
    object.__setattr__(function, attribute, state)
