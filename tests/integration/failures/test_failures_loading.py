"""Aim: whatever dies while a side is read first, every row finds its name, and comes once; whatever dies while a history is
made or when live rows come behind it, each row comes once, in order, and what has been read is not made again.

Method: real daemons. The side waits in the middle for a file, a process is killed, and when the job has begun again the
file is made. What the job has written at its end is compared with what follows from the input.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import penstock as ps
from penstock.pb import client_pb2
from tests.integration import test_history_then_live as past
from tests.integration.test_load_first import (
    NAMED,
    NameKeyed,
    airports,
    await_checkpoint,
    await_running,
    check,
    flights,
    lines,
)
from tests.support.jobs import DEADLINE_S, await_details
from tests.support.processes import DaemonCluster, own_cluster, wait_ended

pytestmark = [pytest.mark.integration, pytest.mark.sampled(6)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonCluster]:
    """Two TaskManagers, quick to notice; nothing may be left of them."""
    with own_cluster(
        tmp_path_factory.mktemp("loading"),
        taskmanagers=2,
        slots=2,
        heartbeat_interval="200ms",
        heartbeat_timeout="5s",
    ) as cluster:
        yield cluster


def kill(cluster: DaemonCluster, victim: str, handle: ps.JobHandle) -> None:
    """Kills something that the job runs in, and starts it again."""
    pids = {one["id"]: one["pid"] for one in cluster.daemons("taskmanager")}
    subtasks = [vertex.subtasks[0] for vertex in handle.details().vertices]
    taskmanager = pids[[s.taskmanager_id for s in subtasks if s.taskmanager_id][-1]]
    pid = {
        "slot": lambda: cluster.slot_pids(taskmanager)[0],
        "taskmanager": lambda: taskmanager,
        "jobmanager": lambda: cluster.pid("jobmanager"),
    }[victim]()
    os.kill(pid, signal.SIGKILL)
    wait_ended(pid)
    if victim != "slot":
        cluster.start(taskmanagers=2)


def await_restart(handle: ps.JobHandle) -> None:
    class Held(Exception):  # noqa: N818 - not an error
        pass

    def look(details: client_pb2.JobDetails) -> None:
        if details.summary.restarts:
            raise Held

    with contextlib.suppress(Held):
        handle.wait(DEADLINE_S, on_progress=look)
        raise AssertionError(f"the job ended {handle.status()} before")


@pytest.mark.parametrize(
    ("victim", "mode", "backend", "parallelism"),
    [
        ("slot", "streaming", "hashmap", 1),
        ("slot", "batch", "rocksdb", 3),
        ("taskmanager", "streaming", "rocksdb", 2),
        ("taskmanager", "batch", "hashmap", 1),
        ("jobmanager", "streaming", "hashmap", 3),
        ("jobmanager", "batch", "rocksdb", 2),
    ],
)
def test_a_process_is_killed_while_the_side_is_read(
    cluster: DaemonCluster,
    tmp_path: Path,
    victim: str,
    mode: str,
    backend: str,
    parallelism: int,
) -> None:
    gate, read, output = tmp_path / "gate", tmp_path / "read", tmp_path / "out"
    config = {
        "execution.runtime-mode": mode,
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "execution.checkpointing.interval": "50ms",
        "state.backend.type": backend,
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": 20,
        "restart-strategy.fixed-delay.delay": "50ms",
    }
    with ps.Environment(cluster.jobmanager, parallelism=parallelism, config=config) as env:
        side = env.source(airports(tmp_path / "side", {150: gate})).exchange("pipelined")
        main = env.source(flights(read)).exchange("pipelined").key_by("code")
        named = main.connect(side.broadcast(load_first=True)).process(NameKeyed(), schema=NAMED)
        named.write_json(str(output))
        handle = env.submit("killed while loading")
        await_running(handle)
        kill(cluster, victim, handle)
        await_restart(handle)
        assert handle.checkpoints() == []
        assert lines(read) == 0, "the source that waits is not read"
        gate.touch()
        assert handle.wait(DEADLINE_S).status == "FINISHED"
    check(written(output))


def written(output: Path) -> list[SimpleNamespace]:
    """The rows that a job has written."""
    found = [path for path in output.iterdir() if not path.name.startswith((".", "_"))]
    lines = [line for path in found for line in path.read_text().splitlines()]
    return [SimpleNamespace(**json.loads(line)) for line in lines]


@pytest.mark.parametrize(
    ("victim", "moment", "strategy", "backend"),
    [
        ("taskmanager", "live", "region", "rocksdb"),
        ("slot", "history", "region", "hashmap"),
        ("slot", "live", "full", "hashmap"),
        ("taskmanager", "history", "region", "hashmap"),
        ("jobmanager", "history", "region", "rocksdb"),
        ("jobmanager", "live", "region", "hashmap"),
    ],
)
def test_a_process_is_killed_on_either_side_of_the_cut(
    cluster: DaemonCluster, tmp_path: Path, victim: str, moment: str, strategy: str, backend: str
) -> None:
    gate, made, read = tmp_path / "gate", tmp_path / "made", tmp_path / "read"
    config = {
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "execution.checkpointing.interval": "50ms",
        "jobmanager.execution.failover-strategy": strategy,
        "state.backend.type": backend,
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": 20,
        "restart-strategy.fixed-delay.delay": "50ms",
    }
    gates = {500: gate}
    with ps.Environment(cluster.jobmanager, parallelism=2, config=config) as env:
        history = env.source(past.history_of(made, gates if moment == "history" else None))
        live = env.source(past.live_of(read, gates if moment == "live" else None))
        past.ordered(history, live).write_json(str(tmp_path / "out"))
        handle = env.submit("killed beside its history")
        if moment == "history":
            await_details(handle, lambda metrics, _: lines(made) > 6)
        else:
            await_checkpoint(handle)
            await_details(handle, lambda metrics, _: lines(read) > 6)
        before = lines(made)
        kill(cluster, victim, handle)
        if victim != "jobmanager":
            await_restart(handle)
        if moment == "history":
            assert lines(read) == 0, "what waits is not read"
        gate.touch()
        assert handle.wait(DEADLINE_S).status == "FINISHED"
    if moment == "live":
        assert lines(made) == before, "history is not made again"
    past.check(written(tmp_path / "out"))
