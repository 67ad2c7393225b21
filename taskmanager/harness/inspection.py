"""What a test may look at in open operators: the state of functions, and their timers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import pyarrow as pa

from penstock.errors import JobRejected
from penstock.naming import nearest_hint
from penstock.pb import graph_pb2
from penstock.state.declarations import (
    BroadcastState,
    KeyedState,
    MapState,
    OperatorListState,
    ValueState,
)
from penstock.storage.arrow_codecs import exact_array
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_groups import owners
from taskmanager.kernels import encode_keys, hash_columns
from taskmanager.operators.key_columns import KeyColumns
from taskmanager.operators.operator import Operator
from taskmanager.operators.process_base import StatefulOperator, TimerOperator

Opened = Iterable[tuple[graph_pb2.Operator, Operator]]


def state_of(opened: Opened, name: str, key: Any, operator: str | None) -> Any:
    """The content of a declared state.

    Args:
        key: of the rows; a tuple where there are several key columns; ``...`` = none was given.
        operator: whose; needed where several operators have a state of that name.

    Raises:
        JobRejected: there is no such state, or the key does not fit.
    """
    found = _one(
        [(spec, each) for spec, each in _stateful(opened, operator) if name in each.states.by_name],
        lambda: _unknown_state(opened, name),
        f"state {name!r}",
    )
    spec, holder = found
    state = holder.states.by_name[name]
    if isinstance(state, KeyedState):
        if key is ...:
            raise JobRejected(f"state {name!r} has content per key: give key=...")
        batch = _key_batch(holder, spec, key)
        (content,) = [_content(seen) for seen in holder.states.peek(state, batch)]
        return content
    if key is not ...:
        raise JobRejected(f"state {name!r} belongs to no key: leave out key=")
    if isinstance(state, BroadcastState):
        return dict(state.items())
    assert isinstance(state, OperatorListState)
    return state.get()


def timers_of(
    opened: Opened, domain: Literal["event", "processing"], key: Any, operator: str | None
) -> list[int]:
    """The times of all timers of a domain, or of those of one key, ascending.

    Raises:
        JobRejected: no operator has timers, or the key does not fit.
    """
    if domain not in ("event", "processing"):
        raise JobRejected(f"timers: domain={domain!r} is neither 'event' nor 'processing'")
    spec, holder = _one(
        [
            (spec, each)
            for spec, each in _stateful(opened, operator)
            if isinstance(each, TimerOperator) and each.key_columns is not None
        ],
        lambda: "timers: there is no function with timers",
        "timers",
    )
    assert isinstance(holder, TimerOperator)
    service = holder.timers(domain)
    held = None if service is None else service.all()
    wanted = None if key is ... else _key_batch(holder, spec, key).to_bytes(0)
    if held is None:
        return []
    keys, times = held
    return sorted(
        int(time_ms)
        for row, time_ms in enumerate(times)
        if wanted is None or keys.to_bytes(row) == wanted
    )


def _stateful(
    opened: Opened, operator: str | None
) -> list[tuple[graph_pb2.Operator, StatefulOperator]]:
    return [
        (spec, each)
        for spec, each in opened
        if isinstance(each, StatefulOperator) and operator in (None, spec.name, spec.uid)
    ]


def _one(
    found: Sequence[tuple[graph_pb2.Operator, StatefulOperator]],
    missing: Callable[[], str],
    what: str,
) -> tuple[graph_pb2.Operator, StatefulOperator]:
    if not found:
        raise JobRejected(missing())
    if len(found) > 1:
        names = ", ".join(repr(spec.name) for spec, _ in found)
        raise JobRejected(
            f"{what}: several operators have such, {names}: give operator= with a name (.name('...') or "
            ".uid('...'))"
        )
    return found[0]


def _unknown_state(opened: Opened, name: str) -> str:
    known = [state for _, each in _stateful(opened, None) for state in each.states.by_name]
    listed = ", ".join(repr(state) for state in known) or "none"
    return f"there is no state {name!r}{nearest_hint(name, known)}; declared are: {listed}"


def _key_batch(holder: StatefulOperator, spec: graph_pb2.Operator, key: Any) -> KeyBatch:
    columns = holder.key_columns
    if columns is None:
        raise JobRejected(f"operator {spec.name!r} has no keys: leave out key=")
    parts = (key,) if len(columns.names) == 1 else key
    if not isinstance(parts, tuple) or len(parts) != len(columns.names):
        raise JobRejected(
            f"key={key!r} is no key of operator {spec.name!r}, whose key columns are "
            f"{', '.join(columns.names)}: give a tuple of {len(columns.names)}"
        )
    arrays = [_scalar(columns, index, part) for index, part in enumerate(parts)]
    context = holder.context
    owner = owners(hash_columns(arrays), context.parallelism, context.max_parallelism)[0]
    if owner != context.subtask_index:
        raise JobRejected(
            f"key={key!r} is a key of subtask {owner}, this is subtask {context.subtask_index} of "
            f"{context.parallelism}"
        )
    return encode_keys(arrays)


def _scalar(columns: KeyColumns, index: int, value: Any) -> pa.Array:
    name, kind = columns.names[index], columns.types[index]
    try:
        return exact_array([value], kind)
    except ValueError as error:
        raise JobRejected(
            f"key={value!r} does not fit the key column {name!r}, which is {kind}: {error}"
        ) from error


def _content(state: Any) -> Any:
    if isinstance(state, ValueState):
        return state.value()
    if isinstance(state, MapState):
        return dict(state.items())
    return state.get()
