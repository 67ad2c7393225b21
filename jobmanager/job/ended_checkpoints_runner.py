"""Deletes what is left of jobs that have ended, however often it must be tried: checkpoints and hidden output of those
that are over for good; of others, which can be started again, what none of their checkpoints names.

What cannot be deleted now (its storage is not mounted, or does not answer) is tried again after pauses that
double up to a bound, by the next JobManager as well: until then the job's record does not say that it is clean.

Who still writes may write behind a deletion, which is repeated then: when all calls of this JobManager that were
given up on have returned, and when slot processes that it could not end have given up, too. What tasks acknowledge
behind the end of their job is read by nobody: what they had written for it is removed like that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

import structlog

from jobmanager.checkpoint.checkpoint_store_runner import CheckpointStoreRunner
from jobmanager.checkpoint.prepared_files import prepared_files
from jobmanager.checkpoint.store_calls_runner import StoreCallsRunner
from jobmanager.installed_version import penstock_version
from jobmanager.job.swept_output_runner import swept_sinks
from jobmanager.stores.job_store import JobStore
from penstock.errors import Fenced, StreamError, Unrecoverable
from penstock.pb import graph_pb2
from penstock.storage.manifest import decode_manifest
from penstock.storage.object_store import ObjectStore
from penstock.storage.open_store import open_store
from penstock.storage.snapshot_files import StoreSnapshotReader

_FIRST_PAUSE_S: Final = 1.0
_LAST_PAUSE_S: Final = 300.0
_CALL_TIMEOUT_MS: Final = 600_000
_WRITERS_PATIENCE_MS: Final = 10_000


_TRIES_FOR_RESTORABLE: Final = 8
"""So often it is tried to remove what no checkpoint of a job names that can be started again: it is in nobody's way."""
_BEYOND_ALL: Final = 2**62
"""No attempt and no checkpoint has such a number."""

Kept = Mapping[str, Collection[str]]
"""By the uid of a sink, last parts of the names of files that stay."""
_NOTHING: Final[Kept] = MappingProxyType({})


async def delete_checkpoints(
    job_id: str,
    graph: graph_pb2.JobGraph,
    directory: str,
    jobs: JobStore,
    now_ms: Callable[[], int],
    *,
    writers: StoreCallsRunner | None = None,
    slots_end_s: float = 0.0,
    sweep: Callable[[Kept], Awaitable[None]] | None = None,
    is_restorable: bool = False,
) -> None:
    """Returns when nothing is left of a job's checkpoints and hidden output; or, of one that can be started again,
    nothing but what it can be started from, or that was tried in vain.

    Args:
        job_id: the job; no JobManager runs it any more.
        directory: of its checkpoints; "" = it has none.
        jobs: has its record.
        now_ms: the wall clock.
        writers: calls to the store that were made while it ran; None = there are none.
        slots_end_s: for how long slot processes of it may still write; 0 = all are known to have ended.
        sweep: tries once to have hidden output removed, raises a StreamError where some is left; None = there
            is none.
        is_restorable: its checkpoints stay, with the output that they let be committed.
    """
    log = structlog.get_logger(__name__).bind(job_id=job_id)
    calls = StoreCallsRunner(f"job {job_id}", _CALL_TIMEOUT_MS, lambda: None)
    pause_s, kept, tries = _FIRST_PAUSE_S, _NOTHING, 0
    while True:
        failed, tries = "checkpoints.not_deleted", tries + 1
        work = _one_try(job_id, graph, directory, jobs, now_ms, is_restorable=is_restorable)
        try:
            if directory:
                late = writers if writers is not None and writers.hanging else None
                found = await calls.run("discard", work)
                if found is None:
                    return
                kept = found
                if late is not None:
                    await late.wait_for_all(_WRITERS_PATIENCE_MS)
                    continue
            if slots_end_s and (directory or sweep is not None):
                await asyncio.sleep(slots_end_s)
                slots_end_s = 0.0
                continue
            if sweep is not None:
                failed = "output.not_swept"
                await sweep(kept)
                sweep = None
        except (StreamError, OSError) as error:
            is_final = isinstance(error, Fenced | Unrecoverable) or tries >= _TRIES_FOR_RESTORABLE
            if is_restorable and is_final:
                log.warning(failed, reason=str(error))
                return
            log.warning(failed, retry_s=pause_s, reason=str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        else:
            return


def _one_try(
    job_id: str,
    graph: graph_pb2.JobGraph,
    directory: str,
    jobs: JobStore,
    now_ms: Callable[[], int],
    *,
    is_restorable: bool,
) -> Callable[[], Kept | None]:
    """A try to delete what is to be deleted in the store, which blocks; it returns which hidden files stay, None = all,
    or the job has never run."""
    opened = open_store(directory)
    store = CheckpointStoreRunner(
        job_id,
        graph,
        opened,
        leader_epoch=jobs.leader_epoch,
        version=penstock_version(),
        now_ms=now_ms,
    )

    def work() -> Kept | None:
        if not is_restorable:
            _discard(job_id, store, jobs)
            return _NOTHING
        return _keep_named(graph, store, opened) if jobs.has_checkpoints(job_id) else None

    return work


def _keep_named(
    graph: graph_pb2.JobGraph, store: CheckpointStoreRunner, directory: ObjectStore
) -> Kept | None:
    """Removes what no checkpoint names; returns the files that sinks have yet to commit, None = a savepoint may name others,
    for whoever is started from that. Blocks.

    Raises:
        Fenced: another leader, or another job, has the checkpoints.
        Unrecoverable: they cannot be read.
        StreamError: something is left.
    """
    prepared = store.starts.prepare(
        must_exist=True, ended_id=_BEYOND_ALL, first_attempt=_BEYOND_ALL
    )
    if prepared.sweep is None:
        raise Unrecoverable("not all of its checkpoints can be read: nobody knows what they name")
    prepared.sweep(())
    if prepared.open_savepoints:
        return None
    kept: dict[str, set[str]] = {sink.operator_uid: set() for sink in swept_sinks(graph)}
    untold: list[str] = []
    for path in [one.manifest_path for one in prepared.retained]:
        manifest = decode_manifest(directory.get(path), path)
        reader = StoreSnapshotReader(directory)
        for uid, file in prepared_files(manifest, kept, reader, untold.append):
            kept[uid].add(str(file["pending"]).rpartition("/")[2])
    if untold:
        raise Unrecoverable(f"which files sink {untold[0]} has yet to commit cannot be read")
    return kept


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
