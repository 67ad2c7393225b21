"""Aim: the daemon as a process ends as it should, whoever ends it, and leaves nothing behind.

Method: the real daemon in a process of its own, a fake JobManager here, signals.
"""

# ruff: noqa: ASYNC210 - small files and a local page do not hold these tests up

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc.aio
import pytest

from common.grpc_server import make_server
from common.pb import internal_pb2, internal_pb2_grpc

HERE = Path(__file__).parent
OPEN = ("-D", "security.open-loopback=true")
"""The JobManager of these tests has made no token."""
END_MAX_S = 30.0
"""What ends takes a second; a machine that is slow and busy, several."""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def ended(pids: list[int]) -> None:
    """Waits until all these processes have ended."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(END_MAX_S):
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            event = asyncio.Event()
            loop.add_reader(descriptor, event.set)
            try:
                await event.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)


def wait_for_output(process: subprocess.Popen[bytes], text: bytes, timeout_s: float = 90) -> bytes:
    """Reads stdout until the text comes."""
    assert process.stdout is not None
    seen = b""
    deadline = time.monotonic() + timeout_s
    while text not in seen:
        left = deadline - time.monotonic()
        readable, _, _ = select.select([process.stdout], [], [], max(0, left))
        assert readable, seen
        piece = os.read(process.stdout.fileno(), 1 << 16)
        assert piece, seen
        seen += piece
    return seen


def start_daemon(
    directory: Path, environment: dict[str, str], *arguments: str
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            sys.executable,
            "-P",
            str(HERE / "run_daemon.py"),
            "--dir",
            str(directory),
            *OPEN,
            *arguments,
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.fixture
def daemon(cluster: Any, environment: Any) -> Any:
    """A daemon process with two slots that run a task that hangs."""

    @asynccontextmanager
    async def start(directory: Path) -> AsyncIterator[tuple[subprocess.Popen[bytes], Any, Any]]:
        module = sys.modules[cluster.__module__]
        jobmanager = module.FakeJobManager()
        server = make_server()
        internal_pb2_grpc.add_JobManagerInternalServicer_to_server(jobmanager, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        process = start_daemon(
            directory,
            environment(TMPDIR=str(directory / "t")),
            "--jobmanager",
            f"127.0.0.1:{port}",
            "-D",
            "taskmanager.id=tm-7",
        )
        try:
            await jobmanager.until(lambda: jobmanager.registrations)
            address = jobmanager.registrations[0].rpc_address
            async with grpc.aio.insecure_channel(address) as channel:
                stub = internal_pb2_grpc.TaskManagerInternalStub(channel)
                c = module.Cluster(directory, jobmanager, stub, None)
                await c.allocate(slots=("s0", "s1"))
                await c.deploy("hang")
                yield process, jobmanager, c
        finally:
            process.kill()
            process.communicate()
            await server.stop(0)

    return start


@pytest.fixture
def short_directory() -> Any:
    """A directory with a short path: Unix sockets go below it."""
    with tempfile.TemporaryDirectory(prefix="pst-") as name:
        (Path(name) / "t").mkdir()
        yield Path(name)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_orderly_end(short_directory: Path, daemon: Any, go: Any, number: int) -> None:
    async def work() -> None:
        async with daemon(short_directory) as (process, jobmanager, _c):
            (forkserver,) = children(process.pid)
            slots = children(forkserver)
            assert len(slots) == 3, "two slots and the partition server"
            registration = json.loads(
                (short_directory / "run" / "taskmanager-tm-7.json").read_text()
            )
            assert registration["pid"] == process.pid
            assert registration["role"] == "taskmanager"
            with urlopen(f"http://{registration['metrics_address']}/health", timeout=5) as page:
                assert page.read() == b"serving\n"
            with urlopen(f"http://{registration['metrics_address']}/metrics", timeout=5) as page:
                text = page.read().decode()
            assert "penstock_taskmanager_slots_free 0.0" in text
            process.send_signal(number)
            await ended([process.pid, forkserver, *slots])
            assert process.wait() == 0
            assert jobmanager.goodbyes[0].taskmanager_id == "tm-7"
            assert list((short_directory / "run").iterdir()) == []
            assert list((short_directory / "t").iterdir()) == []
            assert not (short_directory / "taskmanager-tm-7").exists()
            lines = (short_directory / "logs" / "taskmanager-tm-7.log").read_text().splitlines()
            assert json.loads(lines[-1])["event"] == "taskmanager.stopped"

    go(work)


def test_kill_9_takes_the_slots_along(short_directory: Path, daemon: Any, go: Any) -> None:
    async def work() -> None:
        async with daemon(short_directory) as (process, _jobmanager, _c):
            (forkserver,) = children(process.pid)
            slots = children(forkserver)
            process.kill()
            await ended([forkserver, *slots])
            process.wait()
            assert len(list((short_directory / "t").iterdir())) == 1
        # Its directories are swept by the next one of the same host.
        async with daemon(short_directory) as (_process, _jobmanager, _c):
            assert len(list((short_directory / "t").iterdir())) == 1

    go(work)


def test_it_ends_with_its_parent(short_directory: Path, environment: Any) -> None:
    parent = (
        "import subprocess, sys\n"
        "p = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)\n"
        "print(p.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [
        sys.executable,
        "-P",
        str(HERE / "run_daemon.py"),
        "--dir",
        str(short_directory),
        *OPEN,
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", parent, *command, "--jobmanager", "127.0.0.1:1"],
        env=environment(PENSTOCK_PARENT_DEATH="1", TMPDIR=str(short_directory / "t")),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    seen = wait_for_output(process, b"taskmanager.started")
    pid = int(seen.split()[0])
    process.kill()
    asyncio.run(ended([pid]))
    process.communicate()
    assert list((short_directory / "run").iterdir()) == []
    assert list((short_directory / "t").iterdir()) == []


def test_it_can_be_told_to_end_while_it_starts(short_directory: Path, environment: Any) -> None:
    process = start_daemon(short_directory, environment(FAKE_WARM_UP="hang"))
    seen = wait_for_output(process, b"forkserver.starting")
    forkserver = next(
        json.loads(line)["pid"] for line in seen.splitlines() if b"forkserver.starting" in line
    )
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=END_MAX_S)
    assert process.returncode == 0, output
    assert not Path(f"/proc/{forkserver}").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["-D", "taskmanager.rpc.port=PORT"], 1, b"cannot listen on 127.0.0.1:"),
        (["-D", "taskmanager.metrics.port=PORT"], 1, b"the metrics endpoint cannot listen on"),
        (["-D", "taskmanager.bind-host=0.0.0.0"], 1, b"no token is set"),
        (["-D", "security.token-file=/nowhere"], 1, b"/nowhere cannot be read"),
        (["-D", "taskmanager.id=a/b"], 2, b"taskmanager.id 'a/b' is not usable"),
        (["-D", "taskmanager.slots=2"], 2, b"did you mean"),
        (["--jobmanager", "nowhere"], 2, b"is not an address"),
    ],
)
def test_what_it_cannot_start_with(
    tmp_path: Path, environment: Any, arguments: list[str], status: int, told: bytes
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = start_daemon(
            tmp_path,
            environment(PENSTOCK_TOKEN=""),
            *(argument.replace("PORT", port) for argument in arguments),
        )
        output, _ = process.communicate(timeout=60)
    assert told in output
    assert b"Traceback" not in output
    assert process.returncode == status
    assert not (tmp_path / "run").exists() or list((tmp_path / "run").iterdir()) == []


def test_calls_need_the_token(short_directory: Path, environment: Any) -> None:
    process = start_daemon(
        short_directory, environment(PENSTOCK_TOKEN="a-long-secret"), "-D", "taskmanager.id=tm"
    )
    try:
        wait_for_output(process, b"taskmanager.started")
        address = json.loads((short_directory / "run" / "taskmanager-tm.json").read_text())[
            "address"
        ]

        async def call() -> None:
            async with grpc.aio.insecure_channel(address) as channel:
                stub: Any = internal_pb2_grpc.TaskManagerInternalStub(channel)
                with pytest.raises(grpc.aio.AioRpcError, match="token is missing"):
                    await stub.FreeSlots(internal_pb2.FreeSlotsRequest(), timeout=5)

        asyncio.run(call())
    finally:
        process.kill()
        process.communicate()
