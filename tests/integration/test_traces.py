"""Aim: a collector gets a trace of each checkpoint, savepoint, start, takeover and restart; without one nothing is held up.

Method: a real cluster, and a server that takes OTLP over HTTP as collectors do. A job is started, one of its slot processes
and then its JobManager are killed. Collectors that are not there, or take a connection and never answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as ps
from penstock.local.local_cluster import LocalCluster
from penstock.local.started_processes import ClusterError
from tests.support.elected_cluster import slots_of, submitted
from tests.support.jobs import DEADLINE_S, await_details
from tests.support.processes import Deadline, wait_ended, wait_in_directory
from tests.support.span_collector import span_collector

pytestmark = pytest.mark.integration


@contextlib.contextmanager
def traced(root: Path, endpoint: str, **more: str) -> Iterator[LocalCluster]:
    cluster = LocalCluster(root / "cluster")
    cluster.configure(
        {
            "jobmanager.rpc.port": 0,
            "execution.checkpointing.interval": "200ms",
            "restart-strategy.type": "fixed-delay",
            "restart-strategy.fixed-delay.delay": "300ms",
            "restart-strategy.fixed-delay.attempts": "100",
            "traces.reporter.type": "otel",
            "traces.reporter.otel.exporter.endpoint": endpoint,
            "traces.reporter.otel.exporter.timeout": "1s",
            **more,
        }
    )
    try:
        cluster.start(taskmanagers=1, slots=2)
        yield cluster
    finally:
        cluster.stop()


def test_a_job_is_traced_over_a_failure_a_savepoint_and_a_takeover(tmp_path: Path) -> None:
    with (
        span_collector() as collector,
        traced(tmp_path, collector.address) as cluster,
        ps.Environment(cluster.address) as env,
    ):
        handle = submitted(env, tmp_path / "out")
        start = collector.await_span("start")
        assert start.service == "penstock-jobmanager"
        assert start.attributes["penstock.job.id"] == handle.job_id
        assert start.attributes["penstock.job.name"] == "counted"
        assert list(collector.parts_of(start))[-1] == "restore"

        checkpoint = collector.await_span("checkpoint", lambda span: not span.error)
        parts = collector.parts_of(checkpoint)
        assert {"store", "notify"} < set(parts)
        vertices = [part for name, part in parts.items() if name.startswith("snapshot ")]
        assert vertices
        for part in parts.values():
            assert part.trace_id == checkpoint.trace_id
            assert checkpoint.start_ms <= part.start_ms <= part.end_ms <= checkpoint.end_ms
        acknowledged = sum(part.attributes["penstock.subtasks"] for part in vertices)
        assert acknowledged == checkpoint.attributes["penstock.checkpoint.acknowledged"] > 0
        assert parts["notify"].attributes["penstock.subtasks"] == acknowledged
        for name in ("alignment_ms", "start_delay_ms", "sync_ms", "async_ms", "uploaded_bytes"):
            of_parts = [part.attributes[f"penstock.{name}"] for part in vertices]
            whole = sum(of_parts) if name.endswith("bytes") else max(of_parts)
            assert checkpoint.attributes[f"penstock.{name}"] == whole

        deadline = Deadline("the TaskManager tells of its slot", DEADLINE_S)
        while not (slots := slots_of(cluster, handle.job_id)):
            deadline.left()
        [pid] = set(slots.values())
        os.kill(pid, signal.SIGKILL)
        recovery = collector.await_span("recovery")
        assert recovery.attributes["penstock.restarts"] == 1
        assert recovery.attributes["penstock.failure.class"] == "TaskFailure"
        assert recovery.attributes["penstock.restarted_subtasks"] > 0
        assert recovery.attributes["penstock.restored_checkpoint_id"] > 0
        assert recovery.end_ms - recovery.start_ms >= 300, "the delay is in it"
        steps = collector.parts_of(recovery)
        assert {"prepare", "restore"} <= set(steps)
        assert {"stop", "delay"} & set(steps)
        ordered = sorted(steps.values(), key=lambda part: part.start_ms)
        assert ordered[0].start_ms == recovery.start_ms
        assert ordered[-1].end_ms == recovery.end_ms

        handle.savepoint(str(tmp_path / "savepoints"))
        savepoint = collector.await_span("savepoint")
        assert "store" in collector.parts_of(savepoint)

        [jobmanager] = [one for one in cluster.daemons() if one.role == "jobmanager"]
        os.kill(jobmanager.pid, signal.SIGKILL)
        wait_ended(jobmanager.pid)
        cluster.start(taskmanagers=1, slots=2)
        takeover = collector.await_span("takeover")
        assert (
            takeover.attributes["penstock.leader_epoch"] > start.attributes["penstock.leader_epoch"]
        )
        assert takeover.attributes["penstock.restarts"] == 1


@pytest.mark.parametrize("kind", ["refuses", "is silent"])
def test_a_collector_that_takes_nothing_costs_nothing(tmp_path: Path, kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if kind == "refuses":
            listener.close()
        with traced(tmp_path, f"http://127.0.0.1:{port}/v1/traces") as cluster:
            with ps.Environment(cluster.address) as env:
                handle = submitted(env, tmp_path / "out")
                await_details(handle, lambda _, state: state == "RUNNING")
                for _ in range(5):
                    handle.checkpoint()
                handle.cancel()
                with contextlib.suppress(ps.JobCanceled):
                    handle.wait(DEADLINE_S)
            log = cluster.directory / "logs" / "jobmanager-1.log"
            wait_in_directory(
                log.parent,
                lambda: "traces.not_exported" in log.read_text(),
                "the log tells of the collector",
            )
            cluster.stop()
        assert "jobmanager.stopped" in log.read_text(), "its end does not wait for the collector"
        assert log.read_text().count("traces.not_exported") == 1


@pytest.mark.parametrize(
    ("endpoint", "blocked", "word"),
    [
        ("collector:4317", "", "no http:// or https:// address"),
        ("http://127.0.0.1:1/v1/traces", "opentelemetry", "pip install 'penstock[otel]'"),
    ],
)
def test_what_cannot_be_traced_is_refused_at_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str,
    blocked: str,
    word: str,
) -> None:
    # As on a machine without the extra.
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{blocked!r}] = None\n")
    if blocked:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        pytest.raises(ClusterError, match="jobmanager") as refused,
        traced(tmp_path, endpoint),
    ):
        pass
    assert word in str(refused.value)


def test_who_stands_by_does_not_wait_for_its_turn_to_say_so(tmp_path: Path) -> None:
    settings = {
        "high-availability.type": "zookeeper",
        "high-availability.zookeeper.quorum": "127.0.0.1:1",
        "high-availability.storageDir": str(tmp_path / "storage"),
        "jobmanager.rpc.port": 0,
        "traces.reporter.type": "otel",
        "traces.reporter.otel.exporter.endpoint": "collector:4317",
    }
    options = [part for key, value in settings.items() for part in ("-D", f"{key}={value}")]
    command = [sys.executable, "-P", "-m", "jobmanager", "--dir", str(tmp_path / "dir"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode != 0
    assert "no http:// or https:// address" in ended.stdout + ended.stderr


def test_nothing_of_it_is_imported_where_it_is_off() -> None:
    code = "import sys, jobmanager.main, jobmanager.assembly_runner\nprint('opentelemetry' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
