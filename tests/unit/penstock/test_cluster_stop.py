"""Aim: what cannot be learned of jobs keeps no cluster from being stopped.

Method: what is asked before the stop, with answers of a JobManager of another version, or a slow one.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.cli import cluster
from penstock.local.local_cluster import LocalCluster
from penstock.pb import client_pb2


def asked(state: int) -> Any:
    """What ``cluster stop`` learns of a job."""
    summary = client_pb2.JobSummary(job_id="a", name="job", state=cast("Any", state))
    client = SimpleNamespace(
        jobs=lambda: [summary], job=lambda _: client_pb2.JobDetails(summary=summary)
    )
    jobmanager = SimpleNamespace(alive=True, role="jobmanager")
    local = SimpleNamespace(daemons=lambda: [jobmanager], client=lambda **_: nullcontext(client))
    return cluster._unfinished_jobs(cast("LocalCluster", local))


def test_a_state_that_is_not_known_here_is_borne() -> None:
    assert asked(client_pb2.JOB_STATE_RUNNING)[0]["state"] == "RUNNING"
    assert asked(99) is None


def test_all_answers_together_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_ASK_TIMEOUT_S", 0.0)
    assert asked(client_pb2.JOB_STATE_RUNNING) is None
