"""Aim: no secret of a cluster comes out of it: not in logs, metrics, answers, messages, plans, command lines or files.

Method: secrets that are like nothing else are planted wherever a configuration takes one (token, keys of S3, password of
ZooKeeper, private key); real daemons run jobs that succeed and that fail, at the most talkative log level, and clients ask
them everything, with the right secrets and with wrong ones. Then all that has come out is searched. A word that is no secret
is planted beside them and has to be found, so that the search is known to look where things are.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest
import trustme
import yaml
from click.testing import CliRunner, Result
from kazoo.client import KazooClient

from penstock.cli.main import main
from penstock.client.announced_tokens import announcements_directory
from penstock.client.client import Client
from penstock.client.client_tls import ClientTls
from penstock.client.job import JobHandle
from tests.support.certificates import CertificateFiles, certificate_files
from tests.support.jobs import DEADLINE_S, await_details, cancel
from tests.support.processes import DaemonCluster, Deadline, Site, site
from tests.support.radosgw import RadosGateway, s3_options
from tests.support.zookeeper import ZookeeperServer, ensemble, quorum

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

BUCKET = "planted"
WORD = "visible-word-of-the-job"
"""No secret: the job's name."""

JOB = f"""
import os, sys
import penstock as ps, pyarrow as pa

FAILS = sys.argv[1:] == ["fails"]

def numbers(start, count):
    return pa.record_batch({{"n": pa.array(range(start, start + count), pa.int64())}})

def one(row):
    if FAILS and row.n == 100:
        raise ValueError("{WORD}")
    return {{"key": row.n % 3}}

env = ps.Environment(config={{
    "s3.access-key": os.environ["OWN_ACCESS_KEY"], "s3.secret-key": os.environ["OWN_SECRET_KEY"],
}})
keyed = env.generate(numbers, rate=1000, schema={{"n": "int64"}}).map(one, schema={{"key": "int64"}}).key_by("key")
keyed.aggregate(n=ps.count()).print()
env.execute("{WORD}")
"""


@dataclass(frozen=True)
class Secrets:
    """What must not be found, by what it is."""

    token: str = "planted-token-Qm7tRw2xKe"
    wrong_token: str = "planted-wrong-token-Zx4pLs"
    access_key: str = "PLANTEDACCESSKEYQ3W8"
    secret_key: str = "planted0secret0key0Hn5vYc0Jd8sTb"
    wrong_secret_key: str = "planted0wrong0secret0Uf2gMk6"
    zookeeper_password: str = "planted-password-Gr9bNv"
    private_key: str = field(default="")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("planted")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def files(place: Site) -> CertificateFiles:
    issuer = trustme.CA(organization_name="planted")
    return certificate_files(place.directory / "certificates", issuer)


@pytest.fixture(scope="module")
def secrets(files: CertificateFiles) -> Secrets:
    return Secrets(private_key=files.key.read_text().splitlines()[1])


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZookeeperServer]:
    with ensemble(tmp_path_factory.mktemp("zookeeper")) as (server,):
        yield server


@pytest.fixture(scope="module")
def cluster(
    place: Site,
    files: CertificateFiles,
    secrets: Secrets,
    zookeeper: ZookeeperServer,
    s3_server: RadosGateway,
) -> Iterator[DaemonCluster]:
    s3_server.make_user("planted", secrets.access_key, secrets.secret_key)
    s3_server.client(secrets.access_key, secrets.secret_key).create_bucket(Bucket=BUCKET)
    settings = {
        **s3_options(s3_server.endpoint),
        "s3.access-key": secrets.access_key,
        "s3.secret-key": secrets.secret_key,
        "execution.checkpointing.dir": f"s3://{BUCKET}/checkpoints",
        "execution.checkpointing.interval": "300ms",
        "state.storage.fs.memory-threshold": "1",
        "high-availability.type": "zookeeper",
        "high-availability.zookeeper.quorum": quorum([zookeeper]),
        "high-availability.zookeeper.client.auth": "digest",
        "high-availability.zookeeper.client.acl": "creator",
        "high-availability.zookeeper.client.credentials-file": secret_file(
            place, "zookeeper", f"penstock:{secrets.zookeeper_password}"
        ),
        "high-availability.storageDir": f"s3://{BUCKET}/kept",
        **files.settings,
        "security.ssl.client.enabled": "true",
        "security.token-file": secret_file(place, "token", secrets.token),
        "log.level": "debug",
    }
    cluster = DaemonCluster(place)
    given = [part for key, value in settings.items() for part in ("-D", f"{key}={value}")]
    cluster.start(*given, slots=2)
    yield cluster
    cluster.stop()


def secret_file(place: Site, name: str, content: str) -> str:
    path = place.directory / "secrets" / name
    path.parent.mkdir(exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(content)
    return str(path)


# ---------------------------------------------------------------- what comes out


class Found:
    """All that has come out, by where."""

    def __init__(self) -> None:
        self.texts: dict[str, bytes] = {}

    def add(self, where: str, content: object) -> None:
        """One more text, or what prints as one."""
        encoded = content if isinstance(content, bytes) else str(content).encode()
        self.texts[where] = self.texts.get(where, b"") + encoded

    def where(self, word: str) -> list[str]:
        """Where a word is, in one of the forms in which it may travel."""
        forms = {word.encode(), quote(word, safe="").encode()}
        forms |= {base64.b64encode(form) for form in tuple(forms)}
        return [where for where, text in self.texts.items() if any(form in text for form in forms)]


def ask(found: Found, *arguments: str, status: int = 0, form: tuple[str, ...] = ()) -> Result:
    """A command, and what it printed."""
    result = CliRunner().invoke(main, [*arguments, *form])
    assert result.exit_code == status, f"{arguments}: {result.output}{result.exception!r}"
    found.add(f"penstock {arguments[0]}", result.output)
    return result


FORMS: tuple[tuple[str, ...], ...] = ((), ("--json",))


def ask_everything(found: Found, cluster: DaemonCluster, job_id: str) -> None:
    """Every command that shows something of a cluster or a job."""
    there = ("--jobmanager", cluster.jobmanager)
    for form in FORMS:
        for command in ("info", "checkpoints", "exceptions", "logs"):
            ask(found, command, job_id, *there, form=form)
        for command in ("list", "taskmanagers", "partitions"):
            ask(found, command, *there, form=form)
        ask(found, "cluster", "status", "--dir", str(cluster.directory), form=form)


def ask_in_vain(
    found: Found, cluster: DaemonCluster, secrets: Secrets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With wrong secrets, and with a configuration that is none; in the current directory."""
    configuration = Path("penstock.yaml")
    own = yaml.safe_load(configuration.read_text())
    wrong = {key: value for key, value in own.items() if key != "security.token-file"}
    configuration.write_text(yaml.safe_dump({**wrong, "s3.secret-key": secrets.wrong_secret_key}))
    monkeypatch.setenv("PENSTOCK_TOKEN", secrets.wrong_token)
    ask(found, "list", "--jobmanager", cluster.jobmanager, status=1)
    ask(found, "savepoints", f"s3://{BUCKET}/savepoints", status=1)
    ask(found, "fsck", f"s3://{BUCKET}/checkpoints", status=1)
    for line in (
        f"s3.secret-key: {secrets.secret_key}",  # alone
        f"s3.secret-key: [{secrets.secret_key}]",
        f"s3.secret-key: '{secrets.secret_key}\n: [",  # no YAML
        f"s3.secret-kay: {secrets.secret_key}",
        f"s3: {secrets.secret_key}",
        f"{secrets.secret_key}",
    ):
        configuration.write_text(line)
        ask(found, "list", status=2)
    monkeypatch.delenv("PENSTOCK_TOKEN")


def look_at_daemons(found: Found, place: Site, cluster: DaemonCluster) -> None:
    """Their endpoints and their command lines."""
    for daemon in cluster.daemons():
        for path in ("metrics", "health"):
            with urlopen(f"http://{daemon['metrics_address']}/{path}", timeout=10) as answer:
                found.add(f"{daemon['role']}/{path}", answer.read())
    for process in place.processes():
        found.add("command lines", "\n".join(process.command))


def look_at_calls(found: Found, client: Client, job_id: str) -> None:
    """What clients are answered, as messages."""
    found.add("calls", client.job(job_id))
    found.add("calls", client.cluster())
    found.add("calls", client.checkpoints(job_id))
    found.add("calls", client.exceptions(job_id))


def look_at_files(found: Found, directory: Path) -> None:
    for place, _, names in os.walk(directory):
        for path in (Path(place, name) for name in names):
            with contextlib.suppress(FileNotFoundError):  # a job that has ended is cleaned up
                if path.is_file() and not path.is_symlink():
                    found.add(f"file {path.relative_to(directory)}", path.read_bytes())
                    found.add("names of files", path.name)


def look_into_the_bucket(found: Found, client: Any) -> None:
    deadline = Deadline("a manifest of a checkpoint", DEADLINE_S)
    while not any(one.startswith("object checkpoints/") for one in found.where(WORD)):
        deadline.left()  # the job's next checkpoint may have come between the list and the look
        look_at_objects(found, client)


def look_at_objects(found: Found, client: Any) -> None:
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        for one in page.get("Contents", ()):
            with contextlib.suppress(client.exceptions.NoSuchKey):  # the job runs on
                content = client.get_object(Bucket=BUCKET, Key=one["Key"])["Body"].read()
                found.add(f"object {one['Key']}", content)


def look_into_zookeeper(found: Found, server: ZookeeperServer, secrets: Secrets) -> None:
    client = KazooClient(
        server.address, auth_data=[("digest", f"penstock:{secrets.zookeeper_password}")]
    )
    client.start()

    def look(path: str) -> None:
        found.add(f"node {path}", client.get(path)[0])
        for child in client.get_children(path):
            look(f"{path.rstrip('/')}/{child}")

    try:
        look("/penstock")
    finally:
        client.stop()
        client.close()


def test_planted_secrets_are_found_nowhere(
    cluster: DaemonCluster,
    place: Site,
    files: CertificateFiles,
    secrets: Secrets,
    zookeeper: ZookeeperServer,
    s3_server: RadosGateway,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.storage.open_store._s3", None)  # as the commands say it
    found = Found()
    keys = {"OWN_ACCESS_KEY": secrets.access_key, "OWN_SECRET_KEY": secrets.secret_key}
    own = {
        **s3_options(s3_server.endpoint),
        "s3.access-key": secrets.access_key,
        "s3.secret-key": secrets.secret_key,
        "security.ssl.client.enabled": True,
        "security.ssl.client.ca": str(files.ca),
        "security.token-file": str(place.directory / "secrets" / "token"),
    }
    Path("penstock.yaml").write_text(yaml.safe_dump(own))
    script = tmp_path / "job.py"
    script.write_text(JOB)
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    there = ("--jobmanager", cluster.jobmanager)

    for form in FORMS:
        ask(found, "plan", str(script), form=form)
    run = ("run", *there, "--json", "-D", "restart-strategy.type=none", str(script))
    started = [
        place.start_penstock(*run, *others, directory=tmp_path, environment=keys)
        for others in (("--detach",), ("--", "fails"))
    ]
    ran, failed = (program.wait() for program in started)
    assert (ran.status, failed.status) == (0, 1), ran.stderr + failed.stderr
    for ended in (ran, failed):
        found.add("penstock run", ended.stdout + ended.stderr)
    job_id = ran.json["jobs"][0]["job_id"]
    with Client(cluster.jobmanager, secrets.token, tls=ClientTls(files.ca)) as client:
        handle = JobHandle(client, job_id)
        await_details(handle, lambda _, state: state == "RUNNING" and handle.checkpoints())
        kept = f"s3://{BUCKET}/savepoints"
        for one in client.jobs():
            ask_everything(found, cluster, one.job_id)
            look_at_calls(found, client, one.job_id)
        for form in FORMS:
            taken = ask(found, "savepoint", job_id, kept, *there, form=form)
            ask(found, "savepoints", kept, form=form)
            ask(found, "fsck", f"s3://{BUCKET}/checkpoints", form=form)
        ask(found, "state", json.loads(taken.stdout)["path"], "--json")
        ask_in_vain(found, cluster, secrets, monkeypatch)
        look_at_daemons(found, place, cluster)
        look_into_the_bucket(found, s3_server.client(secrets.access_key, secrets.secret_key))
        cancel(handle)
    look_into_zookeeper(found, zookeeper, secrets)
    look_at_files(found, cluster.directory)
    look_at_files(found, place.temporary)
    for path in announcements_directory().glob("*.json"):
        found.add("announcements", path.read_bytes())

    # Where a cluster is configured is the one place that has it, and nobody else may look.
    configured = cluster.directory / "penstock.yaml"
    assert configured.stat().st_mode & 0o077 == 0
    assert secrets.secret_key in found.texts.pop("file penstock.yaml").decode()
    shown = {name: found.where(secret) for name, secret in vars(secrets).items()}
    assert {name: where for name, where in shown.items() if where} == {}

    # It looks where things are.
    where = found.where(WORD)
    assert {"penstock exceptions", "penstock list", "penstock plan", "calls"} <= set(where)
    for kind in ("file logs/", "object kept/", "object checkpoints/"):
        assert any(place.startswith(kind) for place in where), f"{kind} in {where}"
    assert {"jobmanager/metrics", "taskmanager/health", "command lines"} <= set(found.texts)
    assert any(where.startswith("node ") for where in found.texts)
