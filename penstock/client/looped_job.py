"""A job that a loop over its rows has submitted: when it ends."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from penstock.client.job import JobHandle, wait_or_cancel

_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class LoopedJob:
    """It ends with the loop, but is not cut short where it has other output and an end of its own.

    Attributes:
        is_endless: it has no end of its own.
        is_limited: it brings back so many rows and no more.
        has_other_sinks: it does more than bring rows back.
    """

    handle: JobHandle
    is_endless: bool
    is_limited: bool
    has_other_sinks: bool

    def __post_init__(self) -> None:
        if (self.is_endless and self.is_limited) or (self.is_limited and not self.has_other_sinks):
            self.handle.end_with_rows()

    def cancel(self) -> None:
        """Begins to cancel it."""
        self.handle.cancel()

    def leave_loop(self) -> bool:
        """A loop was left before its end. Returns whether the job goes on to its own."""
        if self.has_other_sinks and not self.is_endless:
            _log.warning(
                "job %s goes on to its end, for its other sinks; Ctrl-C cancels it",
                self.handle.job_id,
            )
            return True
        self.handle.cancel()
        return False

    def finish(self) -> None:
        """All rows of a loop are here: waits for the end, unless the job is endless and other rows are wanted of it."""
        if self.is_limited or not self.is_endless:
            wait_or_cancel(self.handle)
