"""Aim: another user of the machine gets nothing out of a default cluster, and its own user everything.

Method: real daemons; what another user can do is tried in processes of ``nobody``.
"""

from __future__ import annotations

import signal
import stat
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

import penstock as ps
from penstock.client.announced_tokens import announcements_directory, find_token
from penstock.client.client import Client
from tests.support.other_users import (
    as_nobody,
    connected_by_nobody,
    needs_root,
    open_for_others,
    readable_by_nobody,
)
from tests.support.processes import Beacon, DaemonCluster, Site, tell
from tests.support.servers import free_port

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

CALLS = """
    import sys, grpc
    from penstock.client.client import Client
    from penstock import errors
    from penstock.client.grpc_errors import error_from_rpc
    from common.pb import internal_pb2, internal_pb2_grpc
    jobmanager, taskmanager = sys.argv[1:]
    for token in (None, "", "a-guess-at-the-secret"):
        try:
            Client(jobmanager, token).jobs()
            print("jobmanager: let in")
        except errors.Unauthenticated:
            print("jobmanager: refused")
    with grpc.insecure_channel(taskmanager) as channel:
        stub = internal_pb2_grpc.TaskManagerInternalStub(channel)
        try:
            stub.FreeSlots(internal_pb2.FreeSlotsRequest(job_id="j"), timeout=5)
            print("taskmanager: let in")
        except grpc.RpcError as error:
            print("taskmanager:", type(error_from_rpc(error)).__name__)
"""

GREETING = """
    import socket, sys
    from penstock.client.protocol import DAEMON_PROTOCOL_VERSION
    from taskmanager.network.frames import FrameKind, encode_frame
    from taskmanager.network.messages import Hello, encode_message
    port, job_id, epoch = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    hello = Hello(DAEMON_PROTOCOL_VERSION, job_id, "s", "tcp:127.0.0.1:1", epoch, "")
    with socket.create_connection(("127.0.0.1", port), 5) as peer:
        peer.sendall(encode_frame(FrameKind.HELLO, 0, encode_message(hello)))
        answer = b""
        while piece := peer.recv(1 << 16):
            answer += piece
    print(answer)
"""


@pytest.fixture
def own_cluster(own_site: Site) -> Iterator[DaemonCluster]:
    """With one TaskManager, in a directory that others may look into."""
    open_for_others(own_site.directory)
    cluster = DaemonCluster(own_site)
    cluster.directory.mkdir(mode=0o755)
    cluster.start()
    yield cluster
    cluster.stop()


def modes_below(directory: Path) -> dict[str, str]:
    """Directories that somebody else may look into, and how they are called."""
    return {
        str(path): oct(path.stat().st_mode)
        for path in directory.iterdir()
        if path.is_dir() and stat.S_IMODE(path.stat().st_mode) & 0o077
    }


def numbers(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"value": pa.array(range(start, start + count), pa.int64())})


@needs_root
def test_another_user_can_call_nobody_and_read_nothing(
    own_cluster: DaemonCluster, own_site: Site, beacon: Beacon
) -> None:
    jobmanager, taskmanager = own_cluster.daemons()
    with ps.Environment(own_cluster.jobmanager) as env:
        path = beacon.path

        def busy(row: ps.Row) -> int:
            if row.value == 0:
                print("a secret of the job")
                tell(path, "busy")
            return int(row.value)

        env.generate(numbers, rate=10).map(busy, schema={"n": "int64"}).discard()
        handle = env.submit("busy")
        beacon.wait()

        called = as_nobody(own_site, CALLS, jobmanager["address"], taskmanager["address"])
        assert called.stdout.splitlines() == [
            *["jobmanager: refused"] * 3,
            "taskmanager: Unauthenticated",
        ], called.stderr

        (slot,) = own_cluster.slot_pids(taskmanager["pid"])
        (server,) = own_cluster.partition_server_pids(taskmanager["pid"])
        ports = [
            connection.laddr.port
            for pid in (slot, server)
            for connection in psutil.Process(pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert len(ports) == 2
        for port in ports:
            greeted = as_nobody(own_site, GREETING, str(port), handle.job_id, str(1 << 40))
            assert "the token is wrong" in greeted.stdout, greeted.stderr

        runtime = list(own_site.temporary.iterdir())
        assert runtime
        looked_at = (own_cluster.directory, *runtime, announcements_directory())
        assert readable_by_nobody(own_site, *looked_at) == []
        sockets = [path for path in own_site.temporary.rglob("*") if path.is_socket()]
        assert connected_by_nobody(own_site, sockets) == ["refused"] * len(sockets) != []
        handle.cancel()
    assert modes_below(own_cluster.directory) == {}


def test_what_is_made_is_private_and_files_of_an_earlier_version_become_so(own_site: Site) -> None:
    cluster = DaemonCluster(own_site)
    old = [cluster.directory / name for name in ("logs", "jobmanager", "artifacts", "checkpoints")]
    for directory in old:
        directory.mkdir(parents=True, mode=0o755)
    cluster.start()
    token = cluster.directory / "token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert modes_below(cluster.directory) == {}
    assert stat.S_IMODE(announcements_directory().stat().st_mode) == 0o700
    fresh = DaemonCluster(own_site, "fresh")
    fresh.start()
    assert stat.S_IMODE(fresh.directory.stat().st_mode) == 0o700
    assert token.read_text() != (fresh.directory / "token").read_text()
    fresh.stop()
    cluster.stop()
    cluster.start()
    secret = token.read_text()
    cluster.stop()
    assert token.read_text() == secret, "TaskManagers outlive their JobManager"
    own_site.assert_nothing_left()


SCRIPT = """
import penstock as ps
env = ps.Environment({address!r})
rows = env.from_rows([{{"a": 7}}]).collect()
env.execute("by-address")
print("rows", [row.a for row in rows])
"""


def test_clients_of_the_same_user_need_only_the_address(own_site: Site) -> None:
    jobmanager = own_site.start_python(
        "-P", "-m", "jobmanager", "--dir", str(own_site.directory / "jm"), "-D", "jobmanager.rpc.port=0"
    )  # fmt: skip
    jobmanager.wait_for_line("jobmanager.started")
    address = DaemonCluster(own_site, "jm").daemons()[0]["address"]
    taskmanager = own_site.start_python(
        "-P", "-m", "taskmanager", "--dir", str(own_site.directory / "tm"), "--jobmanager", address
    )
    taskmanager.wait_for_line("taskmanager.registered")
    script = own_site.directory / "job.py"
    script.write_text(SCRIPT.format(address=address))
    for ended in (
        own_site.start_python(str(script)).wait(),
        own_site.penstock("run", "--jobmanager", address, str(script)),
    ):
        assert "rows [7]" in ended.stdout, ended.stderr
    for named in (address, address.replace("127.0.0.1", "localhost")):
        assert own_site.penstock("list", "--jobmanager", named).status == 0
    assert ps.connect(address).jobs()
    # What was given comes first.
    wrong = own_site.penstock(
        "list", "--jobmanager", address, environment={"PENSTOCK_TOKEN": "another-secret-of-mine"}
    )
    assert wrong.status == 1
    assert "token" in wrong.stderr
    for daemon in (taskmanager, jobmanager):
        daemon.send(signal.SIGTERM)
        assert daemon.wait().status == 0
    assert [*announcements_directory().glob(f"{address.rpartition(':')[2]}-*")] == []


def test_a_taskmanager_waits_for_its_jobmanagers_token(own_site: Site) -> None:
    directory = own_site.directory / "late"
    port = str(free_port())
    taskmanager = own_site.start_python(
        "-P", "-m", "taskmanager", "--dir", str(own_site.directory / "tm"),
        "--jobmanager", f"127.0.0.1:{port}",
    )  # fmt: skip
    taskmanager.wait_for_line("token.awaited")
    jobmanager = own_site.start_python(
        "-P", "-m", "jobmanager", "--dir", str(directory), "-D", f"jobmanager.rpc.port={port}"
    )
    taskmanager.wait_for_line("taskmanager.registered")
    for daemon in (taskmanager, jobmanager):
        daemon.send(signal.SIGTERM)
        assert daemon.wait().status == 0


def test_a_killed_jobmanagers_token_is_told_to_nobody(own_site: Site) -> None:
    jobmanager = own_site.start_python(
        "-P", "-m", "jobmanager", "--dir", str(own_site.directory / "jm"), "-D", "jobmanager.rpc.port=0"
    )  # fmt: skip
    jobmanager.wait_for_line("jobmanager.started")
    address = DaemonCluster(own_site, "jm").daemons()[0]["address"]
    assert find_token(address) is not None
    jobmanager.send(signal.SIGKILL)
    jobmanager.wait()
    assert find_token(address) is None


def test_an_open_port_has_to_be_asked_for(own_site: Site) -> None:
    cluster = DaemonCluster(own_site)
    cluster.start("-D", "security.open-loopback=true")
    assert not (cluster.directory / "token").exists()
    with Client(cluster.jobmanager, "") as client:
        assert client.jobs() == []
    cluster.stop()
    own_site.assert_nothing_left()


def test_an_embedded_cluster_makes_a_token_and_takes_it_along(own_site: Site) -> None:
    script = own_site.directory / "job.py"
    script.write_text(
        textwrap.dedent("""
        import glob, os, stat, tempfile
        import penstock as ps
        env = ps.Environment()
        rows = env.from_rows([{"a": 7}]).collect()
        env.execute()
        (token,) = glob.glob(tempfile.gettempdir() + "/penstock-*/token")
        print(oct(stat.S_IMODE(os.stat(token).st_mode)), rows)
        """)
    )
    ended = own_site.start_python(str(script)).wait()
    assert ended.stdout.startswith("0o600 "), ended.stderr
    own_site.assert_nothing_left()


def test_a_token_file_that_others_can_read_is_refused(own_site: Site) -> None:
    secret = own_site.directory / "secret"
    secret.write_text("a-long-enough-secret\n")
    secret.chmod(0o644)
    option = ("-D", f"security.token-file={secret}")
    ended = own_site.penstock("cluster", "start", "--dir", str(own_site.directory / "c"), *option)
    assert ended.status != 0
    assert f"{secret} can be read by other users (mode 0644)" in ended.stderr
    assert f"chmod 600 {secret}" in ended.stderr
    own_site.assert_nothing_left()
