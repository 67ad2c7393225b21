"""Aim: slices and partitions are what per-row arithmetic says. Method: both implementations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskmanager.kernels import (
    partition_order,
    slice_span,
    slice_start,
    slice_starts,
    split_by_slice,
    time_bounds,
)
from taskmanager.kernels.compiled import Kernels
from tests.support.kernel_twins.implementations import load

both = pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(load(compiled=True), id="compiled"),
        pytest.param(load(compiled=False), id="numpy"),
    ],
)
TIMES = st.one_of(st.integers(-50, 50), st.integers(-(2**61), 2**61))
SIZES = st.one_of(st.integers(1, 20), st.integers(1, 2**40))


@both
@given(values=st.lists(TIMES), size=SIZES, offset=st.integers(-30, 30))
def test_slice_starts_floor(kernels: Kernels, values: list[int], size: int, offset: int) -> None:
    starts = slice_starts(np.array(values, dtype=np.int64), size, offset)
    assert starts.tolist() == [offset + (v - offset) // size * size for v in values]
    assert starts.tolist() == [slice_start(v, size, offset) for v in values]


@both
@given(values=st.lists(TIMES, min_size=1), size=SIZES, offset=st.integers(-30, 30))
def test_split_by_slice(kernels: Kernels, values: list[int], size: int, offset: int) -> None:
    times = np.array(values, dtype=np.int64)
    split = split_by_slice(times, size, offset)
    expected: dict[int, list[int]] = {}
    for row, value in enumerate(values):
        expected.setdefault(slice_start(value, size, offset), []).append(row)
    order = np.arange(len(values)) if split.order is None else split.order
    found = {
        int(start): order[split.bounds[j] : split.bounds[j + 1]].tolist()
        for j, start in enumerate(split.starts)
    }
    assert found == expected
    assert list(found) == sorted(expected)
    assert (split.order is None) == (len(expected) == 1)
    assert slice_span(times, size, offset) == (min(expected), max(expected))
    assert time_bounds(times) == (min(values), max(values))


@both
@given(channels=st.lists(st.integers(0, 9)), extra=st.integers(0, 300))
def test_partition_order_is_stable(kernels: Kernels, channels: list[int], extra: int) -> None:
    owners = np.array(channels, dtype=np.uint16)
    order, bounds = partition_order(owners, 10 + extra)
    assert order.tolist() == sorted(range(len(channels)), key=channels.__getitem__)
    for channel in range(10):
        rows = order[bounds[channel] : bounds[channel + 1]]
        assert rows.tolist() == [row for row, c in enumerate(channels) if c == channel]
    assert bounds[-1] == len(channels)


@both
def test_wrong_arguments_are_refused(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="row 1 goes to channel 5, but there are 3"):
        partition_order(np.array([0, 5]), 3)
    with pytest.raises(ValueError, match="0 channels"):
        partition_order(np.array([0]), 0)
    with pytest.raises(ValueError, match="must be positive"):
        slice_starts(np.array([1]), 0)
    with pytest.raises(ValueError, match="no timestamps"):
        time_bounds(np.empty(0, dtype=np.int64))


def test_many_channels_of_wide_owners() -> None:
    owners = np.random.default_rng(1).integers(0, 65536, 5000)
    order, bounds = partition_order(owners, 65536)
    assert order.tolist() == np.argsort(owners, kind="stable").tolist()
    assert len(bounds) == 65537
