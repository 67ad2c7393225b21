"""The benchmark from JSON lines to Parquet, small: the job and the plain loop write the same rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from benchmarks import json_files
from benchmarks.function_workloads import to_euro
from benchmarks.measure import JobSettings, bench_cluster, run_job

pytestmark = [pytest.mark.integration, pytest.mark.sampled(2)]
ROWS, KEYS = 20_000, 50


def test_the_job_does_what_the_plain_loop_does(tmp_path: Path) -> None:
    paths = json_files.write_lines(tmp_path / "in", ROWS, KEYS, 1)
    assert json_files.in_plain_python(paths, tmp_path / "plain.parquet") > 0

    def build(env: ps.Environment) -> None:
        totals = env.read_json(str(tmp_path / "in")).map(to_euro).key_by("auction")
        totals = totals.process(json_files.RunningTotals(), schema=json_files.OUTPUT)
        totals.write_parquet(str(tmp_path / "out"))

    with bench_cluster(1) as cluster:
        measured = run_job("json", build, cluster, JobSettings(1))
    assert measured.seconds > 0
    assert measured.cpu_s > 0
    found = [read(tmp_path / "out"), read(tmp_path / "plain.parquet")]
    assert found[0].num_rows == ROWS
    assert Counter(rows(found[0])) == Counter(rows(found[1]))


def read(path: Path) -> pa.Table:
    return pq.read_table(path, schema=json_files.OUTPUT)


def rows(table: pa.Table) -> list[tuple[object, ...]]:
    return list(zip(*table.to_pydict().values(), strict=True))


def test_it_is_measured_beside_its_limit() -> None:
    [result] = json_files.run_json(JobSettings(1), ROWS, KEYS, 1)
    assert result["workload"] == "json"
    assert result["rows_per_s"] > 0
    assert result["limit_rows_per_s"] > 0
