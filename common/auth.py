"""Who may call a daemon: the shared token, checked on every call.

Invariant: a daemon has a token, unless an open loopback port was asked for or daemons show each other certificates;
one that listens beyond this machine has certificates, or a token that somebody gave it (``require_token``); and a server
with a token answers no call without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc
import grpc.aio
from typing_extensions import override

from common.log import get_logger
from common.refusal_log import RefusalLog
from penstock.client.addresses import is_loopback
from penstock.client.credentials import (
    AUTHORIZATION_KEY,
    AUTHORIZATION_SCHEME,
    load_token,
    token_metadata,
)
from penstock.client.grpc_errors import handler_like, status_of
from penstock.client.keyring import Token, keyring_of
from penstock.errors import ConfigurationError, StreamError, Unauthenticated

__all__ = [
    "TokenServerInterceptor",
    "load_token",
    "refusing",
    "require_token",
    "server_interceptors",
    "token_client_interceptors",
    "token_metadata",
]


def require_token(bind_host: str, token: Token, setting: str, *, has_tls: bool) -> None:
    """Refuses to listen beyond this machine where everybody would be let in.

    Args:
        bind_host: interface to listen on.
        token: the shared token, false where there is none.
        setting: configuration key of ``bind_host``, for the message.
        has_tls: daemons show each other certificates.

    Raises:
        ConfigurationError: the host is no loopback address, and there are neither a token nor certificates.
    """
    if not token and not has_tls and not is_loopback(bind_host):
        raise ConfigurationError(
            f"{setting} = {bind_host!r} can be reached from other machines, and no token is set: "
            "whoever reaches the port could run code here. Put a secret into a file and name it in "
            "security.token-file (or set PENSTOCK_TOKEN) on every daemon and client, give the daemons "
            "certificates (security.ssl.internal.enabled), or bind to 127.0.0.1"
        )


class TokenServerInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls that do not carry a token that is in force; compares in constant time."""

    def __init__(self, token: Token) -> None:
        if not token:
            raise ValueError("an empty token would let everybody in")
        self._keyring = keyring_of(token)
        self._refusals = RefusalLog(get_logger(__name__))

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Passes the call on, or puts a refusing handler of the same kind in its place."""
        handler = await continuation(handler_call_details)
        if handler is None or self._is_authorized(handler_call_details):
            return handler
        return refusing(handler, Unauthenticated(_NO_TOKEN), self._tell)

    def _tell(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._refusals.tell(
            "call.refused", address_of(context.peer()), "its token is missing or wrong"
        )

    def _is_authorized(self, details: grpc.HandlerCallDetails) -> bool:
        for key, value in details.invocation_metadata or ():
            if key == AUTHORIZATION_KEY:
                given = value.encode() if isinstance(value, str) else value
                scheme = AUTHORIZATION_SCHEME.encode()
                return given.startswith(scheme) and self._keyring.accepts(given[len(scheme) :])
        return False


def address_of(peer: str) -> str:
    """Host and port of who calls, as gRPC names him, or a relay of TLS in front of it.

    >>> address_of("ipv6:%5B::1%5D:35268"), address_of("ipv4:127.0.0.1:55430"), address_of("unix-abstract:10.0.0.1:7")
    ('[::1]:35268', '127.0.0.1:55430', '10.0.0.1:7')
    """
    kind, _, address = peer.partition(":")
    return unquote(address) if kind in ("ipv4", "ipv6", "unix-abstract") else peer


_NO_TOKEN = (
    "the cluster's token is missing or wrong: set security.token-file or PENSTOCK_TOKEN to "
    "the secret that the daemons have. A cluster on loopback that was given none has "
    "made one for its own user, in the file `token` of the JobManager's directory"
)


def refusing(
    handler: Any,
    error: StreamError,
    tell: Callable[[grpc.aio.ServicerContext[Any, Any]], None] = lambda _: None,
) -> Any:
    """A handler of the same kind that ends each call with an error, and tells of it."""
    status = status_of(error)

    async def refuse(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        tell(context)
        await context.abort(status.code, status.details, status.metadata)

    return handler_like(handler, refuse)


def server_interceptors(token: Token) -> list[grpc.aio.ServerInterceptor]:
    """The interceptors of a server; none without a token."""
    return [TokenServerInterceptor(token)] if token else []


def _authorized(details: Any, token: Token) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), *token_metadata(token))
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


# grpc.aio tells the kinds of interceptors apart by class, and takes one that is of several kinds
# for the first of them only: hence four classes.


class _UnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, token: Token) -> None:
        self._token = token

    @override
    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        further = keyring_of(self._token).further
        call = await continuation(_authorized(client_call_details, self._token), request)
        while further and await _code_of(call) is grpc.StatusCode.UNAUTHENTICATED:
            # While tokens are exchanged: who has not read the new one yet has an older one.
            older, *further = further
            call = await continuation(_authorized(client_call_details, older), request)
        return call


async def _code_of(call: Any) -> grpc.StatusCode:
    try:
        code: grpc.StatusCode = await call.code()
    except asyncio.CancelledError:
        call.cancel()
        raise
    return code


class _UnaryStream(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, token: Token) -> None:
        self._token = token

    @override
    async def intercept_unary_stream(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        return await continuation(_authorized(client_call_details, self._token), request)


class _StreamUnary(grpc.aio.StreamUnaryClientInterceptor):
    def __init__(self, token: Token) -> None:
        self._token = token

    @override
    async def intercept_stream_unary(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        return await continuation(_authorized(client_call_details, self._token), request_iterator)


class _StreamStream(grpc.aio.StreamStreamClientInterceptor):
    def __init__(self, token: Token) -> None:
        self._token = token

    @override
    async def intercept_stream_stream(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        return await continuation(_authorized(client_call_details, self._token), request_iterator)


def token_client_interceptors(token: Token) -> list[grpc.aio.ClientInterceptor]:
    """The interceptors of an ``aio`` channel that add the token; none without one."""
    if not token:
        return []
    return [_UnaryUnary(token), _UnaryStream(token), _StreamUnary(token), _StreamStream(token)]
