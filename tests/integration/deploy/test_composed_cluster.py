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
from tests.support.jobs import DEADLINE_S, await_details
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
        name for name in topology.named("jobmanager-") if health(topology, name) == (0, "serving")
    )


def samples(topology: LocalTopology, expression: str, count: int) -> list[dict[str, Any]]:
    """What Prometheus says, once it says so much."""
    url = f"http://{topology.address('prometheus', 9090)}/api/v1/query?query={quote(expression)}"
    deadline = Deadline(f"{count} samples of {expression}", 60)
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
    "watermark_lag_seconds",
    "in_queued_bytes",
    "in_credit_bytes",
    "out_waiting_batches",
    "state_memory_bytes",
    "rocksdb_memtable_bytes",
    "rocksdb_level0_files",
    "rocksdb_pending_compaction_bytes",
    "rocksdb_file_bytes",
    "rocksdb_block_cache_hits_total",
    "rocksdb_block_cache_misses_total",
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
    "gateway_restarts",
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


def test_the_composed_cluster_needs_its_token_and_runs_jobs(
    topology: LocalTopology, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_job_with_checkpoints(topology.jobmanagers, topology.directory / "storage" / "checkpoints")
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
        is_jobmanager = service == leads
        check_metrics(
            text,
            "jobmanager" if is_jobmanager else "taskmanager",
            JOBMANAGER_METRICS if is_jobmanager else TASKMANAGER_METRICS,
        )


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
