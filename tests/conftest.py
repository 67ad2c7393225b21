"""What holds for all tests: nothing is written into the home of whoever runs them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says what else runs on the machine.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of modules that are ``sampled(n)`` every n-th test runs, unless PENSTOCK_TESTS=all (``make test-all``)."""
    if os.environ.get("PENSTOCK_TESTS") == "all":
        return
    seen: Counter[Path] = Counter()
    kept, left = [], []
    for item in items:
        sampled = item.get_closest_marker("sampled")
        number = seen[item.path]
        seen[item.path] += 1
        (left if sampled is not None and number % sampled.args[0] else kept).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    """Announces the clusters of this run where only this run looks for them.

    Kernels are compiled once for all daemons of all runs: by default each directory of a TaskManager has its own.
    """
    kernels = config.rootpath / ".pytest_cache" / "kernels"
    os.environ.setdefault("NUMBA_CACHE_DIR", str(kernels))
    state = tempfile.mkdtemp(prefix="penstock-tests-state-")
    os.environ["XDG_STATE_HOME"] = state
    config.add_cleanup(partial(shutil.rmtree, state, ignore_errors=True))
