"""Aim: a checksum tells rows apart and not their cuts or layouts. Method: both implementations, every type."""

from __future__ import annotations

import datetime as dt
import decimal
import itertools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskmanager.kernels.compiled import Kernels
from taskmanager.kernels.row_checksum import CHECKSUM_MODULUS, rows_checksum
from tests.support.kernel_twins.implementations import load, using

IMPLEMENTATIONS = {"compiled": load(compiled=True), "numpy": load(compiled=False)}
both = pytest.mark.parametrize("kernels", IMPLEMENTATIONS.values(), ids=list(IMPLEMENTATIONS))


def floats(*patterns: int) -> pa.Array:
    """Doubles of these bits."""
    return pa.array(np.array(patterns, dtype=np.uint64).view(np.float64))


DAY = dt.date(2020, 2, 29)
NOON = dt.datetime(2020, 2, 29, 12, 0, 1, tzinfo=dt.UTC)
COLUMNS: dict[str, pa.Array] = {
    "int8": pa.array([1, -1, None, 0, 127], pa.int8()),
    "uint32": pa.array([1, 2**32 - 1, None, 0, 3], pa.uint32()),
    "int64": pa.array([1, -1, None, 0, 2**62], pa.int64()),
    "bool": pa.array([True, False, None, True, False]),
    "half": pa.array(np.array([1, 2, 0.5, 0.25, 4], dtype=np.float16)),
    "float32": pa.array([1.5, None, -2.0, 0.0, 1e9], pa.float32()),
    "float64": floats(0, 1 << 63, 0x7FF8000000000000, 0x7FF8000000000001, 1),
    "date": pa.array([DAY, None, DAY.replace(year=1960), DAY.replace(day=1), DAY.replace(day=2)]),
    "time": pa.array([1, 2, None, 3, 4], pa.time64("us")),
    "timestamp": pa.array([NOON, None, NOON.replace(hour=1), NOON.replace(second=9), NOON.replace(year=1960)]),
    "duration": pa.array([1, 2, None, 3, 4], pa.duration("ms")),
    "decimal": pa.array([decimal.Decimal(text) for text in ("1.00", "-1.00", "2.50", "0.00", "9.99")]),
    "string": pa.array(["a", "", None, "a longer string than a word", "ab"]),
    "large": pa.array(["a", "", None, "a longer string than a word", "ab"], pa.large_string()),
    "view": pa.array(["a", "", None, "a longer string than a word", "ab"], pa.string_view()),
    "binary": pa.array([b"\0", b"", None, b"\0\0", b"\xff"]),
    "fixed binary": pa.array([b"abcde", b"abcdf", None, b"\0\0\0\0\0", b"12345"], pa.binary(5)),
    "interval": pa.array([(1, 2, 3), None, (1, 2, 4), (0, 0, 0), (2, 1, 3)], pa.month_day_nano_interval()),
    "dictionary": pa.array(["x", "y", None, "z", "xyz"]).dictionary_encode(),
    "list": pa.array([[1, 2], [2, 1], None, [], [1, None]]),
    "large list": pa.array([["a"], ["b"], None, [], ["a", "b"]], pa.large_list(pa.string())),
    "fixed list": pa.array([[1, 2], [2, 1], None, [0, 0], [1, None]], pa.list_(pa.int16(), 2)),
    "struct": pa.array([{"x": 1, "y": "a"}, {"x": 1, "y": None}, None, {"x": 2, "y": "a"}, {"x": None, "y": "a"}]),
    "map": pa.array([[("k", 1)], [("k", 2)], None, [], [("l", 1)]], pa.map_(pa.string(), pa.int64())),
    "list of structs": pa.array([[{"x": 1}], [{"x": 2}, {"x": 1}], None, [], [{"x": 1}, {"x": 2}]]),
    "list view": pa.array([[1], [2], None, [], [1, 2]], pa.list_view(pa.int64())),
}  # fmt: skip
"""Five values each, all different."""


def batch_of(*columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns), [f"c{index}" for index in range(len(columns))])


def summed(pieces: Sequence[pa.RecordBatch], first_row: int) -> int:
    """Checksums of pieces that follow each other, added up."""
    total = 0
    for piece in pieces:
        total += rows_checksum(piece, first_row)
        first_row += piece.num_rows
    return total % CHECKSUM_MODULUS


@pytest.mark.parametrize("name", COLUMNS)
def test_every_type_every_cut(name: str) -> None:
    batch = batch_of(pa.array(range(5)), COLUMNS[name])
    whole = rows_checksum(batch, 1000)
    for kernels in IMPLEMENTATIONS.values():
        with using(kernels):
            for cut in range(6):
                assert summed([batch.slice(0, cut), batch.slice(cut)], 1000) == whole
    copied = (
        pa.ipc.read_record_batch(batch_of(*batch.columns).serialize(), batch.schema)
        if (name != "dictionary")
        else batch
    )
    assert rows_checksum(copied, 1000) == whole


@pytest.mark.parametrize("name", COLUMNS)
def test_every_value_and_every_place_counts(name: str) -> None:
    column = COLUMNS[name]
    singles = [rows_checksum(batch_of(column.slice(row, 1)), 7) for row in range(5)]
    assert len(set(singles)) == (3 if name == "bool" else 5), "as many as there are values"
    assert len({rows_checksum(batch_of(column), first) for first in range(20)}) == 20
    whole = rows_checksum(batch_of(column), 0)
    for swapped in ([1, 0, 2, 3, 4], [0, 1, 2, 4, 3], [0, 2, 1, 3, 4]):
        rows = pa.concat_arrays([column.slice(row, 1) for row in swapped])
        assert rows_checksum(batch_of(rows), 0) != whole


def test_layouts_of_the_same_values_agree() -> None:
    texts = ["a", None, "some longer text", "", "a", "b"] * 3
    plain = pa.array(texts)
    layouts = [
        plain.cast(pa.large_string()),
        plain.cast(pa.string_view()),
        plain.cast(pa.binary()),
        plain.dictionary_encode(),
        pa.DictionaryArray.from_arrays(
            pa.array([1, 3, 0, 4, 2, 5] * 3), pa.array(["some longer text", "a", "a", None, "", "b"])
        ),
        pa.DictionaryArray.from_arrays(
            pa.array([1, None, 0, 4, 1, 5] * 3),
            pa.array(["some longer text", "a", "c", "d", "", "b"] + [str(x) for x in range(50)]),
        ),
    ]  # fmt: skip
    expected = rows_checksum(batch_of(plain), 3)
    assert [rows_checksum(batch_of(layout), 3) for layout in layouts] == [expected] * len(layouts)


@both
def test_floats_count_by_their_bits(kernels: Kernels) -> None:
    patterns = [0, 1 << 63, 0x7FF8000000000000, 0x7FF8000000000001, 0xFFF8000000000000]
    found = {rows_checksum(batch_of(floats(pattern)), 0) for pattern in patterns}
    assert len(found) == len(patterns)


@both
def test_what_lies_under_a_null_does_not_count(kernels: Kernels) -> None:
    validity = pa.py_buffer(b"\x05")
    found = set()
    for hidden in (0, 17):
        data = pa.py_buffer(struct.pack("<3q", 1, hidden, 3))
        column = pa.Array.from_buffers(pa.int64(), 3, [validity, data])
        found.add(rows_checksum(batch_of(column), 0))
    assert len(found) == 1


@both
def test_columns_are_not_interchangeable(kernels: Kernels) -> None:
    one, two = pa.array([1, 2, 3]), pa.array([4, 5, 6])
    first = rows_checksum(batch_of(one, two), 0)
    assert first != rows_checksum(batch_of(two, one), 0)


def test_no_rows_and_no_columns() -> None:
    assert rows_checksum(batch_of(pa.array([], pa.string())), 5) == 0
    nothing = pa.RecordBatch.from_struct_array(pa.array([{}] * 3, pa.struct([])))
    assert rows_checksum(nothing, 5) == summed([nothing.slice(0, 1), nothing.slice(1)], 5)


ROWS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
        st.one_of(st.none(), st.text(max_size=12)),
        st.one_of(st.none(), st.floats()),
    ),
    max_size=30,
)
SCHEMA = pa.schema([("a", pa.int64()), ("b", pa.string()), ("c", pa.float64())])


def table(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [dict(zip(("a", "b", "c"), row, strict=True)) for row in rows], schema=SCHEMA
    )


@given(ROWS, st.lists(st.integers(0, 30)), st.lists(st.integers(0, 30)), st.integers(0, 2**50))
def test_cuts_do_not_matter(
    rows: list[tuple[Any, ...]], left: list[int], right: list[int], first_row: int
) -> None:
    batch, found = table(rows), []
    for cuts in (left, right):
        bounds = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
        pieces = [batch.slice(a, b - a) for a, b in itertools.pairwise(bounds)]
        for kernels in IMPLEMENTATIONS.values():
            with using(kernels):
                found.append(summed(pieces, first_row))
    assert len(set(found)) == 1


@given(ROWS.filter(bool), st.data())
def test_a_changed_row_is_noticed(rows: list[tuple[Any, ...]], data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(rows) - 1))
    a, b, c = rows[row]
    changed = data.draw(
        st.sampled_from([(0 if a is None else None, b, c), (a, (b or "") + "x", c)])
    )
    other = [*rows[:row], changed, *rows[row + 1 :]]
    assert rows_checksum(table(rows), 0) != rows_checksum(table(other), 0)
