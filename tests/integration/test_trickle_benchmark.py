"""The benchmark of a trickle, small: every row comes out, and what its slots take is told per slot."""

from __future__ import annotations

import pytest

from benchmarks import trickle
from benchmarks.measure import JobSettings

pytestmark = pytest.mark.integration


def test_a_trickle_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trickle, "_WARM_S", 0.2)
    monkeypatch.setattr(trickle, "_MEASURED_S", 1.0)
    [result] = trickle.run_trickle(JobSettings(2, "hashmap", "1s"), 500, 1)
    assert result["rows"] > 400
    assert len(result["cores_per_slot"]) == 2
    assert all(0 < share < 1 for share in result["cores_per_slot"])
    assert 0 < result["p50_ms"] <= result["p99_ms"]
