"""A job that was submitted: its state, its end, its rows, its metrics."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from typing_extensions import override

from penstock.client.collected import CollectedRows
from penstock.client.job_checkpoints import Checkpoint, checkpoint_of
from penstock.client.job_exceptions import JobException, exception_of
from penstock.client.job_logs import AttemptLog, attempt_logs
from penstock.client.job_metrics import job_metrics
from penstock.client.job_operations import FORMATS, Operation, operation_of, whole_directory
from penstock.client.job_result import JobResult, job_result, result_of, state_name
from penstock.client.restart_notes import INTERVAL_MS as RESTARTS_INTERVAL_MS
from penstock.client.restart_notes import RestartNotes
from penstock.client.termination import Terminated
from penstock.errors import StreamError
from penstock.pb import client_pb2

if TYPE_CHECKING:
    from penstock.client.client import Client

ProgressCallback = Callable[[client_pb2.JobDetails], object]

TERMINAL_STATES = frozenset(
    {client_pb2.JOB_STATE_FAILED, client_pb2.JOB_STATE_CANCELED, client_pb2.JOB_STATE_FINISHED}
)
_WATCH_INTERVAL_MS = 200
_TERMINATION_TIMEOUT_S = 10.0
_STOP_PAUSE_S = 1.0


class JobHandle:
    """A job on a cluster.

    Args:
        client: of the cluster; not closed by the handle.
        collected: rows that the job brings back here.
    """

    def __init__(
        self, client: Client, job_id: str, collected: Sequence[CollectedRows] = ()
    ) -> None:
        self._client = client
        self._job_id = job_id
        self._collected = collected
        self._drains: _Drains | None = None
        self._ended: client_pb2.JobDetails | None = None
        self._ends_with_rows = False
        self._has_all_rows = False
        for rows in collected:
            fetch = partial(client.fetch_results, job_id, rows.collect_id)
            rows.attach(fetch, self._drain_all, self._check_ended)

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self._job_id

    @override
    def __repr__(self) -> str:
        return f"JobHandle({self._job_id!r})"

    def details(self) -> client_pb2.JobDetails:
        """Everything the JobManager says of the job now; of a job whose end was seen, what it said then."""
        if self._ended is not None:
            return self._ended
        return self._noted(self._client.job(self._job_id))

    def _noted(self, details: client_pb2.JobDetails) -> client_pb2.JobDetails:
        """Keeps the last word on the job: the JobManager keeps ended jobs for a while only."""
        if details.summary.state in TERMINAL_STATES:
            self._ended = details
        return details

    def status(self) -> str:
        """The job's state: "CREATED", "RUNNING", "FINISHED", ..."""
        return state_name(self.details())

    def metrics(self) -> dict[str, Any]:
        """Counters summed per vertex, and totals; see ``penstock.client.job_metrics``."""
        return job_metrics(self.details())

    def cancel(self) -> None:
        """Begins to cancel the job; ``wait`` tells when it has ended. Harmless when it has."""
        self._client.cancel(self._job_id)

    def end_with_rows(self) -> None:
        """From now on ``wait`` cancels the job when all rows that it was to bring back are here."""
        self._ends_with_rows = True

    def checkpoint(self, timeout: float | None = None, *, operation_id: str = "") -> int:
        """Takes a checkpoint now and waits until it is complete.

        Args:
            timeout: seconds at most; None = ten minutes.
            operation_id: asked for twice under one id, it is taken once.

        Returns:
            The checkpoint's id.

        Raises:
            JobRejected: the job takes no checkpoints, or has ended.
            CheckpointAborted: it began and did not complete; the job runs on.
            StreamError: it could not begin: the job is not running.
        """
        return self._client.checkpoint(self._job_id, timeout, operation_id)

    def savepoint(
        self,
        directory: str | os.PathLike[str] | None = None,
        format: Literal["native", "canonical"] = "native",
        *,
        timeout: float | None = None,
        operation_id: str = "",
    ) -> str:
        """Takes a savepoint and waits until it is complete; the job runs on.

        Args:
            directory: gets a directory for it; None = ``execution.checkpointing.savepoint-dir``.
            format: of keyed state: as the backend keeps it, or for either backend.
            timeout: seconds at most; None = twenty minutes.
            operation_id: asked for twice under one id, it is taken once; "" = a new one.

        Returns:
            The directory that is the savepoint.

        Raises:
            JobRejected: the job takes none, or has ended; or the directory is not for it.
            CheckpointAborted: it began and did not complete; the job runs on.
            StreamError: it could not begin: the job is not running.
        """
        _check_format(format)
        taken = self._client.savepoint(
            self._job_id,
            whole_directory(directory),
            operation_id or uuid4().hex,
            FORMATS[format],
            timeout,
        )
        return taken.path

    def stop(
        self,
        savepoint_dir: str | os.PathLike[str] | None = None,
        drain: bool = False,
        *,
        format: Literal["native", "canonical"] = "native",
        timeout: float | None = None,
        operation_id: str = "",
    ) -> str:
        """Ends the job with a savepoint, and waits until it has FINISHED: all output up to the savepoint is committed.

        Whatever fails on the way leaves the job running.

        Args:
            savepoint_dir: gets a directory for it; None = ``execution.checkpointing.savepoint-dir``.
            drain: event time ends first: windows fire, functions hear of the end of the data. Such a savepoint is for
                ending, not for resuming.
            format: as of ``savepoint``.
            timeout: seconds at most; None = twenty minutes.
            operation_id: as of ``savepoint``.

        Returns:
            The directory that is the savepoint.

        Raises:
            JobRejected: the job takes no savepoints, or has ended; or the directory is not for it.
            StreamError: it was not stopped, and runs on; the message says why.
            TimeoutError: it has not finished yet.
        """
        _check_format(format)
        taken = self._client.stop(
            self._job_id,
            whole_directory(savepoint_dir),
            operation_id or uuid4().hex,
            drain=drain,
            format=FORMATS[format],
            timeout_s=timeout,
        )
        self.wait(timeout)
        return taken.path

    def operation(self, operation_id: str) -> Operation:
        """What has become of a savepoint or checkpoint that was asked for under an id.

        Raises:
            JobNotFound: the job knows no such operation.
        """
        return operation_of(self._client.operation(self._job_id, operation_id))

    def checkpoints(self) -> list[Checkpoint]:
        """The last checkpoints, the newest first; pending and failed ones too."""
        return [checkpoint_of(one) for one in self._client.checkpoints(self._job_id).checkpoints]

    def exceptions(self) -> list[JobException]:
        """The last failures and what came of them, the newest first."""
        return [exception_of(entry) for entry in self._client.exceptions(self._job_id).entries]

    def logs(self, vertex: str = "", subtask_index: int = -1) -> list[AttemptLog]:
        """What the attempts of the job have written so far, each as one text.

        Args:
            vertex: of one vertex only, for example "v1"; "" = of all.
            subtask_index: of one subtask of it only; -1 = of all.

        Raises:
            JobNotFound: the job has no such subtask.
        """
        return attempt_logs(self._client.logs(self._job_id, vertex, subtask_index))

    def wait(
        self, timeout: float | None = None, *, on_progress: ProgressCallback | None = None
    ) -> JobResult:
        """Waits until the job has ended, and takes the rows it brings back meanwhile.

        Args:
            timeout: seconds at most; None = as long as it takes.
            on_progress: called with the newest details several times a second.

        Raises:
            JobFailed: the job failed.
            JobCanceled: it was cancelled.
            TimeoutError: it still runs.
        """
        drains = self._drain_all()
        details = self._watch(timeout, on_progress, drains)
        drains.join()
        if self._has_all_rows and details.summary.state == client_pb2.JOB_STATE_CANCELED:
            return job_result(details)
        return result_of(details)

    def _drain_all(self) -> _Drains:
        if self._drains is None:
            self._drains = _Drains(self._collected)
        return self._drains

    def leave(self) -> None:
        """Stops taking rows; the job is left to the cluster."""
        if self._drains is not None:
            self._drains.stop(self._client)

    def _watch(
        self, timeout: float | None, on_progress: ProgressCallback | None, drains: _Drains
    ) -> client_pb2.JobDetails:
        deadline = None if timeout is None else time.monotonic() + timeout
        is_observed = on_progress is not None or deadline is not None or self._ends_with_rows
        interval_ms = _WATCH_INTERVAL_MS if is_observed else RESTARTS_INTERVAL_MS
        tell = RestartNotes() if on_progress is None else on_progress
        if timeout is not None:
            interval_ms = max(1, min(interval_ms, int(timeout * 1000)))
        state = "unknown"
        for details in self._client.watch(self._job_id, interval_ms):
            tell(details)
            if self._noted(details).summary.state in TERMINAL_STATES:
                return details
            if self._ends_with_rows and not self._has_all_rows and drains.have_all():
                self._has_all_rows = True
                self.cancel()
            state = state_name(details)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {self._job_id} is still {state} after {timeout} s")
        raise StreamError(
            f"the JobManager stopped reporting on job {self._job_id}, which was {state}; ask it again "
            f"with `penstock info {self._job_id}`"
        )

    def _check_ended(self) -> None:
        """Raises where the job ended otherwise than well."""
        details = self.details()
        if details.summary.state in TERMINAL_STATES:
            result_of(details)


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: a savepoint is {' or '.join(map(repr, FORMATS))}")


def wait_or_cancel(handle: JobHandle, on_progress: ProgressCallback | None = None) -> JobResult:
    """Waits for a job; Ctrl-C cancels it and waits for its end, a second Ctrl-C leaves.

    Raises:
        JobFailed: the job failed.
        JobCanceled: it was cancelled.
    """
    try:
        try:
            return handle.wait(on_progress=on_progress)
        except Terminated:
            handle.cancel()
            with contextlib.suppress(StreamError, TimeoutError):
                handle.wait(_TERMINATION_TIMEOUT_S)
            raise
        except KeyboardInterrupt:
            handle.cancel()
            # Said when it is true: whoever leaves now leaves a job that ends.
            print(  # noqa: T201 - the person at the terminal asked
                f"cancelling job {handle.job_id}; Ctrl-C again leaves it to the cluster",
                file=sys.stderr,
            )
            return handle.wait(on_progress=on_progress)
    except BaseException:
        handle.leave()
        raise


class _Drains:
    """Threads that take collected rows while the job runs.

    A job whose rows nobody takes stands still, so somebody must while another waits for its end. What
    has been taken is not sent again, so the threads outlive a wait that is given up; they end with the
    job, or by ``stop``, or with the process.
    """

    def __init__(self, collected: Iterable[CollectedRows]) -> None:
        self._errors: list[StreamError] = []
        self._threads = [
            threading.Thread(
                target=self._drain, args=(rows,), name=f"drain-{rows.collect_id}", daemon=True
            )
            for rows in collected
            if rows.claim()
        ]
        for thread in self._threads:
            thread.start()

    def have_all(self) -> bool:
        """Whether all rows have been taken."""
        return not self._errors and not any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        """Waits for all rows.

        Raises:
            StreamError: some could not be fetched.
        """
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def stop(self, client: Client) -> None:
        """Gives up: ends the calls of the threads, and with them the threads."""
        for thread in self._threads:
            while thread.is_alive():
                client.close()  # it connects again when it is used
                thread.join(_STOP_PAUSE_S)  # it may have been about to call again

    def _drain(self, rows: CollectedRows) -> None:
        try:
            rows.drain()
        except StreamError as error:
            self._errors.append(error)
