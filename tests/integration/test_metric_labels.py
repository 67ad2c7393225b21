"""Aim: who looks at metrics of a subtask reads of which job and of which operators they are.

Method: a job on real daemons; both endpoints are scraped until they show its subtasks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families

import penstock as ps
from tests.support.jobs import await_details
from tests.support.processes import DaemonCluster, site

pytestmark = pytest.mark.integration


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


def test_both_daemons_name_job_and_operators(tmp_path: Path) -> None:
    def make(start: int, count: int) -> pa.RecordBatch:
        return pa.record_batch({"a": pa.array(range(start, start + count), pa.int64())})

    with site(tmp_path) as place:
        cluster = DaemonCluster(place)
        cluster.start(taskmanagers=1, slots=1)
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
                handle.wait(20)
        cluster.stop()
