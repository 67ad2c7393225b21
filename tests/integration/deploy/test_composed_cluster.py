"""The cluster of ``docker-compose.yml``, as the plain processes that ``make up-local`` starts from the same files.

Aim: what operators are told to start works: it serves, needs its token, takes checkpoints, outlives its leader, and is
scraped. Method: three ZooKeepers, two JobManagers, two TaskManagers and a Prometheus as processes; jobs run on them while
the one that leads is killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import penstock as ps
from deploy.local.up_local import LocalTopology
from penstock.cli.main import main
from penstock.errors import StreamError
from tests.support.elected_cluster import LEADS
from tests.support.jobs import DEADLINE_S, await_details
from tests.support.metric_names import OF_JOBMANAGER, OF_TASKMANAGER
from tests.support.paced_numbers import PacedNumbers
from tests.support.processes import Deadline, wait_ended, wait_in_directory
from tests.support.servers import require, run_tool

ROOT = Path(__file__).parents[3]
DAEMONS = ("jobmanager-1", "jobmanager-2", "taskmanager-1", "taskmanager-2")

pytestmark = pytest.mark.integration


def up_local(command: str, directory: Path) -> None:
    script = ROOT / "deploy" / "local" / "up_local.py"
    # Compiled once for all tests.
    cache = os.environ.get("NUMBA_CACHE_DIR") or str(
        Path.home() / ".cache" / "penstock" / "kernels"
    )
    done = subprocess.run(
        [sys.executable, script, command, directory],
        env={**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def topology(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTopology]:
    for tool in ("java", "prometheus", "promtool"):
        require(tool)
    directory = tmp_path_factory.mktemp("composed")
    with pytest.MonkeyPatch.context() as patch:
        try:
            up_local("up", directory)
            topology = LocalTopology(directory)
            patch.setenv("PENSTOCK_TOKEN", topology.token_file.read_text().strip())
            yield topology
        finally:
            up_local("down", directory)


def health(topology: LocalTopology, service: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["health", topology.address(service, 9249)])
    return done.exit_code, done.output.strip()


def role_of(jobmanagers: str) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["health", "--jobmanager", jobmanagers, "--json"])
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def leader(topology: LocalTopology) -> str:
    return next(
        name for name in topology.named("jobmanager-") if health(topology, name) == (0, LEADS)
    )


def samples(topology: LocalTopology, expression: str, count: int) -> list[dict[str, Any]]:
    """What Prometheus says, once it says so much."""
    url = f"http://{topology.address('prometheus', 9090)}/api/v1/query?query={quote(expression)}"
    deadline = Deadline(f"{count} samples of {expression}")
    while True:
        with urlopen(url, timeout=5) as response:
            found: list[dict[str, Any]] = json.load(response)["data"]["result"]
        if len(found) >= count:
            return found
        deadline.left()
        time.sleep(0.2)


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


def run_job_with_checkpoints(address: str, directory: Path, gate: Path) -> None:
    """By default: the configuration of the daemons says where they go."""
    with ps.Environment(address, parallelism=2) as env:
        rows = (
            env.source(PacedNumbers(20_000, gate, splits=2))
            .with_columns(auction=ps.col("n") % 10)
            .key_by("auction")
            .aggregate(n=ps.count())
            .uid("totals")
            .collect()
        )
        handle = env.submit("totals")
        await_details(handle, lambda metrics, state: state == "RUNNING")
        checkpoint_id = handle.checkpoint(DEADLINE_S)
        (checkpoint,) = [one for one in handle.checkpoints() if one.id == checkpoint_id]
        assert checkpoint.status == "COMPLETED"
        assert Path(checkpoint.path).is_relative_to(directory)
        assert (directory / handle.job_id / "HEAD").is_file()
        gate.touch()
        assert handle.wait(DEADLINE_S).status == "FINISHED"
        gone = directory / handle.job_id
        wait_in_directory(directory, lambda: not gone.exists(), "a finished job has no checkpoints")
        totals = {row.auction: row.n for row in rows}
        assert totals == dict.fromkeys(range(10), 2_000)


def families(text: str) -> set[str]:
    return set(re.findall(r"^# TYPE (penstock_\S+)", text, re.MULTILINE))


def check_metrics(text: str, expected: frozenset[str]) -> None:
    """Names, types and help as Prometheus wants them, and exactly those that there are to be."""
    assert run_tool([require("promtool"), "check", "metrics"], stdin=text) == (0, "")
    assert families(text) == expected


def test_the_composed_cluster_needs_its_token_and_runs_jobs(
    topology: LocalTopology, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoints = topology.directory / "storage" / "checkpoints"
    run_job_with_checkpoints(topology.jobmanagers, checkpoints, tmp_path / "gate")
    run_job(topology.jobmanagers)
    monkeypatch.delenv("PENSTOCK_TOKEN")
    with pytest.raises(StreamError, match="token"):
        run_job(topology.jobmanagers)


def test_who_leads_and_who_stands_by_is_told_to_whoever_asks(topology: LocalTopology) -> None:
    leads = leader(topology)
    (standby,) = set(topology.named("jobmanager-")) - {leads}
    told = f"standby; {topology.address(leads, 6123)} leads"
    assert health(topology, standby) == (0, told)
    assert {health(topology, name) for name in topology.named("taskmanager-")} == {(0, "serving")}
    assert health(topology, "zookeeper-1")[0] == 3, "nobody listens there"
    answers = [role_of(topology.address(name, 6123)) for name in (leads, standby)]
    assert [answer["role"] for answer in answers] == ["leader", "standby"]
    assert {answer["leader"] for answer in answers} == {topology.address(leads, 6123)}
    assert answers[0]["epoch"] == answers[1]["epoch"] > 0
    assert role_of(topology.jobmanagers) == answers[0]
    for service, port, why in (
        (leads, 6123, "speaks no HTTP: name the metrics address"),
        ("prometheus", 9090, "is no daemon of Penstock (HTTP status 404)"),
    ):
        other = CliRunner().invoke(main, ["health", topology.address(service, port)])
        assert other.exit_code == 3
        assert why in other.output
    silent = CliRunner().invoke(main, ["health", "--jobmanager", "127.0.0.1:1"])
    assert silent.exit_code == 3


def test_metrics_are_what_is_documented(topology: LocalTopology) -> None:
    leads = leader(topology)
    for service in (leads, *topology.named("taskmanager-")):
        with urlopen(f"http://{topology.address(service, 9249)}/metrics", timeout=5) as response:
            text = response.read().decode()
        check_metrics(text, OF_JOBMANAGER if service == leads else OF_TASKMANAGER)


def test_the_leader_is_killed_and_the_job_goes_on(topology: LocalTopology, tmp_path: Path) -> None:
    with ps.Environment(topology.jobmanagers, parallelism=2) as env:
        windows = (
            env.generate(bids, rows=40_000, rate=10_000)
            .with_event_time("ts")
            .key_by("auction")
            .window(ps.tumbling("10s"))
        )
        windows.aggregate(n=ps.count()).uid("counts").write_parquet(tmp_path / "out").uid("files")
        handle = env.submit("over two leaders")
        await_details(handle, lambda _, state: state == "RUNNING")
        killed = leader(topology)
        pid = topology.pid(killed)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_ended(pid)
        assert handle.wait(DEADLINE_S).status == "FINISHED"
        assert handle.details().summary.restarts == 0
    written = [pq.read_table(file) for file in (tmp_path / "out").glob("[!._]*.parquet")]
    assert pa.concat_tables(written)["n"].to_pylist() == [100] * 400
    assert leader(topology) != killed
    up_local("up", topology.directory)  # starts what does not run
    assert health(topology, killed)[0] == 0


def test_prometheus_scrapes_all_of_it_and_knows_the_alerts(topology: LocalTopology) -> None:
    up = samples(topology, "up == 1", 4)
    told = {sample["metric"]["instance"] for sample in up}
    assert told == {topology.address(name, 9249) for name in DAEMONS}
    (leading,) = samples(topology, "sum(penstock_jobmanager_leading) == 1", 1)
    assert leading["value"][1] == "1"
    with urlopen(f"http://{topology.address('prometheus', 9090)}/api/v1/rules") as response:
        (group,) = json.load(response)["data"]["groups"]
    assert len(group["rules"]) >= 15
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}


def test_a_metric_that_prometheus_would_not_like_is_noticed() -> None:
    bad = "# TYPE penstock_rows_total gauge\npenstock_rows_total 1\n"
    status, output = run_tool([require("promtool"), "check", "metrics"], stdin=bad)
    assert status != 0
    assert "penstock_rows_total" in output
