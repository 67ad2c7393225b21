"""State of keys as functions see it: every kind, own copies, restoring, and what goes wrong.

Method: a function runs one scripted step per row and emits what the step returned as text.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable
from decimal import Decimal
from itertools import count
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
import penstock.testing as pt
from common.elements import PAUSE
from penstock.config import Configuration
from penstock.errors import StoreCorrupt, TaskFailure
from taskmanager.operators.factory import build_operator
from taskmanager.operators.time_slice import TimeSlice
from tests.support.examples import examples
from tests.support.process_specs import process_spec, rows, run_process

Step = Callable[[Any], Any]


def total(a: int, b: int) -> int:
    return a + b


class Spread(ps.AggregateFunction):
    """max - min."""

    def create_accumulator(self) -> Any:
        return []

    def add(self, accumulator: Any, value: Any) -> Any:
        accumulator.append(value)
        return [min(accumulator), max(accumulator)]

    def merge(self, accumulator: Any, other: Any) -> Any:
        raise NotImplementedError

    def result(self, accumulator: Any) -> Any:
        return accumulator[-1] - accumulator[0]


class Scripted(ps.KeyedProcessFunction):
    number = ps.ValueState("number", pa.int64(), default=-1)
    anything = ps.ValueState("anything", default=[0])
    parts = ps.ValueState("parts", pa.struct([("a", pa.list_(pa.int64()))]))
    secret = ps.ValueState("secret", ps.PICKLE)
    log = ps.ListState("log", pa.string())
    bag = ps.ListState("bag")
    hits = ps.MapState("hits", pa.string(), pa.int64())
    notes = ps.MapState("notes", pa.date32(), dict)
    sums = ps.ReducingState("sums", pa.int64(), total)
    spread = ps.AggregatingState("spread", Spread())
    mean = ps.AggregatingState("mean", ps.mean("x"))

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(user=row.user, text=repr(self.steps[row.n](self)))


def run(*steps: tuple[int, Step], batches: int = 1, restored: Any = ()) -> tuple[list[str], Any]:
    """The texts of (user, step), in batches of their own or together; and the harness."""
    harness = run_process(Scripted([step for _, step in steps]), harness={"restored": restored})
    given_rows = [(user, n, n) for n, (user, _) in enumerate(steps)]
    if batches == 1:
        harness.push(rows(*given_rows))
    else:
        for row in given_rows:
            harness.push(rows(row))
    return [row["text"] for row in harness.take_rows()], harness


def both(*steps: tuple[int, Step]) -> list[str]:
    """The same in one bundle and in a bundle per row."""
    together, _ = run(*steps)
    apart, _ = run(*steps, batches=len(steps))
    assert together == apart
    return together


def test_value() -> None:
    assert both(
        (1, lambda s: s.number.value()),
        (1, lambda s: s.number.update(5)),
        (2, lambda s: s.number.value()),
        (1, lambda s: s.number.value()),
        (1, lambda s: s.number.update(None)),
        (1, lambda s: s.number.value()),
        (2, lambda s: s.number.update(7)),
        (2, lambda s: s.number.clear()),
        (2, lambda s: s.number.value()),
    ) == ["-1", "None", "-1", "5", "None", "-1", "None", "None", "-1"]


def change(value: Any) -> Any:
    """Changes what state has handed out, in place."""
    if isinstance(value, dict):
        value["a"] = [9]
    else:
        value.append(9)
    return value


def test_values_handed_out_are_the_callers_own() -> None:
    assert both(
        (1, lambda s: change(s.anything.value())),
        (1, lambda s: s.anything.value()),
        (1, lambda s: s.anything.update([1, (2,)])),
        (1, lambda s: change(s.anything.value())),
        (1, lambda s: s.anything.value()),
        (1, lambda s: s.anything.update(change(s.anything.value()))),
        (1, lambda s: s.anything.value()),
        (1, lambda s: s.parts.update({"a": [1]})),
        (1, lambda s: change(s.parts.value())),
        (1, lambda s: s.parts.value()),
        (1, lambda s: change(s.bag.get())),
        (1, lambda s: s.bag.add([1])),
        (1, lambda s: change(s.bag.get()[0])),
        (1, lambda s: s.bag.get()),
    ) == [
        "[0, 9]",
        "[0]",
        "None",
        "[1, (2,), 9]",
        "[1, (2,)]",
        "None",
        "[1, (2,), 9]",
        "None",
        "{'a': [9]}",
        "{'a': [1]}",
        "[9]",
        "None",
        "[1, 9]",
        "[[1]]",
    ]


def test_what_was_put_in_is_not_kept_by_reference() -> None:
    mine = [1]

    def keep(s: Any) -> None:
        own = list(mine)
        s.anything.update(own)
        s.bag.add(own)
        s.notes.put(__import__("datetime").date(2020, 1, 1), {"own": own})
        own.append(2)

    assert both(
        (1, keep),
        (1, lambda s: (s.anything.value(), s.bag.get(), s.notes.values())),
    ) == ["None", "([1], [[1]], [{'own': [1]}])"]


def test_list() -> None:
    assert both(
        (1, lambda s: (s.log.get(), len(s.log), bool(s.log))),
        (1, lambda s: s.log.add("a")),
        (1, lambda s: s.log.add_all(["b", "c"])),
        (2, lambda s: s.log.add("z")),
        (1, lambda s: list(s.log)),
        (1, lambda s: s.log.update(["x"])),
        (1, lambda s: (s.log.get(), bool(s.log))),
        (1, lambda s: s.log.clear()),
        (1, lambda s: s.log.get()),
        (2, lambda s: s.log.get()),
    )[0::4] == ["([], 0, False)", "['a', 'b', 'c']", "[]"]


def test_map() -> None:
    texts = both(
        (1, lambda s: (s.hits.get("a"), s.hits.get("a", 4), s.hits.is_empty(), "a" in s.hits)),
        (1, lambda s: s.hits.put("b", 2)),
        (1, lambda s: s.hits.put_all({"a": 1, "c": None})),
        (1, lambda s: (s.hits.keys(), s.hits.values(), s.hits.items(), list(s.hits), len(s.hits))),
        (1, lambda s: (s.hits["a"], s.hits.contains("c"), s.hits.get("c", 5))),
        (1, lambda s: s.hits.remove("a")),
        (1, lambda s: s.hits.remove("nothing")),
        (2, lambda s: s.hits.items()),
        (1, lambda s: s.hits.items()),
        (1, lambda s: s.hits.__delitem__("b")),
        (1, lambda s: s.hits.clear()),
        (1, lambda s: s.hits.is_empty()),
    )
    assert texts[0] == "(None, 4, True, False)"
    assert texts[3] == (
        "(['a', 'b', 'c'], [1, 2, None], [('a', 1), ('b', 2), ('c', None)], ['a', 'b', 'c'], 3)"
    )
    assert texts[4] == "(1, True, None)"
    assert texts[7:9] == ["[]", "[('b', 2), ('c', None)]"]
    assert texts[11] == "True"
    with pytest.raises(TaskFailure, match="KeyError: 'q'"):
        run((1, lambda s: s.hits["q"]))


class Keyed(ps.KeyedProcessFunction):
    """A map of numbers, by a script of (key, value to put or None to remove)."""

    def __init__(self, key_type: Any, script: list[tuple[Any, int | None]]) -> None:
        self.found = ps.MapState("found", key_type, pa.int64())
        self.script = script

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        key, value = self.script[row.n]
        if value is None:
            self.found.remove(key)
        else:
            self.found.put(key, value)
        text = repr((self.found.get(key), key in self.found, self.found.items()))
        out.emit(user=row.user, text=text)


@pytest.mark.parametrize(
    ("key_type", "key", "equal"),
    [
        (pa.float64(), 0.0, -0.0),
        (pa.float32(), 0.0, -0.0),
        (pa.float16(), 0.0, -0.0),
        (pa.float64(), math.nan, float("nan")),
        (pa.float32(), math.nan, float("nan")),
        (pa.float16(), math.nan, float("nan")),
        (pa.float64(), math.nan, -float("nan")),
        (pa.decimal128(4, 2), Decimal("0.00"), Decimal("-0.00")),
        (pa.decimal128(4, 2), Decimal(1), Decimal("1.00")),
    ],
    ids=str,
)
def test_equal_keys_of_maps_are_one_entry(key_type: pa.DataType, key: Any, equal: Any) -> None:
    """Live and after a restore alike, wherever the checkpoint falls between the changes."""
    shown = repr(Decimal("1.00") if key == 1 else key)
    changes = [(key, 1), (equal, 2), (equal, None), (equal, 3), (key, None)]
    expected = [
        "(None, False, [])" if value is None else f"({value}, True, [({shown}, {value})])"
        for _, value in changes
    ]
    harness = run_process(Keyed(key_type, changes))
    for n in range(len(changes)):
        harness.push(rows((1, n, n)))
        taken = harness.snapshot()
        assert harness.take_rows()[-1]["text"] == expected[n]
        script = [*changes[: n + 1], (equal, 9), (key, None)]
        again = run_process(Keyed(key_type, script), harness={"restored": [taken]})
        again.push(rows((1, n + 1, 0), (1, n + 2, 0)))
        assert [row["text"] for row in again.take_rows()] == [
            f"(9, True, [({shown}, 9)])",
            "(None, False, [])",
        ]


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_both_moments_of_an_hour_that_comes_twice_are_keys(backend: str) -> None:
    """Python takes two such datetimes of one zone, as rows and state have them, for equal."""
    zone = ZoneInfo("Europe/Berlin")
    moments = [dt.datetime(2024, 10, 27, hour, 30, tzinfo=dt.UTC) for hour in (0, 1)]
    kind = pa.timestamp("us", "Europe/Berlin")

    class Seen(ps.KeyedProcessFunction):
        plain = ps.MapState("plain", kind, pa.int64())
        nested = ps.ValueState("nested", pa.map_(kind, pa.int64()))

        def process(self, row: Any, ctx: Any, out: Any) -> None:
            self.plain.put(row.at, (self.plain.get(row.at) or 0) + 1)
            self.nested.update([*(self.nested.value() or {}).items(), (row.at, 1)])
            out.emit(plain=repr(sorted(self.plain.items())), nested=repr(self.nested.value()))

    shape = {"user": int, "at": kind}
    text = {"plain": str, "nested": str}
    settings = {"keys": ["user"], "schema": shape, "output_schema": text, "backend": backend}
    rows = [{"user": 1, "at": moment.astimezone(zone)} for moment in moments]
    with pt.harness(Seen(), **settings) as h:
        h.push_many(rows[:1])
        taken = h.snapshot()
    with pt.harness(Seen(), **settings, restore=taken) as h:
        h.push_many(rows[1:])
        (found,) = h.take()
    assert found["plain"] == repr([(moment, 1) for moment in moments])
    assert found["nested"] == repr(dict.fromkeys(moments, 1))


def test_reducing_and_aggregating() -> None:
    assert both(
        (1, lambda s: (s.sums.get(), s.spread.get(), s.mean.get())),
        (1, lambda s: (s.sums.add(3), s.spread.add(3), s.mean.add(3))),
        (1, lambda s: (s.sums.add(4), s.spread.add(8), s.mean.add(None))),
        (2, lambda s: s.sums.add(1)),
        (1, lambda s: (s.sums.get(), s.spread.get(), s.mean.get())),
        (1, lambda s: (s.sums.clear(), s.spread.clear(), s.mean.clear())),
        (1, lambda s: (s.sums.get(), s.spread.get(), s.mean.get())),
    )[0::2] == ["(None, None, None)", "(None, None, None)", "(7, 5, 3.0)", "(None, None, None)"]


def test_everything_survives_a_restore() -> None:
    import datetime as dt

    day = dt.date(2020, 1, 1)
    _, harness = run(
        (1, lambda s: (s.number.update(5), s.anything.update({"x": (1, 2)}), s.log.add("a"))),
        (2, lambda s: (s.hits.put("k", 4), s.notes.put(day, {"n": [1]}), s.sums.add(6))),
        (1, lambda s: (s.parts.update({"a": [1, None]}), s.secret.update(frozenset("x")))),
        (2, lambda s: (s.spread.add(2), s.spread.add(9), s.number.update(1), s.number.clear())),
    )
    taken = harness.snapshot()
    run_on, _ = run((1, lambda s: s.number.update(99)), restored=[taken])
    assert run_on == ["None"]
    texts, _ = run(
        (1, lambda s: (s.number.value(), s.anything.value(), s.log.get())),
        (2, lambda s: (s.hits.items(), s.notes.items(), s.sums.get())),
        (1, lambda s: (s.parts.value(), s.secret.value())),
        (2, lambda s: (s.spread.get(), s.number.value())),
        restored=[taken],
    )
    assert texts == [
        "(5, {'x': (1, 2)}, ['a'])",
        f"([('k', 4)], [({day!r}, {{'n': [1]}})], 6)",
        "({'a': [1, None]}, frozenset({'x'}))",
        "(7, -1)",
    ]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda s: s.number.update("x"), r"state 'number' holds int64, got 'x' \(str\)"),
        (lambda s: s.number.update(True), r"state 'number' holds int64, got True \(bool\)"),
        (
            lambda s: s.number.update(2**63),
            r"holds int64, got 9223372036854775808 \(int\), which is not",
        ),
        (lambda s: s.log.add(3), r"state 'log' holds string, got 3 \(int\)"),
        (lambda s: s.log.update("abc"), r"state 'log': update\(\) takes a list of items"),
        (lambda s: s.parts.update({"a": ["x"]}), r"state 'parts' holds struct<.*'x' is no int64"),
        (lambda s: s.anything.update(object()), r"state 'anything' holds plain Python values"),
        (lambda s: s.hits.put(3, 3), r"state 'hits': a key of its maps holds string, got 3"),
        (lambda s: s.hits.get(None), r"state 'hits': None is no key of a map"),
        (lambda s: s.hits.put("a", "b"), r"state 'hits' holds int64, got 'b'"),
        (lambda s: s.sums.add("b"), r"state 'sums' holds int64, got 'b'"),
        (lambda s: s.sums.add(None), r"state 'sums': None was added"),
        (
            lambda s: s.number.get_many(pa.array([1])),
            r"get_many\(\) is there in KeyedBatchFunction",
        ),
    ],
)
def test_errors_name_state_type_and_value(step: Step, message: str) -> None:
    with pytest.raises(TaskFailure, match=message) as caught:
        run((1, step))
    assert "Row(user=1" in caught.value.row


class InOpen(Scripted):
    def open(self, ctx: Any) -> None:
        self.steps[0](self)


@pytest.mark.parametrize(
    ("step", "method"),
    [
        (lambda s: s.number.value(), "value"),
        (lambda s: s.number.update(1), "update"),
        (lambda s: s.number.update("x"), "update"),
        (lambda s: s.number.clear(), "clear"),
        (lambda s: s.anything.value(), "value"),
        (lambda s: s.log.get(), "get"),
        (lambda s: s.log.add("a"), "add"),
        (lambda s: s.hits.get("a"), "get"),
        (lambda s: s.hits.items(), "items"),
        (lambda s: s.sums.add(1), "add"),
        (lambda s: s.mean.get(), "get"),
    ],
)
def test_state_of_a_key_needs_a_key(step: Step, method: str) -> None:
    with pytest.raises(
        TaskFailure, match=rf"{method}\(\) needs a key, and there is none in open\(\)"
    ):
        run_process(InOpen([step]))
    with pytest.raises(ps.StateError, match=rf"{method}\(\) was called on its declaration"):
        step(Scripted)


def test_two_operators_of_one_class_share_nothing() -> None:
    steps = [lambda s: s.number.update(1), lambda s: s.number.value()]
    first, second = (run_process(Scripted(steps)) for _ in range(2))
    first.push(rows((1, 0, 0)))
    second.push(rows((1, 1, 0)))
    first.push(rows((1, 1, 0)))
    assert [first.take_rows()[-1]["text"], second.take_rows()[-1]["text"]] == ["1", "-1"]
    assert not Scripted.number.is_bound


class SetInInit(ps.KeyedProcessFunction):
    def __init__(self, name: str) -> None:
        self.mine = ps.ValueState(name, int)

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.mine.update((self.mine.value() or 0) + row.n)
        out.emit(user=row.user, text=str(self.mine.value()))


def test_states_set_in_init() -> None:
    harness = run_process(SetInInit("other"))
    harness.push(rows((1, 2, 0), (1, 3, 0)))
    assert [row["text"] for row in harness.take_rows()] == ["2", "5"]


def test_bad_rows_go_the_way_of_the_policy_and_leave_no_output() -> None:
    def emits_then_raises(s: Any) -> Any:
        s.out.emit(user=0, text="half")
        s.out.side("aside", {"user": 0, "n": 0})
        raise ValueError("odd")

    class Emitting(Scripted):
        def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
            self.out = out
            super().process(row, ctx, out)

    def emits_what_does_not_fit(s: Any) -> Any:
        s.out.side("aside", {"user": 0, "n": 0})
        s.out.emit(user="x", text="t")
        s.out.emit(user="y", text="t")

    def puts_aside_what_does_not_fit(s: Any) -> Any:
        s.out.side("aside", {"user": "x", "n": 0})

    steps = [
        lambda s: "ok",
        emits_then_raises,
        emits_what_does_not_fit,
        puts_aside_what_does_not_fit,
    ]
    for policy in ("skip", "errors"):
        harness = run_process(Emitting(steps), on_error=policy)
        harness.push(rows((1, 0, 10), (2, 1, 11), (3, 2, 12), (5, 3, 12), (4, 0, 13)))
        assert [r["user"] for r in harness.rows()] == [1, 4]
        assert harness.counters.bad_records == 3
        assert not harness.side("aside")
        if policy == "errors":
            found = harness.side("errors")
            assert [row["n"] for row in found] == [1, 2, 3]
            assert "raised ValueError: odd" in found[0]["error"]
            assert "does not fit" in found[1]["error"]
    harness = run_process(Emitting(steps))
    with pytest.raises(TaskFailure, match=r"Emitting.process raised ValueError: odd"):
        harness.push(rows((2, 1, 11)))


def test_what_cannot_be_read_is_never_skipped() -> None:
    def corrupt(_s: Any) -> None:
        raise StoreCorrupt("broken")

    harness = run_process(Scripted([corrupt]), on_error="skip")
    with pytest.raises(TaskFailure, match="StoreCorrupt: broken"):
        harness.push(rows((1, 0, 0)))


class Counting(ps.KeyedProcessFunction):
    seen = ps.ValueState("seen", pa.int64())

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        count = (self.seen.value() or 0) + 1
        self.seen.update(count)
        if row.n % 3:
            out.emit(user=row.user, text=f"{count} {ctx.timestamp} {ctx.key}")


@examples(30)
@given(
    batches=st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 99)), min_size=1),
        max_size=5,
    )
)
def test_results_have_their_rows_event_time(batches: list[Any]) -> None:
    harness = run_process(Counting())
    expected, counts = [], dict[int, int]()
    for batch in batches:
        harness.push(rows(*batch))
        for user, n, time_ms in batch:
            counts[user] = counts.get(user, 0) + 1
            if n % 3:
                expected.append((user, f"{counts[user]} {time_ms} {user}", time_ms))
    assert [tuple(row.values()) for row in harness.rows(event_time=True)] == expected


def test_a_slow_function_yields_between_slices_of_time() -> None:
    ticks = count(step=3_000_000)  # every look at the clock takes 3 ms
    harness = run_process(Counting())
    harness.operator._slice = TimeSlice(lambda: next(ticks))
    outputs = list(harness.operator.process(rows(*((1, 1, n) for n in range(300)))))
    assert outputs.count(PAUSE) > 3
    texts = [row["text"] for part in outputs if part is not PAUSE for row in part.to_pylist()]
    assert texts == [f"{n + 1} {n} 1" for n in range(300)]


def test_output_is_cut_into_batches() -> None:
    class Many(ps.KeyedProcessFunction):
        def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
            for n in range(10):
                out.emit(user=row.user, text=str(n))

    config = Configuration.from_mapping({"execution.batch-rows": 100})
    harness = run_process(Many(), harness={"config": config})
    harness.push(rows(*((n, 1, n) for n in range(2000))))
    assert sum(batch.num_rows for batch in harness.batches) == 20_000
    assert max(batch.num_rows for batch in harness.batches) <= 100 + 256 * 10


class Emitting(ps.KeyedProcessFunction):
    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(row)
        out.emit(row, n=row.n + 1)
        out.side("twice", row)


def test_rows_and_side_outputs_pass_through() -> None:
    harness = run_process(Emitting(), output=pa.schema([("user", pa.int64()), ("n", pa.int64())]))
    harness.push(rows((1, 5, 100)))
    assert harness.rows(event_time=True) == [
        {"user": 1, "n": 5, "__event_time": 100},
        {"user": 1, "n": 6, "__event_time": 100},
    ]
    assert harness.side("twice") == [{"user": 1, "n": 5}]


class ManyKeys(ps.KeyedProcessFunction):
    seen = ps.ValueState("seen", pa.int64())

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.seen.update((self.seen.value() or 0) + 1)
        out.emit(user=ctx.key[0], text=f"{ctx.key} {self.seen.value()}")


def test_keys_of_several_columns_are_tuples() -> None:
    schema = pa.schema([("user", pa.int64()), ("place", pa.string())])
    harness = run_process(ManyKeys(), schema=schema, keys=("user", "place"))
    harness.push(rows((1, "a", 0), (1, "b", 0), (1, "a", 0), (None, "a", 0), schema=schema))
    texts = [row["text"] for row in harness.rows()]
    assert texts == ["(1, 'a') 1", "(1, 'b') 1", "(1, 'a') 2", "(None, 'a') 1"]


def test_a_stream_without_event_time_has_no_timestamps() -> None:
    harness = run_process(Counting(), event_time=False)
    harness.push(pa.RecordBatch.from_pydict({"user": [4], "n": [1]}))
    assert harness.rows() == [{"user": 4, "text": "1 None 4"}]


class Other(ps.KeyedProcessFunction):
    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        """Nothing."""


def test_a_function_of_another_kind_is_refused() -> None:
    import cloudpickle

    spec = process_spec(Other())
    spec.process.function.pickled = cloudpickle.dumps(object())
    from penstock.errors import JobRejected
    from tests.support.object_backend import ObjectBackend
    from tests.support.operator_harness import OperatorHarness

    with pytest.raises(JobRejected, match="is no KeyedProcessFunction"):
        OperatorHarness(build_operator(spec), backend=ObjectBackend)
