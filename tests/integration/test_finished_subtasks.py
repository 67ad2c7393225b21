"""Aim: what functions keep without a key is not lost where their subtask finishes before the others.

Method: real cluster. Each subtask of a source reads one split and notes it in operator state; all but the last
finish at once. The last waits for a checkpoint without them, fails, and says what it finds when it begins again;
then a second time. Before each failure as many checkpoints complete as retention lets go of older ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.pb import client_pb2
from tests.integration.conftest import NewEnvironment
from tests.support.jobs import DEADLINE_S
from tests.support.processes import wait_in_directory

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

ROW = pa.schema([("n", pa.int64())])
SEEN = pa.schema([("subtask", pa.int64()), ("seen", pa.string())])


class _Reader(ps.Reader):
    """Rows ``first`` .. ``first + len(gates)``: the next one when the file in front of it is there."""

    def __init__(self, first: int, gates: list[Path], given: int) -> None:
        self.first, self.gates, self.given = first, gates, given

    def read(self, max_rows: int) -> Any:
        if self.given > len(self.gates):
            return ps.END
        if self.given and not self.gates[self.given - 1].exists():
            return None
        self.given += 1
        return pa.RecordBatch.from_pydict({"n": [self.first + self.given - 1]}, schema=ROW)

    def next_read_at_ms(self) -> int | None:
        return 0

    def position(self) -> bytes:
        return str(self.given).encode()


class Gated(ps.Source):
    """One split per subtask; those of the last ``len(gates)`` rows wait at the files named."""

    schema = ROW

    def __init__(self, splits: list[list[Path]]) -> None:
        self.splits = splits

    def discover(self, ctx: ps.SourceContext) -> list[ps.Split]:
        return [ps.Split(str(index), b"", size=1) for index in range(len(self.splits))]

    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        gates = self.splits[int(split.id)]
        return _Reader(100 * int(split.id), gates, int(position or b"0"))


def await_kept(notes: Path, number: int, attempt: int) -> None:
    """Waits until an attempt of a ``watcher`` keeps an item for a row: one that runs may not have read any yet."""
    kept = notes.with_name(f"kept-{number}-{attempt}")
    wait_in_directory(notes.parent, kept.exists, f"row {number} in attempt {attempt}")


def watcher(redistribute: str, size: int, notes: Path, fails: list[int]) -> ps.ProcessFunction:
    class Watcher(ps.ProcessFunction):
        items = ps.OperatorListState("items", pa.string(), redistribute=redistribute)

        def open(self, ctx: ps.FunctionContext) -> None:
            self.subtask, self.attempt = ctx.subtask_index, ctx.attempt
            seen = [item.split(":")[0] for item in self.items.get()]
            with notes.open("a") as file:
                file.write(json.dumps([ctx.subtask_index, seen]) + "\n")
            self.kept = [
                item
                for item in self.items.get()
                if redistribute == "split" or item.startswith(f"{self.subtask}.")
            ]

        def process(self, row: Any, ctx: Any, out: Any) -> None:
            failed = notes.with_name(f"failed-{row.n}")
            if row.n in fails and not failed.exists():
                failed.touch()
                raise RuntimeError("as the test wants it")
            self.kept.append(f"{self.subtask}.{row.n}:{'x' * size}")
            notes.with_name(f"kept-{row.n}-{self.attempt}").touch()

        def snapshot(self, ctx: ps.CheckpointContext) -> None:
            self.items.update(self.kept)

    return Watcher()


def _await(handle: ps.JobHandle, finished: int, restarts: int) -> None:
    """Waits until all subtasks run or have finished, so many of them."""

    class Held(Exception):  # noqa: N818 - not an error
        pass

    def look(details: client_pb2.JobDetails) -> None:
        subtasks = [subtask for vertex in details.vertices for subtask in vertex.subtasks]
        states = [subtask.state for subtask in subtasks]
        done = states.count(client_pb2.ATTEMPT_STATE_FINISHED)
        running = states.count(client_pb2.ATTEMPT_STATE_RUNNING)
        has_restarted = max(subtask.attempt for subtask in subtasks) >= restarts
        if has_restarted and done == finished and done + running == len(states):
            raise Held

    with pytest.raises(Held):
        handle.wait(DEADLINE_S, on_progress=look)


@pytest.mark.parametrize("strategy", ["region", "full"])
@pytest.mark.parametrize("size", [1, 30_000])
@pytest.mark.parametrize("redistribute", ["split", "union"])
def test_items_of_finished_subtasks_are_seen_after_restores(
    new_env: NewEnvironment, tmp_path: Path, redistribute: str, size: int, strategy: str
) -> None:
    notes = tmp_path / "notes"
    gates = [tmp_path / "gate-1", tmp_path / "gate-2", tmp_path / "gate-3"]
    env = new_env(
        parallelism=3,
        config={
            "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
            "execution.checkpointing.interval": "1h",
            "jobmanager.execution.failover-strategy": strategy,
            "restart-strategy.type": "fixed-delay",
            "restart-strategy.fixed-delay.attempts": 5,
            "restart-strategy.fixed-delay.delay": "10ms",
        },
    )
    stream = env.source(Gated([[], [], gates]))
    function = watcher(redistribute, size, notes, [201, 202])
    stream.process(function, schema=SEEN).discard()
    handle = env.submit("finished first")
    _await(handle, finished=2, restarts=0)
    for restarts, gate in enumerate(gates[:2], start=1):
        await_kept(notes, 199 + restarts, restarts - 1)
        for _ in range(3):  # nothing that is needed goes with older ones
            handle.checkpoint()
        gate.touch()
        _await(handle, finished=2, restarts=restarts)
    await_kept(notes, 202, 2)
    handle.checkpoint()
    gates[2].touch()
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    opened = [json.loads(line) for line in notes.read_text().splitlines()]
    first, again = opened[:3], opened[3:]
    assert [seen for _, seen in first] == [[], [], []]
    assert len(again) == 2, "what has finished is not opened again"
    rows = [sorted(item.split(".")[1] for item in seen) for _, seen in again]
    assert rows == [["0", "100", "200"], ["0", "100", "200", "201"]]
