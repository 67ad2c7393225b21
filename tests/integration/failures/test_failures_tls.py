"""Aim: with certificates a cluster does what it does without, nobody gets in who has none, and both sides say why.

Method: real daemons and real certificates. Slots are kept from Unix sockets between them, so that rows cross from one
TaskManager to the other as they do between hosts; the ledger says whether each had its effect once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
import trustme
import yaml

import penstock as ps
from penstock.client.client import Client
from penstock.client.client_tls import ClientTls
from penstock.config import Configuration
from penstock.errors import ConfigurationError, JobManagerUnreachable, Unauthenticated
from tests.support.certificates import (
    CertificateFiles,
    certificate_files,
    expired,
    not_yet_valid,
)
from tests.support.jobs import DEADLINE_S, await_details
from tests.support.ledger_job import LedgerJob
from tests.support.other_users import (
    connected_by_nobody,
    needs_root,
    open_for_others,
    readable_by_nobody,
)
from tests.support.processes import (
    DaemonCluster,
    Program,
    Site,
    site,
    wait_ended,
    wait_in_directory,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA(organization_name="ours")


@pytest.fixture(scope="module")
def other_ca() -> trustme.CA:
    return trustme.CA(organization_name="theirs")


LISTENING = "127.0.0.1"
"""What certificates are for: ``localhost`` is another name."""
OWN_CLIENT = {"security.ssl.client.enabled": "true"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, ca: trustme.CA) -> CertificateFiles:
    return certificate_files(tmp_path_factory.mktemp("certificates"), ca, names=(LISTENING,))


@pytest.fixture(scope="module")
def guarded_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("guarded")) as place:
        yield place
        place.assert_nothing_left()


@pytest.fixture(scope="module")
def guarded(guarded_site: Site, files: CertificateFiles) -> Iterator[DaemonCluster]:
    """A cluster that speaks TLS with daemons and clients."""
    with running(guarded_site, {**files.settings, **OWN_CLIENT}) as cluster:
        yield cluster


@contextlib.contextmanager
def running(
    place: Site, settings: dict[str, str], taskmanagers: int = 1
) -> Iterator[DaemonCluster]:
    cluster = DaemonCluster(place)
    cluster.start(*given(settings), taskmanagers=taskmanagers, slots=2)
    yield cluster
    cluster.stop()
    cluster.assert_nothing_left()


def given(settings: dict[str, str]) -> list[str]:
    return [part for key, value in settings.items() for part in ("-D", f"{key}={value}")]


# ---------------------------------------------------------------- rows


def test_a_ca_is_exchanged_while_a_job_runs_and_a_gateway_dies(
    own_site: Site, ca: trustme.CA, other_ca: trustme.CA, tmp_path: Path
) -> None:
    files = certificate_files(tmp_path / "certificates", ca)
    settings = {**files.settings, "taskmanager.network.local-sockets": "false"}
    with running(own_site, settings, 2) as cluster, Client(cluster.jobmanager) as client:
        job = LedgerJob(cluster, client, tmp_path)
        job.submit("200ms")
        steps: list[Callable[[], None]] = [
            lambda: None,
            lambda: files.trust([ca, other_ca]),
            lambda: files.write(other_ca, [ca, other_ca]),
            lambda: files.trust([other_ca]),
        ]
        before = 0
        for step in steps:
            step()
            before = completed_after(job, before)
        assert client.job(job.handle.job_id).summary.restarts == 0
        pids = [
            pid
            for daemon in cluster.daemons("taskmanager")
            for pid in cluster.gateway_pids(daemon["pid"])
        ]
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGKILL)
        wait_ended(pids[0])
        # What connects now shows, and believes, the new one alone.
        job.await_that(lambda details: details.summary.restarts > 0)
        completed_after(job, before + 2)
        job.finish()
        cluster.wait_for_log("taskmanager", "gateway.lost")


def completed_after(job: LedgerJob, checkpoint_id: int) -> int:
    """The id of a checkpoint that was completed later."""
    done = job.await_checkpoints(lambda one: one.status == "COMPLETED" and one.id > checkpoint_id)
    return done.id


def test_slots_listen_to_nobody_outside(guarded: DaemonCluster, files: CertificateFiles) -> None:
    config = {**OWN_CLIENT, "security.ssl.client.ca": str(files.ca)}
    with ps.Environment(guarded.jobmanager, parallelism=2, config=config) as env:
        env.generate(_numbers, rate=10_000).discard()
        handle = env.submit("numbers")
        await_details(handle, lambda _, state: state == "RUNNING")
        (daemon,) = guarded.daemons("taskmanager")
        listening = {
            child.name()
            for child in psutil.Process(daemon["pid"]).children(recursive=True)
            for one in child.net_connections("inet")
            if one.status == psutil.CONN_LISTEN
        }
        assert listening == {"tls-gateway"}
        assert guarded.slot_pids(daemon["pid"])
        handle.cancel()
        with pytest.raises(ps.JobCanceled):
            handle.wait(DEADLINE_S)


def _numbers(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(start, start + count), pa.int64())})


# ---------------------------------------------------------------- who is let in


WRONG: dict[str, tuple[Callable[[], dict[str, object]], str, str]] = {
    "other CA": (dict, "not of a CA in", "does not know the CA"),
    "expired": (expired, "has expired", "a certificate that has expired"),
    "not yet valid": (not_yet_valid, "not valid yet", "refuses the certificate"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_taskmanager_with_a_wrong_certificate_is_told_so_and_so_is_the_jobmanager(
    guarded: DaemonCluster, tmp_path: Path, ca: trustme.CA, other_ca: trustme.CA, kind: str
) -> None:
    options, at_jobmanager, at_taskmanager = WRONG[kind]
    issuer = other_ca if kind == "other CA" else ca
    wrong = certificate_files(tmp_path / "wrong", issuer, [ca], **options())
    with stranger(guarded, guarded.jobmanager, wrong.settings):
        assert at_jobmanager in said(guarded, "jobmanager", "tls.turned_away", at_jobmanager)
        assert at_taskmanager in said(guarded, "taskmanager", "tls.refused", at_taskmanager)
        assert "there is no TLS connection to" in said(
            guarded, "taskmanager", "registration.retried", at_taskmanager
        )


def test_a_taskmanager_without_a_certificate_is_turned_away(guarded: DaemonCluster) -> None:
    plain = {"security.ssl.internal.enabled": "false", "security.ssl.client.enabled": "false"}
    with stranger(guarded, guarded.jobmanager, plain):
        said(guarded, "jobmanager", "tls.turned_away", "it speaks no TLS")
        reason = said(guarded, "taskmanager", "registration.retried", "speaks TLS")
        assert "set security.ssl.internal.enabled" in reason


def test_a_name_that_the_certificate_is_not_for(
    guarded: DaemonCluster, files: CertificateFiles
) -> None:
    port = guarded.jobmanager.rpartition(":")[2]
    with stranger(guarded, f"localhost:{port}", {}):
        reason = said(guarded, "taskmanager", "tls.refused", "its certificate is not for localhost")
        assert "security.ssl.verify-hostname" in reason
    token = (guarded.directory / "token").read_text().strip()
    with (
        Client(f"localhost:{port}", token, tls=ClientTls(files.ca)) as client,
        pytest.raises(JobManagerUnreachable, match="its certificate is not for localhost"),
    ):
        client.jobs()
    unchecked = ClientTls(files.ca, verify_hostname=False)
    with Client(f"localhost:{port}", token, tls=unchecked) as client:
        client.jobs()


@needs_root
def test_another_user_can_reach_no_socket_and_read_no_key(
    guarded: DaemonCluster, files: CertificateFiles
) -> None:
    temporary = guarded.site.temporary
    for directory in (guarded.directory, files.key.parent):
        open_for_others(directory)
    sockets = [path for path in temporary.rglob("*") if path.is_socket()]
    # Behind those of the daemons' own TLS nobody is asked for anything.
    assert len(sockets) >= 5
    assert connected_by_nobody(guarded.site, sockets) == ["refused"] * len(sockets)
    looked_at = (guarded.directory, files.key.parent, *temporary.iterdir())
    assert readable_by_nobody(guarded.site, *looked_at) == []


@contextlib.contextmanager
def stranger(
    cluster: DaemonCluster, jobmanager: str, settings: dict[str, str]
) -> Iterator[Program]:
    """A TaskManager that is not as the others are, for the time of the block."""
    started = cluster.site.start_python(
        "-P", "-m", "taskmanager", "--dir", str(cluster.directory), "--jobmanager", jobmanager,
        "-D", "taskmanager.id=stranger", *given(settings),
    )  # fmt: skip
    yield started
    started.send(signal.SIGTERM)
    started.wait()


def said(cluster: DaemonCluster, role: str, event: str, text: str) -> str:
    """The reason of an event that has been logged, with this text in it."""

    def found() -> str | None:
        for path in (cluster.directory / "logs").glob(f"{role}-*.log"):
            for line in path.read_text().splitlines():
                if event in line and text in line:
                    return str(json.loads(line)["reason"])
        return None

    reason = wait_in_directory(cluster.directory / "logs", found, f"{event}: {text}")
    assert isinstance(reason, str)
    return reason


# ---------------------------------------------------------------- clients


def test_clients_speak_tls_where_they_must(
    guarded: DaemonCluster, files: CertificateFiles, tmp_path: Path, other_ca: trustme.CA
) -> None:
    address, place = guarded.jobmanager, guarded.site
    with ps.connect(address, ca=str(files.ca)) as connected:
        connected.jobs()
    with pytest.raises(JobManagerUnreachable, match="it speaks TLS only"):
        ps.connect(address)
    other_ca.cert_pem.write_to_path(tmp_path / "other.pem")
    with pytest.raises(JobManagerUnreachable, match="not of a CA in"):
        ps.connect(address, ca=str(tmp_path / "other.pem"))
    with pytest.raises(Unauthenticated), Client(address, "", tls=ClientTls(files.ca)) as client:
        client.hello()
    said(guarded, "jobmanager", "tls.turned_away", "it speaks no TLS")
    said(guarded, "jobmanager", "call.refused", "its token is missing or wrong")
    refused = place.penstock("list", "--jobmanager", address)
    assert refused.status == 3
    assert "it speaks TLS only" in refused.stderr
    script = place.directory / "job.py"
    script.write_text(
        "import penstock as ps, pyarrow as pa\n"
        "env = ps.Environment()\n"
        "env.from_arrow(pa.table({'a': range(8)})).discard()\n"
        "env.execute('eight')\n"
    )
    own = {"security.ssl.client.enabled": True, "security.ssl.client.ca": str(files.ca)}
    # What `penstock cluster start` keeps names the CA for daemons alone.
    of_daemons = {"security.ssl.client.enabled": True, "security.ssl.internal.ca": str(files.ca)}
    (place.directory / "penstock.yaml").write_text(yaml.safe_dump(of_daemons))
    ran = place.penstock("run", str(script), "--jobmanager", address)
    assert ran.status == 0, ran.stderr
    (place.directory / "penstock.yaml").write_text(yaml.safe_dump(own))
    listed = place.penstock("list", "--jobmanager", address, "--json")
    assert listed.status == 0, listed.stderr
    assert "eight" in listed.stdout


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        (
            "security.ssl.internal.enabled needs security.ssl.internal.cert",
            {"security.ssl.internal.enabled": True, "security.ssl.internal.ca": "ca.pem"},
        ),
        ("security.ssl.client.enabled needs security.ssl.internal.enabled", OWN_CLIENT),
    ],
)
def test_what_cannot_be_is_refused(message: str, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Configuration.from_mapping(settings).check_for_daemons()
