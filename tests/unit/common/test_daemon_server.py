"""Aim: behind one TLS port daemons with certificates call everything, clients with the token call what is for clients,
and nobody else anything.

Method: a real server and real channels; which services are called matters, not what they do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme

from common.daemon_channel import DaemonChannel
from common.daemon_server import DaemonServer
from common.grpc_options import channel_options
from common.pb import internal_pb2, internal_pb2_grpc
from common.tls.daemon_tls_runner import DaemonTls
from jobmanager.rpc.taskmanager_client import TaskManagerClient
from penstock.client.client_tls import ClientTls, why_no_channel
from penstock.client.credentials import token_metadata
from penstock.config import Configuration
from penstock.errors import StoreTransient, TaskManagerLost
from penstock.pb import client_pb2, client_pb2_grpc
from taskmanager.rpc.jobmanager_client import JobManagerClient
from tests.support.certificates import certificate_files
from tests.support.jobs import DEADLINE_S

TOKEN = "a-token-of-this-test"
HOST = "127.0.0.1"
Servicer = internal_pb2_grpc.JobManagerInternalServicer


class ForTaskManagers(Servicer):
    async def Goodbye(self, request: Any, context: Any) -> Any:  # noqa: N802
        return internal_pb2.GoodbyeResponse()


class ForClients(client_pb2_grpc.JobManagerServicer):
    async def Hello(self, request: Any, context: Any) -> Any:  # noqa: N802
        return client_pb2.HelloResponse()


def behind(
    directory: Path,
    ca: trustme.CA,
    call: Callable[[DaemonTls, str], Awaitable[None]],
    **options: bool,
) -> None:
    """Calls a server with both services, for clients and daemons."""
    config = Configuration.from_mapping(certificate_files(directory, ca).settings)

    async def run() -> None:
        with DaemonTls.running(config) as tls:
            assert tls is not None
            server = DaemonServer(TOKEN, tls, **options)
            server.serve(
                lambda one: internal_pb2_grpc.add_JobManagerInternalServicer_to_server(
                    ForTaskManagers(), one
                ),
                lambda one: client_pb2_grpc.add_JobManagerServicer_to_server(ForClients(), one),
            )
            port = server.bind(HOST, 0)
            await server.start()
            try:
                await call(tls, f"{HOST}:{port}")
            finally:
                await server.stop(None)

    asyncio.run(run())


async def goodbye(channel: grpc.aio.Channel, token: str = "") -> None:
    stub: Any = internal_pb2_grpc.JobManagerInternalStub(channel)
    request = internal_pb2.GoodbyeRequest()
    await stub.Goodbye(request, timeout=DEADLINE_S, metadata=token_metadata(token))


async def hello(channel: grpc.aio.Channel, token: str = "") -> None:
    stub: Any = client_pb2_grpc.JobManagerStub(channel)
    await stub.Hello(client_pb2.HelloRequest(), timeout=DEADLINE_S, metadata=token_metadata(token))


async def refused(call: Awaitable[None]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code(), raised.value.details() or ""


def secure(ca: trustme.CA, address: str) -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
    return grpc.aio.secure_channel(address, credentials)


def test_a_certificate_opens_everything_and_the_token_what_is_for_clients(tmp_path: Path) -> None:
    ca = trustme.CA()

    async def call(tls: DaemonTls, address: str) -> None:
        peer = DaemonChannel(address, "", channel_options(), tls)
        await goodbye(peer.channel)
        await hello(peer.channel)
        await peer.close()
        for channel in (secure(ca, address), grpc.aio.insecure_channel(address)):
            async with channel:
                await hello(channel, TOKEN)
                assert (await refused(hello(channel)))[0] is grpc.StatusCode.UNAUTHENTICATED
                for token in ("", TOKEN):
                    code, why = await refused(goodbye(channel, token))
                    assert code is grpc.StatusCode.UNAUTHENTICATED
                    assert "security.ssl.internal.enabled" in why

    behind(tmp_path, ca, call, takes_clients=True)


def test_clients_may_have_to_speak_tls(tmp_path: Path) -> None:
    ca = trustme.CA()

    async def call(_tls: DaemonTls, address: str) -> None:
        async with secure(ca, address) as channel:
            await hello(channel, TOKEN)
        async with grpc.aio.insecure_channel(address) as channel:
            code, _ = await refused(hello(channel, TOKEN))
            assert code is grpc.StatusCode.UNAVAILABLE
        assert "it speaks TLS only" in await asyncio.to_thread(why_no_channel, address, None)

    behind(tmp_path, ca, call, takes_clients=True, clients_need_tls=True)


def test_who_is_refused_behind_tls_is_named_by_his_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ca = trustme.CA()

    async def call(_tls: DaemonTls, address: str) -> None:
        async with secure(ca, address) as channel:
            await refused(hello(channel, "another-token"))

    behind(tmp_path, ca, call, takes_clients=True)
    line = next(line for line in capsys.readouterr().out.splitlines() if "call.refused" in line)
    assert f"peer={HOST}:" in line


def test_a_daemon_that_no_client_calls_speaks_with_nobody_else(tmp_path: Path) -> None:
    ca = trustme.CA()

    async def call(tls: DaemonTls, address: str) -> None:
        peer = DaemonChannel(address, "", channel_options(), tls)
        await goodbye(peer.channel)
        await peer.close()
        for channel in (secure(ca, address), grpc.aio.insecure_channel(address)):
            async with channel:
                code, _ = await refused(hello(channel, TOKEN))
                assert code is grpc.StatusCode.UNAVAILABLE

    behind(tmp_path, ca, call)


def test_whoever_calls_a_daemon_in_vain_is_told_what_tls_has_to_do_with_it(tmp_path: Path) -> None:
    ca = trustme.CA()
    other = Configuration.from_mapping(
        certificate_files(tmp_path / "other", ca, [trustme.CA()]).settings
    )

    async def call(_tls: DaemonTls, address: str) -> None:
        with DaemonTls.running(other) as theirs:
            assert theirs is not None
            jobmanager = JobManagerClient([address], "", 10, theirs)
            with pytest.raises(StoreTransient, match=r"not of a CA in security\.ssl\.internal\.ca"):
                await jobmanager.register(internal_pb2.RegisterTaskManagerRequest())
            await jobmanager.close()
            taskmanager = TaskManagerClient(
                "tm",
                address,
                token="",
                leader_epoch=1,
                rpc_timeout_ms=10_000,
                silence_max_ms=10_000,
                incarnation="i",
                tls=theirs,
            )
            with pytest.raises(
                TaskManagerLost, match=r"not of a CA in security\.ssl\.internal\.ca"
            ):
                await taskmanager.free_slots("j", ["s"])
            await taskmanager.close()
        plain = JobManagerClient([address], TOKEN, 10)
        with pytest.raises(StoreTransient, match=r"speaks TLS: set security\.ssl\.internal"):
            await plain.register(internal_pb2.RegisterTaskManagerRequest())
        await plain.close()

    behind(tmp_path, ca, call, takes_clients=True, clients_need_tls=True)


def test_daemons_call_each_other_past_the_proxy_of_their_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        server = DaemonServer(TOKEN, None)
        server.serve(
            lambda one: internal_pb2_grpc.add_JobManagerInternalServicer_to_server(
                ForTaskManagers(), one
            )
        )
        port = server.bind(HOST, 0)
        await server.start()
        try:
            monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
            channel = DaemonChannel(f"{HOST}:{port}", TOKEN, channel_options(), None)
            await goodbye(channel.channel)
            await channel.close()
        finally:
            await server.stop(None)

    asyncio.run(run())


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    async def call(tls: DaemonTls, address: str) -> None:
        port = int(address.rpartition(":")[2])
        with pytest.raises(RuntimeError, match="in use"):
            DaemonServer(TOKEN, tls).bind(HOST, port)

    behind(tmp_path, trustme.CA(), call)


def test_a_plain_server_is_called_so(tmp_path: Path) -> None:
    files = certificate_files(tmp_path, trustme.CA())

    async def run() -> None:
        server = DaemonServer(TOKEN, None)
        port = server.bind(HOST, 0)
        await server.start()
        try:
            why = await asyncio.to_thread(why_no_channel, f"{HOST}:{port}", ClientTls(files.ca))
        finally:
            await server.stop(None)
        assert "security.ssl.client.enabled" in why

    asyncio.run(run())
