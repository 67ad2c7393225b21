"""What calls of a client come to where the JobManager that leads changes while they are under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from typing import Any

import grpc
import pyarrow as pa
import pytest

from penstock import errors
from penstock.client.artifacts import CODE, LocalArtifact
from penstock.client.client import Client
from penstock.client.collected import CollectedRows
from penstock.client.grpc_errors import status_of
from penstock.client.job import JobHandle
from penstock.client.protocol import CHUNK_SIZE_BYTES, PROTOCOL_VERSION
from penstock.pb import checkpoint_pb2, client_pb2, client_pb2_grpc
from tests.support.jobs import DEADLINE_S
from tests.support.thread_server import grpc_server

JOB = "a" * 32
ROWS = pa.record_batch({"a": pa.array([1], pa.int64())})
NOBODY = "127.0.0.1:1"
"""Asked as well: there are several JobManagers, and who leads is looked for."""


class Leader(client_pb2_grpc.JobManagerServicer):
    """Leads whenever it is greeted."""

    def __init__(self) -> None:
        self.calls = 0

    def Hello(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        return client_pb2.HelloResponse(protocol_version=PROTOCOL_VERSION)


def end_leadership(context: Any) -> None:
    status = status_of(errors.NotLeader("another one leads"))
    context.set_trailing_metadata(status.metadata)
    context.abort(status.code, status.details)


@contextmanager
def client_of(servicer: Leader, **options: Any) -> Iterator[Client]:
    def add(server: grpc.Server) -> None:
        client_pb2_grpc.add_JobManagerServicer_to_server(servicer, server)

    with (
        grpc_server(add, calls_max=4) as address,
        Client(f"{address},{NOBODY}", "", **options) as client,
    ):
        yield client


def details(state: client_pb2.JobState.ValueType) -> client_pb2.JobDetails:
    return client_pb2.JobDetails(summary=client_pb2.JobSummary(job_id=JOB, state=state))


def test_an_upload_that_another_leader_has_to_take_is_sent_from_its_beginning() -> None:
    class Uploaded(Leader):
        content = b""

        def MissingArtifacts(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
            return client_pb2.MissingArtifactsResponse(ids=request.ids)

        def UploadArtifact(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
            self.calls += 1
            first = next(request)
            if self.calls == 1:
                end_leadership(context)
            assert first.id
            self.content = first.data + b"".join(chunk.data for chunk in request)
            return client_pb2.UploadArtifactResponse(size_bytes=len(self.content))

    data = bytes(range(256)) * (3 * CHUNK_SIZE_BYTES // 256)
    uploaded = Uploaded()
    with client_of(uploaded) as client:
        assert client.upload_artifacts([LocalArtifact.of(data, name="code.zip", kind=CODE)]) == 1
    assert (uploaded.calls, uploaded.content) == (2, data)


class Watched(Leader):
    """Tells of a job that runs until ``ends``; asked for jobs first it leads no more."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = threading.Event()
        self.watches = 0

    def WatchJob(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        self.watches += 1
        yield details(client_pb2.JOB_STATE_RUNNING)
        assert self.ends.wait(DEADLINE_S)
        yield details(client_pb2.JOB_STATE_FINISHED)

    def ListJobs(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        self.calls += 1
        if self.calls == 1:
            end_leadership(context)
        return client_pb2.ListJobsResponse()

    def ReadLogs(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        yield client_pb2.LogChunk(data=b"said")
        end_leadership(context)


def test_a_job_is_watched_on_where_another_call_learns_that_another_one_leads() -> None:
    watched = Watched()
    with (
        client_of(watched) as client,
        ThreadPool(1) as beside,  # as a program does that waits on one thread and asks on another
    ):
        watching = client.watch(JOB)
        next(watching)
        rest = beside.apply_async(list, (watching,))
        time.sleep(0.2)
        assert client.jobs() == []
        watched.ends.set()
        *_, last = rest.get(DEADLINE_S)
    assert (watched.watches, last.summary.state) == (2, client_pb2.JOB_STATE_FINISHED)


def test_a_call_that_failed_before_the_client_connected_again_breaks_nothing() -> None:
    watched = Watched()
    with client_of(watched) as client:
        said = client.logs(JOB)
        next(said)
        time.sleep(0.1)  # its end has come, and nobody has read it
        assert client.jobs() == []
        watching = client.watch(JOB)
        next(watching)
        with pytest.raises(errors.NotLeader):
            next(said)
        watched.ends.set()
        *_, last = watching
    assert (watched.watches, last.summary.state) == (1, client_pb2.JOB_STATE_FINISHED)


def test_a_call_is_not_made_again_once_its_time_is_over() -> None:
    class Slow(Leader):
        def __init__(self) -> None:
            super().__init__()
            self.ends = threading.Event()

        def TriggerCheckpoint(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
            self.calls += 1
            assert self.ends.wait(DEADLINE_S)
            return client_pb2.TriggerCheckpointResponse()

    slow = Slow()
    with client_of(slow, leader_timeout_s=5) as client:
        with pytest.raises(errors.JobManagerUnreachable, match="no answer within the deadline"):
            client.checkpoint(JOB, timeout_s=0.5)
        slow.ends.set()
    assert slow.calls == 1


class Sending(Leader):
    """Sends a row, and then no more until ``ends``."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = threading.Event()

    def FetchResults(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
        self.calls += 1
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, ROWS.schema) as writer:
            writer.write_batch(ROWS)
        yield client_pb2.ResultChunk(arrow=sink.getvalue().to_pybytes())
        assert self.ends.wait(DEADLINE_S)


def test_rows_are_fetched_no_longer_by_a_client_that_is_closed() -> None:
    sending = Sending()
    rows = CollectedRows("collect-0", ROWS.schema, 0, run=bool, submit=bool)
    with client_of(sending) as client, ThreadPool(1) as beside:
        handle = JobHandle(client, JOB, [rows])
        handle._drain_all()
        assert rows._arrived is not None
        while not rows._arrived.memory_bytes:
            time.sleep(0.01)
        try:
            beside.apply_async(handle.leave).get(5)
        finally:
            sending.ends.set()
    assert sending.calls == 1


def test_a_client_that_waits_for_a_leader_does_not_once_it_is_closed() -> None:
    is_asked = threading.Event()

    class Standby(Leader):
        def Hello(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
            is_asked.set()
            end_leadership(context)

    with client_of(Standby(), leader_timeout_s=60) as client, ThreadPool(1) as beside:
        waiting = beside.apply_async(client.jobs)
        assert is_asked.wait(DEADLINE_S)
        client.close()
        with pytest.raises(errors.StreamError, match="ended on this side"):
            waiting.get(5)


def test_a_call_that_has_lasted_for_longer_than_a_takeover_may_is_made_again() -> None:
    class Lasting(Leader):
        def TriggerSavepoint(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
            self.calls += 1
            if self.calls == 1:
                time.sleep(0.5)
                end_leadership(context)
            return client_pb2.OperationDetails(path="/savepoint")

    lasting = Lasting()
    with client_of(lasting, leader_timeout_s=0.4) as client:
        taken = client.savepoint(JOB, "", "an-id", checkpoint_pb2.SAVEPOINT_FORMAT_NATIVE)
    assert (lasting.calls, taken.path) == (2, "/savepoint")


def test_a_call_that_is_never_answered_ends_however_short_a_takeover_may_be() -> None:
    """As in `penstock cluster stop`, whose calls may take as long as a takeover."""

    class Silent(Leader):
        def __init__(self) -> None:
            super().__init__()
            self.ends = threading.Event()

        def ListJobs(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
            self.calls += 1
            self.ends.wait(5)
            return client_pb2.ListJobsResponse()

    silent = Silent()
    with client_of(silent, call_timeout_s=0.3, leader_timeout_s=0.3) as client:
        try:
            with pytest.raises(errors.JobManagerUnreachable, match="within the deadline"):
                client.jobs()
        finally:
            silent.ends.set()
    assert silent.calls == 1
