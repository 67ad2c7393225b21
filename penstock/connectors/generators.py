"""Sources that make their rows: a user's function of the position, and the Nexmark generator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from penstock.connectors.inference import plain_schema
from penstock.connectors.messages import name_list, nearest_name
from penstock.errors import JobRejected
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME

_ENDLESS = -1


def generator_source(
    pickled_fn: graph_pb2.Function,
    schema: pa.Schema,
    rows: int | None = None,
    rate: float | None = None,
) -> tuple[graph_pb2.SourceSpec, pa.Schema]:
    """A source that calls ``fn(start, count) -> RecordBatch``, a pure function of the position.

    Args:
        pickled_fn: the function.
        rows: how many; None = endless.
        rate: rows per second over all subtasks; None = as fast as it goes.

    Raises:
        JobRejected: rows or rate are out of range, or the schema uses the reserved name.
    """
    if EVENT_TIME in schema.names:
        raise JobRejected(f'the column name "{EVENT_TIME}" is reserved; rename the column')
    count = _check_count(rows, "rows")
    spec = graph_pb2.SourceSpec(
        generator=graph_pb2.GeneratorSource(
            function=pickled_fn,
            rows=count,
            rate=_check_rate(rate),
            never_null=[field.name for field in schema if not field.nullable],
        ),
        bounded=count >= 0,
    )
    return spec, plain_schema(schema)


def sample_generator_schema(fn: Callable[[int, int], Any]) -> pa.Schema:
    """The schema of a generator function, found by asking it for its first row.

    Raises:
        JobRejected: the function does not return a RecordBatch, or one in which a column has no type; what it
            raises itself passes through.
    """
    batch = fn(0, 1)
    if not isinstance(batch, pa.RecordBatch):
        raise JobRejected(
            f"the generator function returned {type(batch).__name__} for (0, 1); expected a "
            "pyarrow.RecordBatch"
        )
    for field in batch.schema:
        if _is_open(field.type):
            raise JobRejected(
                f"the generator function returned column {field.name!r} of type {field.type} for (0, 1), which does "
                "not say what later rows hold: make its arrays with their type, as pa.array(values, pa.string()), "
                "or give schema="
            )
    return plain_schema(batch.schema)


def _is_open(type_: pa.DataType) -> bool:
    """Whether Arrow has inferred it, or a part of it, from nothing but nulls."""
    if pa.types.is_dictionary(type_):
        return _is_open(type_.value_type)
    parts = (type_.field(index).type for index in range(type_.num_fields))
    return pa.types.is_null(type_) or any(map(_is_open, parts))


def nexmark_source(
    events: int | None = None,
    seed: int = 0,
    rate: float | None = None,
    kind: str = "bid",
    *,
    first_event_time_ms: int | None = None,
    event_interval_us: int | None = None,
    columns: list[str] | None = None,
) -> tuple[graph_pb2.SourceSpec, pa.Schema]:
    """The Nexmark generator as a source.

    Args:
        events: events of all kinds; a stream of one kind has its share (46 of 50 are bids). None =
            endless.
        seed: another seed, other events.
        rate: rows per second over all subtasks; None = as fast as it goes.
        kind: "bid" | "auction" | "person" | "" for all, one nested column each.
        first_event_time_ms: event time of the first event.
        event_interval_us: event-time distance of two events.
        columns: the columns the rows shall have; None = all.

    Raises:
        JobRejected: an argument is out of range, or a column does not exist.
    """
    from penstock.nexmark import generator as nexmark

    if kind not in nexmark.KINDS:
        raise JobRejected(
            f'unknown kind "{kind}"{nearest_name(kind, nexmark.KINDS)}; known are "bid", "auction", '
            '"person" and "" (all)'
        )
    interval = nexmark.EVENT_INTERVAL_US if event_interval_us is None else event_interval_us
    first = nexmark.FIRST_EVENT_TIME_MS if first_event_time_ms is None else first_event_time_ms
    if interval <= 0:
        raise JobRejected(f"the interval between events must be positive, not {interval} us")
    schema = nexmark.nexmark_schema(kind)
    for name in columns or ():
        if name not in schema.names:
            raise JobRejected(
                f'nexmark {kind or "events"}: there is no column "{name}"'
                f"{nearest_name(name, schema.names)}; columns: {name_list(schema.names)}"
            )
    count = _check_count(events, "events")
    spec = graph_pb2.SourceSpec(
        nexmark=graph_pb2.NexmarkSource(
            events=count,
            seed=seed,
            rate=_check_rate(rate),
            kind=kind,
            first_event_time_ms=first,
            event_interval_us=interval,
        ),
        bounded=count >= 0,
    )
    return spec, schema if columns is None else pa.schema([schema.field(n) for n in columns])


def sample_nexmark(spec: graph_pb2.NexmarkSource, schema: pa.Schema, rows: int) -> pa.RecordBatch:
    """The first rows of a Nexmark source."""
    from penstock.nexmark import generator as nexmark

    count = rows if spec.events < 0 else min(rows, nexmark.kind_count(spec.kind, spec.events))
    return nexmark.nexmark_batch(
        spec.kind,
        spec.seed,
        0,
        count,
        columns=schema.names,
        first_event_time_ms=spec.first_event_time_ms,
        event_interval_us=spec.event_interval_us,
    )


def _check_count(count: int | None, name: str) -> int:
    if count is None:
        return _ENDLESS
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise JobRejected(f"{name} must be a whole number >= 0 or None (endless), not {count!r}")
    return count


def _check_rate(rate: float | None) -> float:
    if rate is None:
        return 0.0
    if not (rate > 0 and math.isfinite(rate)):
        raise JobRejected(f"rate must be a positive number of rows per second, not {rate!r}")
    return float(rate)
