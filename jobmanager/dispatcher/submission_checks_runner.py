"""What is looked at in stores before a job is accepted: not on the event loop, so that a mount that hangs holds up
nobody else, and with a deadline, so that its client gets an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from jobmanager.checkpoint.store_calls_runner import StoreCallsRunner, StoreSilent
from jobmanager.dispatcher.claimed_starts_runner import ClaimedStartsRunner
from jobmanager.dispatcher.job_start_runner import JobStart, prepare_start, starts_from
from jobmanager.dispatcher.known_jobs import KnownJobs
from jobmanager.job.job_description import JobDescription, check_checkpoint_directory
from jobmanager.scheduler.shared_spill_runner import SharedSpillRunner
from penstock.config import Configuration
from penstock.errors import JobRejected, StoreTransient, StreamError, Unrecoverable
from penstock.pb import graph_pb2
from penstock.storage.object_store import SwapUnanswered
from penstock.storage.open_store import is_s3, open_store, place_of

CHECK_TIMEOUT_MS: Final = 20_000  # less than clients wait for an answer

_ResultT = TypeVar("_ResultT")


class SubmissionChecksRunner:
    """Checks of submitted jobs.

    Args:
        config: of the cluster.
        starts: keeps what is claimed, and gives it back.
    """

    def __init__(self, config: Configuration, jobs: KnownJobs, starts: ClaimedStartsRunner) -> None:
        self._config = config
        self._jobs = jobs
        self._starts = starts
        self._calls = StoreCallsRunner("submitted jobs", CHECK_TIMEOUT_MS, lambda: None)
        starts.writers.append(self._calls)

    async def find_start(self, job_id: str, graph: graph_pb2.JobGraph) -> JobStart | None:
        """What the job starts from; None = from nothing.

        Raises:
            JobRejected: it cannot start from there.
            StreamError: that cannot be found out now.
        """
        path = starts_from(graph, self._config)
        if not path:
            return None
        await self._starts.undo(job_id)
        prepare = partial(prepare_start, job_id, graph, self._config)

        def look() -> JobStart:
            try:
                return prepare(self._jobs.has_unended, self._jobs.has_ended)
            except JobRejected as error:
                self._name_claimant(place_of(path), error)
                raise

        which = f"{path}, which it is to start from,"
        return await self._call("start", graph.name, which, look)

    def _name_claimant(self, place: str, error: JobRejected) -> None:
        """Says what has become of a place that cannot be started from, where that is known."""
        claimant = self._jobs.claimant(place)
        if claimant is not None and claimant not in str(error):
            raise JobRejected(
                f"{error}; job {claimant} was started from {place} and has claimed it: what it held is that job's own now "
                f"(`penstock savepoint {claimant}` takes a savepoint of it while it runs)"
            ) from error

    async def claim(self, start: JobStart, directory: str) -> None:
        """Makes what a job starts from its own, as far as it is to be, and says what becomes of output there. Where that
        does not come to its end, nothing stays of the job, and what it had claimed is given back.

        Args:
            directory: of its own checkpoints; "" = it has none.

        Raises:
            JobRejected: another job has claimed it, or needs it, or publishes its output.
            StoreTransient: it cannot be claimed now.
        """
        try:
            if start.is_claim:
                await self._claim(start)
            which = f"{start.point.uri}, which it is to start from,"
            starts, has_ended = self._starts, self._jobs.has_ended
            work = partial(start.claim_output, starts.note, starts.check_leads, has_ended)
            await self._call("claim output", start.graph.name, which, work)
        except StreamError as error:
            why = (error, error.__cause__)
            may_come = any(isinstance(one, StoreSilent | SwapUnanswered) for one in why)
            await self._starts.give_back(start.job_id, may_come=may_come)
            is_own = start.point.is_savepoint and directory != ""  # or else it is the other job's
            if is_own and isinstance(error, JobRejected):
                which = f"{directory}, where its checkpoints were to be kept,"
                remove = open_store(directory).remove_remains
                await self._call("check", start.graph.name, which, remove)
            raise
        original = self._jobs.get(start.point.owner)
        if start.is_claim and original is not None:
            original.record.left = ""

    async def _claim(self, start: JobStart) -> None:
        needing = self._jobs.needing(start.point.store_uri)
        if needing is not None:
            raise JobRejected(
                f"job {start.graph.name!r} cannot claim {start.point.uri}: job {needing} was started from there, and a "
                "failure takes it back there until its first own checkpoint is complete; wait for that "
                f"(`penstock info {needing}` says it, `penstock checkpoint {needing}` takes one), or start without "
                "--claim"
            )
        which = f"{start.point.uri}, which it is to start from,"
        await self._call("claim", start.graph.name, which, partial(start.claim, self._starts.note))

    async def check_directory(self, job: JobDescription) -> None:
        """Sees whether the job's checkpoints can be kept where they are to be.

        Raises:
            JobRejected: they cannot.
        """
        if job.checkpoint_directory:
            which = f"{job.checkpoint_directory}, where its checkpoints are to be kept,"
            check = partial(check_checkpoint_directory, job)
            await self._call("check", job.graph.name, which, check)

    async def check_shared_spill(
        self, job: JobDescription, shared: SharedSpillRunner | None
    ) -> None:
        """Sees whether the shared storage of blocking exchanges can be written, where the job has such.

        Raises:
            JobRejected: it cannot.
        """
        if shared is None or not job.writes_blocking:
            return
        which = f"{shared.uri}, where its blocking exchanges are to be kept,"
        try:
            await self._call("check", job.graph.name, which, shared.check_writable)
        except (StoreTransient, Unrecoverable) as error:
            raise JobRejected(
                f"job {job.graph.name!r}: its blocking exchanges cannot be kept in {shared.uri}: {error}; set "
                "taskmanager.spill.shared-dir of the JobManager to a directory or prefix that it and every "
                "TaskManager can write, or to nothing"
            ) from error

    async def _call(
        self, what: str, name: str, which: str, work: Callable[[], _ResultT]
    ) -> _ResultT:
        try:
            return await self._calls.run(what, work)
        except StoreSilent as error:
            raise JobRejected(
                f"job {name!r}: {which} has not answered for {CHECK_TIMEOUT_MS // 1000} s: see whether "
                f"{'the server at s3.endpoint' if is_s3(which) else 'its disk or its mount'} hangs, and submit the "
                "job again"
            ) from error
