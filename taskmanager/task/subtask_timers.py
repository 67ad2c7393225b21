"""When the operators of a subtask are called again, by two clocks (pure).

The wall clock may be set, and is what users ask for: timers of processing time, ends of windows. Pauses of the engine's own
(files are listed again, an origin is idle, an output file is complete) go by a clock that only runs forward.

Example: the wall clock is set back by an hour, and a pause ends all the same.
    >>> timers = SubtaskTimers()
    >>> timers.at(1, wall_ms=3_600_500)
    >>> timers.after(2, steady_ns=500_000_000)
    >>> timers.take_due(now_ms=500, now_ns=500_000_000)
    ([], [2])
    >>> timers.take_due(now_ms=3_600_500, now_ns=3_600_500_000_000)
    ([1], [])
"""

from __future__ import annotations

_NS_PER_MS = 1_000_000


class SubtaskTimers:
    """Those of one subtask, at most one of each clock per operator, named by its node: the earliest that was asked for."""

    def __init__(self) -> None:
        self._wall_ms: dict[int, int] = {}
        self._steady_ns: dict[int, int] = {}

    def at(self, node: int, wall_ms: int) -> None:
        """An operator is called at a time of the wall clock."""
        self._wall_ms[node] = min(wall_ms, self._wall_ms.get(node, wall_ms))

    def after(self, node: int, steady_ns: int) -> None:
        """An operator is called at a time of the clock that only runs forward."""
        self._steady_ns[node] = min(steady_ns, self._steady_ns.get(node, steady_ns))

    def take_due(self, now_ms: int, now_ns: int) -> tuple[list[int], list[int]]:
        """Whose time has come, by the wall clock and by the other one; they are forgotten."""
        return _take_due(self._wall_ms, now_ms), _take_due(self._steady_ns, now_ns)

    def next_ns(self, now_ms: int, now_ns: int) -> int | None:
        """When the next is due by the clock that only runs forward, if nobody sets the other one; None = there is none."""
        times = list(self._steady_ns.values())
        times += [now_ns + (at_ms - now_ms) * _NS_PER_MS for at_ms in self._wall_ms.values()]
        return min(times, default=None)


def _take_due(times: dict[int, int], now: int) -> list[int]:
    due = [node for node, at in times.items() if at <= now]
    for node in due:
        del times[node]
    return due
