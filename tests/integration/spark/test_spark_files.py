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
from tests.integration.conftest import NewEnvironment
from tests.integration.spark.conftest import SMALL

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
    env.execute("files")

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


def uri(text: str) -> str:
    """The path in what Spark says."""
    from urllib.parse import unquote, urlparse

    return unquote(urlparse(text).path)


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
