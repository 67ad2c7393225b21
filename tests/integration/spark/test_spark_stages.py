"""Aim: what goes through Spark in a job is what the user's function makes of whole inputs, with our types on both sides.

Method: one job with many stages, which share a session, on the cluster of the integration tests; what comes of them is
compared with what pyarrow makes of the same rows.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

import penstock as ps
from penstock.cli.partitions import partitions
from penstock.client.client import Client
from tests.integration.conftest import NewEnvironment
from tests.integration.spark.conftest import IN_ALL, SMALL, START_S, tree_of, wait_all_ended
from tests.support.processes import DEADLINE_S, wait_in_directory

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TYPES = pa.schema(
    [
        ("id", pa.int64()),
        ("part", pa.string()),
        ("sub", pa.uint8()),
        ("big", pa.uint64()),
        ("half", pa.float64()),
        ("price", pa.decimal128(38, 4)),
        ("at", pa.timestamp("ns")),
        ("seen", pa.timestamp("us", "Europe/Berlin")),
        ("day", pa.date64()),
        ("took", pa.duration("ms")),
        ("tags", pa.list_(pa.uint16())),
        (
            "place",
            pa.struct([("x", pa.float64()), ("name", pa.dictionary(pa.int32(), pa.string()))]),
        ),
        ("a b.c`d", pa.large_binary()),
        ("flags", pa.map_(pa.string(), pa.bool_())),
    ]
)
NOON = dt.datetime(2024, 3, 31, 12, 0, 0, 123456)  # noqa: DTZ001 - of a column without a zone
ROWS = [
    {
        "id": 1,
        "part": "p=1/ü",
        "sub": 255,
        "big": 2**64 - 1,
        "half": math.nan,
        "price": Decimal("12345678901234567890123456789012.3456"),
        "at": NOON,
        "seen": NOON.replace(tzinfo=dt.UTC),
        "day": dt.date(1969, 12, 31),
        "took": dt.timedelta(milliseconds=-5),
        "tags": [1, None, 65535],
        "place": {"x": -0.0, "name": "here"},
        "a b.c`d": b"\x00\xff",
        "flags": [("on", True), ("off", None)],
    },
    dict.fromkeys(TYPES.names) | {"id": 2},
    {"id": 3, "part": "", "half": math.inf, "tags": [], "flags": []} | {"big": 0, "sub": 0},
]


def table_of_types() -> pa.Table:
    columns = {name: [row.get(name) for row in ROWS] for name in TYPES.names}
    return pa.table([pa.array(columns[field.name], field.type) for field in TYPES], schema=TYPES)


def same(frame: Any) -> Any:
    return frame


def one_of_two(left: Any, right: Any) -> Any:
    print("joining")
    return left.join(right, "k", "left").select("name", "k")


def with_udf(frame: Any) -> Any:
    from pyspark.sql.functions import udf

    @udf("long")
    def twice(number: int) -> int:
        return doubled(number)

    return frame.select(twice("n").alias("n"))


def doubled(number: int) -> int:
    return 2 * number


def numbers(spark: Any) -> Any:
    return spark.range(20_000).selectExpr("id", "cast(id % 7 as int) k")


def nothing(frame: Any) -> Any:
    return frame.where("n < 0")


@IN_ALL
def test_a_job_with_many_stages_has_the_rows_that_their_functions_make(
    new_env: NewEnvironment, client: Client
) -> None:
    env = new_env(2, SMALL)
    env.set_runtime_mode("batch")
    types = table_of_types()
    of_types = env.from_arrow(types).spark(same, schema=TYPES).collect()
    keys = env.from_rows([{"k": 1}, {"k": 2}, {"k": 1}])
    names = env.from_rows([{"k": 1, "name": "one"}])
    joined = keys.spark(one_of_two, names, schema={"k": "int64", "name": "string"}).collect()
    small = env.from_arrow(pa.table({"n": list(range(100))})).rebalance()
    n = {"n": "int64"}
    of_udf = small.map(lambda row: {"n": row.n}, schema=n).spark(with_udf, schema=n).collect()
    empty = small.spark(nothing, schema=n).spark(same, schema=n).collect()
    counted = (
        env.spark(numbers, schema={"k": "int32", "id": "int64"})
        .key_by("k")
        .aggregate(rows=ps.count(), most=ps.max("id"))
        .collect()
    )
    handle = env.submit("many stages")
    handle.wait(200)

    found = pa.Table.from_pylist(list(of_types), TYPES).sort_by("id")
    assert repr(found.to_pylist()) == repr(types.to_pylist())
    assert sorted(joined, key=lambda row: row["k"]) == [
        {"k": 1, "name": "one"},
        {"k": 1, "name": "one"},
        {"k": 2, "name": None},
    ]
    assert sorted(row["n"] for row in of_udf) == [2 * n for n in range(100)]
    assert list(empty) == []
    last = {row["k"]: (row["rows"], row["most"]) for row in counted}
    assert last == {k: (len(range(k, 20_000, 7)), max(range(k, 20_000, 7))) for k in range(7)}
    assert "joining\n" in b"".join(chunk.data for chunk in client.logs(handle.job_id)).decode()


@IN_ALL
def test_the_command_line_has_spark_put_what_is_persisted_in_order(
    new_env: NewEnvironment, address: str
) -> None:
    def numbers(start: int, count: int) -> pa.RecordBatch:
        n = [i * 7_919 % 20_000 for i in range(start, start + count)]
        return pa.RecordBatch.from_pydict(
            {"a`b": [None if i % 5 == 0 else i for i in n], "A`B": n},
            schema=pa.schema([("a`b", pa.int64()), ("A`B", pa.uint64())]),
        )

    env = new_env(3)
    env.generate(numbers, rows=20_000).persist("shuffled")
    env.execute("persist")
    keys = [part for key, value in SMALL.items() for part in ("-D", f"{key}={value}")]
    options = ["--compact", "shuffled", "--spark", "--sort-by", "a`b", "--sort-by", "A`B", *keys]
    ended = CliRunner().invoke(partitions, [*options, "--jobmanager", address, "--json"])
    assert ended.exit_code == 0, ended.output
    assert json.loads(ended.stdout)["after"]["partitions"] == 1
    read = new_env(1)
    rows = read.read_persisted("shuffled").collect()
    read.execute("read")
    some = [n for n in range(20_000) if n % 5]
    ordered = [(n, n) for n in some] + [(None, n) for n in range(0, 20_000, 5)]
    assert [(row["a`b"], row["A`B"]) for row in rows] == ordered
    assert (
        CliRunner().invoke(partitions, ["--drop", "shuffled", "--jobmanager", address]).exit_code
        == 0
    )


def test_what_a_stage_fails_with_is_the_users_and_the_job_ends_with_its_processes(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    driver, is_seen = tmp_path / "driver", tmp_path / "seen"

    def breaks(frame: Any) -> Any:
        (tmp_path / "part").write_text(str(os.getpid()))
        (tmp_path / "part").rename(driver)
        while not is_seen.exists():
            time.sleep(0.01)
        return frame.selectExpr("cast(n as tinyint) n")

    env = new_env(1, SMALL)
    env.set_runtime_mode("batch")
    env.from_rows([{"n": 1}, {"n": 1000}]).spark(breaks, schema={"n": "int8"}).name(
        "narrow"
    ).collect()
    handle = env.submit("overflow")
    wait_in_directory(tmp_path, driver.exists, "the stage", START_S)
    tree = tree_of(int(driver.read_text()))
    assert len(tree) > 1  # the JVM
    is_seen.touch()
    with pytest.raises(ps.JobFailed, match="CAST_OVERFLOW") as failed:
        handle.wait(START_S)
    assert failed.value.operator == "narrow"
    assert "at org.apache.spark" not in str(failed.value)
    wait_all_ended(tree)


@IN_ALL
def test_a_cancelled_job_leaves_no_process(new_env: NewEnvironment, tmp_path: Path) -> None:
    def sleeps(spark: Any) -> Any:
        driver = os.getpid()

        def forever(batches: Any) -> Any:
            for batch in batches:
                part = tmp_path / f"part-{os.getpid()}"  # tasks run side by side
                part.write_text(str(driver))
                part.rename(tmp_path / "driver")
                time.sleep(600)
                yield batch

        return spark.range(1).mapInArrow(forever, "id long")

    env = new_env(1, SMALL)
    env.set_runtime_mode("batch")
    env.spark(sleeps, schema={"id": "int64"}).discard()
    handle = env.submit("sleeps")
    # Said by its own tasks: the driver of the job before may be about to end still.
    told = tmp_path / "driver"
    wait_in_directory(tmp_path, told.exists, "a task", START_S)
    tree = tree_of(int(told.read_text()))
    assert len(tree) > 2  # the JVM, and Python for its tasks
    handle.cancel()
    with pytest.raises(ps.JobCanceled):
        handle.wait(DEADLINE_S)
    wait_all_ended(tree)
