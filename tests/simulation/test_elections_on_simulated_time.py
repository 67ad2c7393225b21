"""Aim: whatever becomes of sessions, nodes, processes and calls, no two leaders act, and in the end one leads.

Method: ``tests.support.simulated_election``; each seed is a run of some hundred steps with faults in between.
"""

from collections import Counter

import pytest

from penstock.errors import StoreNotFound
from penstock.storage.memory_store import MemoryStore
from tests.support.simulated_election import elected

SEEDS, _SEEDS_PER_TEST = range(600), 150


@pytest.mark.parametrize("first", SEEDS[::_SEEDS_PER_TEST])
def test_no_two_leaders_act_and_one_leads_in_the_end(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + _SEEDS_PER_TEST):
        counts += elected(seed).counts
    assert counts["led"] > 5 * _SEEDS_PER_TEST
    for kind in ("killed", "expired", "removed", "emptied", "failed", "lost", "deposed"):
        assert counts[kind] > _SEEDS_PER_TEST / 4, counts


def test_swaps_that_are_made_long_after_they_were_given_up_on_put_no_two_leaders_side_by_side() -> (
    None
):
    counts: Counter[str] = Counter()
    for seed in range(700, 700 + _SEEDS_PER_TEST):
        counts += elected(seed, late_swaps=0.2).counts
    assert counts["unanswered"] > counts["late"] > _SEEDS_PER_TEST, counts


def test_a_seed_is_a_run() -> None:
    assert elected(3).counts == elected(3).counts
    assert elected(3).used == elected(3).used


def test_a_storage_that_swaps_whatever_is_there_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    swap = MemoryStore.compare_and_swap

    def blind(self: MemoryStore, path: str, _expected: bytes | None, new: bytes) -> bool:
        try:
            return swap(self, path, self.get(path), new)
        except StoreNotFound:
            return swap(self, path, None, new)

    monkeypatch.setattr(MemoryStore, "compare_and_swap", blind)
    with pytest.raises(AssertionError, match=r"seed \d+: "):
        all(map(elected, range(20)))
