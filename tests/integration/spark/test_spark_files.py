"""Aim: files beside a stage are read and written by Spark itself, and the rows are those that we would read and write.

Method: jobs with several stages, which share a session; where a row lies is told by Spark (``input_file_name``). A driver is
killed while Spark writes, so that a second attempt has to do without what the first has left.
"""

from __future__ import annotations

import datetime as dt
import os
import signal
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.local.local_cluster import LocalCluster
from tests.integration.conftest import SLOTS, TASKMANAGERS, NewEnvironment
from tests.integration.spark.conftest import IN_ALL, SMALL

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NOON = dt.datetime(2024, 3, 31, 12, 0, 0, 123000)  # noqa: DTZ001 - of a column without a zone
ALIKE = pa.table(
    {
        "n": pa.array([1, 2, None], pa.int64()),
        "u8": pa.array([0, 255, None], pa.uint8()),
        "u16": pa.array([0, 2**16 - 1, None], pa.uint16()),
        "u32": pa.array([0, 2**32 - 1, None], pa.uint32()),
        "u64": pa.array([0, 2**64 - 1, None], pa.uint64()),
        "f": pa.array([-0.0, float("inf"), None], pa.float32()),
        "s": pa.array(["", "ü", None], pa.large_string()),
        "b": pa.array([b"", b"\x00\xff", None]),
        "d": pa.array([Decimal("1.50"), Decimal("-9.99"), None], pa.decimal128(5, 2)),
        "day": pa.array([dt.date(1969, 12, 31), dt.date(2024, 2, 29), None]),
        "ms": pa.array([NOON, NOON, None], pa.timestamp("ms")),
        "us": pa.array([NOON.replace(tzinfo=dt.UTC)] * 2 + [None], pa.timestamp("us", "UTC")),
        "tags": pa.array([[1, None], [], None], pa.list_(pa.uint16())),
        "at": pa.array([{"x": 1.0}, {"x": None}, None], pa.struct([("x", pa.float64())])),
    }
)
RESTARTS = {
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": "3",
    "restart-strategy.fixed-delay.delay": "50ms",
}
FEW = {"execution.batch-rows": "4"}
WIDE = {"n": "int64", "text": "string"}
WIDE_ROWS, WIDE_ROWS_OF_FILE = 16_000, 2_000
ONE_FILE = pa.schema([("file", pa.string()), ("rows", pa.int64())])


def same(frame: Any) -> Any:
    return frame


def by_file(frame: Any) -> Any:
    """How many rows each file has given."""
    from pyspark.sql.functions import count, input_file_name

    return frame.groupBy(input_file_name().alias("file")).agg(count("*").alias("rows"))


def joined(left: Any, right: Any) -> Any:
    from pyspark.sql.functions import input_file_name

    named = right.withColumn("file", input_file_name())
    return left.join(named, "n").selectExpr("file", "cast(n as bigint) rows")


def write(directory: Path, *tables: pa.Table, **options: Any) -> list[str]:
    """Files of a directory."""
    directory.mkdir(parents=True)
    for number, table in enumerate(tables):
        pq.write_table(table, directory / f"{number}.parquet", **options)
    return [str(directory / f"{number}.parquet") for number in range(len(tables))]


def all_rows(directory: Path) -> list[dict[str, Any]]:
    """What a sink shows; nothing else is left in its directory."""
    files = sorted(directory.iterdir())
    assert all(file.name.startswith("part-") for file in files), files
    return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


def test_files_are_read_and_written_in_place_where_that_is_the_same(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    env = new_env(2, SMALL)
    env.set_runtime_mode("batch")
    plain = write(tmp_path / "plain [a]*", ALIKE, ALIKE.slice(1, 1))
    nanos = pa.table({"n": pa.array([1, 2]), "at": pa.array([1000, 2000], pa.timestamp("ns"))})
    write(tmp_path / "other" / "k=7", nanos, compression="brotli")
    numbers = tmp_path / "numbers.csv"
    numbers.write_text("n\n1\n2\n")

    kept = env.read_parquet(str(tmp_path / "plain [a]*"))
    rows = kept.spark(same, schema=ALIKE.schema).collect()
    files = kept.spark(by_file, schema=ONE_FILE).collect()
    mixed = env.read_csv(str(numbers)).spark(joined, kept, schema=ONE_FILE).collect()
    other = env.read_parquet(str(tmp_path / "other"))
    others = other.spark(same, schema=other.schema).collect()
    other_files = other.spark(by_file, schema=ONE_FILE).collect()
    in_place = kept.select("n").filter(ps.col("n") > 0).spark(same, schema={"n": "int64"})
    in_place.write_parquet(str(tmp_path / "out"))
    empty = env.read_parquet(plain[0]).spark(
        lambda frame: frame.where("n < 0"), schema=ALIKE.schema
    )
    empty.select("n").spark(same, schema={"n": "int64"}).write_parquet(str(tmp_path / "none"))
    dealt_out = env.spark(wide, schema=WIDE)
    by_whom = dealt_out.map_batches(whose, schema={"n": "int64", "pid": "int64"}).collect()
    of_spark = dealt_out.spark(by_file, schema=ONE_FILE).collect()
    env.execute("files")

    assert sorted(row["n"] for row in by_whom) == list(range(WIDE_ROWS))
    readers = [
        {row["pid"] for row in by_whom if row["n"] // WIDE_ROWS_OF_FILE == i} for i in range(8)
    ]
    assert sorted(map(len, readers)) == [1] * 8  # who reads a file reads all of it
    assert len(set.union(*readers)) == 2
    assert sum(row["rows"] for row in of_spark) == WIDE_ROWS
    assert all(row["file"].endswith(".spark.parquet") for row in of_spark)
    wanted = [*ALIKE.to_pylist(), *ALIKE.slice(1, 1).to_pylist()]
    assert sorted(map(repr, rows)) == sorted(map(repr, wanted))
    assert {(uri(row["file"]), row["rows"]) for row in files} == set(
        zip(plain, (3, 1), strict=True)
    )
    assert sorted((uri(row["file"]), row["rows"]) for row in mixed) == [
        (plain[0], 1),
        (plain[0], 2),
        (plain[1], 2),
    ]
    assert sorted(row["n"] for row in others) == [1, 2]
    assert {row["k"] for row in others} == {7}
    assert [row["rows"] for row in other_files] == [2]
    assert str(tmp_path / "other") not in other_files[0]["file"]  # written anew
    assert sorted(row["n"] for row in all_rows(tmp_path / "out")) == [1, 2, 2]
    assert all_rows(tmp_path / "none") == []


def everywhere(env: ps.Environment, table: pa.Table, rows: int) -> ps.Stream:
    """The rows of a table again and again, made by subtasks on both TaskManagers: all slots but that of Spark are taken."""

    def some(start: int, count: int) -> pa.RecordBatch:
        picked = table.take([number % table.num_rows for number in range(start, start + count)])
        return picked.combine_chunks().to_batches()[0]

    made = env.generate(some, rows=rows).parallelism(1).rebalance()
    return made.map_batches(lambda batch: batch).parallelism(TASKMANAGERS * SLOTS - 1)


@IN_ALL
def test_rows_of_an_exchange_are_read_in_place_with_the_types_of_the_table(
    new_env: NewEnvironment,
) -> None:
    table = ALIKE.append_column("part", pa.array(["x", "y", None])).append_column(
        "sub", pa.array([7, None, 9], pa.uint8())
    )
    other = table.append_column("wait", pa.array([1, None, 3], pa.duration("s")))
    env = new_env(2, SMALL | FEW)
    env.set_runtime_mode("batch")
    moved = everywhere(env, table, 300)
    rows = moved.spark(same, schema=table.schema).collect()
    files = moved.spark(by_file, schema=ONE_FILE).collect()
    written_anew = everywhere(env, other, 300)
    others = written_anew.spark(same, schema=other.schema).collect()
    other_files = written_anew.spark(by_file, schema=ONE_FILE).collect()
    nothing = moved.filter(ps.col("n") > 9).spark(same, schema=table.schema).collect()
    env.execute("exchanges")
    assert sorted(map(repr, rows)) == sorted(map(repr, table.to_pylist() * 100))
    assert sum(row["rows"] for row in files) == 300
    here = ["/sub=0/" in row["file"] for row in files]
    assert sum(here) > 1  # where Spark is
    assert here.count(False) == 1  # those of the other TaskManager are written into one
    assert sorted(map(repr, others)) == sorted(map(repr, other.to_pylist() * 100))
    assert ["/stages/" in row["file"] for row in other_files] == [True]
    assert list(nothing) == []


@IN_ALL
def test_a_lost_file_of_an_exchange_is_made_again_and_nobody_is_to_blame(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    env = new_env(2, SMALL | FEW | RESTARTS)
    env.set_runtime_mode("batch")
    numbers = everywhere(env, pa.table({"n": range(40)}), 40)
    first = numbers.spark(losing(tmp_path), schema={"n": "int64"})
    both = first.spark(in_both(tmp_path), numbers, schema={"n": "int64"}).collect()
    handle = env.submit("lost")
    handle.wait(200)
    assert sorted(row["n"] for row in both) == list(range(40))
    assert (tmp_path / "second").read_text().split() == ["called"]
    causes = [one.root_cause for one in reversed(handle.exceptions())]
    assert [cause.error_class for cause in causes] == ["PartitionUnavailable"] * 2
    assert "is gone" in causes[0].message
    assert "has been altered" in causes[1].message


@IN_ALL
def test_a_lost_file_that_spark_has_written_is_made_again(
    new_env: NewEnvironment, tmp_path: Path, cluster: LocalCluster
) -> None:
    env = new_env(2, SMALL | RESTARTS)
    env.set_runtime_mode("batch")
    befallen = env.spark(wide, schema=WIDE).map_batches(
        befalling(tmp_path / "seen", cluster.directory), schema={"n": "int64"}
    )
    befallen.write_parquet(str(tmp_path / "out"))
    handle = env.submit("lost")
    handle.wait(200)
    assert sorted(row["n"] for row in all_rows(tmp_path / "out")) == list(range(WIDE_ROWS))
    causes = [one.root_cause for one in reversed(handle.exceptions())]
    assert {cause.error_class for cause in causes} == {"PartitionUnavailable"}
    # As a server says it, or who reads the file itself.
    assert "is not there" in causes[0].message or "does not exist" in causes[0].message
    assert (tmp_path / "seen").read_text() == "altered"
    assert any("page integrity" in cause.message for cause in causes)


def wide(spark: Any) -> Any:
    """More than a channel takes at once, in eight files."""
    return spark.range(0, WIDE_ROWS, numPartitions=8).selectExpr("id n", "repeat(uuid(), 64) text")


def whose(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Which process has got the rows."""
    pids = pa.array([os.getpid()] * batch.num_rows)
    return pa.RecordBatch.from_arrays([batch["n"], pids], ["n", "pid"])


def befalling(seen: Path, directory: Path) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """A function that removes the files of its input at its first call, and alters those of the second attempt."""

    def passes(batch: pa.RecordBatch) -> pa.RecordBatch:
        files = list(directory.rglob("*.spark.parquet"))
        told = seen.read_text() if seen.exists() else ""
        if not told:
            seen.write_text(",".join(sorted({file.parts[-4] for file in files})))
            for file in files:
                file.unlink(missing_ok=True)
        elif files and told != "altered" and all(one.parts[-4] not in told for one in files):
            seen.write_text("altered")
            for file in files:
                content = bytearray(file.read_bytes())
                content[len(content) // 2] ^= 0x20
                file.write_bytes(content)
        return batch.select(["n"])

    return passes


def losing(directory: Path) -> Callable[[Any], Any]:
    """A function whose first attempt removes a file of its input; the next alters one that another stage will read."""

    def loses(frame: Any) -> Any:
        told = directory / "first"
        in_place = Path(next(uri(name) for name in frame.inputFiles() if "/sub=0/" in name))
        if not told.exists():
            told.write_text("removed")
            in_place.unlink()
        elif told.read_text() == "removed":
            told.write_text("altered")
            edge, spill = in_place.parents[2], in_place.parents[3]
            others = (p for p in spill.glob("*/part=*/sub=0/*") if edge not in p.parents)
            other = next(others)
            other.write_bytes(bytes(other.stat().st_size))
        return frame

    return loses


def in_both(directory: Path) -> Callable[[Any, Any], Any]:
    """What both inputs have; tells that it was called."""

    def joins(left: Any, right: Any) -> Any:
        with (directory / "second").open("a") as told:
            told.write("called\n")
        return left.join(right, "n").select("n")

    return joins


def uri(text: str) -> str:
    """The path in what Spark says."""
    from urllib.parse import unquote, urlparse

    return unquote(urlparse(text).path)


@IN_ALL
def test_output_in_place_is_there_once_whatever_an_attempt_has_left(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    parts = [pa.table({"n": range(start, start + 10)}) for start in (0, 10, 20)]
    write(tmp_path / "in", *parts)
    options = {
        "restart-strategy.type": "fixed-delay",
        "spark.sql.files.openCostInBytes": "1",
        "spark.sql.files.maxPartitionBytes": "1000",
    }
    env = new_env(1, SMALL | options)
    env.set_runtime_mode("batch")
    rows = env.read_parquet(str(tmp_path / "in")).spark(dying(tmp_path), schema={"n": "int64"})
    rows.write_parquet(str(tmp_path / "out")).uid("out")
    env.execute("once")
    left = (tmp_path / "left").read_text().splitlines()
    assert any(name.endswith(".parquet") for name in left)  # the first attempt had written
    assert sorted(row["n"] for row in all_rows(tmp_path / "out")) == list(range(30))


def files_of_tasks(directory: Path) -> list[Path]:
    """What tasks of Spark that have ended have written; others rename and remove beside."""
    return [
        Path(at, name)
        for at, _, names in os.walk(directory)
        for name in names
        if Path(at).name.startswith("task_") and name.endswith(".parquet")
    ]


def dying(directory: Path) -> Callable[[Any], Any]:
    """A function whose first attempt is killed when Spark has written one of its files."""

    def dies(frame: Any) -> Any:
        driver = os.getpid()

        def kills(batches: Any) -> Any:
            out = directory / "out"
            for batch in batches:
                if max(batch["n"].to_pylist()) >= 20 and not (directory / "left").exists():
                    # Its task writes; the others' have been written, or will be.
                    while not (written := files_of_tasks(out)):
                        time.sleep(0.01)
                    (directory / "left").write_text("\n".join(map(str, written)))
                    os.kill(driver, signal.SIGKILL)
                yield batch

        return frame.mapInArrow(kills, "n long")

    return dies
