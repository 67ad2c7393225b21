"""Rows and what functions return: every type there and back, strictness, errors that name the place."""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import math
import pickle
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from penstock.functions.functions import (
    Collector,
    MapFunction,
    WindowInfo,
    close_function,
    open_function,
)
from penstock.rows.column_values import ValueMismatch, decode, encode
from penstock.rows.handed_over import handed_over_whole
from penstock.rows.rows import RowBuilder, RowMismatch, row_maker, rows_of, schema_of
from penstock.rows.schema import EVENT_TIME, optional
from tests.support.examples import examples

BATCH = pa.record_batch(
    {
        "x": [1, 2, None],
        "name": ["a", None, "c"],
        "keys": [1.5, 2.5, 3.5],
        "two words": [True, False, None],
        EVENT_TIME: [10, 20, 30],
    }
)


class Point(NamedTuple):
    a: int
    b: float | None = None


@dataclasses.dataclass
class Bid:
    a: int
    b: float | None = None


def test_a_row_reads_its_columns() -> None:
    row = rows_of(BATCH)[1]
    assert (row.x, row.name, row["x"], row["two words"]) == (2, None, 2, False)
    assert row["keys"] == 2.5
    assert row.keys() == ("x", "name", "keys", "two words")  # a method stays a method
    assert list(row) == list(row.keys())
    assert {**row, "x": 5} == {"x": 5, "name": None, "keys": 2.5, "two words": False}
    assert row.as_dict() == row._asdict()
    assert "x" in row
    assert EVENT_TIME not in row
    assert len(row) == 4
    assert repr(row) == "Row(x=2, name=None, keys=2.5, two words=False)"
    assert schema_of(row).names == list(row)


def test_rows_cannot_be_changed_and_can_be_kept() -> None:
    rows = list(rows_of(BATCH))
    with pytest.raises(AttributeError):
        rows[0].x = 5
    with pytest.raises(AttributeError):
        rows[0].new = 5
    with pytest.raises(AttributeError):
        _ = rows[0].nmae
    with pytest.raises(KeyError, match="did you mean 'name'"):
        _ = rows[0]["nmae"]
    assert [row.x for row in rows] == [1, 2, None]
    assert rows[0] == rows_of(BATCH)[0] != rows[1]
    assert len({*rows, *rows_of(BATCH)}) == 3
    again = pickle.loads(pickle.dumps(rows[2]))
    assert again == rows[2]
    made = row_maker(["a", "b"])([1, "z"])
    assert made.as_dict() == {"a": 1, "b": "z"}
    assert pickle.loads(pickle.dumps(made)) == made


def test_rows_are_a_sequence() -> None:
    rows = rows_of(BATCH)
    assert [r.x for r in rows[1:]] == [2, None]
    assert rows[-1].x is None
    assert len(rows[::2]) == 2
    with pytest.raises(IndexError):
        _ = rows[3]


MIDNIGHT = dt.datetime(2024, 1, 1, tzinfo=dt.UTC).replace(tzinfo=None)
COLUMNS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int64(), [1, None, -(2**63), 2**63 - 1]),
    (pa.uint8(), [0, 255]),
    (pa.float64(), [1.5, None, float("inf")]),
    (pa.float32(), [1.5, 2.0]),
    (pa.bool_(), [True, None]),
    (pa.string(), ["ä", None, ""]),
    (pa.large_string(), ["x"]),
    (pa.binary(), [b"\x00", None]),
    (pa.timestamp("ms"), [MIDNIGHT.replace(year=1), None, MIDNIGHT.replace(year=9999)]),
    (pa.timestamp("s", "UTC"), [dt.datetime(2024, 5, 1, tzinfo=dt.UTC), None]),
    (pa.timestamp("ns", "UTC"), [dt.datetime(2024, 5, 1, 1, 2, 3, 4, tzinfo=dt.UTC)]),
    (pa.date32(), [dt.date(1969, 12, 31), None]),
    (pa.date64(), [dt.date(2024, 2, 29)]),
    (pa.time32("ms"), [dt.time(1, 2, 3, 4000), None]),
    (pa.time64("ns"), [dt.time(1, 2, 3, 4)]),
    (pa.duration("ms"), [dt.timedelta(seconds=-5), None]),
    (pa.duration("ns"), [dt.timedelta(microseconds=7)]),
    (pa.decimal128(10, 2), [Decimal("1.50"), None]),
    (pa.list_(pa.int32()), [[1, None], [], None]),
    (pa.list_(pa.timestamp("ns")), [[MIDNIGHT]]),
    (pa.struct([("p", pa.int64()), ("q", pa.list_(pa.string()))]), [{"p": 1, "q": ["z"]}, None]),
    (pa.map_(pa.string(), pa.int64()), [[("k", 1)], None]),
]


@pytest.mark.parametrize(("kind", "values"), COLUMNS, ids=[str(k) for k, _ in COLUMNS])
def test_columns_there_and_back(kind: pa.DataType, values: list[Any]) -> None:
    array = encode(values, pa.field("c", kind))
    assert array.type == kind
    assert decode(array) == values
    assert decode(array.slice(1)) == values[1:]


def test_dictionaries_zones_and_years() -> None:
    assert decode(pa.array(["a", None, "a"]).dictionary_encode()) == ["a", None, "a"]
    (berlin,) = decode(pa.array([0], pa.timestamp("ms", "Europe/Berlin")))
    assert berlin.hour == 1
    assert berlin == dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    for far in (pa.array([2**60], pa.timestamp("ms")), pa.array([2**30], pa.date32())):
        with pytest.raises(ValueError, match="years 1 to 9999"):
            decode(far)


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()], ids=str)
def test_what_is_infinite_stays_so(kind: pa.DataType) -> None:
    values = [math.inf, -math.inf, None, 65519.0]
    assert encode(values, pa.field("c", kind)).is_null().to_pylist()[2]
    assert encode(values, pa.field("c", kind)).cast("float64").to_pylist()[:2] == values[:2]


@pytest.mark.parametrize(
    ("kind", "value"),
    [(pa.float64(), 2**62), (pa.float64(), -(2**70)), (pa.float32(), 2**40), (pa.float16(), 4096)],
    ids=str,
)
def test_an_integer_stands_for_the_float_that_it_is(kind: pa.DataType, value: int) -> None:
    assert encode([None, value, 1.5], pa.field("c", kind)).to_pylist() == [None, value, 1.5]
    nested = encode([[value], None], pa.field("c", pa.list_(kind)))
    assert nested.to_pylist() == [[value], None]
    record = encode([{"a": value}], pa.field("c", pa.struct([("a", kind)])))
    assert record.to_pylist() == [{"a": value}]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int64(), 1.5),
        (pa.int64(), True),
        (pa.int64(), "1"),
        (pa.int8(), 300),
        (pa.int64(), 2**63),
        (pa.float64(), "1"),
        (pa.float64(), True),
        (pa.float64(), 2**53 + 1),
        (pa.float64(), 10**400),
        (pa.float32(), 2**24 + 1),
        (pa.float16(), 2**24 + 1),
        (pa.float16(), 65520.0),  # which Arrow makes infinite
        (pa.float32(), -1e300),
        (pa.list_(pa.float32()), [math.inf, 1e300]),
        (pa.list_(pa.float64()), [2**53 + 1]),
        (pa.string(), 1),
        (pa.bool_(), 1),
        (pa.binary(), "text"),
        (pa.timestamp("ms"), 1.5),
        (pa.time32("s"), 1.5),
        (pa.time32("s"), True),
        (pa.time64("us"), dt.time(1, tzinfo=dt.UTC)),
        (pa.time32("s"), 86_400),
        (pa.time64("us"), -1),
        (pa.list_(pa.time64("ns")), [dt.time(1, tzinfo=dt.UTC)]),
        (pa.struct([("a", pa.time32("ms"))]), {"a": 86_400_000}),
        (pa.decimal128(5, 2), 1.5),
        (pa.list_(pa.int64()), "12"),
        (pa.list_(pa.int64()), [1.5]),
        (pa.map_(pa.string(), pa.int64()), {"k": 1.5}),
        (pa.map_(pa.string(), pa.float64()), {"k": True}),
        (pa.map_(pa.string(), pa.binary()), {"k": "text"}),
        (pa.map_(pa.string(), pa.timestamp("ms")), {"k": 1.5}),
        (pa.map_(pa.float64(), pa.int64()), {True: 1}),
        (pa.map_(pa.string(), pa.time64("us")), [("k", dt.time(1, tzinfo=dt.UTC))]),
        (pa.list_(pa.map_(pa.string(), pa.int64())), [{"k": 1.5}]),
        (pa.list_(pa.field("item", pa.int64(), nullable=False)), [1, None]),
        (pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False)), {"k": None}),
        (pa.struct([pa.field("a", pa.int64(), nullable=False)]), {"a": None}),
        (pa.struct([pa.field("a", pa.int64(), nullable=False)]), {}),
        (pa.struct([("a", pa.int64())]), {"a": 1, "b": 2}),
        (pa.struct([("a", pa.int64())]), {"a": 1.5}),
        (pa.struct([("a", pa.int64())]), 5),
    ],
    ids=str,
)
def test_values_that_do_not_fit(kind: pa.DataType, value: object) -> None:
    with pytest.raises(ValueMismatch, match=r"'c(\.a)?'") as caught:
        encode([None, value], pa.field("c", kind))
    assert caught.value.index in (0, 1)


def test_nulls_only_where_they_may_be() -> None:
    with pytest.raises(ValueMismatch, match="may not be null") as caught:
        encode([1, None], pa.field("c", pa.int64(), nullable=False))
    assert caught.value.index == 1


SCHEMA = pa.schema([pa.field("a", pa.int64(), nullable=False), ("b", pa.float64())])


@pytest.mark.parametrize(
    "results",
    [
        [{"a": 1, "b": 2.0}, {"b": 2.0, "a": 1}],
        [(1, 2.0)] * 2,
        [Bid(1, 2.0)] * 2,
        [Point(1, 2.0)] * 2,
        [{"a": 1, "b": 2.0}, (1, 2.0)],
        [Bid(1, 2.0), Point(1, 2.0)],
        list(rows_of(pa.record_batch({"b": [2.0, 2.0], "a": [1, 1]}))),
    ],
)
def test_results_of_every_kind(results: list[object]) -> None:
    builder = RowBuilder(SCHEMA)
    builder.extend(results)
    assert builder.build().to_pylist() == [{"a": 1, "b": 2.0}] * 2
    assert len(builder) == 0
    assert builder.build().num_rows == 0


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"a": 1, "bb": 2.0}, "unknown columns bb .did you mean 'b'"),
        ({"b": 2.0}, "no column a .a null is given as None"),
        ({"a": 2}, "no column b .a null is given as None"),
        ({}, "no column a, b"),
        ((1,), "a tuple of 1 values for 2 columns"),
        (None, "None"),
        (5, r"5 \(int\)"),
        ({"a": None, "b": 1.0}, "'a' may not be null"),
        ({"a": "x", "b": 1.0}, "column 'a' has type int64, got 'x'"),
    ],
)
def test_results_that_are_no_row(result: object, message: str) -> None:
    builder = RowBuilder(SCHEMA)
    builder.append({"a": 1, "b": None})
    builder.append(result)
    with pytest.raises(RowMismatch, match=message) as caught:
        builder.build()
    assert caught.value.index == 1
    assert len(builder) == 2


def test_an_optional_column_may_be_left_out() -> None:
    builder = RowBuilder(pa.schema([SCHEMA.field("a"), optional(SCHEMA.field("b"))]))
    builder.extend([{"a": 1}, {"a": 2, "b": 3.0}])
    assert builder.build().to_pylist() == [{"a": 1, "b": None}, {"a": 2, "b": 3.0}]
    builder.append({"b": 1.0})
    with pytest.raises(RowMismatch, match="no column a"):
        builder.build()


def test_one_column_takes_plain_values() -> None:
    def build(kind: pa.DataType, *results: object) -> list[object]:
        builder = RowBuilder(pa.schema([("v", kind)]))
        builder.extend(results)
        return [row["v"] for row in builder.build().to_pylist()]

    assert build(pa.int64(), 1, {"v": 2}, (3,), {"v": None}, (None,)) == [1, 2, 3, None, None]
    assert build(pa.int64(), 1, 2) == [1, 2]
    assert build(pa.list_(pa.int64()), [1, 2], {"v": [3]}) == [[1, 2], [3]]
    assert build(pa.struct([("p", pa.int64())]), {"p": 1}, {"v": {"p": 2}}) == [{"p": 1}, {"p": 2}]
    for kind in (pa.int64(), pa.list_(pa.int64())):
        with pytest.raises(RowMismatch, match=r"must return a row of .*got None"):
            build(kind, None)


@examples(50)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"a": st.integers(-(2**63), 2**63 - 1), "b": st.one_of(st.none(), st.floats(width=32))}
        )
    ),
    st.lists(st.sampled_from([dict, lambda d: Bid(**d), lambda d: Point(**d), lambda d: (d["a"], d["b"])])),
)  # fmt: skip
def test_mixed_results_equal_pyarrows(
    rows: list[dict[str, Any]], makers: list[Callable[[dict[str, Any]], Any]]
) -> None:
    builder = RowBuilder(SCHEMA)
    for i, row in enumerate(rows):
        builder.append(makers[i % len(makers)](row) if makers else row)
    expected = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    assert str(builder.build().to_pylist()) == str(expected.to_pylist())


def test_a_collector_takes_rows_and_columns() -> None:
    out = Collector(SCHEMA, BATCH.schema.remove(4))
    out.emit(a=1, b=2.0)
    out.emit({"a": 2, "b": None})
    out.emit(Bid(3), b=4.0)
    row = rows_of(BATCH)[0]
    out.side("late", row)
    batch = out.take()
    assert batch is not None
    assert batch.to_pylist() == [{"a": 1, "b": 2.0}, {"a": 2, "b": None}, {"a": 3, "b": 4.0}]
    assert out.take() is None
    ((tag, side),) = out.take_sides()
    assert (tag, side.to_pylist()) == ("late", [row.as_dict()])
    assert out.take_sides() == []
    out.emit(a=1)
    out.discard()
    assert out.take() is None
    with pytest.raises(TypeError, match="needs a dict"):
        out.emit(5, a=1)


def test_windows_and_hooks() -> None:
    window = WindowInfo(start_ms=0, end_ms=1500)
    assert window.end - window.start == dt.timedelta(milliseconds=1500)
    assert window.start.tzinfo is dt.UTC
    calls: list[object] = []

    class WithContext(MapFunction):
        @override
        def open(self, ctx: Any) -> None:
            calls.append(ctx)

        @override
        def close(self) -> None:
            calls.append("closed")

        @override
        def __call__(self, row: Any) -> Any:
            return row

    class Plain:
        def open(self) -> None:
            calls.append("opened")

    for function in (WithContext(), Plain(), len, lambda row: row):
        open_function(function, "ctx")  # type: ignore[arg-type]
        close_function(function)
    assert calls == ["ctx", "closed", "opened"]


WAYS: dict[str, Callable[[Any], Any]] = {
    "by name": lambda row: row["numbers"],
    "as an attribute": lambda row: row.numbers,
    "as a dict": lambda row: row.as_dict()["numbers"],
    "as a named tuple": lambda row: row._asdict()["numbers"],
    "unpacked": lambda row: {**row}["numbers"],
    "copied": lambda row: copy.copy(row).numbers,
    "copied whole": lambda row: copy.deepcopy(row).numbers,
    "pickled": lambda row: pickle.loads(pickle.dumps(row)).numbers,
    "pickled twice": lambda row: pickle.loads(pickle.dumps(copy.copy(row)))["numbers"],
    "handed over again": lambda row: handed_over_whole(row).numbers,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_list_that_was_changed_is_so_in_whichever_way_it_is_read(
    way: Callable[[Any], Any],
) -> None:
    batch = pa.record_batch({EVENT_TIME: [1, 2], "n": [1, 2], "numbers": [[1], [2]]})
    _, row = rows_of(batch)
    row.numbers.append(3)
    taken = handed_over_whole(row)
    assert (way(row), way(taken)) == ([2, 3], [2, 3])
    row.numbers.append(4)
    assert (way(row), way(taken)) == ([2, 3, 4], [2, 3])
    assert (len(taken), list(taken), "numbers" in taken) == (2, ["n", "numbers"], True)
    assert taken == pickle.loads(pickle.dumps(taken)) != row


def test_a_copy_has_lists_of_its_own_whatever_was_read_before() -> None:
    batch = pa.RecordBatch.from_pydict({"l": [[0], [1]]})
    first, second = rows_of(batch)
    kept = copy.copy(first)
    kept.l.append(9)
    assert first.l == [0]
    assert second.l == [1]
    kept = copy.copy(second)
    kept.l.append(9)
    assert second.l == [1]


def test_a_row_that_nobody_has_changed_is_pickled_as_before() -> None:
    """By one argument, which versions before this one read as well."""
    batch = pa.RecordBatch.from_pydict({"l": [[0.0, float("nan")], [1.0]]})
    row = rows_of(batch)[0]
    unread = pickle.dumps(row)
    assert row.l[0] == 0.0
    assert pickle.dumps(row) == unread
    row.l[0] = -0.0
    assert len(row.__reduce__()[1]) == 2
    assert repr(pickle.loads(pickle.dumps(row)).l) == "[-0.0, nan]"
