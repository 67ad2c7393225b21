"""Byte strings of any length are compared and copied whole, and no kernel counts references."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numba import njit
from numba.core.errors import NumbaError

from penstock.storage.key_types import ByteArray
from taskmanager.kernels.compiled_words import copy_ranges, equal_bytes
from taskmanager.kernels.jit import BOOL, BYTES_IN, INT64, INT64S, VOID, kernel

_LENGTHS = range(41)


def _equal(left: ByteArray, left_start: int, right: ByteArray, right_start: int, n: int) -> bool:
    return bool(equal_bytes(left, left_start, right, right_start, n))


@pytest.fixture(scope="module")
def equal() -> Callable[..., bool]:
    """Compiled; not kept, since it inlines another file's."""
    return njit(BOOL(BYTES_IN, INT64, BYTES_IN, INT64, INT64), _nrt=False)(_equal)


def _bytes(length: int) -> ByteArray:
    return np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)


@pytest.mark.parametrize("length", _LENGTHS)
def test_strings_that_differ_in_one_byte_are_not_equal(
    equal: Callable[..., bool], length: int
) -> None:
    around = [_bytes(3), _bytes(5)]  # what lies beside them does not count
    value = _bytes(length)
    left = np.concatenate([around[0], value, around[1]])
    assert equal(left, 3, np.concatenate([value, around[0]]), 0, length)
    for place in range(length):
        other = value.copy()
        other[place] ^= 1
        assert not equal(left, 3, other, 0, length)


def test_strings_are_copied_and_nothing_beside_them() -> None:
    values = [_bytes(length) for length in _LENGTHS]
    lengths = np.array(list(_LENGTHS))
    starts = np.cumsum(lengths) - lengths
    target = np.full(int(lengths.sum()) + len(lengths), 7, np.uint8)
    places = starts + np.arange(len(lengths))  # a byte between any two
    copy_ranges(np.concatenate(values), starts, target, places, lengths)
    for value, place in zip(values, places.tolist(), strict=True):
        assert target[place : place + len(value)].tolist() == value.tolist()
        assert target[place + len(value)] == 7


def test_what_allocates_is_no_kernel() -> None:
    def doubled(values: np.ndarray) -> None:
        values[:] = values.copy() * 2

    with pytest.raises(NumbaError, match="NRT required"):
        kernel(VOID(INT64S))(doubled)
