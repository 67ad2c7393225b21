"""``KeyedBatchFunction``: state of many keys at once, against the same done row by row."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import TaskFailure
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


@settings(max_examples=30, deadline=None)
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
        (lambda s, k, b: s.number.put_many(k, pa.array(["x"])), r"holds int64, got 'x'"),
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
