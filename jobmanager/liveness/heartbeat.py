"""Who is alive: heartbeats in, silent TaskManagers out.

Silence is looked at twice, one interval apart: a TaskManager that is overdue is lost only when it stays
silent for another interval. A monitor that has itself been asleep (a paused process, a busy machine)
could hear nobody: it counts that time as nobody's silence, and the heartbeats that wait in its sockets
have the time to be read.

Doubts shorten the time a TaskManager may be silent: each witness that could not reach it divides
``timeout_ms`` once more, into halves, thirds and so on. A heartbeat dispels them all, so that a TaskManager
that beats is never lost for what others say.

Invariants: a TaskManager is declared lost once per registration, and only after silence that is
not shorter than ``timeout_ms`` without doubts and than two intervals with them, and whose last
``interval_ms`` the monitor was awake.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jobmanager.liveness.loss_reason import LossReason


@dataclass(frozen=True, slots=True)
class Silent:
    """A TaskManager that is lost.

    Attributes:
        silent_ms: since its last heartbeat.
        witnesses: who could not reach it, in order of their names.
    """

    taskmanager_id: str
    silent_ms: int
    witnesses: tuple[str, ...]

    def loss(self, timeout_ms: int) -> tuple[LossReason, str]:
        """How the JobManager came to know, and in words.

        Args:
            timeout_ms: after which silence alone is enough.
        """
        if not self.witnesses:
            told = f"no heartbeat for {timeout_ms / 1000:g} s (heartbeat.timeout)"
            return LossReason.HEARTBEAT_TIMEOUT, told
        seen = ", ".join(self.witnesses)
        told = (
            f"no heartbeat for {self.silent_ms / 1000:.1f} s, and it could not be reached by {seen}"
        )
        return LossReason.UNREACHABLE, told


@dataclass(slots=True)
class _Peer:
    incarnation: str
    heard_ms: int
    deadline_ms: int
    is_overdue: bool = False
    witnesses: set[str] = field(default_factory=set)


class HeartbeatMonitor:
    """Deadlines of the registered TaskManagers.

    Args:
        timeout_ms: silence after which a TaskManager is lost.

    Example: silence is looked at twice, one interval apart.
        >>> monitor = HeartbeatMonitor(interval_ms=10, timeout_ms=40)
        >>> monitor.register("tm-1", "first", now_ms=0)
        >>> [monitor.expire(now_ms) for now_ms in (10, 20, 30)]
        [[], [], []]
        >>> monitor.expire(40)
        [Silent(taskmanager_id='tm-1', silent_ms=40, witnesses=())]
        >>> monitor.beat("tm-1", "first", now_ms=41)  # too late: it must register again
        False
    """

    def __init__(self, interval_ms: int, timeout_ms: int) -> None:
        assert 0 < interval_ms < timeout_ms, "several heartbeats fit into the timeout"
        self._interval_ms = interval_ms
        self._timeout_ms = timeout_ms
        self._peers: dict[str, _Peer] = {}
        self._looked_ms = 0

    def register(self, taskmanager_id: str, incarnation: str, now_ms: int) -> None:
        """A TaskManager has come (again)."""
        if not self._peers:
            self._looked_ms = now_ms
        self._peers[taskmanager_id] = _Peer(incarnation, now_ms, now_ms + self._silence_ms(0))

    def beat(self, taskmanager_id: str, incarnation: str, now_ms: int) -> bool:
        """A heartbeat came.

        Returns:
            False when nobody of this id and incarnation is registered: it must register again.
        """
        peer = self._peers.get(taskmanager_id)
        if peer is None or peer.incarnation != incarnation:
            return False
        peer.heard_ms = now_ms
        peer.deadline_ms = now_ms + self._silence_ms(0)
        peer.is_overdue = False
        peer.witnesses.clear()
        return True

    def suspect(self, taskmanager_id: str, witness: str) -> bool:
        """Somebody could not reach a TaskManager.

        Args:
            taskmanager_id: whom; harmless where nobody watches it.
            witness: who; each one counts once between two heartbeats.

        Returns:
            True where this is news.
        """
        peer = self._peers.get(taskmanager_id)
        if peer is None or witness in peer.witnesses:
            return False
        peer.witnesses.add(witness)
        if not peer.is_overdue:
            silence_ms = self._silence_ms(len(peer.witnesses))
            peer.deadline_ms = min(peer.deadline_ms, peer.heard_ms + silence_ms)
        return True

    def is_alive(self, taskmanager_id: str, now_ms: int) -> bool:
        """Whether a TaskManager was heard of within the last two intervals."""
        peer = self._peers.get(taskmanager_id)
        return peer is not None and now_ms - peer.heard_ms <= 2 * self._interval_ms

    def silence_max_ms(self, now_ms: int) -> int:
        """The longest time that a watched TaskManager has been silent; any thread."""
        return max((now_ms - peer.heard_ms for peer in tuple(self._peers.values())), default=0)

    def remove(self, taskmanager_id: str) -> None:
        """Stops watching; harmless for whom nobody watches."""
        self._peers.pop(taskmanager_id, None)

    def expire(self, now_ms: int) -> list[Silent]:
        """Removes and returns who is lost at ``now_ms``, in order of their ids.

        It is to be called when ``next_deadline_ms`` says so: by what it is late it knows that it has
        been asleep.
        """
        late_ms = now_ms - self._looked_ms - self._interval_ms
        self._looked_ms = now_ms
        if late_ms > self._interval_ms:
            self._forgive(late_ms, now_ms)
        lost = []
        for taskmanager_id, peer in sorted(self._peers.items()):
            overdue_ms = now_ms - peer.deadline_ms
            if overdue_ms < 0:
                continue
            if peer.is_overdue and overdue_ms <= self._interval_ms:
                witnesses = tuple(sorted(peer.witnesses))
                lost.append(Silent(taskmanager_id, now_ms - peer.heard_ms, witnesses))
            else:
                peer.is_overdue = True
                peer.deadline_ms = now_ms + self._interval_ms
        for silent in lost:
            del self._peers[silent.taskmanager_id]
        return lost

    def next_deadline_ms(self) -> int | None:
        """When ``expire`` is due next, after an interval at the latest; None = nobody is watched."""
        if not self._peers:
            return None
        first_ms = min(peer.deadline_ms for peer in self._peers.values())
        return min(first_ms, self._looked_ms + self._interval_ms)

    def _silence_ms(self, witness_count: int) -> int:
        """Silence until the first look; the second comes an interval later."""
        shortened_ms = max(self._timeout_ms // (1 + witness_count), 2 * self._interval_ms)
        return min(shortened_ms, self._timeout_ms) - self._interval_ms

    def _forgive(self, asleep_ms: int, now_ms: int) -> None:
        """Nobody was silent while the monitor slept, and none gets more time than anew."""
        latest_ms = now_ms + self._silence_ms(0)
        for peer in self._peers.values():
            peer.is_overdue = False
            peer.deadline_ms = max(peer.deadline_ms, min(peer.deadline_ms + asleep_ms, latest_ms))
