"""Every gRPC server lets daemons ping as often as they do.

Aim: no test sees a daemon lost because the server that stands for one takes pings for an attack. Method: a
channel of a daemon to a server of ours outlives one to a server that gRPC makes by itself; ruff refuses such
servers everywhere else.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

import grpc
import grpc.aio

from common.grpc_options import channel_options
from common.grpc_server import make_server
from tests.support.jobs import DEADLINE_S

ROOT = Path(__file__).resolve().parents[3]


async def connected(server: grpc.aio.Server) -> grpc.aio.Channel:
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options())
    await channel.channel_ready()
    return channel


def test_a_channel_that_pings_is_not_sent_away() -> None:
    async def work() -> None:
        ours = make_server()
        others = grpc.aio.server()  # noqa: TID251 - what is to be avoided
        channel, sent_away = await connected(ours), await connected(others)
        async with asyncio.timeout(DEADLINE_S):
            await sent_away.wait_for_state_change(grpc.ChannelConnectivity.READY)
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        for one in (channel, sent_away):
            await one.close()
        for server in (ours, others):
            await server.stop(0)

    asyncio.run(work())


def test_nobody_else_makes_a_server() -> None:
    for made in ("import grpc.aio\n\ngrpc.aio.server()\n", "import grpc\n\ngrpc.server(None)\n"):
        checked = subprocess.run(
            [
                sys.executable,
                "-m",
                "ruff",
                "check",
                "--stdin-filename",
                "tests/support/made.py",
                "-",
            ],
            input=made,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "TID251" in checked.stdout, checked.stdout
        assert "make_server" in checked.stdout
