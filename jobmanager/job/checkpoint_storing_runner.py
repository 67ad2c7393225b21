"""What the coordinator of one job wants done to the store, on its way there and back: storing, settling, reserving
ids, deleting.

A start waits for a checkpoint that is being stored, since it must not go on from an older one that is about to be
subsumed; where that takes too long, HEAD is claimed again, and the checkpoint settled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Final

import structlog

from common.clock import Clock
from common.outage_log import OutageLog
from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_store_runner import CheckpointStoreRunner
from jobmanager.checkpoint.store_calls_runner import StoreSilent
from jobmanager.job.collect_sinks import CollectSinks
from jobmanager.job.job_calls_runner import JobCallsRunner
from jobmanager.messages import job_effects, job_events
from jobmanager.results.results_store import ResultsStore
from penstock.errors import StoreTransient, StreamError
from penstock.storage.head import HeadOutcomeUnknown

_PATIENCE_S: Final = 10.0
"""How long a start waits for a checkpoint that is being stored."""


class CheckpointStoringRunner:
    """Stores the checkpoints of one job.

    Args:
        store: of its checkpoints.
        calls: to the store.
        post: takes events for the job's machine.
        fail: fails the job.
    """

    def __init__(
        self,
        job_id: str,
        store: CheckpointStoreRunner,
        calls: JobCallsRunner,
        collects: CollectSinks,
        results: ResultsStore,
        clock: Clock,
        post: Callable[[job_events.JobEvent], None],
        fail: Callable[[StreamError], None],
    ) -> None:
        self._job_id = job_id
        self._store = store
        self._calls = calls
        self._collects = collects
        self._results = results
        self._clock = clock
        self._post = post
        self._fail = fail
        self._patience_s = min(_PATIENCE_S, calls.timeout_ms / 1000)
        self._storing = 0
        """The checkpoint that is being stored; 0 = none is, or it is settled."""
        self._is_stored = asyncio.Event()
        self._is_stored.set()
        self._given_up: asyncio.Future[None] | None = None
        """Done where the checkpoint that is being stored is waited for no longer."""
        self._log = structlog.get_logger(__name__).bind(job_id=job_id)
        self._unsettled: c.StoreCheckpoint | None = None
        """Of which nobody knows yet whether it is stored; there is one at most."""
        self._settled: asyncio.Future[None] | None = None
        """Done when that is known, whoever has found it out."""
        self._settling = OutageLog(
            self._log, "checkpoint.not_settled", "checkpoint.settled_again", "warning"
        )
        self._reservations = OutageLog(
            self._log, "checkpoint.ids_not_reserved", "checkpoint.ids_reserved_again", "warning"
        )

    def begin(self, checkpoint_id: int) -> None:
        """A checkpoint is about to be stored: a start that comes next waits for it."""
        self._storing = checkpoint_id
        self._is_stored.clear()
        self._given_up = asyncio.get_running_loop().create_future()

    async def store(self, effect: job_effects.WriteManifest) -> None:
        """Stores what ``begin`` was told of; where that says nothing, finds out what has become of it."""
        store = self._store
        states = self._collects.last_states(key.subtask for key in effect.stored.finished)
        try:
            event = await self._calls.calls.run(
                "store",
                lambda: store.store(effect.stored, effect.done_splits, states, effect.done_before),
                self._given_up,
            )
        except (HeadOutcomeUnknown, StoreSilent) as error:
            await self._settle_at_last(effect.stored, error)
        except StreamError as error:
            self._fail(error)
        else:
            self._note_stored(effect.stored, event)
        finally:
            # Else a start has settled it, and the next one is about to be stored.
            if self._storing == effect.stored.checkpoint_id:
                self._storing = 0
                self._is_stored.set()

    async def _settle_at_last(self, wanted: c.StoreCheckpoint, unknown: StreamError) -> None:
        """Finds out what has become of a checkpoint, however long that takes; the job's tasks run on."""
        checkpoint_id = wanted.checkpoint_id
        self._store.give_up(checkpoint_id)
        now_ms = self._clock.now_ms()
        self._post(c.StoreOutcomeUnknown(checkpoint_id, str(unknown), now_ms))
        self._unsettled = wanted
        self._settled = settled = asyncio.get_running_loop().create_future()
        self._is_stored.set()
        for attempt in count():
            try:
                await self.settle()
            except StoreTransient as error:
                self._settling.failed(checkpoint_id=checkpoint_id, reason=str(error))
            except StreamError as error:
                self._fail(error)
                return
            else:
                self._settling.worked()
                return
            if not await self._calls.pause_after(attempt, settled):
                return

    async def settle(self) -> None:
        """Finds out what has become of the checkpoint of which that is not known; there need not be one.

        Raises:
            StreamError: it cannot be found out now.
        """
        store, wanted = self._store, self._unsettled
        if wanted is None:
            return
        checkpoint_id, settled = wanted.checkpoint_id, self._settled
        assert settled is not None, "it is made where the outcome becomes unknown"
        try:
            event = await self._calls.run("settle", lambda: store.settle(checkpoint_id), settled)
        except StreamError:
            if settled.done():
                return
            raise
        if not settled.done():  # else it was found out meanwhile
            self._unsettled = None
            settled.set_result(None)
            is_stored = isinstance(event, c.CheckpointStored)
            self._log.info("checkpoint.settled", checkpoint_id=checkpoint_id, is_stored=is_stored)
            self._note_stored(wanted, event)

    def _note_stored(
        self, wanted: c.StoreCheckpoint, event: c.CheckpointStored | c.CheckpointNotStored
    ) -> None:
        if isinstance(event, c.CheckpointStored):
            sequences = self._collects.committed(wanted.snapshots)
            self._results.commit(self._job_id, sequences)
        self._post(event)

    async def reserve_ids(self) -> None:
        """Has HEAD reserve ids for checkpoints."""
        event: c.IdsReserved | c.IdsNotReserved
        try:
            end = await self._calls.run("reserve ids", self._store.reserve_ids)
        except StoreTransient as error:
            self._reservations.failed(reason=str(error))
            event = c.IdsNotReserved(str(error), self._clock.now_ms())
        except StreamError as error:
            self._fail(error)
            return
        else:
            self._reservations.worked()
            event = c.IdsReserved(end, self._clock.now_ms())
        self._post(event)

    async def delete(self, effect: c.DeleteFiles) -> None:
        """Deletes what no checkpoint names any more."""
        store = self._store
        try:
            event = await self._calls.run("delete", lambda: store.deletions.delete(effect.paths))
        except StoreSilent as error:
            if not self._calls.ended.is_set():
                self._log.warning("checkpoint.not_deleted", reason=str(error))
            event = c.FilesDeleted(effect.paths, self._clock.now_ms())
        self._post(event)

    async def wait(self) -> None:
        """Waits until nothing is being stored; where that takes too long, it is given up on."""
        try:
            async with asyncio.timeout(self._patience_s):
                await self._is_stored.wait()
        except TimeoutError:
            self.give_up()

    def give_up(self) -> None:
        """Whoever prepares, or settles, claims HEAD again, and finds what has become of the checkpoint."""
        if self._storing:
            self._store.give_up(self._storing)
        if self._given_up is not None and not self._given_up.done():
            self._given_up.set_result(None)
