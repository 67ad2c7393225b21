"""Aim: the examples that make their own input run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.spark.conftest import IN_ALL

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_flight_routes_says_the_same_in_every_run() -> None:
    command = [sys.executable, str(EXAMPLES / "flight_routes.py")]
    said = {
        subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        for _ in range(2)
    }
    assert len(said) == 1
    assert "343 on routes that the table does not have" in said.pop()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["penstock", pytest.param("spark", marks=IN_ALL)])
def test_history_and_live_in_one_job_say_what_is_said_when_all_is_streamed(
    engine: str, tmp_path: Path
) -> None:
    command = [sys.executable, str(EXAMPLES / "history_then_live.py"), "--dir", str(tmp_path)]
    options = ["--days", "6", "--bids", "200", "--engine", engine]
    ran = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=280, check=True
    )
    assert "live begins behind 6 files" in ran.stdout
    assert "1800 bids: the same as when all is streamed" in ran.stdout


@pytest.mark.timeout(240)
@pytest.mark.parametrize("engine", ["arrow", pytest.param("spark", marks=IN_ALL)])
def test_a_backfilled_job_says_what_one_that_streams_everything_says(
    engine: str, tmp_path: Path
) -> None:
    command = [sys.executable, str(EXAMPLES / "backfill_then_live.py"), "--dir", str(tmp_path)]
    options = ["--days", "6", "--bids", "200", "--engine", engine]
    ran = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=200, check=True
    )
    assert "6 files of history are in" in ran.stdout
    assert "1800 bids: the same as when all is streamed" in ran.stdout
