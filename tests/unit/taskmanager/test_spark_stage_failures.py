"""Aim: by default a job goes on where Spark was lost in a stage, and ends where the stage would come to the same again.

Method: a driver that tells how the stage has ended; what that is reported as goes through the JobManager's default strategy.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from common.pb import internal_pb2
from jobmanager.failover.restart_settings import restart_settings
from jobmanager.failover.restart_strategy import RestartStrategy
from jobmanager.graph.execution_attempt import AttemptKey
from jobmanager.rpc import graph_convert
from penstock.config import Configuration
from penstock.errors import TaskFailure
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_to_bytes
from taskmanager.operators.spark_stage import SparkStageOperator
from taskmanager.spark import session_process
from taskmanager.spark.driver_runner import SparkPlace
from taskmanager.spark.stage_messages import RunStage, StageBegun, StageFailed
from taskmanager.spark.stage_process import failure_of
from taskmanager.spark.stage_table import OnEnd, StageTable, TellEnd
from taskmanager.task.attempt_failure import cause_of
from taskmanager.user_code.user_failure import failure_of_operator
from tests.support.operator_harness import OperatorHarness

ATTEMPT = internal_pb2.AttemptId(vertex="v0", subtask_index=0, attempt=0)


def lost(table: StageTable, _: RunStage) -> list[TellEnd]:
    return table.driver_ended("was killed by SIGKILL")


def lost_jvm(table: StageTable, stage: RunStage) -> list[object]:
    return [*table.ended(StageFailed(stage.stage_id, "the JVM has ended", ends_driver=True))]


def of_user(table: StageTable, stage: RunStage) -> list[object]:
    return [*table.ended(StageFailed(stage.stage_id, "no such column", "Traceback"))]


def too_slow(table: StageTable, stage: RunStage) -> list[object]:
    table.passed(now_s=20)
    return [*table.ended(StageFailed(stage.stage_id, "Job 3 cancelled"))]


def without_pandas(table: StageTable, stage: RunStage) -> list[object]:
    """No restart installs a package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_process, "_is_there", "pandas".__ne__)
        sessions = session_process.SparkSessions(Path(), [], "session", lambda: None)
        with pytest.raises(
            TaskFailure, match=r"installed .*: pandas\. Install penstock\[connect\]"
        ) as e:
            sessions.get({"spark.remote": "sc://localhost"})
    return [*table.ended(failure_of(e.value, stage))]


@pytest.mark.parametrize(
    ("ends", "restarts"),
    [(lost, True), (lost_jvm, True), (of_user, False), (too_slow, False), (without_pandas, False)],
)
def test_what_restarts_by_default(tmp_path: Path, ends: object, restarts: bool) -> None:
    def run(stage: RunStage, timeout_s: float, on_end: OnEnd) -> None:
        table = StageTable(start_timeout_s=120)
        table.asked(stage, timeout_s, on_end, now_s=0)
        table.begun(StageBegun(stage.stage_id), now_s=5)
        for effect in ends(table, stage):  # type: ignore[operator]
            if isinstance(effect, TellEnd):
                effect.on_end(effect.end)

    schema = schema_to_bytes(pa.schema([("n", pa.int64())]))
    spec = graph_pb2.Operator(name="best", output_schema=schema)
    spec.source.spark.timeout_ms = 10_000
    driver = SimpleNamespace(
        place=SparkPlace("job", tmp_path, tmp_path, (), Configuration()),
        settings=lambda job_name, cores: (),
        run=run,
    )
    stage = OperatorHarness(SparkStageOperator(spec), name="best", spark=driver)
    with pytest.raises(TaskFailure) as raised:
        stage.end()
    told = cause_of(failure_of_operator(raised.value, "best"), ATTEMPT, "tm", 0)
    cause = graph_convert.cause_of(told, AttemptKey("v0", 0, 0), 0)
    strategy = RestartStrategy(restart_settings(Configuration(), True), jitter=lambda: 0.0)
    assert strategy.allows(cause) is restarts, cause
    assert cause.operator == "best"
