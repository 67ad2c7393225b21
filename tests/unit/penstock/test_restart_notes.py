"""Aim: who waits for a job that fails over and over is told so, once per restart and in one line.

Method: details as the JobManager sends them, the log looked at.
"""

from __future__ import annotations

import pytest

from penstock.client.restart_notes import RestartNotes
from penstock.pb import client_pb2


def details(restarts: int, message: str = "") -> client_pb2.JobDetails:
    found = client_pb2.JobDetails(
        summary=client_pb2.JobSummary(job_id="a" * 32, name="totals", restarts=restarts)
    )
    if message:
        found.failure.CopyFrom(client_pb2.FailureCause(error_class="TaskFailure", message=message))
    return found


def test_each_restart_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    tell = RestartNotes()
    for seen in [
        details(0),
        details(0, "ends"),
        details(1, "disk\nfull"),
        details(1, "disk\nfull"),
    ]:
        tell(seen)
    (told,) = caplog.messages
    assert told.startswith("job 'totals' is restarted (1 so far): TaskFailure: disk full; more: ")
    assert "penstock exceptions aaaaaaaa" in told
    tell(details(3, "x" * 10_000))
    assert "(3 so far)" in caplog.messages[-1]
    assert len(caplog.messages[-1]) < 700
