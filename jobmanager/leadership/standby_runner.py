"""What a JobManager does until it leads: it answers every call with the leader's address, and sees whether that lives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
import structlog
from typing_extensions import override

from jobmanager.leadership.election import LeaderNode
from penstock.client.addresses import parse_address
from penstock.errors import NotLeader

_PROBE_INTERVAL_S: Final = 0.5
_PROBE_TIMEOUT_S: Final = 1.0


class StandbyRunner:
    """A standby."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.leader: LeaderNode | None = None
        """Who leads, as far as it was told."""
        self.lacks = ""
        """Why it does not lead although it was elected, if so."""
        self._dead: LeaderNode | None = None
        """Whose port was refused at the last look."""
        self._log = structlog.get_logger(__name__)

    @property
    def status(self) -> str:
        """What it says of itself."""
        return f"standby; {self._leads}"

    @property
    def why_not_serving(self) -> str:
        """ "" while it sees a leader."""
        return "" if self._seen is not None else self.status

    @property
    def _seen(self) -> LeaderNode | None:
        """Who leads and may live; a leader at this address has been this process before."""
        leader = self.leader
        is_gone = leader is None or leader == self._dead or leader.address == self._address
        return None if is_gone else leader

    @property
    def _leads(self) -> str:
        if self._seen is not None:
            return f"{self._seen.address} leads"
        last = f"; {self.leader.address} led last, and is gone" if self.leader else ""
        elected = f"; this one was elected, and cannot lead: {self.lacks}" if self.lacks else ""
        return f"no JobManager is known to lead{last}{elected}"

    def answer_on(self, server: grpc.aio.Server) -> None:
        """Refuses every call of every service; of ``DaemonServer.serve``."""
        server.add_generic_rpc_handlers((_RefusingHandler(self._refuse),))

    async def _refuse(self, _request: object, _context: object) -> AsyncIterator[Any]:
        raise NotLeader(
            f"the JobManager at {self._address} is a standby: {self._leads}",
            self._seen.address if self._seen else "",
        )
        yield  # makes it what gRPC expects

    async def watch_leader(
        self, is_dead: Callable[[LeaderNode], Awaitable[None]], looked: Callable[[bool], None]
    ) -> None:
        """Tells, again and again, of a leader whose port is refused: no process of its address leads.

        Args:
            is_dead: told which.
            looked: told each time whether somebody listens there.
        """
        said: LeaderNode | None = None
        while True:
            await asyncio.sleep(_PROBE_INTERVAL_S)
            leader = self.leader
            if leader is None or leader.address == self._address:
                continue
            failure = await _why_not_connected(leader)
            looked(failure is None)
            # Only a kernel that refuses proves that nobody is there; silence proves nothing.
            is_refused = isinstance(failure, ConnectionRefusedError)
            self._dead = leader if is_refused else None
            if is_refused:
                if leader != said:
                    self._log.warning("leader.refused_connection", leader=leader.address)
                    said = leader
                await is_dead(leader)


async def _why_not_connected(leader: LeaderNode) -> OSError | None:
    host, port = parse_address(leader.address)
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError as error:  # no answer in time, too
        return error
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return None


class _RefusingHandler(grpc.GenericRpcHandler):
    """Answers all methods the same way; a stream on both sides fits every kind of call."""

    def __init__(self, refuse: Callable[[Any, Any], AsyncIterator[Any]]) -> None:
        self._handler: Any = grpc.stream_stream_rpc_method_handler(refuse)

    @override
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handler
