"""Jobs whose exchanges keep their rows, with failures that come close together, on simulated time.

Aim: a failure restarts what an independent model says, and nothing else is touched; what becomes visible is what a
run without failures shows, exactly once; the job ends; afterwards no TaskManager holds anything of it. Method:
the real machines, exchange, exchange cache, spill files and partition servers in ``SimulatedCluster``
(``tests.support.simulated_kept_jobs`` has the jobs). ``make sim SEED=n COUNT=1 JOB=name`` repeats a seed.
"""

import pytest

from jobmanager.dispatcher.job_state import JobState
from tests.support.simulated_kept_jobs import KEPT_JOBS
from tests.support.simulated_run import simulate

SEEDS_PER_JOB = 4


@pytest.mark.parametrize("job", [job.__name__ for job in KEPT_JOBS])
def test_whatever_fails_the_visible_output_is_that_of_a_run_without_failures(job):
    for seed in range(SEEDS_PER_JOB):
        simulate(seed, job=job)


def test_the_seeds_cover_what_they_are_for():
    clusters = [simulate(seed, job="caching") for seed in range(100, 112)]
    clusters += [simulate(seed, job="caching_memory") for seed in range(100, 112)]
    assert sum(cluster.failovers.spared for cluster in clusters) >= 6
    assert sum(cluster.failovers.backtracked for cluster in clusters) >= 2
    assert sum(cluster.states[-1] is JobState.FINISHED for cluster in clusters) >= 18


def test_a_jobmanager_has_nothing_done_again_that_is_still_there():
    """Half of a blocking partition is in the state, and its producer would not send the same again."""
    clusters = [simulate(seed, job="blocking_stages") for seed in (28, 93, 110, 151)]
    assert all(cluster.jobmanager_deaths for cluster in clusters)
    assert all(cluster.adopted for cluster in clusters)
    assert {cluster.state for cluster in clusters} == {JobState.FINISHED}


def test_windows_that_are_pre_aggregated_come_again_as_they_were():
    clusters = [simulate(seed, job="pre_aggregated") for seed in range(100, 124)]
    assert sum(cluster.failovers.spared for cluster in clusters) >= 6
    stories = "\n".join(line for cluster in clusters for line in cluster.story)
    assert "has sent other rows than before" not in stories


@pytest.mark.parametrize("job", ["mixed", "caching_memory"])
def test_a_seed_reproduces_itself(job):
    first, second = simulate(5, job=job), simulate(5, job=job)
    assert first.story == second.story
    assert first.loop.monotonic_ns() == second.loop.monotonic_ns()
