"""Aim: what is in lists, structs and maps is cast as a value of its own is.

Method: each pair of types by itself, and inside of each nested type, cut at every place; the values by themselves are
the oracle.
"""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock import col
from penstock.expressions import BadRow


def cast(array: pa.Array, target: pa.DataType, *, safe: bool = False) -> pa.Array:
    rows = pa.RecordBatch.from_arrays([array], names=["x"])
    result = col("x").cast(target, safe=safe).compile(rows.schema)(rows)
    result.validate(full=True)
    return result


FITS: dict[str, tuple[pa.DataType, pa.DataType, list[Any]]] = {
    "fractions": (pa.float64(), pa.int32(), [1.5, None, -2.9]),
    "digits": (pa.decimal128(5, 2), pa.decimal128(5, 1), [Decimal("1.25"), None, Decimal("-1.29")]),
    "microseconds": (
        pa.duration("us"),
        pa.duration("s"),
        [dt.timedelta(microseconds=1_000_005), None, dt.timedelta(microseconds=-5)],
    ),
    "width": (pa.float64(), pa.float32(), [0.1, None, 1e300]),
    "times of day": (pa.int32(), pa.time32("s"), [0, None, 86_399]),
}
LOST: dict[str, tuple[pa.DataType, pa.DataType, Any]] = {
    "fraction": (pa.float64(), pa.int32(), 1.5),
    "infinity": (pa.float64(), pa.float32(), 1e300),
    "truth": (pa.int64(), pa.bool_(), 5),
}
REFUSED: dict[str, tuple[pa.DataType, pa.DataType, Any]] = {
    "time of day": (pa.int32(), pa.time32("s"), 86_401),
    "range": (pa.float64(), pa.int32(), 1e10),
    "years": (pa.timestamp("s"), pa.string(), 1 << 62),
}
NESTS = ["list", "large_list", "fixed", "struct", "map", "list of structs"]


def nested(nest: str, kind: pa.DataType) -> pa.DataType:
    kinds = {
        "list": pa.list_(kind),
        "large_list": pa.large_list(kind),
        "fixed": pa.list_(kind, 1),
        "struct": pa.struct([("v", kind), ("other", pa.int8())]),
        "map": pa.map_(pa.string(), kind),
        "list of structs": pa.list_(pa.struct([("v", kind)])),
    }
    return kinds[nest]


def around(nest: str, value: Any) -> Any:
    if nest == "struct":
        return {"v": value, "other": 1}
    if nest == "map":
        return [("k", value)]
    return [{"v": value}] if nest == "list of structs" else [value]


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("name", FITS)
def test_what_is_inside_is_cast_as_by_itself(name: str, nest: str) -> None:
    source, target, values = FITS[name]
    alone = cast(pa.array(values, source), target)
    rows = [None, *(around(nest, value) for value in values), None]
    array = pa.array(rows, nested(nest, source))
    expected = [None, *(around(nest, value) for value in alone.to_pylist()), None]
    for start in range(len(rows) + 1):
        for end in range(start, len(rows) + 1):
            result = cast(array.slice(start, end - start), nested(nest, target))
            assert result.type == nested(nest, target)
            assert result.to_pylist() == expected[start:end]
    constant = ps.lit(pa.scalar(rows[1], nested(nest, source))).cast(nested(nest, target))
    none = pa.RecordBatch.from_pydict({"n": [1]})
    assert constant.compile(none.schema)(none).to_pylist() == expected[1:2]


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("name", [*LOST, *REFUSED])
def test_what_is_lost_or_has_no_place_is_an_error_inside_too(name: str, nest: str) -> None:
    source, target, value = {**LOST, **REFUSED}[name]
    array = pa.array([around(nest, None), around(nest, value)], nested(nest, source))
    for safe in (True, False) if name in REFUSED else (True,):
        with pytest.raises(BadRow) as failed:
            cast(array, nested(nest, target), safe=safe)
        assert failed.value.row_index == 1


def test_what_lies_under_a_null_is_not_looked_at() -> None:
    beyond = pa.array([1e300, 1.5])
    of_struct = pa.StructArray.from_arrays([beyond], names=["v"], mask=pa.array([True, False]))
    assert cast(of_struct, pa.struct([("v", pa.int8())])).to_pylist() == [None, {"v": 1}]
    of_list = pa.FixedSizeListArray.from_arrays(beyond, 1, mask=pa.array([True, False]))
    assert cast(of_list, pa.list_(pa.int8(), 1)).to_pylist() == [None, [1]]


def test_keys_of_maps_stay_apart() -> None:
    array = pa.array([[(1.0, 1)], [(1.2, 1), (1.4, 2)]], pa.map_(pa.float64(), pa.int64()))
    with pytest.raises(BadRow) as failed:
        cast(array, pa.map_(pa.int64(), pa.int64()))
    assert failed.value.row_index == 1


def test_a_null_is_not_cast_to_what_has_none() -> None:
    array = pa.array([[1], [None]], pa.list_(pa.int64()))
    with pytest.raises(BadRow, match="'item' of type int32 may not be null"):
        cast(array, pa.list_(pa.field("item", pa.int32(), nullable=False)))
