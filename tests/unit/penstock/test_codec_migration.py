"""Aim: values that were stored otherwise become what is declared where nothing is lost, and else are refused.

Method: each rule with one that keeps it and one that breaks it, through the stored forms of both codecs.
"""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.storage.codec import Stamped, codec_of
from penstock.storage.codec_migration import MigrationRefusedError, migration

BEFORE = pa.struct([("sum", pa.int32()), ("name", pa.string()), ("gone", pa.bool_())])
AFTER = pa.struct(
    [
        ps.field("total", pa.int64(), alias="sum"),
        ps.field("seen", pa.int64(), default=7),
        ps.field("name", pa.string()),
        ps.field("note", pa.string()),
    ]
)


def migrated(value: Any, old: Any, new: Any) -> Any:
    before = codec_of(old)
    after = pickle.loads(pickle.dumps(codec_of(new)))
    convert = migration(before, after)
    assert convert is not None
    stored = convert(before.to_stored(value))
    return after.to_value(after.decode(after.encode(stored)))


def test_a_struct_gains_loses_and_renames_fields() -> None:
    found = migrated({"sum": 3, "name": "a", "gone": True}, BEFORE, AFTER)
    assert found == {"total": 3, "seen": 7, "name": "a", "note": None}


def test_structs_change_within_lists_maps_and_structs() -> None:
    old = pa.struct([("all", pa.list_(BEFORE)), ("by", pa.map_(pa.string(), BEFORE))])
    new = pa.struct([("all", pa.list_(AFTER)), ("by", pa.map_(pa.string(), AFTER))])
    one = {"sum": 3, "name": None, "gone": None}
    found = migrated({"all": [one, None], "by": {"k": one}}, old, new)
    after = {"total": 3, "seen": 7, "name": None, "note": None}
    assert found == {"all": [after, None], "by": {"k": after}}


def test_a_missing_value_stays_missing() -> None:
    assert migrated(None, BEFORE, AFTER) is None


def test_the_own_name_of_a_field_comes_before_its_alias() -> None:
    old = pa.struct([("a", pa.int64()), ("b", pa.int64())])
    new = pa.struct([ps.field("b", pa.int64(), alias="a")])
    assert migrated({"a": 1, "b": 2}, old, new) == {"b": 2}


@given(st.integers(-(2**31), 2**31 - 1))
def test_integers_widen(value: int) -> None:
    assert migrated(value, pa.int32(), pa.int64()) == value


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (pa.int64(), pa.int32()),
        (pa.int64(), pa.uint64()),
        (pa.uint64(), pa.int64()),
        (pa.int32(), pa.float64()),
        (pa.float64(), pa.float32()),
        (pa.int64(), pa.string()),
        (pa.string(), BEFORE),
        (pa.list_(pa.int64()), pa.list_(pa.int32())),
        (pa.map_(pa.string(), pa.int64()), pa.list_(pa.int64())),
        (BEFORE, pa.struct([ps.field("name", pa.int64())])),
    ],
)
def test_everything_else_is_refused(old: pa.DataType, new: pa.DataType) -> None:
    with pytest.raises(MigrationRefusedError, match="stored as"):
        migration(codec_of(old), codec_of(new))


def test_plain_python_values_become_nothing_else() -> None:
    with pytest.raises(MigrationRefusedError):
        migration(codec_of("msgpack/1"), codec_of(pa.int64()))


def test_a_time_to_live_is_added_and_begins_with_the_restore() -> None:
    convert = migration(codec_of(pa.int32()), Stamped(codec_of(pa.int64())), now_ms=5)
    assert convert is not None
    assert convert(3) == (3, 5)


def test_a_time_to_live_stays_and_is_not_taken_away() -> None:
    stamped = Stamped(codec_of(pa.int32()))
    convert = migration(stamped, Stamped(codec_of(pa.int64())), now_ms=9)
    assert convert is not None
    assert convert((3, 5)) == (3, 5)
    with pytest.raises(MigrationRefusedError, match="time to live"):
        migration(stamped, codec_of(pa.int32()))


def test_a_default_must_be_of_the_type() -> None:
    with pytest.raises(ps.JobRejected, match="default='x'"):
        ps.field("seen", pa.int64(), default="x")
