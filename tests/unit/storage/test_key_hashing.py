"""Aim: the key hash never changes. Method: published vectors, and a per-value oracle of the text."""

from __future__ import annotations

import datetime as dt
import math
import struct
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import JobRejected
from penstock.storage.hashing import NULL_HASH, hash_columns
from penstock.storage.key_types import check_key_types
from tests.support.examples import examples
from tests.support.kernel_twins.implementations import load, using

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
P = 2**61 - 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def word_hash(word: int) -> int:
    return mix((word + GOLDEN) & MASK)


def bytes_hash(data: bytes) -> int:
    k = 0x9FB21C651E98DF25
    h = 0x51ED270B9F8C5A37 ^ (len(data) * k & MASK)
    for at in range(0, len(data), 8):
        h = ((h ^ int.from_bytes(data[at : at + 8], "little")) * k) & MASK
        h ^= h >> 32
    return mix(h)


def float_hash(value: float) -> int:
    if math.isnan(value):
        return word_hash(0x7FF8000000000000)
    return word_hash(struct.unpack("<Q", struct.pack("<d", value + 0.0))[0])


def decimal_hash(value: Decimal) -> int:
    exact = Fraction(value)
    return word_hash(exact.numerator * pow(exact.denominator, -1, P) % P)


def hashed(values: Any, type_: pa.DataType) -> list[int]:
    array = pa.array(values, type_)
    with using(load(compiled=False)):
        plain = hash_columns([array]).tolist()
    with using(load(compiled=True)):
        assert hash_columns([array]).tolist() == plain
    padded = pa.concat_arrays([array[:1], array])[1:]
    assert hash_columns([padded]).tolist() == plain, "the offset of a slice matters"
    return plain  # type: ignore[no-any-return]


VECTORS: list[tuple[pa.DataType, Any, int]] = [
    (pa.int64(), 0, 0xE220A8397B1DCDAF),
    (pa.int64(), 1, 0x910A2DEC89025CC1),
    (pa.int64(), -1, 0xE4D971771B652C20),
    (pa.int64(), 2**63 - 1, 0x2A67D7552E039EA7),
    (pa.float64(), 1.5, 0xD6DAB18E1392608A),
    (pa.float64(), math.nan, 0xC72971D82E15BB46),
    (pa.bool_(), True, 0x910A2DEC89025CC1),
    (pa.timestamp("ms"), 1_700_000_000_000, 0x095A5379A336C8E0),
    (pa.date32(), 19_000, 0xBAA3ED0934C7919A),
    (pa.decimal128(10, 2), Decimal("12.30"), 0x059008E32351A951),
    (pa.decimal128(10, 2), Decimal("-0.01"), 0x9EA4CD1B39196740),
    (pa.string(), "", 0x2B51A578546E4E8D),
    (pa.string(), "a", 0x6715E09AE03CC1EE),
    (pa.string(), "penstock", 0x7A285A1C9BBAB9E5),
    (pa.string(), "a penstock is a gate", 0xFB89AAFDD7FD2305),
    (pa.binary(), b"\0", 0xCFDD6E2F9E91510C),
    (pa.int64(), None, 0x6E756C6C6B657921),
]


@pytest.mark.parametrize(("type_", "value", "expected"), VECTORS)
def test_published_vectors(type_: pa.DataType, value: Any, expected: int) -> None:
    assert hashed([value], type_) == [expected], hex(hashed([value], type_)[0])


TUPLE_VECTORS = ["0xe639dd6e5c589ae7", "0xa291b4e8cd11889b"]


def test_published_vectors_of_tuples() -> None:
    columns = [pa.array(["ab", "a"]), pa.array([7, None], pa.int32())]
    assert [hex(h) for h in hash_columns(columns).tolist()] == TUPLE_VECTORS


@given(st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))))
def test_integers_follow_the_text(values: list[int | None]) -> None:
    expected = [NULL_HASH if v is None else word_hash(v & MASK) for v in values]
    assert hashed(values, pa.int64()) == expected


@pytest.mark.parametrize(
    "type_",
    [
        pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(),
        pa.uint64(), pa.dictionary(pa.int8(), pa.int64()), pa.run_end_encoded(pa.int32(), pa.int64()),
    ],
)  # fmt: skip
def test_equal_integers_of_every_width_agree(type_: pa.DataType) -> None:
    values = [0, 1, 100, 127]
    array = pa.array(values)
    if pa.types.is_dictionary(type_):
        array = array.dictionary_encode()
    elif pa.types.is_run_end_encoded(type_):
        array = pa.compute.run_end_encode(array)
    else:
        array = array.cast(type_)
    assert hash_columns([array]).tolist() == [word_hash(v) for v in values]


def test_large_unsigned_integers_are_their_bits() -> None:
    assert hashed([2**64 - 1, 2**63], pa.uint64()) == hashed([-1, -(2**63)], pa.int64())


@given(st.lists(st.floats(width=32)))
def test_floats_follow_the_text_in_every_width(values: list[float]) -> None:
    expected = [float_hash(v) for v in values]
    assert hashed(values, pa.float64()) == expected
    assert hashed(values, pa.float32()) == expected


def test_zeros_and_nans_are_one_value_each() -> None:
    quiet, other = np.array([0x7FF8000000000001, 0xFFF0000000000001], np.uint64).view(np.float64)
    nans = np.array([math.nan, -math.nan, quiet, other])
    assert len(set(hashed(nans, pa.float64()))) == 1
    with np.errstate(invalid="ignore"):
        narrow = nans.astype(np.float32)
    assert len(set(hashed(narrow, pa.float32()) + hashed(nans, pa.float64()))) == 1
    assert len(set(hashed([0.0, -0.0], pa.float16()))) == 1
    assert hashed([1.0], pa.float64()) != hashed([1], pa.int64())


@given(st.integers(-(10**9), 10**9))
def test_one_instant_agrees_in_every_unit(seconds: int) -> None:
    expected = [word_hash(seconds * 10**9 & MASK)]
    for factor, unit in ((1, "s"), (10**3, "ms"), (10**6, "us"), (10**9, "ns")):
        assert hashed([seconds * factor], pa.timestamp(unit)) == expected
        assert hashed([seconds * factor], pa.timestamp(unit, "Europe/Paris")) == expected
        assert hashed([seconds * factor], pa.duration(unit)) == expected


def test_dates_and_times_agree_across_types() -> None:
    day, midnight = dt.date(2024, 2, 29), dt.datetime(2024, 2, 29)  # noqa: DTZ001
    assert hashed([day], pa.date32()) == hashed([day], pa.date64())
    assert hashed([day], pa.date32()) == hashed([midnight], pa.timestamp("us"))
    time = dt.time(13, 5, 7)
    assert (
        len({hashed([time], t)[0] for t in (pa.time32("s"), pa.time32("ms"), pa.time64("ns"))}) == 1
    )


@given(st.lists(st.decimals(-(10**12), 10**12, places=3)))
def test_decimals_follow_the_text_across_scales_and_widths(values: list[Decimal]) -> None:
    expected = [decimal_hash(v) for v in values]
    for type_ in (pa.decimal128(20, 3), pa.decimal128(38, 12), pa.decimal256(76, 5)):
        assert hashed(values, type_) == expected
    if hasattr(pa, "decimal64"):
        assert hashed(values, pa.decimal64(18, 3)) == expected


def test_extreme_decimals_follow_the_text() -> None:
    for digits, type_ in ((38, pa.decimal128(38, 0)), (76, pa.decimal256(76, 0))):
        values = [Decimal(10**digits - 1), Decimal(1 - 10**digits), Decimal(-1), Decimal(0)]
        exact = [word_hash(int(Fraction(v)) % P) for v in values]
        assert hashed(values, type_) == exact
    assert hashed([Decimal("1.2E+3")], pa.decimal128(5, -2)) == hashed(
        [Decimal(1200)], pa.decimal128(9, 0)
    )


@examples(50)
@given(st.lists(st.one_of(st.none(), st.text(max_size=30))))
def test_strings_follow_the_text_in_every_layout(values: list[str | None]) -> None:
    encoded = [None if v is None else v.encode() for v in values]
    expected = [NULL_HASH if v is None else bytes_hash(v) for v in encoded]
    for type_ in (pa.string(), pa.large_string(), pa.string_view()):
        assert hash_columns([pa.array(values, type_)]).tolist() == expected
    for type_ in (pa.binary(), pa.large_binary(), pa.binary_view()):
        assert hash_columns([pa.array(encoded, type_)]).tolist() == expected
    for kernels in (load(compiled=True), load(compiled=False)):
        with using(kernels):
            assert hash_columns([pa.array(values, pa.string())]).tolist() == expected
            dictionary = pa.array(values, pa.string()).dictionary_encode()
            assert hash_columns([dictionary]).tolist() == expected


def test_fixed_size_binary_agrees_with_binary() -> None:
    values = [b"abc", b"\0\0\0", None]
    assert hashed(values, pa.binary(3)) == hashed(values, pa.binary())


def test_nulls_hide_what_lies_beneath() -> None:
    mask = np.array([True, True, False])
    numbers = pa.array([5, 9, 5], mask=mask)
    texts = pa.Array.from_buffers(
        pa.string(), 2, [pa.py_buffer(b"\0"), *pa.array(["aa", "b"]).buffers()[1:]]
    )
    assert hash_columns([numbers]).tolist() == [NULL_HASH, NULL_HASH, word_hash(5)]
    assert hash_columns([texts]).tolist() == [NULL_HASH] * 2
    assert hash_columns([pa.nulls(2)]).tolist() == [NULL_HASH] * 2


def test_tuples_combine_in_order() -> None:
    left, right = pa.array([1, 2]), pa.array([2, 1])
    h = [word_hash(1), word_hash(2)]
    expected = [mix((h[0] * GOLDEN + h[1]) & MASK), mix((h[1] * GOLDEN + h[0]) & MASK)]
    assert hash_columns([left, right]).tolist() == expected
    assert len(set(expected)) == 2


@pytest.mark.parametrize(
    "type_", [pa.list_(pa.int64()), pa.struct([("a", pa.int64())]), pa.map_(pa.string(), pa.int8())]
)
def test_nested_types_cannot_be_keys(type_: pa.DataType) -> None:
    with pytest.raises(JobRejected, match="cannot be a key"):
        hash_columns([pa.nulls(1, type_)])
    with pytest.raises(JobRejected, match=r"column 'k'.*cannot be a key"):
        check_key_types(pa.schema([("k", type_)]), ["k"])


def test_hashes_spread_over_low_and_high_bits() -> None:
    hashes = hash_columns([pa.array(np.arange(100_000) * 1024)])
    for bits in (hashes & np.uint64(127), hashes >> np.uint64(57)):
        counts = np.bincount(bits.astype(np.int64), minlength=128)
        assert counts.min() > 650
        assert counts.max() < 920
