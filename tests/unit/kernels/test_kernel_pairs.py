"""Aim: a set of pairs says of each pair whether it was there, and keeps the order. Method: the compiled loops and
their twins against a dict; pairs that differ in one word, signs and extremes among them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from taskmanager.kernels.pair_set import PairSet
from tests.support.kernel_twins.implementations import load

WORD = st.one_of(st.integers(-2, 3), st.sampled_from([-(2**63), 2**63 - 1, 2**40, 2**62]))


@given(batches=st.lists(st.lists(st.tuples(WORD, WORD), max_size=40), max_size=6))
def test_pairs_are_a_dict(batches: list[list[tuple[int, int]]]) -> None:
    for compiled in (True, False):
        pairs = PairSet()
        pairs._kernels = load(compiled=compiled)
        expected: dict[tuple[int, int], None] = {}
        for batch in batches:
            held = len(expected)
            before = [column.copy() for column in pairs.columns()]
            seen = pairs.columns()
            words = np.array(batch, np.int64).reshape(-1, 2)
            found = pairs.add(words[:, 0], words[:, 1])
            for pair, is_new in zip(batch, found.tolist(), strict=True):
                assert is_new == (pair not in expected)
                expected[pair] = None
            assert len(before[0]) == held
            assert all(np.array_equal(*both) for both in zip(seen, before, strict=True))
        ones, others = pairs.columns()
        assert list(zip(ones.tolist(), others.tolist(), strict=True)) == list(expected)
        assert len(pairs) == len(expected)


def test_many_pairs() -> None:
    random = np.random.default_rng(3)
    ones, others = random.integers(0, 300, 200_000), random.integers(0, 1000, 200_000)
    pairs = PairSet()
    found = np.concatenate(
        [pairs.add(ones[at : at + 999], others[at : at + 999]) for at in range(0, 200_000, 999)]
    )
    _, first = np.unique(ones * 1000 + others, return_index=True)
    assert np.array_equal(np.flatnonzero(found), np.sort(first))
    assert pairs.memory_bytes <= 64 * len(pairs)
