"""What a trace tells of starts, takeovers and restarts: one span each, whose parts say what it waited for (pure).

A part is the time in which the groups that were least far had one phase. While one restart is under way, whatever else
fails belongs to it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from jobmanager.job.groups import GroupPhase
from jobmanager.traces.span import Span, Value

PARTS_MAX: Final = 64
_RECOVERY: Final = "recovery"
_ORDER: Final = {
    GroupPhase.STOPPING: "stop",
    GroupPhase.LATE: "stop",
    GroupPhase.DELAY: "delay",
    GroupPhase.PREPARING: "prepare",
    GroupPhase.LOCATING: "locate",
    GroupPhase.SLOTS: "slots",
    GroupPhase.PROCESSES: "processes",
    GroupPhase.RESTORE: "restore",
}
"""From the one that is least far; what runs, or waits for inputs of others, is not on its way."""


class RecoverySpans:
    """Follows one job.

    Args:
        first: what its first start is called.

    Example: a start, then a restart that is told from its failure on.
        >>> spans = RecoverySpans("start")
        >>> spans.look([GroupPhase.SLOTS], 10, 0, {})
        >>> spans.look([GroupPhase.RESTORE, GroupPhase.RUNNING], 20, 0, {})
        >>> start = spans.look([GroupPhase.RUNNING], 50, 0, {})
        >>> (start.name, start.start_ms, start.end_ms)
        ('start', 10, 50)
        >>> [(part.name, part.start_ms, part.end_ms) for part in start.children]
        [('slots', 10, 20), ('restore', 20, 50)]
        >>> spans.look([GroupPhase.STOPPING], 100, 95, {})
        >>> spans.look([GroupPhase.RUNNING], 130, 95, {"penstock.restarts": 1}).name
        'recovery'
    """

    def __init__(self, first: str) -> None:
        self._name = first
        self._begun_ms: int | None = None
        self._parts: list[tuple[str, int]] = []

    def look(
        self,
        phases: Collection[GroupPhase],
        now_ms: int,
        failed_ms: int,
        attributes: Mapping[str, Value],
    ) -> Span | None:
        """The span that is over where nothing is on its way any more.

        Args:
            failed_ms: when the last failure was noticed; 0 = nothing has failed.
        """
        phase = next((name for phase, name in _ORDER.items() if phase in phases), None)
        if phase is None:
            return self._end(now_ms, attributes)
        if self._begun_ms is None:
            is_failure = self.is_of_failure and failed_ms
            self._begun_ms = min(failed_ms, now_ms) if is_failure else now_ms
        if not self._parts or (self._parts[-1][0] != phase and len(self._parts) < PARTS_MAX):
            self._parts.append((phase, now_ms if self._parts else self._begun_ms))
        return None

    @property
    def is_of_failure(self) -> bool:
        """Whether what is under way, or would be next, is a restart after a failure."""
        return self._name == _RECOVERY

    def end(self, now_ms: int, attributes: Mapping[str, Value], error: str) -> Span | None:
        """The job is over, and so is what was under way."""
        return self._end(now_ms, attributes, error)

    def _end(self, now_ms: int, attributes: Mapping[str, Value], error: str = "") -> Span | None:
        begun_ms, parts, name = self._begun_ms, self._parts, self._name
        if begun_ms is None:
            return None
        self._begun_ms, self._parts, self._name = None, [], _RECOVERY
        ends = [*(start for _, start in parts[1:]), now_ms]
        children = tuple(
            Span(part, start, end) for (part, start), end in zip(parts, ends, strict=True)
        )
        return Span(name, begun_ms, now_ms, dict(attributes), children, error)
