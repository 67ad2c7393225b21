"""``penstock.testing``: clock, snapshots and errors, and what importing it costs others."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
import penstock.testing as pt
from tests.support.examples import examples

USER = {"user": str, "n": int}
BACKENDS = pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])


class Count(ps.KeyedProcessFunction):
    seen = ps.ValueState("seen", pa.int64(), default=0)
    recent = ps.ValueState("recent", pa.int64(), ttl=ps.Ttl("1 min"))
    touched = ps.ValueState("touched", pa.int64(), ttl=ps.Ttl("1 min", update="read_and_write"))
    mine = ps.OperatorListState("mine", pa.int64())
    everybodys = ps.OperatorListState("everybodys", pa.int64(), redistribute="union")

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        if row.n == 13:
            raise ValueError("thirteen")
        self.seen.update(self.seen.value() + row.n)
        self.recent.update(row.n)
        self.touched.update(row.n)
        self.mine.add(row.n)
        self.everybodys.add(row.n)
        ctx.timers.event_time(ctx.timestamp + 100)
        out.emit(user=row.user, n=self.seen.value())

    def on_timer(self, timestamp: int, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(user=ctx.key, n=-timestamp)


def count(**arguments: Any) -> pt.Harness:
    return pt.harness(Count(), keys="user", schema=USER, output_schema=USER, **arguments)


# ------------------------------------------------------------ time


@BACKENDS
def test_ttl_runs_out_as_the_clock_advances_and_looking_does_not_renew_it(backend: Any) -> None:
    with count(backend=backend, now=1_000_000) as h:
        h.push({"user": "a", "n": 5})
        for _ in range(3):
            h.advance("19s")
            assert h.state("recent", key="a") == 5
            assert h.state("touched", key="a") == 5
        h.advance("3s")
        assert h.state("recent", key="a") is None
        assert h.state("touched", key="a") is None
        assert h.state("seen", key="a") == 5


def test_advancing_stops_at_every_timer_on_the_way() -> None:
    class Ticks(ps.KeyedProcessFunction):
        def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
            ctx.timers.processing_time(ctx.now_ms + 10)

        def on_timer(self, timestamp: int, ctx: ps.ProcessContext, out: ps.Collector) -> None:
            out.emit(n=ctx.now_ms)
            ctx.timers.processing_time(timestamp + 10)

    with pt.harness(Ticks(), keys="user", schema=USER, output_schema={"n": int}) as h:
        h.push({"user": "a", "n": 1})
        h.advance(35)
        assert [row["n"] for row in h.output] == [10, 20, 30]
        assert h.timers(domain="processing") == [40]


# ------------------------------------------------------------ snapshots


@BACKENDS
def test_a_snapshot_is_where_another_harness_goes_on(backend: Any) -> None:
    with count(backend=backend) as h:
        h.push_many([{"user": user, "n": 1} for user in "abc"], [10, 20, 30])
        first = h.snapshot()
        h.push({"user": "a", "n": 2}, event_time=40)
        second = h.snapshot()
        h.push({"user": "a", "n": 50})
    with count(backend=backend, restore=first) as h:
        assert h.state("seen", key="a") == 1
    with count(backend=backend, restore=second) as h:
        assert h.state("seen", key="a") == 3
        assert h.timers() == [110, 120, 130, 140]
        assert h.state("mine") == [1, 1, 1, 2]
        h.push({"user": "a", "n": 1}, event_time=0)
        assert h.take() == [{"user": "a", "n": 4}]
        h.watermark(119)
        assert [row["n"] for row in h.output] == [-100, -110]


@BACKENDS
def test_state_is_dealt_out_to_another_parallelism_and_back(backend: Any) -> None:
    users = [f"user-{index}" for index in range(20)]
    rows: list[Any] = [{"user": user, "n": n} for n, user in enumerate(users, start=20)]
    with count(backend=backend) as h:
        h.push_many(rows)
        whole = h.snapshot()
    parts, outputs, mine = [], [], []
    for subtask in range(3):
        with count(backend=backend, restore=whole, subtask=subtask, parallelism=3) as h:
            h.push_many(rows)
            outputs += h.output
            mine.append(h.state("mine"))
            assert len(h.state("everybodys")) == len(rows) + len(h.output)
            parts.append(h.snapshot())
    # Each key was in one subtask, with its state.
    assert sorted(row["n"] for row in outputs) == [2 * row["n"] for row in rows]
    assert sorted(n for own in mine for n in own) == sorted([row["n"] for row in rows] * 2)
    with count(backend=backend, restore=parts) as h:
        assert [h.state("seen", key=user) for user in users] == [2 * row["n"] for row in rows]
        assert len(h.timers()) == len(users)


def test_windows_in_the_making_survive_too_with_the_operators_of_a_chain() -> None:
    def chain(stream: ps.Stream) -> ps.Stream:
        return stream.key_by("user").window(ps.session("10ms")).aggregate(n=ps.sum("n"))

    with pt.harness(chain, schema=USER) as h:
        h.push({"user": "a", "n": 1}, event_time=5)
        snapshot = h.snapshot()
    with pt.harness(chain, schema=USER, restore=snapshot) as h:
        h.push({"user": "a", "n": 2}, event_time=9)
        h.watermark(18)
        assert [row["n"] for row in h.output] == [3]


def test_snapshots_may_be_taken_of_two_inputs_and_behind_the_end() -> None:
    with pt.harness(
        lambda a, b: a.union(b).key_by("user").aggregate(n=ps.sum("n")), schema=USER
    ) as h:
        h.push({"user": "a", "n": 1})
        h.push({"user": "a", "n": 1}, input=1)
        h.snapshot()
        h.end()
        h.snapshot()
        with pytest.raises(ps.JobRejected, match="the input has ended"):
            h.push({"user": "a", "n": 1})


@examples(20)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(20, 99)), max_size=12),
    st.integers(0, 12),
)
def test_going_on_from_any_snapshot_gives_what_going_on_gives(
    rows: list[tuple[str, int]], cut: int
) -> None:
    def push(h: pt.Harness, part: list[tuple[str, int]]) -> None:
        for user, n in part:
            h.push({"user": user, "n": n}, event_time=n)

    with count() as h:
        push(h, rows[:cut])
        h.take()
        snapshot = h.snapshot()
        push(h, rows[cut:])
        h.end()
        expected = h.take(event_time=True)
    with count(restore=snapshot) as h:
        push(h, rows[cut:])
        h.end()
        assert h.take(event_time=True) == expected


# ------------------------------------------------------------ errors


def test_a_failure_is_what_the_client_of_a_cluster_sees() -> None:
    with count() as h:
        h.push({"user": "a", "n": 1})
        with pytest.raises(ps.JobFailed) as caught:
            h.push({"user": "b", "n": 13})
        failed = caught.value
        assert failed.cause == "TaskFailure"
        assert failed.operator == "Count"
        assert failed.subtask_index == 0
        assert "'n': 13" in failed.row or "n=13" in failed.row
        assert 'raise ValueError("thirteen")' in failed.user_traceback
        assert "ValueError: thirteen" in str(failed)
        assert str(failed).startswith("job 'test' (test) failed: TaskFailure: ")
        with pytest.raises(ps.JobFailed, match="thirteen"):
            h.push({"user": "a", "n": 1})
        with pytest.raises(ps.JobFailed, match="thirteen"):
            h.state("seen", key="a")


def test_what_open_raises_comes_out_of_harness() -> None:
    class Closed(ps.MapFunction):
        def open(self, ctx: ps.FunctionContext) -> None:
            raise OSError("no model")

        def __call__(self, row: Any) -> Any:
            return row

    with pytest.raises(ps.JobFailed, match="no model"):
        pt.harness(Closed(), schema=USER, output_schema=USER)


def test_state_is_checked_when_it_is_written() -> None:
    class Wrong(ps.KeyedProcessFunction):
        seen = ps.ValueState("seen", pa.int64())

        def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
            self.seen.update("text")

    with (
        pt.harness(Wrong(), keys="user", schema=USER, output_schema=USER) as h,
        pytest.raises(ps.JobFailed, match="state 'seen' holds int64, got 'text'"),
    ):
        h.push({"user": "a", "n": 1})


def test_a_parameter_of_a_chain_that_has_a_default_is_no_stream() -> None:
    """It was given one, and failed with a TypeError, or computed with it."""
    with pt.harness(lambda stream, least=2: stream.filter(ps.col("n") >= least), schema=USER) as h:
        h.push({"user": "a", "n": 1})
        h.push({"user": "a", "n": 2})
        assert [row["n"] for row in h.output] == [2]
    with pt.harness(lambda *streams: streams[0].union(streams[1]), schema=USER, inputs=2) as h:
        h.push({"user": "a", "n": 1}, input=1)
        assert len(h.output) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pt.harness(Count(), keys="user", output_schema=USER), "schema= is missing"),
        (lambda: pt.harness(Count(), schema=USER, output_schema=USER), "give keys="),
        (lambda: pt.harness(Count, schema=USER), "pass an object, Count"),
        (lambda: pt.harness(42, schema=USER), "42 cannot be tested"),
        (lambda: pt.harness(lambda stream: None, schema=USER), "must return a stream"),
        (lambda: pt.harness(lambda a, b: a, schema=USER), "nothing reads from input 1"),
        (
            lambda: pt.harness(lambda a, b, c: a, schema=USER),
            "reads from 1 or 2 streams, not from 3",
        ),
        (
            lambda: pt.harness(lambda a, b: a, schema=USER, inputs=1),
            r"chain <lambda>\(a, b\) does not take 1 stream: missing a required argument: 'b'",
        ),
        (lambda: pt.harness(lambda a, *, b: a, schema=USER), "missing a required argument: 'b'"),
        (lambda: pt.harness(Count(), keys="user", schema=USER, inputs=2), "inputs=2"),
        (lambda: count(subtask=2, parallelism=2), "subtasks count from 0"),
        (lambda: count(restore=b"nonsense"), "snapshot"),
        (lambda: pt.harness(lambda s: s.filter(ps.col("m") > 1), schema=USER), "'m'"),
        (
            lambda: pt.harness(
                lambda s: s.key_by("user").window(ps.tumbling("1s")).aggregate(n=ps.count()),
                schema=USER,
                event_time=False,
            ),
            "no event time",
        ),
    ],
)
def test_what_cannot_run_is_refused_at_once(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ps.StreamError, match=message):
        make()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda h: h.push({"user": "a", "m": 1}), '"m" is not in the schema'),
        (lambda h: h.push({"user": "a", "n": "x"}), 'column "n"'),
        (lambda h: h.push({"user": "a"}, input=1), "there is 1 input"),
        (
            lambda h: h.push({"user": "a", "n": 1}, event_time="noon"),
            "event times are milliseconds",
        ),
        (lambda h: h.push({"user": "a", "n": 1}, 1.5), "1.5 is no int64"),
        (lambda h: h.push_many([{"user": "a", "n": 1}], [1, 2]), "2 event times for 1 rows"),
        (lambda h: h.push_many(pa.table({"user": ["a"]})), "the batch has"),
        (lambda h: h.push_many([{"user": "a", "n": 1}], "at"), "no column 'at'"),
        (lambda h: h.watermark("now"), "no time in ms"),
        (lambda h: h.read(), "no source is tested"),
        (lambda h: h.state("sen", key="a"), "there is no state 'sen'.*'seen'"),
        (lambda h: h.state("seen"), "give key="),
        (lambda h: h.state("mine", key="a"), "belongs to no key"),
        (lambda h: h.state("seen", key=5), "does not fit the key column 'user'"),
        (lambda h: h.state("seen", key=("a", "b")), "does not fit the key column"),
        (lambda h: h.state("seen", key="a", operator="other"), "no state"),
        (lambda h: h.timers(domain="other"), "neither 'event' nor 'processing'"),
    ],
)
def test_wrong_calls_say_what_is_wrong_and_harm_nothing(
    call: Callable[[pt.Harness], object], message: str
) -> None:
    with count() as h:
        h.push({"user": "a", "n": 1})
        with pytest.raises(ps.JobRejected, match=message):
            call(h)
        assert h.state("seen", key="a") == 1


def test_state_without_an_operator_is_refused() -> None:
    with count() as h:
        h.push({"user": "a", "n": 1})
        snapshot = h.snapshot()
    with pytest.raises(ps.JobRejected, match=r"state of operator 'Count' \(uid 'function'\)"):
        pt.harness(lambda stream: stream, schema=USER, restore=snapshot)


# ------------------------------------------------------------ surroundings


def test_it_runs_in_the_calling_thread_and_only_there() -> None:
    class Where(ps.MapFunction):
        def __call__(self, row: Any) -> Any:
            return {"thread": threading.get_ident()}

    before = threading.active_count()
    with pt.harness(Where(), schema=USER, output_schema={"thread": int}) as h:
        h.push({"user": "a", "n": 1})
        h.snapshot()
        assert h.output == [{"thread": threading.get_ident()}]
        assert threading.active_count() == before


def test_neither_penstock_nor_the_module_itself_loads_the_runtime() -> None:
    code = (
        "import sys, penstock; assert 'penstock.testing' not in sys.modules;"
        "import penstock.testing;"
        "found = {'numba', 'taskmanager', 'jobmanager', 'common', 'grpc'} & sys.modules.keys();"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("chain", [lambda *streams: streams[0], lambda s=None: s])
def test_a_chain_reads_from_one_stream_at_least(chain: Any) -> None:
    with pt.harness(chain, schema=USER) as h:
        h.push({"user": "a", "n": 1})
        assert len(h.output) == 1


def test_encoded_columns_are_plain_ones_as_those_of_sources_are() -> None:
    words = pa.array(["x", "y"])
    kinds = {"d": pa.dictionary(pa.int32(), pa.string()), "v": pa.string_view()}
    table = pa.table({"d": words.dictionary_encode(), "v": words.cast(pa.string_view())})
    seen: list[pa.Schema] = []

    def note(batch: pa.RecordBatch) -> pa.RecordBatch:
        seen.append(batch.schema)
        return batch

    plain = pa.schema({"d": pa.string(), "v": pa.string()})
    harness = pt.harness(
        lambda stream: stream.map_batches(note, schema=plain), schema=pa.schema(kinds)
    )
    harness.push_many(table)
    harness.push({"d": "z", "v": "z"})
    assert harness.take() == [{"d": word, "v": word} for word in ("x", "y", "z")]
    assert all(schema.field(name).type == pa.string() for schema in seen for name in kinds)


def test_rows_that_python_does_not_have_are_told_by_their_column() -> None:
    schema = pa.schema([("n", pa.int64()), ("at", pa.timestamp("ms"))])
    far = pa.table({"n": [1], "at": pa.array([400_000_000_000_000], pa.timestamp("ms"))})
    with pt.harness(lambda s: s, schema=schema) as h:
        h.push_many(far.to_batches()[0])
        with pytest.raises(
            ps.StreamError, match=r"column 'at' has a value that .* cast the column"
        ):
            h.take()
