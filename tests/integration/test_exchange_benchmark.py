"""The benchmark of the exchange, small: every way it goes, with a slot that never rests, and what it tells."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import Deadline

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("way", [["--tcp"], ["--tls"], ["--tls", "--busy"]])
def test_an_exchange_is_measured(way: list[str]) -> None:
    # So many batches that a gateway's CPU time, which is counted in hundredths of a second, is not zero.
    command = [
        *(sys.executable, "-m", "benchmarks.exchange", *way),
        *("--batches", "300", "--pings", "3"),
    ]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=Deadline("the benchmark", 60).left(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["transport"], told["busy"]) == (way[0].strip("-"), "--busy" in way)
    assert told["gigabytes_per_s"] > 0
    gateways = [name for name in told if "gateway" in name]
    assert len(gateways) == (2 if "--tls" in way else 0)
    assert all(told[name] > 0 for name in gateways)
