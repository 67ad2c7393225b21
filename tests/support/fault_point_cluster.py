"""A cluster whose leaders are killed at fault points (``tests/support/fault_points``)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.local.local_cluster import LocalCluster
from tests.support.elected_cluster import slots_of
from tests.support.jobs import DEADLINE_S
from tests.support.processes import Deadline, wait_ended

FAULT_POINTS = Path(__file__).parent / "fault_points"


class FaultPoints:
    """A cluster whose leaders die where they are told to."""

    def __init__(self, cluster: LocalCluster, place: Path, jobmanagers: int = 2) -> None:
        self.cluster = cluster
        self._place = place
        self._jobmanagers = jobmanagers
        place.mkdir()

    def start(self) -> None:
        """Starts what is not there."""
        environment = {"PYTHONPATH": str(FAULT_POINTS), "FAULT_POINTS": str(self._place)}
        self.cluster.start(
            jobmanagers=self._jobmanagers, taskmanagers=2, slots=2, environment=environment
        )

    def arm(self, point: str, ending: str = "SIGKILL") -> None:
        """The next leader to come there gets that signal."""
        (self._place / f"{point}.reached").unlink(missing_ok=True)
        written = self._place / f"{point}.new"
        written.write_text(ending)
        written.rename(self._place / point)

    def await_death(self, point: str) -> None:
        """Waits until one has died there."""
        wait_ended(self.await_come(point))

    def await_come(self, point: str) -> int:
        """Waits until one has come there; which process."""
        deadline, reached = (
            Deadline(f"a leader at {point}", DEADLINE_S),
            self._place / f"{point}.reached",
        )
        while not reached.exists():
            deadline.left()
            time.sleep(0.005)
        return int(reached.read_text())

    def await_reached(self, point: str) -> None:
        """Waits until one has died there, and replaces it."""
        self.await_death(point)
        self.start()

    def kill_taskmanager(self, taskmanager_id: str) -> None:
        """It ends without a word."""
        [victim] = [one for one in self.cluster.daemons() if one.id == taskmanager_id]
        os.kill(victim.pid, signal.SIGKILL)
        wait_ended(victim.pid)

    def await_nothing_left(self, handle: ps.JobHandle, persisted: int = 0) -> None:
        """Waits until a job has neither slots nor partitions, and there are none but those that outlive theirs."""
        deadline = Deadline(f"nothing of job {handle.job_id} to be left", DEADLINE_S)
        with self.cluster.client() as client:
            while slots_of(self.cluster, handle.job_id) or persisted != len(client.partitions()):
                deadline.left()
                time.sleep(0.05)

    def clear(self) -> None:
        """Nobody dies any more."""
        for point in self._place.iterdir():
            point.unlink()


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
