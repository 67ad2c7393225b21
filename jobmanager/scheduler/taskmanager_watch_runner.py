"""Watches whether one TaskManager can be reached, and probes it when there is doubt.

Doubt comes from its own connection, which broke, and from peers, which cannot reach one of its
slots. Invariants: at most one probe is under way; whatever asks for one while it runs is answered by the
next; after a refused probe nothing is watched any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from jobmanager.liveness.reachability import JOBMANAGER, Reachability, doubts
from jobmanager.rpc.reachability_client import ReachabilityClient

_PROBE_TIMEOUT_S = 0.3


class TaskManagerWatch:
    """The watch over one TaskManager.

    Args:
        on_refused: it is gone.
        on_doubt: a witness could not reach it.
    """

    def __init__(
        self,
        connection: ReachabilityClient,
        on_refused: Callable[[], None],
        on_doubt: Callable[[str], None],
    ) -> None:
        self._connection = connection
        self._on_refused = on_refused
        self._on_doubt = on_doubt
        self._askers: set[str] = set()
        self._asked = asyncio.Event()
        self.probe_count = 0

    def ask(self, witness: str) -> None:
        """Has it probed.

        Args:
            witness: the TaskManager that could not reach it, or ``JOBMANAGER``.
        """
        self._askers.add(witness)
        self._asked.set()

    async def run(self) -> None:
        """Watches until it is gone, or until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch_connection())
            await self._probe_until_refused()
            watching.cancel()

    async def _watch_connection(self) -> None:
        while True:
            await self._connection.wait_until_broken()
            self.ask(JOBMANAGER)

    async def _probe_until_refused(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            askers, self._askers = self._askers, set()
            self.probe_count += 1
            found = await self._connection.probe(_PROBE_TIMEOUT_S)
            if found is Reachability.REFUSED:
                self._on_refused()
                return
            for witness in doubts(found, askers - {JOBMANAGER}):
                self._on_doubt(witness)
