"""Aim and method: see tests/integration/high_availability/test_many_jobs.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.many_jobs import assert_jobs_leave_nothing

pytestmark = [pytest.mark.large, pytest.mark.slow, pytest.mark.timeout(7200)]


def test_a_thousand_jobs_leave_nothing(tmp_path: Path) -> None:
    assert_jobs_leave_nothing(tmp_path, first=200, then=1000)
