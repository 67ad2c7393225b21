"""Aim: only a TaskManager that is gone is called gone; one that is busy, paused or far away is not.

Method: real sockets in the states a kernel knows, a real gRPC server, the real probe.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc.aio
import pytest
from typing_extensions import override

from common.grpc_server import make_server
from common.pb import internal_pb2, internal_pb2_grpc
from jobmanager.liveness.reachability import JOBMANAGER, Reachability
from jobmanager.rpc.reachability_client import ReachabilityClient
from jobmanager.scheduler.taskmanager_watch_runner import TaskManagerWatch
from penstock.errors import Fenced
from tests.support.jobs import DEADLINE_S

QUICK_S = 0.3


class Answers(internal_pb2_grpc.TaskManagerInternalServicer):
    """Answers, or refuses as one that follows another leader."""

    def __init__(self, is_fencing: bool = False) -> None:
        self.is_fencing = is_fencing

    @override
    async def SendTaskCommands(self, request: Any, context: Any) -> Any:
        assert request.leader_epoch == 7
        assert not request.commands
        if self.is_fencing:
            raise Fenced("another leader")
        return internal_pb2.SendTaskCommandsResponse()


async def serve(servicer: Answers) -> tuple[grpc.aio.Server, str]:
    server = make_server()
    internal_pb2_grpc.add_TaskManagerInternalServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


@contextmanager
def listening(backlog: int = 16) -> Iterator[tuple[socket.socket, str]]:
    """A process that is paused: its kernel takes connections, nobody reads them."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(backlog)
        yield listener, f"127.0.0.1:{listener.getsockname()[1]}"


def connected(address: str) -> ReachabilityClient:
    return ReachabilityClient(address, token="", leader_epoch=7, incarnation="i")


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await work()

    asyncio.run(bounded())


@pytest.mark.parametrize("is_fencing", [False, True])
def test_a_daemon_that_answers_whatever_answers(is_fencing: bool) -> None:
    async def work() -> None:
        server, address = await serve(Answers(is_fencing))
        client = connected(address)
        assert await client.probe(10) is Reachability.ANSWERED
        await client.close()
        await server.stop(0)

    run(work)


def test_a_process_that_is_paused_is_silent_and_one_that_is_gone_refuses() -> None:
    async def work() -> None:
        with listening() as (_, address):
            client = connected(address)
            assert await client.probe(QUICK_S) is Reachability.SILENT
        assert await client.probe(10) is Reachability.REFUSED
        await client.close()

    run(work)


def test_a_full_backlog_is_no_refusal() -> None:
    async def work() -> None:
        with ExitStack() as stack:
            listener, address = stack.enter_context(listening(backlog=0))
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(listener.getsockname())
            client = connected(address)
            assert await client.probe(QUICK_S) is Reachability.UNREACHABLE
            await client.close()

    run(work)


def test_every_address_of_a_name_must_refuse() -> None:
    async def work() -> None:
        server, address = await serve(Answers())
        client = connected(address.replace("127.0.0.1", "localhost"))
        assert await client.probe(10) is Reachability.ANSWERED
        await server.stop(0)
        assert await client.probe(10) is Reachability.REFUSED
        await client.close()

    run(work)


class Watched:
    """A watch and what it has said."""

    def __init__(self, address: str) -> None:
        self.client = connected(address)
        self.doubts: list[str] = []
        self.doubted = asyncio.Event()
        self.refusals = 0
        self.watch = TaskManagerWatch(self.client, self._refuse, self._doubt)

    def _refuse(self) -> None:
        self.refusals += 1

    def _doubt(self, witness: str) -> None:
        self.doubts.append(witness)
        self.doubted.set()


def test_the_watch_ends_with_the_process() -> None:
    async def work() -> None:
        server, address = await serve(Answers())
        watched = Watched(address)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(watched.watch.run())
            assert await watched.client.probe(10) is Reachability.ANSWERED
            await server.stop(0)
            await running
        assert watched.refusals == 1
        assert watched.doubts == []
        # One when the connection broke; the port may still be closing then.
        assert watched.watch.probe_count <= 3
        await watched.client.close()

    run(work)


def test_a_paused_process_is_doubted_only_when_peers_say_so_and_is_not_lost() -> None:
    async def work() -> None:
        with listening() as (_, address):
            watched = Watched(address)
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(watched.watch.run())
                await asyncio.sleep(0)
                watched.watch.ask(JOBMANAGER)
                watched.watch.ask("tm-2")
                await watched.doubted.wait()
                assert watched.doubts == ["tm-2"]
                running.cancel()
        assert watched.refusals == 0
        await watched.client.close()

    run(work)


def test_any_number_of_reports_during_a_probe_make_one_more() -> None:
    async def work() -> None:
        with listening() as (_, address):
            watched = Watched(address)
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(watched.watch.run())
                watched.watch.ask("first")
                await asyncio.sleep(0)  # the watch begins
                assert watched.watch.probe_count == 1
                for number in range(100):
                    watched.watch.ask(f"tm-{number % 3}")
                while len(watched.doubts) < 4:
                    watched.doubted.clear()
                    await watched.doubted.wait()
                running.cancel()
            assert watched.doubts == ["first", "tm-0", "tm-1", "tm-2"]
            # A third one, where its own connection has been given up meanwhile.
            assert watched.watch.probe_count <= 3
            await watched.client.close()

    run(work)
