"""Values survive their way into bytes and columns and back, in the type they were put in as.

Method: hypothesis values per type against themselves; names make the same codec again; what does not fit
is refused with the reason.
"""

from __future__ import annotations

import datetime as dt
import enum
import pickle
from collections import OrderedDict
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import msgpack
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StoreCorrupt
from penstock.storage.codec import Stamped, StateCodec, StateError, codec_of
from penstock.storage.type_names import parse_type, type_name
from tests.support.examples import examples


def moment(year: int, microsecond: int = 0) -> dt.datetime:
    """The first moment of a year, without a time zone."""
    return dt.datetime(year, 1, 1, microsecond=microsecond)  # noqa: DTZ001 - on purpose


INT = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
MOMENT = st.datetimes(moment(1700), moment(2200))
PLAIN: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-128, 127)),
    (pa.uint16(), st.integers(0, 65535)),
    (pa.int64(), INT),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float16(), st.floats(width=16, allow_nan=False)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), FLOAT),
    (pa.string(), TEXT),
    (pa.large_string(), TEXT),
    (pa.binary(), st.binary(max_size=8)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.decimal128(20, 3), st.decimals(-(10**9), 10**9, places=3)),
    (pa.decimal256(50, 0), st.integers(-(10**40), 10**40).map(Decimal)),
    (pa.date32(), st.dates()),
    (pa.date64(), st.dates()),
    (pa.time32("s"), st.times().map(lambda t: t.replace(microsecond=0))),
    (pa.time64("us"), st.times()),
    (pa.time64("ns"), st.times()),
    (pa.timestamp("us"), MOMENT),
    (pa.timestamp("ns"), MOMENT),
    (pa.timestamp("s", "UTC"), MOMENT.map(lambda t: t.replace(microsecond=0, tzinfo=dt.UTC))),
    (pa.timestamp("us", "+02:30"), MOMENT.map(lambda t: t.replace(tzinfo=dt.UTC))),
    (pa.timestamp("us", "Europe/Berlin"), MOMENT.map(lambda t: t.replace(tzinfo=dt.UTC))),
    (pa.duration("us"), st.timedeltas(dt.timedelta(-10_000), dt.timedelta(10_000))),
]


def _comparable(value: Any) -> Any:
    """A time of an hour that comes twice equals none of another zone: the moment is what counts."""
    match value:
        case dt.datetime(tzinfo=dt.tzinfo()):
            return value.astimezone(dt.UTC)
        case dict():
            return {key: _comparable(inner) for key, inner in value.items()}
        case list():
            return [_comparable(inner) for inner in value]
        case _:
            return value


def _check(codec: StateCodec, value: Any) -> None:
    again = codec_of(codec.name)
    assert again.name == codec.name
    assert pickle.loads(pickle.dumps(codec)).name == codec.name
    stored, nothing = codec.to_stored(value), codec.to_stored(None)
    assert _comparable(codec.to_value(stored)) == _comparable(value)
    assert codec.to_value(nothing) is None
    assert type(codec.to_value(stored)) is type(value)
    assert again.decode(codec.encode(stored)) == stored
    assert again.decode(codec.encode(nothing)) == nothing
    column = codec.column([stored, nothing, stored])
    assert column.type == codec.column_type
    assert again.stored(column) == [stored, nothing, stored]
    assert again.stored(column.slice(1)) == [nothing, stored]
    stamped = Stamped(codec)
    assert stamped.is_immutable == codec.is_immutable
    cells = [(stored, 5), (nothing, -6)]
    other = codec_of(stamped.name)
    assert other.stored(stamped.column(cells)) == cells
    assert [other.decode(stamped.encode(cell)) for cell in cells] == cells


@examples(12)
@given(data=st.data())
@pytest.mark.parametrize(("type_", "values"), PLAIN, ids=lambda p: str(p)[:24])
def test_plain_arrow_values(type_: pa.DataType, values: Any, data: st.DataObject) -> None:
    codec = codec_of(type_)
    assert codec.is_immutable
    _check(codec, data.draw(values))


@examples(40)
@given(data=st.data())
def test_nested_arrow_values(data: st.DataObject) -> None:
    inner_type, inner = data.draw(st.sampled_from(PLAIN))
    type_ = pa.struct(
        [
            ('a "b"', pa.list_(inner_type)),
            ("c", pa.map_(pa.string(), pa.list_(inner_type, 2))),
        ]
    )
    value = {
        'a "b"': data.draw(st.lists(st.none() | inner, max_size=3)),
        "c": data.draw(st.dictionaries(TEXT, st.lists(inner, min_size=2, max_size=2), max_size=2)),
    }
    codec = codec_of(type_)
    assert not codec.is_immutable
    _check(codec, value)


@pytest.mark.parametrize("value", [{"a": 1, "b": None}, [("a", 1), ("b", None)], []])
@pytest.mark.parametrize(
    ("wrap", "inside"),
    [
        (lambda type_: type_, lambda value: value),
        (pa.list_, lambda value: [value]),
        (lambda type_: pa.struct([("a", type_)]), lambda value: {"a": value}),
        (lambda type_: pa.map_(pa.int8(), type_), lambda value: {1: value}),
    ],
)
def test_maps_are_put_in_as_pairs_too(wrap: Any, inside: Any, value: Any) -> None:
    codec = codec_of(wrap(pa.map_(pa.string(), pa.int64())))
    assert codec.to_value(codec.to_stored(inside(value))) == inside(dict(value))


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | FLOAT
    | TEXT
    | st.binary(max_size=5)
    | st.decimals(allow_nan=False)
    | st.datetimes(timezones=st.none() | st.just(dt.UTC) | st.just(ZoneInfo("Europe/Berlin")))
    | st.dates()
    | st.times()
    | st.timedeltas()
)
HASHABLE = st.integers() | TEXT | st.tuples(st.integers(), TEXT)
PLAIN_PYTHON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.sets(HASHABLE, max_size=3)
        | st.frozensets(HASHABLE, max_size=3)
    ),
    max_leaves=8,
)


@examples(100)
@given(value=PLAIN_PYTHON)
def test_plain_python_values(value: Any) -> None:
    _check(codec_of("msgpack/1"), value)


@pytest.mark.parametrize(
    "value",
    [
        dt.time(12, 1, tzinfo=ZoneInfo("Europe/Berlin")),
        dt.time(12, 1, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
        dt.time(12, 1, fold=1),
        dt.time(12, 1, fold=1, tzinfo=dt.UTC),
        dt.time(12, 1, tzinfo=dt.timezone(dt.timedelta(hours=2))),
        dt.datetime(2020, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
    ],
)
def test_times_keep_zone_and_fold(value: Any) -> None:
    codec = codec_of("msgpack/1")
    assert repr(codec.to_value(codec.to_stored([value]))) == repr([value])


def endless() -> list[Any]:
    """A list within itself."""
    value: list[Any] = [1]
    value.append((value,))
    return value


class Unnamed(dt.tzinfo):
    def utcoffset(self, moment: dt.datetime | None) -> dt.timedelta | None:
        return dt.timedelta(hours=1 if moment.month < 6 else 2) if moment else None


def test_times_of_zones_without_a_name() -> None:
    codec = codec_of("msgpack/1")
    with pytest.raises(ValueError, match="time zone that is not known by name"):
        codec.to_stored(dt.time(12, tzinfo=Unnamed()))
    summer = dt.datetime(2020, 7, 1, tzinfo=Unnamed())
    assert codec.to_value(codec.to_stored(summer)).isoformat() == "2020-07-01T00:00:00+02:00"


def test_times_that_are_stored_as_text_are_read() -> None:
    stored = msgpack.packb(msgpack.ExtType(6, msgpack.packb("12:01:00.000005")))
    assert codec_of("msgpack/1").to_value(stored) == dt.time(12, 1, 0, 5)


@pytest.mark.parametrize(
    "value",
    [
        [(1, 2.5), (), ("x", None)],
        [(196, b"\xc4"), ([1], (2, [3]))],
        ((1, 2), (3, 4)),
        {(1, 2), (3, 4)},
        {"rows": [(1,), (2,)], (1, 2): [[1], (2,)]},
        [(1,), [2]],
        [[(1,)], [(2,)]],
        [Decimal("1.5"), (1,)],
        [(np.int64(1), 1 << 70), (dt.date(2020, 1, 1), {"a": (1,)})],
        [("x" * 2_000_000,), (1, ("y" * 2_000_000, (2,))), (3,)],
        {"a": ("x" * 2_000_000,), "b": (1, (2, (3,)))},
    ],
)
def test_tuples_and_lists_come_back_as_what_they_were(value: Any) -> None:
    codec = codec_of("msgpack/1")
    found = codec.to_value(codec.to_stored(value))
    assert found == value
    assert repr(found) == repr(value).replace("np.int64(1)", "1")


def test_lists_of_tuples_that_are_stored_one_by_one_are_read() -> None:
    tuples = [msgpack.ExtType(1, msgpack.packb([number, "x"])) for number in range(3)]
    assert codec_of("msgpack/1").to_value(msgpack.packb(tuples)) == [(0, "x"), (1, "x"), (2, "x")]


@pytest.mark.parametrize(
    ("value", "before"),
    [
        ({"a": (1, "x")}, {"a": msgpack.ExtType(1, msgpack.packb([1, "x"]))}),
        ([(1,), (2,)], msgpack.ExtType(10, msgpack.packb([[1], [2]]))),
        ([1 << 70, b"x", {}], [msgpack.ExtType(9, msgpack.packb(str(1 << 70))), b"x", {}]),
        ({}, {}),
    ],
)
def test_containers_that_are_stored_as_msgpack_are_read(value: Any, before: Any) -> None:
    assert codec_of("msgpack/1").to_value(msgpack.packb(before)) == value


def test_equal_values_have_equal_bytes_whichever_parts_are_one_object() -> None:
    to_stored = codec_of("msgpack/1").to_stored
    part = (str(b"ab", "ascii"), 1.5)
    assert to_stored({"x": [part, part], "ab": part}) == to_stored(
        {"x": [("ab", 1.5), ("ab", 1.5)], "ab": ("ab", 1.5)}
    )
    assert to_stored([np.int64(3), (np.str_("ab"),)]) == to_stored([3, ("ab",)])
    assert to_stored({np.str_("n"): np.int64(3)}) == to_stored({"n": 3})


@pytest.mark.parametrize(
    "value", [{}, {"count": 5, "sum": 12.5}, {1: b"x", 2.5: None, "big": 1 << 70}]
)
def test_small_records_are_msgpack(value: Any) -> None:
    codec = codec_of("msgpack/1")
    stored = codec.to_stored(value)
    assert codec.to_value(stored) == value
    assert list(msgpack.unpackb(stored, strict_map_key=False)) == list(value)
    with pytest.raises(ValueError, match="no plain Python value"):
        codec.to_stored({**value, "a": bytearray(b"x")})


def test_numbers_whose_bytes_look_like_half_a_character_are_stored_as_others() -> None:
    codec = codec_of("msgpack/1")
    value = [int.from_bytes(b"\xed\xa0\x80\x01", "little"), (1, "\ud7ff")]
    stored = codec.to_stored(value)
    assert stored[:2] == codec.to_stored([(1,)])[:2]
    assert codec.to_value(stored) == value


def test_long_texts_within_containers() -> None:
    codec = codec_of("msgpack/1")
    for value in ({"a": ("x" * 200_000, 1), "b": b"y" * 70_000}, [(1, "z")] * 30_000, ({},)):
        assert codec.to_value(codec.to_stored(value)) == value


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:-4],
        lambda data: data + b"x",
        lambda data: data[:3] + b"\xff" + data[4:],
        lambda _: b"\x80\x03cos\nsystem\n(X\x04\0\0\0truetR.",
        lambda _: b"\x80\x03\x82\x01.",
        lambda _: b"\x80\x03Pid\n.",
        lambda _: b"",
    ],
)
def test_damaged_containers_are_damage_and_nothing_runs(damage: Any) -> None:
    codec = codec_of("msgpack/1")
    stored = codec.to_stored({"a": (1, "x"), "b": [2.5]})
    with pytest.raises(StoreCorrupt):
        codec.to_value(damage(stored))
    assert codec.to_value(stored) == {"a": (1, "x"), "b": [2.5]}


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


class Point:
    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and self.x == other.x

    __hash__ = None  # type: ignore[assignment]


def test_pickled_values() -> None:
    class Local(Point):
        pass

    _check(codec_of("pickle/1"), Point(3))
    codec = codec_of("pickle/1")
    assert codec.to_value(codec.to_stored(Local(4))).x == 4
    with pytest.raises(ValueError, match="cannot be pickled"):
        codec.to_stored(i for i in range(3))


def test_numpy_scalars_become_pythons_own() -> None:
    for codec_name in ("msgpack/1", "arrow.int64/1"):
        codec = codec_of(codec_name)
        value = codec.to_value(codec.to_stored(np.int32(7)))
        assert type(value) is int
    plain = codec_of("msgpack/1")
    given = [np.float64(0.5), np.str_("x"), np.bytes_(b"x"), np.True_, np.uint64(2**64 - 1)]
    assert repr(plain.to_value(plain.to_stored(given))) == repr([0.5, "x", b"x", True, 2**64 - 1])
    assert codec_of(pa.float64()).to_stored(np.float32(0.5)) == 0.5
    assert codec_of(pa.bool_()).to_stored(np.True_) is True


@pytest.mark.parametrize(
    ("type_", "value", "reason"),
    [
        (pa.int64(), "7", "^$"),
        (pa.int64(), True, "^$"),
        (pa.int64(), 7.0, "^$"),
        (pa.int64(), 2**63, "not within"),
        (pa.uint8(), -1, "not within"),
        (pa.bool_(), 1, "^$"),
        (pa.float64(), "1", "^$"),
        (pa.float64(), 2**53 + 1, "exactly"),
        (pa.float32(), 1e300, "too large"),
        (pa.string(), b"x", "^$"),
        (pa.string(), "\ud800", "Unicode"),
        (pa.binary(), "x", "^$"),
        (pa.binary(2), b"x", "1 bytes"),
        (pa.decimal128(4, 2), Decimal("1.234"), "round it"),
        (pa.decimal128(4, 2), Decimal("123.45"), "round it"),
        (pa.decimal128(4, 2), 1.5, "^$"),
        (pa.date32(), moment(2020), "datetime"),
        (pa.timestamp("s"), moment(2020, 5), "whole number of s"),
        (pa.timestamp("us"), dt.datetime(2020, 1, 1, tzinfo=dt.UTC), "time zone"),
        (pa.timestamp("ns"), moment(2500), "out of range"),
        (pa.time64("us"), dt.time(1, tzinfo=dt.UTC), "time zone"),
        (pa.list_(pa.int64()), "abc", "no list"),
        (pa.list_(pa.int64()), [1, "x"], "'x' is no int64"),
        (pa.list_(pa.int64(), 2), [1], "1 items"),
        (pa.struct([("a", pa.int64())]), {"b": 1}, "does not have: b"),
        (pa.map_(pa.string(), pa.int64()), "ab", "'ab' is no dict or list of"),
        (pa.map_(pa.string(), pa.int64()), [("a", 1), "bc"], "no dict or list of"),
        (pa.map_(pa.string(), pa.int64()), [("a", 1, 2)], "no dict or list of"),
        (pa.map_(pa.string(), pa.int64()), [("a", 1), ("a", 2)], "has a key more than once"),
        (pa.map_(pa.string(), pa.int64()), [(None, 1)], "has the key None"),
        (pa.map_(pa.string(), pa.int64()), {None: 1}, "has the key None"),
        (pa.map_(pa.string(), pa.int64()), {"a": "x"}, "'x' is no int64"),
    ],
)
def test_what_does_not_fit(type_: pa.DataType, value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        codec_of(type_).to_stored(value)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        OrderedDict(a=1),
        Point(1),
        "\ud800",
        [{1: object()}],
        bytearray(b"x"),
        memoryview(b"x"),
        [{1: (b"x", [bytearray(300)])}],
        [(1, b"x"), (2, bytearray(b"x"))],
        (1, {"a": [memoryview(b"x")]}),
        [(1,), (2, object())],
        {memoryview(b"x"): 1},
        {"a": [("\ud800",)]},
        [1.5, (Colour.RED,)],
        {"a": [Text("x")]},
        ({1: Ellipsis}, int),
        endless(),
        np.datetime64("2020-01-01"),
        np.datetime64(1, "ns"),
        np.timedelta64(1, "ns"),
        np.complex64(1),
        np.array([1]),
    ],
)
def test_msgpack_refuses_what_would_come_back_as_something_else(value: Any) -> None:
    with pytest.raises(ValueError, match=r"no plain Python value|cannot hold"):
        codec_of("msgpack/1").to_stored(value)


def test_values_are_not_nested_deeper_than_they_can_be_read() -> None:
    """Reading what is deeper would end the process, for want of stack."""
    codec, value = codec_of("msgpack/1"), (dt.date(2026, 1, 1),)
    for _ in range(58):
        value = (value,)
    assert codec.to_value(codec.to_stored(value)) == value
    for _ in range(400):
        value = (value,)
    with pytest.raises(ValueError, match="more than 60 values are nested within each other"):
        codec.to_stored(value)


@pytest.mark.parametrize(
    "name", ["arrow.int64/2", "arrow.int65/1", "arrow.list<int64/1", "json/1", "arrow./1"]
)
def test_names_of_other_versions(name: str) -> None:
    with pytest.raises(StoreCorrupt):
        codec_of(name)


@pytest.mark.parametrize(
    "type_", [pa.null(), pa.dictionary(pa.int8(), pa.string()), pa.list_(pa.null())]
)
def test_types_that_state_cannot_hold(type_: pa.DataType) -> None:
    assert type_name(type_) is None
    with pytest.raises(StateError, match="cannot hold"):
        codec_of(type_)


def test_type_names_come_back() -> None:
    for type_, _ in PLAIN:
        text = type_name(type_)
        assert text is not None
        assert parse_type(text) == type_


def test_sets_within_sets_are_written_once_each() -> None:
    value: frozenset[Any] = frozenset({1})
    for _ in range(40):  # twice for each that it is in would take days
        value = frozenset({value, 2})
    in_tuples: frozenset[Any] = frozenset({1})
    for _ in range(40):
        in_tuples = frozenset({(2, (in_tuples,))})
    codec = codec_of("msgpack/1")
    for each in (value, in_tuples):
        assert codec.to_value(codec.to_stored(each)) == each
