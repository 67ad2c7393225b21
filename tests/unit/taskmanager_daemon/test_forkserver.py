"""Aim: the forkserver forks only when that is safe, and the runner knows about every end.

Method: real forkservers with small entry points.
"""

# ruff: noqa: PTH208 - descriptors are read as the kernel shows them

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StreamError, TaskFailure
from taskmanager.daemon.slot_environment import slot_variables
from taskmanager.processes import fork_protocol, forkserver_runner
from taskmanager.processes.forkserver_runner import ForkedChild, ForkserverRunner
from tests.support.jobs import DEADLINE_S
from tests.unit.taskmanager_daemon.fake_slot import LATE_MODULE


@asynccontextmanager
async def forked(
    runner: ForkserverRunner, log: Path, preload: str = ""
) -> AsyncIterator[tuple[ForkedChild, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs, log.open("ab") as file:
        child = await runner.fork([theirs.fileno(), file.fileno()], preload=preload)
        theirs.close()
        yield child, ours


def test_exits_are_reported(
    tmp_path: Path, environment: Any, forkserver_arguments: list[str], go: Any
) -> None:
    async def work() -> None:
        runner = ForkserverRunner(
            slot_variables(environment(), tmp_path), tmp_path / "f.log", forkserver_arguments
        )
        descriptors = len(os.listdir("/proc/self/fd"))
        await runner.start()
        try:
            # The end of the line is the end of the slot.
            async with forked(runner, tmp_path / "s.log") as (child, _line):
                pass
            assert (await child.exited).status == 0
            async with forked(runner, tmp_path / "s.log") as (child, _line):
                runner.kill(child)
                exit_of_killed = await child.exited
                assert exit_of_killed.status == -signal.SIGKILL
                assert exit_of_killed.reason == f"slot process {child.pid} was killed by SIGKILL"
                runner.kill(child)  # harmless
            async with (
                forked(runner, tmp_path / "s.log") as (one, _),
                forked(runner, tmp_path / "s.log") as (two, _),
            ):
                assert len({one.pid, two.pid, runner.pid}) == 3
        finally:
            await runner.stop()
        assert (await two.exited).pid == two.pid
        assert len(os.listdir("/proc/self/fd")) == descriptors

    go(work)


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def await_child(pid: int) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not children_of(pid):
        assert time.monotonic() < deadline_s, "nothing was forked"


def test_a_process_that_nobody_waits_for_any_more_has_ended(
    tmp_path: Path, environment: Any, forkserver_arguments: list[str], go: Any
) -> None:
    async def work() -> None:
        runner = ForkserverRunner(
            slot_variables(environment(), tmp_path), tmp_path / "f.log", forkserver_arguments
        )
        await runner.start()
        pid = runner.pid
        assert pid is not None
        ours, theirs = socket.socketpair()
        try:
            # Its line stays open: it does not end by itself.
            with ours, theirs, (tmp_path / "s.log").open("ab") as log:
                forking = asyncio.ensure_future(runner.fork([theirs.fileno(), log.fileno()]))
                await asyncio.sleep(0)
                # The daemon has not heard of it yet.
                await_child(pid)
                forking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await forking
                assert children_of(pid) == []
        finally:
            await runner.stop()

    go(work)


def test_a_forkserver_with_threads_forks_nothing(tmp_path: Path, environment: Any, go: Any) -> None:
    async def work() -> None:
        arguments = ["--entry", "fake_slot:run", "--preload", ""]
        runner = ForkserverRunner(
            slot_variables(environment(), tmp_path),
            tmp_path / "f.log",
            [*arguments, "--warm-up", "fake_slot:warm_up_with_a_thread"],
        )
        await runner.start()
        try:
            with pytest.raises(TaskFailure, match=r"has [23] threads"):
                async with forked(runner, tmp_path / "s.log"):
                    pass
        finally:
            await runner.stop()

    go(work)


def test_what_some_need_is_imported_once_for_those_that_follow(
    tmp_path: Path, environment: Any, go: Any
) -> None:
    async def work() -> None:
        arguments = ["--entry", "fake_slot:run_with_late_module", "--preload", "", "--warm-up", ""]
        runner = ForkserverRunner(
            slot_variables(environment(), tmp_path), tmp_path / "f.log", arguments
        )
        await runner.start()
        try:
            async with forked(runner, tmp_path / "s.log") as (without, _):
                pass
            assert (await without.exited).status != 0
            with pytest.raises(TaskFailure, match="no_such_module"):
                async with forked(runner, tmp_path / "s.log", "no_such_module"):
                    pass
            for preload in (LATE_MODULE, ""):
                async with forked(runner, tmp_path / "s.log", preload) as (child, _):
                    pass
                assert (await child.exited).status == 0
        finally:
            await runner.stop()

    go(work)


def test_one_that_cannot_start_says_why(tmp_path: Path, environment: Any, go: Any) -> None:
    async def work() -> None:
        runner = ForkserverRunner(
            slot_variables(environment(), tmp_path),
            tmp_path / "f.log",
            ["--preload", "", "--entry", "no_such_module:run"],
        )
        with pytest.raises(StreamError, match="no_such_module"):
            await runner.start()
        assert runner.pid is None

    go(work)


@pytest.mark.parametrize(
    ("does", "starts"),
    [
        ("time.sleep(60)", False),
        ("while True: pass", False),
        ("while time.process_time() < 1.2: pass", True),
    ],
    ids=["hangs", "runs in circles", "is slow"],
)
def test_one_that_is_slow_is_waited_for_as_long_as_it_works(
    tmp_path: Path,
    environment: Any,
    go: Any,
    monkeypatch: pytest.MonkeyPatch,
    does: str,
    starts: bool,
) -> None:
    """Its first look comes long before it can be ready."""
    (tmp_path / "sitecustomize.py").write_text(f"import time\n{does}\n")
    monkeypatch.setattr(forkserver_runner, "_START_LOOK_S", 0.6 if starts else 0.2)
    monkeypatch.setattr(forkserver_runner, "_START_WORK_MIN_S", 0.0 if starts else 0.01)
    monkeypatch.setattr(forkserver_runner, "_START_WORK_MAX_S", 30.0 if starts else 0.3)

    async def work() -> None:
        arguments = ["--entry", "fake_slot:run", "--preload", ""]
        variables = slot_variables(environment(), tmp_path)
        variables["PYTHONPATH"] = f"{tmp_path}:{variables.get('PYTHONPATH', '')}"
        runner = ForkserverRunner(variables, tmp_path / "f.log", arguments)
        try:
            if starts:
                await runner.start()
            else:
                with pytest.raises(StreamError, match=r"was not ready within .* hangs"):
                    await runner.start()
        finally:
            await runner.stop()

    go(work)


def test_a_killed_forkserver_is_replaced_and_its_slots_are_gone(
    tmp_path: Path, environment: Any, forkserver_arguments: list[str], go: Any
) -> None:
    async def work() -> None:
        runner = ForkserverRunner(
            slot_variables(environment(), tmp_path), tmp_path / "f.log", forkserver_arguments
        )
        await runner.start()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(runner.run())
            async with forked(runner, tmp_path / "s.log") as (child, line):
                first = runner.pid
                assert first is not None
                os.kill(first, signal.SIGKILL)
                how = await child.exited
                assert how.status is None
                assert "SIGKILL" in how.reason
                # Dead, not merely orphaned: its end of the line closes.
                assert await asyncio.get_running_loop().run_in_executor(None, line.recv, 1) == b""
            async with forked(runner, tmp_path / "s.log") as (child, _line):
                assert runner.pid not in (None, first)
                assert runner.restart_count == 1
            await child.exited
            running.cancel()
        assert runner.pid is None

    go(work)


def test_the_environment_keeps_libraries_from_starting_threads(tmp_path: Path) -> None:
    variables = slot_variables({"A": "b", "OMP_NUM_THREADS": "8"}, tmp_path)
    assert variables["OMP_NUM_THREADS"] == "1"
    assert variables["OPENBLAS_NUM_THREADS"] == "1"
    assert variables["JE_ARROW_MALLOC_CONF"] == "background_thread:false"
    assert variables["NUMBA_CACHE_DIR"] == str(tmp_path / "numba")
    assert slot_variables({"NUMBA_CACHE_DIR": "/x"}, tmp_path)["NUMBA_CACHE_DIR"] == "/x"


@pytest.mark.parametrize(
    "message",
    [
        fork_protocol.Fork(1, "s"),
        fork_protocol.Kill(3),
        fork_protocol.Ready(4),
        fork_protocol.Forked(1, 2),
        fork_protocol.ForkFailed(1, "no"),
        fork_protocol.Exited(1, -9),
    ],
)
def test_messages_survive_the_way(message: Any) -> None:
    assert fork_protocol.decode(fork_protocol.encode(message)) == message


@pytest.mark.parametrize("datagram", [b"", b"{}", b"[]", b'{"kind": "No"}', b"\xff"])
def test_other_datagrams_are_refused(datagram: bytes) -> None:
    with pytest.raises(ValueError):
        fork_protocol.decode(datagram)
