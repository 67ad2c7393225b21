"""The savepoints of one job: what their user has asked for, on its way through the coordinator into a directory.

asked for -> the directory is looked at -> the coordinator takes it, as a checkpoint -> its files are brought
together, its manifest is written -> the coordinator hears of it -> who asked is answered

Where the store can give the files of the job's checkpoints second names, or copy them, a native savepoint is made of a
checkpoint of the job (``SavedCheckpoints``), which commits what it covers. Any other is written apart, and a checkpoint
follows at once that does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from itertools import count
from typing import Final, Literal, NoReturn, TypeAlias, TypeVar

import structlog

from common.clock import Clock
from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_store_runner import CheckpointStoreRunner
from jobmanager.checkpoint.manifest_composer import LastStates
from jobmanager.checkpoint.store_calls_runner import StoreCallsRunner, StoreSilent
from jobmanager.job.checkpoint_requests_runner import (
    JobEndsError,
    TasksNotRunningError,
)
from jobmanager.job.job_calls_runner import pause_s
from jobmanager.job.job_operation import JobOperation
from jobmanager.job.savepoint_outputs_runner import OutputFate, SavepointOutputsRunner
from jobmanager.messages import job_effects, job_events
from penstock.errors import Fenced, StoreTransient, StreamError, Unrecoverable
from penstock.storage.checkpoint_properties import (
    PLAIN,
    BehindBarrier,
    CheckpointKind,
    CheckpointProperties,
    SavepointFormat,
)
from penstock.storage.object_store import SwapUnanswered
from penstock.storage.savepoint import MANIFEST_PATH

_COMMIT_LIMIT_S: Final = 30.0
"""Behind a checkpoint that is to commit what a savepoint covers: then another is asked for."""
_WRITERS_PATIENCE_MS: Final = 10_000
_TRIES_AT_THE_END: Final = 4
"""What has become of a savepoint's output is noted while its job ends, for some seconds."""
_TRY_AT_THE_END_S: Final = 5.0
_ResultT = TypeVar("_ResultT")
_Mark: TypeAlias = Literal["mark_committed", "take_back", "mark_in_doubt"]
_NOT_STOPPED: Final = "the job was not stopped, and runs on"
_NOT_STOPPED_HERE: Final = "the job was not stopped with this savepoint"


class SavepointsRunner:
    """Takes savepoints.

    Args:
        job_id: the job.
        store: of its own checkpoints.
        calls: makes calls that may hang.
        request: has the coordinator take one: request id, properties -> checkpoint id.
        post: takes events for the job's machine.
        fail: fails the job.
        pause: waits so many seconds; False where the job has ended meanwhile.
        seeks_attempts: what an earlier JobManager has deployed may go on.

    Attributes:
        is_output_discarded: the job was cancelled for good, and its tasks throw away what no savepoint of theirs names
            as prepared.
    """

    def __init__(
        self,
        job_id: str,
        store: CheckpointStoreRunner,
        calls: StoreCallsRunner,
        clock: Clock,
        *,
        request: Callable[[str, CheckpointProperties], Awaitable[int]],
        post: Callable[[job_events.JobEvent], None],
        fail: Callable[[StreamError], None],
        pause: Callable[[float], Awaitable[bool]],
        seeks_attempts: bool,
    ) -> None:
        self._store = store
        self._calls = calls
        self._clock = clock
        self._request = request
        self._post = post
        self._fail = fail
        self._pause = pause
        self._outputs = SavepointOutputsRunner()
        self.is_output_discarded = False
        self._restored_id: int | None = None
        """The oldest checkpoint that tasks went on from here, 0 = from nothing; None = they did not."""
        self._is_known = asyncio.Event()
        """Whether tasks that an earlier JobManager has deployed go on is known, or will never be."""
        if not seeks_attempts:
            self._is_known.set()
        self._storing: tuple[int, asyncio.Future[None]] | None = None
        """The savepoint that is being written, and what is done once it is waited for no longer."""
        self._log = structlog.get_logger(__name__).bind(job_id=job_id)

    async def take(self, operation: JobOperation, format: SavepointFormat) -> None:
        """Takes one into ``operation.path``.

        Raises:
            JobRejected: the job takes none, or the directory is not for it.
            CheckpointAborted: it began and did not complete; the job runs on.
            StreamError: it could not begin.
        """
        directory = self._store.savepoint(operation.path)
        begun = await self._calls.run("begin savepoint", directory.begin)
        is_apart = begun.is_elsewhere or format is SavepointFormat.CANONICAL
        if begun.checkpoint_id:
            operation.checkpoint_id = begun.checkpoint_id
            operation.is_taken_back = operation.is_taken_back or begun.is_taken_back
            if not begun.is_committed:
                await self._settle_output(operation, is_apart=is_apart)
            return
        operation.is_uploaded = begun.is_elsewhere
        kind = CheckpointKind.SAVEPOINT if is_apart else CheckpointKind.CHECKPOINT
        properties = CheckpointProperties(kind, operation.path, is_full=is_apart, format=format)
        try:
            operation.checkpoint_id = await self._request(operation.operation_id, properties)
            if not is_apart:
                await self._write(operation)
        except StreamError as error:
            await self._discard_failed(operation.path, error, is_apart=is_apart)
            raise
        fate = await self._commit(operation, 0.0 if is_apart else _COMMIT_LIMIT_S, is_apart)
        await self._end(operation, fate, is_apart=is_apart)

    async def _fate(
        self, operation: JobOperation, limit_s: float | None, *, is_apart: bool
    ) -> OutputFate | None:
        """What has become of the output of one, as of ``SavepointOutputsRunner.fate``.

        One behind which its job has gone back counts as taken back from then on, also beside its manifest: nobody is to
        commit what may come again. That is the end of it where it is made of a checkpoint, of which nobody keeps the output.
        """
        fate = await self._outputs.fate(operation.path, limit_s)
        if fate is not OutputFate.BEHIND:
            return fate
        operation.is_taken_back = True
        await self._call_on(operation.path, "take_back")
        return None if is_apart else OutputFate.TAKEN_BACK

    async def _end(
        self, operation: JobOperation, fate: OutputFate | None, *, is_apart: bool
    ) -> None:
        """Notes beside the manifest what has become of the output that one covers.

        Raises:
            StreamError: its job has not committed it.
        """
        path = operation.path
        while fate is None:
            fate = await self._fate(operation, None, is_apart=is_apart)
        self._outputs.forget(path)
        if fate is OutputFate.TAKEN_BACK:
            await self._take_back(path)
        if fate is OutputFate.COMMITTED:
            await self._call_on(path, "mark_committed")
        elif self.is_output_discarded and not is_apart:
            await self._discard(path, is_complete=True)
            raise JobEndsError(f"the job was cancelled before savepoint {path} was there")
        else:
            if operation.is_taken_back:
                await self._call_on(path, "mark_in_doubt")
            raise _in_doubt(path)

    async def _discard_failed(self, path: str, error: StreamError, *, is_apart: bool) -> None:
        """Removes what was written for one that its coordinator does not have complete."""
        self._outputs.forget(path)
        is_complete = False
        if isinstance(error, JobEndsError | StoreTransient):  # while it was stored, maybe
            await self._calls.wait_for_all(_WRITERS_PATIENCE_MS)
            is_complete = self.is_output_discarded and not is_apart
        await self._discard(path, is_complete=is_complete)

    async def _write(self, operation: JobOperation) -> None:
        """Makes sure that a savepoint is there, whose checkpoint HEAD names.

        Raises:
            StreamError: the job has ended, or the files in its directory were removed.
        """
        saved, checkpoint_id = self._store.saved, operation.checkpoint_id

        def write() -> int:
            if not saved.is_written(checkpoint_id):
                self._store.verify()
            return saved.write(checkpoint_id)

        for attempt in count():
            try:
                operation.checkpoint_id = await self._calls.run("write savepoint", write)
            except StoreTransient as error:
                self._log.warning("savepoint.not_written", path=operation.path, reason=str(error))
                if not await self._pause(pause_s(attempt)):
                    raise
            except (Fenced, Unrecoverable) as error:
                self._fail(error)
                raise
            else:
                return

    async def _commit(self, operation: JobOperation, limit_s: float, is_apart: bool) -> OutputFate:
        """Waits until it is known what becomes of the output that a savepoint covers.

        Args:
            operation: the savepoint.
            limit_s: behind that a checkpoint is asked for, which commits it.
            is_apart: it is not made of a checkpoint.
        """
        attempts = count()
        while (fate := await self._fate(operation, limit_s, is_apart=is_apart)) is None:
            attempt = next(attempts)
            try:
                await self._request(f"{operation.operation_id} commit {attempt}", PLAIN)
            except StreamError as error:
                limit_s = pause_s(attempt)
                self._log.warning("savepoint.not_committed", path=operation.path, reason=str(error))
            else:
                limit_s = _COMMIT_LIMIT_S
        return fate

    async def _settle_output(self, operation: JobOperation, *, is_apart: bool) -> None:
        """Finds out what becomes of the output of a savepoint that is complete, though who took it does not know.

        Raises:
            StreamError: the job has gone back behind it, or ends, before that is committed.
        """
        await self._is_known.wait()
        self._expect(operation)
        fate = await self._commit(operation, 0.0, is_apart)
        await self._end(operation, fate, is_apart=is_apart)

    def _expect(self, operation: JobOperation) -> None:
        """From now on what becomes of the output of one that another JobManager has taken is heard of."""
        savepoint_id, restored_id = operation.checkpoint_id, self._restored_id
        is_behind = restored_id is not None and restored_id < savepoint_id
        is_behind = is_behind or operation.is_taken_back
        self._outputs.expect(operation.path, savepoint_id, is_behind=is_behind)

    async def _take_back(self, path: str) -> NoReturn:
        await self._call_on(path, "take_back")
        raise StreamError(
            f"savepoint {path} is complete, but the job has gone back to an older checkpoint before the output that "
            "it covers was committed, and produces that again: start from it with --in-doubt leave"
        )

    def note_restored(
        self, checkpoint_id: int, opened: frozenset[int] = frozenset()
    ) -> Collection[str]:
        """Tasks go on from this checkpoint: what savepoints behind it cover will be produced again.

        Args:
            opened: ids of those which HEAD says to be behind it.

        Returns:
            Their paths, as far as they are known here, and nobody has committed that output.
        """
        known = checkpoint_id if self._restored_id is None else self._restored_id
        self._restored_id = min(checkpoint_id, known)
        behind = self._outputs.note_restored(checkpoint_id)
        self._store.behind |= opened | {*behind.values()}
        return behind

    def note_completed(self, checkpoint_id: int) -> None:
        """A checkpoint is complete."""
        self._outputs.note_completed(checkpoint_id)

    def note_committed(self, checkpoint_id: int) -> None:
        """Tasks have committed all output up to this checkpoint."""
        self._outputs.note_committed(checkpoint_id)

    def note_takeover(self, *, go_on: bool) -> None:
        """What an earlier JobManager has deployed was looked for.

        Args:
            go_on: it runs on, and is behind the checkpoint that was prepared for it; False = the job begins again.
        """
        if go_on and not self._is_known.is_set():
            self._restored_id = None
            self._store.behind = frozenset()
        self._is_known.set()

    def end(self, *, is_finished: bool) -> None:
        """The job has ended: what has become of it since an earlier JobManager had it will not be known here."""
        self._outputs.end(is_finished=is_finished)
        self._is_known.set()

    async def stop(
        self, operation: JobOperation, behind: BehindBarrier, format: SavepointFormat
    ) -> None:
        """Stops the job with a savepoint of this format in ``operation.path``.

        Raises:
            TasksNotRunningError: its tasks do not run yet.
            StreamError: it was not stopped, and runs on unless it ends for another reason.
        """
        directory = self._store.savepoint(operation.path)
        try:
            begun = await self._calls.run("begin savepoint", directory.begin)
        except StoreTransient as error:
            raise StreamError(f"{_NOT_STOPPED}: {error}") from error
        if begun.checkpoint_id:
            operation.checkpoint_id = begun.checkpoint_id
            return
        operation.is_uploaded = begun.is_elsewhere
        properties = CheckpointProperties(target=operation.path, behind=behind, format=format)
        try:
            operation.checkpoint_id = await self._request(operation.operation_id, properties)
        except StreamError as error:
            await self._discard_failed(operation.path, error, is_apart=False)
            ends = isinstance(error, JobEndsError)
            told = f"{_NOT_STOPPED_HERE if ends else _NOT_STOPPED}: {error}"
            if isinstance(error, TasksNotRunningError):
                raise type(error)(told) from error
            raise StreamError(told) from error
        await self._end(operation, None, is_apart=False)

    async def settle_stop(self, operation: JobOperation, stopped_id: int) -> None:
        """Finds out what has become of a stop that another JobManager had begun.

        Args:
            stopped_id: of the checkpoint that HEAD ends with, where that is a stop's; 0 = it is none.

        Raises:
            StreamError: the job was not stopped, and runs on.
        """
        directory = self._store.savepoint(operation.path)
        told = f"the job has ended, and what became of savepoint {operation.path} could not be read"
        begun = await self._at_last("begin savepoint", operation.path, directory.begin, told)
        if stopped_id and begun.checkpoint_id == stopped_id:
            operation.checkpoint_id = stopped_id
            self._expect(operation)
            await self._end(operation, None, is_apart=False)
            return
        if await self._discard(operation.path, is_complete=True):
            self._store.behind -= {begun.checkpoint_id}
        raise StreamError(f"{_NOT_STOPPED}: its JobManager ended before it had been; stop it again")

    async def _call_on(self, path: str, what: _Mark) -> None:
        """Notes something beside a manifest, however long that takes.

        Raises:
            StreamError: the job has ended, and it could not be noted, or something else is there already.
        """
        work = getattr(self._store.savepoint(path), what)
        told = f"the job has ended, and what became of the output of savepoint {path} could not be noted there"
        try:
            await self._at_last(what.replace("_", " "), path, work, told)
        except Unrecoverable as error:  # another job has been faster
            self._fail(error)
            raise

    async def _at_last(
        self, what: str, path: str, work: Callable[[], _ResultT], told: str
    ) -> _ResultT:
        """Makes a call until it succeeds; some seconds longer than the job lives.

        Raises:
            StreamError: the job has ended meanwhile, which is ``told``.
        """
        tries_at_the_end = 0
        for attempt in count():
            try:
                async with asyncio.timeout(_TRY_AT_THE_END_S if tries_at_the_end else None):
                    return await self._calls.run(what, work)
            except (StoreTransient, TimeoutError) as error:
                self._log.warning("savepoint.call_failed", call=what, path=path, reason=str(error))
            if await self._pause(pause_s(attempt)):
                continue
            tries_at_the_end += 1
            if tries_at_the_end > _TRIES_AT_THE_END:
                raise StreamError(told)
            await asyncio.sleep(pause_s(tries_at_the_end))
        raise AssertionError("it is tried without end")

    def begin(self, stored: c.StoreCheckpoint) -> None:
        """One is about to be stored: from now on the job may go back behind it, and it completes all the same."""
        self._outputs.expect(stored.properties.target, stored.checkpoint_id)

    async def store(self, wanted: job_effects.WriteManifest, states: LastStates) -> None:
        """Writes one that all tasks have acknowledged."""
        stored = wanted.stored
        checkpoint_id = stored.checkpoint_id
        given_up = asyncio.get_running_loop().create_future()
        self._storing = checkpoint_id, given_up

        def complete() -> None:
            self._store.verify()
            self._store.complete_savepoint(
                self._store.savepoint_manifest(
                    stored, wanted.done_splits, states, wanted.done_before
                )
            )

        try:
            await self._calls.run("store savepoint", complete, given_up)
        except (StoreSilent, SwapUnanswered) as error:
            if isinstance(error, StoreSilent):
                self._store.forget()
            self._post(c.StoreOutcomeUnknown(checkpoint_id, str(error), self._clock.now_ms()))
            await self._settle(stored)
        except (Fenced, Unrecoverable) as error:
            self._fail(error)
        except StreamError as error:
            self._note_not_stored(stored, str(error))
        else:
            self._note_stored(checkpoint_id)
        finally:
            self._storing = None

    def give_up(self, checkpoint_id: int | None = None) -> bool:
        """What is being written, this one or any, is waited for no longer; False = it is not being written."""
        if self._storing is None or checkpoint_id not in (None, self._storing[0]):
            return False
        if not self._storing[1].done():
            self._storing[1].set_result(None)
        return True

    async def discard(self, effect: c.DiscardSavepoint) -> None:
        """Removes what was written for one that will not be complete."""
        await self._discard(effect.target, is_complete=effect.is_complete, files=effect.files)

    async def _discard(
        self, path: str, *, is_complete: bool = False, files: tuple[str, ...] = ()
    ) -> bool:
        directory = self._store.savepoint(path)
        discard = partial(directory.discard, is_complete=is_complete, files=files)
        try:
            await self._calls.run("discard savepoint", discard)
        except StreamError as error:
            self._log.warning("savepoint.not_removed", path=path, reason=str(error))
            return False
        return True

    async def _settle(self, stored: c.StoreCheckpoint) -> None:
        """Finds out what has become of it, however long that takes; the job's tasks run on."""
        checkpoint_id = stored.checkpoint_id
        directory = self._store.savepoint(stored.properties.target)
        for attempt in count():
            with contextlib.suppress(StoreTransient):
                is_stored = await self._calls.run(
                    "settle savepoint", lambda: directory.settle(checkpoint_id)
                )
                self._log.info(
                    "savepoint.settled", checkpoint_id=checkpoint_id, is_stored=is_stored
                )
                if is_stored:
                    self._note_stored(checkpoint_id)
                else:
                    told = "its storage did not answer, and has not stored it"
                    self._note_not_stored(stored, told)
                return
            if not await self._pause(pause_s(attempt)):
                return

    def _note_not_stored(self, stored: c.StoreCheckpoint, reason: str) -> None:
        self._outputs.forget(stored.properties.target)
        self._post(c.CheckpointNotStored(stored.checkpoint_id, reason, self._clock.now_ms()))

    def _note_stored(self, checkpoint_id: int) -> None:
        self._post(c.CheckpointStored(checkpoint_id, MANIFEST_PATH, self._clock.now_ms()))


def _in_doubt(path: str) -> JobEndsError:
    return JobEndsError(
        f"savepoint {path} is complete, but the job has ended before the output that it covers was committed: start "
        "from it with --in-doubt commit, or with leave where that output is not wanted"
    )
