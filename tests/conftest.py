"""What holds for all tests: nothing is written into the home of whoever runs them."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from common.lasting_imports import lasting_imports
from tests.support.examples import DEFAULT, RUNS_ALL, number_of

# How long an example takes says what else runs on the machine.
settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=number_of(DEFAULT),
)
settings.load_profile("any machine")

_TOGETHER = (
    "tests/chaos/",
    "tests/integration/failures/",
    "tests/integration/high_availability/",
    "tests/integration/s3/",
    "tests/integration/spark/session/",
)
"""Folders whose tests share something that costs to start and to keep: a cluster, the S3 server, a JVM with Spark."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected lives as long as the process: looking for garbage meanwhile takes nearly half of the time."""
    with lasting_imports():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of modules that are ``sampled(n)`` every n-th test runs, unless PENSTOCK_TESTS=all (``make test-all``).

    Raises:
        pytest.UsageError: a test is called otherwise in each process, so that workers cannot share it.
    """
    if unlike := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(
            f"the id of {unlike[0]} has an address in it: give ids to its parameters"
        )
    if RUNS_ALL:
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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files run each in one worker, those of some folders all in the same."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            folder = next((one for one in _TOGETHER if nodeid.startswith(one)), None)
            return folder or super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_configure(config: pytest.Config) -> None:
    """Announces the clusters of this run where only this run looks for them.

    Hundreds of processes are started: Python code is compiled once for all of them, whatever the environment says of
    that, and so are kernels, of which each directory of a TaskManager has its own by default.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.environ.setdefault("NUMBA_CACHE_DIR", str(config.rootpath / ".pytest_cache" / "kernels"))
    state = tempfile.mkdtemp(prefix="penstock-tests-state-")
    os.environ["XDG_STATE_HOME"] = state
    config.add_cleanup(partial(shutil.rmtree, state, ignore_errors=True))
