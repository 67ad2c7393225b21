"""What keeps a job that is cancelled from ending is said to whoever waits for its end."""

from __future__ import annotations

import pytest

from penstock.cli.jobs import _tell_obstacle
from penstock.pb import client_pb2

AWAY, FULL = "/kept is not mounted", "No space left on device"


def test_each_obstacle_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    told = ""
    for problem in ("", AWAY, AWAY, "", AWAY, FULL, ""):
        summary = client_pb2.JobSummary(problem=problem)
        told = _tell_obstacle(client_pb2.JobDetails(summary=summary), told)
    ended = capsys.readouterr()
    assert ended.out == ""
    said = [f"cancelled, and not ended yet: {one}; it is tried again" for one in (AWAY, FULL)]
    assert ended.err.splitlines() == said
