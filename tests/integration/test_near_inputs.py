"""Aim: what alone reads complete partitions runs on the TaskManager that holds most of their bytes.

Method: jobs on two TaskManagers; each row says below which of them it was made, and below which it was read.
"""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from tests.integration.conftest import NewEnvironment
from tests.integration.spark.conftest import IN_ALL, SMALL, START_S
from tests.integration.spark.test_spark_files import ONE_FILE, by_file

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

MADE = {"maker": "int64", "made_below": "int64", "text": "string"}
READ = {"maker": "int64", "made_below": "int64", "read_below": "int64"}


class Making(ps.ProcessFunction):
    """Few rows, but for one of the subtasks. The processes of a TaskManager have the same parent."""

    def __init__(self, busy: int) -> None:
        self.busy = busy

    def open(self, ctx: Any) -> None:
        self.index = ctx.subtask_index

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        for _ in range(100 if self.index == self.busy else 1):
            out.emit(maker=self.index, made_below=os.getppid(), text="x" * 100)


def reading(batch: pa.RecordBatch) -> pa.RecordBatch:
    below = pa.array([os.getppid()] * batch.num_rows)
    return batch.select(["maker", "made_below"]).append_column("read_below", below)


def made(env: ps.Environment, busy: int) -> ps.Stream:
    env.set_runtime_mode("batch")
    numbers = env.generate(
        lambda start, count: pa.RecordBatch.from_pydict({"n": range(start, start + count)}),
        rows=100,
    )
    return numbers.parallelism(1).rebalance().process(Making(busy), schema=MADE).parallelism(2)


@pytest.mark.parametrize("busy", [0, 1])
def test_one_reader_is_where_most_has_been_written(new_env: NewEnvironment, busy: int) -> None:
    env = new_env(1)
    one = made(env, busy).exchange("blocking").map_batches(reading, schema=READ)
    rows = one.parallelism(1).slot_group("reading").collect()
    env.execute("near")
    below = {row["maker"]: row["made_below"] for row in rows}
    assert len(rows) > 1_000
    assert below[0] != below[1], "they are spread over both TaskManagers"
    assert {row["read_below"] for row in rows} == {below[busy]}


@IN_ALL
@pytest.mark.parametrize("busy", [0, 1])
def test_a_stage_of_spark_reads_most_of_its_files_in_place(
    new_env: NewEnvironment, busy: int
) -> None:
    env = new_env(1, SMALL)
    files = made(env, busy).spark(by_file, schema=ONE_FILE).collect()
    env.submit("near, in Spark").wait(START_S)
    in_place = sum(row["rows"] for row in files if "/sub=0/" in row["file"])
    assert in_place > 1_000, [dict(row) for row in files]
