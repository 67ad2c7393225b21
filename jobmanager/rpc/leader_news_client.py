"""Tells TaskManagers that have not registered who leads.

One may be registered with a JobManager that leads no more: where that is only paused, or cut off from ZooKeeper and
from LEADER but not from the TaskManager, nothing else tells it so. It asks this JobManager before it believes it.
"""

from __future__ import annotations

import grpc
import grpc.aio

from common.daemon_channel import DaemonChannel
from common.grpc_options import channel_options
from common.pb import internal_pb2, internal_pb2_grpc
from common.tls.daemon_tls_runner import DaemonTls
from penstock.client.grpc_errors import error_from_rpc
from penstock.client.keyring import Token


class LeaderNewsClient:
    """The news that this JobManager leads.

    Args:
        news: they.
        token: the cluster's secret, "" without one.
    """

    def __init__(
        self, news: internal_pb2.HearOfLeaderRequest, token: Token, tls: DaemonTls | None = None
    ) -> None:
        self._news = news
        self._token = token
        self._tls = tls

    async def tell(self, address: str, timeout_s: float) -> None:
        """Tells one TaskManager.

        Args:
            address: host:port.
            timeout_s: for it to hear.

        Raises:
            StreamError: it has not heard.
        """
        channel = DaemonChannel(address, self._token, channel_options(), self._tls)
        stub: internal_pb2_grpc.TaskManagerInternalAsyncStub = (
            internal_pb2_grpc.TaskManagerInternalStub(channel.channel)
        )
        try:
            await stub.HearOfLeader(self._news, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        finally:
            await channel.close()
