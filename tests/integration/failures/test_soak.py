"""Aim: whatever fails around a job on the whole topology, its output is exact, and every daemon ends; ``make soak`` for seconds."""

from pathlib import Path

import pytest

from tests.support.simulated_store import CALM
from tests.support.soak import PAUSE_S, TARGETS, drawn_faults, go_through

pytestmark = pytest.mark.integration
SEED, SECONDS = 1, 5


def test_a_few_seconds_of_faults_of_all_kinds_leave_the_output_exact(tmp_path: Path) -> None:
    met = go_through(tmp_path, SEED, SECONDS)
    assert met["leader"], "the seed kills a leader"
    assert sum(met.values()) >= 2


def test_a_long_run_draws_faults_of_every_kind_and_a_seed_draws_them_again() -> None:
    faults = drawn_faults(7, 20 * 60)
    assert drawn_faults(7, 20 * 60) == faults != drawn_faults(8, 20 * 60)
    assert {fault.target for fault in faults} == set(TARGETS)
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
    assert len(faults) > 400
    for fault in faults:
        assert (fault.weather != CALM) == (fault.target == "store")
        assert 0 <= fault.seconds <= PAUSE_S[1]
    kills = [fault for fault in faults if not fault.is_pause and fault.target != "store"]
    assert len(kills) > 150
