"""``KeyedBatchFunction``: state of many keys at once, against the same done row by row."""

from __future__ import annotations

import datetime as dt
import math
import struct
from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

import penstock as ps
import penstock.testing as pt
from penstock.errors import TaskFailure
from penstock.storage.codec import StateError
from tests.support.examples import examples
from tests.support.process_specs import rows, run_process

COUNTED = pa.schema([("user", pa.int64()), ("n", pa.int64())])


class Counting(ps.KeyedBatchFunction):
    """Per distinct key of a batch: how many rows there have been."""

    count = ps.ValueState("count", pa.int64(), default=0)

    def process_batch(self, keys: pa.Array, batch: pa.RecordBatch, out: ps.BatchCollector) -> None:
        assert batch.schema.names == ["user", "n"]
        counted = pc.value_counts(keys)
        distinct, new = counted.field("values"), counted.field("counts")
        counts = pc.add(self.count.get_many(distinct), new)
        self.count.put_many(distinct, counts)
        first = pc.index_in(distinct, value_set=keys)
        out.emit(pa.record_batch([distinct, counts], names=["user", "n"]), first)


@examples(30)
@given(
    batches=st.lists(
        st.lists(
            st.tuples(st.none() | st.integers(0, 3), st.just(0), st.integers(0, 99)), min_size=1
        ),
        max_size=5,
    )
)
def test_state_of_many_keys(batches: list[Any]) -> None:
    harness = run_process(Counting(), output=COUNTED)
    counts = dict[Any, int]()
    for batch in batches:
        harness.push(rows(*batch))
        first: dict[Any, int] = {}
        for user, _, time_ms in batch:
            counts[user] = counts.get(user, 0) + 1
            first.setdefault(user, time_ms)
        found = {tuple(row.values()) for row in harness.take_rows(event_time=True)}
        assert found == {(user, counts[user], time_ms) for user, time_ms in first.items()}
        harness = run_process(
            Counting(), output=COUNTED, harness={"restored": [harness.snapshot()]}
        )


class Scripted(ps.KeyedBatchFunction):
    number = ps.ValueState("number", pa.int64())
    log = ps.ListState("log", pa.string())
    hits = ps.MapState("hits", pa.string(), pa.int64())
    sums = ps.ReducingState("sums", pa.int64(), lambda a, b: a + b)
    mean = ps.AggregatingState("mean", "mean")
    plain = ps.ValueState("plain")

    def __init__(self, step: Any) -> None:
        self.step = step

    def process_batch(self, keys: pa.Array, batch: pa.RecordBatch, out: ps.BatchCollector) -> None:
        texts = self.step(self, keys, batch)
        out.emit(
            pa.record_batch([batch.column("user"), pa.array(texts, pa.string())], ["user", "text"])
        )


def step(function: Any, batch: pa.RecordBatch, **spec: Any) -> list[str]:
    harness = run_process(Scripted(function), **spec)
    harness.push(batch)
    return [row["text"] for row in harness.rows()]


def test_every_kind_of_state() -> None:
    def work(s: Any, keys: pa.Array, batch: pa.RecordBatch) -> Any:
        n = batch.column("n")
        s.number.put_many(keys, n)  # the last of equal keys counts
        s.sums.add_many(keys, n)
        s.mean.add_many(keys, n)
        distinct = keys.unique()
        s.log.put_many(distinct, pa.array([["a"], None], pa.list_(pa.string())))
        s.hits.put_many(distinct, [{"k": 2}, None])
        s.hits.put_many(distinct, [None, [("k", 3)]])
        found = [
            state.get_many(distinct).to_pylist()
            for state in (s.number, s.sums, s.mean, s.log, s.hits)
        ]
        s.number.put_many(distinct, pa.array([None, 4], pa.int64()))
        return [repr(found), repr(s.number.get_many(keys).to_pylist()), ""]

    texts = step(work, rows((1, 5, 0), (2, 6, 0), (1, 8, 0)))
    assert texts[0] == "[[8, 6], [13, 6], [6.5, 6.0], [['a'], None], [None, [('k', 3)]]]"
    assert texts[1] == "[None, 4, None]"


MAPS = pa.map_(pa.string(), pa.int64())


class Mapped(ps.KeyedBatchFunction):
    """Puts arrays of nested values into states of their type, and gives what is there then."""

    def __init__(self, given: pa.Array | list[Any], type_: pa.DataType) -> None:
        self.given = given
        self.list = pa.ListArray.from_arrays([0, 1], pa.array(given, type_))
        self.value = ps.ValueState("value", type_)
        self.items = ps.ListState("items", type_)

    def process_batch(self, keys: pa.Array, batch: pa.RecordBatch, out: ps.BatchCollector) -> None:
        self.value.put_many(keys, self.given)
        self.items.put_many(keys, self.list)
        lists = self.items.get_many(keys)
        found = [self.value.get_many(keys).to_pylist(), lists.flatten().to_pylist()]
        out.emit(pa.record_batch([keys, [repr(found)]], ["user", "text"]))


@pytest.mark.parametrize(
    ("given", "type_"),
    [
        (pa.array([[("x", 1)]], MAPS), MAPS),
        ([{"x": 1}], MAPS),
        ([[("x", 1)]], MAPS),
        (pa.array([{"a": [("x", 1)]}], pa.struct([("a", MAPS)])), pa.struct([("a", MAPS)])),
        (pa.array([[[("x", 1)]]], pa.list_(MAPS)), pa.list_(MAPS)),
    ],
    ids=str,
)
def test_maps_of_columns_are_put_into_state(given: Any, type_: pa.DataType) -> None:
    harness = run_process(Mapped(given, type_))
    harness.push(rows((1, 5, 0)))
    expected = pa.array(given, type_).to_pylist()
    assert harness.rows() == [{"user": 1, "text": repr([expected, expected])}]


NS = pa.timestamp("ns")


@pytest.mark.parametrize(
    "type_",
    [
        NS,
        pa.timestamp("ns", "UTC"),
        pa.timestamp("ns", "Europe/Berlin"),
        pa.duration("ns"),
        pa.time64("ns"),
        pa.list_(NS),
        pa.struct([("a", pa.duration("ns"))]),
        pa.map_(pa.string(), NS),
    ],
    ids=str,
)
def test_nanoseconds_are_kept_or_refused(type_: pa.DataType) -> None:
    def array(nanoseconds: int) -> pa.Array:
        numbers = pa.array([nanoseconds])
        if pa.types.is_map(type_):
            return pa.MapArray.from_arrays([0, 1], ["x"], numbers.view(NS))
        if pa.types.is_list(type_):
            return pa.ListArray.from_arrays([0, 1], numbers.view(NS))
        if pa.types.is_struct(type_):
            return pa.StructArray.from_arrays([numbers.view(type_[0].type)], ["a"])
        return numbers.view(type_)

    harness = run_process(Mapped(array(123_456_000), type_))
    harness.push(rows((1, 5, 0)))
    assert "123456" in harness.rows()[0]["text"]
    message = r"put_many\(\): a .* has more digits than Python's .*123456789"
    with pytest.raises(TaskFailure, match=message):
        run_process(Mapped(array(123_456_789), type_)).push(rows((1, 5, 0)))


@pytest.mark.parametrize(
    ("given", "type_", "message"),
    [
        (dt.datetime(2020, 1, 1, 0, 0, 0, 1), pa.timestamp("ms"), "no whole number of ms"),  # noqa: DTZ001
        (dt.timedelta(microseconds=1), pa.duration("s"), "no whole number of s"),
        (dt.time(0, 0, 0, 1), pa.time32("ms"), "no whole number of ms"),
        (dt.datetime(2020, 1, 1, 5), pa.date32(), r"call .date\(\)"),  # noqa: DTZ001
        ([dt.timedelta(microseconds=1)], pa.list_(pa.duration("ms")), "no whole number of ms"),
        (pd.Timestamp(123_456_789), NS, "no whole number of us"),
        (pd.Timestamp(123_456_789, tz="UTC"), pa.timestamp("ns", "UTC"), "no whole number of us"),
        (pd.Timedelta(123_456_789), pa.duration("ns"), "no whole number of us"),
    ],
)
def test_python_values_are_not_cut_either(given: Any, type_: pa.DataType, message: str) -> None:
    with pytest.raises(TaskFailure, match=message):
        run_process(Mapped([given], type_)).push(rows((1, 5, 0)))


class Texts(ps.AggregateFunction):
    """What it was given, as text."""

    def create_accumulator(self) -> str:
        return ""

    def add(self, accumulator: str, value: Any) -> str:
        return f"{accumulator}{value!r};"

    def merge(self, accumulator: str, other: str) -> str:
        return accumulator + other

    def result(self, accumulator: str) -> str:
        return accumulator


class Adding(ps.KeyedBatchFunction):
    """Puts values into states without a type, many at once."""

    given = ps.AggregatingState("given", Texts())
    plain = ps.ValueState("plain")

    def process_batch(self, keys: pa.Array, batch: pa.RecordBatch, out: ps.BatchCollector) -> None:
        self.given.add_many(keys, [1, 2.5, {"a": 1}, {"b": (2,)}])
        self.given.add_many(keys.slice(0, 1), iter([None]))
        self.plain.put_many(keys, [1, {"a"}, "b", None])
        out.emit(pa.record_batch([keys, self.given.get_many(keys)], ["user", "text"]))


def test_values_of_no_type_are_added_as_they_are() -> None:
    harness = run_process(Adding())
    harness.push(rows((1, 0, 0), (2, 0, 0), (1, 0, 0), (2, 0, 0)))
    texts = {row["user"]: row["text"] for row in harness.rows()}
    assert texts == {1: "1;{'a': 1};None;", 2: "2.5;{'b': (2,)};"}


def test_what_iterating_gives_is_taken_for_keys_and_values() -> None:
    def work(s: Any, keys: pa.Array, batch: pa.RecordBatch) -> Any:
        s.number.put_many(list(keys), list(pa.array([5, None])))
        return map(str, s.number.get_many(np.array([2, 1])).to_pylist())

    assert step(work, rows((1, 0, 0), (2, 0, 0))) == ["None", "5"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([{"user": 1, "n": 5.5}], "5.5 is no int64"),
        ([(1, 5)], "tuple indices"),
        ([{"user": 1}], "'n'"),
        (pa.array([{"user": 1, "n": 5.5}]), "5.5"),
        (pa.array([{"user": 1, "n": 5, "more": 1}]), "other columns"),
        (pa.array([5]), "other columns"),
        (pa.array([{"user": 1, "n": dt.datetime(2020, 1, 1)}]), "'n'"),  # noqa: DTZ001
    ],
)
def test_keys_of_several_columns_are_not_cut(asked: list[Any], message: str) -> None:
    with pytest.raises(TaskFailure, match=message):
        step(lambda s, k, b: s.number.get_many(asked), rows((1, 5, 0)), keys=("user", "n"))


def test_keys_of_several_columns_are_structs() -> None:
    def work(s: Any, keys: pa.Array, batch: pa.RecordBatch) -> Any:
        assert keys.type.names == ["user", "n"]
        s.number.put_many(keys, pa.array([1, 2, 3]))
        return map(str, s.number.get_many(keys.take(pa.array([1, 0, 2]))).to_pylist())

    texts = step(work, rows((1, 5, 0), (2, 6, 0), (1, 5, 0)), keys=("user", "n"))
    assert texts == ["2", "3", "3"]


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda s, k, b: s.number.get_many(pa.array([99])), "the key 99 is not among the keys"),
        (lambda s, k, b: s.plain.get_many(k), r"'plain': get_many\(\) gives an Arrow array"),
        (lambda s, k, b: s.number.put_many(k, pa.array([1, 2])), "got 1 keys and 2 values"),
        (lambda s, k, b: s.number.get_many([1.5]), r"got keys \[1.5\], .* 1.5 is no int64"),
        (lambda s, k, b: s.number.get_many(np.array([1.5])), "without loss: Float value 1.5"),
        (lambda s, k, b: s.number.get_many(1), "got keys 1, and those of this batch are int64"),
        (lambda s, k, b: s.number.put_many(k, pa.array(["x"])), r"holds int64, got 'x'"),
        (lambda s, k, b: s.number.put_many(k, [1.5]), r"holds int64, got 1.5 \(float\)"),
        (lambda s, k, b: s.number.put_many(k, iter([True])), r"holds int64, got True"),
        (lambda s, k, b: s.number.put_many(k, np.array([1.5])), "without loss: Float value 1.5"),
        (
            lambda s, k, b: s.number.put_many(k, {1: 5}),
            r"a value for each key, in order, got {1: 5}",
        ),
        (lambda s, k, b: s.number.put_many(k, 5), r"a value for each key, in order, got 5"),
        (lambda s, k, b: s.sums.add_many(k, [1.5]), r"holds int64, got 1.5 \(float\)"),
        (
            lambda s, k, b: s.log.put_many(k, ["ab"]),
            r"put_many\(\) takes a list of items, got 'ab'",
        ),
        (
            lambda s, k, b: s.hits.put_many(k, ["ab"]),
            r"takes maps, in which 'ab' is no dict or list",
        ),
        (
            lambda s, k, b: s.hits.put_many(k, [["ab"]]),
            r"takes maps, in which .* is no dict or list",
        ),
        (lambda s, k, b: s.number.value(), r"none in process_batch\(\): use get_many\(\)"),
    ],
)
def test_wrong_use_is_an_error(work: Any, message: str) -> None:
    with pytest.raises(TaskFailure, match=message):
        step(work, rows((1, 5, 0)))


class Emitting(ps.KeyedBatchFunction):
    def __init__(self, emit: Any) -> None:
        self.emit = emit

    def process_batch(self, keys: pa.Array, batch: pa.RecordBatch, out: ps.BatchCollector) -> None:
        self.emit(out, batch)


@pytest.mark.parametrize(
    ("emit", "message"),
    [
        (lambda out, b: out.emit(b.slice(0, 1)), r"emitted 1 rows for 2, and event time is needed"),
        (lambda out, b: out.emit(b.slice(0, 1), [0, 1]), "named 2 rows of the input"),
        (lambda out, b: out.emit(b, [0, 7]), r"with rows=\[0, 7\]"),
        (lambda out, b: out.emit(b, np.array([True, True])), "they are bool, and must be integers"),
        (lambda out, b: out.emit(b, [0, 1.5]), "they are double, and must be integers"),
        (lambda out, b: out.emit(b, [0, None]), "rows= that has a null in it"),
        (lambda out, b: out.emit({"user": 1}), "takes a pyarrow.RecordBatch, got dict"),
        (lambda out, b: out.emit(b.rename_columns(["a", "b"])), "returned the columns a, b"),
    ],
)
def test_batches_that_do_not_fit(emit: Any, message: str) -> None:
    with pytest.raises(TaskFailure, match=message):
        run_process(Emitting(emit), output=COUNTED).push(rows((1, 5, 0), (2, 6, 1)))


def test_batches_tables_and_side_outputs() -> None:
    def emit(out: ps.BatchCollector, batch: pa.RecordBatch) -> None:
        out.emit(batch)
        out.emit(pa.table(batch.slice(1)), pa.array([1]))
        out.side("aside", batch.slice(0, 1))

    harness = run_process(Emitting(emit), output=COUNTED)
    harness.push(rows((1, 5, 10), (2, 6, 11)))
    assert [tuple(row.values()) for row in harness.rows(event_time=True)] == [
        (1, 5, 10),
        (2, 6, 11),
        (2, 6, 11),
    ]
    assert harness.side("aside") == [{"user": 1, "n": 5}]


def test_bad_batches_go_the_way_of_the_policy() -> None:
    def emit(out: ps.BatchCollector, batch: pa.RecordBatch) -> None:
        out.emit(batch)
        raise ValueError("odd")

    harness = run_process(Emitting(emit), output=COUNTED, on_error="errors")
    harness.push(rows((1, 5, 10), (2, 6, 11)))
    assert not harness.rows()
    assert [row["n"] for row in harness.side("errors")] == [5, 6]


class Widths(ps.KeyedBatchFunction):
    """Puts arrays of the state's own type and of others, asked for by lists that change in between."""

    own = ps.ValueState("own", pa.float32())
    text = ps.ValueState("text", pa.string())

    def process_batch(self, keys: pa.Array, batch: pa.RecordBatch, out: ps.BatchCollector) -> None:
        asked = [7]
        self.own.put_many(asked, pa.array([0.1], pa.float32()))
        asked[0] = 8
        self.own.put_many(asked, [0.2])
        self.text.put_many(pa.array([7, 8, 7]), pa.array(["a", "b", "c"]))
        self.text.put_many(pa.array([8]), pa.array([None], pa.string()))
        with pytest.raises(StateError, match=r"got 1 keys and 2 values"):
            self.own.put_many(pa.array([7]), pa.array([1, 2], pa.float32()))
        names = pa.array([8, 7])
        columns = [names, self.own.get_many(names), self.text.get_many(names)]
        out.emit(pa.record_batch(columns, names=["user", "own", "text"]), [0, 0])


def test_arrays_of_the_type_and_others_are_put_alike() -> None:
    schema = pa.schema([("user", pa.int64()), ("own", pa.float32()), ("text", pa.string())])
    harness = run_process(Widths(), output=schema)
    harness.push(rows((7, 0, 0), (8, 0, 0)))
    assert harness.take_rows() == [
        {"user": 8, "own": pa.scalar(0.2, pa.float32()).as_py(), "text": None},
        {"user": 7, "own": pa.scalar(0.1, pa.float32()).as_py(), "text": "c"},
    ]


OTHER_NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]
FLOAT_KEYS = [-0.0, 0.0, math.nan, None, OTHER_NAN, 1.5, -0.0]


class CountingFloats(ps.KeyedBatchFunction):
    """As ``Counting``; asks for the keys once more in another form."""

    count = ps.ValueState("count", pa.int64(), default=0)

    def process_batch(self, keys: pa.Array, batch: pa.RecordBatch, out: ps.BatchCollector) -> None:
        counted = pc.value_counts(keys)
        distinct, new = counted.field("values"), counted.field("counts")
        self.count.put_many(distinct, pc.add(self.count.get_many(distinct), new))
        negative = pc.negate(distinct)
        asked = pc.if_else(pc.equal(negative, 0), negative, distinct)
        out.emit(pa.record_batch([distinct, self.count.get_many(asked)], names=["key", "n"]))


class KeyTexts(ps.KeyedProcessFunction):
    def process(self, row: ps.Row, ctx: Any, out: Any) -> None:
        out.emit(key=repr(ctx.key))


class WindowKeyTexts(ps.WindowFunction):
    @override
    def process(self, key: Any, window: Any, rows: Any, out: Any) -> None:
        out.emit(key=repr(key), n=len(rows))


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_equal_floats_are_handed_out_as_one_key(kind: str) -> None:
    rows_ = pa.table({"key": pa.array(FLOAT_KEYS, pa.float64()).cast(kind)})
    texts = {"key": str}

    def pushed(build: Any) -> list[Any]:
        with pt.harness(build, schema=rows_.schema) as harness:
            for _ in range(2):
                harness.push_many(rows_, event_times=[0] * len(FLOAT_KEYS))
            harness.end()
            return [tuple(row.values()) for row in harness.output]

    counted = pushed(
        lambda s: s.key_by("key").process(CountingFloats(), schema={"key": kind, "n": int})
    )
    assert repr(counted[4:]) == "[(0.0, 6), (nan, 4), (None, 2), (1.5, 2)]"
    keys = pushed(lambda s: s.key_by("key").process(KeyTexts(), schema=texts))
    assert keys == [(text,) for text in ["0.0", "0.0", "nan", "None", "nan", "1.5", "0.0"]] * 2
    windowed = pushed(
        lambda s: (
            s.key_by("key")
            .window(ps.tumbling(10))
            .process(WindowKeyTexts(), schema={**texts, "n": int})
        )
    )
    assert sorted(windowed) == [("0.0", 6), ("1.5", 2), ("None", 2), ("nan", 4)]
    joined = pushed(lambda s: s.join(s, on="key", within=(0, 0)))
    assert Counter(map(repr, joined)) == {"(0.0,)": 36, "(nan,)": 16, "(1.5,)": 4}
