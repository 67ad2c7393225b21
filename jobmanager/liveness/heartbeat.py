"""Who is alive: heartbeats in, silent TaskManagers out.

Silence is looked at twice, one interval apart: a TaskManager that is overdue is first suspected,
and lost only when it stays silent for another interval. A monitor that has itself been asleep (a
paused process, a busy machine) thereby gives the heartbeats that wait in its sockets the time to be
read.

Invariants: a TaskManager is declared lost once per registration, and only after ``timeout_ms`` of
silence whose last ``interval_ms`` the monitor was awake.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Peer:
    incarnation: str
    heard_ms: int
    deadline_ms: int
    suspected: bool = False


class HeartbeatMonitor:
    """Deadlines of the registered TaskManagers.

    Args:
        interval_ms: time between two heartbeats.
        timeout_ms: silence after which a TaskManager is lost.
    """

    def __init__(self, interval_ms: int, timeout_ms: int) -> None:
        assert 0 < interval_ms < timeout_ms, "several heartbeats fit into the timeout"
        self._interval_ms = interval_ms
        self._silence_ms = timeout_ms - interval_ms
        self._peers: dict[str, _Peer] = {}

    def register(self, taskmanager_id: str, incarnation: str, now_ms: int) -> None:
        """A TaskManager has come (again)."""
        self._peers[taskmanager_id] = _Peer(incarnation, now_ms, now_ms + self._silence_ms)

    def beat(self, taskmanager_id: str, incarnation: str, now_ms: int) -> bool:
        """A heartbeat came.

        Returns:
            False when nobody of this id and incarnation is registered: it must register again.
        """
        peer = self._peers.get(taskmanager_id)
        if peer is None or peer.incarnation != incarnation:
            return False
        peer.heard_ms = now_ms
        peer.deadline_ms = now_ms + self._silence_ms
        peer.suspected = False
        return True

    def is_alive(self, taskmanager_id: str, now_ms: int) -> bool:
        """Whether a TaskManager was heard of within the last two intervals."""
        peer = self._peers.get(taskmanager_id)
        return peer is not None and now_ms - peer.heard_ms <= 2 * self._interval_ms

    def remove(self, taskmanager_id: str) -> None:
        """Stops watching; harmless for whom nobody watches."""
        self._peers.pop(taskmanager_id, None)

    def expire(self, now_ms: int) -> list[str]:
        """Removes and returns who is lost at ``now_ms``, in order of their ids."""
        lost = []
        for taskmanager_id, peer in sorted(self._peers.items()):
            overdue_ms = now_ms - peer.deadline_ms
            if overdue_ms < 0:
                continue
            if peer.suspected and overdue_ms <= self._interval_ms:
                lost.append(taskmanager_id)
            else:
                peer.suspected = True
                peer.deadline_ms = now_ms + self._interval_ms
        for taskmanager_id in lost:
            del self._peers[taskmanager_id]
        return lost

    def next_deadline_ms(self) -> int | None:
        """When ``expire`` is due next; None = nobody is watched."""
        return min((peer.deadline_ms for peer in self._peers.values()), default=None)
