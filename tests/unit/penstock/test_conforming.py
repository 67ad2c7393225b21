"""Aim: a column takes another type only if no value changes, and what does not fit is named with its place.

Method: each pair of types by itself and inside of a list; Python's own values are the oracle.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from penstock.rows.column_values import ValueMismatch
from penstock.rows.conforming import conformed, conformed_column, is_castable

NAN = float("nan")
FITS: list[tuple[pa.DataType, pa.DataType, list[Any]]] = [
    (pa.float64(), pa.float32(), [0.5, None, -0.0, float("inf"), NAN]),
    (pa.float16(), pa.float64(), [0.5, None, NAN]),
    (pa.float64(), pa.int8(), [1.0, None, -2.0]),
    (pa.int64(), pa.float64(), [1 << 53, None]),
    (pa.uint64(), pa.decimal128(20, 0), [(1 << 64) - 1, None]),
    (pa.decimal128(38, 2), pa.decimal128(38, 0), [Decimal(10**35), None]),
    (pa.timestamp("ns"), pa.timestamp("us"), [dt.datetime(1969, 1, 1, 1, 1, 1, 1, dt.UTC), None]),
    (pa.timestamp("s"), pa.date32(), [dt.datetime(1969, 1, 1, tzinfo=dt.UTC), None]),
    (pa.int32(), pa.time32("s"), [86_399, 0, None]),
    (pa.string(), pa.dictionary(pa.int8(), pa.string()), ["a", None, "a", "b"]),
    (pa.dictionary(pa.int8(), pa.float64()), pa.float32(), [0.5, None]),
    (pa.binary(), pa.binary(2), [b"ab", None]),
]
LOST: list[tuple[pa.DataType, pa.DataType, Any, Any]] = [
    (pa.float64(), pa.float32(), 0.5, 1e300),
    (pa.float64(), pa.float32(), 0.5, 0.1),
    (pa.float64(), pa.float16(), 0.5, 1e6),
    (pa.int64(), pa.float16(), 1, 4097),
    (pa.int64(), pa.float64(), 1, (1 << 53) + 1),
    (pa.int64(), pa.bool_(), 1, 5),
    (pa.float64(), pa.decimal128(5, 2), 1.25, 1.255),
    (pa.decimal128(9, 3), pa.float32(), Decimal("0.125"), Decimal("999999.999")),
    (pa.decimal128(38, 0), pa.decimal128(38, 18), Decimal(1), Decimal(10**37)),
    (
        pa.timestamp("us"),
        pa.date32(),
        dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
        dt.datetime(2024, 1, 1, 1, tzinfo=dt.UTC),
    ),
    (pa.int32(), pa.time32("s"), 1, 86_401),
    (pa.dictionary(pa.int8(), pa.float64()), pa.float32(), 0.5, 1e300),
    (pa.string(), pa.int8(), "1", "1000"),
    (pa.binary(), pa.binary(2), b"ab", b"abc"),
    (pa.list_(pa.int8()), pa.list_(pa.int8(), 1), [1], [1, 2]),
]


def alike(values: list[Any]) -> list[str]:
    """Texts, in which NaN is NaN and -0.0 is not 0.0."""
    return [repr(value) for value in values]


@pytest.mark.parametrize(("source", "target", "values"), FITS)
def test_what_fits_is_the_same_value(
    source: pa.DataType, target: pa.DataType, values: list[Any]
) -> None:
    found = conformed_column(pa.array(values, source), pa.field("x", target))
    found.validate(full=True)
    assert found.type == target
    assert alike(found.to_pylist()) == alike(pa.array(values, target).to_pylist())
    lists = pa.array([values, None, []], pa.list_(source))
    found = conformed_column(lists, pa.field("x", pa.list_(target)))
    assert alike(found[0].as_py()) == alike(pa.array(values, target).to_pylist())
    assert found.to_pylist()[1:] == [None, []]


@pytest.mark.parametrize(("source", "target", "good", "bad"), LOST)
def test_what_would_change_is_named_with_its_place(
    source: pa.DataType, target: pa.DataType, good: Any, bad: Any
) -> None:
    column = pa.array([good, None, good, bad, good, bad], source)
    for given, wanted in (
        (column, target),
        (pa.array([[v] for v in column.to_pylist()], pa.list_(source)), pa.list_(target)),
    ):
        with pytest.raises(ValueMismatch, match=r"column 'x' as .* without loss: ") as failed:
            conformed_column(given, pa.field("x", wanted))
        assert failed.value.index == 3


def test_pairs_of_maps_are_cast_by_place() -> None:
    maps = pa.array([[(1, 0.5)], None], pa.map_(pa.int64(), pa.float64()))
    pairs = pa.list_(pa.struct([("k", pa.int8()), ("v", pa.float32())]))
    found = conformed_column(maps, pa.field("x", pairs))
    assert found.to_pylist() == [[{"k": 1, "v": 0.5}], None]
    with pytest.raises(ValueMismatch, match="would change"):
        conformed_column(pa.array([[(1, 1e300)]], maps.type), pa.field("x", pairs))


def test_columns_are_chosen_by_name_and_nulls_refused() -> None:
    schema = pa.schema([pa.field("n", pa.int64(), nullable=False)])
    rows = pa.record_batch({"more": ["a", "b"], "n": [1, 2]})
    assert conformed(rows, schema).to_pylist() == [{"n": 1}, {"n": 2}]
    for values in (pa.array([1, None]), pa.array([1, None], pa.int8())):
        with pytest.raises(ValueMismatch, match="a null in column 'n'") as failed:
            conformed(pa.record_batch({"n": values}), schema)
        assert failed.value.index == 1
    same = pa.RecordBatch.from_arrays([pa.array([None, 1])], schema=schema)
    with pytest.raises(ValueMismatch, match="a null in column 'n'"):
        conformed(same, schema)
    with pytest.raises(ValueMismatch, match=r"no column 'n'; columns: nn \(did you mean 'nn'\?\)"):
        conformed(pa.record_batch({"nn": [1]}), schema)
    twice = pa.RecordBatch.from_arrays([pa.array([1])] * 2, names=["n", "n"])
    with pytest.raises(ValueMismatch, match="the column 'n' 2 times"):
        conformed(twice, schema)


def test_types_that_have_nothing_in_common() -> None:
    assert is_castable(pa.null(), pa.uuid())
    assert is_castable(pa.uuid(), pa.binary())
    assert not is_castable(pa.list_(pa.int64()), pa.int64())
    with pytest.raises(ValueMismatch, match="Unsupported cast") as failed:
        conformed_column(pa.array([[1]]), pa.field("x", pa.int64()))
    assert failed.value.index == -1


NEVER = pa.field("never", pa.int64(), nullable=False)
WITHIN: list[tuple[pa.DataType, list[Any], list[Any]]] = [
    (pa.struct([NEVER]), {"never": 1}, {"never": None}),
    (pa.list_(NEVER), [1], [1, None]),
    (pa.large_list(NEVER), [1], [None]),
    (pa.list_(NEVER, 1), [1], [None]),
    (pa.map_(pa.string(), NEVER), [("k", 1)], [("k", None)]),
    (pa.list_(pa.struct([NEVER])), [{"never": 1}], [None, {"never": None}]),
    (pa.struct([pa.field("l", pa.list_(NEVER))]), {"l": [1]}, {"l": [None]}),
]


@pytest.mark.parametrize(("kind", "good", "bad"), WITHIN, ids=str)
def test_a_null_within_a_column_of_the_same_type_is_refused(
    kind: pa.DataType, good: Any, bad: Any
) -> None:
    field = pa.field("c", kind)
    fine = pa.array([bad, good, None, good, good], kind).slice(1)
    assert conformed_column(fine, field) is fine
    wrong = pa.array([bad, good, None, good, bad, bad], kind).slice(1)
    with pytest.raises(ValueMismatch, match="a null within column 'c'") as told:
        conformed_column(wrong, field)
    assert told.value.index == 3


ENCODED = pa.dictionary(pa.int8(), pa.string())


@pytest.mark.parametrize(
    ("field", "wrap"),
    [
        (pa.field("c", ENCODED, nullable=False), lambda column: column),
        (
            pa.field("c", pa.struct([pa.field("x", ENCODED, nullable=False)])),
            lambda column: pa.StructArray.from_arrays([column], names=["x"]),
        ),
        (
            pa.field("c", pa.list_(pa.field("item", ENCODED, nullable=False), 1)),
            lambda column: pa.FixedSizeListArray.from_arrays(column, 1),
        ),
    ],
    ids=["itself", "struct", "list"],
)
def test_a_null_that_a_dictionary_has_is_refused(
    field: pa.Field, wrap: Callable[[pa.Array], pa.Array]
) -> None:
    def column(*indices: int) -> pa.Array:
        words = pa.array(["a", None])
        encoded = pa.DictionaryArray.from_arrays(pa.array(indices, pa.int8()), words)
        return wrap(encoded).cast(field.type)

    assert (
        conformed_column(column(0, 0), field).to_pylist() == wrap(pa.array(["a"] * 2)).to_pylist()
    )
    with pytest.raises(ValueMismatch, match="declared as never null") as told:
        conformed_column(column(0, 1), field)
    assert told.value.index == 1


def test_a_column_of_nulls_alone_may_have_any_type() -> None:
    kind = pa.struct([("tags", pa.map_(pa.string(), pa.int64())), ("id", pa.uuid())])
    column = pa.nulls(3, kind)
    assert conformed_column(column, pa.field("c", kind)) is column
