"""Aim: the values of groups are found in the order in which they came. Method: the compiled loops and their twins
against lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kernel_twins.implementations import load


@given(
    batches=st.lists(st.lists(st.integers(0, 5), max_size=30), max_size=5),
    asked=st.lists(st.integers(0, 6), unique=True),
    room=st.integers(1, 20),
)
def test_chains_are_lists_by_group(batches: list[list[int]], asked: list[int], room: int) -> None:
    expected: dict[int, list[int]] = {}
    for position, group in enumerate(group for batch in batches for group in batch):
        expected.setdefault(group, []).append(position)
    for compiled in (True, False):
        kernels = load(compiled=compiled)
        end, count = np.zeros(7, np.int64), np.zeros(7, np.int64)
        entries, used = np.full((room, 2), -7, np.int64), np.zeros(1, np.int64)
        first = 0
        for batch in batches:
            groups = np.array(batch, np.int64)
            sequence, row = 100 + first + np.arange(len(batch)), 0
            while True:
                row = kernels.extend_chains(groups, sequence, row, first, end, count, entries, used)
                if row == len(batch):
                    break
                entries = np.concatenate([entries, np.full((room, 2), -7, np.int64)])
            first += len(batch)
        chosen = np.array(asked, np.int64)
        bounds = np.concatenate([[0], np.cumsum(count[chosen])]).astype(np.int64)
        positions, order = np.empty(bounds[-1], np.int64), np.empty(bounds[-1], np.int64)
        kernels.read_chains(end[chosen], bounds, entries, positions, order)
        assert positions.tolist() == [at for one in asked for at in expected.get(one, [])]
        assert order.tolist() == (positions + 100).tolist()
