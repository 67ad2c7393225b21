"""Whether two daemons of a cluster can work together: they speak the same protocol, whatever versions they are of."""

from __future__ import annotations

from penstock.client.protocol import DAEMON_PROTOCOL_VERSION
from penstock.errors import ProtocolMismatch


def check_protocol(
    peer: str, peer_version: str, peer_protocol: int, own: str, own_version: str
) -> None:
    """Refuses a peer whose words would be misunderstood.

    Example: a daemon from before protocols were counted says 0.
        >>> check_protocol("TaskManager tm", "0.2", DAEMON_PROTOCOL_VERSION, "this JobManager", "0.1")
        >>> check_protocol("TaskManager tm", "0.0", 0, "this JobManager", "0.1")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        penstock.errors.ProtocolMismatch: TaskManager tm (penstock 0.0) speaks an earlier protocol of daemons, ...

    Args:
        peer: who that is, for people.
        peer_protocol: what it says that it speaks.
        own: who asks, for people.

    Raises:
        ProtocolMismatch: it speaks another protocol.
    """
    if peer_protocol == DAEMON_PROTOCOL_VERSION:
        return
    spoken = f"protocol {peer_protocol}" if peer_protocol else "an earlier protocol"
    raise ProtocolMismatch(
        f"{peer} (penstock {peer_version or 'unknown'}) speaks {spoken} of daemons, {own} (penstock "
        f"{own_version or 'unknown'}) speaks {DAEMON_PROTOCOL_VERSION}: install the same version on both "
        '("Upgrading" in docs/operations.md says in which order)'
    )
