"""The life of a JobManager among several: standby, leader, over.

ZooKeeper proposes (``zookeeper_runner.py``), LEADER in the storage disposes (``leader_store.py``): who is elected
and cannot swap LEADER leads nothing. A leader looks at LEADER again and again. When its session is over, or LEADER is
another's, the process ends at once and without a word to anybody: whatever it believed may be wrong.

Storage may hang. A call that is given up on may come yet; invariant: none that was given up on takes LEADER over once
a later one has.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, NoReturn

import structlog

from common.clock import Clock
from common.outage_log import OutageLog
from jobmanager.checkpoint.store_calls_runner import StoreCallsRunner
from jobmanager.leadership.election import (
    Elected,
    ElectionEvent,
    LeaderTold,
    Suspended,
    reason_to_end,
)
from jobmanager.leadership.election_span import ElectionStory
from jobmanager.leadership.leadership_numbers import LeadershipNumbers, ZookeeperState
from jobmanager.leadership.standby_runner import StandbyRunner
from jobmanager.leadership.zookeeper_runner import ZookeeperRunner, place_of_election
from jobmanager.stores.leader_store import LeaderStore, named
from jobmanager.traces.span import ReportSpan, Value
from penstock.config import Configuration
from penstock.errors import StreamError
from penstock.storage.swapped_object import NewerLeader

_PAUSE_S: Final = 1.0
_CALL_TIMEOUT_MS: Final = 20_000
_LAST_LOOK_S: Final = 5.0


class LeadershipRunner:
    """A JobManager's part in its cluster.

    Args:
        config: of the cluster.
        address: under which this one is reached.
        store: who leads, in the storage.
        end: ends the process, with the reason; never returns.
    """

    def __init__(
        self,
        config: Configuration,
        address: str,
        store: LeaderStore,
        end: Callable[[str], NoReturn],
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._story = ElectionStory()
        self._config = config
        self._store = store
        self._end = end
        store.when_deposed = self._deposed
        store.address, store.election = address, place_of_election(config)
        self._address = address
        self.standby = StandbyRunner(address)
        self.is_leading = False
        self.numbers = LeadershipNumbers(ZookeeperState.CONNECTING)
        self._calls = StoreCallsRunner("the leader", _CALL_TIMEOUT_MS, lambda: None)
        self._claiming = threading.Lock()
        self._claims = 0
        self._ending = threading.Lock()
        self._last_look: threading.Thread | None = None
        self._elected = asyncio.Event()
        self._election = ZookeeperRunner(config, address, self._heard)
        self._log = structlog.get_logger(__name__)

    def _heard(self, event: ElectionEvent) -> None:
        self._log.info("election.heard", heard=repr(event))
        self.numbers.hear(event)
        reason = reason_to_end(
            event,
            is_leading=self.is_leading,
            tolerates_suspension=self._config.high_availability_zookeeper_client_tolerate_suspended_connections,
        )
        if reason:
            self._end(reason)
        match event:
            case Elected():
                self._elected.set()
            case LeaderTold(leader):
                self.standby.leader = leader
            case Suspended() if self.is_leading:
                self._log.warning("election.suspended")
            case _:
                pass

    def _deposed(self, error: NewerLeader) -> None:
        """Where LEADER is still this one's, somebody has led who is not known there: the next epoch is above his.

        Other threads that hear of it meanwhile wait for the end, so that nobody is answered.
        """
        if threading.current_thread() is self._last_look:
            return
        with self._ending:
            if self._last_look is None:
                self._end(self._why_over(error))

    def _why_over(self, error: NewerLeader) -> str:
        """Looks once more, for a short time only, and names who leads where that is to be seen."""
        reasons = [str(error)]

        def look() -> None:
            try:
                self._store.verify()
                self._store.take_over(error.epoch)
            except NewerLeader as newer:
                reasons.append(str(newer))
            except StreamError:
                pass

        self._last_look = threading.Thread(target=look, name="last-look", daemon=True)
        self._last_look.start()
        self._last_look.join(_LAST_LOOK_S)
        return reasons[-1]

    async def lead(self) -> None:
        """Waits until this JobManager leads: it is elected, and has written LEADER."""
        self._election.start()
        watch = asyncio.ensure_future(
            self.standby.watch_leader(self._election.remove, self._looked)
        )
        try:
            await self._elected.wait()
            self._story.elected(self._clock.now_ms())
            await self._take_over()
            self._story.claimed(self._clock.now_ms())
        finally:
            watch.cancel()
        self.is_leading = True

    def _looked(self, is_reached: bool) -> None:
        self._story.looked(self._clock.now_ms(), is_reached=is_reached)

    def tell_election(self, report_span: ReportSpan) -> None:
        """Has it traced how this one came to lead, from now on with an answer for everybody."""
        before = self.standby.leader
        facts: dict[str, Value] = {
            "penstock.leader_epoch": self._store.epoch,
            "penstock.leader": self._address,
            "penstock.previous_leader": before.address if before else "",
        }
        report_span(self._story.span(self._clock.now_ms(), facts))

    async def _take_over(self) -> None:
        outage = OutageLog(self._log, "leader.not_written", "leader.written_again", "error")
        while True:
            leader = self.standby.leader
            try:
                self._claims += 1
                claim = partial(self._claim, self._claims, leader.epoch if leader else 0)
                await self._calls.run("take over", claim)
            except StreamError as error:
                self.standby.lacks = str(error)
                outage.failed(type(error).__name__, retry_s=_PAUSE_S, reason=str(error))
                await asyncio.sleep(_PAUSE_S)
            else:
                outage.worked()
                self.numbers.lead(self._store.epoch)
                self._log.info("leader.elected", leader_epoch=self._store.epoch)
                self._warn_of_another_election()
                return

    def _claim(self, number: int, epoch_min: int) -> None:
        """Takes LEADER over, if nobody has given this call up; waits for those before it."""
        with self._claiming:
            if number == self._claims:
                self._store.take_over(epoch_min)

    def _warn_of_another_election(self) -> None:
        before = self._store.followed
        if before.election not in ("", self._store.election):
            self._log.warning(
                "leader.elected_elsewhere",
                reason=f"the one before, {named(before)}, was not elected at {self._store.election}: where both are in "
                "use, two clusters share a high-availability.cluster-id in one storageDir, and take the jobs away from "
                "each other; give each an id of its own",
            )

    async def keep(self) -> None:
        """Says who leads, and looks at LEADER every ``heartbeat.interval``, until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._election.say(self._store.epoch))
            tasks.create_task(self._look_again_and_again())

    async def _look_again_and_again(self) -> None:
        looks = OutageLog(self._log, "leader.unreadable", "leader.readable_again", "error")
        while True:
            await asyncio.sleep(self._config.heartbeat_interval_ms / 1000)
            try:
                await self._calls.run("look", self._store.verify)
            except StreamError as error:  # but for NewerLeader, which ends the process
                # It may come back; whatever cannot be undone needs a swap there, and waits.
                looks.failed(reason=str(error))
            else:
                looks.worked()

    async def stop(self) -> None:
        """Hands over: the next one is elected at once."""
        await self._election.stop()
