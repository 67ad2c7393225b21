"""Aim: whatever a stage does, its slot hears what came of it, the next stage runs, and no process is left.

Method: a real driver with a real session, which the tests share as the stages of a job do; processes are killed with
SIGKILL. What Spark has written is read with pyarrow.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.config import Configuration
from penstock.functions.user_code import pickle_function
from penstock.rows.spark_types import carried_schema
from taskmanager.spark.driver_runner import SparkDriverRunner, SparkPlace
from taskmanager.spark.stage_files import OUTPUT, indexed_output
from taskmanager.spark.stage_messages import RunStage, StageInput
from taskmanager.spark.stage_table import StageEnd
from tests.integration.spark.conftest import IN_ALL, SMALL, START_S, jvm_of, tree_of, wait_all_ended
from tests.support.processes import Deadline, wait_in_directory
from tests.support.small_disk import filled, small_disk

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.sampled(2)]

IDS = pa.schema([("id", pa.int64())])


class Stages:
    """Runs functions as stages of a driver."""

    def __init__(self, driver: SparkDriverRunner) -> None:
        self._driver = driver
        self._count = 0

    def start(
        self,
        function: Callable[..., Any],
        tables: tuple[pa.Table, ...] = (),
        schema: pa.Schema = IDS,
        timeout_s: float = 0.0,
    ) -> tuple[RunStage, queue.SimpleQueue[StageEnd]]:
        """A stage, and where its end comes to."""
        self._count += 1
        directory = self._driver.place.stage_directory("v", self._count, 0)
        directory.mkdir(parents=True)
        inputs = []
        for number, table in enumerate(tables):
            path = directory / f"in-{number}.parquet"
            pq.write_table(table, path)
            inputs.append(StageInput((str(path),), carried_schema(table.schema)))
        pickled = pickle_function(function, operator="tested")
        (directory / "function").write_bytes(pickled.pickled)
        stage = RunStage(
            stage_id=f"v-{self._count}-0",
            operator="tested",
            function_name=pickled.display_name,
            function_file=str(directory / "function"),
            inputs=tuple(inputs),
            schema=carried_schema(schema),
            output=str(directory / OUTPUT),
            log_file=str(directory / "log"),
            settings=self._driver.settings("tests", 2),
        )
        ends: queue.SimpleQueue[StageEnd] = queue.SimpleQueue()
        self._driver.run(stage, timeout_s, ends.put)
        return stage, ends

    def run(self, function: Callable[..., Any], *tables: pa.Table, **options: Any) -> StageEnd:
        """How a stage ends."""
        return self.start(function, tables, **options)[1].get(timeout=START_S)

    def pid(self) -> int:
        """Of the driver."""
        stage, ends = self.start(print_pid)
        assert ends.get(timeout=START_S).is_done
        return int(Path(stage.log_file).read_text())


@pytest.fixture(scope="module")
def stages(driver: SparkDriverRunner) -> Stages:
    """Stages of one driver."""
    return Stages(driver)


def print_pid(spark: Any) -> Any:
    print(os.getpid())
    return spark.range(1)


def rows_of(stage: RunStage) -> list[dict[str, Any]]:
    """The output, by the index."""
    files = indexed_output(Path(stage.output).parent)
    tables = [pq.ParquetFile(file.path).read() for file in files]
    return [row for table in tables for row in table.to_pylist()]


def test_a_stage_has_its_inputs_and_prints_to_its_own_log(stages: Stages) -> None:
    def joined(left: Any, right: Any) -> Any:
        print("two inputs")
        return left.join(right, "id").select("id", "a", "part")

    left = pa.table({"id": [1, 2, 3], "a": [1.5, None, float("nan")]})
    right = pa.table({"id": [3, 1], "part": ["x", "y"]})
    schema = pa.schema([("id", pa.int64()), ("part", pa.string()), ("a", pa.float64())])
    stage, ends = stages.start(joined, (left, right), schema)
    assert ends.get(timeout=START_S) == StageEnd()
    found = sorted(rows_of(stage), key=lambda row: row["id"])
    assert repr(found) == repr(
        [{"id": 1, "part": "y", "a": 1.5}, {"id": 3, "part": "x", "a": float("nan")}]
    )
    assert Path(stage.log_file).read_text() == "two inputs\n"


def test_stages_share_the_session(stages: Stages) -> None:
    assert stages.pid() == stages.pid()


def test_temporary_files_of_the_jvm_lie_in_the_slots_directory(
    stages: Stages, driver: SparkDriverRunner
) -> None:
    def makes_one(spark: Any) -> Any:
        print(spark._jvm.java.io.File.createTempFile("of-jvm", "").getPath())
        print(spark.conf.get("spark.driver.extraJavaOptions"))
        return spark.range(1)

    stage, ends = stages.start(makes_one)
    assert ends.get(timeout=START_S) == StageEnd()
    made, options = Path(stage.log_file).read_text().splitlines()
    assert Path(made).is_relative_to(driver.place.directory)
    assert options.endswith(SMALL["spark.driver.extraJavaOptions"])


def test_the_settings_of_the_session_count_in_every_stage(stages: Stages) -> None:
    def apart(spark: Any) -> Any:
        spark.conf.set("spark.sql.caseSensitive", "true")
        try:
            both = spark.range(1).selectExpr("id a", "id + 1 A")
            return both.select(both["A"].alias("id"))
        finally:
            spark.conf.unset("spark.sql.caseSensitive")

    for _ in range(2):  # the first one may have started the session
        stage, ends = stages.start(apart)
        assert ends.get(timeout=START_S) == StageEnd()
        assert rows_of(stage) == [{"id": 1}]


def test_what_is_returned_is_compared_with_what_was_declared(stages: Stages) -> None:
    assert "and not a DataFrame of Spark. Put return in front" in stages.run(lambda _: None).message
    of_pandas = stages.run(lambda spark: spark.range(1).toPandas()).message
    assert "a DataFrame of pandas, and not a DataFrame of Spark. Hand what pandas" in of_pandas
    end = stages.run(lambda spark: spark.range(3).selectExpr("cast(id as int) id"))
    assert "'id' is integer and should be long" in end.message
    assert end.user_traceback  # it would fail again: no restart helps
    end = stages.run(lambda spark: spark.range(3).selectExpr("id as other"))
    assert "a DataFrame without 'id' and with 'other', other than schema= says" in end.message
    wide = stages.run(
        lambda spark: spark.range(3).selectExpr("*", *(f"{n} c{n}" for n in range(30)))
    )
    assert "with 'c0', 'c1', 'c10'" in wide.message
    assert "and 20 more" in wide.message
    end = stages.run(lambda spark: spark.readStream.format("rate").load().selectExpr("value id"))
    assert "a streaming DataFrame, which has no end" in end.message
    end = stages.run(lambda spark: spark.range(3).selectExpr("id", "id"))
    assert "has a column twice" in end.message


def test_errors_say_the_cause_first_and_few_lines(stages: Stages) -> None:
    def divides(spark: Any) -> Any:
        return spark.range(4).selectExpr("cast(1 / (id - 2) as bigint) id")

    def has_bad_udf(spark: Any) -> Any:
        from pyspark.sql.functions import udf

        def breaks(number: int) -> int:
            raise ValueError(f"no luck with {number}")

        return spark.range(2).select(udf(breaks, "long")("id").alias("id"))

    def names_nothing(spark: Any) -> Any:
        return spark.range(2).select("ident")

    def names_no_format(spark: Any) -> Any:
        return spark.read.format("delta").load("/x")

    def swaps(spark: Any) -> Any:
        import pyarrow as pa

        def swapped(batches: Any) -> Any:
            for batch in batches:
                yield pa.record_batch({"more": batch["id"], "id": batch["id"]})

        return spark.range(2).mapInArrow(swapped, "id long, more long").select("id")

    def cuts(spark: Any) -> Any:
        def doubled(frames: Any) -> Any:
            for frame in frames:
                yield frame.assign(double=frame["id"] * 2)

        return spark.range(2).mapInPandas(doubled, "id long")

    def raises(_: Any) -> Any:
        raise KeyError("mine")

    for function, first in (
        (divides, "DIVIDE_BY_ZERO"),
        (has_bad_udf, "ValueError: no luck with"),
        (names_nothing, "`ident` cannot be resolved"),
        (names_no_format, "Failed to find the data source: delta"),
        (swaps, "TypeError: mapInArrow: the function returned the columns 'more', 'id'"),
        (cuts, "TypeError: mapInPandas: the function returned 'double' beyond the columns"),
        (raises, "KeyError: 'mine'"),
    ):
        end = stages.run(function)
        lines = end.message.splitlines()
        assert first in lines[0], end.message
        assert len(lines) < 40
        assert not any(line.strip().startswith("at org.apache") for line in lines)
        assert end.user_traceback, end.message
    assert "test_spark_driver.py" in end.user_traceback


def test_leaving_the_process_is_an_error_that_says_so(stages: Stages) -> None:
    end = stages.run(lambda _: sys.exit(3))
    assert "called sys.exit(3)" in end.message
    assert stages.run(lambda spark: spark.range(1)).is_done


def test_a_lost_file_of_the_input_is_not_the_users_fault(stages: Stages) -> None:
    def loses(frame: Any) -> Any:
        for file in frame.inputFiles():
            Path(file.removeprefix("file://")).unlink()
        return frame.select("id")

    end = stages.run(loses, pa.table({"id": pa.array(range(10), pa.int64())}))
    assert "files of the input of the stage are gone" in end.message
    assert not end.user_traceback


def test_a_stage_is_cancelled_in_the_middle_and_others_go_on(
    driver: SparkDriverRunner, stages: Stages, tmp_path: Path
) -> None:
    pid = stages.pid()
    stage, ends = stages.start(sleeping(tmp_path))
    wait_in_directory(tmp_path, (tmp_path / "in-task").exists, "a task", START_S)
    driver.cancel(stage.stage_id)
    assert ends.get(timeout=START_S) == StageEnd("it was cancelled")
    assert stages.pid() == pid


@IN_ALL
def test_a_timeout_ends_what_spark_cannot_interrupt(stages: Stages) -> None:
    def sleeps(_: Any) -> Any:
        time.sleep(600)

    tree = tree_of(stages.pid())
    end = stages.run(sleeps, timeout_s=0.5)
    assert "took longer than its timeout of 0.5 s" in end.message
    wait_all_ended(tree)


@IN_ALL
def test_stopping_the_session_is_an_error_and_the_next_stage_has_another(stages: Stages) -> None:
    def stops(spark: Any) -> Any:
        frame = spark.range(1)
        spark.stop()
        return frame

    end = stages.run(stops)
    assert "leave spark.stop() out" in end.message
    assert end.user_traceback
    assert stages.run(lambda spark: spark.range(1)).is_done


def test_kill_of_the_jvm_or_the_driver_fails_the_stage_and_leaves_nothing(
    stages: Stages, tmp_path: Path
) -> None:
    for is_jvm in (True, False):
        pid = stages.pid()
        directory = tmp_path / str(is_jvm)
        directory.mkdir()
        _, ends = stages.start(sleeping(directory))
        wait_in_directory(directory, (directory / "in-task").exists, "a task", START_S)
        tree = tree_of(pid)
        assert len(tree) > 2  # and Python, for the tasks
        os.kill(jvm_of(pid) if is_jvm else pid, signal.SIGKILL)
        end = ends.get(timeout=START_S)
        assert ("JVM of Spark has ended" if is_jvm else "was killed by SIGKILL") in end.message
        assert not end.user_traceback  # a restart may help
        wait_all_ended(tree)


@IN_ALL
def test_what_an_attempt_leaves_on_a_full_disk_makes_room_for_the_next(tmp_path: Path) -> None:
    def mixed(spark: Any) -> Any:
        return spark.range(0, 1_200_000, 1, 12).selectExpr("id", "uuid() text").repartition(3)

    with small_disk(tmp_path / "small", "96m") as small, filled(small, leave_bytes=24 << 20):
        config = SMALL | {"spark.local.dir": str(small), "execution.spark.directory": str(tmp_path)}
        place = SparkPlace(
            "job", tmp_path / "slot", tmp_path, (), Configuration.from_mapping(config)
        )
        runner = SparkDriverRunner(place, os.environ)
        try:
            end = Stages(runner).run(mixed, schema=pa.schema([*IDS, ("text", pa.string())]))
            assert (
                f"No space left on device, of the disk of spark.local.dir ({small})" in end.message
            )
            assert not end.user_traceback  # a restart may help
            deadline = Deadline("room", START_S)
            while [*small.rglob("*.data")]:
                deadline.left()
                time.sleep(0.05)
        finally:
            runner.close()
        assert [file.name for file in small.iterdir()] == [".filler"]


def test_a_jvm_that_does_not_start_says_why(tmp_path: Path) -> None:
    options = {"spark.driver.extraJavaOptions": "-Xss1k"}
    end = first_end(tmp_path, options, lambda _: None)
    assert "stack size specified is too small" in end.message


@IN_ALL
def test_a_jvm_that_ends_while_the_session_starts_is_not_in_the_way_of_the_next(
    tmp_path: Path,
) -> None:
    disk = tmp_path / "disk"
    disk.touch()  # no directory is made in it, and Spark ends its JVM then

    def again(stages: Stages) -> None:
        disk.unlink()
        assert stages.run(lambda spark: spark.range(1)).is_done

    end = first_end(tmp_path, {"spark.local.dir": str(disk / "spark")}, again)
    assert "local dir" in end.message


def test_a_jar_that_is_missing_is_the_users_to_add(stages: Stages) -> None:
    def reads(spark: Any) -> Any:
        return spark.read.jdbc("jdbc:none:", "t", properties={"driver": "com.example.Driver"})

    end = stages.run(reads)
    assert "lacks a jar (spark.jars: " in end.message
    assert "com.example.Driver" in end.message
    assert end.user_traceback


def first_end(directory: Path, keys: dict[str, str], then: Callable[[Stages], None]) -> StageEnd:
    """What becomes of the first stage of a driver whose JVM does not start."""
    config = Configuration.from_mapping(SMALL | keys)
    runner = SparkDriverRunner(SparkPlace("job", directory, directory, (), config), os.environ)
    try:
        stages = Stages(runner)
        end = stages.run(lambda spark: spark.range(1))
        then(stages)
    finally:
        runner.close()
    assert end.message.startswith("Spark's JVM did not start: ")
    assert not end.user_traceback
    return end


def sleeping(directory: Path) -> Callable[[Any], Any]:
    """A function whose tasks make a file in the directory and then sleep."""

    def sleeps_in_tasks(spark: Any) -> Any:
        def sleeps(batches: Any) -> Any:
            for batch in batches:
                (directory / "in-task").touch()
                time.sleep(600)
                yield batch

        return spark.range(2).mapInArrow(sleeps, "id long")

    return sleeps_in_tasks
