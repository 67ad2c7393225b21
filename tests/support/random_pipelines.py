"""Random chains of relational operators over random tables, for what two engines have to do alike.

A chain is drawn call by call: each looks at the columns that the stream has by then, and is left out where it is refused
when the graph is built, on its own or for Spark. What is left is a chain that compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

import penstock as ps
from penstock import col
from penstock.pushdown.part_compiler import compile_part
from tests.support.random_expressions import expression, question
from tests.support.random_tables import KINDS, TIMES, table

Sources = tuple[ps.Stream, ps.Stream]
Call = Callable[[ps.Stream, Sources], ps.Stream]
"""The stream so far, and those of both tables in; what comes of them out."""

WINDOWS = (
    ps.tumbling("7s"), ps.tumbling("10s", "-3s"), ps.tumbling("1ms"), ps.tumbling("1d"), ps.sliding("10s", "5s"),
    ps.sliding("7s", "2s"), ps.sliding("10s", "5s", "3s"), ps.sliding("3s", "2s"),
)  # fmt: skip
_CALLS_MAX = 7
_FIRST, _SECOND = "table#1", "table#2"
_SEVERAL = ("window", "join", "union")
"""Behind these rows come in several batches, and a running aggregate gives out each of its values."""


@dataclass
class Pipeline:
    """Two tables, and the calls that are made of their streams.

    Attributes:
        updates_of: the keys of a running aggregate whose updates come out, () = each of its values has come once, None =
            there is none.
        refused: what was left out, and why.
    """

    tables: tuple[pa.Table, pa.Table]
    calls: list[tuple[str, Call]] = field(default_factory=list)
    updates_of: tuple[str, ...] | None = None
    refused: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The calls, line by line."""
        return "\n".join(text for text, _ in self.calls)

    @property
    def rows_max(self) -> int:
        """How many rows its tables are cut into batches of: whole ones where a running aggregate reads them."""
        return 7 if self.updates_of is None else max(map(len, self.tables)) + 1

    @property
    def comes_in_one_batch(self) -> bool:
        """Whether what comes out does, where tables do."""
        return not any(word in text for text, _ in self.calls for word in _SEVERAL)

    def __call__(self, first: ps.Stream, second: ps.Stream) -> ps.Stream:
        """The chain over two streams."""
        made = first
        for _, call in self.calls:
            made = call(made, (first, second))
        return made

    def read(self) -> tuple[Callable[..., ps.Stream], list[pa.Table]]:
        """The chain as a function of those streams alone that it reads, and their tables."""
        if any(_SECOND in text for text, _ in self.calls):
            return (lambda first, second: self(first, second)), list(self.tables)  # noqa: PLW0108 - its arguments are counted
        return (lambda first: self(first, first)), [self.tables[0]]


def pipeline(random: Random) -> Pipeline:
    """A chain of up to seven calls: any, or such as go together seldom by themselves."""
    made = Pipeline(_tables(random))
    wanted = list(random.choice(_SHAPES)) or [
        random.choice(_MAKERS) for _ in range(random.randint(2, _CALLS_MAX))
    ]
    for make in wanted:
        for _ in range(4):
            if made.updates_of or _add(made, *make(random, made)):
                break
    if not made.calls:
        _add(made, "select", lambda stream, _: stream.select("a", "A"))
    return made


def _tables(random: Random) -> tuple[pa.Table, pa.Table]:
    names = random.sample(sorted(KINDS), random.randint(3, 7))
    kinds = {name: KINDS[name] for name in names}
    for name in ("a", "A"):
        kinds[name] = random.choice([pa.int32(), pa.int64(), pa.string(), pa.float64()])
    other = {
        name: kind if random.random() < 0.9 else random.choice(list(KINDS.values()))
        for name, kind in kinds.items()
    }
    counts = random.choice([(0, 0), (0, 5), (12, 0), (1, 1), *[(12, 9), (20, 15), (25, 20)] * 4])
    return (
        table(random, kinds, counts[0], random.choice(TIMES)),
        table(random, other, counts[1], random.choice(TIMES)),
    )


def _streams(made: Pipeline) -> tuple[ps.Stream, Sources]:
    env = ps.Environment()
    first, second = (env.from_arrow(each) for each in made.tables)
    return made(first, second), (first, second)


def _add(made: Pipeline, name: str, call: Call, keys: tuple[str, ...] | None = None) -> bool:
    """Whether it compiles."""
    stream, sources = _streams(made)
    try:
        compile_part(call(stream, sources)._source)
    except (ps.JobRejected, ps.ExpressionError) as error:
        made.refused.append(f"{name}: {error}")
        return False
    if keys is not None:
        made.updates_of = () if made.comes_in_one_batch and made.updates_of is None else keys
    made.calls.append((name, call))
    return True


# ---------------------------------------------------------------- calls

Made = tuple[Any, ...]
"""A text, the call, and keys where it is a running aggregate."""


def _schema(made: Pipeline) -> pa.Schema:
    return _streams(made)[0].schema


def _columns(random: Random, made: Pipeline) -> Made:
    schema = _schema(made)
    name = random.choice(
        ["x", "y", "X", "a", "A", *(name for name in schema.names if name != "ts")]
    )
    made_of = expression(random, schema)
    return f"with_columns({name}={made_of!r})", lambda stream, _: stream.with_columns(
        **{name: made_of}
    )


def _nulls(random: Random, made: Pipeline) -> Made:
    """A column that is all null."""
    kind = random.choice(
        ["int64", "string", "float64", "timestamp[us, tz=UTC]", "decimal128(9, 3)"]
    )
    name = random.choice(["x", "a", "A"])
    return f"with_columns({name}=null {kind})", lambda stream, _: stream.with_columns(
        **{name: ps.lit(None).cast(kind)}
    )


def _filter(random: Random, made: Pipeline) -> Made:
    schema = _schema(made)
    asked = question(random, schema)
    if random.random() < 0.5:
        asked = asked | col(random.choice(schema.names)).is_valid()
    return f"filter({asked!r})", lambda stream, _: stream.filter(asked)


def _none(_: Random, made: Pipeline) -> Made:
    """A condition that no row meets, which nobody knows before."""
    name = _schema(made).names[0]
    never = col(name).is_null() & col(name).is_valid()
    return f"filter({never!r})", lambda stream, _: stream.filter(never)


def _time(random: Random, made: Pipeline) -> Made:
    names = _schema(made).names
    name = random.choice(
        [name for name in names if name in ("ts", "window_start", "ts_right")] or names
    )
    return f"with_event_time({name})", lambda stream, _: stream.with_event_time(name)


def _keys(random: Random, schema: pa.Schema) -> tuple[str, ...]:
    return tuple(random.sample(schema.names, min(len(schema.names), random.choice([1, 1, 2]))))


def _aggregates(random: Random, schema: pa.Schema) -> dict[str, Any]:
    made = {"n": ps.count()}
    for number in range(random.randint(1, 4)):
        name = random.choice(schema.names)
        kind = schema.field(name).type
        functions = [ps.min, ps.max, ps.count, ps.count_distinct]
        if not pt.is_floating(kind) or name == "f":
            functions += [ps.sum, ps.mean]
        made[random.choice([f"r{number}", "a", "A"])] = random.choice(functions)(name)
    if "ts" in schema.names and random.random() < 0.6:
        made["ts"] = ps.max("ts")
    return made


def _timed(stream: ps.Stream, is_wanted: bool = True) -> ps.Stream:
    return stream.with_event_time("ts") if is_wanted and "ts" in stream.schema.names else stream


def _window(random: Random, made: Pipeline) -> Made:
    schema, window = _schema(made), random.choice(WINDOWS)
    keys, aggregates = _keys(random, schema), _aggregates(random, schema)
    is_timed = random.random() < 0.6
    text = f"{'timed.' * is_timed}key_by{keys}.window({window}).aggregate({aggregates})"
    return (
        text,
        lambda stream, _: (
            _timed(stream, is_timed).key_by(*keys).window(window).aggregate(**aggregates)
        ),
    )


def _window_all(random: Random, made: Pipeline) -> Made:
    schema = _schema(made)
    window, aggregates = random.choice(WINDOWS), _aggregates(random, schema)
    return (
        f"window_all({window}).aggregate({aggregates})",
        lambda stream, _: _timed(stream).window_all(window).aggregate(**aggregates),
    )


def _running(random: Random, made: Pipeline) -> Made:
    schema = _schema(made)
    keys, aggregates = _keys(random, schema), _aggregates(random, schema)
    return (
        f"key_by{keys}.aggregate({aggregates})",
        lambda stream, _: stream.key_by(*keys).aggregate(**aggregates),
        keys,
    )


def _join(random: Random, made: Pipeline) -> Made:
    stream, sources = _streams(made)
    text, side = _side(random, made)
    try:
        other = side(stream, sources).schema
    except (ps.JobRejected, ps.ExpressionError):  # the join is refused, too
        other = stream.schema
    common = sorted(
        {(one.name, str(one.type)) for one in stream.schema}
        & {(one.name, str(one.type)) for one in other}
    )
    keys = [name for name, _ in random.sample(common, min(len(common), random.choice([1, 1, 2])))]
    keys = keys or ["a"]
    if random.random() < 0.5:
        given: dict[str, Any] = {
            "within": random.choice([("-1d", "1d"), ("-1d", "1ms"), ("-5s", "7s"), ("0s", "0s")])
        }
    else:
        given = {
            "window": random.choice([ps.tumbling("1d"), *WINDOWS]),
            "how": random.choice(["inner", "left", "right", "full"]),
        }
    is_timed = random.random() < 0.6
    return (
        f"{'timed.' * is_timed}join({text}, {keys}, {given})",
        lambda left, sources: _timed(left, is_timed).join(side(left, sources), on=keys, **given),
    )


def _side(random: Random, made: Pipeline) -> tuple[str, Call]:
    """What a stream is joined with: a source, some of it, windows of it, or the stream itself."""
    number = random.choice([1, 1, 0])
    name, schema = (_FIRST, _SECOND)[number], made.tables[number].schema
    match random.randrange(5):
        case 0:
            return name, lambda _, sources: _timed(sources[number])
        case 1:
            asked = question(random, schema, 1)
            return f"{name}.filter({asked!r})", lambda _, sources: _timed(
                sources[number].filter(asked)
            )
        case 2:
            kept = random.sample(schema.names[:-1], random.randint(1, 3))
            return f"{name}.select({kept})", lambda _, sources: _timed(sources[number]).select(
                *kept
            )
        case 3:
            keys, window = _keys(random, schema), random.choice(WINDOWS)
            counted = _aggregates(random, schema)
            return (
                f"{name}.key_by{keys}.window({window}).aggregate({counted})",
                lambda _, sources: (
                    _timed(sources[number]).key_by(*keys).window(window).aggregate(**counted)
                ),
            )
        case _:
            return "itself", lambda stream, _: _timed(stream)


def _union(random: Random, made: Pipeline) -> Made:
    schema = _schema(made)
    asked, names = question(random, schema, 1), schema.names
    match random.randrange(4):
        case 0:
            return f"union(self.filter({asked!r}))", lambda stream, _: stream.union(
                stream.filter(asked)
            )
        case 1:
            name, kind = random.choice([(one.name, one.type) for one in schema])
            return f"union(self, {name} null)", lambda stream, _: stream.union(
                stream.with_columns(**{name: ps.lit(None).cast(kind)}).select(*names)
            )
        case _:
            more = random.random() < 0.3
            return f"union({_SECOND}{', self' * more})", lambda stream, sources: stream.union(
                sources[1].select(*names), *([stream] if more else [])
            )


def _names(random: Random, made: Pipeline) -> Made:
    names = _schema(made).names
    chosen = random.sample(names, random.randint(1, len(names)))
    if random.random() < 0.4:
        return f"rename({chosen[0]}=odd)", lambda stream, _: stream.rename(**{chosen[0]: "a.b `c`"})
    if random.random() < 0.5 and "ts" in chosen and len(chosen) > 2:
        chosen.remove("ts")
    return f"select({chosen})", lambda stream, _: stream.select(*chosen)


_Maker = Callable[[Random, Pipeline], Made]
_MAKERS: Sequence[_Maker] = (
    *(_columns, _columns, _columns, _nulls, _filter, _filter, _none, _time, _time),
    *(_window, _window, _window_all, _running, _join, _join, _union, _names),
)
_SHAPES: Sequence[Sequence[_Maker]] = (
    *([[]] * 4),
    (_join, _join, _filter, _names),
    (_columns, _join, _columns, _join, _window),
    (_window, _join, _window),
    (_filter, _running, _time, _join, _columns, _running),
    (_running, _columns, _running),
    (_join, _window, _columns, _join),
    (_union, _join, _union, _window),
    (_nulls, _union, _window, _filter, _union),
    (_none, _join, _window_all),
)
"""Calls that are wanted in this order; empty = any."""
