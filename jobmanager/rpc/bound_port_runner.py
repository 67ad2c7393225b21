"""The port of a JobManager: bound, or refused with what stands in the way."""

from __future__ import annotations

import errno
import socket

from common.daemon_server import DaemonServer
from penstock.client.addresses import format_address
from penstock.errors import StreamError


def bind(server: DaemonServer, host: str, port: int) -> int:
    """Binds the server's port and returns it.

    Raises:
        StreamError: the port cannot be had, and why.
    """
    try:
        bound = server.bind(host, port)
    except RuntimeError:
        bound = 0
    if bound:
        return bound
    reason = _why_not(host, port)
    if reason == errno.EADDRINUSE:
        raise StreamError(
            f"port {port} on {host} is in use: stop what listens there (another JobManager?), or "
            "choose another one with -D jobmanager.rpc.port=PORT (0 takes a free one)"
        )
    text = "the name is unknown" if reason is None else errno.errorcode.get(reason, str(reason))
    raise StreamError(
        f"the JobManager cannot listen on {format_address(host, port)} ({text}): check "
        "jobmanager.bind-host and jobmanager.rpc.port"
    )


def _why_not(host: str, port: int) -> int | None:
    """The error of binding; gRPC does not tell it. None = the host cannot be resolved."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror:
        return None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return error.errno
    return errno.EADDRINUSE  # it was, a moment ago
