"""Aim: a call that a TaskManager did not answer is told in words: which, where, why, what to do.

Method: the real client, against a port that nobody has, a listener that hangs up, one that is silent, and a
server that answers with an error of its own.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from typing_extensions import override

from common.grpc_server import make_server
from common.pb import internal_pb2_grpc
from jobmanager.rpc.taskmanager_client import TaskManagerClient
from penstock.errors import StoreTransient, StreamError, TaskManagerLost


class WithoutDisk(internal_pb2_grpc.TaskManagerInternalServicer):
    """Is there, and cannot do what it is asked to."""

    @override
    async def FreeSlots(self, request: Any, context: Any) -> Any:
        raise StoreTransient("the disk is busy")


@contextmanager
def silent() -> Iterator[socket.socket]:
    """The kernel takes connections, nobody reads them."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


@asynccontextmanager
async def hanging_up() -> AsyncIterator[socket.socket]:
    """Each connection is closed as soon as it is made."""

    async def accept(listener: socket.socket) -> None:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            connection.close()

    with silent() as listener:
        listener.setblocking(False)
        async with asyncio.TaskGroup() as tasks:
            accepting = tasks.create_task(accept(listener))
            yield listener
            accepting.cancel()


def address_of(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    server = make_server()
    internal_pb2_grpc.add_TaskManagerInternalServicer_to_server(WithoutDisk(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def error_of(address: str, rpc_timeout_ms: int = 10_000) -> StreamError:
    """What a call to this address ends with."""
    client = TaskManagerClient(
        "tm1",
        address,
        token="",
        leader_epoch=1,
        rpc_timeout_ms=rpc_timeout_ms,
        silence_max_ms=10_000,
    )
    try:
        await client.free_slots("j", ["tm1-0"])
    except StreamError as error:
        return error
    finally:
        await client.close()
    raise AssertionError("it was answered")


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await work()

    asyncio.run(bounded())


def told(address: str, why: str) -> str:
    return (
        f"TaskManager tm1 at {address} did not free slots: {why}; it has ended, is cut off or "
        "overloaded: its log tells"
    )


def test_a_process_that_has_ended() -> None:
    async def work() -> None:
        with silent() as listener:
            address = address_of(listener)
        error = await error_of(address)
        assert isinstance(error, TaskManagerLost)
        assert str(error) == told(address, "connection refused")

    run(work)


def test_a_process_that_ends_during_the_call() -> None:
    async def work() -> None:
        async with hanging_up() as listener:
            error = await error_of(address_of(listener))
            assert isinstance(error, TaskManagerLost)
            why = "the connection broke before an answer came"
            assert str(error) == told(address_of(listener), why)

    run(work)


def test_a_process_that_is_silent() -> None:
    async def work() -> None:
        with silent() as listener:
            error = await error_of(address_of(listener), rpc_timeout_ms=100)
            assert isinstance(error, TaskManagerLost)
            assert str(error) == told(address_of(listener), "no answer within the deadline")

    run(work)


def test_an_answer_is_an_answer() -> None:
    async def work() -> None:
        async with serving() as address:
            error = await error_of(address)
            assert isinstance(error, StoreTransient)
            assert str(error) == "the disk is busy"

    run(work)
