"""The way to slots of other hosts where data connections are encrypted: through the gateways of both TaskManagers.

A slot tells its own gateway whom it wants to reach and speaks on as if it had reached him; the other gateway finds the
slot by the name of its Unix socket.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from common.pb import internal_pb2
from common.tls.doors import Destination, TurnedAway, request_line
from taskmanager.network.transport import Address

GATEWAY_SOCKET: Final = "gateway.sock"
_NAME: Final = re.compile(r"[0-9a-z]{1,20}\.sock")


@dataclass(frozen=True, slots=True)
class Gateway:
    """That of one TaskManager.

    Attributes:
        unix_path: where it takes those who want to reach other hosts.
        port: where it takes those who come from other hosts.
    """

    unix_path: str
    port: int

    @classmethod
    def of(cls, configuration: internal_pb2.SlotConfiguration) -> Gateway | None:
        """That of the process that is told this; None = connections are plain."""
        if not configuration.gateway_unix_path:
            return None
        return cls(configuration.gateway_unix_path, configuration.gateway_port)

    def address_of(self, peer: internal_pb2.DataEndpoint) -> Address:
        """How a process of another host is reached."""
        name = PurePath(peer.unix_path).name
        wanted = Destination(peer.tcp_host, peer.tcp_port, name)
        return Address(self.unix_path, peer.tcp_host, peer.tcp_port, request_line(wanted))


def socket_of(name: str, directory: str) -> str:
    """The Unix socket of a process of this TaskManager.

    Args:
        name: as the peer says it.
        directory: of the sockets.

    Raises:
        TurnedAway: it is no name of such a socket.

    Example:
        >>> socket_of("3.sock", "/run/penstock")
        '/run/penstock/3.sock'
    """
    if _NAME.fullmatch(name) is None or name == GATEWAY_SOCKET:
        raise TurnedAway(f"{name!r} is no process of this TaskManager")
    return f"{directory}/{name}"
