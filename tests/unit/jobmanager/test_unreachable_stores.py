"""Aim: a user who names a place on S3 where nobody answers hears of it soon, however long daemons wait for a server
that has answered before.

Method: what the JobManager and commands look at first, against a port where nobody listens, and one whose server never
says a word.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from jobmanager.checkpoint.savepoint_store_runner import SavepointStoreRunner
from jobmanager.dispatcher.job_start_runner import prepare_start
from jobmanager.job.job_description import check_checkpoint_directory
from penstock.config import Configuration
from penstock.errors import JobRejected, StoreNotFound, StoreTransient
from penstock.pb import graph_pb2
from penstock.storage.local_store import LocalStore
from penstock.storage.open_store import open_store
from penstock.storage.s3.settings import S3Settings
from penstock.storage.savepoint_places import check_is_outside
from tests.unit.jobmanager.test_checkpoint_directory import job

PLACE = "s3://bucket/kept"
SOON_MS = 200


@pytest.fixture(params=["nobody", "silent"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if request.param == "nobody":
            server.close()
        yield f"http://127.0.0.1:{port}"


def settings(endpoint: str, first_answer_ms: int = 0) -> S3Settings:
    return S3Settings(endpoint, "us-east-1", True, "a", "b", first_answer_ms=first_answer_ms)


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch) -> Callable[[S3Settings], None]:
    for module in (
        "penstock.storage.s3.s3_store",
        "jobmanager.checkpoint.savepoint_store_runner",
        "jobmanager.dispatcher.job_start_runner",
        "jobmanager.job.job_description",
    ):
        monkeypatch.setattr(f"{module}.FIRST_ANSWER_MS", SOON_MS)
    return lambda how: monkeypatch.setattr("penstock.storage.open_store._s3", lambda: how)


def savepoint(tmp_path: Path) -> None:
    SavepointStoreRunner("0" * 32, f"{PLACE}/one", LocalStore(tmp_path / "own")).begin()


def start(_: Path) -> None:
    config = Configuration.from_mapping({"execution.state-recovery.path": PLACE})
    prepare_start(
        "1" * 32, graph_pb2.JobGraph(name="job"), config, lambda _: False, lambda _: False
    )


def directory(_: Path) -> None:
    check_checkpoint_directory(job(f"{PLACE}/{'0' * 32}"))


@pytest.mark.parametrize("look", [savepoint, start, directory])
def test_what_users_ask_daemons_for(
    address: str, reach: Callable[[S3Settings], None], look: Callable[[Path], None], tmp_path: Path
) -> None:
    reach(settings(address))
    begun = time.monotonic()
    said = r"s3://bucket.*s3\.endpoint can be reached"
    with pytest.raises((StoreTransient, JobRejected), match=said):
        look(tmp_path)
    assert time.monotonic() - begun < 10, "a call of a daemon takes two minutes"


def test_a_command_does_not_wait_for_a_silent_server(
    address: str, reach: Callable[[S3Settings], None]
) -> None:
    reach(settings(address, SOON_MS))
    begun = time.monotonic()
    with pytest.raises(StoreTransient, match=r"s3\.endpoint can be reached"):
        open_store(PLACE).get("manifest")
    assert time.monotonic() - begun < 10, "a silence of a server may last 30 s"


def test_a_refusal_is_an_answer(reach: Callable[[S3Settings], None]) -> None:
    asked: list[str] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_error(403)

        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        reach(settings(f"http://127.0.0.1:{server.server_port}"))
        store = open_store(PLACE)
        for _ in range(2):
            store.check_answers(SOON_MS)
        with pytest.raises(StoreNotFound):
            store.get("manifest")
        assert asked == ["/bucket"], "once for a process"
        check_is_outside(f"{PLACE}/one")  # prefixes above may be somebody else's
        assert len(asked) > 1
        server.shutdown()
