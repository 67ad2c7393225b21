"""A gRPC channel from one daemon to another, plain or through the daemon's TLS."""

from __future__ import annotations

import grpc
import grpc.aio

from common.auth import token_client_interceptors
from common.grpc_options import Options
from common.tls.daemon_tls_runner import DaemonTls
from penstock.client.keyring import Token


class DaemonChannel:
    """See the module.

    Args:
        address: host:port.
        token: the cluster's secret; a certificate takes its place.
        tls: of this daemon, None = it speaks plain.

    Attributes:
        channel: what stubs are made of.
    """

    def __init__(self, address: str, token: Token, options: Options, tls: DaemonTls | None) -> None:
        self._way = None if tls is None else tls.way_to(address)
        self.channel = grpc.aio.insecure_channel(
            address if self._way is None else self._way.target,
            options=options,
            interceptors=token_client_interceptors("" if tls else token),
        )

    @property
    def refusal(self) -> str:
        """Why there has just been no TLS connection, "" = nothing is known of that."""
        return "" if self._way is None else self._way.refusal

    async def wait_broken(self) -> None:
        """Waits until it is connected, if it is not, and then until it is so no more, or closed."""
        state, was_ready = self.channel.get_state(), False
        while not (was_ready or state is grpc.ChannelConnectivity.SHUTDOWN):
            was_ready = state is grpc.ChannelConnectivity.READY
            await self.channel.wait_for_state_change(state)
            state = self.channel.get_state()

    async def close(self) -> None:
        """Ends the channel and whatever is under way on it."""
        await self.channel.close(None)
        if self._way is not None:
            self._way.close()
