"""A connection to a TaskManager that is there to break when the TaskManager is gone.

It is apart from the one that carries the calls: it is pinged impatiently, so that a peer that vanished
without closing anything is noticed within two seconds, and no call fails because of a pause.
"""

from __future__ import annotations

import asyncio
import socket

import grpc
import grpc.aio

from common.daemon_channel import DaemonChannel
from common.grpc_options import channel_options
from common.pb import internal_pb2, internal_pb2_grpc
from common.tls.daemon_tls_runner import DaemonTls
from jobmanager.liveness.reachability import Reachability
from penstock.client.addresses import parse_address
from penstock.client.keyring import Token
from penstock.errors import ConfigurationError

_State = grpc.ChannelConnectivity
_BROKEN = (_State.IDLE, _State.TRANSIENT_FAILURE, _State.SHUTDOWN)
_RETRY_S = 0.02
_UNANSWERED = (
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
)


class ReachabilityClient:
    """Notices that a TaskManager may be gone, and finds out whether it is.

    Args:
        address: host:port.
        token: the cluster's secret, "" without one.
        leader_epoch: fence of the calls.
        incarnation: which start of the TaskManager they are for.
    """

    def __init__(
        self,
        address: str,
        *,
        token: Token,
        leader_epoch: int,
        incarnation: str,
        tls: DaemonTls | None = None,
    ) -> None:
        self.address = address
        self._leader_epoch = leader_epoch
        self._incarnation = incarnation
        self._to_taskmanager = DaemonChannel(address, token, channel_options(), tls)
        self._channel = self._to_taskmanager.channel
        self._stub: internal_pb2_grpc.TaskManagerInternalAsyncStub = (
            internal_pb2_grpc.TaskManagerInternalStub(self._channel)
        )
        self._state = self._channel.get_state(try_to_connect=True)

    async def wait_until_broken(self) -> None:
        """Returns when the connection has broken, or could once more not be made.

        Attempts to make it again go on by themselves, at growing distances of up to a second.
        """
        while True:
            await self._channel.wait_for_state_change(self._state)
            self._state = self._channel.get_state(try_to_connect=True)
            if self._state in _BROKEN:
                return

    async def probe(self, timeout_s: float) -> Reachability:
        """Asks the kernel for a connection, then the daemon for an answer.

        A process that is just ending may still have connections taken for it: a call that fails because
        its connection broke asks the kernel again.

        Args:
            timeout_s: for a connection, and for an answer.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            failed = await why_not_connected(self.address, timeout_s)
            if failed is not None:
                return failed
            left_s = deadline_s - asyncio.get_running_loop().time()
            code = await self._call(max(left_s, 0))
            if code not in _UNANSWERED:
                # An error that the daemon itself has sent is an answer, too.
                return Reachability.ANSWERED
            if code is not grpc.StatusCode.UNAVAILABLE or left_s < _RETRY_S:
                return Reachability.SILENT
            await asyncio.sleep(_RETRY_S)

    async def _call(self, timeout_s: float) -> grpc.StatusCode:
        """How a call that changes nothing ended."""
        nothing = internal_pb2.SendTaskCommandsRequest(
            leader_epoch=self._leader_epoch, incarnation=self._incarnation
        )
        try:
            await self._stub.SendTaskCommands(nothing, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async def close(self) -> None:
        """Ends the channel and whatever is under way on it."""
        await self._to_taskmanager.close()


async def why_not_connected(address: str, timeout_s: float) -> Reachability | None:
    """Makes a connection and closes it; None when it could be made.

    Args:
        address: host:port.
        timeout_s: for it to be made.
    """
    try:
        host, port = parse_address(address)
    except ConfigurationError:
        return Reachability.UNREACHABLE
    loop = asyncio.get_running_loop()
    refused_count = 0
    try:
        async with asyncio.timeout(timeout_s):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            for family, kind, protocol, _, found_at in found:
                with socket.socket(family, kind, protocol) as connection:
                    connection.setblocking(False)
                    try:
                        await loop.sock_connect(connection, found_at)
                    except ConnectionRefusedError:
                        refused_count += 1
                    except OSError:
                        continue  # no route to this one of its addresses
                    else:
                        return None
    except (TimeoutError, OSError):
        return Reachability.UNREACHABLE
    is_refused = refused_count == len(found)
    return Reachability.REFUSED if is_refused else Reachability.UNREACHABLE
