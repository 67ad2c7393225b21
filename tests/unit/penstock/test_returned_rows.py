"""Aim: rows that a function yields or returns come out, and nothing that it returns is lost without a word.

Method: every kind of function, each with the same results given out in every way there is, through the harness.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typing_extensions import override

import penstock as ps
import penstock.testing as pt

SCHEMA = {"k": "string", "n": "int64"}


def emits(row: Any, out: Any) -> Any:
    out.emit(k=row["k"], n=row["n"])
    out.emit({"k": row["k"], "n": -row["n"]})
    return None


def both(row: Any) -> list[Any]:
    return [{"k": row["k"], "n": row["n"]}, (row["k"], -row["n"])]


def yields(row: Any, out: Any) -> Any:
    yield from both(row)


def mixes(row: Any, out: Any) -> Any:
    out.emit(k=row["k"], n=row["n"])
    yield {"k": row["k"], "n": -row["n"]}


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "emit": emits,
    "list": lambda row, out: both(row),
    "yield": yields,
    "both": mixes,
    "iterator": lambda row, out: iter(both(row)),
    "map": lambda row, out: map(
        dict, [{"k": row["k"], "n": row["n"]}, {"k": row["k"], "n": -row["n"]}]
    ),
}


async def awaits(row: Any, out: Any) -> Any:
    return both(row)


WRONG: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "dict": (lambda row, out: {"k": "a", "n": 1}, r"returned \{'k': 'a', 'n': 1\} \(dict\)"),
    "int": (lambda row, out: 0, r"returned 0 \(int\)"),
    "bool": (lambda row, out: False, r"returned False \(bool\)"),
    "row": (lambda row, out: row, r"returned .*"),
    "tuple": (lambda row, out: ("a", 1), r"\(tuple\)"),
    "text": (lambda row, out: "abc", r"returned 'abc' \(str\)"),
    "set": (lambda row, out: {1}, r"\(set\)"),
    "coroutine": (awaits, "write def, not async def"),
    "list of no rows": (lambda row, out: [1], "does not fit"),
    "row without a column": (lambda row, out: [{"k": "a"}], "no column n"),
    "emitted without a column": (lambda row, out: out.emit(k="a"), "no column n"),
}


class Way:
    def __init__(self, way: Callable[[Any, Any], Any]) -> None:
        self.way = way


class Plain(Way, ps.ProcessFunction):
    @override
    def process(self, row: Any, ctx: Any, out: Any) -> Any:
        return self.way(row, out)


class Keyed(Way, ps.KeyedProcessFunction):
    @override
    def process(self, row: Any, ctx: Any, out: Any) -> Any:
        return self.way(row, out)


class Timed(Way, ps.KeyedProcessFunction):
    last = ps.ValueState("last", pa.int64())

    @override
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.last.update(row.n)
        ctx.timers.event_time(10)

    @override
    def on_timer(self, timestamp: int, ctx: Any, out: Any) -> Any:
        return self.way({"k": ctx.key, "n": self.last.value()}, out)


class Broadcast(Way, ps.BroadcastProcessFunction):
    @override
    def process(self, row: Any, ctx: Any, out: Any) -> Any:
        return self.way(row, out)

    @override
    def process_broadcast(self, row: Any, ctx: Any, out: Any) -> Any:
        return self.way(row, out)


class KeyedBroadcast(Broadcast, ps.KeyedBroadcastProcessFunction):
    pass


class Co(Way, ps.CoProcessFunction):
    @override
    def process_left(self, row: Any, ctx: Any, out: Any) -> Any:
        return self.way(row, out)

    @override
    def process_right(self, row: Any, ctx: Any, out: Any) -> Any:
        return self.way(row, out)


class KeyedCo(Co, ps.KeyedCoProcessFunction):
    pass


class Windowed(Way, ps.WindowFunction):
    @override
    def process(self, key: Any, window: Any, rows: Any, out: Any) -> Any:
        return self.way(rows[0], out)


KINDS = {
    Plain: {},
    Keyed: {"keys": ["k"]},
    Timed: {"keys": ["k"]},
    Broadcast: {},
    KeyedBroadcast: {"keys": ["k"]},
    Co: {},
    KeyedCo: {"keys": ["k"]},
    Windowed: {"keys": ["k"], "window": ps.tumbling("1s")},
}
TWO = (Broadcast, Co)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_out_however_they_are_given(kind: Any, way: str) -> None:
    with pt.harness(kind(WAYS[way]), schema=SCHEMA, output_schema=SCHEMA, **KINDS[kind]) as h:
        h.push({"k": "a", "n": 1}, 0)
        expected = [{"k": "a", "n": 1}, {"k": "a", "n": -1}]
        if issubclass(kind, TWO):
            h.push({"k": "b", "n": 2}, 0, input=1)
            expected += [{"k": "b", "n": 2}, {"k": "b", "n": -2}]
        h.end()
        assert h.output == expected


def _push_and_end(h: pt.Harness) -> None:
    h.push({"k": "a", "n": 1}, 0)
    h.end()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_else_is_returned_fails_with_the_word(kind: Any, case: str) -> None:
    way, words = WRONG[case]
    h = pt.harness(kind(way), schema=SCHEMA, output_schema=SCHEMA, **KINDS[kind])
    with h, pytest.raises(ps.JobFailed, match=words) as failed:
        _push_and_end(h)
    if words.startswith("returned"):
        assert "out.emit(row), yield it, or return a list" in str(failed.value)


def test_event_times_and_policy_are_those_of_emitted_rows() -> None:
    def way(row: Any, out: Any) -> Any:
        yield {"k": row.k, "n": row.n}
        if row.n == 2:
            raise ValueError("two")

    with pt.harness(
        lambda s: s.process(Plain(way), schema=SCHEMA).on_error("bad"), schema=SCHEMA
    ) as h:
        h.push_many([{"k": "a", "n": n} for n in (1, 2, 3)], [5, 6, 7])
        assert h.take(event_time=True) == [(5, {"k": "a", "n": 1}), (7, {"k": "a", "n": 3})]
        (bad,) = h.side("bad")
        assert "two" in bad["error"]


class Batches(ps.KeyedBatchFunction):
    def __init__(self, way: str) -> None:
        self.way = way

    @override
    def process_batch(self, keys: pa.Array, batch: pa.RecordBatch, out: Any) -> Any:
        if self.way == "emit":
            out.emit(batch)
            return None
        if self.way == "list":
            return [batch]
        if self.way == "yield":
            return (each for each in [batch.slice(0, 1), batch.slice(1)])
        return batch


@pytest.mark.parametrize("way", ["emit", "list", "yield"])
def test_batches_come_out_however_they_are_given(way: str) -> None:
    with pt.harness(
        Batches(way), keys=["k"], schema=SCHEMA, output_schema=SCHEMA, event_time=False
    ) as h:
        rows = [{"k": "a", "n": 1}, {"k": "b", "n": 2}]
        h.push_many(rows)
        assert h.output == rows


def test_a_returned_batch_fails_with_the_word() -> None:
    h = pt.harness(Batches("return"), keys=["k"], schema=SCHEMA, output_schema=SCHEMA)
    with h, pytest.raises(ps.JobFailed, match=r"\(RecordBatch\): emit each batch with"):
        h.push({"k": "a", "n": 1})


@dataclass
class Found:
    k: str
    n: int


class Annotated(ps.KeyedProcessFunction):
    @override
    def process(self, row: Any, ctx: Any, out: Any) -> Iterator[Found]:
        yield Found(row.k, row.n)


def test_the_columns_may_be_those_of_what_is_yielded() -> None:
    with pt.harness(Annotated(), keys=["k"], schema=SCHEMA) as h:
        h.push({"k": "a", "n": 1})
        assert h.output == [{"k": "a", "n": 1}]


# ---------------------------------------------------------------- what nobody would run


class Opens(ps.ProcessFunction):
    @override
    def open(self, ctx: Any) -> Any:
        yield 1

    @override
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        pass


class Snaps(ps.ProcessFunction):
    @override
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        pass

    @override
    async def snapshot(self, ctx: Any) -> None:  # type: ignore[override]
        pass


class Visits(ps.KeyedBroadcastProcessFunction):
    last = ps.ValueState("last", pa.int64())

    @override
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.last.update(row.n)

    @override
    def process_broadcast(self, row: Any, ctx: Any, out: Any) -> None:
        def visit(key: Any, state: Any) -> Iterator[int]:
            yield state.value()

        ctx.apply_to_keyed_state(self.last, visit)


def test_a_hook_of_which_no_line_would_run_fails() -> None:
    with pytest.raises(ps.JobFailed, match="open is a generator, of which no line would run"):
        pt.harness(Opens(), schema=SCHEMA, output_schema=SCHEMA)
    snaps = pt.harness(Snaps(), schema=SCHEMA, output_schema=SCHEMA)
    with snaps, pytest.raises(ps.JobFailed, match="snapshot is a coroutine, which nobody awaits"):
        snaps.snapshot()
    with pt.harness(Visits(), keys=["k"], schema=SCHEMA, output_schema=SCHEMA) as h:
        h.push({"k": "a", "n": 1})
        with pytest.raises(ps.JobFailed, match="is a generator"):
            h.push({"k": "a", "n": 1}, input=1)


def test_a_predicate_that_yields_does_not_keep_every_row() -> None:
    def predicate(row: Any) -> Any:
        yield row.n > 1

    h = pt.harness(lambda s: s.filter(predicate), schema=SCHEMA)
    with h, pytest.raises(ps.JobFailed, match="the predicate is a generator"):
        h.push({"k": "a", "n": 1})


def test_an_asynchronous_generator_is_told_to_be_a_plain_one() -> None:
    class Asynchronous(ps.ProcessFunction):
        async def process(self, row: Any, ctx: Any, out: Any) -> Any:
            yield {"k": row.k, "n": row.n}

    h = pt.harness(Asynchronous(), schema=SCHEMA, output_schema=SCHEMA)
    with h, pytest.raises(ps.JobFailed, match=r"an async generator.*: write def, not async def"):
        h.push({"k": "a", "n": 1})


async def asynchronous(row: Any) -> Any:
    return row


async def asynchronous_rows(row: Any) -> Any:
    yield row


class AsynchronousMap(ps.MapFunction):
    async def __call__(self, row: Any) -> Any:  # type: ignore[override]
        return row


@pytest.mark.parametrize("call", ["map", "flat_map", "map_batches"])
@pytest.mark.parametrize(
    "function", [asynchronous, asynchronous_rows, AsynchronousMap(), partial(asynchronous)]
)
def test_asynchronous_functions_are_refused_with_the_remedy(call: str, function: Any) -> None:
    stream = ps.Environment().from_rows([{"k": "a", "n": 1}])
    with pytest.raises(ps.JobRejected, match=rf"^{call}: .*async function.*write def, not async"):
        getattr(stream, call)(function, schema=SCHEMA)


def test_a_coroutine_in_place_of_a_row_is_told_with_the_remedy() -> None:
    h = pt.harness(
        lambda s: s.map(lambda row: asynchronous(row.as_dict()), schema=SCHEMA), schema=SCHEMA
    )
    with h, pytest.raises(ps.JobFailed, match="write def, not async def"):
        h.push({"k": "a", "n": 1})


@pytest.mark.parametrize("kind", ["duration[ms]", "bool", "binary"])
def test_an_event_time_of_a_type_that_no_cast_makes_one(kind: str) -> None:
    with pytest.raises(ps.JobRejected, match="give another column") as told:
        ps.Environment().from_rows([], schema={"t": kind}).with_event_time("t")
    assert "cast" not in str(told.value)


@pytest.mark.parametrize("pushes", [1, 2])
def test_what_a_function_changes_within_a_value_is_in_the_row_that_it_gives_back(
    pushes: int,
) -> None:
    """The second batch has its columns decoded before they are asked for."""

    def tagged(row: Any) -> Any:
        row.tags.append(row.n)
        row.more["of"] = row.n
        return row

    schema = pa.schema(
        {
            "n": pa.int64(),
            "tags": pa.list_(pa.int64()),
            "more": pa.struct({"of": pa.int64()}),
        }
    )
    with pt.harness(lambda s: s.map(tagged, schema=schema), schema=schema) as h:
        for _ in range(pushes):
            h.push_many([{"n": n, "tags": [], "more": {"of": 0}} for n in range(3)])
        assert h.output == [{"n": n, "tags": [n], "more": {"of": n}} for n in range(3)] * pushes


class Again:
    """Gives one dict, list or record again and again."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {"user": "a", "n": 0}
        self.numbers: list[int] = []
        self.record = Record("a", 0)

    def one(self, row: Any) -> Any:
        self.row["n"] = row.n
        return self.row

    def grown(self, row: Any) -> Any:
        self.numbers.append(row.n)
        return {"numbers": self.numbers}

    def record_of(self, row: Any) -> Any:
        self.record.n = row.n
        return self.record

    def listed(self, row: Any) -> Any:
        return [self.one(row)]

    def listed_grown(self, row: Any) -> Any:
        return [self.grown(row)]

    def three(self, row: Any) -> Any:
        for self.row["n"] in range(row.n, row.n + 3):
            yield self.row


@dataclass
class Record:
    user: str
    n: int


class Emits(ps.ProcessFunction):
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        again = Again()
        for result in again.three(row):
            out.emit(result)
            out.side("aside", result)


class Lists(ps.ProcessFunction):
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        numbers: list[int] = []
        for n in range(2):
            numbers.append(n)
            out.emit(numbers=numbers)
            out.emit({"numbers": numbers})


class Fires(ps.WindowFunction):
    def process(self, key: Any, window: Any, rows: Any, out: Any) -> None:
        again = Again()
        for row in rows:
            out.emit(again.one(row))


N = {"user": "string", "n": "int64"}
NUMBERS = pa.schema([("numbers", pa.list_(pa.int64()))])


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        (lambda s: s.map(Again().one, schema=N), [1, 5]),
        (lambda s: s.map(Again().record_of, schema=N), [1, 5]),
        (lambda s: s.map(Again().grown, schema=NUMBERS), [[1], [1, 5]]),
        (lambda s: s.flat_map(Again().three, schema=N), [1, 2, 3, 5, 6, 7]),
        (lambda s: s.flat_map(Again().listed, schema=N), [1, 5]),
        (lambda s: s.flat_map(Again().listed_grown, schema=NUMBERS), [[1], [1, 5]]),
        (lambda s: s.process(Emits(), schema=N), [1, 2, 3, 5, 6, 7]),
        (lambda s: s.process(Lists(), schema=NUMBERS), [[0], [0], [0, 1], [0, 1]] * 2),
        (lambda s: s.window(ps.tumbling("1s")).process(Fires(), schema=N), [1, 5]),
    ],
)
def test_a_result_is_taken_as_it_is_when_it_is_given(chain: Any, expected: list[Any]) -> None:
    with pt.harness(chain, schema=N) as h:
        h.push_many([{"user": "a", "n": 1}, {"user": "a", "n": 5}], event_times=[1, 2])
        h.end()
        assert [list(row.values())[-1] for row in h.output] == expected


def test_what_goes_to_a_side_output_is_taken_as_it_is_when_it_is_given() -> None:
    with pt.harness(lambda s: s.process(Emits(), schema=N), schema=N) as h:
        h.push_many([{"user": "a", "n": 1}, {"user": "a", "n": 5}], event_times=[1, 2])
        assert [row["n"] for row in h.side("aside")] == [1, 2, 3, 5, 6, 7]


class Uncopied(list[int]):
    """As of an object that holds a lock."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("it cannot be copied")


@dataclass
class Held:
    value: Any


@pytest.mark.parametrize(
    ("kind", "held", "expected"),
    [
        (pa.binary(), bytearray(1), [b"\x01", b"\x05"]),
        (pa.list_(pa.binary()), [bytearray(1)], [[b"\x01"], [b"\x05"]]),
        (pa.list_(pa.int64()), Uncopied([0]), [[1], [5]]),
        (pa.list_(pa.int64()), deque([0]), [[1], [5]]),
        (pa.list_(pa.int64()), np.zeros(1, np.int64), [[1], [5]]),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["map", "columns", "dict", "record"])
def test_values_of_every_kind_are_taken_as_they_are_when_they_are_given(
    kind: pa.DataType, held: Any, expected: list[Any], way: str
) -> None:
    def put(row: Any) -> None:
        changed = held[0] if isinstance(held[0], bytearray) else held
        changed[0] = row.n

    def mapped(row: Any) -> dict[str, Any]:
        put(row)
        return {"value": held}

    class Emitting(ps.ProcessFunction):
        @override
        def process(self, row: Any, ctx: Any, out: Any) -> None:
            put(row)
            match way:
                case "columns":
                    out.emit(value=held)
                case "dict":
                    out.emit({"value": held})
                case "record":
                    out.emit(Held(held))

    schema = pa.schema([("value", kind)])

    def chain(stream: Any) -> Any:
        if way == "map":
            return stream.map(mapped, schema=schema)
        return stream.process(Emitting(), schema=schema)

    with pt.harness(chain, schema=SCHEMA) as h:
        h.push_many([{"k": "a", "n": 1}, {"k": "a", "n": 5}])
        assert [row["value"] for row in h.output] == expected


@pytest.mark.parametrize("name", ["type", "dict", "tuple", "map", "len"])
@pytest.mark.parametrize("way", ["columns", "dict"])
def test_columns_may_have_names_of_what_python_has_built_in(name: str, way: str) -> None:
    class Named(ps.ProcessFunction):
        @override
        def process(self, row: Any, ctx: Any, out: Any) -> None:
            result = {name: row.k, "numbers": [row.n]}
            out.emit(**result) if way == "columns" else out.emit(result)

    schema = pa.schema([(name, pa.string()), *NUMBERS])
    with pt.harness(lambda s: s.process(Named(), schema=schema), schema=SCHEMA) as h:
        h.push({"k": "a", "n": 1})
        assert h.output == [{name: "a", "numbers": [1]}]


def test_rows_of_a_generator_are_taken_as_they_come() -> None:
    row = type("Row", (), {"n": 1})
    read = ps.Environment().from_rows(Again().three(row))
    assert [r["n"] for r in read._source.node.operation.sample(9).to_pylist()] == [1, 2, 3]


TAGS = pa.schema(
    [("n", pa.int64()), ("tags", pa.list_(pa.int64())), ("more", pa.list_(pa.int64()))]
)


class ChangesRows(ps.ProcessFunction):
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        out.emit(row)
        out.side("aside", row)
        row.tags.append(7)
        out.emit(row)
        out.side("aside", row)
        row.tags.append(8)


class ChangesRowsOfWindows(ps.WindowFunction):
    def process(self, key: Any, window: Any, rows: Any, out: Any) -> None:
        for row in rows:
            yield row
            row.tags.append(7)
            yield row
            row.tags.append(8)


class ChangesEarlierRows:
    earlier: Any = None

    def __call__(self, row: Any) -> Any:
        if self.earlier is not None:
            self.earlier.tags.append(8)
        row.tags.append(7)
        self.earlier = row
        return row


def changes_yielded(row: Any) -> Any:
    yield row
    row.tags.append(7)
    yield row
    row.tags.append(8)


@pytest.mark.parametrize("pushes", [1, 3])  # those behind the first have columns decoded beforehand
@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        (lambda s: s.map(ChangesEarlierRows(), schema=TAGS), [[7], [7]]),
        (lambda s: s.flat_map(changes_yielded, schema=TAGS), [[], [7], [], [7]]),
        (lambda s: s.process(ChangesRows(), schema=TAGS), [[], [7], [], [7]]),
        (
            lambda s: s.process(ChangesRows(), schema=TAGS).side_output("aside"),
            [[], [7], [], [7]],
        ),
        (
            lambda s: s.window(ps.count_window(2)).process(ChangesRowsOfWindows(), schema=TAGS),
            [[], [7], [], [7]],
        ),
    ],
    ids=["map", "flat_map", "process", "side", "window"],
)
def test_a_row_that_is_given_whole_is_taken_as_it_is_when_it_is_given(
    chain: Any, expected: list[list[int]], pushes: int
) -> None:
    with pt.harness(chain, schema=TAGS) as h:
        for n in range(pushes):
            h.push_many([{"n": n, "tags": [], "more": [n]}] * 2)
        h.end()
        assert [row["tags"] for row in h.output] == expected * pushes
        assert [row["more"] for row in h.output] == [
            [n] for n in range(pushes) for _ in range(len(expected))
        ]


def test_a_batch_with_a_null_within_a_value_is_refused_with_its_column() -> None:
    inner = [pa.field("a", pa.int64(), nullable=False)]
    schema = pa.schema([("s", pa.struct(inner))])

    def emptied(batch: pa.RecordBatch) -> pa.RecordBatch:
        nulls = pa.nulls(batch.num_rows, pa.int64())
        column = pa.StructArray.from_arrays([nulls], fields=inner)
        return pa.RecordBatch.from_arrays([column], schema=schema)

    h = pt.harness(lambda s: s.map_batches(emptied, schema=schema), schema=schema)
    with h, pytest.raises(ps.JobFailed, match=r"a null within column 's', at 'a'"):
        h.push({"s": {"a": 1}})
