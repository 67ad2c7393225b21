"""What holds between a TaskManager and its JobManager, and how it is lost (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from common.pb import internal_pb2


class RegistrationLost(Exception):  # noqa: N818 - named after what happened
    """The JobManager does not count on this TaskManager any more."""


class LeaderReplaced(RegistrationLost):
    """Another JobManager leads, which may go on with what runs."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A registration that holds.

    Example: another leader is one of the same cluster whose epoch is higher.
        >>> held = Registration("first", 3, "cluster", 1.0, 10.0)
        >>> [held.is_over_by("cluster", epoch) for epoch in (2, 3, 4)]
        [False, False, True]
        >>> held.is_over_by("another cluster", 4)
        False
    """

    incarnation: str
    leader_epoch: int
    cluster_id: str
    heartbeat_interval_s: float
    heartbeat_timeout_s: float

    @classmethod
    def answered(
        cls, incarnation: str, response: internal_pb2.RegisterTaskManagerResponse
    ) -> Registration:
        """What a JobManager has answered."""
        return cls(
            incarnation,
            response.leader_epoch,
            response.cluster_id,
            response.heartbeat_interval_ms / 1000,
            response.heartbeat_timeout_ms / 1000,
        )

    def is_over_by(self, cluster_id: str, leader_epoch: int) -> bool:
        """Whether a leader of this epoch has come after the one that this is held with."""
        return cluster_id == self.cluster_id and leader_epoch > self.leader_epoch
