"""Aim: a failure restarts what it must, and nothing else; whatever is killed, every row counts exactly once.

Method: jobs whose rows say which life of which subtask made them (``tests/support/numbered_job.py``), on three
TaskManagers of which one is to spare. What began again is told by attempts, by the rows themselves and by
``penstock exceptions``. ``PENSTOCK_CHAOS_SEED`` chooses the victims.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.job import state_name
from tests.chaos.test_chaos_ledger import seed_of
from tests.support.numbered_job import NumberedJob, incarnations, longest_gap_ms
from tests.support.processes import DaemonCluster, wait_ended
from tests.support.watched_job import Placed, Subtask, WatchedJob, placed

pytestmark = pytest.mark.integration

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


def kill_taskmanager(cluster: DaemonCluster, taskmanager_id: str) -> None:
    (pid,) = [one["pid"] for one in cluster.daemons("taskmanager") if one["id"] == taskmanager_id]
    kill(pid)


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


@pytest.mark.parametrize("exchange", ["caching", "caching-memory"])
def test_a_lost_taskmanager_restarts_only_what_ran_there(
    wide: DaemonCluster, submit: Submit, tmp_path: Path, chance: random.Random, exchange: str
) -> None:
    numbered = NumberedJob(12_000, 2_000, tmp_path)
    job = submit(numbered.build, parallelism=4, config={"execution.exchange.default": exchange})
    before = placed(job.await_running())
    job.await_checkpoints()
    victim = chance.choice(used(before))
    lost = {subtask for subtask, one in before.items() if one.taskmanager_id == victim}
    kill_taskmanager(wide, victim)
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


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize("victim", ["taskmanager", "partition server", "slot"])
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


# ---------------------------------------------------------------- functions


@pytest.mark.parametrize("mode", ["streaming", "batch"])
@pytest.mark.parametrize("how", ["raises", "kills its process"])
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
