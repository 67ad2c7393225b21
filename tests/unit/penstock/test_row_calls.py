"""A row object is used again only where nobody can see it: whatever a function keeps stays as it was.

Property: functions that read, keep, hand out and let go of rows as they are drawn see the rows of the batches,
and so does whoever looks at what they kept, at any later time.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRecord
from penstock.rows.row_calls import RowCalls
from penstock.rows.rows import rows_of
from penstock.rows.schema import EVENT_TIME
from tests.support.examples import examples

NAMES = ["x", "text", "keys", "two words"]


def batch(first: int, rows: int) -> pa.RecordBatch:
    numbers = range(first, first + rows)
    return pa.record_batch(
        {
            "x": list(numbers),
            "text": [None if n % 3 == 0 else f"t{n}" for n in numbers],
            "keys": [n / 2 for n in numbers],
            "two words": [n % 2 == 0 for n in numbers],
            EVENT_TIME: [n * 10 for n in numbers],
        }
    )


def expected(number: int) -> dict[str, Any]:
    return {
        "x": number,
        "text": None if number % 3 == 0 else f"t{number}",
        "keys": number / 2,
        "two words": number % 2 == 0,
    }


def generator_over(row: Any) -> Iterator[Any]:
    yield row


def cycle_with(row: Any) -> list[Any]:
    cell = [row]
    cell.append(cell)
    return cell


# How a function may hold a row beyond its call; each gives a way back to the row.
HOLDERS: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "the row": lambda row: lambda row=row: row,
    "a list": lambda row: partial(lambda held: held[0], [row]),
    "a closure": lambda row: lambda: row,
    "a method": lambda row: partial(lambda method: method.__self__, row.as_dict),
    "a generator": lambda row: partial(next, generator_over(row)),
    "an error": lambda row: partial(lambda e: e.args[0], ValueError(row)),
    "a cycle": lambda row: partial(lambda cell: cell[0], cycle_with(row)),
}
READS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda row: None,
    "x": lambda row: row.x,
    "text": lambda row: row.text,
    "x and text": lambda row: (row.x, row.text),
    "item": lambda row: row["two words"],
    "all": lambda row: {**row},
}
STEPS = st.tuples(
    st.sampled_from([*READS]), st.sampled_from(["", "", *HOLDERS]), st.booleans(), st.booleans()
)


@examples(10)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    steps=st.lists(STEPS, min_size=1, max_size=12),
    is_map=st.booleans(),
)
def test_kept_rows_stay_what_they_were(
    sizes: list[int], steps: list[tuple[str, str, bool, bool]], is_map: bool
) -> None:
    calls, held, results = RowCalls(), [], []
    seen: list[int] = []
    given_back: list[tuple[int, Any]] = []

    def function(row: Any) -> Any:
        read, holder, is_returned, lets_go = steps[len(seen) % len(steps)]
        READS[read](row)
        number = row["x"]
        assert number == len(seen), "the row of another call"
        seen.append(number)
        if holder:
            held.append((number, HOLDERS[holder](row)))
        if lets_go and held:
            number, found = held.pop(0)
            assert found().as_dict() == expected(number)
        return row if is_returned else None

    def process(row: Any, ctx: Any, out: Any) -> Any:
        assert ctx.slot == -ctx.index
        returned = function(row)
        return None if returned is None else generator_over(returned)

    def emit_returned(returned: Any, emit: Callable[[Any], None]) -> None:
        for row in returned:
            emit(row)

    first, context = 0, SimpleNamespace()
    out = SimpleNamespace(emit=results.append)
    for size in sizes:
        calls.begin(batch(first, size))
        middle = size // 2
        for start, stop in ((0, middle), (middle, size)):
            if is_map:
                calls.map(function, results, start, stop)
            else:
                slots = [-n for n in range(size)]
                calls.process(process, context, out, emit_returned, slots, start, stop)
        calls.end()
        first += size
    assert seen == list(range(first))
    gc.collect()
    for number, found in held:
        row = found()
        assert row.as_dict() == expected(number)
        assert (row.x, row.text, row["keys"]) == tuple(expected(number).values())[:3]
        assert row == rows_of(batch(number, 1))[0] == pickle.loads(pickle.dumps(row))
        assert hash(row) == hash(rows_of(batch(number, 1))[0])
    kept = [row for row in results if row is not None]
    given_back += [(row["x"], row) for row in kept]
    assert all(row.as_dict() == expected(number) for number, row in given_back)
    numbers = [number for number, _ in given_back]
    assert numbers == [n for n in range(first) if steps[n % len(steps)][2]]


def test_what_a_function_reads_is_put_into_the_rows_of_later_batches() -> None:
    calls, kinds = RowCalls(), []

    def function(row: Any) -> Any:
        kinds.append(type(row))
        return row.x

    for number in range(3):
        results: list[Any] = []
        calls.begin(batch(4 * number, 4))
        calls.map(function, results, 0, 4)
        assert results == [4 * number + n for n in range(4)]
    assert kinds[0] is not kinds[4]
    assert kinds[4] is kinds[8]


@pytest.mark.parametrize("batches", [1, 3])
def test_rows_with_eager_columns_cannot_be_changed(batches: int) -> None:
    calls, rows = RowCalls(), []
    for number in range(batches):
        calls.begin(batch(number, 1))
        calls.map(lambda row: (row.x, row.text, rows.append(row)), [], 0, 1)
    for name in ("x", "keys", "new"):
        with pytest.raises(AttributeError):
            setattr(rows[-1], name, 5)
    with pytest.raises(AttributeError):
        del rows[-1].x
    with pytest.raises(AttributeError, match="nmae"):
        _ = rows[-1].nmae
    assert rows[-1].as_dict() == expected(batches - 1)


def test_rows_that_nobody_keeps_are_one_object() -> None:
    calls, seen = RowCalls(), []
    calls.begin(batch(0, 4))
    calls.map(lambda row: seen.append(id(row)), [], 0, 4)
    assert len(set(seen)) == 1


def test_a_column_without_python_values_fails_the_row_that_reads_it() -> None:
    """Also where an earlier batch had made it eager, and the function reads it no more."""
    calls = RowCalls()
    good = pa.record_batch({"n": [0, 1], "at": pa.array([0, 1], pa.timestamp("ms"))})
    bad = pa.record_batch({"n": [2, 3], "at": pa.array([0, 2**60], pa.timestamp("ms"))})
    calls.begin(good)
    calls.map(lambda row: row.at, [], 0, 2)
    results: list[Any] = []
    calls.begin(bad)
    calls.map(lambda row: row.n, results, 0, 2)
    assert results == [2, 3]
    calls.begin(bad)
    with pytest.raises(BadRecord, match="years 1 to 9999"):
        calls.map(lambda row: row.at, [], 0, 2)


def test_batches_of_other_columns_and_functions_that_read_something_else() -> None:
    calls = RowCalls()
    for number in range(200):
        if number % 50 < 25:
            given_batch = pa.record_batch({"a": [number], "b": [1]})
        else:
            given_batch = pa.record_batch({"b": [number], "c": ["c"]})
        name = given_batch.schema.names[number % 2]
        results: list[Any] = []
        calls.begin(given_batch)
        calls.map(lambda row, name=name: getattr(row, name), results, 0, 1)
        assert results == [given_batch[name][0].as_py()]
        calls.end()
