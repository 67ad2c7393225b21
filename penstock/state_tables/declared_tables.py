"""Which states an operator of a job has, and how their rows are stored, by its declaration alone (pure).

It is for state that no job has written yet. What the declaration does not tell (what a user's own aggregate keeps, the
rows that joins and window functions hold) can be written into a savepoint of the job only, which has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from penstock.aggregates.aggregate_layout import aggregate_layout
from penstock.aggregates.aggregates import CUSTOM, Aggregate
from penstock.aggregates.stored_fields import accumulator_fields, group_field, group_type
from penstock.graph.restore_check import OPERATOR_LIST
from penstock.graph.state_meaning import TIMERS
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.rows.schema import schema_from_bytes
from penstock.storage.codec import ENTRY_ARROW, Stamped, codec_of
from penstock.storage.run_columns import codec_field, key_fields, keyed_schema

_TTL: Final = b"ttl_ms"


@dataclass(frozen=True, slots=True)
class DeclaredTable:
    """A state per key: its name, its kind, its rows in runs, and how long values live (0 = for ever)."""

    name: str
    kind: str
    schema: pa.Schema
    ttl_ms: int = 0


@dataclass(frozen=True, slots=True)
class DeclaredList:
    """A state without a key: its name, how its items are encoded, and who gets them after a restart."""

    name: str
    codec: str
    redistribution: checkpoint_pb2.Redistribution.ValueType


def declared_tables(operator: graph_pb2.Operator) -> Mapping[str, DeclaredTable]:
    """The states per key, by name."""
    return {one.name: one for one in _tables(operator)}


def declared_lists(operator: graph_pb2.Operator) -> Mapping[str, DeclaredList]:
    """The states without a key, by name."""
    found = {}
    for state in operator.process.states if operator.HasField("process") else ():
        if state.kind != OPERATOR_LIST:
            continue
        codec, redistribution = state.codec, checkpoint_pb2.REDISTRIBUTION_SPLIT
        if state.key_codec:
            codec = f"{state.key_codec}{ENTRY_ARROW}{state.codec}"
            redistribution = checkpoint_pb2.REDISTRIBUTION_BROADCAST
        elif state.is_union:
            redistribution = checkpoint_pb2.REDISTRIBUTION_UNION
        found[state.name] = DeclaredList(state.name, codec, redistribution)
    return found


def _tables(operator: graph_pb2.Operator) -> Iterator[DeclaredTable]:
    spec = operator.WhichOneof("spec")
    if spec == "process" and operator.process.keys:
        keys = _keys(operator, operator.process.keys)
        for state in operator.process.states:
            if state.kind != OPERATOR_LIST:
                yield _of_function(state, keys)
        for name in TIMERS if _may_have_timers(operator.process) else ():
            yield DeclaredTable(name, "timers", keyed_schema(keys, [pa.field("time", pa.int64())]))
    elif spec == "running_aggregate":
        aggregation = operator.running_aggregate
        keys = _keys(operator, aggregation.keys)
        yield from _of_aggregates("running", "group", keys, [], operator, aggregation.aggregates)
    elif spec == "window_aggregate":
        windowed = operator.window_aggregate
        name, kind, fields = _of_windows(windowed.window)
        keys = _keys(operator, windowed.keys)
        yield from _of_aggregates(name, kind, keys, fields, operator, windowed.aggregates)


def _may_have_timers(process: graph_pb2.ProcessSpec) -> bool:
    return process.answers_timers or not process.HasField("answers_timers")


def _of_windows(window: graph_pb2.WindowSpec) -> tuple[str, str, list[pa.Field]]:
    if window.kind == graph_pb2.WINDOW_KIND_SESSION:
        fields = [pa.field("start", pa.int64()), pa.field("end", pa.int64())]
        return "sessions", "sessions", [*fields, pa.field("fired", pa.bool_())]
    if window.kind == graph_pb2.WINDOW_KIND_COUNT:
        names = ["filled", "window_index", *(["touched_ms"] if window.ttl_ms else [])]
        return "counts", "counts", [pa.field(name, pa.int64()) for name in names]
    return "slices", "group", []


def _of_function(state: graph_pb2.DeclaredState, keys: Sequence[pa.Field]) -> DeclaredTable:
    codec = codec_of(state.codec)
    if state.ttl_ms:
        codec = Stamped(codec)
    if state.kind == "list":
        fields = [codec_field("items", codec, pa.list_(codec.column_type))]
    else:
        fields = [codec_field("value", codec)]
    if state.kind == "map":
        key_codec = codec_of(state.key_codec)
        fields.insert(0, codec_field("map_key", key_codec))
    metadata = {_TTL: str(state.ttl_ms).encode()} if state.ttl_ms else None
    return DeclaredTable(
        state.name, state.kind, keyed_schema(keys, fields).with_metadata(metadata), state.ttl_ms
    )


def _of_aggregates(
    name: str,
    kind: str,
    keys: Sequence[pa.Field],
    fields: Sequence[pa.Field],
    operator: graph_pb2.Operator,
    protos: Sequence[graph_pb2.Aggregate],
) -> Iterator[DeclaredTable]:
    if any(one.function == CUSTOM for one in protos):
        return
    aggregates = {one.name: Aggregate.from_proto(one) for one in protos}
    layout = aggregate_layout(aggregates, schema_from_bytes(operator.input_schema))
    numbers = accumulator_fields([slot.kind for slot in layout.slots], layout.slot_uses())
    columns = [group_field(one, group_type(one)) for one in layout.group_columns]
    yield DeclaredTable(name, kind, keyed_schema(keys, [*fields, *numbers, *columns]))


def _keys(operator: graph_pb2.Operator, names: Sequence[str]) -> list[pa.Field]:
    schema = schema_from_bytes(operator.input_schema)
    return key_fields([schema.field(name).type for name in names] or [pa.int64()])
