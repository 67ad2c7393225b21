"""Aim: the examples that make their own input run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
