"""The benchmark of latency, small: rows count from when they were due, and a killed slot's do not count."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

from benchmarks import latency
from benchmarks.latency import LatencySettings, bucket_of, quantiles_ms, run_latency
from benchmarks.measure import JobSettings
from tests.support.examples import RUNS_ALL

pytestmark = pytest.mark.integration


def test_quantiles_are_those_of_the_sorted_values() -> None:
    values = np.random.default_rng(1).exponential(5e6, 100_000).astype(np.int64) + 1_000
    told = quantiles_ms(np.bincount(bucket_of(values)))
    for name, share in latency.QUANTILES.items():
        exact = np.quantile(values, share) / 1e6
        assert exact * 0.97 <= told[name] <= exact * 1.03
    assert doctest.testmod(latency).failed == 0


@pytest.mark.skipif(not RUNS_ALL, reason="it takes long: make test-all runs it")
@pytest.mark.parametrize("kill", [False, True])
def test_latency_is_measured(kill: bool) -> None:
    settings = LatencySettings(JobSettings(2, "hashmap", "200ms"), 5_000, 97, 3, 4, kill=kill)
    [result] = run_latency(settings, 1)
    assert result["restarts"] == int(kill)
    assert result["rows"] >= 3 * 5_000 * (0.5 if kill else 1) * 0.9
    assert 0 < result["p50_ms"] <= result["p99_99_ms"] <= result["max_ms"]
