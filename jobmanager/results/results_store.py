"""Collect buffers of all jobs, and the waiting on them.

A push waits for room, a fetch waits for rows. Rows of a job that takes checkpoints are handed out when a
completed one covers them. One client reads a collect sink, once: what a fetch
has taken is not here any more, so a second one would silently get the rest only. Rows of ended jobs
that nobody fetched are kept up to a bound over all jobs; the oldest go first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pyarrow as pa

from jobmanager.results.collect_buffer import Chunk, CollectBuffer, Sequences, Verdict
from penstock.errors import (
    Fenced,
    JobRejected,
    StoreNotFound,
    StoreTransient,
    Unrecoverable,
)
from penstock.pb import client_pb2
from penstock.storage.spill_store import SpillStore

BUFFER_BYTES_MAX = 16 * 1024 * 1024
SPILL_BYTES_MAX = 1024 * 1024 * 1024
ENDED_BYTES_MAX = 256 * 1024 * 1024


class ResultsOverflow(Unrecoverable):
    """More rows wait for a checkpoint than there is room for."""


class _Results:
    """One collect sink."""

    def __init__(self, limit: int, waits_for_commits: bool, *, is_held: bool) -> None:
        self.is_held = is_held
        """Nobody knows yet whose rows count."""
        spill = SpillStore() if waits_for_commits else None
        self.buffer = CollectBuffer(BUFFER_BYTES_MAX, limit, spill, SPILL_BYTES_MAX)
        self.attempts: dict[int, int] = {}
        """Per subtask the number of its current attempt, once it is not the first."""
        self.changed = asyncio.Event()
        self.ended = False
        self.dropped = False
        self.reading = False
        self.taken = False
        self.forgotten = False

    def wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class ResultsStore:
    """Rows of collect sinks on their way to clients."""

    def __init__(self) -> None:
        # In order of the jobs' acceptance.
        self._results: dict[tuple[str, str], _Results] = {}

    def open(
        self,
        job_id: str,
        limits: dict[str, int],
        takes_checkpoints: bool = False,
        *,
        is_held: bool = False,
    ) -> None:
        """A job with these collect sinks has been accepted.

        Args:
            limits: collect id -> limit of rows, 0 = none.
            takes_checkpoints: rows wait until one covers them.
            is_held: none are taken before ``release``: an earlier JobManager has run the job.
        """
        for collect_id, limit in limits.items():
            self._results[job_id, collect_id] = _Results(limit, takes_checkpoints, is_held=is_held)

    def release(self, job_id: str, attempts: Sequences) -> None:
        """It is known what of the job goes on.

        Args:
            attempts: collect id -> subtask index -> number of the oldest that counts.
        """
        for (owner, collect_id), results in self._results.items():
            if owner == job_id:
                results.is_held = False
                results.attempts |= attempts.get(collect_id, {})
                results.wake()

    def commit(self, job_id: str, sequences: Sequences) -> None:
        """A checkpoint is complete that covers the chunks below these sequence numbers."""
        for collect_id, by_subtask in sequences.items():
            results = self._results.get((job_id, collect_id))
            if results is not None and not results.ended:
                for subtask_index, sequence in by_subtask.items():
                    results.buffer.commit(subtask_index, sequence)
                results.wake()

    def restart(self, job_id: str, attempt: int, sequences: Sequences) -> None:
        """New attempts begin and send from these sequence numbers on; older ones of the same subtasks are
        stale.

        Of a job without checkpoints rows that were handed out before come again.
        """
        for collect_id, by_subtask in sequences.items():
            results = self._results.get((job_id, collect_id))
            if results is not None:
                for subtask_index, sequence in by_subtask.items():
                    results.attempts[subtask_index] = attempt
                    results.buffer.begin_again(subtask_index, sequence)
                results.wake()

    def end(self, job_id: str, is_finished: bool = False) -> None:
        """The job has ended: nothing will be pushed any more.

        Args:
            is_finished: it ended well, so that all its rows count.
        """
        for (owner, _), results in self._results.items():
            if owner == job_id and not results.ended:
                results.ended = True
                if is_finished:
                    results.buffer.commit_all()
                else:
                    results.buffer.drop_uncommitted()
                results.wake()
        self._shrink()

    def forget(self, job_id: str) -> None:
        """The job is no longer known; who reads its rows gets the rest of them."""
        self.end(job_id)
        for key in [key for key in self._results if key[0] == job_id]:
            results = self._results.pop(key)
            results.forgotten = True
            if not results.reading:
                results.buffer.clear()

    async def push(
        self,
        job_id: str,
        collect_id: str,
        chunk: client_pb2.ResultChunk,
        deadline_s: float,
        attempt: int = 0,
    ) -> bool:
        """Takes rows of a subtask, when there is room.

        Returns:
            True when the limit is reached and the sink may drop the rest.

        Raises:
            StoreTransient: there was no room until the deadline; push it again.
            Fenced: no such sink, or an attempt that is over.
            ResultsOverflow: too many rows wait for a checkpoint.
        """
        results = self._results.get((job_id, collect_id))
        if results is None:
            raise Fenced(f"job {job_id} has no collect sink {collect_id!r} (any more)")
        subtask_index, sequence = chunk.subtask_index, chunk.sequence
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    if results.ended:
                        return True
                    if results.is_held:
                        await results.changed.wait()
                        continue
                    if attempt < results.attempts.get(subtask_index, 0):
                        raise Fenced(f"attempt {attempt} of job {job_id} is over")
                    verdict = results.buffer.verdict(subtask_index, sequence, len(chunk.arrow))
                    if verdict is not Verdict.FULL:
                        break
                    await results.changed.wait()
        except TimeoutError as error:
            raise StoreTransient(
                f"the client does not read collect {collect_id!r} of job {job_id}: push again"
            ) from error
        if verdict is Verdict.OVERFLOW:
            raise ResultsOverflow(
                f"collect {collect_id!r}: more than {SPILL_BYTES_MAX >> 20} MB of rows wait for a "
                "checkpoint to cover them: lower execution.checkpointing.interval, or write them to "
                "files instead"
            )
        if verdict is Verdict.TAKEN:
            data, rows = _cut(chunk.arrow, results.buffer.rows_wanted)
            results.buffer.take(Chunk(subtask_index, sequence, data, rows))
            results.wake()
        elif verdict is Verdict.SATISFIED:
            results.buffer.skip(subtask_index, sequence)
        return results.buffer.satisfied

    async def fetch(self, job_id: str, collect_id: str) -> AsyncIterator[client_pb2.ResultChunk]:
        """Rows in order per subtask; ends when the job has ended and all are sent.

        Raises:
            StoreNotFound: no such sink, or its rows had to be dropped, or another fetch took some.
            JobRejected: somebody else reads it.
        """
        results = self._results.get((job_id, collect_id))
        if results is None:
            raise StoreNotFound(
                f"job {job_id} has no rows of {collect_id!r} here: they were held by a JobManager that has ended, or "
                "the job is not listed any more (jobmanager.retained-jobs): run the job again, or write them to files"
            )
        if results.reading:
            raise JobRejected(f"collect {collect_id!r} of job {job_id} is being read already")
        if results.taken:
            raise StoreNotFound(
                f"rows of collect {collect_id!r} of job {job_id} were taken by an earlier fetch, "
                "which may have broken off: run the job again"
            )
        results.reading = True
        try:
            while True:
                if results.buffer.has_lost_rows:
                    raise StoreNotFound(
                        f"rows of collect {collect_id!r} of job {job_id} were held by a JobManager "
                        "that has ended: run the job again, or write them to files"
                    )
                if results.dropped:
                    raise StoreNotFound(
                        f"rows of collect {collect_id!r} of job {job_id} were dropped because "
                        "nobody fetched them: run the job again"
                    )
                chunk = results.buffer.pop()
                if chunk is not None:
                    results.taken = True
                    results.wake()
                    yield client_pb2.ResultChunk(
                        subtask_index=chunk.subtask_index,
                        sequence=chunk.sequence,
                        arrow=chunk.data,
                    )
                elif results.ended:
                    return
                else:
                    await results.changed.wait()
        finally:
            results.reading = False
            if results.forgotten:
                results.buffer.clear()

    def _shrink(self) -> None:
        idle = [results for results in self._results.values() if results.ended]
        excess = sum(results.buffer.size_bytes for results in idle) - ENDED_BYTES_MAX
        for results in idle:
            if excess <= 0:
                return
            if not results.reading and results.buffer.size_bytes:
                excess -= results.buffer.size_bytes
                results.buffer.clear()
                results.dropped = True


def _cut(data: bytes, rows_wanted: int | None) -> tuple[bytes, int]:
    """The chunk with at most ``rows_wanted`` rows, and how many those are (0 where nobody counts)."""
    if rows_wanted is None:
        return data, 0
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        table = reader.read_all()
    if table.num_rows <= rows_wanted:
        return data, table.num_rows
    table = table.slice(0, rows_wanted)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes(), table.num_rows
