"""Aim: what exchanges keep comes back as it was, whatever format its files have.

Method: real daemons; what jobs read is compared with the table that was written, and the files are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import penstock as ps
from tests.support.processes import DaemonCluster, site

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

ROWS = 3_000
KEYS = 7


def table() -> pa.Table:
    n = range(ROWS)
    return pa.table(
        {
            "n": pa.array(n, pa.int64()),
            "key": pa.array([f"k{i % KEYS}" for i in n]),
            "large": pa.array([2**64 - 1 - i for i in n], pa.uint64()),
            "wait": pa.array([None if i % 5 == 0 else i for i in n], pa.duration("us")),
            "x": pa.array([-0.0 if i % 2 else float("inf") for i in n], pa.float64()),
            "tags": pa.array([["a", None][: i % 3] for i in n], pa.list_(pa.string())),
        }
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonCluster]:
    with site(tmp_path_factory.mktemp("site")) as place:
        cluster = DaemonCluster(place)
        cluster.start(
            "-D", "taskmanager.spill.format=parquet",
            "-D", f"taskmanager.spill.dir={place.directory / 'spill'}",
            taskmanagers=1,
            slots=2,
        )  # fmt: skip
        yield cluster
        cluster.stop()
        cluster.assert_nothing_left()
        place.assert_nothing_left()


def files(cluster: DaemonCluster, name: str) -> list[Path]:
    """Of what was persisted."""
    (spill,) = (cluster.site.directory / "spill").iterdir()
    return sorted((spill / ".promoted" / name).rglob("sub=*/*"))


def test_rows_of_every_type_go_through_parquet_files(cluster: DaemonCluster) -> None:
    given = table()
    with ps.Environment(cluster.jobmanager, parallelism=2) as env:
        env.from_arrow(given).rebalance().persist("rows")
        env.execute("persist")
        assert {path.suffix for path in files(cluster, "rows")} == {".parquet"}
        rows = env.read_persisted("rows").collect()
        sums = env.read_persisted("rows").key_by("key").aggregate(n=ps.sum("n")).collect()
        env.set_runtime_mode("batch")
        env.execute("read")
    assert sorted(map(repr, rows)) == sorted(map(repr, given.to_pylist()))
    expected = {f"k{key}": sum(range(key, ROWS, KEYS)) for key in range(KEYS)}
    assert {row["key"]: row["n"] for row in sums} == expected


def test_what_parquet_cannot_hold_is_in_arrow_files(cluster: DaemonCluster) -> None:
    seconds = pa.table({"at": pa.array(range(100), pa.timestamp("s"))})
    with ps.Environment(cluster.jobmanager, parallelism=2) as env:
        env.from_arrow(seconds).rebalance().persist("seconds")
        env.execute("persist")
        assert {path.suffix for path in files(cluster, "seconds")} == {".arrow"}
        rows = env.read_persisted("seconds").collect()
        env.execute("read")
    assert sorted(map(repr, rows)) == sorted(map(repr, seconds.to_pylist()))
