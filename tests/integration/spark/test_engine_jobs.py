"""Aim: a job that is compiled for Spark, whole or in part, writes what the same job writes on our engine.

Method: one job on the cluster of the integration tests has the same chain three times: by Penstock, by Spark between source
and sink, and by Spark in the middle with Python on either side.
"""

from __future__ import annotations

import datetime as dt
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock import col
from tests.integration.conftest import NewEnvironment
from tests.integration.spark.conftest import SMALL
from tests.support.engines import assert_same_rows

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

RESULT = {"n": "int64", "key": "string", "start": "timestamp[ms, tz=UTC]"}


def bids(directory: Path) -> Path:
    """Two files, out of order in themselves and between them."""
    numbers = random.Random(7)
    directory.mkdir()
    for part in range(2):
        rows = [
            {
                "auction": numbers.choice(["ä", "b", None]),
                "price": numbers.randrange(-50, 500),
                "ts": dt.datetime(2024, 3, 31, tzinfo=dt.UTC)
                + dt.timedelta(milliseconds=numbers.randrange(60_000)),
                "Price": numbers.random(),
                "note": "not read",
            }
            for _ in range(500)
        ]
        pq.write_table(pa.Table.from_pylist(rows), directory / f"{part}.parquet")
    return directory


def hot(stream: ps.Stream) -> ps.Stream:
    return (
        stream.with_event_time("ts", out_of_orderness="1 min")
        .filter(col("price") // 7 != -1)
        .with_columns(euro=col("price") * 0.908)
        .key_by("auction")
        .window(ps.sliding("10s", "5s"))
        .aggregate(
            bids=ps.count(),
            total=ps.sum("euro"),
            best=ps.max("Price"),
            kinds=ps.count_distinct("price"),
        )
    )


def test_a_whole_job_and_a_part_have_the_rows_of_our_engine(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    source = str(bids(tmp_path / "bids"))
    env = new_env(2, SMALL)
    env.set_runtime_mode("batch")
    hot(env.read_parquet(source)).uid("whole").write_parquet(str(tmp_path / "spark"))
    graph = env.plan(engine="spark").graph
    kinds = {one.WhichOneof("spec") for vertex in graph.vertices for one in vertex.operators}
    assert kinds == {"spark", "sink"}
    ours = hot(env.read_parquet(source)).engine("penstock")
    ours.uid("ours").write_parquet(str(tmp_path / "penstock"))
    shifted = env.read_parquet(source).map_batches(lambda batch: batch).engine("penstock")
    part = hot(shifted).engine("spark").uid("part")
    rows = part.map(
        lambda row: {"n": row.bids, "key": row.auction, "start": row.window_start}, schema=RESULT
    ).engine("penstock")
    collected = rows.collect()
    assert env.execute("hot", engine="spark").status == "FINISHED"

    written = pq.read_table(tmp_path / "penstock").to_pylist()
    assert len(written) > 30
    assert_same_rows(written, pq.read_table(tmp_path / "spark").to_pylist())
    named = [
        {"n": row["bids"], "key": row["auction"], "start": row["window_start"]} for row in written
    ]
    assert_same_rows(named, collected.to_pylist())
