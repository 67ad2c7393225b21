"""Aim: what functions in front of a blocking exchange keep without a key outlives whatever is done again there: it is
neither lost nor doubled, and who begins from nothing sees nothing of it.

Method: real daemons. All but the last subtask of a stage finish, a checkpoint completes, the last one fails and does its
work again; then the stage behind runs, and the JobManager is killed. The checkpoints in between are read.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

import penstock as ps
from penstock.pb import checkpoint_pb2, client_pb2
from penstock.storage.manifest import decode_manifest
from tests.integration.test_finished_subtasks import ROW, SEEN, Gated, await_kept, watcher
from tests.support.jobs import DEADLINE_S
from tests.support.processes import DaemonCluster, site, wait_ended

pytestmark = [pytest.mark.integration, pytest.mark.sampled(5)]


class Both(ps.CoProcessFunction):
    """Passes on the rows of both; neither is read before the other."""

    @override
    def process_left(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(row)

    process_right = process_left


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[DaemonCluster]:
    with site(tmp_path / "site") as place:
        daemons = DaemonCluster(place)
        daemons.start(taskmanagers=1, slots=3)
        yield daemons
        daemons.stop()
        daemons.assert_nothing_left()


def await_states(handle: ps.JobHandle, finished: int, begun: int, restarts: int) -> None:
    """Waits until so many subtasks have finished, and all others that have begun run."""

    class Held(Exception):  # noqa: N818 - not an error
        pass

    def look(details: client_pb2.JobDetails) -> None:
        subtasks = [subtask for vertex in details.vertices for subtask in vertex.subtasks]
        states = [subtask.state for subtask in subtasks]
        done = states.count(client_pb2.ATTEMPT_STATE_FINISHED)
        running = states.count(client_pb2.ATTEMPT_STATE_RUNNING)
        has_restarted = details.summary.restarts >= restarts
        if has_restarted and done == finished and done + running == begun:
            raise Held

    with pytest.raises(Held):
        handle.wait(DEADLINE_S, on_progress=look)


def items_kept(directory: Path, checkpoint_id: int, vertex: str) -> list[tuple[int, str]]:
    """Who holds which items, by a checkpoint that is retained."""
    (path,) = directory.rglob(f"chk-{checkpoint_id}/manifest*")
    manifest: checkpoint_pb2.CheckpointManifest = decode_manifest(path.read_bytes())
    return sorted(
        (subtask.subtask_index, item.decode().split(":")[0])
        for subtask in manifest.subtasks
        if subtask.vertex == vertex
        for operator in subtask.operators
        for held in operator.lists
        for item in held.items
    )


@pytest.mark.parametrize("redistribute", ["split", "union"])
def test_lists_of_a_stage_are_kept_whatever_of_it_is_done_again(
    cluster: DaemonCluster, tmp_path: Path, redistribute: str
) -> None:
    notes, directory = tmp_path / "notes", tmp_path / "checkpoints"
    gates = [tmp_path / "gate-1", tmp_path / "gate-2"]
    end = tmp_path / "end"
    config = {
        "execution.checkpointing.dir": str(directory),
        "execution.checkpointing.interval": "1h",
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": 5,
        "restart-strategy.fixed-delay.delay": "10ms",
    }
    with ps.Environment(cluster.jobmanager, parallelism=3, config=config) as env:
        stage = env.source(Gated([[], [], gates]))
        watched = stage.process(watcher(redistribute, 1, notes, [201]), schema=SEEN)
        first = watched.select(n=ps.col("subtask")).exchange("blocking").rebalance()
        other = env.source(Gated([[end], [end], [end]])).rebalance()
        first.connect(other).process(Both(), schema=ROW).discard()
        handle = env.submit("stages")
        vertex = "v0"
        await_states(handle, finished=2, begun=3, restarts=0)
        of_others = [(0, "0.0"), (1, "1.100")]
        await_kept(notes, 200, 0)
        checkpoint_id = handle.checkpoint()
        assert items_kept(directory, checkpoint_id, vertex) == [*of_others, (2, "2.200")]
        gates[0].touch()
        await_states(handle, finished=2, begun=3, restarts=1)
        opened = [json.loads(line) for line in notes.read_text().splitlines()]
        assert opened[3:] == [[2, []]], "it writes its rows again as it did, from the first on"
        await_kept(notes, 201, 1)
        checkpoint_id = handle.checkpoint()
        made = [*of_others, (2, "2.200"), (2, "2.201")]
        assert items_kept(directory, checkpoint_id, vertex) == made
        gates[1].touch()
        await_states(handle, finished=3, begun=9, restarts=1)
        made.append((2, "2.202"))
        checkpoint_id = handle.checkpoint()
        assert items_kept(directory, checkpoint_id, vertex) == made
        jobmanager = cluster.pid("jobmanager")
        os.kill(jobmanager, signal.SIGKILL)
        wait_ended(jobmanager)
        cluster.start(taskmanagers=1)
        await_states(handle, finished=3, begun=9, restarts=1)
        assert len(notes.read_text().splitlines()) == 4, "what is done is not done again"
        checkpoint_id = handle.checkpoint()
        assert items_kept(directory, checkpoint_id, vertex) == made
        end.touch()
        assert handle.wait(DEADLINE_S).status == "FINISHED"
