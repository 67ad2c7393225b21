"""Aim: a failure restarts what it must, and nothing else; whatever is killed, every row counts exactly once.

Method: jobs whose rows say which life of which subtask made them (``tests/support/numbered_job.py``), on three
TaskManagers of which one is to spare. What began again is told by attempts, by the rows themselves and by
``penstock exceptions``. ``PENSTOCK_CHAOS_SEED`` chooses the victims.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.client.job_result import state_name
from tests.chaos.test_chaos_ledger import seed_of
from tests.support.numbered_job import (
    NUMBERED,
    ROW,
    Number,
    NumberedJob,
    incarnations,
    longest_gap_ms,
)
from tests.support.processes import DaemonCluster, wait_ended
from tests.support.watched_job import Placed, Subtask, WatchedJob, placed
from tests.support.windowed_job import WindowedJob

pytestmark = [pytest.mark.integration, pytest.mark.sampled(9)]

Submit = Callable[..., WatchedJob]
CACHING = {"execution.exchange.default": "caching"}


@pytest.fixture
def chance() -> random.Random:
    seed = seed_of(11)
    print(f"SEED={seed}")
    return random.Random(seed)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_ended(pid)


def taskmanager_pid(cluster: DaemonCluster, taskmanager_id: str) -> int:
    found = {one["id"]: one["pid"] for one in cluster.daemons("taskmanager")}
    return int(found[taskmanager_id])


def attempts(subtasks: dict[Subtask, Placed]) -> dict[Subtask, int]:
    return {subtask: one.attempt for subtask, one in subtasks.items()}


def begun_again(before: dict[Subtask, Placed], after: dict[Subtask, Placed]) -> set[Subtask]:
    """Subtasks that have new attempts."""
    was, now = attempts(before), attempts(after)
    return {subtask for subtask in was if was[subtask] != now[subtask]}


def used(subtasks: dict[Subtask, Placed]) -> list[str]:
    """TaskManagers that run subtasks."""
    return sorted({one.taskmanager_id for one in subtasks.values()})


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize(
    "exchange", ["caching", pytest.param("caching-memory", marks=pytest.mark.chaos)]
)
def test_a_lost_taskmanager_restarts_only_what_ran_there(
    wide: DaemonCluster, submit: Submit, tmp_path: Path, chance: random.Random, exchange: str
) -> None:
    numbered = NumberedJob(12_000, 2_000, tmp_path)
    job = submit(numbered.build, parallelism=4, config={"execution.exchange.default": exchange})
    before = placed(job.await_running())
    job.await_checkpoints()
    victim = chance.choice(used(before))
    lost = {subtask for subtask, one in before.items() if one.taskmanager_id == victim}
    kill(taskmanager_pid(wide, victim))
    after = placed(job.await_that(lambda details: begun_again(before, placed(details))))
    job.await_checkpoints(2)
    after = job.placed()
    assert begun_again(before, after) == lost
    assert lost < set(before)
    assert victim not in used(after)
    assert "RESTARTING" not in job.states()
    (entry,) = job.handle.exceptions()
    assert entry.root_cause.error_class == "TaskManagerLost"
    job.finish()
    rows = numbered.check()
    counted = incarnations(rows)
    assert {subtask for subtask, lives in counted.items() if lives > 1} <= {
        index for vertex, index in lost if vertex == "v1"
    }
    assert victim in job.told()
    assert attempts(job.placed()) == attempts(after)


def test_windows_go_on_when_a_producer_that_pre_aggregates_for_them_is_lost(
    wide: DaemonCluster, submit: Submit, tmp_path: Path, chance: random.Random
) -> None:
    windowed = WindowedJob(12_000, 2_000, tmp_path)
    job = submit(windowed.build, parallelism=4, config=CACHING)
    before = placed(job.await_running())
    job.await_checkpoints(2)
    victim = chance.choice(used(before))
    lost = {subtask for subtask, one in before.items() if one.taskmanager_id == victim}
    assert {vertex for vertex, _ in lost} == {"v0", "v1"}
    kill(taskmanager_pid(wide, victim))
    job.await_that(lambda details: begun_again(before, placed(details)))
    job.finish()
    windowed.check()
    assert begun_again(before, job.placed()) == lost
    assert lost < set(before)
    (entry,) = job.handle.exceptions()
    assert entry.root_cause.error_class == "TaskManagerLost"


def test_one_of_eight_pipelines_is_lost_and_the_others_do_not_notice(
    wide: DaemonCluster, submit: Submit, tmp_path: Path, chance: random.Random
) -> None:
    numbered = NumberedJob(24_000, 4_000, tmp_path)
    job = submit(
        numbered.build_pipelines,
        parallelism=8,
        config={"restart-strategy.fixed-delay.delay": "1s"},
    )
    before = placed(job.await_running())
    job.await_checkpoints()
    kill(chance.choice([
        pid for one in wide.daemons("taskmanager") for pid in wide.slot_pids(one["pid"])
    ]))  # fmt: skip
    job.await_that(lambda details: begun_again(before, placed(details)))
    job.finish()
    (again,) = begun_again(before, job.placed())
    assert "RESTARTING" not in job.states()
    rows = numbered.check_pipelines()
    assert {subtask: lives for subtask, lives in incarnations(rows).items() if lives > 1} in (
        {},
        {again[1]: 2},
    )
    others = {subtask: longest_gap_ms(rows, subtask) for subtask in range(8) if subtask != again[1]}
    # The one that was lost stood still for its delay of a second, at least.
    assert max(others.values()) < 1_000 <= longest_gap_ms(rows, again[1]), others


@pytest.mark.parametrize("who", ["slot", pytest.param("taskmanager", marks=pytest.mark.chaos)])
def test_a_pause_that_is_shorter_than_the_heartbeat_timeout_costs_nothing(
    wide: DaemonCluster, submit: Submit, tmp_path: Path, chance: random.Random, who: str
) -> None:
    numbered = NumberedJob(8_000, 2_000, tmp_path)
    job = submit(numbered.build, parallelism=4, config=CACHING)
    before = placed(job.await_running())
    job.await_checkpoints()
    paused = taskmanager_pid(wide, chance.choice(used(before)))
    if who == "slot":
        paused = chance.choice(wide.slot_pids(paused))
    os.kill(paused, signal.SIGSTOP)
    try:
        job.await_stuck(1_000)
    finally:
        os.kill(paused, signal.SIGCONT)
    job.finish()
    numbered.check()
    assert begun_again(before, job.placed()) == set()
    assert job.handle.exceptions() == []


def test_a_taskmanager_that_is_paused_for_too_long_commits_nothing_when_it_comes_back(
    wide: DaemonCluster, submit: Submit, tmp_path: Path, chance: random.Random
) -> None:
    numbered = NumberedJob(12_000, 2_000, tmp_path)
    job = submit(numbered.build, parallelism=4, config=CACHING)
    before = placed(job.await_running())
    job.await_checkpoints()
    victim = chance.choice(used(before))
    lost = {subtask for subtask, one in before.items() if one.taskmanager_id == victim}
    paused = taskmanager_pid(wide, victim)
    os.kill(paused, signal.SIGSTOP)
    try:
        job.await_that(lambda details: begun_again(before, placed(details)))
        job.await_running()
        job.await_checkpoints()
    finally:
        os.kill(paused, signal.SIGCONT)
    job.finish()
    numbered.check()
    assert begun_again(before, job.placed()) == lost
    assert "RESTARTING" not in job.states()
    assert "TaskManagerLost" in job.told()


@pytest.mark.chaos
@pytest.mark.parametrize("exchange", ["caching", "caching-memory", "pipelined"])
def test_a_slow_consumer_is_killed_and_reads_again_what_waits_for_it(
    wide: DaemonCluster, submit: Submit, tmp_path: Path, chance: random.Random, exchange: str
) -> None:
    numbered = NumberedJob(20_000, 4_000, tmp_path)

    def be_slow(row: Any) -> None:
        if row.key == 7:
            time.sleep(0.02)

    job = submit(
        lambda env: numbered.build(env, be_slow),
        parallelism=4,
        config={"execution.exchange.default": exchange},
    )
    before = placed(job.await_running())
    job.await_checkpoints()
    kill(chance.choice(wide.slot_pids(taskmanager_pid(wide, chance.choice(used(before))))))
    job.await_that(lambda details: begun_again(before, placed(details)))
    job.finish()
    numbered.check()
    assert len(job.handle.exceptions()) == 1
    again = begun_again(before, job.placed())
    assert again == set(before) if exchange == "pipelined" else len(again) == 2


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize(
    "victim", ["taskmanager", "partition server", pytest.param("slot", marks=pytest.mark.chaos)]
)
def test_finished_stages_are_run_again_only_where_their_rows_are_lost(
    wide: DaemonCluster, submit: Submit, tmp_path: Path, chance: random.Random, victim: str
) -> None:
    numbered = NumberedJob(6_000, None, tmp_path)
    gate = tmp_path / "gate"

    def wait(row: Any) -> None:
        if not gate.exists():
            raise RuntimeError("the gate is closed")

    job = submit(
        lambda env: numbered.build_stages(env, wait),
        parallelism=4,
        mode="batch",
        config={"restart-strategy.fixed-delay.delay": "200ms"},
    )
    details = job.await_that(lambda details: details.summary.restarts > 0)
    before = placed(details)
    first = {subtask for subtask, one in before.items() if subtask[0] == "v0"}
    assert {before[subtask].state for subtask in first} == {"FINISHED"}, before
    assert {before[subtask].attempt for subtask in first} == {0}
    where = chance.choice(used({subtask: before[subtask] for subtask in first}))
    held = {subtask for subtask in first if before[subtask].taskmanager_id == where}
    (daemon,) = [one for one in wide.daemons("taskmanager") if one["id"] == where]
    if victim == "taskmanager":
        kill(daemon["pid"])
        job.await_that(lambda details: begun_again(before, placed(details)) & first)
    elif victim == "partition server":
        kill(wide.partition_server_pids(daemon["pid"])[0])
    elif slots := wide.slot_pids(daemon["pid"]):
        kill(chance.choice(slots))
    gate.touch()
    job.finish()
    assert begun_again(before, job.placed()) & first == (held if victim == "taskmanager" else set())
    numbered.check_stages()
    assert "the gate is closed" in job.told()


# ---------------------------------------------------------------- mixed jobs


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("slot", marks=pytest.mark.chaos),
        "taskmanager",
        pytest.param("partition server", marks=pytest.mark.chaos),
        "jobmanager",
        pytest.param("jobmanager, told to end", marks=pytest.mark.chaos),
    ],
)
def test_behind_a_blocking_exchange_a_stream_with_checkpoints_goes_on_where_it_was(
    wide: DaemonCluster, submit: Submit, tmp_path: Path, chance: random.Random, victim: str
) -> None:
    numbered = NumberedJob(8_000, None, tmp_path)
    half, gate = tmp_path / "half", tmp_path / "gate"

    def slowly(row: Any) -> None:
        if row.n < 4_000 or gate.exists():
            return
        half.touch()
        time.sleep(0.01)  # work that takes its time: checkpoints come in between

    def build(env: ps.Environment) -> None:
        rows = numbered.source(env)
        if (
            victim == "jobmanager"
        ):  # its successor finds all that was kept: it need not be made again
            rows = rows.map(lambda row: row, schema=ROW)
        rows = rows.exchange("blocking").key_by("key")
        rows = rows.process(Number(slowly), schema=NUMBERED).uid("number")
        rows.rebalance().write_json(numbered.numbered).uid("sink")

    # Between two batches checkpoints are taken.
    job = submit(build, parallelism=4, config={"execution.batch-rows": 20})
    job.await_that(lambda _: half.exists())
    job.await_checkpoints(2)
    before = job.placed()
    first = {subtask for subtask in before if subtask[0] == "v0"}
    assert {before[subtask].state for subtask in first} == {"FINISHED"}, before
    running = used({subtask: one for subtask, one in before.items() if subtask not in first})
    where = chance.choice(running)
    (daemon,) = [one for one in wide.daemons("taskmanager") if one["id"] == where]
    if victim == "partition server":
        kill(wide.partition_server_pids(daemon["pid"])[0])
        job.await_checkpoints(2)
    elif "jobmanager" in victim:
        (jobmanager,) = wide.daemons("jobmanager")
        os.kill(jobmanager["pid"], signal.SIGKILL if victim == "jobmanager" else signal.SIGTERM)
        wait_ended(jobmanager["pid"])
        wide.start(taskmanagers=3)
    elif victim == "taskmanager":
        kill(daemon["pid"])
    else:
        kill(chance.choice(wide.slot_pids(daemon["pid"])))
    if victim != "partition server":
        job.await_that(lambda details: begun_again(before, placed(details)))
    gate.touch()
    job.finish()
    numbered.check()
    again = begun_again(before, job.placed()) & first
    lost = {subtask for subtask in first if before[subtask].taskmanager_id == where}
    assert again == (lost if victim == "taskmanager" else set())


# ---------------------------------------------------------------- functions


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        pytest.param("streaming", "raises", marks=pytest.mark.chaos),
        ("streaming", "kills its process"),
        ("batch", "raises"),
        pytest.param("batch", "kills its process", marks=pytest.mark.chaos),
    ],
)
def test_a_function_that_fails_once(submit: Submit, tmp_path: Path, mode: str, how: str) -> None:
    numbered = NumberedJob(4_000, 2_000 if mode == "streaming" else None, tmp_path)
    failed = tmp_path / "failed"

    def fail_once(row: Any) -> None:
        if row.n == 2_500 and not failed.exists():
            failed.touch()
            if how == "raises":
                raise ValueError("once")
            os.kill(os.getpid(), signal.SIGKILL)

    job = submit(
        lambda env: numbered.build_stages(env, fail_once), parallelism=2, mode=mode, config=CACHING
    )
    job.finish()
    numbered.check_stages()
    (entry,) = job.handle.exceptions()
    assert entry.restart_number == 1
    told = "ValueError: once" if how == "raises" else "SIGKILL"
    assert told in entry.root_cause.message, entry
    assert told in job.told()


@pytest.mark.parametrize(
    ("how", "limit"),
    [
        ("raises", {"restart-strategy.max-failures-per-task": 2}),
        ("kills its process", {"restart-strategy.max-failures-total": 3}),
    ],
)
def test_a_function_that_always_fails(
    submit: Submit, tmp_path: Path, how: str, limit: dict[str, int]
) -> None:
    numbered = NumberedJob(1_000, None, tmp_path)

    def fail(row: Any) -> None:
        if row.n == 700:
            if how == "raises":
                raise ValueError("always")
            os.kill(os.getpid(), signal.SIGKILL)

    job = submit(
        lambda env: numbered.build_stages(env, fail), parallelism=2, mode="batch", config=limit
    )
    told = "ValueError: always" if how == "raises" else "SIGKILL"
    with pytest.raises(ps.JobFailed, match=told) as raised:
        job.finish()
    assert next(iter(limit)) in str(raised.value)
    assert numbered.written() == []
    assert state_name(job.handle.details()) == "FAILED"
    assert "the job ended" in job.told()
