"""Aim: chains stay short, and what is written stays in proportion to what changed.

Method: a table of which only the number of keys matters, snapshotted many times; the oracle counts.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from taskmanager.state.hashmap.chains import (
    LENGTH_MAX,
    WHOLE,
    Chain,
    Export,
    Segment,
    base_length,
    extended,
    next_export,
    sparse_file,
)


def segment(since: int, version: int, rows: int, tier: int = 0, file: str = "f") -> Segment:
    return Segment(file, 0, rows, rows, since, version, tier)


def run(base: int, changed: int, snapshots: int, key_count: int) -> tuple[list[Chain], int]:
    """Chains after each snapshot, and rows written after the first; changed keys are all different."""
    chain: Chain = (segment(0, 1, base),)
    chains, written = [], 0
    for version in range(2, snapshots + 2):
        export = next_export(chain)
        rows = min(key_count, changed * (version - export.since_version))
        if export == WHOLE:
            rows = key_count
        chain = extended(chain, segment(export.since_version, version, rows, export.tier))
        chains.append(chain)
        written += rows
    return chains, written


@pytest.mark.parametrize("changed", [1, 10, 100, 700, 1000])
def test_chains_are_short_contiguous_and_cheap(changed: int) -> None:
    chains, written = run(1000, changed, 400, 1000)
    for chain in chains:
        assert 1 <= len(chain) <= LENGTH_MAX
        assert chain[0].from_version == 0
        for one, following in pairwise(chain):
            assert one.to_version == following.from_version
    # Four times what has changed, and the highest tier (at most as much as the base) every 27th time.
    assert written <= 400 * (5 * changed + 1000 / 27)
    versions = [chain[-1].to_version for chain in chains]
    assert versions == list(range(2, 402))


def test_three_segments_become_one() -> None:
    base = segment(0, 1, 1000)
    assert next_export(()) == WHOLE
    assert next_export((base,)) == Export(1, 0)
    assert next_export((base, segment(1, 2, 1))) == Export(2, 0)
    two = (base, segment(1, 2, 1), segment(2, 3, 1))
    assert next_export(two) == Export(1, 1)
    merged = extended(two, segment(1, 4, 3, 1))
    assert [(one.from_version, one.to_version) for one in merged] == [(0, 1), (1, 4)]


def test_changes_that_outnumber_the_base_make_a_new_one() -> None:
    assert next_export((segment(0, 1, 10), segment(1, 2, 11))) == WHOLE
    assert next_export((segment(0, 1, 10), segment(1, 2, 10))) == Export(2, 0)


def test_a_restored_base_may_be_several_segments() -> None:
    restored = (segment(0, 1, 100), segment(0, 1, 2), segment(0, 1, 2))
    assert base_length(restored) == 3
    assert next_export(restored) == Export(1, 0)
    chain: Chain = restored
    for version in range(2, 40):
        export = next_export(chain)
        chain = extended(chain, segment(export.since_version, version, 1, export.tier))
        assert len(chain) <= LENGTH_MAX
    full = tuple(segment(0, 1, 100 if i == 0 else 1) for i in range(LENGTH_MAX))
    assert next_export(full) == WHOLE


def test_segments_of_sparse_files_are_written_again() -> None:
    chain = (
        segment(0, 1, 100, file="a"),
        segment(1, 2, 10, tier=1, file="b"),
        segment(2, 3, 10, file="c"),
    )
    assert sparse_file({"a": 100, "b": 15, "c": 10}, [chain]) is None
    assert sparse_file({"a": 150, "b": 30, "c": 25}, [chain]) == "b"
    assert next_export(chain, {"b"}).since_version == 1
    assert next_export(chain, {"c"}).since_version == 2
    assert next_export(chain, {"a"}) == WHOLE
