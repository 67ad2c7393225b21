"""When a slot sends what its subtasks hold back for company (pure).

Rows wait for a batch to fill as long as there is something else to do. A slot that runs out of work sends them at
once if it has been idle at least as long as it has worked since it did so last, or had idle time to spare before:
nobody is kept waiting where there is time. A slot that is busier than that waits a little for more rows to come, since a small batch costs whoever reads
it about as much as a large one: subtasks that answer small batches with small batches keep all cores busy at a
fraction of their throughput.

Time at work counts up to twice the CPU time of it. A slot that shares its core with others is as busy as one that has
twice as much to do; one that was held up once (by the interpreter lock, or a file) has not been busy, and what came
late because of that must not wait for company as well.
"""

from __future__ import annotations

LINGER_NS = 10_000_000
"""So long a slot that has nothing to do waits at most for more rows."""
SPARE_NS_MAX = 10_000_000
"""So much idle time of before counts at most."""
BUSY_LINGER_NS = 100_000_000
"""What has run out of input is sent after so long, however much the slot has to do."""
WORK_PER_CPU_MAX = 2
"""Time at work counts up to so many times its CPU time."""


class FlushPacing:
    """Follows how busy a slot is.

    Args:
        now_ns: monotonic time.
        cpu_ns: what the slot's thread has taken so far.

    Example: a slot that was idle for long sends at once, and so does one that was held up; one that worked all the
    time waits a little.
        >>> idle, held_up, busy = FlushPacing(0, 0), FlushPacing(0, 0), FlushPacing(0, 0)
        >>> idle.worked(90_000_000, 91_000_000, 1_000_000, has_more=False)
        >>> held_up.worked(0, 91_000_000, 1_000_000, has_more=False)
        >>> busy.worked(0, 91_000_000, 90_000_000, has_more=False)
        >>> for pacing in (idle, held_up, busy):
        ...     pacing.held(91_000_000)
        ...     print(pacing.due_ns(has_work=False) <= 91_000_000)
        True
        True
        False
    """

    def __init__(self, now_ns: int, cpu_ns: int) -> None:
        self._flushed_at_ns = now_ns
        self._flushed_at_cpu_ns = self._cpu_ns = cpu_ns
        self._at_work_ns = 0
        self._spare_ns = 0
        """By how much it was idle for longer than it worked, up to when it sent last."""
        self._held_since_ns: int | None = None
        self._idle_since_ns: int | None = None

    def held(self, now_ns: int) -> None:
        """A subtask has run out of input, and may hold something back."""
        if self._held_since_ns is None:
            self._held_since_ns = now_ns

    def worked(self, begun_ns: int, ended_ns: int, cpu_ns: int, *, has_more: bool) -> None:
        """The slot has been at work, and has more to do now or nothing.

        Args:
            cpu_ns: what its thread has taken so far.
        """
        self._at_work_ns += ended_ns - begun_ns
        self._cpu_ns = cpu_ns
        if not has_more and self._idle_since_ns is None:
            self._idle_since_ns = ended_ns

    @property
    def _worked_ns(self) -> int:
        cpu_ns = self._cpu_ns - self._flushed_at_cpu_ns
        return min(self._at_work_ns, WORK_PER_CPU_MAX * cpu_ns)

    def flushed(self, now_ns: int, cpu_ns: int) -> None:
        """Nothing is held back any more."""
        spare_ns = self._spare_ns + now_ns - self._flushed_at_ns - 2 * self._worked_ns
        self._spare_ns = min(max(spare_ns, 0), SPARE_NS_MAX)
        self._flushed_at_ns = now_ns
        self._flushed_at_cpu_ns = self._cpu_ns = cpu_ns
        self._at_work_ns = 0
        self._held_since_ns = self._idle_since_ns = None

    def due_ns(self, *, has_work: bool) -> int | None:
        """Monotonic time at which what is held back is to be sent; None = nothing is.

        Args:
            has_work: the slot has something else to do now.
        """
        if self._held_since_ns is None:
            return None
        latest_ns = self._held_since_ns + BUSY_LINGER_NS
        if has_work:
            return latest_ns
        idle_since_ns = self._held_since_ns if self._idle_since_ns is None else self._idle_since_ns
        even_ns = self._flushed_at_ns + 2 * self._worked_ns - self._spare_ns
        return min(latest_ns, idle_since_ns + LINGER_NS, even_ns)
