"""JobManagers that die while jobs run, in one process on simulated time, over many seeds.

Aim: what a JobManager has deployed goes on under its successor, whatever else dies and whenever, and nothing is lost
or doubled: neither splits, nor output that was being committed, nor checkpoints that were under way. Method: as in
``test_checkpoints_on_simulated_time``, with the deaths of JobManagers at moments that each seed draws, in jobs whose
exchanges keep no rows, in those with caching ones and in those with blocking ones; nothing is begun again but by a failure, which
``tests.support.simulated_failovers`` watches.
"""

import dataclasses
import functools
import random

import pytest

from tests.support.examples import half_of
from tests.support.simulated_cluster import SimulatedCluster
from tests.support.simulated_faults import _POINTS, Fault, Faults, Trigger
from tests.support.simulated_jobs import JOBS
from tests.support.simulated_kept_jobs import (
    batch,
    batch_join,
    blocking_and_pipelined,
    blocking_stages,
    caching,
    caching_memory,
    caching_twice,
    caching_windows,
    declared,
    mixed,
    moving_liar,
    pipelines,
    pre_aggregated,
    two_sinks,
)
from tests.support.simulated_run import draw_run, simulate_run

SEEDS, SEEDS_PER_TEST = half_of(range(4010, 4034)), 3
CACHING_SEEDS = half_of(range(4118, 4130))
STAGED_SEEDS = half_of(range(4200, 4218))
CACHING_JOBS = (
    caching,
    caching_memory,
    caching_twice,
    caching_windows,
    declared,
    moving_liar,
    pipelines,
    pre_aggregated,
    two_sinks,
)
STAGED_JOBS = (batch, batch_join, blocking_and_pipelined, blocking_stages, mixed)
_PAUSE_MAX_NS = 20_000_000
_SURE_POINT = ("RUNNING", 3)
"""Every job comes to it, once it has been submitted; to others short runs do not come as often as is drawn."""
_SURE_POINTS_OF_STAGES = (("RUNNING", 1), ("FINISHED", 2))
"""The first stage runs; subtasks of it are done, and others begin."""


def death(draws: random.Random, point: str, often: int) -> Trigger:
    """One JobManager's, once the job has been submitted; none, where a run does not come to the point so often."""
    kind = draws.choice((Fault.JOBMANAGER_DIES, Fault.JOBMANAGER_DIES_IN_STORE))
    return Trigger(kind, point, 1 + draws.randrange(often), draws.randrange(_PAUSE_MAX_NS))


@functools.cache
def taken_over(seed: int) -> SimulatedCluster:
    """A run in which a JobManager dies as tasks begin and others wherever, and in every third little else does."""
    draws = random.Random(f"takeover {seed}")
    jobs = CACHING_JOBS if seed in CACHING_SEEDS else STAGED_JOBS if seed in STAGED_SEEDS else JOBS
    run = draw_run(seed, "hashmap", draws.choice(jobs).__name__)
    points = [draws.choice(_POINTS) for _ in range(draws.choice((1, 1, 2, 3)))]
    sure = _SURE_POINTS_OF_STAGES if seed in STAGED_SEEDS else (_SURE_POINT,)
    deaths = [death(draws, *point) for point in (*sure, *points)]
    others = () if draws.randrange(3) == 0 else run.faults.triggers
    faults = dataclasses.replace(run.faults, triggers=(*others, *deaths))
    return simulate_run(dataclasses.replace(run, faults=faults), seed)


@pytest.mark.parametrize(
    "first", [s for seeds in (SEEDS, CACHING_SEEDS, STAGED_SEEDS) for s in seeds[::SEEDS_PER_TEST]]
)
def test_what_one_jobmanager_has_deployed_goes_on_under_the_next(first):
    for seed in range(first, first + SEEDS_PER_TEST):
        taken_over(seed)


def test_a_job_that_nobody_has_taken_yet_is_submitted_to_the_next_jobmanager():
    faults = Faults(triggers=(Trigger(Fault.JOBMANAGER_DIES, "step", 1, 0),))
    cluster = simulate_run(dataclasses.replace(draw_run(0, "hashmap"), faults=faults), 0)
    assert cluster.jobmanager_deaths == 1


def test_the_seeds_cover_what_they_are_for():
    clusters = [taken_over(seed) for seed in SEEDS]
    assert all(cluster.jobmanager_deaths for cluster in clusters)
    assert sum(cluster.jobmanager_deaths for cluster in clusters) >= len(SEEDS) * 5 // 4
    assert sum(cluster.failovers.takeovers for cluster in clusters) >= len(SEEDS) * 5 // 6
    untouched = [c for c in clusters if c.failovers.takeovers and not c.failovers.restarts]
    assert len(untouched) >= len(SEEDS) * 5 // 12, "where nothing else fails, nothing begins again"


def test_the_seeds_cover_takeovers_of_what_keeps_rows():
    clusters = [taken_over(seed) for seed in CACHING_SEEDS]
    assert sum(cluster.failovers.takeovers for cluster in clusters) >= len(CACHING_SEEDS) * 5 // 6
    untouched = [c for c in clusters if c.failovers.takeovers and not c.failovers.restarts]
    assert len(untouched) >= len(CACHING_SEEDS) // 3
    assert sum(cluster.failovers.spared for cluster in clusters) >= len(CACHING_SEEDS) // 6


def test_the_seeds_cover_takeovers_between_and_in_the_midst_of_stages():
    clusters = [taken_over(seed) for seed in STAGED_SEEDS]
    assert sum(cluster.failovers.takeovers for cluster in clusters) >= len(STAGED_SEEDS) * 5 // 6
    untouched = [c for c in clusters if c.failovers.takeovers and not c.failovers.restarts]
    assert len(untouched) >= len(STAGED_SEEDS) // 3
    late = sum(cluster.failovers.late for cluster in clusters)
    assert late >= len(STAGED_SEEDS) * 5 // 6, "stages that had not begun"
