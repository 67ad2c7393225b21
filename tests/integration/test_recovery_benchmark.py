"""The benchmark of recovery, small: it runs, finds everything exact, says who was restarted, and leaves nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from benchmarks.measure import JobSettings
from benchmarks.output_log import NOTE, Notes, first_outputs, largest_pause_ns
from benchmarks.recovery import RecoverySettings, run_recovery
from tests.support.examples import RUNS_ALL
from tests.support.processes import site

ROOT = Path(__file__).parents[2]
WAITS = """
import signal
from benchmarks.measure import bench_cluster
with bench_cluster(1):
    print("its cluster runs", flush=True)
    signal.pause()
"""


@pytest.mark.skipif(not RUNS_ALL, reason="it takes long: make test-all runs it")
def test_a_lost_taskmanager_restarts_its_own_subtasks_where_rows_are_kept() -> None:
    settings = RecoverySettings(
        JobSettings(2, "hashmap", "200ms", "caching"),
        state_keys=2_000,
        rate=20_000,
        warm_s=0.5,
        after_s=2.0,
    )
    [result] = run_recovery(settings, 1)
    assert result["is_exact"]
    assert result["restarted_subtasks"] == result["other_subtasks"] == 1
    assert result["other_subtasks_gap_s"] > 0
    assert result["recovery_s"] > 0


def notes(*times_and_attempts: tuple[int, int]) -> Notes:
    return np.array([(time, attempt, 1) for time, attempt in times_and_attempts], NOTE)


def test_what_notes_tell() -> None:
    steady = notes((0, 0), (10, 0), (20, 0), (30, 0))
    restarted = notes((0, 0), (10, 0), (27, 3), (30, 3))
    gone = notes((0, 0), (10, 0))
    found = first_outputs({0: steady, 1: restarted, 2: gone}, killed_at_ns=12)
    assert found == {1: 27}
    assert largest_pause_ns(steady, 0, 30) == 10
    assert largest_pause_ns(restarted, 5, 30) == 17
    assert largest_pause_ns(gone, 0, 30) == 20


def test_a_benchmark_that_is_terminated_ends_its_cluster(tmp_path: Path) -> None:
    with site(tmp_path) as place:
        benchmark = place.start_python("-c", WAITS, directory=ROOT)
        benchmark.wait_for_line("its cluster runs")
        assert len(place.processes()) > 2
        benchmark.send(signal.SIGTERM)
        assert benchmark.wait().status == 128 + signal.SIGTERM
        place.assert_nothing_left()
