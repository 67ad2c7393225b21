"""Aim: what a job claims that never begins is given back, whatever comes late; what a job has that runs is its own.

Method: ``tests.support.simulated_claims``; each seed is some dozens of steps of two JobManagers that depose each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from jobmanager.dispatcher import claimed_start_store
from jobmanager.stores.job_store import JobStore
from jobmanager.stores.record_store import RecordStore
from tests.support.examples import RUNS_ALL
from tests.support.simulated_claims import claimed

SEEDS = range(400 if RUNS_ALL else 15)


def test_claims_are_those_of_jobs_that_run_or_have_ended() -> None:
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        counts += claimed(seed).counts
    for kind in ("accepted", "gone on with", "given back", "SwapUnanswered", "late", "NewerLeader"):
        assert counts[kind] > len(SEEDS) / 2, counts


def test_a_seed_is_a_run() -> None:
    assert claimed(3).counts == claimed(3).counts


def _only_where_there(self: RecordStore, now_ms: int) -> None:
    if self._object.content() is not None:
        _WITHDRAW(self, now_ms)


def _at_once(self: JobStore, job_id: str, **_: object) -> bool:
    return _HAS_CLAIMS(self, job_id, keeps_record=False)


_WITHDRAW, _HAS_CLAIMS = RecordStore.withdraw, JobStore._has_claims
_GIVE_BACK = claimed_start_store.give_back
MUTANTS: list[tuple[Any, str, Callable[..., Any]]] = [
    (RecordStore, "withdraw", _only_where_there),
    (JobStore, "_has_claims", _at_once),
    (
        claimed_start_store,
        "give_back",
        lambda start, check, **_: _GIVE_BACK(start, check, may_come=False),
    ),
    (claimed_start_store, "give_back", lambda start, _, **how: _GIVE_BACK(start, int, **how)),
]


@pytest.mark.skipif(not RUNS_ALL, reason="hundreds of seeds; PENSTOCK_TESTS=all")
@pytest.mark.parametrize("number", range(len(MUTANTS)))
def test_what_gives_back_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    owner, name, mutant = MUTANTS[number]
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(AssertionError, match=r"seed \d+: "):
        all(map(claimed, range(400)))
