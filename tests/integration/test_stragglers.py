"""Aim: a batch job does not wait for a subtask that stands still; whichever attempt counts, every row is there once.

Method: one subtask stands still in some of its attempts, for very long or until a file is there; processes
are killed with SIGKILL. Output is compared with what went in.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from typing_extensions import override

import penstock as ps
from penstock.client.client import Client
from penstock.client.job import JobHandle
from penstock.pb import client_pb2
from tests.integration.conftest import SLOTS, TASKMANAGERS, NewEnvironment
from tests.support.jobs import DEADLINE_S, await_details
from tests.support.processes import wait_in_directory

pytestmark = pytest.mark.integration

PARALLELISM = 4
ROWS = 2_000
VERY_LONG_S = 600.0
COLUMNS = {"id": "int64", "square": "int64"}
SETTINGS = {
    "execution.batch-rows": 50,  # it has written some when it stands still
    "execution.batch.speculative.enabled": True,
    "slot.request.timeout": "10s",
    "slow-task-detector.check-interval": "50ms",
    "slow-task-detector.execution-time.baseline-lower-bound": "200ms",
    "slow-task-detector.execution-time.baseline-ratio": 0.5,
}


class Squared(ps.MapFunction):
    """Squares numbers. In one subtask it stands still after some rows, in the attempts given.

    Args:
        directory: where attempts write their process ids to ``pid-<attempt>``, and to ``hidden-<attempt>``
            which files of theirs are in ``output`` beside it.
        held: attempts that stand still; None = all.
        seconds: for which they do so, unless ``go`` is in the directory.
    """

    def __init__(self, directory: Path, held: set[int] | None, seconds: float) -> None:
        self._directory, self._held, self._seconds = directory, held, seconds
        self._rows = 0

    @override
    def open(self, ctx: ps.FunctionContext) -> None:
        self._attempt = ctx.attempt
        self._stands_still = ctx.subtask_index == 1 and (
            self._held is None or ctx.attempt in self._held
        )

    @override
    def __call__(self, row: Any) -> dict[str, int]:
        self._rows += 1
        if self._stands_still and self._rows == 300:
            self._stand_still()
        return {"id": row.id, "square": row.id * row.id}

    def _stand_still(self) -> None:
        output = self._directory.with_name("output")
        hidden = [path.name for path in output.glob(f".part-*-1-{self._attempt}-*")]
        for name, sign in (("hidden", "\n".join(hidden)), ("pid", str(os.getpid()))):
            written = self._directory / f"{name}.tmp"
            written.write_text(sign)
            written.rename(self._directory / f"{name}-{self._attempt}")
        until = time.monotonic() + self._seconds
        while time.monotonic() < until and not (self._directory / "go").exists():
            time.sleep(0.02)


class Stage:
    """A job whose subtask 1 of one stage stands still."""

    def __init__(self, directory: Path) -> None:
        self.signs = directory / "signs"
        self.output = directory / "output"
        self.input = directory / "input"
        for made in (self.signs, self.input):
            made.mkdir()
        for index in range(PARALLELISM):
            ids = pa.array(range(index, ROWS, PARALLELISM), pa.int64())
            pyarrow.parquet.write_table(pa.table({"id": ids}), self.input / f"{index}.parquet")

    def whole(self, env: ps.Environment, held: set[int] | None, seconds: float) -> None:
        """Source, function and sink in one stage."""
        env.set_runtime_mode("batch")
        numbers = env.read_parquet(str(self.input))
        numbers.map(Squared(self.signs, held, seconds), schema=COLUMNS).write_json(str(self.output))

    def between(self, env: ps.Environment, held: set[int] | None, seconds: float) -> None:
        """The function between two exchanges, which deal out rows otherwise each time."""
        env.set_runtime_mode("batch")
        numbers = env.read_parquet(str(self.input)).rebalance()
        squares = numbers.map(Squared(self.signs, held, seconds), schema=COLUMNS).rebalance()
        squares.filter(lambda row: True).write_json(str(self.output))

    def pids(self, count: int) -> list[int]:
        """The processes of the attempts that have stood still, once there are so many, the oldest first."""

        def find() -> list[int] | None:
            files = sorted(self.signs.glob("pid-?"))
            return [int(file.read_text()) for file in files] if len(files) >= count else None

        found = wait_in_directory(self.signs, find, f"{count} attempts standing still")
        assert isinstance(found, list)
        return found

    def go_on(self) -> None:
        """Nobody stands still any more."""
        (self.signs / "go").touch()

    def check_output(self) -> None:
        """Every row is there once, and nothing else."""
        files = [path for path in self.output.glob("part-*") if path.is_file()]
        rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        expected = [{"id": number, "square": number**2} for number in range(ROWS)]
        assert sorted(rows, key=lambda row: int(row["id"])) == expected


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def stage_of(details: client_pb2.JobDetails) -> client_pb2.VertexDetails:
    """The vertex that the function is in."""
    (vertex,) = [vertex for vertex in details.vertices if "map" in vertex.operators]
    return vertex


def rivals_of(details: client_pb2.JobDetails) -> list[client_pb2.SubtaskDetails]:
    return [rival for vertex in details.vertices for rival in vertex.speculative_attempts]


def await_free_slots(client: Client) -> None:
    """All slots of the cluster are free again."""
    deadline = time.monotonic() + DEADLINE_S
    while sum(tm.slots_free for tm in client.cluster().taskmanagers) < TASKMANAGERS * SLOTS:
        assert time.monotonic() < deadline, "slots were not given back"
        time.sleep(0.05)


def assert_ends_well(handle: JobHandle, client: Client, stage: Stage) -> None:
    """Waits for the end of a job that never had to restart."""
    handle.wait(DEADLINE_S)
    stage.check_output()
    assert handle.details().summary.restarts == 0
    assert handle.exceptions() == []
    await_free_slots(client)


@pytest.mark.parametrize("build", [Stage.whole, Stage.between], ids=lambda build: build.__name__)
def test_a_straggler_is_overtaken(
    new_env: NewEnvironment,
    client: Client,
    stage: Stage,
    build: Callable[[Stage, ps.Environment, set[int] | None, float], None],
) -> None:
    env = new_env(PARALLELISM, SETTINGS)
    build(stage, env, {0}, VERY_LONG_S)
    handle = env.submit("overtaken")
    handle.wait(DEADLINE_S)
    assert len(stage.pids(1)) == 1, "it did stand still"
    stage.check_output()
    details = handle.details()
    assert details.summary.restarts == 0
    assert rivals_of(details) == []
    (attempt,) = [s.attempt for s in stage_of(details).subtasks if s.subtask_index == 1]
    assert attempt > 0
    had_written = (stage.signs / "hidden-0").read_text().splitlines()
    assert len(had_written) == (1 if build is Stage.whole else 0)
    assert not any((stage.output / name).exists() for name in had_written)
    await_free_slots(client)


def test_without_it_the_job_waits(new_env: NewEnvironment, stage: Stage) -> None:
    env = new_env(PARALLELISM, SETTINGS | {"execution.batch.speculative.enabled": False})
    stage.whole(env, {0}, 3.0)
    started_s = time.monotonic()
    env.submit("waits").wait(DEADLINE_S)
    assert time.monotonic() - started_s >= 3.0
    stage.check_output()


def test_a_rival_that_is_killed_changes_nothing(
    new_env: NewEnvironment, client: Client, stage: Stage
) -> None:
    env = new_env(PARALLELISM, SETTINGS)
    stage.between(env, None, VERY_LONG_S)
    handle = env.submit("rival killed")
    _, pid = stage.pids(2)

    def runs(details: client_pb2.JobDetails) -> bool:
        states = {rival.subtask_index: rival.state for rival in rivals_of(details)}
        return states[1] == client_pb2.ATTEMPT_STATE_RUNNING

    # Its function may have begun before the JobManager hears that it runs.
    await_details(handle, lambda _metrics, _state: runs(handle.details()))
    os.kill(pid, signal.SIGKILL)
    # Another one takes its place.
    assert len(set(stage.pids(3))) == 3
    stage.go_on()
    assert_ends_well(handle, client, stage)


def test_a_rival_goes_on_for_a_straggler_that_is_killed(
    new_env: NewEnvironment, client: Client, stage: Stage
) -> None:
    env = new_env(PARALLELISM, SETTINGS)
    stage.whole(env, None, VERY_LONG_S)
    handle = env.submit("straggler killed")
    straggler, _ = stage.pids(2)
    os.kill(straggler, signal.SIGKILL)

    def has_been_replaced(details: client_pb2.JobDetails) -> bool:
        return any(s.subtask_index == 1 and s.attempt for s in stage_of(details).subtasks)

    await_details(handle, lambda _metrics, _state: has_been_replaced(handle.details()))
    stage.go_on()
    assert_ends_well(handle, client, stage)
