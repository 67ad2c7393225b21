"""What holds for all tests: nothing is written into the home of whoever runs them."""

from __future__ import annotations

import os
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Announces the clusters of this run where only this run looks for them."""
    state = tempfile.TemporaryDirectory(prefix="penstock-tests-state-")
    os.environ["XDG_STATE_HOME"] = state.name
    config.add_cleanup(state.cleanup)
