"""Aim: JSON text of a plain Python value is the value: what is read and written again is stored as the same bytes.

Method: by hand for every kind of value, and drawn, nested at will, by Hypothesis.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StoreCorrupt
from penstock.state_tables.plain_text import from_text, to_text
from penstock.storage.plain_codecs import MsgpackCodec

CODEC = MsgpackCodec()
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False) | st.just(math.nan),
    st.text(),
    st.binary(),
    st.dates(),
    st.datetimes(timezones=st.sampled_from([None, ZoneInfo("Europe/Berlin"), dt.UTC])),
    st.timedeltas(),
    st.decimals(),
    st.frozensets(st.integers() | st.text()),
)
KEYS = st.one_of(
    st.text(), st.integers(), st.sampled_from(["$tuple", "$map", "$x"]), st.tuples(st.integers())
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.tuples(inner, inner),
)


@given(VALUES)
def test_the_text_is_json_and_gives_the_same_bytes(value: Any) -> None:
    stored = CODEC.to_stored(value)
    text = to_text(stored)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert from_text(text) == stored


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, 2.5, None, True]}, '{"a":[1,2.5,null,true]}'),
        ((1, "x"), '{"$tuple":[1,"x"]}'),
        ([(1,), ()], '[{"$tuple":[1]},{"$tuple":[]}]'),
        ({"a": [(1,)]}, '{"a":[{"$tuple":[1]}]}'),
        ([(1,), [2]], '[{"$tuple":[1]},[2]]'),
        ({1: b"\0\1"}, '{"$map":[[1,{"$bytes":"AAE="}]]}'),
        ({"$set": 1}, '{"$map":[["$set",1]]}'),
        (decimal.Decimal("1.20"), '{"$decimal":"1.20"}'),
        (float("-inf"), '{"$float":"-inf"}'),
        (1 << 70, '{"$int":"1180591620717411303424"}'),
    ],
)
def test_what_it_looks_like(value: Any, text: str) -> None:
    assert to_text(CODEC.to_stored(value)) == text
    assert CODEC.to_value(from_text(text)) == value


@pytest.mark.parametrize(
    "text",
    [
        '{"$tupel":[1]}',
        "{1:2}",
        '{"$bytes":"?"}',
        '{"$map":[[{"a":1},2]]}',
        "",
        '{"a":1,"b":2,"a":3}',
        '[{"$map":[[1,2],[1,3]]}]',
        "[" * 5000 + "]" * 5000,
        '{"$tuple":[' * 200 + "]}" * 200,
        '{"$set":[' * 200 + "]}" * 200,
    ],
    ids=lambda text: text[:24],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        from_text(text)


def test_bytes_that_are_no_value_are_named() -> None:
    with pytest.raises(StoreCorrupt, match="cannot be read"):
        to_text(b"\xc1")
