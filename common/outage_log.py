"""Logs what fails over and over, as it begins and when it works again; what comes in between is for ``log.level: debug``."""

from __future__ import annotations

from typing import Any, Final, Literal

_KINDS_MAX: Final = 20
"""Of one outage; more are not told apart."""


class OutageLog:
    """See the module.

    Args:
        log: where it is said.
        failed: what is said of a failure.
        works_again: what is said after failures; the field ``failures`` counts them.
        level: of the former; the latter is at ``info``.
    """

    def __init__(
        self, log: Any, failed: str, works_again: str, level: Literal["info", "warning", "error"]
    ) -> None:
        self._log = log
        self._failed = failed
        self._works_again = works_again
        self._level = level
        self._failures = 0
        self._kinds: set[str] = set()

    def failed(self, kind: str = "", /, **facts: object) -> None:
        """It has not worked.

        Args:
            kind: of failure; one that has not been said since it last worked is said as well.
        """
        is_news = kind not in self._kinds and len(self._kinds) < _KINDS_MAX
        self._failures += 1
        if is_news:
            self._kinds.add(kind)
        getattr(self._log, self._level if is_news else "debug")(self._failed, **facts)

    def worked(self, **facts: object) -> None:
        """It has worked."""
        if self._failures:
            self._log.info(self._works_again, failures=self._failures, **facts)
        self._failures = 0
        self._kinds.clear()
