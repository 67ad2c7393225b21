"""Store, JobManager and a user's job go through bad times together, on simulated time.

Aim: whatever the store does (fails, hangs, lies about outcomes, comes back) while daemons die and are stopped, the job
ends, each row is visible once, and nothing is left in the store. Method: ``tests.support.simulated_chain``;
``make sim-chain`` goes on for 200 minutes.
"""

import pytest

from tests.support.simulated_chain import simulate_minutes


@pytest.mark.parametrize("seed", [1, 2])
def test_a_job_outlives_a_bad_store(seed: int) -> None:
    cluster = simulate_minutes(seed, 1.5)
    assert cluster.audited.failures
    assert cluster.audited.hangs
