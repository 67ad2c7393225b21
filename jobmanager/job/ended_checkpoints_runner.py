"""Deletes what is left of jobs that have ended for good, however often it must be tried: their checkpoints, and
hidden output of those that were cancelled.

What cannot be deleted now (its storage is not mounted, or does not answer) is tried again after pauses that
double up to a bound, by the next JobManager as well: until then the job's record does not say that it is clean.

Who still writes may write behind a deletion, which is repeated then: when all calls of this JobManager that were
given up on have returned, and when slot processes that it could not end have given up, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import structlog

from jobmanager.checkpoint.checkpoint_store_runner import CheckpointStoreRunner
from jobmanager.checkpoint.store_calls_runner import StoreCallsRunner
from jobmanager.installed_version import penstock_version
from jobmanager.stores.job_store import JobStore
from penstock.errors import StreamError
from penstock.pb import graph_pb2
from penstock.storage.open_store import open_store

_FIRST_PAUSE_S: Final = 1.0
_LAST_PAUSE_S: Final = 300.0
_CALL_TIMEOUT_MS: Final = 600_000
_WRITERS_PATIENCE_MS: Final = 10_000


async def delete_checkpoints(
    job_id: str,
    graph: graph_pb2.JobGraph,
    directory: str,
    jobs: JobStore,
    now_ms: Callable[[], int],
    *,
    writers: StoreCallsRunner | None = None,
    slots_end_s: float = 0.0,
    sweep: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Returns when nothing is left of a job's checkpoints and hidden output.

    Args:
        job_id: the job; no JobManager runs it any more.
        directory: of its checkpoints; "" = it has none.
        jobs: has its record.
        now_ms: the wall clock.
        writers: calls to the store that were made while it ran; None = there are none.
        slots_end_s: for how long slot processes of it may still write; 0 = all are known to have ended.
        sweep: tries once to have hidden output removed, raises a StreamError where some is left; None = there
            is none.
    """
    log = structlog.get_logger(__name__).bind(job_id=job_id)
    calls = StoreCallsRunner(f"job {job_id}", _CALL_TIMEOUT_MS, lambda: None)
    pause_s = _FIRST_PAUSE_S
    while True:
        failed = "checkpoints.not_deleted"
        store = CheckpointStoreRunner(
            job_id,
            graph,
            open_store(directory),
            leader_epoch=jobs.leader_epoch,
            version=penstock_version(),
            now_ms=now_ms,
        )
        try:
            if directory:
                late = writers if writers is not None and writers.hanging else None
                await calls.run("discard", partial(_discard, job_id, store, jobs))
                if late is not None:
                    await late.wait_for_all(_WRITERS_PATIENCE_MS)
                    continue
            if slots_end_s and (directory or sweep is not None):
                await asyncio.sleep(slots_end_s)
                slots_end_s = 0.0
                continue
            if sweep is not None:
                failed = "output.not_swept"
                await sweep()
                sweep = None
        except (StreamError, OSError) as error:
            log.warning(failed, retry_s=pause_s, reason=str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        else:
            return


def _discard(job_id: str, store: CheckpointStoreRunner, jobs: JobStore) -> None:
    """Tries once; blocks.

    HEAD goes last, and that nothing but HEAD is left is noted before: that it is missing means otherwise that
    the storage is another one, or is not there.

    Raises:
        StreamError: something is left.
    """
    store.deletions.discard(
        must_exist=jobs.has_checkpoints(job_id),
        is_emptied=jobs.is_emptied(job_id),
        emptied=partial(jobs.note_emptied, job_id),
    )
