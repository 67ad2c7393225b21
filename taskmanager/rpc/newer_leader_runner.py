"""Finds the JobManager that leads in the place of one that still answers, and may not know that it leads no more, or that
lets wait for its answer.

It does not know where it is cut off from ZooKeeper and from LEADER, but not from this TaskManager. The new leader says itself that
it leads to those TaskManagers that run tasks; of one without tasks it knows nothing, so that one asks the other addresses every two
seconds, and one with tasks every ``heartbeat.timeout``. Both ask once a second while an answer is late, and go on waiting for it:
who is only slow is not left. Nobody is believed who does not answer as a newer leader of the same cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from common.log import get_logger
from common.outage_log import OutageLog
from common.pb import internal_pb2
from penstock.errors import NotLeader, StreamError
from taskmanager.rpc.jobmanager_client import JobManagerClient
from taskmanager.rpc.registration import LeaderReplaced, Registration

_PATIENCE_S = 1.5
"""For each call."""
_IDLE_S, _LATE_S = 2.0, 1.0
"""Between two searches of one that holds nothing, and while an answer is late; then also what makes it late."""


class NewerLeaderRunner:
    """See the module.

    Args:
        client: calls to JobManagers; turned to the newer leader.
    """

    def __init__(self, client: JobManagerClient) -> None:
        self._client = client
        self._told = ""
        self._shall_ask = asyncio.Event()
        """One has said that it leads, and where it is; or an answer is late."""
        self._searches = OutageLog(
            get_logger(__name__), "leader.not_found", "leader.answered", "info"
        )

    def hear(self, address: str) -> None:
        """A JobManager says that it leads; it is asked first of all."""
        self._told = address
        self._shall_ask.set()

    @contextmanager
    def asking_while_late(self) -> Iterator[None]:
        """Others are asked while the JobManager does not answer what it is asked in the block."""
        loop = asyncio.get_running_loop()
        late: list[asyncio.TimerHandle] = []

        def ask() -> None:
            self._shall_ask.set()
            late[:] = [loop.call_later(_LATE_S, ask)]

        late.append(loop.call_later(_LATE_S, ask))
        try:
            yield
        finally:
            late[0].cancel()

    async def find(
        self,
        registration: Registration,
        heartbeat: Callable[[], internal_pb2.HeartbeatRequest],
        is_idle: Callable[[], bool],
    ) -> None:
        """Looks for a newer leader until there is one, or until cancelled.

        Args:
            registration: with the JobManager that may lead no more.
            heartbeat: what is asked; says all that a heartbeat says, since the same JobManager may answer.
            is_idle: whether no JobManager can know of this TaskManager by the jobs that it has tasks of.

        Raises:
            LeaderReplaced: it has answered.
        """
        while True:
            within_s = registration.heartbeat_timeout_s
            waiting = await self._next_addresses(min(within_s, _IDLE_S) if is_idle() else within_s)
            asked = {self._client.address}
            while waiting:
                address = waiting.pop()
                if address not in asked:
                    asked.add(address)
                    waiting += await self._ask(address, registration, heartbeat())

    async def _next_addresses(self, within_s: float) -> list[str]:
        """Who has said that it leads, else, after some time or when an answer is late, all that are known."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._shall_ask.wait()
        self._shall_ask.clear()
        told, self._told = self._told, ""
        return [told] if told else list(self._client.alternatives)

    async def _ask(
        self, address: str, registration: Registration, heartbeat: internal_pb2.HeartbeatRequest
    ) -> list[str]:
        """Asks one JobManager; returns whom a standby names."""
        try:
            answer = await self._client.heartbeat_at(address, heartbeat, _PATIENCE_S)
        except NotLeader as error:
            return [error.leader] if error.leader else []
        except StreamError as error:
            self._searches.failed(address, jobmanager=address, reason=str(error))
            return []
        self._searches.worked(jobmanager=address)
        if registration.is_over_by(answer.cluster_id, answer.leader_epoch):
            await self._client.turn_to(address)
            raise LeaderReplaced(f"leader epoch {answer.leader_epoch} has begun")
        return []
