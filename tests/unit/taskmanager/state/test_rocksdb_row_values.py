"""Aim: whatever is in a row comes back from its bytes. Method: hypothesis, all types nested."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Unrecoverable
from penstock.storage.entries.row_values import check_storable, decoded_values, encoded_values
from tests.support.examples import examples

PLAIN: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint8(), st.integers(0, 255)),
    (pa.float64(), st.sampled_from([0.0, -0.0, 1.5, float("inf")])),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(max_size=5)),
    (pa.binary(), st.binary(max_size=5)),
    (pa.decimal128(20, 2), st.integers(-(10**6), 10**6).map(lambda n: Decimal(n) / 100)),
    (pa.timestamp("ms"), st.integers(0, 2**40)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.null(), st.none()),
]


def nested(depth: int) -> st.SearchStrategy[tuple[pa.DataType, st.SearchStrategy[Any]]]:
    plain = st.sampled_from(PLAIN).map(lambda pair: (pair[0], st.one_of(st.none(), pair[1])))
    if not depth:
        return plain
    inner = nested(depth - 1)
    lists = inner.map(lambda p: (pa.list_(p[0]), st.one_of(st.none(), st.lists(p[1], max_size=3))))
    structs = st.tuples(inner, inner).map(
        lambda p: (
            pa.struct([("a", p[0][0]), ("b", p[1][0])]),
            st.one_of(st.none(), st.fixed_dictionaries({"a": p[0][1], "b": p[1][1]})),
        )
    )
    return st.one_of(plain, lists, structs)


@examples(150)
@given(st.data())
def test_rows_come_back_as_they_were(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(nested(2), min_size=1, max_size=3))
    count = data.draw(st.integers(0, 6))
    columns = [
        pa.array(data.draw(st.lists(values, min_size=count + 2, max_size=count + 2)), kind)
        for kind, values in kinds
    ]
    columns = [column.slice(1, count) for column in columns]
    rows = encoded_values(columns)
    assert len(rows) == count
    order = np.array(data.draw(st.permutations(range(count))), np.int64)
    found = decoded_values([kind for kind, _ in kinds], rows.take(order))
    for column, back in zip(columns, found, strict=True):
        back.validate(full=True)
        assert back.equals(column.take(pa.array(order)))


def test_values_of_other_forms_are_stored_plainly_and_keep_their_type() -> None:
    kind = pa.struct(
        [
            ("a", pa.dictionary(pa.int32(), pa.large_string())),
            ("b", pa.large_list(pa.list_(pa.int8(), 2))),
            ("c", pa.map_(pa.string(), pa.int64())),
        ]
    )
    rows = [{"a": "x", "b": [[1, 2], None], "c": [("k", 1)]}, None, {"a": None, "b": [], "c": None}]
    check_storable(kind)
    for start in range(3):
        values = pa.array(rows, kind).slice(start)
        (found,) = decoded_values([kind], encoded_values([values]))
        found.validate(full=True)
        assert found.type == kind
        assert found.to_pylist() == rows[start:]
    with pytest.raises(Unrecoverable, match="union"):
        check_storable(pa.list_(pa.sparse_union([pa.field("a", pa.int64())])))
