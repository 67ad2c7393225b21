"""Processes of the data exchange by name: what one says of itself in the handshake (pure).

A slot id alone may come back in another process, so the name holds where it listens, too.
"""

from __future__ import annotations

from common.pb import internal_pb2
from taskmanager.network.frames import FrameError

_PORT_MAX = 65_535


def endpoint_name(endpoint: internal_pb2.DataEndpoint) -> str:
    """Identity of a process."""
    place = f"{endpoint.unix_path}|{endpoint.tcp_host}:{endpoint.tcp_port}"
    return f"{endpoint.slot_id}|{endpoint.host_id}|{place}"


def endpoint_of(name: str) -> internal_pb2.DataEndpoint:
    """Inverse of ``endpoint_name``.

    Raises:
        FrameError: it is no such name.
    """
    slot_id, *rest = name.split("|")
    host_id, unix_path, tcp = rest if len(rest) == 3 else ("", "", "")
    tcp_host, separator, tcp_port = tcp.rpartition(":")
    is_port = tcp_port.isascii() and tcp_port.isdigit() and len(tcp_port) <= len(str(_PORT_MAX))
    if not separator or not is_port or int(tcp_port) > _PORT_MAX:
        raise FrameError(f"{name[:200]!r} is no endpoint")
    return internal_pb2.DataEndpoint(
        slot_id=slot_id,
        host_id=host_id,
        unix_path=unix_path,
        tcp_host=tcp_host,
        tcp_port=int(tcp_port),
    )
