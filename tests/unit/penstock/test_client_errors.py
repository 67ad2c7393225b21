"""The table of errors and gRPC status, and the client against servers that are not what it expects."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import pyarrow as pa
import pytest
import trustme

from common.clock import SystemClock
from jobmanager.assembly_runner import serving
from penstock import errors
from penstock.client.client import Client
from penstock.client.client_tls import ClientTls
from penstock.client.grpc_errors import (
    ERROR_CLASS_KEY,
    STATUS_BY_CLASS,
    error_from_status,
    status_of,
    unanswered,
)
from penstock.config import Configuration
from penstock.pb import client_pb2, client_pb2_grpc, graph_pb2
from penstock.streams.environment import Environment
from tests.support.certificates import expired
from tests.support.jobs import DEADLINE_S
from tests.support.thread_server import grpc_server


@pytest.mark.parametrize("cls", STATUS_BY_CLASS)
def test_every_class_comes_back(cls: type[errors.StreamError]) -> None:
    if cls is errors.CheckpointAborted:
        error: errors.StreamError = errors.CheckpointAborted(7, "what happened: ü")
    else:
        error = cls("what happened: ü")
    back = error_from_status(*_parts(error))
    assert type(back) is cls
    assert str(back) == str(error)
    assert str(back).endswith("what happened: ü")
    assert vars(back) == vars(error)


def test_no_class_is_missing_from_the_table() -> None:
    defined = {
        cls
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, errors.StreamError)
    }
    assert STATUS_BY_CLASS.keys() == defined


def test_an_aborted_checkpoint_travels_with_its_fields() -> None:
    error = errors.CheckpointAborted(12, "expired after 600 s: " + "x" * 9000)
    status = status_of(error)
    assert status.code is grpc.StatusCode.ABORTED
    assert sum(len(value) for _, value in status.metadata) < 4300
    back = error_from_status(status.code, status.details, status.metadata)
    assert isinstance(back, errors.CheckpointAborted)
    assert back.checkpoint_id == 12
    assert back.reason.startswith("expired after 600 s: xxx")
    assert str(back) == f"checkpoint 12: {back.reason}"


def test_an_aborted_checkpoint_whose_fields_are_missing() -> None:
    aborted = ((ERROR_CLASS_KEY, "CheckpointAborted"),)
    back = error_from_status(grpc.StatusCode.ABORTED, "checkpoint 3: expired", aborted)
    assert isinstance(back, errors.CheckpointAborted)
    assert "checkpoint 3: expired" in str(back)


def test_a_full_store_is_no_silent_one() -> None:
    status = status_of(errors.StoreFull("5 of 10 bytes are free"))
    assert status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    back = error_from_status(status.code, status.details, status.metadata)
    assert isinstance(back, errors.StoreTransient), "who retries what is transient retries it"


def test_fields_travel_and_long_texts_are_cut_at_the_right_end() -> None:
    error = errors.JobFailed(
        "x" * 9000, job_id="j", vertex="v1", row="Row(ü)", user_traceback="first" + "y" * 20_000
    )
    status = status_of(error)
    assert len(status.details) < 4200
    back = error_from_status(status.code, status.details, status.metadata)
    assert isinstance(back, errors.JobFailed)
    assert (back.job_id, back.vertex, back.row) == ("j", "v1", "Row(ü)")
    assert not back.user_traceback.startswith("first")


def test_unlisted_subclasses_and_foreign_statuses() -> None:
    class Special(errors.BadRecord):
        pass

    assert error_from_status(*_parts(Special("s"))).__class__ is errors.BadRecord
    foreign = error_from_status(grpc.StatusCode.UNAVAILABLE, "Socket closed", ())
    assert type(foreign) is errors.StoreTransient
    assert str(foreign) == "the connection broke before an answer came"
    ended = error_from_status(grpc.StatusCode.CANCELLED, "CANCELLED", ())
    assert type(ended) is errors.StoreTransient, "it was told to end: another may answer"
    assert str(ended) == "the other side ended before it answered"
    newer = error_from_status(
        grpc.StatusCode.ABORTED, "m", (("penstock-error-class", "FromTheFuture"),)
    )
    assert "FromTheFuture" in str(newer)


ALL_FAILED = "failed to connect to all addresses; last error: "


@pytest.mark.parametrize(
    ("code", "details", "words"),
    [
        (
            grpc.StatusCode.UNAVAILABLE,
            f"{ALL_FAILED}UNKNOWN: ipv4:127.0.0.1:1: connect: Connection refused (111)",
            "connection refused",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            "Socket closed",
            "the connection broke before an answer came",
        ),
        (grpc.StatusCode.UNAVAILABLE, "recvmsg:Connection reset by peer", "the connection broke "),
        (
            grpc.StatusCode.UNAVAILABLE,
            "DNS resolution failed for x:1",
            "its host name is not known",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            "errors resolving x:1: [field:hostname lookup error:address lookup failed for x:1: DNS]",
            "its host name is not known",
        ),
        (grpc.StatusCode.UNAVAILABLE, "ping timeout", "the connection was silent for too long"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "no answer within the deadline"),
        (
            grpc.StatusCode.UNAVAILABLE,
            f"{ALL_FAILED}INTERNAL: odd",
            "no connection (UNAVAILABLE: INTERNAL: odd)",
        ),
        (grpc.StatusCode.CANCELLED, "", "no connection (CANCELLED: no details)"),
    ],
)
def test_why_nobody_answered_is_said_in_words(
    code: grpc.StatusCode, details: str, words: str
) -> None:
    assert unanswered(code, details).startswith(words)


def _parts(error: errors.StreamError) -> tuple[Any, str, Any]:
    status = status_of(error)
    return status.code, status.details, status.metadata


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address that refuses, and that nobody else can take meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def test_nobody_answers(nobody: str) -> None:
    with (
        Client(f"{nobody},{nobody}", leader_timeout_s=2) as client,
        pytest.raises(errors.JobManagerUnreachable) as e,
    ):
        client.jobs()
    assert nobody in str(e.value)
    assert "penstock cluster start" in str(e.value)


@pytest.mark.parametrize("addresses", ["", " , ", "localhost", "h:port", "h:1,:2", None, 6123])
def test_addresses_are_checked_at_once(addresses: Any) -> None:
    with pytest.raises(errors.ConfigurationError, match="HOST:PORT"):
        Client(addresses)


def test_a_server_that_is_not_penstock() -> None:
    with (
        grpc_server(lambda server: None) as address,
        Client(address) as client,
        pytest.raises(errors.ProtocolMismatch, match="no JobManager of this version"),
    ):
        client.hello()


def test_a_jobmanager_of_another_protocol() -> None:
    class Other(client_pb2_grpc.JobManagerServicer):
        def Hello(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
            return client_pb2.HelloResponse(protocol_version=99, server_version="9.9")

    def add(server: grpc.Server) -> None:
        client_pb2_grpc.add_JobManagerServicer_to_server(Other(), server)

    with (
        grpc_server(add) as address,
        Client(address) as client,
        pytest.raises(errors.ProtocolMismatch, match=r"penstock 9\.9.*speaks protocol 99"),
    ):
        client.hello()


@pytest.mark.parametrize(("protocol", "told"), [(0, "less than"), (1, "1"), (999, "")])
def test_what_an_older_cluster_does_not_understand_is_refused_with_what_to_do(
    protocol: int, told: str
) -> None:
    class Older(client_pb2_grpc.JobManagerServicer):
        def Hello(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
            return client_pb2.HelloResponse(
                protocol_version=1, server_version="0.0.9", daemon_protocol_version=protocol
            )

        def SubmitJob(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
            status = status_of(errors.JobRejected("an expression without a node"))
            context.set_trailing_metadata(status.metadata)
            context.abort(status.code, status.details)

    def add(server: grpc.Server) -> None:
        client_pb2_grpc.add_JobManagerServicer_to_server(Older(), server)

    with (
        grpc_server(add) as address,
        Client(address) as client,
        pytest.raises(errors.JobRejected) as refused,
    ):
        client.submit("a" * 32, graph_pb2.JobGraph())
    said = str(refused.value)
    assert said.startswith("an expression without a node")
    assert ("upgrade the cluster before its clients" in said) == bool(told)
    assert f"(penstock 0.0.9) has protocol {told}" in said or not told


def test_a_client_that_stays_believes_the_cas_in_its_file_as_they_are_when_it_connects_again(
    tmp_path: Path,
) -> None:
    class Leader(client_pb2_grpc.JobManagerServicer):
        def Hello(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
            return client_pb2.HelloResponse(protocol_version=1)

    @contextmanager
    def serving_as(issuer: trustme.CA, port: int, **options: Any) -> Iterator[int]:
        shown = issuer.issue_cert("127.0.0.1", **options)
        pair = (
            shown.private_key_pem.bytes(),
            b"".join(one.bytes() for one in shown.cert_chain_pems),
        )
        server = grpc.server(futures.ThreadPoolExecutor(1))  # noqa: TID251 - it is none of ours
        client_pb2_grpc.add_JobManagerServicer_to_server(Leader(), server)
        bound = server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([pair]))
        server.start()
        yield bound
        server.stop(None).wait()

    old, new, path = trustme.CA(), trustme.CA(), tmp_path / "ca.pem"
    old.cert_pem.write_to_path(path)
    with serving_as(old, 0) as port:
        client = Client(f"127.0.0.1:{port}", "token", tls=ClientTls(path))
        client.hello()
    with client:
        new.cert_pem.write_to_path(path)
        with serving_as(new, port):
            client.hello()
        with (
            serving_as(new, port, **expired()),
            pytest.raises(errors.JobManagerUnreachable, match="its certificate has expired"),
        ):
            client.hello()


def test_a_call_that_was_under_way_as_the_leader_ended_is_made_again(nobody: str) -> None:
    class Ending(client_pb2_grpc.JobManagerServicer):
        calls = 0

        def Hello(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
            return client_pb2.HelloResponse(protocol_version=1)

        def ListJobs(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
            self.calls += 1
            if self.calls == 1:
                context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")  # as a server that stops does
            return client_pb2.ListJobsResponse()

    def add(server: grpc.Server) -> None:
        client_pb2_grpc.add_JobManagerServicer_to_server(Ending(), server)

    with grpc_server(add) as address, Client(f"{address},{nobody}") as client:
        assert client.jobs() == []
    with (
        grpc_server(add) as address,
        Client(address) as alone,
        pytest.raises(errors.JobManagerUnreachable, match="ended before it answered"),
    ):
        alone.jobs()


@contextmanager
def jobmanager(directory: Path) -> Iterator[str]:
    """A real JobManager on a thread of its own."""
    address: futures.Future[str] = futures.Future()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        config = Configuration.from_mapping(
            {
                "jobmanager.rpc.port": 0,
                "jobmanager.metrics.port": -1,
                "security.open-loopback": True,
            }
        )
        async with serving(config, directory, SystemClock()) as running:
            address.set_result(f"127.0.0.1:{running.ports.port}")
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield address.result(timeout=DEADLINE_S)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def test_the_client_against_a_real_jobmanager(tmp_path: Path, nobody: str) -> None:
    with jobmanager(tmp_path / "cluster") as address:
        with Client(f"{nobody},{address}") as client:
            assert client.hello().leader_epoch == 1
            assert client.jobs() == []
            assert client.cluster().slots_total == 0
            file = tmp_path / "data.bin"
            file.write_bytes(b"x" * 3_000_000)
            artifact = graph_pb2.Artifact(id=hashlib.sha256(file.read_bytes()).hexdigest())
            assert client.upload_artifacts([(artifact, file)]) == 1
            assert client.upload_artifacts([(artifact, file)]) == 0
            env = Environment()
            env.read_socket("127.0.0.1", 1).collect()
            graph = env.plan("waits").graph
            graph.artifacts.append(artifact)
            job_id = "ab" * 16
            assert client.submit(job_id, graph) == job_id
            assert client.job("ab").summary.name == "waits"
            with pytest.raises(errors.JobNotFound, match="there is no job ff"):
                client.job("ff")
            with pytest.raises(errors.JobRejected, match="32 lower-case hex"):
                client.submit("XYZ", graph)
            states = []
            for details in client.watch(job_id):
                states.append(details.summary.state)
                if len(states) == 1:
                    client.cancel(job_id)
            assert states[0] == client_pb2.JOB_STATE_CREATED
            assert states[-1] == client_pb2.JOB_STATE_CANCELED
            assert list(client.fetch_results(job_id, "collect-0")) == []
            with pytest.raises(errors.StoreNotFound, match="has no rows of 'd'"):
                list(client.fetch_results(job_id, "d"))
            assert list(client.logs(job_id)) == []
        closed = Client(address)
        closed.hello()
    with closed, pytest.raises(errors.JobManagerUnreachable):
        closed.jobs()


def test_signals_find_the_main_thread_outside_of_grpc(tmp_path: Path, nobody: str) -> None:
    inside: set[str] = set()

    def enter(frame: FrameType, event: str, function: Any) -> None:
        module = frame.f_globals["__name__"]
        if event == "c_call":
            module = getattr(function, "__module__", None) or ""
        # Calls that have ended are finalized wherever they are let go of.
        if event in ("call", "c_call") and frame.f_code.co_name != "__del__":
            inside.add(module.partition(".")[0])

    with jobmanager(tmp_path / "cluster") as address:
        gc.collect()  # what other tests left is not finalized in here
        gc.disable()
        sys.setprofile(enter)
        try:
            with Client(f"{nobody},{address}") as client:
                assert client.jobs() == []
                with pytest.raises(errors.JobNotFound):
                    next(client.watch("ff"))
        finally:
            sys.setprofile(None)
            gc.enable()
    assert "penstock" in inside
    assert "grpc" not in inside


def test_fetched_chunks_become_batches() -> None:
    batch = pa.record_batch({"x": [1, 2]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch)
    data = sink.getvalue().to_pybytes()

    class Fixed(client_pb2_grpc.JobManagerServicer):
        def Hello(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
            return client_pb2.HelloResponse(protocol_version=1)

        def FetchResults(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: N802
            yield client_pb2.ResultChunk(subtask_index=3, arrow=data)

    def add(server: grpc.Server) -> None:
        client_pb2_grpc.add_JobManagerServicer_to_server(Fixed(), server)

    with grpc_server(add) as address, Client(address) as client:
        assert list(client.fetch_results("j", "c")) == [(3, batch), (3, batch)]
