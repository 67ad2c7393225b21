"""Projections, filters, row and batch functions: results, event time, error policies, time slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import cloudpickle
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from common.elements import PAUSE, OperatorOutput, SideOutput
from penstock.config import Configuration
from penstock.errors import ExpressionError, TaskFailure
from penstock.expressions import Expr, col, lit
from penstock.functions.functions import MapFunction
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME, schema_to_bytes
from taskmanager.operators.batch_function import BatchFunctionOperator
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.operators.operator import Operator, OperatorContext
from taskmanager.operators.project import FilterOperator, ProjectOperator
from taskmanager.operators.row_function import RowFunctionOperator
from taskmanager.operators.time_slice import SLICE_NS, TimeSlice
from tests.support.examples import examples

TIME = pa.field(EVENT_TIME, pa.int64(), nullable=False)
INPUT = pa.schema([("x", pa.int64()), ("s", pa.string()), TIME])
BATCH = pa.record_batch({"x": [1, 2, 3, None], "s": ["1", "two", "3", "4"], EVENT_TIME: [10, 20, 30, 40]}, schema=INPUT)  # fmt: skip
KINDS = {
    "map": graph_pb2.ROW_FUNCTION_KIND_MAP,
    "flat_map": graph_pb2.ROW_FUNCTION_KIND_FLAT_MAP,
    "filter": graph_pb2.ROW_FUNCTION_KIND_FILTER,
    "key": graph_pb2.ROW_FUNCTION_KIND_KEY,
}
POLICIES = {
    "fail": graph_pb2.ErrorPolicy(),
    "skip": graph_pb2.ErrorPolicy(action=graph_pb2.ERROR_ACTION_SKIP),
    "side": graph_pb2.ErrorPolicy(action=graph_pb2.ERROR_ACTION_SIDE_OUTPUT, tag="bad"),
}


class FakeClock:
    """Time that passes when a function under test says so."""

    def __init__(self) -> None:
        self.ns = 0

    def now_ms(self) -> int:
        return self.ns // 1_000_000

    def monotonic_ns(self) -> int:
        return self.ns


def context(batch_rows: int = 8192) -> OperatorContext:
    place = SimpleNamespace(
        job_name="job",
        operator_name="op",
        subtask_index=0,
        parallelism=1,
        attempt=0,
        clock=FakeClock(),
        counters=SubtaskCounters(),
        config=Configuration.from_mapping({"execution.batch-rows": batch_rows}),
    )
    return cast("OperatorContext", place)


def specification(
    given: pa.Schema, output: pa.Schema, on_error: str = "fail"
) -> graph_pb2.Operator:
    return graph_pb2.Operator(
        name="op",
        input_schema=schema_to_bytes(given),
        output_schema=schema_to_bytes(output),
        on_error=POLICIES[on_error],
    )


def row_operator(
    kind: str,
    function: object,
    output: pa.Schema,
    on_error: str = "fail",
    given: pa.Schema = INPUT,
    place: OperatorContext | None = None,
) -> RowFunctionOperator:
    spec = specification(given, output, on_error)
    spec.row_function.kind = KINDS[kind]
    spec.row_function.function.pickled = cloudpickle.dumps(function)
    spec.row_function.function.display_name = "module.function"
    operator = RowFunctionOperator(spec)
    operator.open(place or context())
    return operator


def batch_operator(function: object, output: pa.Schema, on_error: str = "fail") -> Operator:
    spec = specification(INPUT, output, on_error)
    spec.batch_function.function.pickled = cloudpickle.dumps(function)
    spec.batch_function.function.display_name = "module.function"
    operator = BatchFunctionOperator(spec)
    operator.open(context())
    return operator


def run(operator: Operator, batch: pa.RecordBatch = BATCH) -> tuple[list[Any], list[Any]]:
    """Rows of the main output and of the side output."""
    main: list[Any] = []
    side: list[Any] = []
    for element in operator.process(batch):
        if isinstance(element, pa.RecordBatch):
            element.validate(full=True)
            main += element.to_pylist()
        elif isinstance(element, SideOutput):
            assert element.tag == "bad"
            side += element.batch.to_pylist()
    return main, side


def project(columns: dict[str, Expr], output: pa.Schema, on_error: str = "fail") -> Operator:
    spec = specification(INPUT, output, on_error)
    for name, expression in columns.items():
        spec.project.columns.add(name=name, expression=expression.to_proto())
    operator = ProjectOperator(spec)
    operator.open(context())
    return operator


def keep(predicate: Expr, output: pa.Schema = INPUT, on_error: str = "fail") -> Operator:
    spec = specification(INPUT, output, on_error)
    spec.filter.predicate.CopyFrom(predicate.to_proto())
    operator = FilterOperator(spec)
    operator.open(context())
    return operator


def test_projection_keeps_event_time_where_it_is_carried() -> None:
    columns = {"y": col("x") + 1, "one": lit(1)}
    plain = pa.schema([("y", pa.int64()), ("one", pa.int64())])
    rows, _ = run(project(columns, plain.append(TIME)))
    assert rows[0] == {"y": 2, "one": 1, EVENT_TIME: 10}
    explicit = {**columns, EVENT_TIME: col(EVENT_TIME)}
    assert run(project(explicit, plain.append(TIME)))[0] == rows
    assert run(project(columns, plain))[0][3] == {"y": None, "one": 1}
    with pytest.raises(ExpressionError, match="planned as string"):
        project(columns, pa.schema([("y", pa.string()), ("one", pa.int64())]))


def test_filter_drops_null_and_false() -> None:
    assert [r["x"] for r in run(keep(col("x") > 1))[0]] == [2, 3]
    assert run(keep(lit(True)))[0] == BATCH.to_pylist()
    assert run(keep(lit(None)))[0] == []
    assert run(keep(col("x") > 1, pa.schema([("s", pa.string())])))[0] == [{"s": "two"}, {"s": "3"}]
    with pytest.raises(ExpressionError, match="must be bool"):
        keep(col("x") + 1)


@pytest.mark.parametrize("build", [
    lambda e: project({"n": col("s").cast("int64")}, pa.schema([("n", pa.int64()), TIME]), e),
    lambda e: keep(col("s").cast("int64") > 0, INPUT, e),
])  # fmt: skip
def test_expressions_obey_the_error_policy(build: Callable[[str], Operator]) -> None:
    with pytest.raises(TaskFailure, match="'two'") as caught:
        run(build("fail"))
    assert caught.value.operator == "op"
    assert "'s': 'two'" in caught.value.row
    skipping = build("skip")
    assert [r[EVENT_TIME] for r in run(skipping)[0]] == [10, 30, 40]
    assert skipping.context.counters.bad_records == 1
    main, side = run(build("side"))
    assert [r[EVENT_TIME] for r in main] == [10, 30, 40]
    assert [(r["x"], r["s"]) for r in side] == [(2, "two")]
    assert "'two'" in side[0]["error"]


OUTPUT = pa.schema([("n", pa.int64()), TIME])


@dataclasses.dataclass
class N:
    n: int


def parse(row: Any) -> dict[str, int]:
    return {"n": int(row.s)}


def parse_all(row: Any) -> Iterator[N]:
    for character in row.s:
        yield N(int(character))


def test_row_functions() -> None:
    assert run(row_operator("map", lambda r: N(len(r.s)), OUTPUT))[0] == [
        {"n": n, EVENT_TIME: t} for n, t in ((1, 10), (3, 20), (1, 30), (1, 40))
    ]
    doubled, _ = run(row_operator("flat_map", lambda r: [(r.x,)] * (r.x or 0), OUTPUT))
    assert [(r["n"], r[EVENT_TIME]) for r in doubled] == [(1, 10), (2, 20), (2, 20), *[(3, 30)] * 3]
    kept, _ = run(row_operator("filter", lambda r: r.x and r.x > 1, INPUT))
    assert kept == BATCH.to_pylist()[1:3]
    narrow = pa.schema([("s", pa.string())])
    assert run(row_operator("filter", lambda r: r.x == 1, narrow))[0] == [{"s": "1"}]
    keyed = pa.schema([("x", pa.int64()), ("key", pa.string()), TIME])
    rows, _ = run(row_operator("key", lambda r: r.s * 2, keyed))
    assert rows[0] == {"x": 1, "key": "11", EVENT_TIME: 10}
    assert list(row_operator("map", parse, OUTPUT).process(BATCH.slice(0, 0))) == []


def test_without_event_time() -> None:
    plain = INPUT.remove(2)
    operator = row_operator("map", parse, OUTPUT.remove(1), given=plain)
    assert run(operator, BATCH.select(["x", "s"]).slice(2))[0] == [{"n": 3}, {"n": 4}]


BAD = [
    ("map", parse, "invalid literal"),
    ("map", lambda r: {"n": r.s if r.s == "two" else 1}, "column 'n' has type int64, got 'two'"),
    ("map", lambda r: {"m": 1} if r.s == "two" else {"n": 1}, "unknown columns m"),
    ("flat_map", parse_all, "invalid literal"),
    ("flat_map", lambda r: 5 if r.s == "two" else [{"n": 1}], "returns a list of rows"),
    ("flat_map", lambda r: [N(1)] if r.s != "two" else [{"n": "x"}], "got 'x'"),
]


@pytest.mark.parametrize(("kind", "function", "message"), BAD, ids=range(len(BAD)))
def test_functions_obey_the_error_policy(kind: str, function: Any, message: str) -> None:
    with pytest.raises(TaskFailure, match=message) as caught:
        run(row_operator(kind, function, OUTPUT))
    assert caught.value.operator == "op"
    assert "module.function" in str(caught.value)
    assert caught.value.row == "Row(x=2, s='two')"
    skipping = row_operator(kind, function, OUTPUT, "skip")
    main, _ = run(skipping)
    assert [r[EVENT_TIME] for r in main] == [10, 30, 40]
    assert skipping.context.counters.bad_records == 1
    main, side = run(row_operator(kind, function, OUTPUT, "side"))
    assert [r[EVENT_TIME] for r in main] == [10, 30, 40]
    ((x, s, error),) = [tuple(r.values()) for r in side]
    assert (x, s) == (2, "two")
    assert message.split(" ", maxsplit=1)[0] in error


def test_the_users_traceback_is_the_users() -> None:
    with pytest.raises(TaskFailure) as caught:
        run(row_operator("map", parse, OUTPUT))
    trace = caught.value.user_traceback
    assert "in parse" in trace
    assert "int(row.s)" in trace
    assert "row_function.py" not in trace
    with pytest.raises(TaskFailure, match="no column 'q'; its columns are x, s"):
        run(row_operator("map", lambda r: r.q, OUTPUT))


def test_filter_and_key_errors() -> None:
    def fails(row: Any) -> Any:
        return int(row.s) > 0

    main, side = run(row_operator("filter", fails, INPUT, "side"))
    assert [r["x"] for r in main] == [1, 3, None]
    assert [r["s"] for r in side] == ["two"]
    keyed = INPUT.remove(2).append(pa.field("key", pa.int64(), nullable=False))
    main, side = run(row_operator("key", lambda r: r.x, keyed, "side"))
    assert [r["key"] for r in main] == [1, 2, 3]
    assert "may not be null" in side[0]["error"]


class WithLife(MapFunction):
    @override
    def open(self, ctx: Any) -> None:
        self.suffix = f"{ctx.operator_name}/{ctx.subtask_index}"

    @override
    def close(self) -> None:
        raise RuntimeError("closing")

    @override
    def __call__(self, row: Any) -> Any:
        return {"t": self.suffix}


def test_functions_are_opened_and_closed() -> None:
    operator = row_operator("map", WithLife(), pa.schema([("t", pa.string())]))
    assert run(operator)[0][0] == {"t": "op/0"}
    with pytest.raises(TaskFailure, match=r"function.close raised RuntimeError: closing"):
        operator.close()
    operator.close()

    class FailsToOpen(WithLife):
        @override
        def open(self, ctx: Any) -> None:
            raise OSError("no model")

    with pytest.raises(TaskFailure, match="open raised OSError: no model") as caught:
        row_operator("map", FailsToOpen(), OUTPUT)
    assert caught.value.row == ""
    spec = specification(INPUT, OUTPUT)
    spec.row_function.function.pickled = b"cnosuchmodule\nf\n."
    with pytest.raises(TaskFailure, match="--py-files"):
        RowFunctionOperator(spec).open(context())


def test_an_error_whose_text_raises_is_named_by_its_class() -> None:
    class NamelessError(Exception):
        @override
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def fails(row: Any) -> Any:
        raise NamelessError

    said = r"module.function raised NamelessError \(its text raised RuntimeError\)"
    with pytest.raises(TaskFailure, match=said) as caught:
        run(row_operator("map", fails, OUTPUT))
    assert caught.value.row == "Row(x=1, s='1')"
    assert run(row_operator("map", fails, OUTPUT, "skip")) == ([], [])


def numbers(rows: int) -> pa.RecordBatch:
    columns = {"x": list(range(rows)), "s": ["a"] * rows, EVENT_TIME: list(range(rows))}
    return pa.record_batch(columns, schema=INPUT)


def sliced(kind: str, function: Any, output: pa.Schema, place: OperatorContext, rows: int) -> list[OperatorOutput]:  # fmt: skip
    operator = row_operator(kind, len, output, place=place)
    operator._handle.function = function  # not pickled: it moves this test's clock
    return list(operator.process(numbers(rows)))


@pytest.mark.parametrize("kind", list(KINDS))
def test_slow_functions_pause_and_go_on(kind: str) -> None:
    place = context()
    clock = cast("FakeClock", place.clock)

    def slow(row: Any) -> Any:
        clock.ns += 5_000_000
        return {"map": (row.x,), "flat_map": [(row.x,)], "filter": True, "key": row.x}[kind]

    output = {"filter": INPUT, "key": pa.schema([("key", pa.int64()), TIME])}.get(kind, OUTPUT)
    elements = sliced(kind, slow, output, place, 50)
    pauses = [i for i, e in enumerate(elements) if e is PAUSE]
    assert len(pauses) >= 50 * 5_000_000 // SLICE_NS - 3
    assert all(isinstance(elements[i - 1], pa.RecordBatch) for i in pauses)
    batches = [e for e in elements if isinstance(e, pa.RecordBatch)]
    assert max(b.num_rows for b in batches) <= 8
    assert [t for b in batches for t in b[EVENT_TIME].to_pylist()] == list(range(50))


def test_flat_map_emits_while_it_runs() -> None:
    place = context(batch_rows=100)
    rows, clock = 1000, cast("FakeClock", place.clock)
    taken: list[int] = []

    def endless(row: Any) -> Iterator[tuple[int]]:
        for i in range(rows):
            taken.append(i)
            clock.ns += 100_000
            yield (i,)

    operator = row_operator("flat_map", len, OUTPUT, place=place)
    operator._handle.function = endless
    most, total = 0, 0
    for element in operator.process(numbers(1)):
        if isinstance(element, pa.RecordBatch):
            total += element.num_rows
            most = max(most, len(taken) - total)
            assert element.num_rows <= 100
    assert total == rows
    assert most <= 256


def test_a_bad_row_of_flat_map_leaves_no_half() -> None:
    def half(row: Any) -> Iterator[Any]:
        yield (1,)
        if row.s == "two":
            raise ValueError("half")

    def misfits(row: Any) -> list[Any]:
        return [(1,), ("x" if row.s == "two" else 1,), (None if row.s == "two" else 1,), (1,)]

    for function, copies in ((half, 1), (misfits, 4)):
        main, side = run(row_operator("flat_map", function, OUTPUT, "side"))
        assert [r[EVENT_TIME] for r in main] == [t for t in (10, 30, 40) for _ in range(copies)]
        assert [r["x"] for r in side] == [2]


def test_a_bad_row_of_flat_map_is_one_bad_record_over_several_batches() -> None:
    def misfits(row: Any) -> Iterator[Any]:
        yield from [("x",) if row.s == "two" and i % 2 else (1,) for i in range(8)]

    main, side = run(row_operator("flat_map", misfits, OUTPUT, "side", place=context(batch_rows=3)))
    assert [r[EVENT_TIME] for r in main if r[EVENT_TIME] != 20] == [10] * 8 + [30] * 8 + [40] * 8
    assert [r["x"] for r in side] == [2]


@examples(40)
@given(
    st.sampled_from(["map", "flat_map", "filter", "key"]),
    st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=60),
)
def test_every_row_comes_out_once(kind: str, plan: list[tuple[bool, int]]) -> None:
    """Good rows in the main output with their event time, bad ones in the side output, in order."""
    columns = {
        "x": [n for _, n in plan],
        "s": ["good" if ok else "bad" for ok, _ in plan],
        EVENT_TIME: list(range(len(plan))),
    }
    batch = pa.record_batch(columns, schema=INPUT)

    def function(row: Any) -> Any:
        if row.s == "bad":
            raise ValueError(row.x)
        return {"map": (row.x,), "flat_map": [(row.x,)] * row.x, "filter": row.x, "key": row.x}[
            kind
        ]

    output = {"filter": INPUT, "key": pa.schema([("key", pa.int64()), TIME])}.get(kind, OUTPUT)
    main, side = run(row_operator(kind, function, output, "side"), batch)
    copies = {"flat_map": [0, 1, 2, 3], "filter": [0, 1, 1, 1]}.get(kind, [1] * 4)
    expected = [t for t, (ok, n) in enumerate(plan) for _ in range(copies[n]) if ok]
    assert [r[EVENT_TIME] for r in main] == expected
    assert [r["x"] for r in side] == [n for ok, n in plan if not ok]


def test_time_slices_adapt_to_the_function() -> None:
    now = [0]
    time_slice = TimeSlice(lambda: now[0])
    assert not any(time_slice.is_over() for _ in range(20))
    assert time_slice.stride == 256
    for _ in range(8):
        now[0] += 5_000_000
        time_slice.is_over()
    assert time_slice.stride == 1
    assert time_slice.is_over()


def test_batch_functions() -> None:
    def double(batch: pa.RecordBatch) -> pa.RecordBatch:
        assert batch.schema.names == ["x", "s"]
        return pa.record_batch({"n": [2 * v if v else 0 for v in batch["x"].to_pylist()]})

    rows, _ = run(batch_operator(double, OUTPUT))
    assert [(r["n"], r[EVENT_TIME]) for r in rows] == [(2, 10), (4, 20), (6, 30), (0, 40)]
    plain = OUTPUT.remove(1)
    assert len(run(batch_operator(lambda b: pa.table({"n": [1.0, 2.0]}), plain))[0]) == 2
    assert run(batch_operator(lambda b: double(b).slice(0, 0), plain))[0] == []


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda b: pa.record_batch({"n": [1]}), "returned 1 rows for 4.*event time"),
        (lambda b: {"n": [1]}, "returned dict"),
        (lambda b: pa.record_batch({"m": [1] * 4}), "returned the columns m, expected n"),
        (lambda b: pa.record_batch({"n": [1] * 4, "o": [1] * 4}), "returned the columns n, o"),
        (lambda b: pa.record_batch({"n": [1.5] * 4}), "column 'n' as double.*int64 without loss"),
        (lambda b: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_batch_functions_that_go_wrong(function: Any, message: str) -> None:
    with pytest.raises(TaskFailure, match=message) as caught:
        run(batch_operator(function, OUTPUT))
    assert caught.value.operator == "op"


def test_batch_functions_obey_the_error_policy() -> None:
    main, side = run(batch_operator(lambda b: 1 / 0, OUTPUT, "side"))
    assert main == []
    assert [r["x"] for r in side] == [1, 2, 3, None]
    assert "ZeroDivisionError" in side[0]["error"]
