"""The client of a cluster: what ``Environment`` and the command line say to the JobManager.

Synchronous, and usable from several threads at once, also after a signal handler has raised (Ctrl-C).
Every call has a deadline, or is a stream that ends when the server goes away (pings).
What a call raises is one of our errors: ``JobManagerUnreachable`` where nobody answers,
``ProtocolMismatch`` where the other side is something else, else the JobManager's own error.

It imports grpc, which takes its time; import it lazily.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TypeVar

import grpc
import pyarrow as pa

from penstock.client.client_tls import ClientTls
from penstock.client.connection import LeaderChannel, LeaderConnection
from penstock.client.greeting import greeting
from penstock.client.keyring import Token
from penstock.client.protocol import (
    MESSAGE_SIZE_MAX_BYTES,
)
from penstock.client.shielded import shielded
from penstock.client.uploads import Uploadable, artifact_id_of, pieces_of, upload_of
from penstock.errors import (
    JobManagerUnreachable,
    JobRejected,
    RowsComeAgain,
)
from penstock.pb import checkpoint_pb2, client_pb2, client_pb2_grpc, graph_pb2

_CONNECT_TIMEOUT_S = 5.0
_CALL_TIMEOUT_S = 30.0
_LEADER_TIMEOUT_S = 60.0
_UPLOAD_TIMEOUT_S = 600.0
_CHECKPOINT_TIMEOUT_S = 600.0
_SAVEPOINT_TIMEOUT_S = 1_200.0
"""It may wait for a checkpoint, and a checkpoint follows it."""

_LEFT_S_MIN = 0.01
"""A deadline may pass a little before its time."""

_ResultT = TypeVar("_ResultT")


class Client:
    """A connection to the leading JobManager.

    Args:
        addresses: "host:port[,host:port...]", tried in order at the first call; then those that a standby tells of.
        token: the cluster's secret; "" without one, None to look for it among this user's clusters.
        connect_timeout_s: how long each address may take to answer.
        call_timeout_s: deadline of calls.
        leader_timeout_s: how long to wait for one of several JobManagers to lead.
        tls: how to speak TLS; None = plain.

    Raises:
        ConfigurationError: that is no list of addresses.
    """

    def __init__(
        self,
        addresses: str,
        token: Token | None = None,
        *,
        connect_timeout_s: float = _CONNECT_TIMEOUT_S,
        call_timeout_s: float = _CALL_TIMEOUT_S,
        leader_timeout_s: float = _LEADER_TIMEOUT_S,
        tls: ClientTls | None = None,
    ) -> None:
        self._connection = LeaderConnection(
            addresses, token, connect_timeout_s, leader_timeout_s, tls
        )
        self._call_timeout_s = call_timeout_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and ends the calls on it; a later call opens it again."""
        self._connection.close()

    @property
    def leader(self) -> str:
        """Where the JobManager was that has answered last; "" = none has."""
        return self._connection.leader

    # ------------------------------------------------------------ calls

    def hello(self) -> client_pb2.HelloResponse:
        """Who leads the cluster.

        Raises:
            JobManagerUnreachable: nobody answers at any address.
            ProtocolMismatch: another version, or no JobManager.
            Unauthenticated: the token is missing or wrong.
        """
        return self._call(lambda stub: stub.Hello, greeting())

    def upload_artifacts(self, artifacts: Iterable[Uploadable]) -> int:
        """Uploads what the JobManager does not have yet.

        Args:
            artifacts: content in this process, or files: pairs of artifact and path.

        Returns:
            How many were uploaded.
        """
        by_id = {artifact_id_of(artifact): artifact for artifact in artifacts}
        if not by_id:
            return 0
        request = client_pb2.MissingArtifactsRequest(ids=list(by_id))
        missing = self._call(lambda stub: stub.MissingArtifacts, request).ids
        for artifact_id in missing:
            self._call(_uploading, by_id[artifact_id], timeout_s=_UPLOAD_TIMEOUT_S)
        return len(missing)

    def submit(self, job_id: str, graph: graph_pb2.JobGraph) -> str:
        """Submits a job; repeating it with the same id is harmless.

        Args:
            job_id: 32 hex digits, chosen by the caller.
            graph: whose artifacts have been uploaded.

        Returns:
            The job's id.

        Raises:
            JobRejected: the graph cannot be accepted.
        """
        request = client_pb2.SubmitJobRequest(job_id=job_id, graph=graph)
        size_bytes = request.ByteSize()
        if size_bytes > MESSAGE_SIZE_MAX_BYTES:
            raise JobRejected(
                f"the job graph has {size_bytes} bytes, more than the {MESSAGE_SIZE_MAX_BYTES} that "
                "can be sent: a function closes over large data; read it from a source instead"
            )
        try:
            return self._call(lambda stub: stub.SubmitJob, request).job_id
        except JobRejected as error:
            if mind := self._connection.older_cluster:
                raise type(error)(f"{error}; {mind}") from error
            raise

    def jobs(self, *, look_again: bool = False) -> list[client_pb2.JobSummary]:
        """All jobs the JobManager knows, in order of submission.

        Args:
            look_again: it looks first whether what ended jobs can be started from is still there.
        """
        request = client_pb2.ListJobsRequest(look_again=look_again)
        return list(self._call(lambda stub: stub.ListJobs, request).jobs)

    def job(self, job_id: str) -> client_pb2.JobDetails:
        """One job; a unique beginning of its id is enough.

        Raises:
            JobNotFound: there is none, or more than one.
        """
        return self._call(lambda stub: stub.GetJob, client_pb2.GetJobRequest(job_id=job_id))

    def watch(self, job_id: str, interval_ms: int = 0) -> Iterator[client_pb2.JobDetails]:
        """Details at once, at each change of state and every ``interval_ms`` (0 = never).

        Ends after a terminal state; follows the job from one leader to the next. Closing the iterator ends the call.
        """
        request = client_pb2.WatchJobRequest(job_id=job_id, interval_ms=interval_ms)
        while True:
            try:
                yield from self._stream(lambda stub: stub.WatchJob, request)
            except JobManagerUnreachable:
                if not self._connection.may_be_answered:
                    raise
                self.hello()  # waits for who takes over
            else:
                return

    def cancel(self, job_id: str) -> None:
        """Begins to cancel a job; harmless for one that has ended."""
        self._call(lambda stub: stub.CancelJob, client_pb2.CancelJobRequest(job_id=job_id))

    def checkpoint(
        self, job_id: str, timeout_s: float | None = None, operation_id: str = ""
    ) -> int:
        """Takes a checkpoint of a job now; returns its id when it is complete.

        Args:
            timeout_s: how long to wait at most; None = ten minutes.
            operation_id: asked for twice under one id, it is taken once; "" = nobody asks again.

        Raises:
            JobRejected: the job takes none, or has ended.
            CheckpointAborted: it began and did not complete; the job runs on.
            StreamError: it could not begin.
        """
        request = client_pb2.TriggerCheckpointRequest(job_id=job_id, operation_id=operation_id)
        timeout_s = _CHECKPOINT_TIMEOUT_S if timeout_s is None else timeout_s
        answer = self._call(lambda stub: stub.TriggerCheckpoint, request, timeout_s=timeout_s)
        return answer.checkpoint_id

    def savepoint(
        self,
        job_id: str,
        directory: str,
        operation_id: str,
        format: checkpoint_pb2.SavepointFormat.ValueType,
        timeout_s: float | None = None,
    ) -> client_pb2.OperationDetails:
        """Takes a savepoint of a job; returns when it is complete.

        Args:
            directory: gets a directory for it; "" = as configured.
            operation_id: asked for twice under one id, it is taken once.
            timeout_s: how long to wait at most; None = twenty minutes.

        Raises:
            JobRejected: the job takes none, or has ended; or the directory is not for it.
            CheckpointAborted: it began and did not complete; the job runs on.
            StreamError: it could not begin.
        """
        request = client_pb2.TriggerSavepointRequest(
            job_id=job_id, operation_id=operation_id, directory=directory, format=format
        )
        timeout_s = _SAVEPOINT_TIMEOUT_S if timeout_s is None else timeout_s
        return self._call(lambda stub: stub.TriggerSavepoint, request, timeout_s=timeout_s)

    def stop(
        self,
        job_id: str,
        directory: str,
        operation_id: str,
        *,
        drain: bool = False,
        format: checkpoint_pb2.SavepointFormat.ValueType = checkpoint_pb2.SAVEPOINT_FORMAT_NATIVE,
        timeout_s: float | None = None,
    ) -> client_pb2.OperationDetails:
        """Stops a job with a savepoint; returns when nothing keeps it from finishing any more.

        Args:
            directory: as of ``savepoint``.
            operation_id: as of ``savepoint``.
            drain: event time ends first, so that windows fire.
            format: as of ``savepoint``.
            timeout_s: how long to wait at most; None = twenty minutes.

        Raises:
            JobRejected: the job takes no savepoints, or has ended; or the directory is not for it.
            StreamError: it was not stopped, and runs on.
        """
        request = client_pb2.StopJobRequest(
            job_id=job_id,
            operation_id=operation_id,
            directory=directory,
            drain=drain,
            format=format,
        )
        timeout_s = _SAVEPOINT_TIMEOUT_S if timeout_s is None else timeout_s
        return self._call(lambda stub: stub.StopJob, request, timeout_s=timeout_s)

    def drain(
        self,
        taskmanager_id: str,
        operation_id: str,
        *,
        makes_again: bool = False,
        timeout_s: float | None = None,
    ) -> client_pb2.OperationDetails:
        """Gives a TaskManager no more tasks; returns when nothing of it is in use.

        Args:
            operation_id: asked for twice under one id, it is done once.
            makes_again: partitions that it keeps are made again elsewhere, and not waited for.
            timeout_s: how long to wait at most; None = twenty minutes. It goes on all the same.

        Raises:
            JobRejected: it is not registered, or what runs there has no place elsewhere.
            StreamError: it was not drained, and is in use.
        """
        request = client_pb2.DrainTaskManagerRequest(
            taskmanager_id=taskmanager_id, operation_id=operation_id, makes_again=makes_again
        )
        timeout_s = _SAVEPOINT_TIMEOUT_S if timeout_s is None else timeout_s
        return self._call(lambda stub: stub.DrainTaskManager, request, timeout_s=timeout_s)

    def undo_drain(self, taskmanager_id: str) -> None:
        """Gives a TaskManager tasks again; a drain of it that is under way fails.

        Raises:
            JobRejected: it is not registered.
        """
        request = client_pb2.DrainTaskManagerRequest(taskmanager_id=taskmanager_id, undo=True)
        self._call(lambda stub: stub.DrainTaskManager, request)

    def operation(self, job_id: str, operation_id: str) -> client_pb2.OperationDetails:
        """What has become of something that was asked of a job, or of a TaskManager (whose id stands for the job's).

        Raises:
            JobNotFound: it knows no such operation.
        """
        request = client_pb2.GetOperationRequest(job_id=job_id, operation_id=operation_id)
        return self._call(lambda stub: stub.GetOperation, request)

    def checkpoints(self, job_id: str) -> client_pb2.ListCheckpointsResponse:
        """The last checkpoints of a job, the newest first."""
        request = client_pb2.ListCheckpointsRequest(job_id=job_id)
        return self._call(lambda stub: stub.ListCheckpoints, request)

    def exceptions(self, job_id: str) -> client_pb2.ListExceptionsResponse:
        """The last failures of a job, the newest first."""
        request = client_pb2.ListExceptionsRequest(job_id=job_id)
        return self._call(lambda stub: stub.ListExceptions, request)

    def fetch_results(self, job_id: str, collect_id: str) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Rows of a collect sink as (subtask index, batch), in order per subtask.

        Ends when the job has ended and all rows are here, however it ended. Where another JobManager leads before any
        row has come, it is asked for them.

        Raises:
            RowsComeAgain: another one leads, and some have come: to fetch them once more gives all that there are.
        """
        request = client_pb2.FetchResultsRequest(job_id=job_id, collect_id=collect_id)
        has_some = False
        while True:
            try:
                for chunk in self._stream(lambda stub: stub.FetchResults, request):
                    has_some = True
                    with pa.ipc.open_stream(pa.py_buffer(chunk.arrow)) as reader:
                        for batch in reader:
                            yield chunk.subtask_index, batch
            except JobManagerUnreachable as error:
                if not self._connection.may_be_answered:
                    raise
                if has_some:
                    raise RowsComeAgain(
                        f"rows of {collect_id!r} came from a JobManager that has ended, and the next one may send "
                        "some of them again: read them with to_arrow() or to_pylist(), which begin again then, or "
                        "write them to files"
                    ) from error
                self.hello()  # waits for who takes over
            else:
                return

    def logs(
        self, job_id: str, vertex: str = "", subtask_index: int = -1
    ) -> Iterator[client_pb2.LogChunk]:
        """What the attempts of a job have written; "" = all vertices, -1 = all subtasks."""
        request = client_pb2.ReadLogsRequest(
            job_id=job_id, vertex=vertex, subtask_index=subtask_index
        )
        return self._stream(lambda stub: stub.ReadLogs, request, timeout_s=self._call_timeout_s)

    def cluster(self) -> client_pb2.ClusterDetails:
        """TaskManagers and slots."""
        return self._call(lambda stub: stub.GetCluster, client_pb2.GetClusterRequest())

    def partitions(self, *, promoted: bool = False) -> list[client_pb2.PartitionDetails]:
        """Complete result partitions that TaskManagers hold.

        Args:
            promoted: only those that outlive their job.
        """
        request = client_pb2.ListPartitionsRequest(promoted=promoted)
        return list(self._call(lambda stub: stub.ListPartitions, request).partitions)

    def find_persisted(self, name: str) -> client_pb2.PersistedDetails:
        """What an earlier job has left behind under a name.

        Raises:
            JobRejected: nothing has that name, or some of it is gone.
        """
        request = client_pb2.FindPersistedRequest(name=name)
        return self._call(lambda stub: stub.FindPersisted, request)

    def drop_partitions(self, name: str) -> int:
        """Drops what was promoted under a name; returns how many partitions that were.

        Raises:
            JobRejected: nothing has that name.
        """
        request = client_pb2.DropPartitionsRequest(name=name)
        return self._call(lambda stub: stub.DropPartitions, request).dropped

    # ------------------------------------------------------------ connection

    def _call(
        self,
        method: Callable[[client_pb2_grpc.JobManagerStub], Callable[..., _ResultT]],
        request: Any,
        timeout_s: float | None = None,
    ) -> _ResultT:
        """Asks who leads; where that changes meanwhile, the next one.

        Args:
            timeout_s: how long it may take in all, but for the time until somebody leads; None = as calls may, each of them.
        """
        begun_at = time.monotonic()
        patience_s = self._connection.leader_timeout_s
        deadline, left_s = begun_at + patience_s, timeout_s or self._call_timeout_s

        def call(channel: LeaderChannel) -> _ResultT:
            return method(channel.stub)(request, timeout=left_s, metadata=self._connection.metadata)

        while True:
            channel = shielded(self._connection.channel)
            asked_at = time.monotonic()
            try:
                return self._shielded(call, channel)
            except JobManagerUnreachable:
                # Another leads now, or will: what is asked twice is done once.
                now = time.monotonic()
                if patience_s <= now - asked_at < left_s - _LEFT_S_MIN:
                    deadline = now + patience_s  # it was under way for long, and has just been lost
                if timeout_s:
                    left_s = timeout_s - (now - begun_at)
                if not self._connection.may_be_answered or now >= deadline or left_s <= _LEFT_S_MIN:
                    raise

    def _stream(
        self,
        method: Callable[
            [client_pb2_grpc.JobManagerStub], grpc.UnaryStreamMultiCallable[Any, _ResultT]
        ],
        request: Any,
        timeout_s: float | None = None,
    ) -> Iterator[_ResultT]:
        calls: list[Any] = []

        def begin(channel: LeaderChannel) -> None:
            begun = method(channel.stub)
            calls.append(begun(request, timeout=timeout_s, metadata=self._connection.metadata))

        def end() -> None:
            while calls:
                calls.pop().cancel()

        channel = shielded(self._connection.channel)
        try:
            self._shielded(begin, channel)
            while (message := self._shielded(lambda _: next(calls[0], None), channel)) is not None:
                yield message
        finally:
            shielded(end)

    def _shielded(
        self, work: Callable[[LeaderChannel], _ResultT], channel: LeaderChannel
    ) -> _ResultT:
        """Does something with gRPC; nothing of it, errors included, is left to the thread that waits."""

        def run() -> _ResultT:
            try:
                return work(channel)
            except grpc.RpcError as error:
                failure = self._connection.translated(error, channel)
            except ValueError as error:
                failure = self._connection.closed(error, channel)
            raise failure

        return shielded(run)


def _uploading(stub: client_pb2_grpc.JobManagerStub) -> Callable[..., Any]:
    """A call that sends an artifact, from its beginning each time."""

    def upload(artifact: Uploadable, **options: Any) -> Any:
        messages = upload_of(artifact_id_of(artifact), pieces_of(artifact))
        return stub.UploadArtifact(messages, **options)

    return upload
