"""The files of ``deploy/`` and ``docker-compose.yml``, judged by the tools that will read them.

Aim: what is documented for operators works as it is. Method: each file goes through the tool that
reads it in the end (docker-compose, systemd, hadolint, the configuration model), and so does a broken
copy, to show that the check sees something. No container is started; instead the daemons of
``docker-compose.yml`` are started as plain processes with the command lines that stand there, run a job,
and are scraped by a real Prometheus.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pyarrow as pa
import pytest
import yaml

import penstock as ps
from penstock.config import Configuration, known_keys
from penstock.errors import ConfigurationError, StreamError
from tests.support.jobs import DEADLINE_S, await_details
from tests.support.processes import wait_in_directory
from tests.support.servers import Prometheus, free_port, require, run_tool, running, wait_for

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
CONFIG_FILE = ROOT / "deploy" / "config" / "penstock.yaml"
CHECKPOINTS = "/var/lib/penstock-checkpoints"
TOKEN = "a-secret-for-this-test"
START_TIMEOUT_S = 40.0
KERNEL_CACHE = {
    "NUMBA_CACHE_DIR": os.environ.get("NUMBA_CACHE_DIR")
    or str(Path.home() / ".cache" / "penstock" / "kernels")
}
"""Shared with ``penstock cluster start``, so that kernels are compiled once for all tests."""

pytestmark = pytest.mark.integration

# ---------------------------------------------------------------- files


def compose_problems(directory: Path) -> tuple[int, str]:
    token = directory / "penstock-token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    compose = require("docker-compose")
    return run_tool([compose, "-f", directory / "docker-compose.yml", "config", "-q"])


def test_compose_file_is_valid(tmp_path: Path) -> None:
    shutil.copy(COMPOSE, tmp_path)
    assert compose_problems(tmp_path) == (0, "")


@pytest.mark.parametrize(
    ("good", "broken"),
    [("command:", "comand:"), ("services:", "service:"), ("    volumes:\n", "    volumes\n")],
)
def test_a_broken_compose_file_is_noticed(tmp_path: Path, good: str, broken: str) -> None:
    text = COMPOSE.read_text()
    assert good in text
    (tmp_path / "docker-compose.yml").write_text(text.replace(good, broken, 1))
    status, output = compose_problems(tmp_path)
    assert status != 0, output


def test_all_composed_daemons_see_the_same_checkpoints() -> None:
    composed = yaml.safe_load(COMPOSE.read_text())
    assert "checkpoints" in composed["volumes"]
    for service in composed["services"].values():
        assert f"checkpoints:{CHECKPOINTS}" in service["volumes"]
        assert f"execution.checkpointing.dir={CHECKPOINTS}" in service["command"]
    # A volume that is mounted on nothing belongs to root, and the daemons are not root.
    made = re.search(
        r"install -d -o penstock -g penstock (.+)$", DOCKERFILE.read_text(), re.MULTILINE
    )
    assert made is not None
    assert CHECKPOINTS in made[1].split()


def unit_problems(unit: Path, directory: Path, text: str | None = None) -> str:
    """What systemd says against a unit; its interpreter is replaced by one that is installed."""
    analyze = require("systemd-analyze")
    text = unit.read_text() if text is None else text
    assert "ExecStart=/opt/penstock/bin/python " in text
    copy = directory / unit.name
    copy.write_text(text.replace("/opt/penstock/bin/python", sys.executable))
    status, output = run_tool([analyze, "verify", "--man=no", copy])
    problems = [line for line in output.splitlines() if unit.name in line]
    return "\n".join(problems) if status == 0 else output


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_units_are_valid(unit: Path, tmp_path: Path) -> None:
    assert unit_problems(unit, tmp_path) == ""


@pytest.mark.parametrize(
    ("good", "broken"),
    [
        (
            "ExecStart=/opt/penstock/bin/python",
            "ExecStart=/opt/penstock/bin/python --none\nExecSart=",
        ),
        ("Restart=always", "Restart=sometimes"),
        ("KillMode=", "KilMode="),
    ],
)
def test_a_broken_unit_is_noticed(tmp_path: Path, good: str, broken: str) -> None:
    text = UNITS[0].read_text()
    assert good in text
    assert unit_problems(UNITS[0], tmp_path, text.replace(good, broken, 1))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_start_the_daemon_they_are_named_after(unit: Path) -> None:
    role = unit.stem.removeprefix("penstock-")
    state = re.search(r"^StateDirectory=(.+)$", unit.read_text(), re.MULTILINE)
    assert state is not None
    command = f"ExecStart=/opt/penstock/bin/python -P -m {role} --dir /var/lib/{state[1]}\n"
    assert command in unit.read_text()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_may_write_the_documented_directory_of_checkpoints(unit: Path) -> None:
    documented = re.search(
        r"^execution\.checkpointing\.dir: (/\S+)$",
        (ROOT / "docs" / "operations.md").read_text(),
        re.MULTILINE,
    )
    assert documented is not None
    # The minus: a unit starts where nobody has made it.
    assert f"\nReadWritePaths=-{documented[1]}\n" in unit.read_text()


def test_dockerfile_is_valid(tmp_path: Path) -> None:
    hadolint = require("hadolint")
    assert run_tool([hadolint, "--no-color", DOCKERFILE]) == (0, "")
    broken = tmp_path / "Dockerfile"
    broken.write_text(DOCKERFILE.read_text().replace("WORKDIR /src", "RUN cd src"))
    status, output = run_tool([hadolint, "--no-color", broken])
    assert status != 0
    assert "DL3003" in output


def test_dockerfile_copies_what_is_there() -> None:
    copied = re.findall(
        r"^COPY (?!--from)(?:--\S+ )?(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE
    )
    sources = [name for names in copied for name in names.split()]
    assert {"penstock", "common", "jobmanager", "taskmanager", "pyproject.toml"} <= set(sources)
    assert [name for name in sources if not (ROOT / name).exists()] == []


# ---------------------------------------------------------------- the configuration file

WITHOUT_DEFAULT = {
    "execution.checkpointing.interval": "10s",
    "execution.checkpointing.dir": "/var/lib/penstock/checkpoints",
    "execution.checkpointing.savepoint-dir": "/var/lib/penstock/savepoints",
    "execution.checkpointing.local-backup.dirs": "/var/lib/penstock/copies",
    "execution.checkpointing.local-backup.enabled": True,
    "execution.state-recovery.path": "/var/lib/penstock/savepoints/savepoint-1",
    "execution.state-recovery.in-doubt": "leave",
    "s3.endpoint": "http://127.0.0.1:9000",
    "s3.region": "eu-central-1",
    "s3.access-key": "key",
    "s3.secret-key": "secret",
    "restart-strategy.type": "fixed-delay",
    "taskmanager.spill.dir": "/var/lib/penstock/spill",
    "high-availability.storageDir": "/var/lib/penstock/shared",
    "high-availability.zookeeper.quorum": "zookeeper-1:2181,zookeeper-2:2181",
    "high-availability.zookeeper.client.credentials-file": "/run/secrets/zookeeper",
    "jobmanager.failure-enrichers": "team",
    "taskmanager.jobmanager-grace": "1min",
    "jobmanager.storage.dir": "/var/lib/penstock",
    "taskmanager.id": "tm-1",
    "security.token-file": "/run/secrets/penstock-token",
}


def uncommented() -> str:
    return re.sub(r"^#(?=[a-z])", "", CONFIG_FILE.read_text(), flags=re.MULTILINE)


def test_every_key_of_the_configuration_file_is_known_and_shows_its_default(tmp_path: Path) -> None:
    assert Configuration.load(CONFIG_FILE) == Configuration()
    values = yaml.safe_load(uncommented())
    assert sorted(values) == sorted(known_keys())
    assert sorted(key for key, value in values.items() if value is None) == sorted(WITHOUT_DEFAULT)
    defaults = {key: value for key, value in values.items() if value is not None}
    assert Configuration.from_mapping(defaults) == Configuration()

    filled = tmp_path / "penstock.yaml"
    filled.write_text(yaml.safe_dump({**values, **WITHOUT_DEFAULT}))
    loaded = Configuration.load(filled)
    assert loaded.security_token_file == "/run/secrets/penstock-token"
    assert loaded.taskmanager_id == "tm-1"

    filled.write_text(uncommented().replace("heartbeat.interval", "heartbeat.intervall"))
    with pytest.raises(ConfigurationError, match=r"did you mean heartbeat\.interval"):
        Configuration.load(filled)


# ---------------------------------------------------------------- the cluster of docker-compose.yml


@dataclass(frozen=True)
class ComposedCluster:
    jobmanager: str
    metrics_addresses: dict[str, str]


def registered(directory: Path, role: str) -> dict[str, Any] | None:
    for path in (directory / "run").glob(f"{role}-*.json"):
        with contextlib.suppress(FileNotFoundError):
            content: dict[str, Any] = json.loads(path.read_text())
            return content
    return None


def local_command(service: str, command: list[str], directory: Path, jobmanager: str) -> list[str]:
    """The command line of a service with what only exists in containers replaced."""
    replaced = {
        "/var/lib/penstock": str(directory),
        "jobmanager:6123": jobmanager,
        "security.token-file=/run/secrets/penstock-token": (
            f"security.token-file={directory.parent / 'penstock-token'}"
        ),
        f"execution.checkpointing.dir={CHECKPOINTS}": (
            f"execution.checkpointing.dir={directory.parent / 'checkpoints'}"
        ),
        f"taskmanager.host={service}": "taskmanager.host=127.0.0.1",
        "jobmanager.rpc.address=jobmanager": "jobmanager.rpc.address=127.0.0.1",
        "jobmanager.metrics.port=9249": "jobmanager.metrics.port=0",
        "taskmanager.metrics.port=9249": "taskmanager.metrics.port=0",
    }
    arguments = [replaced.get(argument, argument) for argument in command]
    if service == "jobmanager":
        arguments += ["-D", f"jobmanager.rpc.port={jobmanager.rpartition(':')[2]}"]
    return [sys.executable, "-P", "-m", *arguments]


@contextlib.contextmanager
def composed_cluster(directory: Path) -> Iterator[ComposedCluster]:
    token = directory / "penstock-token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    jobmanager = f"127.0.0.1:{free_port()}"
    metrics: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for service, content in yaml.safe_load(COMPOSE.read_text())["services"].items():
            own = directory / service
            own.mkdir()
            command = local_command(service, content["command"], own, jobmanager)
            log = directory / f"{service}.log"
            process = stack.enter_context(running(command, log, KERNEL_CACHE))
            role = content["command"][0]
            daemon = wait_for(process, log, lambda: registered(own, role), START_TIMEOUT_S)  # noqa: B023
            metrics[service] = daemon["metrics_address"]
        yield ComposedCluster(jobmanager, metrics)


def bids(start: int, count: int) -> pa.RecordBatch:
    position = np.arange(start, start + count)
    return pa.record_batch({"auction": position % 10, "ts": position * 10})


def run_job(address: str) -> None:
    with ps.Environment(address, parallelism=2) as env:
        rows = (
            env.generate(bids, rows=30_000)
            .with_event_time("ts")
            .key_by("auction")
            .window(ps.tumbling("10s"))
            .aggregate(n=ps.count())
            .uid("counts")
            .collect()
        )
        assert env.execute("counts").status == "FINISHED"
        assert sum(row.n for row in rows) == 30_000


def run_job_with_checkpoints(address: str, directory: Path) -> None:
    """By default: the configuration of the daemons says where they go."""
    with ps.Environment(address, parallelism=2) as env:
        rows = (
            env.generate(bids, rows=20_000, rate=10_000)
            .key_by("auction")
            .aggregate(n=ps.count())
            .uid("totals")
            .collect()
        )
        handle = env.submit("totals")
        await_details(handle, lambda metrics, state: state == "RUNNING")
        checkpoint_id = handle.checkpoint(20)
        (checkpoint,) = [one for one in handle.checkpoints() if one.id == checkpoint_id]
        assert checkpoint.status == "COMPLETED"
        assert Path(checkpoint.path).is_relative_to(directory)
        assert (directory / handle.job_id / "HEAD").is_file()
        assert handle.wait(DEADLINE_S).status == "FINISHED"
        gone = directory / handle.job_id
        wait_in_directory(directory, lambda: not gone.exists(), "a finished job has no checkpoints")
        totals = {row.auction: row.n for row in rows}
        assert totals == dict.fromkeys(range(10), 2_000)


SUBTASK_METRICS = {
    "records_in_total",
    "records_out_total",
    "in_bytes_total",
    "out_bytes_total",
    "busy_seconds_total",
    "idle_seconds_total",
    "back_pressured_seconds_total",
    "late_records_total",
    "bad_records_total",
    "watermark_timestamp_seconds",
    "restored_local_bytes_total",
    "restored_store_bytes_total",
    "local_backup_failures_total",
    "checkpoint_start_delay_seconds",
    "checkpoint_alignment_seconds",
    "checkpoint_in_flight_bytes",
    "checkpoint_sync_seconds",
    "checkpoint_async_seconds",
    "checkpoint_uploaded_bytes",
    "state_bytes",
}
STORE_METRICS = {
    "penstock_s3_requests_total",
    "penstock_s3_sent_bytes_total",
    "penstock_s3_received_bytes_total",
    "penstock_file_store_requests_total",
    "penstock_file_store_written_bytes_total",
    "penstock_file_store_read_bytes_total",
}
JOB_METRICS = {
    "restarts_total",
    "checkpoints_completed_total",
    "checkpoints_failed_total",
    "last_checkpoint_duration_seconds",
    "last_checkpoint_state_bytes",
    "last_checkpoint_uploaded_bytes",
    "last_checkpoint_in_flight_bytes",
    "last_checkpoint_start_delay_seconds",
    "last_checkpoint_alignment_seconds",
    "last_checkpoint_sync_seconds",
    "last_checkpoint_async_seconds",
    "work_at_risk_seconds",
    "region_restarts_total",
    "speculative_attempts_total",
    "speculative_attempts_won_total",
    "store_calls_given_up_total",
    "store_calls_hanging",
    "dropped_events_total",
    "output_repeated_total",
}
JOBMANAGER_METRICS = {
    "jobs",
    "slots",
    "slots_free",
    "taskmanagers",
    "jobs_waiting_for_slots",
    "taskmanagers_lost_total",
    "held_partitions",
    "held_partitions_bytes",
    "dropped_events_total",
    "uptime_seconds",
    "leading",
    "leader_epoch",
    "leader_changes_total",
    "zookeeper_state",
    "swaps_total",
    "heartbeat_age_seconds",
}
TASKMANAGER_METRICS = {
    "uptime_seconds",
    "heartbeat_age_seconds",
    "dropped_events",
    "slots",
    "slots_free",
    "forkserver_restarts",
    "partition_server_restarts",
    "held_partitions",
    "spill_bytes",
    "spill_free_bytes",
    "spill_written_bytes_total",
    "spill_read_bytes_total",
    "spill_write_seconds_total",
    "spill_read_seconds_total",
}


def families(text: str) -> set[str]:
    return set(re.findall(r"^# TYPE (penstock_\S+)", text, re.MULTILINE))


def check_metrics(text: str, daemon: str, own: set[str]) -> None:
    """Names, types and help as Prometheus wants them, and exactly those that are documented."""
    assert run_tool([require("promtool"), "check", "metrics"], stdin=text) == (0, "")
    expected = {f"penstock_subtask_{name}" for name in SUBTASK_METRICS}
    expected |= {f"penstock_{daemon}_{name}" for name in own}
    if daemon == "jobmanager":
        expected |= {f"penstock_job_{name}" for name in JOB_METRICS}
    expected |= STORE_METRICS
    assert families(text) == expected
    documented = (ROOT / "docs" / "operations.md").read_text()
    assert [name for name in sorted(expected) if f"`{name}" not in documented] == []


def test_the_composed_cluster_runs_a_job_and_is_scraped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("promtool")
    require("prometheus")
    with composed_cluster(tmp_path) as cluster:
        monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)
        with pytest.raises(StreamError, match="token"):
            run_job(cluster.jobmanager)
        monkeypatch.setenv("PENSTOCK_TOKEN", TOKEN)
        run_job(cluster.jobmanager)
        run_job_with_checkpoints(cluster.jobmanager, tmp_path / "checkpoints")

        addresses = cluster.metrics_addresses
        assert sorted(addresses) == ["jobmanager", "taskmanager-1", "taskmanager-2"]
        for service, address in addresses.items():
            with urlopen(f"http://{address}/metrics", timeout=5) as response:
                text = response.read().decode()
            is_jobmanager = service == "jobmanager"
            check_metrics(
                text,
                "jobmanager" if is_jobmanager else "taskmanager",
                JOBMANAGER_METRICS if is_jobmanager else TASKMANAGER_METRICS,
            )

        with Prometheus(tmp_path, {"penstock": list(addresses.values())}).running() as prometheus:
            up = prometheus.wait_for_samples("up == 1", 3)
            assert {sample["metric"]["instance"] for sample in up} == set(addresses.values())
            (taskmanagers,) = prometheus.wait_for_samples("penstock_jobmanager_taskmanagers", 1)
            assert taskmanagers["value"][1] == "2"
            (read,) = prometheus.wait_for_samples(
                'sum(penstock_subtask_records_in_total{vertex="v0"})', 1
            )
            assert read["value"][1] == "50000"


def test_a_metric_that_prometheus_would_not_like_is_noticed() -> None:
    bad = "# TYPE penstock_rows_total gauge\npenstock_rows_total 1\n"
    status, output = run_tool([require("promtool"), "check", "metrics"], stdin=bad)
    assert status != 0
    assert "penstock_rows_total" in output
