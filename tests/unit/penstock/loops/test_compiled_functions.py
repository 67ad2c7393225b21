"""Aim: a compiled function gives what the same source gives in Python, row by row, errors and state included.

Method: functions that hold every operation and every statement run in both forms over values at the edges of their types
and over random ones. What Python says of a row is the oracle.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.testing import harness
from tests.unit.penstock.loops import functions as own
from tests.unit.penstock.loops import renamed_functions

INTEGERS = [
    0,
    1,
    -1,
    2,
    5,
    7,
    13,
    62,
    63,
    64,
    -7,
    2**31,
    2**53 + 1,
    2**62,
    2**63 - 1,
    -(2**63),
    None,
]
FLOATS = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    0.5,
    2.5,
    3.7,
    1e18,
    -1e19,
    2.0**63,
    1e300,
    709.9,
    math.inf,
    -math.inf,
    math.nan,
    None,
]

NUMBERS = pa.schema(
    [
        ("key", pa.int64()),
        ("op", pa.int64()),
        ("a", pa.int64()),
        ("b", pa.int64()),
        ("x", pa.float64()),
        ("y", pa.float64()),
    ]
)
RESULT = pa.schema([("op", pa.int64()), ("i", pa.int64()), ("f", pa.float64())])
ROWS = pa.schema([("user", pa.string()), ("a", pa.int16()), ("x", pa.float32())])
EMITTED = pa.schema(
    [
        ("user", pa.string()),
        ("n", pa.int32()),
        ("small", pa.int8()),
        ("best", pa.float64()),
        ("seen", pa.bool_()),
    ]
)

Form = Callable[[bool], None]


@pytest.fixture
def form(monkeypatch: pytest.MonkeyPatch) -> Form:
    """Chooses the form in which functions run."""
    return lambda is_compiled: monkeypatch.setenv("PENSTOCK_COMPILED", str(int(is_compiled)))


def ran(
    form: Form,
    function: Any,
    rows: list[dict[str, Any]],
    schema: pa.Schema,
    output: pa.Schema,
    *,
    key: str,
    backend: Any = "hashmap",
) -> list[tuple[list[Any], list[Any]]]:
    """Rows and refused rows of the Python form and of the compiled one."""
    found = []
    for is_compiled in (False, True):
        form(is_compiled)
        with harness(
            lambda stream: stream.key_by(key).process(function, schema=output).on_error("bad"),
            schema=schema,
            event_time=False,
            backend=backend,
        ) as running:
            graph = running._pipeline.graph.SerializeToString()
            assert (b"def loop(" in graph) is is_compiled
            for start in range(0, len(rows), 1000):
                running.push_many(rows[start : start + 1000])
            running.end()
            found.append((running.take(), running.side("bad")))
    return found


def shown(rows: list[dict[str, Any]]) -> list[str]:
    """Values as text, so that NaN is NaN and -0.0 is not 0.0."""
    return [repr(sorted(row.items())) for row in rows]


def kinds(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Refused rows with the kind of their error."""
    return [
        (*(repr(value) for name, value in row.items() if name != "error"), error_kind(row["error"]))
        for row in rows
    ]


def error_kind(text: str) -> str:
    for name in ("ZeroDivisionError", "OverflowError", "TypeError", "ValueError", "StateError"):
        if name in text:
            return name
    return text


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("function", "operations"), [(own.Integers(), range(28)), (own.Floats(), range(31))]
)
def test_every_operation_is_that_of_python(form: Form, function: Any, operations: range) -> None:
    chosen = random.Random(7)
    pairs = list(itertools.product(INTEGERS, INTEGERS))
    floats = list(itertools.product(FLOATS, FLOATS))
    rows = []
    for op in operations:
        for _ in range(40):
            pairs.append((chosen.randint(-(2**63), 2**63 - 1), chosen.randint(-70, 70)))
            floats.append((chosen.uniform(-1e3, 1e3), chosen.uniform(-10, 10)))
        for (a, b), (x, y) in zip(pairs, itertools.cycle(floats)):
            rows.append({"key": 1, "op": op, "a": a, "b": b, "x": x, "y": y})
        pairs, floats = pairs[: len(INTEGERS) ** 2], floats[: len(FLOATS) ** 2]
    (wanted, refused), (given, given_back) = ran(form, function, rows, NUMBERS, RESULT, key="key")
    assert shown(given) == shown(wanted)
    assert kinds(given_back) == kinds(refused)
    assert {error_kind(row["error"]) for row in refused} >= {
        "ZeroDivisionError",
        "OverflowError",
        "TypeError",
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_states_loops_and_errors_are_those_of_python(form: Form, backend: str) -> None:
    chosen = random.Random(11)
    rows = [
        {
            "user": f"user {chosen.randint(0, 40)}",
            "a": chosen.choice([None, 13, 9, chosen.randint(-5, 40)]),
            "x": chosen.choice([None, chosen.uniform(0, 9)]),
        }
        for _ in range(4000)
    ]
    (wanted, refused), (given, given_back) = ran(
        form, own.Everything(3), rows, ROWS, EMITTED, key="user", backend=backend
    )
    assert len(wanted) > 1000
    assert {error_kind(row["error"]) for row in refused} == {"StateError", "ValueError"}
    assert shown(given) == shown(wanted)
    assert kinds(given_back) == kinds(refused)


def test_timers_fire_over_the_state_of_the_loop(form: Form) -> None:
    results = []
    for is_compiled in (False, True):
        form(is_compiled)
        chosen = random.Random(3)
        schema = pa.schema([("user", pa.string()), ("total", pa.int64()), ("at", pa.int64())])
        with harness(
            own.Timed(),
            schema=pa.schema([("user", pa.string()), ("a", pa.int64())]),
            keys="user",
            output_schema=schema,
        ) as running:
            for second in range(50):
                rows = [
                    {"user": f"u{chosen.randint(0, 9)}", "a": chosen.randint(0, 5)}
                    for _ in range(6)
                ]
                running.push_many(rows, [second * 7 + chosen.randint(0, 6) for _ in rows])
                running.watermark(second * 7)
            running.end()
            results.append(running.take(event_time=True))
    assert results[0]
    assert results[1] == results[0]


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()], ids=str)
def test_a_float_as_key_is_the_same_in_both_forms(form: Form, kind: pa.DataType) -> None:
    schema = pa.schema([("key", kind)])
    output = pa.schema([("key", kind), ("column", kind), ("is_there", pa.bool_())])
    results = []
    for is_compiled in (False, True):
        form(is_compiled)
        with harness(
            own.KeyAndColumn(), schema=schema, keys="key", output_schema=output, event_time=False
        ) as running:
            running.push_many([{"key": key} for key in (-0.0, 0.0, None, math.nan, 1.5)])
            results.append([tuple(row.values()) for row in running.take()])
    assert repr(results[0]) == repr(results[1])
    assert repr(results[0][:3]) == "[(0.0, -0.0, True), (0.0, 0.0, True), (None, None, False)]"


def test_a_null_where_none_may_be_is_a_bad_record_in_both_forms(form: Form) -> None:
    schema = pa.schema([("key", pa.float64())])
    key = pa.field("key", pa.float64(), nullable=False)
    output = pa.schema([key, ("column", pa.float64()), ("is_there", pa.bool_())])
    rows = [{"key": 1.5}, {"key": None}, {"key": 2.5}]
    (wanted, refused), (given, given_back) = ran(
        form, own.KeyAndColumn(), rows, schema, output, key="key"
    )
    assert [row["key"] for row in given] == [1.5, 2.5]
    assert given == wanted
    assert [row["key"] for row in given_back] == [None]
    assert given_back == refused


def test_a_time_that_python_has_not_goes_by_a_number_that_does_not_fit(form: Form) -> None:
    form(True)
    seconds = pa.timestamp("s")
    rows = pa.table(
        {"key": [1, 1, 1], "at": pa.array([10**14, 5, 6], seconds), "n": [1, 300, 2]},
    )
    output = pa.schema([("at", seconds), ("n", pa.int8())])
    with harness(
        lambda stream: (
            stream.key_by("key")
            .process(own.PassedOn(), schema=output)
            .on_error("bad")
            .with_columns(at=ps.col("at").cast("int64"))
        ),
        schema=rows.schema,
        event_time=False,
    ) as running:
        running.push_many(rows)
        assert running.take() == [{"at": 10**14, "n": 1}, {"at": 6, "n": 2}]
        assert [row["n"] for row in running.side("bad")] == [300]


def test_a_snapshot_of_one_form_is_that_of_the_other(form: Form) -> None:
    schema = pa.schema([("user", pa.string()), ("a", pa.int64())])
    output = pa.schema([("user", pa.string()), ("total", pa.int64())])
    for first, second in itertools.product((False, True), repeat=2):
        form(first)
        with harness(
            own.totals, schema=schema, keys="user", output_schema=output, event_time=False
        ) as running:
            running.push_many([{"user": "a", "a": 1}, {"user": "b", "a": 2}])
            snapshot = running.snapshot()
        form(second)
        with harness(
            own.totals,
            schema=schema,
            keys="user",
            output_schema=output,
            event_time=False,
            restore=snapshot,
        ) as running:
            running.push_many([{"user": "b", "a": 5}, {"user": "a", "a": 5}])
            assert running.take() == [{"user": "b", "total": 7}, {"user": "a", "total": 6}]


def test_it_is_compiled_unless_in_a_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job compiles, a harness runs the function as it is written, whatever is not said otherwise."""
    monkeypatch.delenv("PENSTOCK_COMPILED", raising=False)
    env = ps.Environment(parallelism=1)
    stream = env.from_rows([{"user": "a", "a": 1}], schema={"user": "string", "a": "int64"})
    output = {"user": "string", "total": "int64"}
    stream.key_by("user").process(own.totals, schema=output).uid("totals").discard()
    assert env.plan().graph.SerializeToString().count(b"def loop(") == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_state_outlives_restarts_as_in_python(form: Form, backend: Any) -> None:
    """Keys that come and go, over snapshots of which each continues the one before."""
    results = []
    for is_compiled in (False, True):
        form(is_compiled)
        chosen = random.Random(5)
        snapshot: Any = None
        rows: list[Any] = []
        for _ in range(6):
            with harness(
                own.Everything(),
                schema=ROWS,
                keys="user",
                output_schema=EMITTED,
                event_time=False,
                backend=backend,
                restore=snapshot,
            ) as running:
                for _ in range(3):
                    running.push_many(
                        {
                            "user": f"u{chosen.randint(0, 300)}",
                            "a": chosen.choice([None, 1, 2]),
                            "x": 0.5,
                        }
                        for _ in range(200)
                    )
                    snapshot = running.snapshot()
                rows += running.take()
        results.append(rows)
    assert len(results[0]) > 500
    assert shown(results[1]) == shown(results[0])


def test_names_are_what_they_are_in_the_module(form: Form) -> None:
    """A variable is not the constant of that name, an alias is what it stands for, and the module's own is no built-in."""
    schema = pa.schema([("user", pa.string()), ("a", pa.int64()), ("x", pa.float64())])
    output = pa.schema([("user", pa.string()), ("n", pa.int64())])
    rows = [{"user": "a", "a": a, "x": a + 0.5} for a in range(6)]
    (wanted, _), (given, _) = ran(
        form, renamed_functions.Renamed(), rows, schema, output, key="user"
    )
    assert [row["n"] for row in wanted] == [a * (a - 1) // 2 + a for a in range(6)]
    assert given == wanted
    form(False)
    with harness(
        renamed_functions.Rounded(), schema=schema, keys="user", output_schema=output
    ) as running:
        running.push_many(rows)
        assert {row["n"] for row in running.take()} == {7}
    form(True)
    with pytest.raises(ps.JobRejected, match=r"round\(\) is not compiled"):
        harness(renamed_functions.Rounded(), schema=schema, keys="user", output_schema=output)


def test_event_time_that_is_not_there(form: Form) -> None:
    """Timers of it say so in both forms."""
    messages = []
    schema = pa.schema([("user", pa.string()), ("a", pa.int64())])
    output = pa.schema([("user", pa.string()), ("total", pa.int64()), ("at", pa.int64())])
    for is_compiled in (False, True):
        form(is_compiled)
        with (
            harness(
                own.Asking(), schema=schema, keys="user", output_schema=output, event_time=False
            ) as running,
            pytest.raises(ps.JobFailed) as failed,
        ):
            running.push_many([{"user": "a", "a": 3}])
        messages.append(str(failed.value).splitlines()[0])
    assert "no input has event time" in messages[0]
    assert messages[1] == messages[0]


def test_a_timer_that_nothing_answers_is_refused_when_it_is_built(form: Form) -> None:
    form(True)
    env = ps.Environment(parallelism=1)
    keyed = env.from_rows([{"user": "a", "a": 3}]).key_by("user")
    with pytest.raises(ps.JobRejected, match=r"Unanswered asks for timers and has no on_timer"):
        keyed.process(own.Unanswered(), schema={"user": str})


@pytest.mark.parametrize("is_compiled", [True, False])
def test_one_that_is_taken_back_needs_no_answer(form: Form, is_compiled: bool) -> None:
    form(is_compiled)
    schema = {"user": str, "a": int}
    with harness(own.TakingBack(), schema=schema, keys="user", output_schema={"user": str}) as h:
        h.push_many([{"user": "a", "a": 3}])
        h.end()
        assert h.output == [{"user": "a"}]
