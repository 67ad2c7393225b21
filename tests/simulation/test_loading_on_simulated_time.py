"""Jobs that read a side first, with failures while they read it and later, on simulated time.

Aim: no function sees a row before the side is whole on its subtask, none sees a row of the side twice, and what becomes
visible is what a run without failures shows, whatever dies. Method: see ``test_kept_exchanges_on_simulated_time``;
``tests.support.simulated_loading_jobs`` has the jobs. Faults are drawn, or strike at a given row of the side.
"""

from __future__ import annotations

import dataclasses

import pytest

from jobmanager.messages.job_state import JobState
from tests.support.simulated_cluster import SimulatedCluster
from tests.support.simulated_faults import Fault, Faults, Trigger
from tests.support.simulated_loading_jobs import LOADING_JOBS, SIDE_ROWS
from tests.support.simulated_run import draw_run, simulate, simulate_run

pytestmark = pytest.mark.sampled(4)

SEEDS_PER_JOB = 3
JOBS = [job.__name__ for job in LOADING_JOBS]
DEATHS = (
    Fault.SLOT_DIES,
    Fault.TASKMANAGER_LOST,
    Fault.JOBMANAGER_DIES,
    Fault.JOBMANAGER_STOPS,
    Fault.TASK_RAISES,
)


@pytest.mark.parametrize("job", JOBS)
def test_whatever_fails_no_row_comes_before_the_side(job: str) -> None:
    for seed in range(SEEDS_PER_JOB):
        simulate(seed, job=job)


def strike(
    seed: int, job: str, fault: Fault, rows: int, strategy: str, backend: str
) -> SimulatedCluster:
    """Something happens when functions have processed so many rows, and again when these have come again."""
    drawn = draw_run(seed, backend, job)
    triggers = tuple(
        Trigger(one, "row", count, 0)
        for one, count in (
            (Fault.CHECKPOINT_REQUESTED, rows - 1),
            (fault, rows),
            (fault, 2 * rows),
        )
    )
    settings = drawn.settings | {
        "jobmanager.execution.failover-strategy": strategy,
        "execution.checkpointing.interval": drawn.job.settings.get(
            "execution.checkpointing.interval", "3ms"
        ),
    }
    run = dataclasses.replace(drawn, faults=Faults(triggers=triggers), settings=settings)
    return simulate_run(run, seed, backend, job)


@pytest.mark.parametrize("fault", DEATHS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("job", JOBS)
def test_a_death_while_it_is_read(job: str, fault: Fault) -> None:
    for seed, strategy, backend in ((1, "region", "hashmap"), (2, "full", "rocksdb")):
        cluster = strike(seed, job, fault, SIDE_ROWS // 3, strategy, backend)
        begun_again = cluster.failovers.restarts + cluster.jobmanager_deaths
        assert begun_again + cluster.jobmanager_stops >= 1, "it was struck"
        assert cluster.state in (JobState.FINISHED, JobState.FAILED)


@pytest.mark.parametrize("strategy", ["region", "full"])
def test_a_side_behind_a_blocking_exchange_that_is_made_again(strategy: str) -> None:
    """What was loaded is restored, though its rows are made once more."""
    restored = 0
    for seed in range(8):
        rows = 2 * SIDE_ROWS + 20  # it has been read, and rows come
        cluster = strike(seed, "loading_made_again", Fault.TASK_RAISES, rows, strategy, "hashmap")
        assert cluster.state is JobState.FINISHED
        restored += cluster.restored_from_checkpoint
    assert restored >= 2
