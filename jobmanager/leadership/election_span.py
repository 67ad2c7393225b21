"""What a trace tells of an election: from the moment a leader was missed to the first call that the next one answers (pure).

Example: a standby finds the leader's port refused, is elected, writes LEADER, and has found the jobs.
    >>> story = ElectionStory()
    >>> story.looked(1_000, is_reached=True)
    >>> story.looked(1_500, is_reached=False)
    >>> story.looked(2_000, is_reached=False)
    >>> story.elected(2_100)
    >>> story.claimed(2_140)
    >>> span = story.span(2_300, {"penstock.leader_epoch": 7})
    >>> (span.name, span.start_ms, span.end_ms)
    ('election', 1500, 2300)
    >>> [(part.name, part.start_ms, part.end_ms) for part in span.children]
    [('elect', 1500, 2100), ('claim', 2100, 2140), ('recover', 2140, 2300)]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jobmanager.traces.span import Span, Value


@dataclass(slots=True)
class ElectionStory:
    """What one JobManager has seen of it, on the clock of the wall."""

    _missed_ms: int = 0
    _elected_ms: int = 0
    _claimed_ms: int = 0

    def looked(self, now_ms: int, *, is_reached: bool) -> None:
        """Whether somebody listens where the leader was."""
        if is_reached:
            self._missed_ms = 0
        elif not self._missed_ms:
            self._missed_ms = now_ms

    def elected(self, now_ms: int) -> None:
        """ZooKeeper proposes this one."""
        self._elected_ms = now_ms

    def claimed(self, now_ms: int) -> None:
        """LEADER is this one's."""
        self._claimed_ms = now_ms

    def span(self, now_ms: int, attributes: Mapping[str, Value]) -> Span:
        """The election, now that calls are answered.

        Without a part ``elect`` where nobody was missed: nobody had led, the leader handed over, or only its session
        had told that it was gone.
        """
        starts = [
            (name, start_ms)
            for name, start_ms in (
                ("elect", self._missed_ms),
                ("claim", self._elected_ms),
                ("recover", self._claimed_ms),
            )
            if start_ms
        ]
        ends = [*(start_ms for _, start_ms in starts[1:]), now_ms]
        parts = tuple(
            Span(name, start_ms, max(start_ms, end_ms))  # the clock may have been set meanwhile
            for (name, start_ms), end_ms in zip(starts, ends, strict=True)
        )
        begun_ms = starts[0][1] if starts else now_ms
        return Span("election", begun_ms, max(begun_ms, now_ms), dict(attributes), parts)
