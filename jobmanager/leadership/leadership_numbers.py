"""What a JobManager knows of who leads, for its metrics (pure).

Example: a standby hears of one leader, and then of another.
    >>> numbers = LeadershipNumbers()
    >>> numbers.hear(Connected())
    >>> for epoch in (3, 3, 5):
    ...     numbers.hear(LeaderTold(LeaderNode("host:6123", epoch, "node")))
    >>> numbers.zookeeper.value, numbers.epoch, numbers.changes
    ('connected', 5, 1)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from jobmanager.leadership.election import (
    Connected,
    ElectionEvent,
    LeaderNode,
    LeaderTold,
    SessionLost,
    Suspended,
)


class ZookeeperState(Enum):
    """How a JobManager stands with ZooKeeper."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    SUSPENDED = "suspended"
    LOST = "lost"


@dataclass(slots=True)
class LeadershipNumbers:
    """Numbers, changed by the event loop and read by any thread.

    Attributes:
        zookeeper: None = there is none.
        epoch: the largest of a leader that was heard of; 0 = of none.
        changes: how often another leader was heard of than before.
    """

    zookeeper: ZookeeperState | None = None
    epoch: int = 0
    changes: int = 0

    def hear(self, event: ElectionEvent) -> None:
        """The election says something."""
        match event:
            case Connected():
                self.zookeeper = ZookeeperState.CONNECTED
            case Suspended():
                self.zookeeper = ZookeeperState.SUSPENDED
            case SessionLost():
                self.zookeeper = ZookeeperState.LOST
            case LeaderTold(LeaderNode(epoch=epoch)):
                self.lead(epoch)
            case _:
                pass

    def lead(self, epoch: int) -> None:
        """Somebody leads."""
        if epoch > self.epoch:
            self.changes += self.epoch != 0
            self.epoch = epoch
