"""Store, JobManager and a user's job go through bad times together, on simulated time.

Aim: whatever the store does (fails, hangs, lies about outcomes, comes back) while daemons die and are stopped, the job
ends, each row is visible once, and nothing is left in the store. Method: ``tests.support.simulated_chain``;
``make sim-chain`` goes on for 200 minutes.
"""

from tests.support.examples import RUNS_ALL
from tests.support.simulated_chain import simulate_minutes

SEEDS = (1, 2) if RUNS_ALL else (2,)


def test_jobs_outlive_a_bad_store() -> None:
    clusters = [simulate_minutes(seed, 1.5) for seed in SEEDS]
    assert all(cluster.audited.failures for cluster in clusters)
    assert sum(cluster.audited.hangs for cluster in clusters)
