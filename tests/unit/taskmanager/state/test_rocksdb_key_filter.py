"""The filter of stored keys against a set: it may say yes too often, and never no where it must not.

Method: random batches of several partitions, with limits that are reached and that are not.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskmanager.state.rocksdb.key_filter import NO_ERA, KeyFilter

BATCHES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 50_000), st.integers(1, 9000)), max_size=12
)


@settings(max_examples=40, deadline=None)
@given(BATCHES, st.sampled_from([0, 40_000, 200_000, 1 << 22]))
def test_what_was_noted_is_there(batches: list[tuple[int, int, int]], bytes_max: int) -> None:
    known = KeyFilter(lambda: bytes_max)
    era = known.era
    for partition, start, count in batches:
        known.add(partition, np.arange(start, start + count, dtype=np.uint64), era)
        assert known.memory_bytes() <= bytes_max
    for partition, start, count in batches:
        hashes = np.arange(start, start + count, dtype=np.uint64)
        assert known.may_have(partition, hashes, era).all()
        assert known.may_have(partition, hashes, NO_ERA).all()


@pytest.mark.parametrize("limit", [1 << 16, 1 << 18, 1 << 20, 3 << 20])
def test_a_full_filter_is_seldom_wrong(limit: int) -> None:
    """As many keys as it takes, their hashes those of one subtask: some low bits are always the same."""
    known = KeyFilter(lambda: limit)
    generator = np.random.default_rng(1)
    noted = 0
    while known.era == 0:
        hashes = generator.integers(0, 1 << 63, 5000).astype(np.uint64) & np.uint64(~7 & 2**64 - 1)
        before = [level.copy() for level in known._levels]
        known.add(1, hashes, 0)
        noted += len(hashes)
    assert noted * 2 >= limit * 0.75
    known.era, known._levels = 0, before
    others = generator.integers(0, 1 << 63, 100_000).astype(np.uint64)
    assert known.may_have(1, others, 0).mean() < 0.04
    assert known.may_have(2, hashes, 0).mean() < 0.04
