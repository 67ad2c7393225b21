"""The benchmark of a stage, small: the job leaves what the program alone leaves, and all times are told."""

from __future__ import annotations

import pytest

from benchmarks.spark import run_spark
from tests.integration.spark.conftest import IN_ALL

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    IN_ALL,
]


def test_a_stage_is_measured_beside_the_program_alone() -> None:
    [result] = run_spark(rows=20_000, cores=1, repeat=1)
    assert 15_000 < result["rows_out"] < 20_000
    assert min(result["seconds"], result["spark_alone_s"], result["exchange_seconds"]) > 0
    assert result["ratio"] == pytest.approx(result["seconds"] / result["spark_alone_s"], rel=0.01)
