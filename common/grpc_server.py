"""Makes every gRPC server: those of the daemons, and those that stand for daemons in tests.

A server without ``server_options`` takes the pings of its peers for an attack and ends their connections
(GOAWAY, ``too_many_pings``), which looks like the loss of a daemon. So nobody else makes one: ruff refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio

from common.auth import server_interceptors
from common.grpc_options import server_options
from common.message_bounds import check_message
from penstock.client.grpc_errors import ErrorServerInterceptor
from penstock.client.keyring import Token


def make_server(
    token: Token = "", before: Sequence[grpc.aio.ServerInterceptor] = ()
) -> grpc.aio.Server:
    """A server that listens nowhere yet; errors of its services become statuses.

    Its services see no request that goes beyond the bounds of its fields.

    Args:
        token: who calls must carry it, "" = everybody may call.
        before: see calls first.
    """
    return grpc.aio.server(  # noqa: TID251 - the one place
        options=server_options(),
        interceptors=[*before, *server_interceptors(token), ErrorServerInterceptor(check_message)],
    )
