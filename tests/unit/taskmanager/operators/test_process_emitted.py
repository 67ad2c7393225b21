"""What process functions emit, in every form and mixed: rows come out as they were when they were emitted for.

Property: whatever forms a function emits rows in, and whichever calls raise, the output is that of a plain list.
That what was emitted may be changed afterwards is tested in ``test_returned_rows.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

import penstock as ps
from penstock.errors import TaskFailure
from penstock.rows.schema import EVENT_TIME
from tests.support.examples import examples
from tests.support.process_specs import rows, run_process

SCHEMA = pa.schema([("user", pa.int64()), ("n", pa.int64())])


class Pair(NamedTuple):
    user: int
    n: int


FORMS = ["columns", "reversed columns", "dict", "reversed dict", "row", "row and columns", "tuple", "named", "list", "generator", "none"]  # fmt: skip


class Emits(ps.KeyedProcessFunction):
    """Emits each row in the form that its turn has, and raises behind it where that is asked for."""

    def __init__(self, turns: list[tuple[str, bool]]) -> None:
        self.turns = turns
        self.calls = 0

    @override
    def process(self, row: Any, ctx: Any, out: Any) -> Any:
        form, is_bad = self.turns[self.calls % len(self.turns)]
        self.calls += 1
        returned: Any = None
        match form:
            case "columns":
                out.emit(user=row.user, n=row.n)
            case "reversed columns":
                out.emit(n=row.n, user=row.user)
            case "dict":
                out.emit({"user": row.user, "n": row.n})
            case "reversed dict":
                out.emit({"n": row.n, "user": row.user})
            case "row":
                out.emit(row)
            case "row and columns":
                out.emit(row, n=row.n)
            case "tuple":
                out.emit((row.user, row.n))
            case "named":
                out.emit(Pair(row.user, row.n))
            case "list":
                returned = [row, {"user": row.user, "n": -row.n}]
            case "generator":
                returned = iter([(row.user, row.n)])
        if is_bad:
            raise ValueError("after it was emitted")
        return returned


def expected(turns: list[tuple[str, bool]], given_rows: list[tuple[int, int]]) -> list[Any]:
    found = []
    for number, (user, n) in enumerate(given_rows):
        form, is_bad = turns[number % len(turns)]
        if is_bad or form == "none":
            continue
        found.append({"user": user, "n": n})
        if form == "list":
            found.append({"user": user, "n": -n})
    return found


@examples(100)
@given(
    turns=st.lists(st.tuples(st.sampled_from(FORMS), st.booleans()), min_size=1, max_size=6),
    batches=st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 5)), min_size=1, max_size=8),
        min_size=1,
        max_size=3,
    ),
)
def test_forms_mixed_with_errors(
    turns: list[tuple[str, bool]], batches: list[list[tuple[int, int]]]
) -> None:
    harness = run_process(Emits(turns), output=SCHEMA, schema=SCHEMA, on_error="skip")
    for given_rows in batches:
        harness.push(rows(*((user, n, 7) for user, n in given_rows), schema=SCHEMA))
    found = [row for batch in harness.batches for row in batch.to_pylist()]
    assert {row.pop(EVENT_TIME) for row in found} <= {7}
    assert found == expected(turns, [row for one in batches for row in one])


def emitted(emit: Any, output: pa.Schema = SCHEMA, **spec: Any) -> list[Any]:
    """What comes out of a function that calls ``emit(row, out)`` for three rows."""
    harness = run_process(Calls(emit), output=output, schema=SCHEMA, event_time=False, **spec)
    harness.push(pa.record_batch({"user": [1, 2, 3], "n": [4, 5, 6]}, schema=SCHEMA))
    return [row for batch in harness.batches for row in batch.to_pylist()]


class Calls(ps.KeyedProcessFunction):
    def __init__(self, emit: Any) -> None:
        self.emit = emit

    @override
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.emit(row, out)


def test_columns_may_have_the_names_of_arguments() -> None:
    names = ["self", "row", "class", "self_", "two words", "ﬁ"]
    for name in names:
        output = pa.schema([(name, pa.int64()), ("n", pa.int64())])
        found = emitted(lambda row, out, name=name: out.emit(**{name: row.user, "n": row.n}), output)  # fmt: skip
        assert found == [{name: n, "n": n + 3} for n in (1, 2, 3)]


def test_a_column_that_is_missing_or_unknown_is_named() -> None:
    with pytest.raises(TaskFailure, match="no column n") as caught:
        emitted(lambda row, out: out.emit(user=row.user))
    assert "user=1" in caught.value.row
    with pytest.raises(TaskFailure, match=r"unknown columns usr.*did you mean 'user'"):
        emitted(lambda row, out: out.emit(usr=row.user, n=row.n))
    with pytest.raises(TaskFailure, match=r"int64, got 'x' \(str\)"):
        emitted(lambda row, out: out.emit(user=row.user, n="x"))


def test_what_does_not_fit_is_left_to_the_policy_row_by_row() -> None:
    def emit(row: Any, out: Any) -> None:
        out.emit(user=row.user, n=2**63 if row.user == 2 else row.n)

    assert emitted(emit, on_error="skip") == [{"user": 1, "n": 4}, {"user": 3, "n": 6}]


def test_numbers_are_those_of_the_schema() -> None:
    """A whole float goes into an integer column and an integer into one of floats; what is lossy goes nowhere."""
    schema = pa.schema([("n", pa.int64()), ("x", pa.float64())])
    assert emitted(lambda row, out: out.emit(n=float(row.n), x=row.n), schema) == [
        {"n": n, "x": float(n)} for n in (4, 5, 6)
    ]
    for values in ({"n": True, "x": 1.0}, {"n": 1, "x": True}, {"n": 1.5, "x": 1.0}):
        with pytest.raises(TaskFailure, match="has type"):
            emitted(lambda row, out, values=values: out.emit(**values), schema)
    assert emitted(lambda row, out: out.emit(n=None, x=None), schema)[0] == {"n": None, "x": None}


def test_a_dict_counts_as_it_is_when_the_batch_is_done() -> None:
    kept: dict[str, Any] = {}

    def emit(row: Any, out: Any) -> None:
        kept.update(user=row.user, n=row.n)
        out.emit(kept)
        out.emit(**kept)

    assert [row["user"] for row in emitted(emit)][1::2] == [1, 2, 3]


def test_rows_of_earlier_batches_are_emitted_as_they_were() -> None:
    class Late(ps.KeyedProcessFunction):
        def __init__(self) -> None:
            self.kept: list[Any] = []

        @override
        def process(self, row: Any, ctx: Any, out: Any) -> None:
            self.kept.append(row)
            if row.n < 0:
                for one in self.kept:
                    out.emit(one)

    harness = run_process(Late(), output=SCHEMA, schema=SCHEMA, event_time=False)
    for number in range(4):
        n = -1 if number == 3 else number
        harness.push(pa.record_batch({"user": [1, 2], "n": [number, n]}, schema=SCHEMA))
    found = [row for batch in harness.batches for row in batch.to_pylist()]
    assert [row["n"] for row in found] == [0, 0, 1, 1, 2, 2, 3, -1]
    assert [row["user"] for row in found] == [1, 2] * 4
