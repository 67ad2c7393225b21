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
from penstock.storage.codec_migration import MigrationRefusedError, field_changes, migration

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


RENAMED = pa.struct([ps.field("b", pa.int64(), alias="a"), ("c", pa.int64())])


@pytest.mark.parametrize("within", [lambda one: one, pa.list_, lambda one: pa.struct([("s", one)])])
def test_a_field_that_was_stored_under_both_of_its_names_is_refused(within: Any) -> None:
    old = within(pa.struct([("a", pa.int64()), ("b", pa.int64())]))
    with pytest.raises(MigrationRefusedError, match=r"field 'b'.*with 'b' and with its alias 'a'"):
        migration(codec_of(old), codec_of(within(RENAMED)))


def test_an_alias_that_has_done_its_work_may_stay() -> None:
    assert migrated({"b": 2}, pa.struct([("b", pa.int32())]), RENAMED) == {"b": 2, "c": None}
    own = pa.struct([ps.field("b", pa.int64(), alias="b")])
    assert migrated({"b": 2}, pa.struct([("b", pa.int32())]), own) == {"b": 2}


def test_what_was_stored_under_an_alias_must_fit() -> None:
    with pytest.raises(MigrationRefusedError, match=r"field 'b'.*stored as string"):
        migration(codec_of(pa.struct([("a", pa.string())])), codec_of(RENAMED))


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ([ps.field("b", pa.int64(), alias="a"), ("a", pa.int64())], "'b': alias='a' is another"),
        (
            [ps.field("b", pa.int64(), alias="a"), ps.field("c", pa.int64(), alias="a")],
            "'b': alias='a' is the alias of another field",
        ),
        ([ps.field("a", pa.int64(), alias="b"), ps.field("b", pa.int64(), alias="a")], "another"),
        ([("a", pa.int64()), ("a", pa.string())], "has 2 fields 'a'"),
    ],
)
def test_a_declaration_that_means_two_things_is_refused(fields: Any, refusal: str) -> None:
    type_ = pa.struct(fields)
    for declare in (
        lambda: ps.ValueState("seen", pa.list_(type_)),
        lambda: ps.MapState("seen", str, type_),
        lambda: ps.BroadcastState("seen", str, pa.map_(pa.string(), type_)),
        lambda: ps.OperatorListState("seen", pa.struct([("inner", type_)])),
    ):
        with pytest.raises(ps.JobRejected, match=f"state 'seen'.*{refusal}"):
            declare()


def test_what_becomes_of_fields_is_told() -> None:
    assert field_changes(codec_of(BEFORE), codec_of(AFTER)) == (
        "without 'gone'; 'seen' begins as its default; 'note' begins as null"
    )
    inner = codec_of(pa.map_(pa.string(), pa.struct([("s", BEFORE)])))
    changed = codec_of(pa.map_(pa.string(), pa.struct([("s", RENAMED)])))
    assert field_changes(inner, changed) == (
        "without 's.sum', 's.name', 's.gone'; 's.b' begins as null; 's.c' begins as null"
    )
    assert not field_changes(codec_of("msgpack/1"), codec_of("pickle/1"))


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
