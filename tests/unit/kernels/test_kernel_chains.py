"""Aim: the values of groups are found in the order in which they came. Method: the compiled loops and their twins
against lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kernel_twins.implementations import load


@given(
    batches=st.lists(st.lists(st.integers(0, 5), max_size=12), max_size=5),
    asked=st.lists(st.integers(0, 6), unique=True),
)
def test_chains_are_lists_by_group(batches: list[list[int]], asked: list[int]) -> None:
    total = sum(map(len, batches))
    expected: dict[int, list[int]] = {}
    for position, group in enumerate(group for batch in batches for group in batch):
        expected.setdefault(group, []).append(position)
    for compiled in (True, False):
        kernels = load(compiled=compiled)
        last, count = np.full(7, -1, np.int64), np.zeros(7, np.int64)
        previous = np.full(total, -7, np.int64)
        first = 0
        for batch in batches:
            kernels.link_values(np.array(batch, np.int64), first, last, count, previous)
            first += len(batch)
        groups = np.array(asked, np.int64)
        bounds = np.concatenate([[0], np.cumsum(count[groups])]).astype(np.int64)
        positions = np.empty(bounds[-1], np.int64)
        kernels.linked_values(last[groups], bounds, previous, positions)
        assert positions.tolist() == [at for one in asked for at in expected.get(one, [])]
