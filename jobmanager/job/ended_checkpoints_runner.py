"""Deletes the checkpoints of jobs that have ended for good, however often it must be tried.

What cannot be deleted now (its storage is not mounted, or does not answer) is tried again after pauses that
double up to a bound, by the next JobManager as well: the job's record stays until its checkpoints are gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from jobmanager.checkpoint.checkpoint_store_runner import CheckpointStoreRunner
from jobmanager.checkpoint.store_calls_runner import StoreCallsRunner
from jobmanager.installed_version import penstock_version
from jobmanager.stores.job_store import JobStore
from penstock.errors import StreamError
from penstock.pb import graph_pb2
from penstock.storage.local_store import LocalStore

_FIRST_PAUSE_S: Final = 1.0
_LAST_PAUSE_S: Final = 300.0
_CALL_TIMEOUT_MS: Final = 600_000


async def delete_checkpoints(
    job_id: str,
    graph: graph_pb2.JobGraph,
    directory: str,
    jobs: JobStore,
    now_ms: Callable[[], int],
) -> None:
    """Returns when nothing is left of a job's checkpoints, and its record is gone.

    Args:
        job_id: the job; nothing of it runs any more.
        graph: its graph.
        directory: of its checkpoints; "" = it has none.
        jobs: has its record.
        now_ms: the wall clock.
    """
    log = structlog.get_logger(__name__).bind(job_id=job_id)
    calls = StoreCallsRunner(f"job {job_id}", _CALL_TIMEOUT_MS, lambda: None)
    pause_s = _FIRST_PAUSE_S
    while True:
        store = CheckpointStoreRunner(
            job_id,
            graph,
            LocalStore(Path(directory)),
            leader_epoch=jobs.leader_epoch,
            version=penstock_version(),
            now_ms=now_ms,
        )
        try:
            if directory:
                await calls.run("discard", partial(discard, job_id, store, jobs))
            jobs.remove(job_id)
        except (StreamError, OSError) as error:
            log.warning("checkpoints.not_deleted", retry_s=pause_s, reason=str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        else:
            return


def discard(job_id: str, store: CheckpointStoreRunner, jobs: JobStore) -> None:
    """Tries once; blocks.

    HEAD goes last, and that nothing but HEAD is left is noted before: that it is missing means otherwise that
    the storage is another one, or is not there.

    Raises:
        StreamError: something is left.
    """
    must_exist = jobs.has_checkpoints(job_id) and not jobs.is_emptied(job_id)
    store.discard(must_exist=must_exist, emptied=partial(jobs.note_emptied, job_id))
