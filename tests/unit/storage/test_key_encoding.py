"""Aim: keys have one canonical form. Method: round trips, and equality against Python tuples."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import JobRejected
from penstock.storage.hashing import hash_columns
from penstock.storage.key_encoding import decode_keys, encode_keys
from tests.support.examples import examples
from tests.support.kernel_twins.implementations import load, using

LOOPS = [load(compiled=True), load(compiled=False)]
TYPES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "uint64": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "int8": (pa.int8(), st.integers(-3, 3)),
    "float32": (pa.float32(), st.floats(width=32)),
    "float64": (pa.float64(), st.floats()),
    "bool": (pa.bool_(), st.booleans()),
    "timestamp": (
        pa.timestamp("ms", "UTC"),
        st.datetimes().map(lambda t: t.replace(microsecond=0)),
    ),
    "date32": (pa.date32(), st.dates()),
    "time64": (pa.time64("us"), st.times()),
    "string": (pa.string(), st.text(max_size=12)),
    "large_binary": (pa.large_binary(), st.binary(max_size=12)),
    "string_view": (pa.string_view(), st.text(max_size=20)),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), st.sampled_from(["a", "b", ""])),
    "decimal": (pa.decimal128(12, 2), st.decimals(-(10**9), 10**9, places=2)),
    "fixed_binary": (pa.binary(3), st.binary(min_size=3, max_size=3)),
    "null": (pa.null(), st.none()),
}


@st.composite
def key_columns(draw: st.DrawFn) -> list[pa.Array]:
    names = draw(st.lists(st.sampled_from(sorted(TYPES)), min_size=1, max_size=3))
    rows = draw(st.integers(0, 12))
    columns = []
    for name in names:
        type_, values = TYPES[name]
        cells = draw(st.lists(st.one_of(st.none(), values), min_size=rows, max_size=rows))
        columns.append(pa.array(cells, type_))
    return columns


def canonical(value: Any) -> Any:
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value + 0.0
    return value


def tuples(columns: list[pa.Array]) -> list[tuple[Any, ...]]:
    lists = [[canonical(value) for value in column.to_pylist()] for column in columns]
    return list(zip(*lists, strict=True))


@examples(150)
@given(key_columns(), st.data())
def test_round_trip_and_equality(columns: list[pa.Array], data: st.DataObject) -> None:
    expected = tuples(columns)
    rows = len(expected)
    encodings = []
    for loops in LOOPS:
        with using(loops):
            batch = encode_keys(columns)
            assert len(batch) == rows
            back = batch.to_arrays()
            assert [array.type for array in back] == [column.type for column in columns]
            assert [repr(row) for row in tuples(back)] == [repr(row) for row in expected]
            assert batch.hashes.tolist() == hash_columns(columns).tolist()
            encodings.append([batch.to_bytes(row) for row in range(rows)])
            if rows:
                picked = np.array(data.draw(st.lists(st.integers(0, rows - 1))), dtype=np.int64)
                taken = batch.take(picked)
                assert tuples(taken.to_arrays()) == [expected[row] for row in picked]
                assert taken.hashes.tolist() == batch.hashes[picked].tolist()
                part = batch.slice(1, rows)
                assert tuples(part.to_arrays()) == expected[1:]
                assert part.hashes.tolist() == batch.hashes[1:].tolist()
    assert encodings[0] == encodings[1]
    for left in range(rows):
        for right in range(left):
            same = expected[left] == expected[right]
            assert same == (encodings[0][left] == encodings[0][right])
            if not same:
                assert not encodings[0][left].startswith(encodings[0][right])


@given(key_columns())
def test_keys_as_bytes_decode(columns: list[pa.Array]) -> None:
    batch = encode_keys(columns)
    keys = [batch.to_bytes(row) for row in range(len(batch))]
    offsets = np.cumsum([0, *map(len, keys)])
    stored = np.frombuffer(b"".join(keys), dtype=np.uint8)
    decoded = decode_keys(batch.types, stored, offsets)
    assert [repr(row) for row in tuples(decoded)] == [repr(row) for row in tuples(columns)]


def test_published_bytes() -> None:
    columns = [pa.array(["ab", None]), pa.array([-2, 5], pa.int16()), pa.array([None, Decimal(1)])]
    batch = encode_keys([columns[0], columns[1]])
    assert batch.to_bytes(0) == b"\1\2\0\0\0ab\1\xfe\xff\xff\xff\xff\xff\xff\xff"
    assert batch.to_bytes(1) == b"\0\1\5\0\0\0\0\0\0\0"
    assert encode_keys([columns[1]]).to_bytes(1) == b"\1\5\0\0\0\0\0\0\0"


def test_tuples_do_not_run_into_each_other() -> None:
    batch = encode_keys([pa.array(["a", "ab", "", None]), pa.array(["bc", "c", "abc", "abc"])])
    assert len({batch.to_bytes(row) for row in range(4)}) == 4


def test_a_fixed_key_is_a_word_and_a_null_flag() -> None:
    batch = encode_keys([pa.array([1.0, -0.0, None, 0.0, math.nan, -math.nan])])
    assert batch.fixed is not None
    assert batch.nulls is not None
    assert batch.nulls.tolist() == [False, False, True, False, False, False]
    assert batch.fixed[1] == batch.fixed[3] == batch.fixed[2] == 0
    assert batch.fixed[4] == batch.fixed[5]


def test_what_cannot_be_a_key_is_refused() -> None:
    with pytest.raises(JobRejected, match="cannot be a key"):
        encode_keys([pa.array([[1]])])
    with pytest.raises(ValueError, match="at least one column"):
        encode_keys([])
