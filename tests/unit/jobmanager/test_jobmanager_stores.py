"""What lies on disk and in buffers: leader epoch, unfinished jobs, collect buffers, admission."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import grpc
import pyarrow as pa
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from common.clock import SystemClock
from jobmanager.assembly_runner import serving
from jobmanager.job.inbox_runner import Inbox
from jobmanager.messages import job_events
from jobmanager.metrics import build_registry
from jobmanager.results.collect_buffer import Chunk, CollectBuffer, Verdict
from jobmanager.results.results_store import ResultsStore
from jobmanager.rpc.taskmanager_client import in_batches
from jobmanager.scheduler.admission import CodeStamp, TaskManagerFacts, admission_problem
from jobmanager.stores.artifact_store import ArtifactStore
from jobmanager.stores.directory_lock import DirectoryLock
from jobmanager.stores.job_store import JobStore
from jobmanager.stores.leader_store import LeaderStore
from penstock.config import Configuration
from penstock.errors import (
    ConfigurationError,
    Fenced,
    JobRejected,
    StoreCorrupt,
    StoreNotFound,
    StoreTransient,
    StreamError,
)
from penstock.pb import client_pb2, client_pb2_grpc, graph_pb2
from penstock.storage.local_store import LocalStore
from tests.support.job_records import JobRecords
from tests.support.jobs import DEADLINE_S


def config(**settings: object) -> Configuration:
    values = {
        "jobmanager.rpc.port": 0,
        "jobmanager.metrics.port": -1,
        "security.open-loopback": True,
    }
    return Configuration.from_mapping({**values, **settings})


def test_jobs_of_a_killed_jobmanager_are_shown_as_failed_and_kept_where_they_cannot_be_read(
    tmp_path: Path,
) -> None:
    lost, damaged = "ab" * 16, "cd" * 16
    kept = LocalStore(tmp_path / "jobmanager")
    leader = LeaderStore(kept, "kept")
    leader.take_over()
    store = JobStore(LocalStore(tmp_path / "jobmanager" / "jobs"), "jobs", leader)
    in_memory = {"execution.checkpointing.storage": "jobmanager"}  # which no other JobManager has
    store.save(lost, graph_pb2.JobGraph(name="lost", config=in_memory), 1)
    store.save(damaged, graph_pb2.JobGraph(), 2)
    path = JobRecords(tmp_path).path(damaged)
    path.write_bytes(b"\xff\xff")

    async def look() -> list[client_pb2.JobDetails]:
        async with serving(config(), tmp_path, SystemClock()) as jobmanager:
            text = generate_latest(build_registry(jobmanager.dispatcher, jobmanager.cluster))
            assert b'penstock_jobmanager_jobs{state="FAILED"} 1.0' in text
            assert b'penstock_jobmanager_jobs{state="RESTARTING"} 1.0' in text
            assert b"penstock_jobmanager_slots_free 0.0" in text
            with pytest.raises(StoreCorrupt, match="is not a job's record"):
                await jobmanager.dispatcher.cancel(damaged)
            return [record.details() for record in jobmanager.dispatcher.records()]

    kept_one, failed = sorted(asyncio.run(look()), key=lambda one: one.summary.submitted_at_ms)
    assert failed.summary.state == client_pb2.JOB_STATE_FAILED
    assert "submit it again" in failed.failure.message
    assert "is not a job's record" in kept_one.summary.problem
    assert path.read_bytes() == b"\xff\xff"


def test_a_directory_of_an_earlier_penstock_is_refused(tmp_path: Path) -> None:
    (tmp_path / "jobmanager").mkdir()
    (tmp_path / "jobmanager" / "leader_epoch").write_text("3")

    async def start() -> None:
        async with serving(config(), tmp_path, SystemClock()):
            raise AssertionError("it started")

    with pytest.raises(ConfigurationError, match="earlier version"):
        asyncio.run(start())


def start_daemon(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "jobmanager", "--dir", str(directory), *arguments],
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_port_in_use_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with start_daemon(tmp_path, "-D", f"jobmanager.rpc.port={port}") as daemon:
            _, stderr = daemon.communicate(timeout=DEADLINE_S)
    assert daemon.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in stderr
    assert not list(tmp_path.glob("run/*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_daemon_registers_and_ends_on_signals(tmp_path: Path, number: int) -> None:
    with start_daemon(tmp_path, "-D", "jobmanager.rpc.port=0") as daemon:
        assert daemon.stdout is not None
        started = next(line for line in daemon.stdout if "jobmanager.started" in line)
        (file,) = tmp_path.glob("run/jobmanager-*.json")
        registered = json.loads(file.read_text())
        assert registered["pid"] == daemon.pid
        assert registered["address"] == json.loads(started)["address"]
        with urllib.request.urlopen(f"http://{registered['metrics_address']}/health") as response:
            assert response.read() == b"serving\n"
        with urllib.request.urlopen(f"http://{registered['metrics_address']}/metrics") as response:
            assert b"penstock_jobmanager_slots 0.0" in response.read()
        daemon.send_signal(number)
        _, stderr = daemon.communicate(timeout=DEADLINE_S)
    assert (daemon.returncode, stderr) == (0, "")
    assert not file.exists()
    assert list(tmp_path.glob("logs/jobmanager-*.log"))


def test_a_door_to_the_world_needs_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)

    async def start(host: str) -> None:
        settings: dict[str, object] = {"jobmanager.bind-host": host}
        async with serving(config(**settings), tmp_path, SystemClock()):
            raise AssertionError("it started")

    with pytest.raises(ConfigurationError, match="no token"):
        asyncio.run(start("0.0.0.0"))
    monkeypatch.setenv("PENSTOCK_TOKEN", "0123456789")
    with pytest.raises(StreamError, match="EADDRNOTAVAIL"):
        asyncio.run(start("192.0.2.1"))


def test_a_call_without_the_token_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", "0123456789")

    async def call() -> grpc.StatusCode:
        async with (
            serving(config(), tmp_path, SystemClock()) as jobmanager,
            grpc.aio.insecure_channel(f"127.0.0.1:{jobmanager.ports.port}") as channel,
        ):
            client = client_pb2_grpc.JobManagerStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.Hello(client_pb2.HelloRequest())
            return error.value.code()

    assert asyncio.run(call()) is grpc.StatusCode.UNAUTHENTICATED


def test_the_inbox_is_bounded_for_reports_only_and_ends_with_its_actor() -> None:
    async def scenario() -> None:
        inbox = Inbox(reports_max=2)
        for _ in range(3):
            inbox.post(job_events.CancelRequested())
        async with asyncio.TaskGroup() as tasks:
            late = [tasks.create_task(inbox.report(job_events.JobStarted())) for _ in range(2)]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await asyncio.shield(late[0])
            assert await inbox.get() == job_events.CancelRequested()
            assert await inbox.get() == job_events.CancelRequested()
            await late[0]
            assert len(inbox) in (2, 3)
            inbox.close()
        inbox.post(job_events.JobStarted())
        assert inbox.dropped_events >= 1

    asyncio.run(scenario())


def test_large_deployments_are_sent_in_several_calls() -> None:
    artifacts = [graph_pb2.Artifact(name="x" * size) for size in (10, 10, 100, 10)]
    batches = in_batches(artifacts, 40)
    assert [len(batch) for batch in batches] == [2, 1, 1]
    assert [a for batch in batches for a in batch] == artifacts
    assert in_batches([], 40) == []


# ---------------------------------------------------------------- results


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 30)), max_size=40),
    st.integers(0, 40),
)
def test_a_collect_buffer_is_bounded_ordered_and_without_duplicates(
    pushes: list[tuple[int, int, int]], limit: int
) -> None:
    """Each push may repeat old chunks; a full buffer is emptied, like a client that reads."""
    buffer = CollectBuffer(capacity_bytes=40, limit=limit)
    next_sequence = [0, 0, 0]
    came: list[Chunk] = []
    for subtask, repeat, size in pushes:
        sequence = max(0, next_sequence[subtask] - repeat)
        verdict = buffer.verdict(subtask, sequence, size)
        if verdict is Verdict.FULL:
            while chunk := buffer.pop():
                came.append(chunk)
            verdict = buffer.verdict(subtask, sequence, size)
        assert (verdict is Verdict.DUPLICATE) == (sequence < next_sequence[subtask])
        if verdict is Verdict.TAKEN:
            rows = size if buffer.rows_wanted is None else min(size, buffer.rows_wanted)
            buffer.take(Chunk(subtask, sequence, bytes(size), rows))
            next_sequence[subtask] += 1
        assert buffer.held_bytes <= 40
    while chunk := buffer.pop():
        came.append(chunk)
    for subtask in range(3):
        sequences = [c.sequence for c in came if c.subtask_index == subtask]
        assert sequences == list(range(next_sequence[subtask]))
    if limit:
        assert sum(c.rows for c in came) <= limit
    assert buffer.held_bytes == 0


def ipc(values: list[int]) -> bytes:
    batch = pa.record_batch({"x": pa.array(values, pa.int64())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def rows(data: bytes) -> list[int]:
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()["x"].to_pylist()


def test_a_limit_cuts_the_last_chunk_and_satisfies_the_rest() -> None:
    async def scenario() -> None:
        store = ResultsStore()
        store.open("j", {"c": 5})

        def chunk(subtask: int, sequence: int, values: list[int]) -> client_pb2.ResultChunk:
            return client_pb2.ResultChunk(
                subtask_index=subtask, sequence=sequence, arrow=ipc(values)
            )

        assert not await store.push("j", "c", chunk(0, 0, [1, 2, 3]), 1)
        assert await store.push("j", "c", chunk(1, 0, [4, 5, 6]), 1)
        assert await store.push("j", "c", chunk(1, 1, [7]), 1)
        store.end("j")
        got = [rows(c.arrow) async for c in store.fetch("j", "c")]
        assert got == [[1, 2, 3], [4, 5]]
        assert await store.push("j", "c", chunk(1, 2, [8]), 1)
        with pytest.raises(Fenced):
            await store.push("j", "other", chunk(0, 0, []), 1)
        store.forget("j")
        with pytest.raises(StoreNotFound):
            await anext(aiter(store.fetch("j", "c")))

    asyncio.run(scenario())


def test_rows_nobody_fetches_are_bounded_and_a_sink_has_one_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jobmanager.results.results_store.ENDED_BYTES_MAX", 1000)

    async def scenario() -> None:
        store = ResultsStore()
        chunk = client_pb2.ResultChunk(arrow=ipc(list(range(60))))
        for job_id in ("old", "new"):
            store.open(job_id, {"c": 0})
            await store.push(job_id, "c", chunk, 1)
            store.end(job_id)
        with pytest.raises(StoreNotFound, match="nobody fetched"):
            await anext(aiter(store.fetch("old", "c")))
        first = aiter(store.fetch("new", "c"))
        await anext(first)
        with pytest.raises(JobRejected, match="read already"):
            await anext(aiter(store.fetch("new", "c")))
        await first.aclose()  # type: ignore[attr-defined]

    asyncio.run(scenario())


def test_who_reads_rows_of_a_job_that_is_forgotten_gets_all_of_them() -> None:
    async def scenario() -> None:
        store = ResultsStore()
        store.open("j", {"c": 0})
        for sequence in range(3):
            chunk = client_pb2.ResultChunk(sequence=sequence, arrow=ipc([sequence]))
            await store.push("j", "c", chunk, 1)
        store.end("j", is_finished=True)
        fetch = aiter(store.fetch("j", "c"))
        got = [rows((await anext(fetch)).arrow)]
        store.forget("j")
        got += [rows(chunk.arrow) async for chunk in fetch]
        assert got == [[0], [1], [2]]
        with pytest.raises(StoreNotFound):
            await anext(aiter(store.fetch("j", "c")))

    asyncio.run(scenario())


def test_what_a_fetch_that_broke_off_has_taken_is_missed_aloud() -> None:
    async def scenario() -> None:
        store = ResultsStore()
        store.open("j", {"c": 0})
        broken = aiter(store.fetch("j", "c"))
        waiting = asyncio.ensure_future(anext(broken))
        await asyncio.wait([waiting], timeout=0)
        waiting.cancel()
        await asyncio.wait([waiting])
        for sequence in range(2):
            chunk = client_pb2.ResultChunk(sequence=sequence, arrow=ipc([sequence]))
            await store.push("j", "c", chunk, 1)
        store.end("j")
        # A fetch that broke off before the first row has done no harm.
        partial = store.fetch("j", "c")
        assert (await anext(partial)).sequence == 0
        await partial.aclose()  # type: ignore[attr-defined]
        with pytest.raises(StoreNotFound, match="taken by an earlier fetch"):
            await anext(aiter(store.fetch("j", "c")))

    asyncio.run(scenario())


def failing(_prefix: str) -> list[object]:
    raise StoreTransient("it cannot be listed")


def test_unused_artifacts_are_swept_and_a_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        kept = LocalStore(tmp_path / "artifacts")
        store = ArtifactStore(kept)
        (tmp_path / "artifacts").mkdir()
        old, used, asked_for = (digit * 64 for digit in "012")
        for name in (old, used, asked_for):
            (tmp_path / "artifacts" / name).touch()
            os.utime(tmp_path / "artifacts" / name, (0, 0))
        assert await store.find_missing([asked_for]) == []
        await store.sweep(frozenset({used}))
        assert await store.find_missing([old, used, asked_for]) == [old]
        assert store.missing([old, used]) == [old]
        monkeypatch.setattr(kept, "list", failing)
        with structlog.testing.capture_logs() as logs:
            await store.sweep(frozenset())
        assert [entry["event"] for entry in logs] == ["artifacts.sweep_failed"]
        store.close()

    asyncio.run(scenario())


def test_graphs_are_private_and_one_jobmanager_uses_a_directory(tmp_path: Path) -> None:
    directory = tmp_path / "jobmanager"
    directory.mkdir(mode=0o755)
    lock = DirectoryLock(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigurationError, match="another JobManager is running"):
        DirectoryLock(directory)
    lock.close()
    DirectoryLock(directory).close()


# ---------------------------------------------------------------- admission


@pytest.mark.parametrize(
    ("stamp", "text"),
    [
        (CodeStamp(), None),
        (CodeStamp("3.11", "3.1.2", ("numpy>=2", "Foo.Bar", "odd")), None),
        (CodeStamp("3.11.4", "3.1.2", ("none; python_version < '3.11'",)), None),
        (CodeStamp("3.12", "3.1.2"), "Python 3.12"),
        (CodeStamp("3.11", "3.0.0"), "cloudpickle==3.1.2"),
        (CodeStamp(requirements=("numpy<2", "scipy")), "2.4 is installed; scipy is not installed"),
        (CodeStamp(requirements=("odd>1",)), "not-a-version is installed"),
        (CodeStamp(requirements=("a b c",)), "malformed"),
    ],
)
def test_admission(stamp: CodeStamp, text: str | None) -> None:
    facts = TaskManagerFacts(
        "tm1", "3.11.9", "3.1.2", ("numpy==2.4", "foo-bar==1", "odd==not-a-version")
    )
    problem = admission_problem(stamp, [facts])
    if text is None:
        assert problem is None
    else:
        assert text in str(problem)
    assert admission_problem(stamp, []) is None or "malformed" in str(problem)
