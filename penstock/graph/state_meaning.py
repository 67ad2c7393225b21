"""What an operator's state means beside what its tables say: by which keys it is, in which windows, of which aggregates.

A manifest keeps it as it was declared. State that was gathered under another declaration would be read wrongly
without a word, so a change is refused before anything starts. What only decides from now on (allowed lateness, a time
to live, where late rows go, a user's function) may change.

Example: a window of another size has other contents.
    >>> def counted(size_ms: int) -> graph_pb2.Operator:
    ...     window = graph_pb2.WindowSpec(size_ms=size_ms)
    ...     return graph_pb2.Operator(window_aggregate=graph_pb2.WindowAggregateSpec(window=window))
    >>> changed_meaning(declaration(counted(1_000)), counted(2_000)).partition(':')[0]
    'its window was stored with size 1000 ms, and has size 2000 ms now'
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import pyarrow as pa

from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME, schema_from_bytes, user_schema
from penstock.storage.key_types import value_type
from penstock.storage.open_store import is_s3

_KEYED = frozenset({"process", "window_aggregate", "window_function", "running_aggregate", "join"})
_WINDOWS = frozenset({"window_aggregate", "window_function"})
_ROWS = frozenset({"window_function", "join"})
_OTHER_UID = (
    "keep it as it was, or give the operator another uid, with which it begins empty, and leave out what is stored with "
    "--allow-non-restored-state"
)
_KINDS = {
    graph_pb2.WINDOW_KIND_TUMBLING: "tumbling",
    graph_pb2.WINDOW_KIND_SLIDING: "sliding",
    graph_pb2.WINDOW_KIND_SESSION: "session",
    graph_pb2.WINDOW_KIND_COUNT: "count",
}
_TIMES = {
    graph_pb2.TIME_DOMAIN_EVENT: "event time",
    graph_pb2.TIME_DOMAIN_PROCESSING: "processing time",
}
_LENGTHS = (
    ("size_ms", "size", " ms"),
    ("slide_ms", "slide", " ms"),
    ("offset_ms", "offset", " ms"),
    ("gap_ms", "gap", " ms"),
    ("count", "count", " rows"),
)
_TEXT_OPTIONS = (
    ("delimiter", "delimiter"),
    ("no_header", "header"),
    ("nulls", "nulls"),
    ("has_nulls", "nulls"),
    ("optional", "optional columns"),
    ("compression", "compression"),
)
EVENT_TIMERS: Final = "timers.event"
PROCESSING_TIMERS: Final = "timers.processing"
TIMERS: Final = (EVENT_TIMERS, PROCESSING_TIMERS)
"""States in which the timers of a function are kept."""
_HOW = {
    graph_pb2.JOIN_KIND_INNER: "inner",
    graph_pb2.JOIN_KIND_LEFT: "left",
    graph_pb2.JOIN_KIND_RIGHT: "right",
    graph_pb2.JOIN_KIND_FULL: "full",
}


def declaration(operator: graph_pb2.Operator) -> graph_pb2.Operator:
    """What a manifest keeps of an operator with state: no function, no schema but those that keys are in."""
    spec = operator.WhichOneof("spec")
    if spec in ("source", "sink"):
        return _connector_declaration(operator, spec)
    if spec not in _KEYED:
        return graph_pb2.Operator()
    kept = graph_pb2.Operator(
        input_schema=operator.input_schema, second_input_schema=operator.second_input_schema
    )
    getattr(kept, spec).CopyFrom(getattr(operator, spec))
    if spec == "process":
        kept.process.ClearField("function")
        kept.process.ClearField("compiled")
    if spec == "window_function":
        kept.window_function.ClearField("function")
    for aggregate in _aggregates(kept):
        aggregate.ClearField("custom")
    return kept


def _connector_declaration(operator: graph_pb2.Operator, spec: str) -> graph_pb2.Operator:
    """Splits and positions are read, and what is prepared is committed, by a source or sink of the same kind only."""
    kept = graph_pb2.Operator()
    given, noted = getattr(operator, spec), getattr(kept, spec)
    if kind := given.WhichOneof("kind"):
        getattr(noted, kind).SetInParent()
    if kind == "files":
        noted.files.format = given.files.format
        if spec == "sink":
            noted.files.directory = given.files.directory
        else:
            noted.files.path = given.files.path
            noted.files.text.CopyFrom(given.files.text)
    return kept


def changed_meaning(stored: graph_pb2.Operator, now: graph_pb2.Operator) -> str:
    """Why state of the one cannot be the state of the other; "" = it can.

    Args:
        stored: as ``declaration`` gave it; empty where the operator had no state that is looked at.
        now: of the job that is to be started.
    """
    old, new = stored.WhichOneof("spec"), now.WhichOneof("spec")
    if old is None:
        return ""
    if old != new:
        return f"it was stored by a {_words(old)}, and is a {_words(new or 'operator without state')} now: {_OTHER_UID}"
    if old == "source":
        return _changed_source(stored.source, now.source)
    if old == "sink":
        return _changed_sink(stored.sink, now.sink)
    if changed := next(_changes(stored, now, old), ""):
        return f"{changed}: {_OTHER_UID}"
    return next(_changed_aggregates(stored, now), "")


def _changed_source(stored: graph_pb2.SourceSpec, now: graph_pb2.SourceSpec) -> str:
    old, new = stored.WhichOneof("kind"), now.WhichOneof("kind")
    if old == new:
        return ""
    return (
        f"its splits were stored by a source of kind {old!r}, and it is one of kind {new!r} now: give it another uid, and "
        "leave them out with --allow-non-restored-state"
    )


def _changed_sink(stored: graph_pb2.SinkSpec, now: graph_pb2.SinkSpec) -> str:
    old, new = (_kind_of_sink(one) for one in (stored, now))
    if old == new:
        return ""
    return (
        f"its output was prepared by a sink of kind {old!r}, and it is one of kind {new!r} now: let the job as it was "
        "commit it, or give the sink another uid and leave it out with --allow-non-restored-state"
    )


def _kind_of_sink(sink: graph_pb2.SinkSpec) -> str:
    kind = sink.WhichOneof("kind") or ""
    return f"{kind} on S3" if is_s3(sink.files.directory) else kind


def changed_format(stored: graph_pb2.Operator, now: graph_pb2.Operator) -> str:
    """Why files that a source has not read to their end cannot be read now; "" = they can, as far as that is known."""
    old, new = (one.source.files.format for one in (stored, now))
    if old == new or not old:
        return ""
    return (
        f"it has files to read that were found as {old}, and it reads {new} now: let the job as it was read them to "
        f"their end, or read {new} with another uid and leave these out with --allow-non-restored-state"
    )


def change_of_input(stored: graph_pb2.Operator, now: graph_pb2.Operator, *, is_open: bool) -> str:
    """What a source of files goes on with where it reads otherwise now; "" = it does not, or that is not known.

    Args:
        is_open: it has found files that it has not read to their end.

    Example: a source of other files, which has read all that it had found.
        >>> old, new = graph_pb2.Operator(), graph_pb2.Operator()
        >>> old.source.files.path, new.source.files.path = "/old", "/new"
        >>> change_of_input(old, new, is_open=False)
        "it has read '/old', and reads '/new' now, from the start but for files that it has read under the same path"
    """
    old, new = stored.source.files, now.source.files
    if not old.path:
        return ""
    told = []
    if old.path != new.path:
        told.append(
            f"it has read {old.path!r}, and reads {new.path!r} now, from the start but for files that it has read under "
            "the same path"
        )
        told += [f"what it has found in {old.path!r} is read to its end as well"] if is_open else []
    options = _changed_options(old.text, new.text) if is_open and old.format == new.format else ""
    if options:
        told.append(f"what is left of the files that it has found is read with another {options}")
    return "; ".join(told)


def _changed_options(old: graph_pb2.TextOptions, new: graph_pb2.TextOptions) -> str:
    changed = [word for name, word in _TEXT_OPTIONS if getattr(old, name) != getattr(new, name)]
    return ", ".join(dict.fromkeys(changed))


def change_of_output(stored: graph_pb2.Operator, now: graph_pb2.Operator) -> str:
    """What a sink of files goes on with where it writes otherwise now; "" = it does not, or that is not known."""
    old, new = stored.sink.files, now.sink.files
    if not old.format or (old.format, old.directory) == (new.format, new.directory):
        return ""
    return f"what is prepared becomes {old.format} in {old.directory}, what comes {new.format} in {new.directory}"


def changed_aggregates(stored: graph_pb2.Operator, now: graph_pb2.Operator) -> str:
    """Which aggregates have come and gone; "" = none."""
    old = [one.name for one in _aggregates(stored)]
    new = [one.name for one in _aggregates(now)]
    begins = "begin empty" if now.HasField("running_aggregate") else "begin with the next window"
    added = ", ".join(repr(name) for name in new if name not in old)
    gone = ", ".join(repr(name) for name in old if name not in new)
    told = [f"the new aggregates {added} {begins}"] if added else []
    return "; ".join([*told, *([f"without {gone}, which are gone"] if gone else [])])


def changed_built_in(stored: graph_pb2.Operator, now: graph_pb2.Operator, name: str) -> str:
    """Why an aggregating state of a function cannot go on; "" = it can, as far as that is known."""
    old, new = (_built_in(operator, name) for operator in (stored, now))
    if old == new or not (old and new):
        return ""
    return f"it was stored as the aggregate {old!r}, and is {new!r} now: give it another name"


def unanswered_timers(stored: graph_pb2.Operator, now: graph_pb2.Operator, name: str) -> str:
    """Why timers would pass without a call; "" = they do not, or the state is none of timers.

    To be asked where there may be some: not every snapshot says without reading whether there are any.

    Example: a function that has lost its ``on_timer``.
        >>> old, new = (graph_pb2.Operator(process={"answers_timers": one}) for one in (True, False))
        >>> unanswered_timers(old, new, EVENT_TIMERS)
        'it may hold timers that its function asked for with on_timer(), and the function has none now'
        >>> unanswered_timers(new, new, EVENT_TIMERS)
        ''
    """
    if name not in TIMERS or not stored.process.answers_timers or now.process.answers_timers:
        return ""
    return "it may hold timers that its function asked for with on_timer(), and the function has none now"


def untimely_timers(stored: graph_pb2.Operator, now: graph_pb2.Operator, name: str) -> str:
    """Why timers of event time would wait for the end of the data; "" = they do not, or nobody waits for them."""
    are_awaited = stored.process.answers_timers and now.process.answers_timers
    if (
        name != EVENT_TIMERS
        or not are_awaited
        or not _has_event_time(stored)
        or _has_event_time(now)
    ):
        return ""
    return (
        "its rows had event time, and have none now, so that its timers would wait for the end of the data: give the "
        "stream event time (with_event_time), or the operator another uid"
    )


def _has_event_time(operator: graph_pb2.Operator) -> bool:
    schemas = (operator.input_schema, operator.second_input_schema)
    return any(EVENT_TIME in schema_from_bytes(one).names for one in schemas if one)


def _built_in(operator: graph_pb2.Operator, name: str) -> str:
    return next((one.aggregate for one in operator.process.states if one.name == name), "")


def _changes(stored: graph_pb2.Operator, now: graph_pb2.Operator, spec: str) -> Iterator[str]:
    old, new = getattr(stored, spec), getattr(now, spec)
    yield from _changed_keys(
        _types(stored.input_schema, old.keys), _types(now.input_schema, new.keys), "its keys"
    )
    yield from _changed_order(old.keys, new.keys, "its keys")
    if spec == "process":
        before = _types(stored.second_input_schema, old.second_keys)
        after = _types(now.second_input_schema, new.second_keys)
        if before and after:
            yield from _changed_keys(before, after, "the keys of its second input")
            yield from _changed_order(
                old.second_keys, new.second_keys, "the keys of its second input"
            )
    if spec in _WINDOWS:
        yield from _changed_window(old.window, new.window)
    if spec == "window_function" and old.kind != new.kind:
        yield "its windows were stored for reduce, or for process, and it is the other one now"
    if spec == "join":
        yield from _changed_join(old, new)
    if spec in _ROWS:
        yield from _changed_rows(stored.input_schema, now.input_schema)
        yield from _changed_rows(stored.second_input_schema, now.second_input_schema)


def _changed_keys(
    old: Sequence[pa.DataType], new: Sequence[pa.DataType], what: str
) -> Iterator[str]:
    if list(old) != list(new):
        yield f"{what} were stored as ({_list(old)}), and are ({_list(new)}) now: the types of keys never change"


def _changed_order(old: Sequence[str], new: Sequence[str], what: str) -> Iterator[str]:
    """The same columns in another order; others may be the same under new names."""
    if list(old) != list(new) and sorted(old) == sorted(new):
        yield f"{what} were stored in the order ({', '.join(old)}), and are ({', '.join(new)}) now"


def _changed_window(old: graph_pb2.WindowSpec, new: graph_pb2.WindowSpec) -> Iterator[str]:
    if old.kind != new.kind:
        yield f"it was stored with {_KINDS[old.kind]} windows, and has {_KINDS[new.kind]} windows now"
    if old.time != new.time:
        yield f"its windows were stored in {_TIMES[old.time]}, and are in {_TIMES[new.time]} now"
    for name, noun, unit in _LENGTHS:
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            yield f"its window was stored with {noun} {before}{unit}, and has {noun} {after}{unit} now"


def _changed_aggregates(stored: graph_pb2.Operator, now: graph_pb2.Operator) -> Iterator[str]:
    old = {one.name: _meaning(one, stored.input_schema) for one in _aggregates(stored)}
    new = {one.name: _meaning(one, now.input_schema) for one in _aggregates(now)}
    for name, before in old.items():
        after = new.get(name)
        if after is not None and after != before:
            yield f"aggregate {name!r} was stored as {before}, and is {after} now: give it another name"


def _changed_rows(before: bytes, after: bytes) -> Iterator[str]:
    """What windows with functions, and joins, hold are rows as they came, with the columns that are read behind them."""
    if not before or not after:
        return
    old, new = (
        ", ".join(
            f"{field.name}: {value_type(field.type)}"
            for field in user_schema(schema_from_bytes(each))
        )
        for each in (before, after)
    )
    if old != new:
        yield (
            f"the rows that it holds, with the columns that are read behind it, were stored as ({old}), and are ({new}) "
            "now"
        )


def _changed_join(old: graph_pb2.JoinSpec, new: graph_pb2.JoinSpec) -> Iterator[str]:
    if old.is_interval != new.is_interval:
        yield "it was stored by an interval join, or by a window join, and is the other one now"
    if old.how != new.how:
        yield f"it was stored by a join of kind {_HOW[old.how]}, and is {_HOW[new.how]} now"
    if (old.lower_ms, old.upper_ms) != (new.lower_ms, new.upper_ms):
        yield (
            f"it was stored with rows from {old.lower_ms} to {old.upper_ms} ms around each row, and joins from "
            f"{new.lower_ms} to {new.upper_ms} ms now"
        )
    if not old.is_interval:
        yield from _changed_window(old.window, new.window)


def _aggregates(operator: graph_pb2.Operator) -> Iterable[graph_pb2.Aggregate]:
    if operator.HasField("window_aggregate"):
        return operator.window_aggregate.aggregates
    return operator.running_aggregate.aggregates if operator.HasField("running_aggregate") else ()


def _meaning(aggregate: graph_pb2.Aggregate, schema: bytes) -> str:
    column = aggregate.column
    types = _types(schema, [column] if column else [])
    return f"{aggregate.function}({column}{': ' if types else ''}{_list(types)})"


def _types(schema: bytes, names: Iterable[str]) -> list[pa.DataType]:
    """Types of columns; of those that a schema does not have, nothing is known."""
    if not schema:
        return []
    fields = schema_from_bytes(schema)
    found = (fields.get_field_index(name) for name in names)
    return [value_type(fields.field(index).type) for index in found if index >= 0]


def _list(types: Iterable[pa.DataType]) -> str:
    return ", ".join(map(str, types))


def _words(spec: str) -> str:
    return spec.replace("_", " ")
