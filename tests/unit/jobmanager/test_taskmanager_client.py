"""Aim: a call that a TaskManager did not answer is told in words: which, where, why, what to do; and every call
says which registration it is for.

Method: the real client, against a port that nobody has, a listener that hangs up, one that is silent, a server
that answers with an error of its own, and one that remembers all calls of the service.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from typing_extensions import override

from common.grpc_server import make_server
from common.pb import internal_pb2, internal_pb2_grpc
from jobmanager.liveness.reachability import Reachability
from jobmanager.rpc.leader_news_client import LeaderNewsClient
from jobmanager.rpc.taskmanager_client import TaskManagerClient
from penstock.errors import StoreTransient, StreamError, TaskManagerLost
from tests.support.jobs import DEADLINE_S


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
async def serving(
    servicer: internal_pb2_grpc.TaskManagerInternalServicer, token: str = ""
) -> AsyncIterator[str]:
    server = make_server(token)
    internal_pb2_grpc.add_TaskManagerInternalServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def client_to(address: str, rpc_timeout_ms: int = 10_000) -> TaskManagerClient:
    return TaskManagerClient(
        "tm1",
        address,
        token="",
        leader_epoch=1,
        rpc_timeout_ms=rpc_timeout_ms,
        silence_max_ms=10_000,
        incarnation="tm1-1",
    )


async def error_of(address: str, rpc_timeout_ms: int = 10_000) -> StreamError:
    """What a call to this address ends with."""
    client = client_to(address, rpc_timeout_ms)
    try:
        await client.free_slots("j", ["tm1-0"])
    except StreamError as error:
        return error
    finally:
        await client.close()
    raise AssertionError("it was answered")


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
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
        async with serving(WithoutDisk()) as address:
            error = await error_of(address)
            assert isinstance(error, StoreTransient)
            assert str(error) == "the disk is busy"

    run(work)


def remembering(calls: dict[str, Any]) -> internal_pb2_grpc.TaskManagerInternalServicer:
    """A TaskManager that has the newest request of each of its calls."""

    def answered(name: str, answer: Any) -> Any:
        async def call(self: object, request: Any, context: Any) -> Any:
            calls[name] = request
            return answer()

        return call

    async def read_task_logs(self: object, request: Any, context: Any) -> AsyncIterator[Any]:
        calls["ReadTaskLogs"] = request
        for nothing in ():
            yield nothing

    methods = internal_pb2.DESCRIPTOR.services_by_name["TaskManagerInternal"].methods
    answers = {
        method.name: answered(method.name, getattr(internal_pb2, method.output_type.name))
        for method in methods
        if not method.server_streaming
    }
    members = answers | {"ReadTaskLogs": read_task_logs}
    made = type("Remembering", (internal_pb2_grpc.TaskManagerInternalServicer,), members)
    servicer: internal_pb2_grpc.TaskManagerInternalServicer = made()
    return servicer


def test_every_call_names_the_registration_that_it_is_for() -> None:
    calls: dict[str, Any] = {}

    async def work() -> None:
        async with serving(remembering(calls)) as address:
            client = client_to(address)
            try:
                assert await client.reachability.probe(10) is Reachability.ANSWERED
                assert calls.pop("SendTaskCommands").incarnation == "tm1-1"
                await client.allocate_slots("j", ["s"], [], {}, [], 1)
                await client.deploy_tasks([internal_pb2.TaskDeployment()])
                await client.send_commands([internal_pb2.TaskCommand()])
                await client.free_slots("j", ["s"])
                await client.sweep_output("j", [])
                await client.release_partitions("j", [])
                await client.promote_partitions(internal_pb2.PromotedSet(), [])
                await client.drop_promoted_partitions("name")
                async for _ in client.read_logs("j", "", -1):
                    pass
            finally:
                await client.close()

    run(work)
    service = internal_pb2.DESCRIPTOR.services_by_name["TaskManagerInternal"]
    # Who has not registered is told who leads, by somebody else.
    assert calls.keys() == {method.name for method in service.methods} - {"HearOfLeader"}
    assert {(call.leader_epoch, call.incarnation) for call in calls.values()} == {(1, "tm1-1")}
    numbers = [calls[name].allocation_id for name in ("AllocateSlots", "DeployTasks", "FreeSlots")]
    assert numbers == [1, 2, 3]


def test_a_token_that_is_refused_loses_a_taskmanager_and_no_job() -> None:
    async def work() -> None:
        async with serving(remembering({}), "another-token") as address:
            error = await error_of(address)
        assert type(error) is TaskManagerLost
        assert "the cluster's token is missing or wrong" in str(error)

    run(work)


def test_who_has_not_registered_is_told_who_leads() -> None:
    calls: dict[str, Any] = {}
    news = internal_pb2.HearOfLeaderRequest(leader_epoch=7, cluster_id="c", rpc_address="own:1")

    async def work() -> None:
        async with serving(remembering(calls)) as address:
            await LeaderNewsClient(news, "").tell(address, 10)
        with pytest.raises(StreamError):
            await LeaderNewsClient(news, "").tell(address, 10)

    run(work)
    assert calls == {"HearOfLeader": news}
