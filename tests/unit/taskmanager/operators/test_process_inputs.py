"""Functions with two inputs or no key, operator state, and the hooks around checkpoints."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.config import Configuration
from penstock.errors import JobRejected, TaskFailure, Unrecoverable
from taskmanager.operators.factory import build_operator
from tests.support.process_specs import INPUT, process_spec, rows, run_process

RULES = pa.schema([("name", pa.string()), ("limit", pa.int64())])


class Numbering(ps.ProcessFunction):
    """Numbers rows, keeps what it has seen since the last checkpoint in operator state."""

    kept = ps.OperatorListState("kept", pa.int64())
    all = ps.OperatorListState("all", codec="msgpack", redistribute="union")

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.calls: list[str] = []

    def restore(self, ctx: ps.CheckpointContext) -> None:
        self.seen = self.kept.get()
        self.calls.append(f"restore {ctx.checkpoint_id} {ctx.subtask_index}/{ctx.parallelism}")

    def open(self, ctx: ps.FunctionContext) -> None:
        self.calls.append("open")

    def snapshot(self, ctx: ps.CheckpointContext) -> None:
        self.kept.update(self.seen)
        self.calls.append(f"snapshot {ctx.checkpoint_id}")

    def checkpoint_complete(self, checkpoint_id: int) -> None:
        self.calls.append(f"complete {checkpoint_id}")

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.seen.append(row.n)
        self.all.add((row.user, row.n))
        out.emit(user=row.user, text=f"{len(self.seen)} {ctx.timestamp} {ctx.watermark}")


def test_unkeyed_functions_have_operator_state_and_hooks() -> None:
    harness = run_process(Numbering())
    harness.push(rows((1, 10, 100), (2, 20, 101)))
    harness.watermark(50)
    harness.push(rows((1, 30, 102)))
    texts = [row["text"] for row in harness.rows()]
    assert texts == [f"1 100 {ps.MIN_WATERMARK}", f"2 101 {ps.MIN_WATERMARK}", "3 102 50"]
    taken = harness.snapshot()
    assert harness.operator._handle.function.calls == ["open", "snapshot 1", "complete 1"]
    again = run_process(Numbering(), harness={"restored": [taken]})
    function = again.operator._handle.function
    assert function.calls == ["restore 1 0/1", "open"]
    assert function.kept.get() == [10, 20, 30]
    assert list(function.all) == [(1, 10), (2, 20), (1, 30)]
    again.push(rows((1, 40, 103)))
    assert again.rows()[-1]["text"].startswith("4 103")
    function.all.clear()
    assert len(function.all) == 0
    assert not function.all


@pytest.mark.parametrize("method", ["update", "add_all"])
@pytest.mark.parametrize("items", ["xyz", b"xyz", 3])
def test_operator_state_takes_lists_of_items(method: str, items: Any) -> None:
    state = run_process(Numbering()).operator._handle.function.all
    state.add("kept")
    with pytest.raises(ps.StateError, match=rf"'all': {method}\(\) takes a list of items, got "):
        getattr(state, method)(items)
    assert state.get() == ["kept"]


def test_operator_state_of_another_type_is_refused() -> None:
    class Changed(Numbering):
        kept = ps.OperatorListState("kept", pa.string())

    harness = run_process(Numbering())
    harness.push(rows((1, 10, 100)))
    taken = harness.snapshot()
    with pytest.raises(TaskFailure, match=r"'kept' was stored as arrow.int64/1 and is declared as"):
        run_process(Changed(), harness={"restored": [taken]})


def test_hooks_that_raise_are_named() -> None:
    class Raising(Numbering):
        def snapshot(self, ctx: ps.CheckpointContext) -> None:
            raise ValueError("no")

    with pytest.raises(TaskFailure, match=r"Raising.snapshot raised ValueError: no"):
        run_process(Raising()).snapshot()


class Limits(ps.KeyedBroadcastProcessFunction):
    rules = ps.BroadcastState("rules", pa.string(), pa.int64())
    total = ps.ValueState("total", pa.int64(), default=0)
    seen = ps.MapState("seen", pa.int64(), pa.bool_())

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.total.update(self.total.value() + row.n)
        if row.n == 7:
            self.seen.put(7, True)
        if row.n == 0:
            ctx.timers.event_time(ctx.timestamp + 10)
        for name, limit in self.rules.items():
            if self.total.value() > limit:
                out.emit(user=ctx.key, text=f"{name} {self.total.value()}")

    def process_broadcast(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        if row.limit is None:
            del self.rules[row.name]
        else:
            self.rules[row.name] = row.limit
        if row.name == "reset":
            visited: list[Any] = []
            ctx.apply_to_keyed_state(
                self.total, lambda key, state: visited.append((key, state.value()))
            )
            ctx.apply_to_keyed_state(self.total, lambda _, state: state.clear())
            ctx.apply_to_keyed_state(
                self.seen, lambda key, state: visited.append((key, state.keys()))
            )
            out.emit(user=0, text=repr(sorted(visited, key=repr)))

    def on_timer(self, timestamp: int, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(user=ctx.key, text=f"{timestamp} {dict(self.rules)}")


def rule(name: str, limit: int | None) -> pa.RecordBatch:
    return rows((name, limit, 0), schema=RULES)


def texts(harness: Any) -> list[str]:
    return [f"{row['user']}: {row['text']}" for row in harness.take_rows()]


def test_broadcast_state_is_read_by_rows_and_written_by_the_broadcast_stream() -> None:
    harness = run_process(Limits(), second=RULES)
    harness.push(rows((1, 5, 0)))
    harness.push(rule("low", 8), 1)
    harness.push(rule("high", 20), 1)
    harness.push(rows((1, 5, 1), (2, 7, 1)))
    assert texts(harness) == ["1: low 10"]
    again = run_process(Limits(), second=RULES, harness={"restored": [harness.snapshot()]})
    again.push(rows((1, 11, 2), (2, 0, 5)))
    assert texts(again) == ["1: low 21", "1: high 21"]
    again.push(rule("low", None), 1)
    again.push(rows((1, 1, 2)))
    assert texts(again) == ["1: high 22"]
    again.watermark(20)
    assert texts(again) == ["2: 15 {'high': 20}"]
    again.push(rule("reset", 9), 1)
    assert texts(again) == ["0: [(1, 22), (2, 7), (2, [7])]"]
    again.push(rows((1, 9, 3), (1, 1, 3)))
    assert texts(again) == ["1: reset 10"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "value",
            r"value\(\) needs a key, and there is none in process_broadcast\(\): use ctx.apply",
        ),
        ("timer", r"event_time\(\) needs a key"),
        ("key", r"ctx.key: there is no key in process_broadcast\(\)"),
        ("apply", r"takes a state per key of this function, got BroadcastState\('rules'\)"),
        ("inner timer", r"event_time\(\) needs a key"),
    ],
)
def test_there_is_no_key_in_process_broadcast(name: str, message: str) -> None:
    class Wrong(Limits):
        def process_broadcast(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
            match row.name:
                case "value":
                    self.total.value()
                case "timer":
                    ctx.timers.event_time(5)
                case "key":
                    _ = ctx.key
                case "apply":
                    ctx.apply_to_keyed_state(self.rules, print)  # type: ignore[arg-type]
                case "inner timer":
                    ctx.apply_to_keyed_state(self.total, lambda _k, _s: ctx.timers.event_time(5))

    harness = run_process(Wrong(), second=RULES)
    harness.push(rows((1, 5, 0)))
    with pytest.raises(TaskFailure, match=message):
        harness.push(rule(name, 1), 1)


@pytest.mark.parametrize("method", ["put", "remove", "clear"])
def test_broadcast_state_is_read_only_elsewhere(method: str) -> None:
    class Wrong(Limits):
        def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
            {"put": lambda: self.rules.put("a", 1), "remove": lambda: self.rules.remove("a")}.get(
                method, self.rules.clear
            )()

    harness = run_process(Wrong(), second=RULES)
    with pytest.raises(
        TaskFailure, match=rf"'rules': {method}\(\) is allowed in process_broadcast"
    ):
        harness.push(rows((1, 5, 0)))


def test_apply_is_there_in_process_broadcast_only() -> None:
    class Wrong(Limits):
        def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
            ctx.apply_to_keyed_state(self.total, print)

    with pytest.raises(TaskFailure, match="is there in process_broadcast"):
        run_process(Wrong(), second=RULES).push(rows((1, 5, 0)))


class Plain(ps.BroadcastProcessFunction):
    words = ps.BroadcastState("words", pa.int64(), list)

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        words = self.words.get(row.n, [])
        words.append("!")
        out.emit(user=row.user, text=f"{words} {self.words.values()} {row.n in self.words}")

    def process_broadcast(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.words.put(row.limit, [row.name])


def test_broadcast_without_keys() -> None:
    harness = run_process(Plain(), second=RULES)
    harness.push(rule("a", 1), 1)
    harness.push(rows((5, 1, 0), (5, 2, 0)))
    assert texts(harness) == ["5: ['a', '!'] [['a']] True", "5: ['!'] [['a']] False"]


class Weighted(ps.BroadcastProcessFunction):
    weights = ps.BroadcastState("weights", pa.float64(), pa.int64())

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        found = [self.weights.get(key) for key in (-0.0, float("nan"))]
        out.emit(user=row.user, text=f"{found} {len(self.weights)}")

    def process_broadcast(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.weights.put(float(row.name), row.limit)


def test_equal_keys_of_broadcast_state_are_one_entry() -> None:
    harness = run_process(Weighted(), second=RULES)
    for name, limit in (("0.0", 1), ("nan", 2), ("-0.0", 3), ("nan", 4)):
        harness.push(rule(name, limit), 1)
    harness.push(rows((5, 1, 0)))
    again = run_process(Weighted(), second=RULES, harness={"restored": [harness.snapshot()]})
    again.push(rows((5, 1, 0)))
    assert texts(harness) == texts(again) == ["5: [3, 4] 2"]


class Both(ps.KeyedCoProcessFunction):
    left = ps.ValueState("left", pa.int64())

    def process_left(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.left.update(row.n)
        ctx.timers.event_time(ctx.timestamp)

    def process_right(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(user=ctx.key, text=f"{self.left.value()} {row.name} {ctx.timestamp}")

    def on_timer(self, timestamp: int, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(user=ctx.key, text=f"timer {self.left.value()}")


RIGHT = pa.schema([("user", pa.int64()), ("name", pa.string())])


def test_two_streams_share_state_by_key() -> None:
    harness = run_process(Both(), second=RIGHT)
    harness.push(rows((1, 5, 10), (2, 6, 11)))
    harness.push(rows((2, "x", 12), (3, "y", 13), schema=RIGHT), 1)
    assert texts(harness) == ["2: 6 x 12", "3: None y 13"]
    harness.watermark(10)
    assert texts(harness) == ["1: timer 5"]


def test_keys_of_both_inputs_have_one_type() -> None:
    spec = process_spec(Both(), second=pa.schema([("user", pa.string()), ("name", pa.string())]))
    with pytest.raises(JobRejected, match="different types, int64 and string"):
        build_operator(spec)


def test_a_second_input_is_needed() -> None:
    with pytest.raises(JobRejected, match="needs a second input"):
        build_operator(process_spec(Both()))


class Pair(ps.CoProcessFunction):
    def process_left(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(user=row.user, text=str(1 // row.n))

    def process_right(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(user=1, text=f"{row.name} {1 // row.limit}")


def test_two_streams_without_keys_and_their_bad_rows() -> None:
    harness = run_process(Pair(), second=RULES, on_error="skip")
    harness.push(rows((1, 1, 0), (2, 0, 0)))
    harness.push(rows(("a", 1, 0), ("b", 0, 0), schema=RULES), 1)
    assert texts(harness) == ["1: 1", "1: a 1"]
    assert harness.counters.bad_records == 2
    # The side output has the columns of the first input: rows of another shape fail.
    harness = run_process(Pair(), second=RULES, on_error="errors")
    harness.push(rows((2, 0, 0)))
    assert [row["user"] for row in harness.side("errors")] == [2]
    with pytest.raises(TaskFailure, match="process_right raised ZeroDivisionError"):
        harness.push(rows(("b", 0, 0), schema=RULES), 1)
    harness = run_process(Pair(), second=INPUT, on_error="errors")
    with pytest.raises(TaskFailure):
        run_process(Pair(), second=INPUT).push(rows((2, 0, 0)), 1)
    harness.push(rows((2, 0, 0)), 1)
    assert "has no" in harness.side("errors")[0]["error"]


class Hoarder(ps.ProcessFunction):
    """Keeps every text in operator state."""

    kept = ps.OperatorListState("kept", pa.string())

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.kept.add("x" * 1000)


class Ruling(ps.BroadcastProcessFunction):
    """Keeps a rule per number."""

    kept = ps.BroadcastState("kept", pa.int64(), pa.string())

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        pass

    def process_broadcast(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.kept.put(row.n, "x" * 1000)


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize("is_broadcast", [False, True])
def test_where_states_are_in_memory_operator_state_counts_against_the_limit(
    backend: str, is_broadcast: bool
) -> None:
    options = {"config": Configuration.from_mapping({"state.backend.type": backend})}
    if is_broadcast:
        harness = run_process(Ruling(), second=INPUT, harness=options)
    else:
        harness = run_process(Hoarder(), harness=options)
    harness.memory.limit_bytes = 1 << 20
    many = rows(*[(1, number, number) for number in range(2000)])
    if backend == "hashmap":
        with pytest.raises(Unrecoverable, match=r"its limit is 1 MB .* is operator: state kept"):
            harness.push(many, int(is_broadcast))
    else:
        harness.push(many, int(is_broadcast))
    harness.operator.close()
    assert harness.memory.used_bytes() < 1 << 16
