"""What holds for all tests: nothing is written into the home of whoever runs them."""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import partial

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says what else runs on the machine.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Announces the clusters of this run where only this run looks for them."""
    state = tempfile.mkdtemp(prefix="penstock-tests-state-")
    os.environ["XDG_STATE_HOME"] = state
    config.add_cleanup(partial(shutil.rmtree, state, ignore_errors=True))
