"""Aim: who looks at metrics of a subtask reads of which job and of which operators they are, how full its queues are and
what each of its states takes.

Method: a job on real daemons; both endpoints are scraped until they show its subtasks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families

import penstock as ps
from common.clock import SystemClock
from penstock.client.client import Client
from tests.support.jobs import DEADLINE_S, await_details, cancel, cancel_all
from tests.support.processes import DaemonCluster, Deadline, own_cluster

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonCluster]:
    with own_cluster(tmp_path_factory.mktemp("site"), taskmanagers=1, slots=2) as made:
        yield made


@pytest.fixture
def cluster(shared: DaemonCluster) -> Iterator[DaemonCluster]:
    yield shared
    cancel_all(Client(shared.jobmanager))


def labels_of(address: str, job_id: str) -> set[tuple[str, str, str]]:
    """Vertex, operators and job name of all samples of subtasks of a job."""
    with urlopen(f"http://{address}/metrics", timeout=5) as page:
        text = page.read().decode()
    return {
        (sample.labels["vertex"], sample.labels["operator"], sample.labels["job_name"])
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.name.startswith("penstock_subtask_") and sample.labels["job_id"] == job_id
    }


def test_both_daemons_name_job_and_operators(cluster: DaemonCluster) -> None:
    def make(start: int, count: int) -> pa.RecordBatch:
        return pa.record_batch({"a": pa.array(range(start, start + count), pa.int64())})

    with ps.Environment(cluster.jobmanager) as env:
        rows = env.generate(make, rate=200, schema=pa.schema([("a", pa.int64())]))
        rows.rebalance().map(lambda row: {"a": row.a}, schema={"a": pa.int64()}).discard()
        handle = env.submit("a job's name")
        expected: set[tuple[str, str, str]] = set()

        def is_measured(metrics: Any, _state: str) -> bool:
            for vertex, shown in metrics["vertices"].items():
                expected.add((vertex, shown["name"], "a job's name"))
            return all(one["records_out"] > 0 for one in metrics["vertices"].values())

        await_details(handle, is_measured)
        assert sorted(vertex for vertex, _, _ in expected) == ["v0", "v1"]
        assert all("map" in name for vertex, name, _ in expected if vertex == "v1")
        for role in ("jobmanager", "taskmanager"):
            (daemon,) = cluster.daemons(role)
            assert labels_of(daemon["metrics_address"], handle.job_id) == expected
        handle.cancel()
        with pytest.raises(ps.JobCanceled):
            handle.wait(DEADLINE_S)


def samples_of(address: str, job_id: str) -> dict[tuple[str, str, str], float]:
    """Of a job: metric, vertex and state ("" = it has no such label) -> value."""
    with urlopen(f"http://{address}/metrics", timeout=5) as page:
        text = page.read().decode()
    return {
        (
            sample.name.removeprefix("penstock_subtask_"),
            sample.labels["vertex"],
            sample.labels.get("state", ""),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("penstock_subtask_") and sample.labels["job_id"] == job_id
    }


class Counted(ps.KeyedProcessFunction):
    """Counts, and takes its time."""

    seen = ps.ValueState("seen", pa.int64(), default=0)

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        time.sleep(0.001)
        self.seen.update(self.seen.value() + 1)
        out.emit(a=row.a)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_queues_credit_states_and_databases_are_shown(cluster: DaemonCluster, backend: str) -> None:
    def make(start: int, count: int) -> pa.RecordBatch:
        now_ms = SystemClock().now_ms()
        numbers = pa.array(range(start, start + count), pa.int64())
        return pa.record_batch({"a": numbers, "ts": pa.array([now_ms] * count, pa.int64())})

    schema = pa.schema([("a", pa.int64()), ("ts", pa.int64())])
    config = {"state.backend.type": backend, "taskmanager.network.credit-per-channel": "64kb"}
    with ps.Environment(cluster.jobmanager, parallelism=1, config=config) as env:
        rows = env.generate(make, schema=schema).slot_group("from").with_event_time("ts")
        keyed = rows.with_columns(key=ps.col("a") % 7).key_by("key")
        counted = keyed.process(Counted(), schema={"a": "int64"}).uid("counts")
        counted.slot_group("to").discard()
        handle = env.submit("counted")
        (daemon,) = cluster.daemons("jobmanager")
        state = "counts/seen" if backend == "hashmap" else "counts"
        wanted = {
            ("in_queued_bytes", "v1", ""),
            ("in_credit_bytes", "v1", ""),
            ("out_waiting_batches", "v0", ""),
            ("watermark_lag_seconds", "v1", ""),
            ("state_memory_bytes", "v1", state),
        }
        if backend == "rocksdb":
            wanted |= {("rocksdb_memtable_bytes", "v1", "")}
        deadline = Deadline(f"{sorted(wanted)}", DEADLINE_S)
        while any(
            not (shown := samples_of(daemon["metrics_address"], handle.job_id)).get(name)
            for name in wanted
        ):
            deadline.left()
            time.sleep(0.1)
        assert shown["in_credit_bytes", "v1", ""] == 2 * (64 << 10)
        assert shown["out_waiting_batches", "v0", ""] == 1
        assert 0 < shown["watermark_lag_seconds", "v1", ""] < DEADLINE_S
        has_database = ("rocksdb_block_cache_misses_total", "v1", "") in shown
        assert has_database == (backend == "rocksdb")
        cancel(handle)


ELSEWHERE = (
    "penstock_jobmanager_zookeeper_state",
    "penstock_s3_",
    "penstock_jobmanager_certificate_",
    "penstock_taskmanager_certificate_",
)
"""Those that are only there with ZooKeeper, with S3 and with TLS."""


def named_of(address: str) -> set[str]:
    """All metrics of ours, those too that have no sample yet."""
    with urlopen(f"http://{address}/metrics", timeout=5) as page:
        text = page.read().decode()
    return set(re.findall(r"^# TYPE (penstock_\w+) ", text, re.MULTILINE))


def test_every_metric_that_is_documented_is_there_and_no_other(
    cluster: DaemonCluster, tmp_path: Path
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    table = text[text.index("## Metrics") : text.index("### Alerts")]
    documented = {
        name
        for line in table.splitlines()
        if line.startswith("| `penstock_")
        for name in re.findall(r"`(penstock_\w+)", line.split(" | ")[0])
        if not name.startswith(ELSEWHERE)
    }
    assert len(documented) > 80

    def make(start: int, count: int) -> pa.RecordBatch:
        return pa.record_batch({"a": pa.array(range(start, start + count), pa.int64())})

    config = {"state.backend.type": "rocksdb", "execution.checkpointing.interval": "200ms"}
    config["execution.checkpointing.dir"] = str(tmp_path / "checkpoints")
    with ps.Environment(cluster.jobmanager, parallelism=1, config=config) as env:
        rows = env.generate(make, rate=200, schema=pa.schema([("a", pa.int64())]))
        keyed = rows.with_columns(key=ps.col("a") % 7).key_by("key")
        keyed.process(Counted(), schema={"a": "int64"}).uid("counts").discard()
        handle = env.submit("all metrics")
        addresses = [
            daemon["metrics_address"]
            for role in ("jobmanager", "taskmanager")
            for daemon in cluster.daemons(role)
        ]
        deadline = Deadline("all metrics", DEADLINE_S)
        while documented - (shown := set().union(*map(named_of, addresses))):
            assert deadline.left() > 1, f"missing: {sorted(documented - shown)}"
            time.sleep(0.1)
        assert {name for name in shown - documented if not name.startswith(ELSEWHERE)} == set()
        cancel(handle)
