"""Aim: what fails for hours is told as it begins, for another reason, and when it works again. Method: by hand."""

from __future__ import annotations

import structlog

from common.outage_log import OutageLog


def test_an_outage_is_told_of_as_it_begins_and_when_it_is_over() -> None:
    with structlog.testing.capture_logs() as logs:
        outage = OutageLog(structlog.get_logger(), "thing.failed", "thing.worked_again", "warning")
        outage.worked()
        for number, kind in enumerate(("full", "full", "away", "full")):
            outage.failed(kind, number=number)
        for _ in range(2):
            outage.worked(number=9)
        outage.failed("full", number=10)
    assert [(one["log_level"], one["event"], one["number"]) for one in logs] == [
        ("warning", "thing.failed", 0),
        ("debug", "thing.failed", 1),
        ("warning", "thing.failed", 2),
        ("debug", "thing.failed", 3),
        ("info", "thing.worked_again", 9),
        ("warning", "thing.failed", 10),
    ]
    assert logs[4]["failures"] == 4


def test_reasons_that_never_repeat_are_not_told_of_for_ever() -> None:
    with structlog.testing.capture_logs() as logs:
        outage = OutageLog(structlog.get_logger(), "thing.failed", "thing.worked_again", "warning")
        for number in range(100):
            outage.failed(f"since {number} s")
    levels = [one["log_level"] for one in logs]
    assert levels == [*["warning"] * 20, *["debug"] * 80]
