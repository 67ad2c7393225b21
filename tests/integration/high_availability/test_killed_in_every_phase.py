"""Aim: in whatever phase of a job its leader dies, the next one brings it to its end: nothing is lost, doubled or done twice.

Method: as in ``test_takeovers``; leaders die at fault points (``tests/support/fault_points``): in front of what the machine
of a job wants done, or behind the answer of a TaskManager.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.client.client import Client
from penstock.local.local_cluster import LocalCluster
from tests.integration.high_availability.test_combined_takeovers import FailingNumber
from tests.integration.high_availability.test_kept_rows_over_takeovers import (
    await_progress,
    await_running,
    told,
)
from tests.integration.high_availability.test_kept_rows_over_takeovers import (
    submitted as submitted_with_kept_rows,
)
from tests.support.elected_cluster import RATE, slots_of, submitted, token_of, written
from tests.support.examples import RUNS_ALL
from tests.support.jobs import DEADLINE_S
from tests.support.processes import Deadline, wait_ended

pytestmark = [pytest.mark.integration, pytest.mark.sampled(7)]

FAULT_POINTS = Path(__file__).parents[2] / "support" / "fault_points"


class FaultPoints:
    """A cluster whose leaders die where they are told to."""

    def __init__(self, cluster: LocalCluster, place: Path) -> None:
        self.cluster = cluster
        self._place = place
        place.mkdir()

    def start(self) -> None:
        """Starts what is not there."""
        environment = {"PYTHONPATH": str(FAULT_POINTS), "FAULT_POINTS": str(self._place)}
        self.cluster.start(jobmanagers=2, taskmanagers=2, slots=2, environment=environment)

    def arm(self, point: str) -> None:
        """The next leader to come there dies."""
        (self._place / f"{point}.reached").unlink(missing_ok=True)
        (self._place / point).touch()

    def await_death(self, point: str) -> None:
        """Waits until one has died there."""
        deadline, reached = (
            Deadline(f"a leader at {point}", DEADLINE_S),
            self._place / f"{point}.reached",
        )
        while not reached.exists():
            deadline.left()
            time.sleep(0.005)
        wait_ended(int(reached.read_text()))

    def await_reached(self, point: str) -> None:
        """Waits until one has died there, and replaces it."""
        self.await_death(point)
        self.start()

    def kill_taskmanager(self, taskmanager_id: str) -> None:
        """It ends without a word."""
        [victim] = [one for one in self.cluster.daemons() if one.id == taskmanager_id]
        os.kill(victim.pid, signal.SIGKILL)
        wait_ended(victim.pid)

    def clear(self) -> None:
        """Nobody dies any more."""
        for point in self._place.iterdir():
            point.unlink()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("points") / "points"


@pytest.fixture(scope="module")
def points_of_all(made: LocalCluster, place: Path) -> FaultPoints:
    return FaultPoints(made, place)


@pytest.fixture
def points(points_of_all: FaultPoints) -> Iterator[FaultPoints]:
    points_of_all.start()
    yield points_of_all
    points_of_all.clear()
    points_of_all.start()
    with points_of_all.cluster.client() as client:
        for job in client.jobs():
            client.cancel(job.job_id)


def restarts_of(cluster: LocalCluster, handle: ps.JobHandle) -> int:
    with cluster.client() as client:
        return int(client.job(handle.job_id).summary.restarts)


def beside(work: Callable[[], Any]) -> Callable[[], Any]:
    """Begins something; what is returned gives what has become of it."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(DEADLINE_S)
        assert found, "it has not ended"
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    return result


def user_of(cluster: LocalCluster, handle: ps.JobHandle) -> str:
    """A TaskManager with slots of a job."""
    with cluster.client() as client:
        told = client.cluster().taskmanagers
    return next(
        one.taskmanager_id
        for one in told
        if any(slot.job_id == handle.job_id for slot in one.slots)
    )


RESTARTING = ("CancelTasks", "PrepareStart", "AllocateSlots", "DeployTasks", "deploy_tasks")
if not RUNS_ALL:
    RESTARTING = RESTARTING[::2]


def test_during_the_restart_of_a_region_it_counts_once(points: FaultPoints, tmp_path: Path) -> None:
    out, tells = tmp_path / "out", tmp_path / "fail"
    failing = type("Failing", (FailingNumber,), {"path": str(tells)})
    with ps.Environment(points.cluster.address, parallelism=2) as env:
        handle = submitted(env, out, number=failing)
        await_progress(out)
        for restarts, point in enumerate(RESTARTING, start=1):
            points.arm(point)
            tells.touch()
            points.await_reached(point)
            await_progress(out)
            await_running(handle)
            assert restarts_of(points.cluster, handle) == restarts, point
        handle.stop(str(tmp_path / "savepoints"))
        written(out)


def test_with_a_taskmanager_during_a_restart(points: FaultPoints, tmp_path: Path) -> None:
    out, tells = tmp_path / "out", tmp_path / "fail"
    failing = type("Failing", (FailingNumber,), {"path": str(tells)})
    with ps.Environment(points.cluster.address, parallelism=2) as env:
        handle = submitted(env, out, number=failing)
        await_progress(out)
        used = user_of(points.cluster, handle)
        points.arm("DeployTasks")
        tells.touch()
        points.await_death("DeployTasks")
        points.kill_taskmanager(used)
        points.start()
        await_progress(out)
        await_running(handle)
        assert 1 <= restarts_of(points.cluster, handle) <= 2
        handle.stop(str(tmp_path / "savepoints"))
        written(out)


@pytest.mark.parametrize(
    "point", ["CancelTasks", "send_commands", "FreeSlots", "PublishState.CANCELED"]
)
def test_during_a_cancellation(points: FaultPoints, tmp_path: Path, point: str) -> None:
    out = tmp_path / "out"
    with ps.Environment(points.cluster.address, parallelism=2) as env:
        handle = submitted(env, out)
        await_progress(out)
        points.arm(point)
        cancelled = beside(handle.cancel)
        points.await_reached(point)
        cancelled()
        deadline = Deadline("the end of the job", DEADLINE_S)
        while handle.status() != "CANCELED":
            deadline.left()
        while slots_of(points.cluster, handle.job_id):
            deadline.left()
        written(out)


@pytest.mark.parametrize("point", ["RequestSlots", "AllocateSlots", "DeployTasks", "deploy_tasks"])
def test_during_the_start_of_a_job(points: FaultPoints, tmp_path: Path, point: str) -> None:
    out = tmp_path / "out"
    with ps.Environment(points.cluster.address, parallelism=2) as env:
        points.arm(point)
        submission = beside(lambda: submitted(env, out, rows=RATE))
        points.await_reached(point)
        handle = submission()
        handle.wait(DEADLINE_S)
        assert written(out) == RATE
        with points.cluster.client() as client:
            assert [job.job_id for job in client.jobs()].count(handle.job_id) == 1


@pytest.mark.parametrize("point", ["TriggerTasks", "WriteManifest", "NotifyCompleted"])
def test_during_a_checkpoint_and_the_commit_behind_it(
    points: FaultPoints, tmp_path: Path, point: str
) -> None:
    out = tmp_path / "out"
    with ps.Environment(points.cluster.address, parallelism=2) as env:
        handle = submitted(env, out)
        await_progress(out)
        points.arm(point)
        points.await_reached(point)
        await_progress(out)
        await_running(handle)
        assert restarts_of(points.cluster, handle) == 0
        handle.stop(str(tmp_path / "savepoints"))
        written(out)


@pytest.mark.parametrize("point", ["NoteCommit", "CommitOutput", "PublishState.FINISHED"])
def test_during_the_only_commit_of_a_job_without_checkpoints(
    points: FaultPoints, tmp_path: Path, point: str
) -> None:
    out, config = tmp_path / "out", {"execution.checkpointing.interval": "none"}
    config["restart-strategy.type"] = "none"
    with ps.Environment(points.cluster.address, parallelism=2, config=config) as env:
        points.arm(point)
        handle = submitted(env, out, rows=RATE)
        points.await_reached(point)
        handle.wait(DEADLINE_S)
        assert written(out) == RATE
        assert restarts_of(points.cluster, handle) == 0


@pytest.mark.parametrize("point", ["ReplaceProducer", "send_commands"])
def test_while_consumers_compare_rows_that_come_again(
    points: FaultPoints, tmp_path: Path, point: str
) -> None:
    out = tmp_path / "out"
    config = {"execution.checkpointing.interval": "2s"}
    with ps.Environment(points.cluster.address, parallelism=2, config=config) as env:
        handle = submitted_with_kept_rows(env, tmp_path)
        await_progress(out)
        _, first = told(points.cluster, handle)
        points.arm("ReplaceProducer")
        (tmp_path / "producer").touch()
        points.await_reached("ReplaceProducer")
        if point != "ReplaceProducer":
            points.arm(point)  # behind what the next one tells
            points.await_reached(point)
        await_progress(out)
        restarts, after = told(points.cluster, handle)
        assert (restarts, after["consumers"]) == (1, first["consumers"])
        assert after["producers"] > first["producers"]
        handle.stop(str(tmp_path / "savepoints"))
        written(out)


@pytest.mark.parametrize("point", ["FindAttempts", "PublishState.RUNNING", "NotifyAborted"])
def test_during_a_takeover(points: FaultPoints, tmp_path: Path, point: str) -> None:
    out = tmp_path / "out"
    with ps.Environment(points.cluster.address, parallelism=2) as env:
        handle = submitted(env, out)
        await_progress(out)
        before = slots_of(points.cluster, handle.job_id)
        points.arm(point)
        points.arm("WriteManifest")  # where the first one dies
        points.await_reached("WriteManifest")
        points.await_reached(point)
        await_progress(out)
        await_running(handle)
        assert restarts_of(points.cluster, handle) == 0
        assert slots_of(points.cluster, handle.job_id) == before != {}
        handle.stop(str(tmp_path / "savepoints"))
        written(out)


@pytest.mark.parametrize("point", ["FindAttempts", "PublishState.RUNNING"])
def test_with_a_taskmanager_during_a_takeover(
    points: FaultPoints, tmp_path: Path, point: str
) -> None:
    out = tmp_path / "out"
    with ps.Environment(points.cluster.address, parallelism=4) as env:
        handle = submitted(env, out)
        await_progress(out)
        used = user_of(points.cluster, handle)
        points.arm(point)
        points.arm("WriteManifest")  # where the first one dies
        points.await_reached("WriteManifest")
        points.await_death(point)
        points.kill_taskmanager(used)
        points.start()
        await_progress(out)
        await_running(handle)
        assert restarts_of(points.cluster, handle) == 1
        handle.stop(str(tmp_path / "savepoints"))
        written(out)


@pytest.mark.parametrize("dies", ["the leader", "a TaskManager with it"])
@pytest.mark.parametrize(
    ("point", "parallelism"),
    [("PrepareStart", 1), ("DeployTasks", 3), ("deploy_tasks", 4), ("PublishState.RUNNING", 1)],
)
def test_during_a_start_at_another_parallelism(
    points: FaultPoints, tmp_path: Path, point: str, parallelism: int, dies: str
) -> None:
    out, place = tmp_path / "out", str(tmp_path / "savepoints")
    with ps.Environment(points.cluster.address, parallelism=2) as env:
        handle = submitted(env, out)
        await_progress(out)
        savepoint = handle.stop(place)
    before = written(out)
    with ps.Environment(points.cluster.address, parallelism=parallelism) as env:
        points.arm(point)
        submission = beside(lambda: submitted(env, out, from_savepoint=savepoint))
        points.await_death(point)
        if dies != "the leader":
            points.kill_taskmanager("tm-1")
        points.start()
        handle = submission()
        await_progress(out)
        await_running(handle)
        handle.stop(place)
    assert written(out) > before


@pytest.mark.parametrize("point", ["CancelTasks", "AllocateSlots", "DeployTasks", "deploy_tasks"])
def test_during_a_drain(points: FaultPoints, tmp_path: Path, point: str) -> None:
    out = tmp_path / "out"
    with (
        ps.Environment(points.cluster.address, parallelism=2) as env,
        Client(points.cluster.address, token_of(points.cluster)) as client,
    ):
        handle = submitted(env, out)
        await_progress(out)
        drained = user_of(points.cluster, handle)
        points.arm(point)
        drain = beside(lambda: client.drain(drained, f"drain-{point}"))
        points.await_reached(point)
        drain()
        shown = {one.taskmanager_id: one for one in client.cluster().taskmanagers}
        assert shown[drained].slots_free == shown[drained].slots_total
        assert shown[drained].drained
        await_progress(out)
        await_running(handle)
        assert restarts_of(points.cluster, handle) == 0
        client.undo_drain(drained)
        handle.stop(str(tmp_path / "savepoints"))
        written(out)
