"""Aim: a process beside the slots that is started again knows the tokens of now, not of the daemon's start.

Method: the runner of a partition server, and a thread at the other end of its line that ends as soon as it is ready.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import cast

from common.clock import SystemClock
from common.pb import internal_pb2
from penstock.client.keyring import Keyring
from taskmanager.daemon.partition_server_runner import PartitionServerRunner
from taskmanager.processes.exit_cause import ProcessExit
from taskmanager.processes.fork_protocol import ProcessKind
from taskmanager.processes.forkserver_runner import ForkedChild, ForkserverRunner
from tests.support.jobs import DEADLINE_S
from tests.unit.taskmanager_daemon.fake_slot import FakeSlot

OLD, NEW = "the-old-token", "the-new-token"


class Forkserver:
    def __init__(self, keyring: Keyring, tasks: asyncio.TaskGroup) -> None:
        self.keyring = keyring
        self.tasks = tasks
        self.told: list[str] = []
        self.is_told_twice = asyncio.Event()

    async def fork(self, descriptors: list[int], kind: ProcessKind) -> ForkedChild:
        child = ForkedChild(0, kind, asyncio.get_running_loop().create_future())
        line = socket.socket(fileno=os.dup(descriptors[0]))
        self.tasks.create_task(self.answer(line, child))
        return child

    async def answer(self, line: socket.socket, child: ForkedChild) -> None:
        with line:
            slot = FakeSlot(line)
            command = await asyncio.to_thread(slot.receive)
            assert command is not None
            self.told.append(command.configure.token)
            assert command.configure.token_path == self.keyring.place
            slot.send(ready=internal_pb2.DataEndpoint())
        if len(self.told) == 2:
            self.is_told_twice.set()
        else:
            await asyncio.to_thread(Path(self.keyring.place).write_text, f"{NEW}\n{OLD}\n")
            assert self.keyring.refresh() or self.keyring.refresh()
        child.exited.set_result(ProcessExit(0, 0, "it ended"))

    def kill(self, _child: ForkedChild) -> None:
        pass


def test_a_partition_server_that_is_started_again_has_the_tokens_of_now(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text(OLD)

    async def work() -> list[str]:
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
            forkserver = Forkserver(Keyring.read(path), tasks)
            runner = PartitionServerRunner(
                internal_pb2.SlotConfiguration(),
                tmp_path / "log",
                cast("ForkserverRunner", forkserver),
                SystemClock(),
                forkserver.keyring,
            )
            await runner.start()
            running = tasks.create_task(runner.run())
            await forkserver.is_told_twice.wait()
            running.cancel()
        return forkserver.told

    assert asyncio.run(work()) == [OLD, f"{NEW}\n{OLD}"]
