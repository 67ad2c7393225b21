"""Aim: what failed in a job, and what came of it, can be read while it runs and after it has ended.

Method: functions that raise once, always, or what no restart mends, on real slots; the handle and the
command line asked afterwards.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

import penstock as ps
from penstock.cli.main import main
from tests.support.processes import DEADLINE_S, DaemonCluster

pytestmark = pytest.mark.integration

MakeEnvironment = Callable[..., ps.Environment]
OUT = {"b": pa.int64()}
QUICK = ps.RestartStrategies.fixed_delay(3, "50ms")


class LicenceExpired(ps.Unrecoverable):
    """The user's own kind of what no restart mends."""


def refuse_seven(row: Any) -> Any:
    if row.a == 7:
        raise ValueError("seven is not allowed")
    return {"b": row.a}


def check_licence() -> None:
    raise LicenceExpired("since yesterday")


def find_no_licence(row: Any) -> Any:
    try:
        check_licence()
    except LicenceExpired as error:
        raise RuntimeError("cannot score") from error


def submit(env: ps.Environment, function: Callable[[Any], Any]) -> ps.JobHandle:
    rows = env.from_rows([{"a": a} for a in range(10)])
    rows.rebalance().map(function, schema=OUT).discard()
    return env.submit("history")


def shown(cluster: DaemonCluster, job_id: str, *options: str) -> str:
    result = CliRunner().invoke(
        main, ["exceptions", job_id, "--jobmanager", cluster.jobmanager, *options]
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_function_that_raises_once_is_in_the_history(
    environment: MakeEnvironment, failure_cluster: DaemonCluster, tmp_path: Path
) -> None:
    raised = tmp_path / "raised"

    def once(row: Any) -> Any:
        if row.a == 7 and not raised.exists():
            raised.touch()
            refuse_seven(row)
        return {"b": row.a}

    env = environment(parallelism=2)
    env.set_restart_strategy(QUICK)
    handle = submit(env, once)
    handle.wait(DEADLINE_S)
    (entry,) = handle.exceptions()
    cause = entry.root_cause
    assert cause.error_class == "TaskFailure"
    assert "ValueError: seven is not allowed" in cause.message
    assert "refuse_seven" in cause.traceback
    assert cause.row == "Row(a=7)"
    assert cause.cause_chain == ("TaskFailure", "ValueError")
    assert (cause.operator, cause.attempt, cause.timestamp_ms > 0) == ("map", 0, True)
    assert entry.labels == {"type": "USER"}
    assert (entry.restart_number, entry.delay_ms, entry.ended_job) == (1, 50, False)
    details = handle.details()
    assert [vertex.parallelism for vertex in details.vertices] == [1, 2]
    assert entry.restarted == ("v0/0", "v1/0..1")
    text = shown(failure_cluster, handle.job_id)
    for words in ("seven is not allowed", "refuse_seven", "row: Row(a=7)", "type=USER"):
        assert words in text
    assert "restart 1 after 50 ms: v0/0, v1/0..1" in text


def test_a_function_that_always_raises_leaves_a_complete_history(
    environment: MakeEnvironment, failure_cluster: DaemonCluster
) -> None:
    env = environment(parallelism=2)
    env.set_restart_strategy(QUICK)
    handle = submit(env, refuse_seven)
    with pytest.raises(ps.JobFailed, match=r"restart-strategy\.fixed-delay\.attempts"):
        handle.wait(DEADLINE_S)
    entries = handle.exceptions()
    assert [entry.restart_number for entry in entries] == [3, 3, 2, 1]
    assert [entry.delay_ms for entry in entries] == [None, 50, 50, 50]
    assert [entry.root_cause.attempt for entry in entries] == [3, 2, 1, 0]
    assert {entry.root_cause.row for entry in entries} == {"Row(a=7)"}
    listed = json.loads(shown(failure_cluster, handle.job_id, "--json"))
    assert listed["job_id"] == handle.job_id
    last, *before = listed["exceptions"]
    assert (last["ended_job"], last["delay_ms"], last["restarted"]) == (True, None, [])
    assert "as restart-strategy.fixed-delay.attempts allows" in last["root_cause"]["message"]
    assert [one["ended_job"] for one in before] == [False] * 3
    assert "the job ended" in shown(failure_cluster, handle.job_id)


def test_the_place_of_a_failing_row_is_shown_after_restarts_in_the_middle_too(
    environment: MakeEnvironment, failure_cluster: DaemonCluster, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n" + "".join(f"{a},{a}\n" for a in range(5_000)))
    crashed = tmp_path / "crashed"

    def crash_once_then_fail(row: Any) -> Any:
        if row.a == 3_000 and not crashed.exists():
            time.sleep(0.5)  # some checkpoints, in the middle of the file
            crashed.touch()
            raise RuntimeError("a first time")
        if row.a == 4_321:
            raise ValueError("always")
        return {"b": row.b}

    config = {
        "execution.checkpointing.interval": "50ms",
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "execution.batch-rows": 100,
    }
    env = environment(parallelism=1, config=config)
    env.set_restart_strategy(QUICK)
    rows = env.read_csv(str(path), schema={"a": pa.int64(), "b": pa.int64()})
    rows.map(crash_once_then_fail, schema=OUT).discard()
    handle = env.submit("positions")
    with pytest.raises(ps.JobFailed) as failed:
        handle.wait(DEADLINE_S)
    places = [entry.root_cause.position for entry in reversed(handle.exceptions())]
    assert places[0] == f"{path}, line 3002"
    assert set(places[1:]) == {f"{path}, line 4323"}
    assert failed.value.position == places[-1]
    assert f"position: {places[-1]}" in shown(failure_cluster, handle.job_id)
    address = ["--jobmanager", failure_cluster.jobmanager]
    told = CliRunner().invoke(main, ["info", handle.job_id, *address]).stdout
    assert f"position: {places[-1]}" in told
    listed = json.loads(
        CliRunner().invoke(main, ["info", handle.job_id, *address, "--json"]).stdout
    )
    assert listed["failure"]["position"] == places[-1]


def test_what_the_user_says_no_restart_mends_ends_the_job(environment: MakeEnvironment) -> None:
    env = environment(parallelism=2)
    env.set_restart_strategy(ps.RestartStrategies.exponential_delay())
    handle = submit(env, find_no_licence)
    with pytest.raises(ps.JobFailed, match="cannot score"):
        handle.wait(DEADLINE_S)
    assert handle.details().summary.restarts == 0
    entry = handle.exceptions()[0]
    assert entry.ended_job
    assert entry.root_cause.cause_chain == ("TaskFailure", "RuntimeError", "Unrecoverable")


def test_a_job_that_never_failed_has_no_history(
    environment: MakeEnvironment, failure_cluster: DaemonCluster
) -> None:
    handle = submit(environment(), lambda row: {"b": row.a})
    handle.wait(DEADLINE_S)
    assert handle.exceptions() == []
    assert shown(failure_cluster, handle.job_id) == "no failures\n"
