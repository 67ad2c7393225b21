"""Aim: every key has exactly one owner. Method: the range algebra against per-key arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import JobRejected
from penstock.storage.key_groups import (
    check_parallelism,
    default_max_parallelism,
    key_group_of,
    key_group_range,
    owner,
    owners,
)

max_parallelisms = st.one_of(st.integers(1, 32768), st.sampled_from([1, 128, 4096, 32768]))


@st.composite
def topologies(draw: st.DrawFn) -> tuple[int, int]:
    max_parallelism = draw(max_parallelisms)
    return draw(st.integers(1, max_parallelism)), max_parallelism


@pytest.mark.parametrize(
    ("parallelism", "expected"),
    [(1, 128), (85, 128), (86, 256), (128, 256), (1000, 2048), (21845, 32768), (32768, 32768)],
)
def test_default_max_parallelism(parallelism: int, expected: int) -> None:
    assert default_max_parallelism(parallelism) == expected


@given(topologies())
def test_ranges_cover_all_key_groups_in_order(topology: tuple[int, int]) -> None:
    parallelism, max_parallelism = topology
    following = 0
    for index in range(min(parallelism, 300)):
        groups = key_group_range(index, parallelism, max_parallelism)
        assert groups.start == following
        assert len(groups) >= 1
        assert owner(groups[0], *topology) == owner(groups[-1], *topology) == index
        following = groups.stop
    assert key_group_range(parallelism - 1, *topology).stop == max_parallelism


@given(topologies(), st.lists(st.integers(0, 2**64 - 1)))
def test_owners_agree_with_the_definition(topology: tuple[int, int], values: list[int]) -> None:
    parallelism, max_parallelism = topology
    hashes = np.array(values, dtype=np.uint64)
    groups = [value % max_parallelism for value in values]
    assert key_group_of(hashes, max_parallelism).tolist() == groups
    found = owners(hashes, parallelism, max_parallelism)
    assert found.dtype == np.uint16
    assert found.tolist() == [group * parallelism // max_parallelism for group in groups]
    for group, index in zip(groups, found.tolist(), strict=True):
        assert group in key_group_range(index, parallelism, max_parallelism)


@pytest.mark.parametrize(("p", "m"), [(0, 128), (129, 128), (1, 0), (1, 32769), (-1, 128)])
def test_impossible_topologies_are_refused(p: int, m: int) -> None:
    with pytest.raises(JobRejected, match="must be between"):
        check_parallelism(p, m)


def test_arguments_outside_the_range_are_refused() -> None:
    with pytest.raises(ValueError, match="key-group 128"):
        owner(128, 2, 128)
    with pytest.raises(ValueError, match="subtask 2"):
        key_group_range(2, 2, 128)
    with pytest.raises(JobRejected):
        default_max_parallelism(0)
