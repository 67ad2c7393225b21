"""Aim: where there are no rows, columns of any type that streams have are columns.

Method: lists of UUIDs, of which Arrow makes no array out of no values, in what meets no rows: one side of a window join, a
batch function that returns a table without batches, rows that a function is tried on.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock import col, testing

IDS = [uuid.UUID(int=1), uuid.UUID(int=2)]
NESTED = pa.ListArray.from_arrays([0, 2], pa.array([one.bytes for one in IDS], pa.uuid()))
ROW = pa.record_batch({"k": [1], "ids": NESTED, "ts": [5]})
NOTHING = pa.Table.from_batches([], ROW.schema)


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize(("how", "count"), [("right", 0), ("full", 1)])
def test_a_window_join_whose_other_side_has_no_rows(how: str, count: int, backend: Any) -> None:
    def chain(left: ps.Stream, right: ps.Stream) -> ps.Stream:
        timed = (side.with_event_time("ts") for side in (left, right))
        return next(timed).join(next(timed), on="k", window=ps.tumbling("10s"), how=how)

    both = {"schema": ROW.schema, "second_schema": ROW.schema}
    with testing.harness(chain, **both, event_time=False, backend=backend) as job:
        job.push_many(ROW)
        job.end()
        found = [(row["k"], row["ids"], row["ids_right"]) for row in job.output]
    assert found == [(1, IDS, None)] * count


def test_a_batch_function_that_returns_a_table_without_batches() -> None:
    with testing.harness(
        lambda stream: stream.map_batches(lambda _: NOTHING, schema=ROW.schema), schema=ROW.schema
    ) as job:
        job.push_many(ROW)
        job.end()
        assert job.output == []


def test_a_function_that_no_row_comes_to_is_refused_by_that(tmp_path: Path) -> None:
    env = ps.Environment()
    pq.write_table(NOTHING, tmp_path / "none.parquet")
    kept = env.from_arrow(pa.table(ROW)).filter(col("k") > 5).with_columns(more=col("k") + 1)
    for stream in (kept, env.read_parquet(str(tmp_path / "none.parquet"))):
        with pytest.raises(ps.JobRejected, match=r"cannot be tried here|no rows to try it on"):
            stream.map(lambda row: {"k": row.k})
