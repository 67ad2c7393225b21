"""What is said of a job's restarts to who waits for its end: one that fails over and over must not look like one that hangs."""

from __future__ import annotations

import logging

from penstock.pb import client_pb2
from penstock.printable import in_one_line

INTERVAL_MS = 2_000
"""A restart of a region changes no state of the job: so often it is looked for."""

_FAILURE_MAX_CHARS = 500

_log = logging.getLogger("penstock")


class RestartNotes:
    """Warns once of each new number of restarts."""

    def __init__(self) -> None:
        self._told = 0

    def __call__(self, details: client_pb2.JobDetails) -> None:
        """Looks at the newest details."""
        summary = details.summary
        if summary.restarts <= self._told or not details.HasField("failure"):
            return
        self._told = summary.restarts
        failure = details.failure
        text = in_one_line(f"{failure.error_class}: {' '.join(failure.message.split())}")
        if len(text) > _FAILURE_MAX_CHARS:
            text = f"{text[: _FAILURE_MAX_CHARS - 3]}..."
        _log.warning(
            "job '%s' is restarted (%d so far): %s; more: penstock exceptions %s, handle.exceptions()",
            summary.name,
            summary.restarts,
            text,
            summary.job_id[:8],
        )
