"""Aim: rows that checkpoints carry on are written once, over failures, savepoints and forks of the job.

Method: a job whose rows are too few for a file in each of its checkpoints; its slot is killed, a savepoint is taken,
and another job goes on from that one.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from tests.integration.conftest import NewEnvironment
from tests.support.file_sinks import read, visible
from tests.support.jobs import DEADLINE_S, await_details
from tests.support.paced_numbers import PacedNumbers

pytestmark = pytest.mark.integration

ROWS = 1_000


class KillsItsSlot(ps.ProcessFunction):
    """Kills the process that it runs in, once, behind a checkpoint that has covered rows."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self.rows = 0
        self.rows_at: dict[int, int] = {}
        self.covered = False

    def snapshot(self, ctx: Any) -> None:
        self.rows_at[ctx.checkpoint_id] = self.rows

    def checkpoint_complete(self, checkpoint_id: int) -> None:
        self.covered = self.covered or self.rows_at.get(checkpoint_id, 0) > 0

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.rows += 1
        if self.covered and not os.path.exists(self.marker):  # noqa: PTH110 - shipped as it is
            open(self.marker, "w").close()  # noqa: PTH123
            os.kill(os.getpid(), signal.SIGKILL)
        out.emit(row)


def build(env: ps.Environment, output: Path, marker: Path, gate: Path) -> None:
    numbers = PacedNumbers(ROWS, gate, splits=2, rows_at_once=5)
    rows = env.source(numbers).uid("numbers")
    passed = rows.process(KillsItsSlot(str(marker)), schema={"n": "int64"}).uid("kills")
    passed.write_json(str(output), min_size="1mb", max_delay="1h").uid("files")


def written(*outputs: Path) -> list[int]:
    return sorted(row["n"] for output in outputs for row in read("json", output))


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_over_a_kill_a_savepoint_and_a_fork(
    new_env: NewEnvironment, tmp_path: Path, backend: str
) -> None:
    config = {
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "execution.checkpointing.interval": "100ms",
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.delay": "0s",
        "restart-strategy.fixed-delay.attempts": 10,
        "state.backend.type": backend,
    }
    output, marker, other = tmp_path / "out", tmp_path / "killed", tmp_path / "other"
    gate = tmp_path / "gate"
    subtasks = 2
    env = new_env(subtasks, config)
    build(env, output, marker, gate)
    handle = env.submit("original")
    await_details(handle, lambda _metrics, state: marker.exists() and state == "RUNNING")
    restored = handle.details().last_checkpoint_id
    await_details(handle, lambda _m, _s: handle.details().last_checkpoint_id > restored + 2)
    assert written(output) == []
    path = handle.savepoint(str(tmp_path / "savepoints"))
    # It is certain by then that what it covers is published; each subtask does it when it hears of that.
    await_details(handle, lambda _m, _s: len(visible(output)) >= subtasks)
    published = written(output)
    assert len(visible(output)) == subtasks
    assert len(published) < ROWS
    gate.touch()
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    assert written(output) == list(range(ROWS))
    env = new_env(3, config)
    build(env, other, marker, gate)
    fork = env.submit("fork", from_savepoint=path)
    assert fork.wait(DEADLINE_S).status == "FINISHED"
    assert sorted(published + written(other)) == list(range(ROWS))
    assert fork.details().summary.restarts == 0
