"""What a JobManager that takes part in an election hears, and when its part is over (pure).

Example: a suspended connection ends nothing by itself, a lost session ends everything.
    >>> reason_to_end(Suspended(), is_leading=True, tolerates_suspension=True)
    ''
    >>> reason_to_end(SessionLost(), is_leading=False, tolerates_suspension=True)
    'its session with ZooKeeper is over'
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Elected:
    """ZooKeeper proposes this JobManager."""


@dataclass(frozen=True, slots=True)
class Connected:
    """ZooKeeper is reached (again)."""


@dataclass(frozen=True, slots=True)
class Suspended:
    """ZooKeeper is not reached; whether the session is over is not known."""


@dataclass(frozen=True, slots=True)
class SessionLost:
    """ZooKeeper has ended the session, and with it this JobManager's part in the election."""


@dataclass(frozen=True, slots=True)
class LeaderNode:
    """What a leader says of itself in ZooKeeper.

    Attributes:
        address: host:port of its gRPC server.
        node: its node in the election.
    """

    address: str
    epoch: int
    node: str


@dataclass(frozen=True, slots=True)
class LeaderTold:
    """A leader has said who it is; None = none has yet."""

    leader: LeaderNode | None


ElectionEvent = Elected | Connected | Suspended | SessionLost | LeaderTold


def reason_to_end(event: ElectionEvent, *, is_leading: bool, tolerates_suspension: bool) -> str:
    """Why the process is to end, so that nothing of what it believed lives on; "" = it goes on."""
    match event:
        case SessionLost():
            return "its session with ZooKeeper is over"
        case Suspended() if is_leading and not tolerates_suspension:
            return "it has lost ZooKeeper, and suspended connections are not tolerated"
        case _:
            return ""


def encode_leader(leader: LeaderNode) -> bytes:
    """A leader as its node holds it."""
    return json.dumps(asdict(leader)).encode()


def decode_leader(content: bytes) -> LeaderNode | None:
    """Inverse of ``encode_leader``; None where nobody has written, or something else."""
    try:
        told = json.loads(content)
        return LeaderNode(str(told["address"]), int(told["epoch"]), str(told["node"]))
    except (ValueError, KeyError, TypeError):
        return None


def before(node: str, nodes: Iterable[str]) -> str | None:
    """The node that comes just before one in the election; "" = it is the first, None = it is not there.

    Args:
        node: ends with its number, as ZooKeeper gives them out.
        nodes: all of the election.
    """
    ordered = sorted(nodes, key=lambda name: name.rpartition("-")[2])
    if node not in ordered:
        return None
    place = ordered.index(node)
    return ordered[place - 1] if place else ""
