"""Aim: small jobs, however many, leave nothing: no nodes, files, processes, threads, descriptors or memory.

Method: a real ZooKeeper, two JobManagers and two TaskManagers as processes. Jobs of four kinds end one after another,
so many that ended ones are forgotten; what there is of the cluster then is compared with what there is after many
more. The few jobs that stay listed (``jobmanager.retained-jobs``) and the logs (``taskmanager.logs.max-size``) are
what is to stay, and have their bounds. A thousand jobs: tests/large.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.examples import RUNS_ALL
from tests.support.many_jobs import assert_jobs_leave_nothing

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not RUNS_ALL, reason="it takes long: make test-all runs it"),
]


def test_thirty_jobs_leave_nothing(tmp_path: Path) -> None:
    assert_jobs_leave_nothing(tmp_path, first=10, then=20)
