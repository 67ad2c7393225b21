"""Aim: what a daemon writes and shows, and whom it lets in."""

# ruff: noqa: N802 - gRPC names its methods

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc.aio
import pytest
import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from common.auth import (
    load_token,
    require_token,
    token_client_interceptors,
    token_metadata,
)
from common.elements import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS
from common.grpc_options import channel_options
from common.grpc_server import make_server
from common.log import configure_logging, configure_slot_logging, get_logger
from common.metrics import AttemptMetricsCollector, NamedMetrics
from common.metrics_server import METRICS_OFF, MetricsServer, Pages
from common.pb import internal_pb2, internal_pb2_grpc
from penstock.client.grpc_errors import error_from_rpc
from penstock.client.keyring import Keyring
from penstock.errors import ConfigurationError, Unauthenticated
from penstock.pb import client_pb2
from tests.support.jobs import DEADLINE_S


@pytest.fixture
def clean_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in list(root.handlers):
        root.removeHandler(handler)
        if handler not in handlers:
            handler.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.usefixtures("clean_logging")
def test_slots_leave_out_what_is_below_the_level(capsys: pytest.CaptureFixture[str]) -> None:
    log = structlog.get_logger()  # as modules have it, before they know the level
    configure_slot_logging("info")
    log.debug("thing.looked_at")
    log.info("thing.done", number=3)
    told = capsys.readouterr().out
    assert "thing.looked_at" not in told
    assert "thing.done" in told


@pytest.mark.usefixtures("clean_logging")
def test_log_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # pytest's own handlers are the root's: configure_logging replaces them here only.
    log_file = tmp_path / "logs" / "jm.log"
    logging.getLogger().handlers.clear()
    early = get_logger("early")
    configure_logging("jobmanager", log_file, "info")
    early.info("job.started", job_id="j", duration_ms=3)
    early.debug("not.shown")
    logging.getLogger("grpc").warning("from %s", "grpc")
    try:
        int("what")
    except ValueError:
        early.exception("job.crashed")
    lines = [json.loads(line) for line in log_file.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["job.started", "from grpc", "job.crashed"]
    assert lines[0] | {"timestamp": ""} == {
        "event": "job.started",
        "job_id": "j",
        "duration_ms": 3,
        "role": "jobmanager",
        "level": "info",
        "logger": "early",
        "timestamp": "",
    }
    assert lines[1]["logger"] == "grpc"
    assert "ValueError: invalid literal" in lines[2]["exception"]
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for line in (*lines, *shown):
        del line["timestamp"]
    assert shown == lines
    with pytest.raises(ConfigurationError, match="loud"):
        configure_logging("jobmanager", None, "loud")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        configure_logging("jobmanager", tmp_path / "file" / "x.log", "info")


@pytest.mark.usefixtures("clean_logging")
def test_libraries_that_tell_passwords_in_detail_are_not_asked_for_details(tmp_path: Path) -> None:
    log_file = tmp_path / "jm.log"
    logging.getLogger().handlers.clear()
    configure_logging("jobmanager", log_file, "debug")
    for name in ("kazoo.client", "kazoo.protocol.connection", "botocore.auth", "urllib3.x"):
        logging.getLogger(name).debug("Auth(auth='user:password')")
        logging.getLogger(name).warning("it does not answer")
    get_logger("own").debug("detail.told")
    configure_logging("jobmanager", log_file, "error")
    logging.getLogger("kazoo.client").warning("it does not answer")
    events = [json.loads(line)["event"] for line in log_file.read_text().splitlines()]
    assert events == ["it does not answer"] * 4 + ["detail.told"]


def attempt_metrics(subtask: int, **values: int) -> NamedMetrics:
    entry = internal_pb2.AttemptMetrics(
        attempt=internal_pb2.AttemptId(job_id="j", vertex="v0", subtask_index=subtask, attempt=2),
        metrics=client_pb2.SubtaskMetrics(**values),
    )
    return NamedMetrics('a "job"', "source -> map", entry)


def test_metrics_endpoint() -> None:
    attempts = [
        attempt_metrics(0, records_in=5, busy_ms=1500, watermark_ms=MIN_TIMESTAMP_MS),
        attempt_metrics(1, bytes_out=7, checkpoint_alignment_ms=250, watermark_ms=MAX_TIMESTAMP_MS),
        attempt_metrics(2, watermark_ms=2500),
    ]
    registry = CollectorRegistry()
    registry.register(AttemptMetricsCollector(lambda: tuple(attempts)))
    server = MetricsServer(Pages(registry), "127.0.0.1", 0)
    port = server.start()
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as page:
            text = page.read().decode()
        with pytest.raises(ConfigurationError, match="cannot listen"):
            MetricsServer(Pages(registry), "127.0.0.1", port).start()
    finally:
        server.stop()
    server.stop()
    samples = {
        (sample.name, sample.labels["subtask_index"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels["job_id"] == "j"
        and sample.labels["vertex"] == "v0"
        and sample.labels["job_name"] == 'a "job"'
        and sample.labels["operator"] == "source -> map"
    }
    assert samples["penstock_subtask_records_in_total", "0"] == 5
    assert samples["penstock_subtask_busy_seconds_total", "0"] == 1.5
    assert samples["penstock_subtask_out_bytes_total", "1"] == 7
    assert samples["penstock_subtask_checkpoint_alignment_seconds", "1"] == 0.25
    watermark = "penstock_subtask_watermark_timestamp_seconds"
    assert (watermark, "0") not in samples
    assert samples[watermark, "1"] == float("inf")
    assert samples[watermark, "2"] == 2.5
    assert MetricsServer(Pages(registry), "127.0.0.1", METRICS_OFF).start() == METRICS_OFF
    with socket.create_server(("127.0.0.1", port)):
        pass  # the port is free again


def test_tokens(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(" from-the-file\n")
    file.chmod(0o600)
    assert (
        load_token(str(file), {"PENSTOCK_TOKEN": "from-the-environment"}).shown == "from-the-file"
    )
    assert (
        load_token("", {"PENSTOCK_TOKEN": "from-the-environment"}).shown == "from-the-environment"
    )
    assert not load_token("", {})
    assert token_metadata("") == ()
    for bad in ("", "short", "first-line\nsecond", "umlaut-äöü-äöü"):
        file.write_text(bad)
        with pytest.raises(ConfigurationError, match="token"):
            load_token(str(file), {})
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_token(str(tmp_path / "none"), {})
    require_token("127.0.0.1", "", "x.bind-host", has_tls=False)
    require_token("0.0.0.0", "a-secret-token", "x.bind-host", has_tls=False)
    with pytest.raises(ConfigurationError, match=r"x\.bind-host = '0\.0\.0\.0'"):
        require_token("0.0.0.0", "", "x.bind-host", has_tls=False)


class Service(internal_pb2_grpc.TaskManagerInternalServicer):
    async def FreeSlots(self, request: Any, context: Any) -> Any:
        return internal_pb2.FreeSlotsResponse()

    async def ReadTaskLogs(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield client_pb2.LogChunk(data=b"x")


@pytest.mark.parametrize(
    ("theirs", "is_let_in"),
    [("the-right-one", True), ("the-next-one", True), ("the-wrong-one", False), ("", False)],
)
def test_only_the_token_lets_in(theirs: str, is_let_in: bool) -> None:
    async def work() -> None:
        server = make_server(Keyring(["the-right-one", "the-next-one"]))
        internal_pb2_grpc.add_TaskManagerInternalServicer_to_server(Service(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{port}",
            options=channel_options(),
            interceptors=token_client_interceptors(theirs),
        )
        stub: Any = internal_pb2_grpc.TaskManagerInternalStub(channel)
        try:
            async with asyncio.timeout(DEADLINE_S):
                if is_let_in:
                    await stub.FreeSlots(internal_pb2.FreeSlotsRequest())
                    chunks = [
                        chunk
                        async for chunk in stub.ReadTaskLogs(internal_pb2.ReadTaskLogsRequest())
                    ]
                    assert [chunk.data for chunk in chunks] == [b"x"]
                    return
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.FreeSlots(internal_pb2.FreeSlotsRequest())
                assert isinstance(error_from_rpc(caught.value), Unauthenticated)
                with pytest.raises(grpc.aio.AioRpcError):
                    async for _ in stub.ReadTaskLogs(internal_pb2.ReadTaskLogsRequest()):
                        pass
        finally:
            await channel.close()
            await server.stop(0)

    asyncio.run(work())


def test_who_has_only_an_older_token_is_shown_that_one_too() -> None:
    async def work() -> None:
        server = make_server(Keyring(["the-old-one"]))
        internal_pb2_grpc.add_TaskManagerInternalServicer_to_server(Service(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()

        async def call(*tokens: str) -> None:
            channel = grpc.aio.insecure_channel(
                f"127.0.0.1:{port}", interceptors=token_client_interceptors(Keyring(tokens))
            )
            stub: Any = internal_pb2_grpc.TaskManagerInternalStub(channel)
            try:
                await stub.FreeSlots(internal_pb2.FreeSlotsRequest(), timeout=DEADLINE_S)
            finally:
                await channel.close()

        try:
            await call("the-new-one", "the-old-one")
            for wrong in (["the-new-one", "another-one"], ["the-new-one"]):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(*wrong)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        finally:
            await server.stop(0)

    asyncio.run(work())
