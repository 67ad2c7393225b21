"""Aim: what cannot run is refused before it starts, by name, and what has to wait waits no longer
than it was told to.

Method: clients and jobs of other versions against real daemons, requirements, ports, slots.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest

import penstock as ps
from penstock import errors
from penstock.client import greeting
from penstock.client.client import Client
from penstock.client.credentials import load_token, own_token_file, token_metadata
from penstock.client.grpc_errors import error_from_rpc
from penstock.client.protocol import PROTOCOL_VERSION
from penstock.local.started_processes import kernel_cache
from penstock.pb import client_pb2, client_pb2_grpc
from tests.support.processes import DEADLINE_S, Beacon, DaemonCluster, Site, tell, wait_in_directory

pytestmark = [pytest.mark.integration, pytest.mark.sampled(5)]

MakeEnvironment = Callable[..., ps.Environment]


# ---------------------------------------------------------------- versions


def test_a_client_of_another_protocol_version_is_refused(
    failure_cluster: DaemonCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeting, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    with (
        Client(failure_cluster.jobmanager) as client,
        pytest.raises(errors.ProtocolMismatch, match="same version on both sides") as raised,
    ):
        client.jobs()
    assert str(PROTOCOL_VERSION) in str(raised.value)
    assert str(PROTOCOL_VERSION + 1) in str(raised.value)


def _token_of(cluster: DaemonCluster) -> str:
    return load_token(str(own_token_file(cluster.directory))).shown


def test_a_client_that_does_not_say_hello_right_is_refused(
    failure_cluster: DaemonCluster,
) -> None:
    with grpc.insecure_channel(failure_cluster.jobmanager) as channel:
        stub = client_pb2_grpc.JobManagerStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            stub.Hello(
                client_pb2.HelloRequest(protocol_version=0),
                timeout=5,
                metadata=token_metadata(_token_of(failure_cluster)),
            )
    assert isinstance(error_from_rpc(raised.value), errors.ProtocolMismatch)


@pytest.mark.parametrize(
    ("function", "version", "told"),
    [
        ("python_version", "3.9", "built with Python 3.9"),
        ("cloudpickle_version", "1.0.0", "cloudpickle 1.0.0"),
    ],
)
def test_code_of_another_version_is_refused(
    environment: MakeEnvironment,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    version: str,
    told: str,
) -> None:
    from penstock.planner import plan

    monkeypatch.setattr(plan, function, lambda: version)
    before = len(client.jobs())
    env = environment()
    env.from_rows([{"a": 1}]).map(lambda row: row.a, schema={"a": pa.int64()}).discard()
    with pytest.raises(errors.ProtocolMismatch, match=told) as raised:
        env.execute("other-version")
    assert "TaskManager tm-" in str(raised.value)
    assert len(client.jobs()) == before, "a refused job is no job"


# ---------------------------------------------------------------- requirements


@pytest.mark.parametrize(
    ("requirement", "told"),
    [
        ("no-such-package-anywhere>=1", "is not installed"),
        ("pyarrow<1", "pyarrow<1 is wanted"),
        ("=!malformed", "malformed"),
    ],
)
def test_a_missing_requirement_is_refused_before_anything_starts(
    failure_cluster: DaemonCluster,
    own_site: Site,
    client: Client,
    tmp_path: Path,
    requirement: str,
    told: str,
) -> None:
    (tmp_path / "requirements.txt").write_text(f"# what it needs\npyarrow\n{requirement}\n")
    (tmp_path / "job.py").write_text(
        "import penstock as ps\n"
        "env = ps.Environment()\n"
        "env.from_rows([{'a': 1}]).discard()\n"
        "env.execute('needy')\n"
    )
    before = len(client.jobs())
    ended = own_site.penstock(
        "run", "job.py", "--requirements", "requirements.txt",
        "--jobmanager", failure_cluster.jobmanager,
        directory=tmp_path,
    )  # fmt: skip
    assert ended.status == 1
    assert told in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(client.jobs()) == before


def test_requirements_that_are_met_and_a_file_that_lists_none(
    failure_cluster: DaemonCluster, own_site: Site, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(
        "import penstock as ps\n"
        "env = ps.Environment()\n"
        "env.from_rows([{'a': 1}]).discard()\n"
        "env.execute('content')\n"
    )
    for content, status, told in (
        (b"pyarrow>=1  # columns\n\nno-such-package; python_version < '3'\n", 0, "FINISHED"),
        (b"-r others.txt\n", 1, "option of pip"),
        (b"\xff\xfe", 1, "cannot be read"),
    ):
        (tmp_path / "requirements.txt").write_bytes(content)
        ended = own_site.penstock(
            "run", "job.py", "--requirements", "requirements.txt",
            "--jobmanager", failure_cluster.jobmanager,
            directory=tmp_path,
        )  # fmt: skip
        assert ended.status == status, ended.stderr
        assert told in ended.stderr
        assert "Traceback" not in ended.stderr


# ---------------------------------------------------------------- slots


def test_a_job_that_no_slot_is_free_for_waits_and_then_fails(
    environment: MakeEnvironment, assert_slots_are_free: Callable[[], None]
) -> None:
    env = environment(parallelism=9, config={"slot.request.timeout": "400ms"})
    env.from_arrow(pa.table({"a": range(9)})).discard()
    started = time.monotonic()
    with pytest.raises(ps.JobFailed, match=r"needs 9 slots.*slot\.request\.timeout") as raised:
        env.execute("too-wide")
    assert time.monotonic() - started >= 0.4
    assert raised.value.cause == "NoResourceAvailable"
    assert "start more TaskManagers" in str(raised.value)
    assert_slots_are_free()


def test_a_job_that_waits_for_slots_runs_when_another_ends_and_can_be_cancelled(
    environment: MakeEnvironment, beacon: Beacon, client: Client
) -> None:
    path = beacon.path

    def hold(row: Any) -> Any:
        tell(path, row.a)
        return row.a

    env = environment(parallelism=4)
    endless = env.generate(
        lambda start, count: pa.record_batch({"a": pa.array([start] * count, pa.int64())}),
        rate=50,
        schema=pa.schema([("a", pa.int64())]),
    )
    endless.map(hold, schema={"a": pa.int64()}).discard()
    holder = env.submit("holder")
    beacon.wait()
    assert all(tm.slots_free == 0 for tm in client.cluster().taskmanagers)

    env.from_rows([{"a": 1}]).discard()
    cancelled = env.submit("waits-and-is-cancelled")
    rows = env.from_rows([{"a": 2}]).collect()
    waiting = env.submit("waits-and-runs")
    assert (cancelled.status(), waiting.status()) == ("CREATED", "CREATED")
    cancelled.cancel()
    with pytest.raises(ps.JobCanceled):
        cancelled.wait(DEADLINE_S)
    holder.cancel()
    with pytest.raises(ps.JobCanceled):
        holder.wait(DEADLINE_S)
    waiting.wait(DEADLINE_S)
    assert rows.to_pylist() == [{"a": 2}]


# ---------------------------------------------------------------- ports and addresses


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that something listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def test_a_cluster_whose_port_is_in_use_is_not_started(own_site: Site, taken: int) -> None:
    directory = own_site.directory / "cluster"
    ended = own_site.penstock(
        "cluster", "start", "--dir", str(directory), "-D", f"jobmanager.rpc.port={taken}"
    )
    assert ended.status == 1
    for told in ("the jobmanager", f"port {taken}", "in use", "jobmanager.rpc.port"):
        assert told in ended.stderr
    assert "Traceback" not in ended.stderr
    own_site.assert_nothing_left()
    assert list((directory / "run").iterdir()) == []


def test_a_cluster_whose_taskmanagers_cannot_start_is_ended(own_site: Site, taken: int) -> None:
    cluster = DaemonCluster(own_site)
    ended = own_site.penstock(
        "cluster", "start", "--taskmanagers", "1", "--dir", str(cluster.directory),
        "-D", "jobmanager.rpc.port=0", "-D", f"taskmanager.rpc.port={taken}",
    )  # fmt: skip
    assert ended.status == 1
    for told in ("the taskmanager", str(taken), "in use", "taskmanager.rpc.port"):
        assert told in ended.stderr
    assert "Traceback" not in ended.stderr
    own_site.assert_nothing_left()
    cluster.assert_nothing_left()


def test_a_cluster_of_which_a_taskmanager_is_refused_is_ended(own_site: Site) -> None:
    cluster = DaemonCluster(own_site)
    ended = own_site.penstock(
        "cluster", "start", "--taskmanagers", "2", "--dir", str(cluster.directory),
        "-D", "jobmanager.rpc.port=0", "-D", "jobmanager.taskmanagers.max=1",
        "-D", "high-availability.storageDir=/shared",
    )  # fmt: skip
    assert ended.status == 1
    for told in ("the taskmanager tm-", "ended with status 1", "one too many", "taskmanagers.max"):
        assert told in ended.stderr
    told = "high-availability.storageDir: without effect, since high-availability.type is none"
    assert told in ended.stderr
    assert told in (cluster.directory / "logs" / "jobmanager-1.log").read_text()
    own_site.assert_nothing_left()
    cluster.assert_nothing_left()


@pytest.mark.parametrize("role", ["jobmanager", "taskmanager"])
def test_a_port_for_metrics_in_use_is_named(own_site: Site, taken: int, role: str) -> None:
    # A daemon that no command starts would compile its kernels into a cache of its own.
    ended = own_site.start_python(
        "-P", "-m", role, "--dir", str(own_site.directory / role),
        "-D", f"{role}.metrics.port={taken}", "-D", "jobmanager.rpc.port=0",
        environment=kernel_cache(),
    ).wait()  # fmt: skip
    assert ended.status == 1
    for told in (str(taken), "in use", f"{role}.metrics.port"):
        assert told in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    own_site.assert_nothing_left()


def test_two_jobmanagers_do_not_share_a_directory(
    failure_cluster: DaemonCluster, own_site: Site
) -> None:
    for arguments, told in (
        (("jobmanager", "-D", "jobmanager.rpc.port=0"), "JobManager"),
        (("taskmanager", "-D", "taskmanager.id=tm-1"), "taskmanager.id"),
    ):
        role, *options = arguments
        second = own_site.start_python(
            "-P", "-m", role, "--dir", str(failure_cluster.directory), *options
        )
        ended = second.wait()
        assert ended.status == 1
        assert told in ended.stderr + ended.stdout
        assert "running" in ended.stderr + ended.stdout
        assert "Traceback" not in ended.stderr
    assert len(failure_cluster.daemons()) == 3


def test_an_address_where_something_else_listens() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with (
            Client(address, connect_timeout_s=0.3) as client,
            pytest.raises(ps.JobManagerUnreachable, match="no answer within the deadline"),
        ):
            client.jobs()


def test_an_address_where_nobody_listens(own_site: Site) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{other.getsockname()[1]}"
        ended = own_site.penstock("list", "--jobmanager", address)
    assert ended.status == 3
    assert f"no JobManager answers at {address}" in ended.stderr
    assert "penstock cluster start" in ended.stderr


def test_a_wrong_or_missing_token_is_refused(own_site: Site) -> None:
    secret = own_site.directory / "secret"
    secret.write_text("a-long-enough-secret\n")
    secret.chmod(0o600)
    cluster = DaemonCluster(own_site)
    registered = cluster.directory / "run"
    registered.mkdir(parents=True)
    daemon = own_site.start_python(
        "-P", "-m", "jobmanager", "--dir", str(cluster.directory),
        "-D", "jobmanager.rpc.port=0", "-D", f"security.token-file={secret}",
    )  # fmt: skip
    wait_in_directory(registered, cluster.daemons, "the JobManager")
    address = cluster.daemons()[0]["address"]
    for token in ("", "another-secret-of-that-length"):
        with (
            Client(address, token) as client,
            pytest.raises(errors.Unauthenticated, match="PENSTOCK_TOKEN"),
        ):
            client.jobs()
    with Client(address, "a-long-enough-secret") as client:
        assert client.jobs() == []
    daemon.send(signal.SIGTERM)
    assert daemon.wait().status == 0
    cluster.assert_nothing_left()
    own_site.assert_nothing_left()


def test_a_daemon_that_leaves_loopback_needs_a_token(own_site: Site) -> None:
    ended = own_site.penstock(
        "cluster", "start", "--dir", str(own_site.directory / "open"),
        "-D", "jobmanager.bind-host=0.0.0.0", "-D", "jobmanager.rpc.port=0",
    )  # fmt: skip
    assert ended.status == 1
    assert "jobmanager.bind-host" in ended.stderr
    assert "PENSTOCK_TOKEN" in ended.stderr
    own_site.assert_nothing_left()
