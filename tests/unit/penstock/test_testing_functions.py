"""``penstock.testing`` with every kind of function: what goes in, what comes out, in which order."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

import penstock as ps
import penstock.testing as pt

USER = {"user": str, "n": int}


class Double(ps.MapFunction):
    def open(self, ctx: ps.FunctionContext) -> None:
        self.place = f"{ctx.subtask_index}/{ctx.parallelism}"

    def __call__(self, row: Any) -> Any:
        return {"n": row.n * 2, "place": self.place}


def test_map_flat_map_and_filter_functions_are_opened_and_called() -> None:
    with pt.harness(
        Double(), schema=USER, output_schema={"n": int, "place": str}, subtask=1, parallelism=3
    ) as h:
        h.push({"user": "a", "n": 2})
        assert h.output == [{"n": 4, "place": "1/3"}]

    class Words(ps.FlatMapFunction):
        def __call__(self, row: Any) -> Any:
            return [{"word": word} for word in row.user.split()]

    with pt.harness(Words(), schema=USER, output_schema={"word": str}) as h:
        h.push({"user": "x y", "n": 0})
        assert h.output == [{"word": "x"}, {"word": "y"}]

    class Even(ps.FilterFunction):
        def __call__(self, row: Any) -> bool:
            return bool(row.n % 2 == 0)

    with pt.harness(Even(), schema=USER) as h:
        h.push_many([{"user": "a", "n": n} for n in range(4)])
        assert [row["n"] for row in h.take()] == [0, 2]
        assert h.output == []


def test_a_chain_is_what_the_lambda_builds_and_schemas_are_found_in_sample_rows() -> None:
    def batches(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([{"total": sum(batch.column("twice").to_pylist())}])

    with pt.harness(
        lambda stream: (
            stream.filter(ps.col("n") > 0)
            .map(lambda row: {"twice": row.n * 2})
            .map_batches(batches, schema={"total": "int64"})
        ),
        schema=[{"user": "a", "n": 1}],
    ) as h:
        h.push_many([{"user": "a", "n": n} for n in (0, 1, 2)])
        h.push({"n": 5})
        assert h.output == [{"total": 6}, {"total": 10}]


class Route(ps.ProcessFunction):
    total = ps.OperatorListState("total", pa.int64())

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.total.add(row.n)
        if row.n < 0:
            out.side("negative", row)
        else:
            out.emit(n=row.n, at=ctx.timestamp)


def test_process_functions_have_operator_state_and_side_outputs() -> None:
    with pt.harness(Route(), schema=USER, output_schema={"n": int, "at": int}) as h:
        h.push({"user": "a", "n": -1}, event_time=7)
        h.push({"user": "b", "n": 1}, event_time=8)
        assert h.take(event_time=True) == [(8, {"n": 1, "at": 8})]
        assert h.side("negative") == [{"user": "a", "n": -1}]
        assert h.side("negative") == []
        assert h.state("total") == [-1, 1]


class Refuse(ps.ProcessFunction):
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        out.side("refused", {"user": row.user, "n": 1})


def test_a_row_for_a_side_output_may_have_columns_that_nobody_reads() -> None:
    with pt.harness(Refuse(), schema=USER, output_schema=USER) as h:
        h.push({"user": "ann", "n": 7})
        assert h.side("refused") == [{"user": "ann"}]  # the function does not read n either

    def refused(stream: Any) -> Any:
        sides = stream.process(Refuse(), schema=USER).on_error("skip")
        return sides.side_output("refused").select("user")

    with pt.harness(refused, schema=USER) as h:
        h.push({"user": "ann", "n": 7})
        assert (h.take(), h.bad_rows) == ([{"user": "ann"}], 0)


TUPLES: dict[str, tuple[Any, list[Any]]] = {
    "whole": (lambda user: (1, user, ["x"]), [{"user": "ann"}]),
    "what is read alone": (lambda user: (user,), []),
    "too long": (lambda user: (1, user, ["x"], 2), []),
    "a value": (lambda user: user, []),
}


@pytest.mark.parametrize(("given", "expected"), TUPLES.values(), ids=TUPLES)
def test_a_tuple_for_a_side_output_has_all_columns_of_the_input(
    given: Any, expected: list[Any]
) -> None:
    class Puts(ps.ProcessFunction):
        def process(self, row: Any, ctx: Any, out: Any) -> None:
            out.side("refused", given(row.user))

    def refused(stream: Any) -> Any:
        sides = stream.process(Puts(), schema=USER).on_error("skip")
        return sides.side_output("refused").select("user")

    with pt.harness(refused, schema={"n": int, "user": str, "tags": list[str]}) as h:
        h.push({"user": "ann", "n": 7, "tags": []})
        assert (h.take(), h.bad_rows) == (expected, 1 - len(expected))


def test_a_tuple_for_a_side_output_of_which_a_list_alone_is_read_is_a_row() -> None:
    class Puts(ps.ProcessFunction):
        def process(self, row: Any, ctx: Any, out: Any) -> None:
            out.side("refused", (1, row.tags))

    def refused(stream: Any) -> Any:
        return stream.process(Puts(), schema=USER).side_output("refused").select("tags")

    with pt.harness(refused, schema={"n": int, "tags": list[int]}) as h:
        h.push({"n": 7, "tags": [3]})
        assert h.take() == [{"tags": [3]}]


def test_rows_without_a_given_time_have_that_of_the_clock_or_none() -> None:
    with pt.harness(Route(), schema=USER, output_schema={"n": int, "at": int}, now=5) as h:
        h.push({"user": "a", "n": 1})
        assert h.take(event_time=True) == [(5, {"n": 1, "at": 5})]
    with pt.harness(
        Route(), schema=USER, output_schema={"n": int, "at": int}, event_time=False
    ) as h:
        h.push({"user": "a", "n": 1})
        assert h.output == [{"n": 1, "at": None}]
        with pytest.raises(ps.JobRejected, match="no event time"):
            h.push({"user": "a", "n": 1}, event_time=5)
        with pytest.raises(ps.JobRejected, match="no event time"):
            h.take(event_time=True)


class Sessions(ps.KeyedProcessFunction):
    count = ps.ReducingState("count", pa.int64(), lambda a, b: a + b)
    items = ps.ListState("items", pa.string())
    by_kind = ps.MapState("by_kind", pa.string(), pa.int64())
    mean = ps.AggregatingState("mean", "mean")

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.count.add(1)
        self.items.add(row.kind)
        self.by_kind.put(row.kind, row.n)
        self.mean.add(row.n)
        ctx.timers.event_time(ctx.timestamp + 10)
        ctx.timers.processing_time(ctx.now_ms + 1000)

    def on_timer(self, timestamp: int, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(key=f"{ctx.key}", at=timestamp, domain=ctx.time_domain)


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_keyed_functions_show_their_states_and_timers(backend: Any) -> None:
    with pt.harness(
        Sessions(),
        keys=["user", "region"],
        schema={"user": str, "region": int, "kind": str, "n": int},
        output_schema={"key": str, "at": int, "domain": str},
        backend=backend,
    ) as h:
        h.push({"user": "a", "region": 1, "kind": "x", "n": 2}, event_time=100)
        h.push({"user": "a", "region": 1, "kind": "y", "n": 4}, event_time=50)
        h.push({"user": "b", "region": 1, "kind": "x", "n": 1}, event_time=70)
        assert h.state("count", key=("a", 1)) == 2
        assert h.state("items", key=("a", 1)) == ["x", "y"]
        assert h.state("by_kind", key=("a", 1)) == {"x": 2, "y": 4}
        assert h.state("mean", key=("a", 1)) == 3.0
        assert h.state("count", key=("a", 2)) is None
        assert h.state("items", key=("a", 2)) == []
        assert h.timers(key=("a", 1)) == [60, 110]
        assert h.timers() == [60, 80, 110]
        assert h.timers(domain="processing") == [1000, 1000]
        h.watermark(80)
        assert h.watermark_ms == 80
        assert h.take(event_time=True) == [
            (60, {"key": "('a', 1)", "at": 60, "domain": "event"}),
            (80, {"key": "('b', 1)", "at": 80, "domain": "event"}),
        ]
        h.advance("999ms")
        assert h.output == []
        h.advance(1)
        assert h.now == 1000
        assert {(row["key"], row["domain"]) for row in h.take()} == {
            ("('a', 1)", "processing"),
            ("('b', 1)", "processing"),
        }
        h.end()
        assert [row["at"] for row in h.take()] == [110]
        assert h.watermark_ms == ps.MAX_WATERMARK
        assert h.timers() == []


class Totals(ps.KeyedBatchFunction):
    total = ps.ValueState("total", pa.int64())

    def process_batch(self, keys: pa.Array, batch: pa.RecordBatch, out: ps.BatchCollector) -> None:
        held = dict(zip(keys.to_pylist(), self.total.get_many(keys).to_pylist(), strict=True))
        for key, n in zip(keys.to_pylist(), batch.column("n").to_pylist(), strict=True):
            held[key] = (held[key] or 0) + n
        self.total.put_many(keys, pa.array([held[key] for key in keys.to_pylist()]))
        out.emit(pa.RecordBatch.from_pylist([{"total": held[key]} for key in keys.to_pylist()]))


def test_batch_functions_see_what_was_pushed_as_one_batch() -> None:
    with pt.harness(
        Totals(), keys="user", schema=USER, output_schema=pa.schema([("total", pa.int64())])
    ) as h:
        h.push_many(pa.table({"n": [1, 2], "user": ["a", "a"]}), event_times="n")
        assert h.output == [{"total": 3}, {"total": 3}]
        assert h.state("total", key="a") == 3


class Limits(ps.KeyedBroadcastProcessFunction):
    limits = ps.BroadcastState("limits", pa.string(), pa.int64())
    spent = ps.ValueState("spent", pa.int64(), default=0)

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.spent.update(self.spent.value() + row.n)
        if self.spent.value() > self.limits.get(row.user, 10):
            out.emit(user=row.user, n=self.spent.value())

    def process_broadcast(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.limits.put(row.user, row.n)


class Rules(ps.BroadcastProcessFunction):
    rules = ps.BroadcastState("rules", pa.string(), pa.int64())

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        if row.n > self.rules.get(row.user, 0):
            out.emit(row)

    def process_broadcast(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.rules.put(row.user, row.n)


def test_broadcast_functions_have_two_inputs() -> None:
    with pt.harness(Limits(), keys=["user"], schema=USER, output_schema=USER) as h:
        h.push({"user": "a", "n": 8})
        h.push({"user": "a", "n": 5}, input=1)
        h.push({"user": "a", "n": 1})
        assert h.output == [{"user": "a", "n": 9}]
        assert h.state("limits") == {"a": 5}
        assert h.state("spent", key="a") == 9
    with pt.harness(Rules(), schema=USER, output_schema=USER) as h:
        h.push({"user": "a", "n": 3}, input=1)
        h.push_many([{"user": "a", "n": n} for n in (2, 3, 4)])
        assert h.output == [{"user": "a", "n": 4}]


class Match(ps.KeyedCoProcessFunction):
    left = ps.ValueState("left", pa.int64())

    def process_left(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.left.update(row.n)
        ctx.timers.event_time(ctx.timestamp + 5)

    def process_right(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(name=row.name, n=self.left.value() or -1)

    def on_timer(self, timestamp: int, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(name=ctx.key, n=timestamp)


class Both(ps.CoProcessFunction):
    def process_left(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(text=f"left {row.n}")

    def process_right(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(text=f"right {row.name}")


def test_functions_of_two_streams_and_watermarks_of_both() -> None:
    with pt.harness(
        Match(),
        keys="user",
        schema=USER,
        second_schema={"name": str},
        second_keys="name",
        output_schema={"name": str, "n": int},
    ) as h:
        h.push({"user": "a", "n": 7}, event_time=10)
        h.push({"name": "a"}, event_time=11, input=1)
        h.push({"name": "b"}, event_time=11, input=1)
        assert h.take() == [{"name": "a", "n": 7}, {"name": "b", "n": -1}]
        h.watermark(20, input=0)
        assert h.output == []  # the other stream holds event time back
        assert h.watermark_ms == ps.MIN_WATERMARK
        h.watermark(15, input=1)
        assert h.take() == [{"name": "a", "n": 15}]
        assert h.watermark_ms == 15
    with pt.harness(
        Both(), schema=USER, second_schema={"name": str}, output_schema={"text": str}
    ) as h:
        h.push({"name": "x"}, input=1)
        h.push({"user": "a", "n": 1})
        assert [row["text"] for row in h.output] == ["right x", "left 1"]


def test_joins_and_unions_are_chains_of_two_streams() -> None:
    with pt.harness(
        lambda clicks, orders: clicks.key_by("user").join(
            orders.key_by("user"), on="user", within=("-5ms", "5ms")
        ),
        schema=USER,
        second_schema={"user": str, "price": float},
    ) as h:
        h.push({"user": "a", "n": 1}, event_time=10)
        h.push({"user": "a", "price": 2.5}, event_time=14, input=1)
        h.push({"user": "a", "price": 9.5}, event_time=16, input=1)
        assert h.output == [{"user": "a", "n": 1, "price": 2.5}]
    with pt.harness(lambda a, b: a.union(b), schema=USER, inputs=2) as h:
        h.push({"user": "a", "n": 1}, input=1)
        h.push({"user": "b", "n": 2})
        assert [row["user"] for row in h.output] == ["a", "b"]


class Spread(ps.WindowFunction):
    def process(
        self, key: Any, window: ps.WindowInfo, rows: Sequence[ps.Row], out: ps.Collector
    ) -> None:
        numbers = [row.n for row in rows]
        out.emit(user=key, spread=max(numbers) - min(numbers), end=window.end_ms)


class Product(ps.AggregateFunction):
    def create_accumulator(self) -> int:
        return 1

    def add(self, accumulator: int, value: Any) -> int:
        return int(accumulator * value.n)

    def merge(self, a: int, b: int) -> int:
        return a * b

    def result(self, accumulator: int) -> int:
        return accumulator


def test_window_functions_and_aggregates_fire_with_the_watermark() -> None:
    with pt.harness(
        Spread(),
        keys="user",
        window=ps.tumbling("10ms"),
        schema=USER,
        output_schema={"user": str, "spread": int, "end": int},
    ) as h:
        for n, time in ((1, 1), (5, 9), (9, 11)):
            h.push({"user": "a", "n": n}, event_time=time)
        h.watermark(9)
        assert h.take(event_time=True) == [(9, {"user": "a", "spread": 4, "end": 10})]
        h.end()
        assert h.output == [{"user": "a", "spread": 0, "end": 20}]
    with pt.harness(Product(), window=ps.count_window(2), schema=USER) as h:
        h.push_many([{"user": "a", "n": n} for n in (2, 3, 4)])
        assert h.output == [{"window_index": 0, "result": 6}]
    with pt.harness(Product(), keys="user", schema=USER) as h:
        h.push_many([{"user": "a", "n": n} for n in (2, 3)])
        h.push({"user": "a", "n": 4})
        assert h.output == [{"user": "a", "result": 6}, {"user": "a", "result": 24}]


class ByUser(ps.AggregateFunction):
    def create_accumulator(self) -> dict[str, list[int]]:
        return {}

    def add(self, accumulator: dict[str, list[int]], value: Any) -> dict[str, list[int]]:
        accumulator.setdefault(value.user, []).append(value.n)
        return accumulator

    def merge(self, a: dict[str, list[int]], b: dict[str, list[int]]) -> dict[str, list[int]]:
        for user, numbers in b.items():
            if user in a:
                a[user] += numbers
            else:
                a[user] = numbers  # shared with b
        return a

    def result(self, accumulator: dict[str, list[int]]) -> str:
        return repr(accumulator)


def test_a_merge_may_take_over_parts_of_the_other_accumulator() -> None:
    window = ps.sliding("3s", "1s")
    with pt.harness(ByUser(), window=window, schema=USER) as h:
        rows = [{"user": "a", "n": n} for n in (1, 2, 3)]
        h.push_many(rows, event_times=[0, 1000, 2000])
        h.end()
        found = [eval(row["result"])["a"] for row in h.output]
        assert found == [[1], [1, 2], [1, 2, 3], [2, 3], [3]]


class Sorted(ps.AggregateFunction):
    """Gives one list again and again."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def create_accumulator(self) -> list[int]:
        return []

    def add(self, accumulator: list[int], value: Any) -> list[int]:
        return [*accumulator, value.n]

    def merge(self, a: list[int], b: list[int]) -> list[int]:
        return a + b

    def result(self, accumulator: list[int]) -> list[int]:
        self.found[:] = sorted(accumulator)
        return self.found


def test_the_result_of_an_aggregate_is_taken_as_it_is_when_it_is_given() -> None:
    with pt.harness(Sorted(), keys="user", window=ps.tumbling("1s"), schema=USER) as h:
        h.push_many([{"user": u, "n": n} for u, n in (("a", 2), ("b", 3), ("a", 1))], [0] * 3)
        h.end()
        assert [(row["user"], row["result"]) for row in h.output] == [("a", [1, 2]), ("b", [3])]


def test_late_rows_and_windows_of_processing_time() -> None:
    with pt.harness(
        lambda stream: (
            stream.key_by("user")
            .window(ps.tumbling("10ms"), late_to="late")
            .aggregate(n=ps.sum("n"))
        ),
        schema={**USER, "note": str},
    ) as h:
        h.push({"user": "a", "n": 1, "note": "in time"}, event_time=3)
        h.watermark(9)
        h.push({"user": "a", "n": 2, "note": "late"}, event_time=4)
        assert [row["n"] for row in h.take()] == [1]
        assert h.side("late") == [{"user": "a", "n": 2, "note": "late"}]
        assert h.late_rows == 1
    with pt.harness(
        lambda stream: stream.window(ps.tumbling("10s"), time="processing").aggregate(n=ps.count()),
        schema=USER,
        now=1_000,
    ) as h:
        h.push({"user": "a", "n": 1})
        h.advance("8s")
        assert h.output == []
        h.advance("1s")
        assert [row["n"] for row in h.output] == [1]
        assert h.output[0]["window_end"] == dt.datetime(1970, 1, 1, 0, 0, 10, tzinfo=dt.UTC)


def test_event_time_of_the_chain_makes_its_own_watermarks() -> None:
    with pt.harness(
        lambda stream: (
            stream.with_event_time("at", out_of_orderness="5ms")
            .key_by("user")
            .window(ps.tumbling("10ms"))
            .aggregate(n=ps.count())
        ),
        schema={"user": str, "at": int},
        event_time=False,
    ) as h:
        h.push({"user": "a", "at": 3})
        h.push({"user": "a", "at": 14})
        assert h.output == []
        h.push({"user": "a", "at": 16})
        assert [row["n"] for row in h.output] == [1]


def test_bad_rows_go_where_the_policy_says() -> None:
    with pt.harness(
        lambda stream: stream.map(lambda row: {"n": 10 // row.n}, schema={"n": int}).on_error(
            "bad"
        ),
        schema=USER,
    ) as h:
        h.push_many([{"user": "a", "n": 0}, {"user": "b", "n": 5}])
        assert h.output == [{"n": 2}]
        (bad,) = h.side("bad")
        assert (bad["user"], bad["n"]) == ("a", 0)
        assert "ZeroDivisionError" in bad["error"]
        assert h.bad_rows == 1


class Files(ps.TwoPhaseSink):
    """Keeps rows in a file per checkpoint, which a commit gives its final name."""

    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)
        self.rows: list[Any] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.to_pylist()

    def prepare_commit(self, checkpoint_id: int) -> list[bytes]:
        if not self.rows:
            return []
        name = f"{checkpoint_id}.json"
        (Path(self.directory) / f"_{name}").write_text(json.dumps(self.rows))
        self.rows = []
        return [name.encode()]

    def commit(self, committable: bytes) -> None:
        waiting = Path(self.directory) / f"_{committable.decode()}"
        if waiting.exists():
            waiting.rename(waiting.with_name(committable.decode()))

    def abort(self, committable: bytes) -> None:
        (Path(self.directory) / f"_{committable.decode()}").unlink(missing_ok=True)


def test_two_phase_sinks_commit_with_a_checkpoint_and_at_the_end(tmp_path: Path) -> None:
    def files() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    with pt.harness(Files(tmp_path), schema=USER) as h:
        h.push({"user": "a", "n": 1})
        assert files() == []
        h.snapshot()
        assert files() == ["1.json"]
        h.push({"user": "a", "n": 2})
        failed = h.snapshot(complete=False)
        assert files() == ["1.json", "_2.json"]
    with pt.harness(Files(tmp_path), schema=USER, restore=failed) as h:
        assert files() == ["1.json", "2.json"]
        h.push({"user": "a", "n": 3})
        h.end()
        assert files() == ["1.json", "2.json", "3.json"]


def test_built_in_sinks_end_a_chain(tmp_path: Path) -> None:
    def written() -> list[int]:
        lines = [
            line for path in sorted(tmp_path.glob("part-*")) for line in path.read_text().split()
        ]
        return sorted(json.loads(line)["n"] for line in lines)

    def chain(stream: ps.Stream) -> Any:
        return stream.filter(ps.col("n") > 0).write_json(str(tmp_path)).uid("files")

    with pt.harness(chain, schema=USER) as h:
        h.push_many([{"user": "a", "n": n} for n in (0, 1)])
        h.snapshot()
        h.push({"user": "a", "n": 2})
        failed = h.snapshot(complete=False)
        h.push({"user": "a", "n": 3})
        assert h.output == []
        assert written() == [1]
    with pt.harness(chain, schema=USER, restore=failed) as h:
        assert written() == [1, 2]
        h.push({"user": "a", "n": 4})
        h.end()
    assert written() == [1, 2, 4]


class Reader(ps.Reader):
    def __init__(self, first: int, last: int) -> None:
        self.next, self.last = first, last

    def read(self, max_rows: int) -> Any:
        if self.next == self.last:
            return ps.END
        self.next += 1
        return pa.RecordBatch.from_pylist([{"n": self.next - 1}])

    def position(self) -> bytes:
        return str(self.next).encode()


class Numbers(ps.Source):
    schema = pa.schema([("n", pa.int64())])
    bounded = True

    def discover(self, ctx: ps.SourceContext) -> list[ps.Split]:
        return [ps.Split(f"{first}", payload=str(first).encode()) for first in (0, 10)]

    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        first = int(split.payload)
        return Reader(first if position is None else int(position), first + 3)


def test_sources_are_read_on_demand_and_go_on_from_a_snapshot() -> None:
    with pt.harness(Numbers()) as h:
        assert h.output == []
        h.read(rows=2)
        h.read(rows=1)
        assert [row["n"] for row in h.take()] == [0, 1, 2]
        snapshot = h.snapshot()
        h.read()
        assert [row["n"] for row in h.take()] == [10, 11, 12]
        with pytest.raises(ps.JobRejected, match="read to its end"):
            h.snapshot()
        with pytest.raises(ps.JobRejected, match=r"call read\(\)"):
            h.push({"n": 1})
    with pt.harness(Numbers(), restore=snapshot) as h:
        assert h.output == []  # nothing is read before it is asked for
        h.read(rows=1)
        assert [row["n"] for row in h.take()] == [10]
        h.read()
        assert [row["n"] for row in h.output] == [11, 12]
    with pytest.raises(ps.JobRejected, match="subtask 0"):
        pt.harness(Numbers(), subtask=1, parallelism=2)


class Endless(Numbers):
    bounded = False

    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        return Reader(int(position or split.payload), last=-1)


class HesitantReader(Reader):
    is_silent = False

    def read(self, max_rows: int) -> Any:
        self.is_silent = not self.is_silent
        return None if self.is_silent else super().read(max_rows)


class Hesitant(Endless):
    """The first split has nothing every other time it is asked."""

    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        reader = HesitantReader if split.id == "0" else Reader
        return reader(int(position or split.payload), last=-1)


@pytest.mark.parametrize(
    ("source", "first", "then"),
    [
        (Endless, [0, 10, 1, 11, 2, 12], [3, 13, 4, 14]),
        (Hesitant, [10, 0, 11, 12, 1, 13], [14, 2, 15, 16]),
    ],
)
def test_splits_without_end_are_read_in_turn(
    source: type[Endless], first: list[int], then: list[int]
) -> None:
    """One that waited for the end of another would wait for ever."""
    with pt.harness(source()) as h:
        h.read(rows=6)
        assert [row["n"] for row in h.take()] == first
        snapshot = h.snapshot()
    with pt.harness(source(), restore=snapshot) as h:
        h.read(rows=4)
        assert [row["n"] for row in h.take()] == then


class Arriving(Numbers):
    """Lists again every second what has come so far, which may be nothing for a while."""

    bounded = False
    listed: ClassVar[list[int]] = []

    def discovery_interval_ms(self) -> int | None:
        return 1_000

    def discover(self, ctx: ps.SourceContext) -> list[ps.Split]:
        return [ps.Split(f"split-{first}", payload=str(first).encode()) for first in self.listed]


def passed(h: pt.Harness, duration_ms: int) -> None:
    """So much time passes, whatever the wall clock says."""
    h._runner.advance(h._runner.clock.time_ms + duration_ms)


@pytest.mark.parametrize("hours", [-3, 3])
def test_a_source_lists_again_when_it_has_paused_however_the_wall_clock_is_set(
    monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    monkeypatch.setattr(Arriving, "listed", [0])
    with pt.harness(Arriving()) as h:
        h.read()
        assert len(h.take()) == 3
        h._runner.clock.wall_ahead_ms = hours * 3_600_000
        monkeypatch.setattr(Arriving, "listed", [0, 10])
        passed(h, 900)
        h.read()
        assert h.take() == []
        passed(h, 100)
        h.read()
        assert len(h.take()) == 3


class HourlyReader(Reader):
    """A row at each full hour of the wall clock."""

    ctx: ps.SourceContext
    due_ms = 0

    def read(self, max_rows: int) -> Any:
        hour_ms = 3_600_000
        if self.ctx.now_ms() < self.due_ms:
            return None
        self.due_ms = (self.ctx.now_ms() // hour_ms + 1) * hour_ms
        return super().read(1)

    def next_read_at_ms(self) -> int | None:
        return self.due_ms


class Hourly(Endless):
    def start(self, ctx: ps.SourceContext) -> None:
        self.ctx = ctx

    def discover(self, ctx: ps.SourceContext) -> list[ps.Split]:
        return super().discover(ctx)[:1]

    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        reader = HourlyReader(0, last=-1)
        reader.ctx = self.ctx
        return reader


def test_a_source_that_names_a_time_of_day_is_asked_then_though_the_clock_is_set_meanwhile() -> (
    None
):
    with pt.harness(Hourly()) as h:
        h.read()
        h.take()
        passed(h, 59 * 60_000)
        assert h.take() == []
        h._runner.clock.wall_ahead_ms = 70_000
        passed(h, 1_000)
        assert len(h.take()) == 1
        h._runner.clock.wall_ahead_ms = -3_600_000
        passed(h, 110 * 60_000)
        assert h.take() == []
        passed(h, 12 * 60_000)
        assert len(h.take()) == 1


def test_a_source_that_lists_again_reads_each_split_once_over_snapshots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def listed(*numbers: int) -> None:
        monkeypatch.setattr(Arriving, "listed", list(numbers))

    def rows(h: pt.Harness) -> list[int]:
        h.advance("1s")
        h.read()
        return [row["n"] for row in h.take()]

    first = range(0, 1_000, 10)
    listed(*first)
    with pt.harness(Arriving()) as h:
        assert len(rows(h)) == 300
        snapshot = h.snapshot()
        by_name = sum(len(f"split-{number}") for number in first)
        assert len(h.snapshot()) == len(snapshot)
        failed = h.snapshot(complete=False)
        listed()
        assert rows(h) == []
        listed(*first, 2_000)
        assert rows(h) == [2_000, 2_001, 2_002]
        listed(*first, 2_000, 3_000)
        later = h.snapshot(complete=False)
        assert len(later) - len(failed) < by_name / 10
        last = h.snapshot()
    for restored, expected in (
        (snapshot, [2_000, 3_000]),
        (failed, [2_000, 3_000]),
        (last, [3_000]),
    ):
        with pt.harness(Arriving(), restore=restored) as h:
            assert [n for n in rows(h) if n % 10 == 0] == expected
            again = h.snapshot()
        with pt.harness(Arriving(), restore=again) as h:
            assert rows(h) == []


def test_rows_that_are_asked_for_with_event_times_that_they_lack_are_still_there() -> None:
    def passed_on(stream: ps.Stream) -> ps.Stream:
        return stream.map_batches(lambda batch: batch, schema=USER)

    with pt.harness(passed_on, schema=USER) as h:
        h.push({"user": "ann", "n": 1}, event_time=5)
        with pytest.raises(ps.JobRejected, match="no event time"):
            h.take(event_time=True)
        assert len(h.take()) == 1


def test_flat_map_may_return_none_for_no_row() -> None:
    def large(row: Any) -> Any:
        return [{"n": row.n}, {"n": -row.n}] if row.n > 1 else None

    sample = [{"n": 0}, {"n": 2}]
    with pt.harness(lambda s: s.flat_map(large).map(lambda row: {"m": row.n}), schema=sample) as h:
        h.push_many([{"n": n} for n in (1, 2, 0, 3)])
        assert h.output == [{"m": m} for m in (2, -2, 3, -3)]


def test_flat_map_may_return_nothing_else_than_rows() -> None:
    h = pt.harness(
        lambda s: s.flat_map(lambda row: False, schema={"n": "int64"}), schema={"n": int}
    )
    with h, pytest.raises(ps.JobFailed, match="None for no row, or yields them, got bool"):
        h.push({"n": 1})


@pytest.mark.parametrize("kind", ["raises", "does not fit"])
def test_a_failing_row_is_shown_up_to_a_thousand_characters(kind: str) -> None:
    def fails(row: Any) -> Any:
        assert len(row.as_dict()) == 21
        return {"n": 1 // 0 if kind == "raises" else "text"}

    schema = {f"column_{n:02}": str for n in range(20)} | {"last": str}
    row = dict.fromkeys(schema, "x" * 20)
    for size, is_whole in ((20, True), (2_000, False)):
        h = pt.harness(lambda s: s.map(fails, schema={"n": "int64"}), schema=schema)
        with h, pytest.raises(ps.JobFailed) as failed:
            h.push({**row, "last": "y" * size})
        assert ("'" + "y" * 20 in failed.value.row) == is_whole or len(failed.value.row) == 1_000
        assert len(failed.value.row) <= 1_000
