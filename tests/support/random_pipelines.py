"""Random chains of relational operators over random tables, for what two engines have to do alike.

A chain is drawn call by call: each looks at the columns that the stream has by then, and is left out where it is refused
when the graph is built, on its own or for Spark. What is left is a chain that compiles.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

import penstock as ps
from penstock import col
from penstock.pushdown.part_compiler import compile_part
from penstock.pushdown.scalars import scalar_sql
from tests.support.random_tables import KINDS, TIMES, table

Call = Callable[[ps.Stream, ps.Stream], ps.Stream]

WINDOWS = (
    ps.tumbling("7s"), ps.tumbling("10s", "-3s"), ps.tumbling("1ms"), ps.tumbling("1d"), ps.sliding("10s", "5s"),
    ps.sliding("7s", "2s"), ps.sliding("10s", "5s", "3s"), ps.sliding("3s", "2s"),
)  # fmt: skip


# ---------------------------------------------------------------- expressions

_TWO: tuple[Callable[[Any, Any], Any], ...] = (
    lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / b, lambda a, b: a // b, lambda a, b: a % b,
    lambda a, b: a & b, lambda a, b: a | b, lambda a, b: a ^ b, lambda a, b: a.fill_null(b), ps.fn.coalesce,
    lambda a, b: ps.fn.if_else(a == b, a, b), lambda a, b: ps.fn.if_else(b != 0, a, None), lambda a, b: ps.when(a > b, a).otherwise(b),
)  # fmt: skip
_ONE: tuple[Callable[[Any], Any], ...] = (
    lambda a: -a, abs, lambda a: ~a, lambda a: a.floor(), lambda a: a.ceil(), lambda a: a.trunc(), lambda a: a.round(), lambda a: a.sqrt(),
    lambda a: a.utf8_length(), lambda a: a.binary_length(), lambda a: a.ascii_lower(), lambda a: a.ascii_upper(),
    lambda a: a.year(), lambda a: a.month(), lambda a: a.day(), lambda a: a.hour(), lambda a: a.minute(), lambda a: a.second(),
)  # fmt: skip
_CASTS = (
    *(
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint64",
        "float32",
        "float64",
        "bool",
        "string",
        "large_string",
        "date32",
    ),
    *(
        "timestamp[s]",
        "timestamp[ms]",
        "timestamp[us]",
        "timestamp[us, tz=UTC]",
        "timestamp[ms, tz=UTC]",
        "timestamp[ms, tz=Asia/Kolkata]",
    ),
    *("decimal128(12, 3)", "decimal128(38, 0)", "decimal128(38, 18)"),
)
_COMPARED: tuple[Callable[[Any, Any], Any], ...] = (
    lambda a, b: a == b, lambda a, b: a != b, lambda a, b: a < b, lambda a, b: a <= b, lambda a, b: a > b, lambda a, b: a >= b,
)  # fmt: skip
_ASKED: tuple[Callable[[Any], Any], ...] = (
    lambda a: a.is_null(), lambda a: a.is_valid(), lambda a: a.is_nan(), lambda a: a.is_finite(), lambda a: a.is_inf(),
    lambda a: a.is_null(nan_is_null=True), lambda a: a.starts_with("a"), lambda a: a.ends_with("\\"), lambda a: a.match_substring("̇"),
    lambda a: a.isin([1, 2]), lambda a: a.isin(["a", "ß"]), lambda a: a.between(-1, 2), lambda a: a.isin([0.0, 1.5]),
)  # fmt: skip


def expression(random: Random, schema: pa.Schema, depth: int = 3) -> Any:
    """An expression over some columns that compiles."""
    if depth == 0 or random.random() < 0.1:
        return col(random.choice(schema.names))
    given = expression(random, schema, depth - 1)
    for _ in range(12):
        made = _over(random, schema, given, depth - 1)
        if _compiles(made, schema):
            return made()
    return given


def _over(random: Random, schema: pa.Schema, given: Any, depth: int) -> Callable[[], Any]:
    chance = random.random()
    if chance < 0.5:
        function, other = random.choice(_TWO), _other(random, schema, depth)
        return lambda: function(given, other)
    if chance < 0.7:
        function = random.choice(_ONE)
        return lambda: function(given)
    if chance < 0.9:
        kind = random.choice(_CASTS)
        return lambda: given.cast(kind)
    asked = question(random, schema, depth)
    return lambda: asked


def _compiles(made: Callable[[], Any], schema: pa.Schema) -> bool:
    try:
        scalar_sql(made(), schema)
    except (ps.JobRejected, ps.ExpressionError, TypeError, ValueError, OverflowError):
        return False
    return True


def _other(random: Random, schema: pa.Schema, depth: int) -> Any:
    constants = [
        0,
        1,
        -3,
        2**31,
        0.0,
        -1.5,
        math.nan,
        "a",
        "ß",
        True,
        Decimal("1.25"),
        dt.date(1969, 12, 31),
        None,
    ]
    return (
        ps.lit(random.choice(constants))
        if random.random() < 0.35
        else expression(random, schema, depth)
    )


def question(random: Random, schema: pa.Schema, depth: int = 2) -> Any:
    """A condition."""
    if depth and random.random() < 0.25:
        left, right = question(random, schema, depth - 1), question(random, schema, depth - 1)
        return random.choice([left & right, left | right, left ^ right, ~left])
    given = expression(random, schema, depth)
    for _ in range(12):
        made = _asked(random, schema, given, depth)
        if _compiles(made, schema):
            return made()
    return given.is_valid()


def _asked(random: Random, schema: pa.Schema, given: Any, depth: int) -> Callable[[], Any]:
    if random.random() < 0.7:
        function, other = random.choice(_COMPARED), _other(random, schema, max(depth - 1, 0))
        return lambda: function(given, other)
    function = random.choice(_ASKED)
    return lambda: function(given)


# ---------------------------------------------------------------- chains


@dataclass
class Pipeline:
    """Two tables, and the calls that are made of their streams.

    Attributes:
        updates_of: the keys of a running aggregate at their end, () = it is not the last, None = there is none.
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

    def __call__(self, left: ps.Stream, right: ps.Stream) -> ps.Stream:
        """The chain over two streams."""
        for _, call in self.calls:
            left = call(left, right)
        return left

    def read(self) -> tuple[Callable[..., ps.Stream], list[pa.Table]]:
        """The chain as a function of those streams alone that it reads, and their tables."""
        if any("join" in text or "union(right)" in text for text, _ in self.calls):
            return (lambda left, right: self(left, right)), list(self.tables)  # noqa: PLW0108 - its arguments are counted
        return (lambda left: self(left, left)), [self.tables[0]]


_SEVERAL = ("window", "join", "union")
"""Behind these rows come in several batches, and a running aggregate gives out each of its values."""


def pipeline(random: Random) -> Pipeline:
    """A chain of up to seven calls."""
    names = random.sample(sorted(KINDS), random.randint(3, 7))
    kinds = {name: KINDS[name] for name in names}
    for name in ("a", "A"):
        kinds[name] = random.choice([pa.int32(), pa.int64(), pa.string(), pa.float64()])
    other = {
        name: kind if random.random() < 0.9 else random.choice(list(KINDS.values()))
        for name, kind in kinds.items()
    }
    counts = random.choice([(0, 0), (0, 5), (12, 0), (1, 1), *[(12, 9), (20, 15), (25, 20)] * 4])
    made = Pipeline(
        (
            table(random, kinds, counts[0], random.choice(TIMES)),
            table(random, other, counts[1], random.choice(TIMES)),
        )
    )
    for _ in range(random.randint(2, 7)):
        _add(made, *_drawn(random, made))
        if made.updates_of is not None:
            break
    is_in_one_batch = not any(word in text for text, _ in made.calls for word in _SEVERAL)
    if made.updates_of is not None and is_in_one_batch and random.random() < 0.5:
        _add(made, *_columns(random, made))
        made.updates_of = ()  # one value of each key has come
    if not made.calls:
        _add(made, "select", lambda left, _: left.select("a", "A"))
    return made


def _streams(made: Pipeline) -> tuple[ps.Stream, ps.Stream]:
    env = ps.Environment()
    left, right = (env.from_arrow(each) for each in made.tables)
    return made(left, right), right


def _add(made: Pipeline, name: str, call: Call, keys: tuple[str, ...] | None = None) -> None:
    left, right = _streams(made)
    try:
        compile_part(call(left, right)._source)
    except (ps.JobRejected, ps.ExpressionError) as error:
        made.refused.append(f"{name}: {error}")
        return
    made.calls.append((name, call))
    if keys is not None:
        made.updates_of = keys


def _drawn(random: Random, made: Pipeline) -> tuple[Any, ...]:
    makers = [
        _columns,
        _columns,
        _columns,
        _filter,
        _filter,
        _time,
        _time,
        _window,
        _window,
        _window_all,
        _running,
        _join,
        _join,
        _union,
        _names,
    ]
    return random.choice(makers)(random, made)


def _schema(made: Pipeline) -> pa.Schema:
    return _streams(made)[0].schema


def _columns(random: Random, made: Pipeline) -> tuple[Any, ...]:
    schema = _schema(made)
    name = random.choice(
        ["x", "y", "X", "a", "A", *(name for name in schema.names if name != "ts")]
    )
    made_of = expression(random, schema)
    return f"with_columns({name}={made_of!r})", lambda left, _: left.with_columns(**{name: made_of})


def _filter(random: Random, made: Pipeline) -> tuple[Any, ...]:
    schema = _schema(made)
    asked = question(random, schema)
    if random.random() < 0.5:
        asked = asked | col(random.choice(schema.names)).is_valid()
    return f"filter({asked!r})", lambda left, _: left.filter(asked)


def _time(random: Random, made: Pipeline) -> tuple[Any, ...]:
    names = _schema(made).names
    name = random.choice(
        [name for name in names if name in ("ts", "window_start", "ts_right")] or names
    )
    return f"with_event_time({name})", lambda left, _: left.with_event_time(name)


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
    return made


def _timed(stream: ps.Stream) -> ps.Stream:
    names = stream.schema.names
    return stream.with_event_time("ts") if "ts" in names else stream


def _window(random: Random, made: Pipeline) -> tuple[Any, ...]:
    schema = _schema(made)
    keys, window, aggregates = (
        _keys(random, schema),
        random.choice(WINDOWS),
        _aggregates(random, schema),
    )
    text = f"key_by{keys}.window({window}).aggregate({aggregates})"
    return text, lambda left, _: _timed(left).key_by(*keys).window(window).aggregate(**aggregates)


def _window_all(random: Random, made: Pipeline) -> tuple[Any, ...]:
    schema = _schema(made)
    window, aggregates = random.choice(WINDOWS), _aggregates(random, schema)
    return (
        f"window_all({window}).aggregate({aggregates})",
        lambda left, _: _timed(left).window_all(window).aggregate(**aggregates),
    )


def _running(random: Random, made: Pipeline) -> tuple[Any, ...]:
    schema = _schema(made)
    keys, aggregates = _keys(random, schema), _aggregates(random, schema)
    return (
        f"key_by{keys}.aggregate({aggregates})",
        lambda left, _: left.key_by(*keys).aggregate(**aggregates),
        keys,
    )


def _join(random: Random, made: Pipeline) -> tuple[Any, ...]:
    left, right = _streams(made)
    common = [name for name in left.schema.names if name in right.schema.names] or ["a"]
    keys = random.sample(common, min(len(common), random.choice([1, 1, 2])))
    if random.random() < 0.5:
        given: dict[str, Any] = {
            "within": random.choice([("-5s", "7s"), ("0s", "0s"), ("-1d", "1ms"), ("3s", "9s")])
        }
    else:
        given = {
            "window": random.choice(WINDOWS),
            "how": random.choice(["inner", "left", "right", "full"]),
        }
    return f"join({keys}, {given})", lambda one, two: _timed(one).join(
        _timed(two), on=keys, **given
    )


def _union(random: Random, made: Pipeline) -> tuple[Any, ...]:
    schema = _schema(made)
    asked = question(random, schema, 1)
    if random.random() < 0.5:
        return f"union(self.filter({asked!r}))", lambda left, _: left.union(left.filter(asked))
    names = schema.names
    return "union(right)", lambda left, right: left.union(right.select(*names))


def _names(random: Random, made: Pipeline) -> tuple[Any, ...]:
    names = _schema(made).names
    chosen = random.sample(names, random.randint(1, len(names)))
    if random.random() < 0.4:
        return f"rename({chosen[0]}=odd)", lambda left, _: left.rename(**{chosen[0]: "a.b `c`"})
    if random.random() < 0.5 and "ts" in chosen and len(chosen) > 2:
        chosen.remove("ts")
    return f"select({chosen})", lambda left, _: left.select(*chosen)
