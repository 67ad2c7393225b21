"""The gRPC server of a daemon, behind one port: plain, or with TLS for those who must and those who may.

With TLS there are two servers behind the port. Who shows a certificate is a peer and calls everything; the others, who are
clients, show the token and call nothing that is for daemons. A daemon that no client calls has the first one alone.

The port is taken once and listened on until the end; what answers behind it may change, as where a standby begins to lead.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from typing_extensions import override

from common.auth import refusing
from common.grpc_server import make_server
from common.pb import internal_pb2
from common.tls.daemon_tls_runner import DaemonTls
from common.tls.doors import Entrance, TurnedAway, Visitor
from penstock.client.addresses import format_address
from penstock.client.keyring import Token
from penstock.errors import InvariantViolation, Unauthenticated

_INTERNAL = f"/{internal_pb2.DESCRIPTOR.package}."


class DaemonServer:
    """See the module.

    Args:
        token: what calls must carry, "" = nothing; of peers with a certificate it is not asked.
        tls: of the daemon, None = it speaks plain.
        takes_clients: clients call it too.
        clients_need_tls: clients must speak TLS.
    """

    def __init__(
        self,
        token: Token,
        tls: DaemonTls | None,
        *,
        takes_clients: bool = False,
        clients_need_tls: bool = False,
    ) -> None:
        self._tls = tls
        self._clients_need_tls = clients_need_tls
        self._for_peers = make_server(token if tls is None else "")
        self._for_clients: grpc.aio.Server | None = None
        if tls is not None and takes_clients:
            self._for_clients = make_server(token, before=[_PeersOnly()])
        self._services = _Services()
        for server in self._servers:
            server.add_generic_rpc_handlers((self._services,))
        self._is_started = False
        self._listener: socket.socket | None = None
        self._entrance: Entrance | None = None
        self._paths: list[Path] = []

    @property
    def _servers(self) -> list[grpc.aio.Server]:
        return [self._for_peers, *([] if self._for_clients is None else [self._for_clients])]

    def serve(self, *adds: Callable[[grpc.aio.Server], None]) -> None:
        """Lets these services answer from the next call on, in place of those that did.

        Args:
            adds: each adds one to a server.
        """
        self._services.replace(adds)

    def bind(self, host: str, port: int) -> int:
        """Takes the port and returns it.

        Raises:
            RuntimeError: it cannot be had.
        """
        tls = self._tls
        if tls is None:
            return self._for_peers.add_insecure_port(format_address(host, port))
        try:
            self._listener = tls.listen(host, port)
        except OSError as error:
            raise RuntimeError(f"{format_address(host, port)}: {error}") from error
        self._paths = [tls.new_path() for _ in self._servers]
        for server, path in zip(self._servers, self._paths, strict=True):
            server.add_insecure_port(f"unix:{path}")
        self._entrance = Entrance(
            self._backend,
            requires_certificate=self._for_clients is None,
            takes_plain=self._for_clients is not None and not self._clients_need_tls,
        )
        return int(self._listener.getsockname()[1])

    def _backend(self, visitor: Visitor) -> str:
        if visitor.has_certificate:
            return str(self._paths[0])
        if self._for_clients is None:
            raise TurnedAway("it has shown no certificate")
        return str(self._paths[1])

    async def start(self) -> None:
        """Answers calls from now on; harmless when it does."""
        if self._is_started:
            return
        self._is_started = True
        for server in self._servers:
            await server.start()
        if self._tls is not None:
            if self._listener is None or self._entrance is None:
                raise InvariantViolation("a server is started before it has a port")
            self._tls.let_in(self._listener, self._entrance)

    async def stop(self, grace_s: float | None) -> None:
        """Ends it; harmless when it has ended.

        Args:
            grace_s: for the calls that are under way.
        """
        listener, self._listener = self._listener, None
        if listener is not None and self._tls is not None:
            self._tls.dismiss(listener)
        for server in self._servers:
            await server.stop(grace_s)


class _Services(grpc.GenericRpcHandler):
    """Finds who answers a call, among services that may be replaced by others meanwhile."""

    def __init__(self) -> None:
        self._handlers: tuple[grpc.GenericRpcHandler, ...] = ()

    def replace(self, adds: Sequence[Callable[[grpc.aio.Server], None]]) -> None:
        """Others answer from now on, all of them at once."""
        added = _Added()
        for add in adds:
            add(added)  # type: ignore[arg-type]
        self._handlers = tuple(added.handlers)

    @override
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        found = (handler.service(handler_call_details) for handler in self._handlers)
        return next((handler for handler in found if handler is not None), None)


class _Added:
    """What generated code takes for a server."""

    def __init__(self) -> None:
        self.handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self.handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """The same once more."""


class _PeersOnly(grpc.aio.ServerInterceptor):
    """Refuses clients what is for daemons."""

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Passes the call on, or puts a refusing handler of the same kind in its place."""
        method: str = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None or not method.startswith(_INTERNAL):
            return handler
        return refusing(
            handler,
            Unauthenticated(
                "this JobManager speaks only with daemons that show a certificate: set security.ssl.internal.enabled, "
                ".cert, .key and .ca here as they are set there"
            ),
        )
