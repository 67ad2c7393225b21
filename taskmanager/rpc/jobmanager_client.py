"""Calls to the JobManager: one channel per address, deadlines, our error classes.

A call either returns, or raises one of our errors; ``StoreTransient`` (unreachable, deadline) is the
one that may be tried again. Which address leads is found out by registering.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from common.daemon_channel import DaemonChannel
from common.grpc_options import channel_options
from common.message_bounds import check_message
from common.pb import internal_pb2, internal_pb2_grpc
from common.tls.daemon_tls_runner import DaemonTls
from penstock.client.client_tls import speaks_tls
from penstock.client.grpc_errors import BROKEN, UNANSWERED, error_from_rpc, is_ours
from penstock.client.keyring import Token, keyring_of
from penstock.errors import NotLeader, StoreTransient, StreamError, Unauthenticated

_Answer = TypeVar("_Answer", bound=Message)
_PIECE_TIMEOUT_S = 30.0
_TOLD_MAX = 10
_SPEAKS_TLS = "speaks TLS: set security.ssl.internal.enabled, .cert, .key and .ca here"


class JobManagerClient:
    """The JobManagers at some addresses, one of which is being talked to.

    Args:
        addresses: host:port each.
        token: the cluster's secret, "" without one.
        timeout_s: deadline of a call that names none.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        token: Token,
        timeout_s: float,
        tls: DaemonTls | None = None,
    ) -> None:
        assert addresses, "there is at least one JobManager"
        self._addresses = list(addresses)
        self._current = 0
        self._timeout_s = timeout_s
        self._keyring = keyring_of(token)
        self._tls = tls
        self._channel: DaemonChannel | None = None
        self._silent, self._told = "", 0
        """Who has not answered last, and how often it was told of since."""

    @property
    def address(self) -> str:
        """The address being talked to."""
        return self._addresses[self._current]

    @property
    def token_may_change(self) -> bool:
        """Whether one that is refused now may be accepted later."""
        return bool(self._keyring.place)

    @property
    def alternatives(self) -> list[str]:
        """The other addresses."""
        return [one for one in self._addresses if one != self.address]

    @property
    def has_alternatives(self) -> bool:
        """Whether there is another address to try."""
        return bool(self.alternatives)

    async def switch(self, why: StreamError) -> None:
        """Talks to another address from now on: to the leader's where a standby has told it, else to the next.

        Of a leader that has just been silent standbys may tell some more times before it is asked again: another
        leads as soon as one of them does.

        Args:
            why: what the last call raised.
        """
        if not isinstance(why, NotLeader):
            self._silent, self._told = self.address, 0
        elif why.leader == self._silent and self._told < _TOLD_MAX:
            self._told += 1
            return
        if isinstance(why, NotLeader) and why.leader:
            await self.turn_to(why.leader)
        else:
            await self.turn_to(self._addresses[(self._current + 1) % len(self._addresses)])

    async def turn_to(self, address: str) -> None:
        """Talks to this address from now on."""
        await self.close()
        if address not in self._addresses:
            self._addresses.append(address)
        self._current = self._addresses.index(address)

    async def wait_broken(self) -> None:
        """Waits until the connection that calls go over breaks."""
        if self._channel is None:
            await asyncio.Event().wait()
        else:
            await self._channel.wait_broken()

    async def close(self) -> None:
        """Closes the channel; calls under way fail."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def register(
        self, request: internal_pb2.RegisterTaskManagerRequest
    ) -> internal_pb2.RegisterTaskManagerResponse:
        """Offers this TaskManager's slots.

        Raises:
            StoreTransient: nobody has answered; says so where that is for want of TLS.
        """
        address = self.address
        try:
            return await self._call(self._stub().RegisterTaskManager, request)
        except StoreTransient as error:
            is_plain = self._tls is None and BROKEN in str(error)
            if is_plain and await asyncio.to_thread(speaks_tls, address):
                raise StoreTransient(f"the JobManager at {address} {_SPEAKS_TLS}") from error
            raise

    async def heartbeat(
        self, request: internal_pb2.HeartbeatRequest, timeout_s: float
    ) -> internal_pb2.HeartbeatResponse:
        """Says that this TaskManager lives."""
        return await self._call(self._stub().Heartbeat, request, timeout_s)

    async def heartbeat_at(
        self, address: str, request: internal_pb2.HeartbeatRequest, timeout_s: float
    ) -> internal_pb2.HeartbeatResponse:
        """The same, to another address; who is talked to stays."""
        channel = self._connect(address)
        try:
            return await self._call(_stub_of(channel).Heartbeat, request, timeout_s, channel)
        finally:
            await channel.close()

    async def report(self, request: internal_pb2.ReportTaskEventsRequest) -> None:
        """Hands events over; when this returns, they are the JobManager's."""
        await self._call(self._stub().ReportTaskEvents, request)

    async def push_results(
        self, request: internal_pb2.PushResultsRequest, timeout_s: float
    ) -> internal_pb2.PushResultsResponse:
        """Hands rows over; returns when there is room for more."""
        return await self._call(self._stub().PushResults, request, timeout_s)

    async def goodbye(self, request: internal_pb2.GoodbyeRequest, timeout_s: float) -> None:
        """Says that this TaskManager ends."""
        await self._call(self._stub().Goodbye, request, timeout_s)

    async def download_artifact(self, artifact_id: str) -> AsyncIterator[bytes]:
        """The pieces of an artifact.

        Raises:
            StreamError: the JobManager does not have it, or stopped sending.
        """
        call = self._stub().DownloadArtifact(internal_pb2.DownloadArtifactRequest(id=artifact_id))
        pieces = aiter(call)
        try:
            while True:
                async with asyncio.timeout(_PIECE_TIMEOUT_S):
                    piece = await anext(pieces)
                yield piece.data
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise StoreTransient(
                f"artifact {artifact_id}: the JobManager at {self.address} sent nothing for "
                f"{_PIECE_TIMEOUT_S:.0f} s"
            ) from error
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            raise self._closed() from error
        finally:
            call.cancel()

    def _stub(self) -> internal_pb2_grpc.JobManagerInternalAsyncStub:
        if self._channel is None:
            self._channel = self._connect(self.address)
        return _stub_of(self._channel)

    def _connect(self, address: str) -> DaemonChannel:
        return DaemonChannel(address, self._keyring, channel_options(), self._tls)

    async def _call(
        self,
        method: Callable[..., Awaitable[_Answer]],
        request: object,
        timeout_s: float | None = None,
        channel: DaemonChannel | None = None,
    ) -> _Answer:
        over = channel or self._channel
        try:
            answer = await method(request, timeout=timeout_s or self._timeout_s)
        except grpc.aio.AioRpcError as error:
            if (
                over is not None
                and over.refusal
                and not is_ours(error)
                and error.code() in UNANSWERED
            ):
                raise StoreTransient(over.refusal) from error
            raise error_from_rpc(error) from error
        except grpc.aio.UsageError as error:
            raise self._closed() from error
        except asyncio.CancelledError as error:
            # Closing a channel cancels the calls on it, not the task that awaits them.
            if _is_cancelled():
                raise
            raise self._closed() from error
        check_message(answer)
        return answer

    def _closed(self) -> StoreTransient:
        return StoreTransient("the channel to the JobManager was closed during the call")


def _stub_of(channel: DaemonChannel) -> internal_pb2_grpc.JobManagerInternalAsyncStub:
    stub: internal_pb2_grpc.JobManagerInternalAsyncStub = internal_pb2_grpc.JobManagerInternalStub(
        channel.channel
    )
    return stub


def _is_cancelled() -> bool:
    """Whether the current task itself is cancelled, not only what it awaits."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def is_transient(error: StreamError) -> bool:
    """True when the same call may succeed later; with another token, too."""
    return isinstance(error, (StoreTransient, NotLeader, Unauthenticated))
