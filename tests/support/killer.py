"""Kills the processes of a cluster at random, seeded moments while a ledger job runs on it.

When the next kill comes is decided by what readers of the output see (so that the job gets on between two
kills, however slow the machine), or by the first new slot process after the last kill (so that a restart is
hit, too). What was killed is started again by ``penstock cluster start``. Between the kills the output is
looked at all the time.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import random
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

import penstock as ps
from penstock.client.client import Client
from penstock.client.job import TERMINAL_STATES
from penstock.client.job_result import state_name
from penstock.errors import StreamError
from penstock.pb import client_pb2
from tests.support.committed_files import Table
from tests.support.ledger import Ledger, check_at_least_once, check_exactly_once
from tests.support.processes import DaemonCluster, Deadline, Program

LOOK_S = 0.1
RESTART_SHARE = 0.35
"""How many of the kills hit a restart rather than a job that runs."""
TARGETS = {
    "slot": 6,
    "all slots": 2,
    "taskmanager": 4,
    "all taskmanagers": 1,
    "jobmanager": 3,
    "jobmanager and slot": 1,
    "jobmanager and taskmanager": 1,
    "everything": 1,
}
WITH_PAUSES = {**TARGETS, "paused slot": 3, "paused taskmanager": 3, "paused jobmanager": 2}
"""Some are stopped for a while instead, for shorter or longer than ``heartbeat.timeout`` (SIGSTOP, SIGCONT)."""
IN_BATCHES = {**TARGETS, "partition server": 6}
PAUSE_S = (0.3, 5.0)


@dataclass(frozen=True)
class Kill:
    """One kill that is to come.

    Attributes:
        target: one of ``TARGETS``.
        rows: transfers that readers must see before; None = it comes when the first new slot process
            has been seen after the last kill.
        delay_s: after that.
        finished: subtasks that must have finished before.
        pause_s: for which the target is stopped; 0 = it is killed.
    """

    target: str
    rows: int | None
    delay_s: float
    finished: int = 0
    pause_s: float = 0


def plan(seed: int, kills: int, rows: int, targets: dict[str, int] | None = None) -> list[Kill]:
    """The kills of a run.

    Args:
        rows: transfers of the job; the last kill comes before nine tenths of them are visible.
        targets: weights of what is killed; None = ``TARGETS``.
    """
    chance = random.Random(seed)
    weights = targets or TARGETS
    names = chance.choices(list(weights), list(weights.values()), k=kills)
    # A pause may be too short for anything to begin again.
    in_restart = [
        chance.random() < RESTART_SHARE and not before.startswith("paused")
        for before in ("paused", *names[:-1])
    ]
    points = iter(sorted(chance.randint(1, rows * 9 // 10) for _ in range(kills)))
    return [
        Kill(
            name,
            None if hits_restart else next(points),
            chance.uniform(0, 0.4 if hits_restart else 0.3),
            pause_s=chance.uniform(*PAUSE_S) if name.startswith("paused") else 0,
        )
        for name, hits_restart in zip(names, in_restart, strict=True)
    ]


def plan_of_batch(seed: int, kills: int, finished_max: int) -> list[Kill]:
    """The kills of a run in batch mode, whose output is not visible before its end.

    Args:
        finished_max: subtasks that may have finished when a kill comes; fewer than ever do before the end.
    """
    chance = random.Random(seed)
    names = chance.choices(list(IN_BATCHES), list(IN_BATCHES.values()), k=kills)
    points = sorted(chance.randint(0, finished_max) for _ in range(kills))
    return [
        Kill(name, 0, chance.uniform(0, 0.8), finished)
        for name, finished in zip(names, points, strict=True)
    ]


class LedgerRun:
    """A ledger job on a cluster whose processes are killed.

    Args:
        cluster: runs already.
        taskmanagers: that it shall have after every kill.
        mode: "exactly-once" or "at-least-once".
    """

    def __init__(
        self,
        cluster: DaemonCluster,
        ledger: Ledger,
        seed: int,
        *,
        taskmanagers: int,
        mode: str = "exactly-once",
    ) -> None:
        self._cluster = cluster
        self._ledger = ledger
        self._taskmanagers = taskmanagers
        self._is_exact = mode == "exactly-once"
        self._chance = random.Random(seed + 1)
        self.bookings = self._table(ledger.bookings, "kind", "account", "n")
        self.transfers = self._table(ledger.transfers, "id")
        self.totals = self._table(ledger.totals, "target", "window_start")
        self._starting: Program | None = None
        self._killed: set[int] = set()
        self._slots_before: set[int] = set()
        self._paused: list[tuple[float, int]] = []
        """(when it goes on, process id)"""
        self.job_id = ""

    def _table(self, directory: str, *columns: str) -> Table:
        if not self._is_exact:
            return Table(directory)
        return Table(directory, lambda row: tuple(row[column] for column in columns))

    def submit(
        self, parallelism: int, config: dict[str, str], runtime_mode: str = "streaming"
    ) -> str:
        """Submits the job; its id."""
        with ps.Environment(
            self._cluster.jobmanager, parallelism=parallelism, config=config
        ) as env:
            env.set_runtime_mode(runtime_mode)
            self._ledger.build(env)
            self.job_id = env.submit("ledger").job_id
        return self.job_id

    def run(self, kills: list[Kill], seconds: float) -> None:
        """Kills, waits for the end of the job, and checks all that it has written."""
        deadline = Deadline(f"the end of the ledger job after {len(kills)} kills", seconds)
        waiter = OutputWatch(self._ledger.output)
        try:
            for number, kill in enumerate(kills, 1):
                self._await_moment(kill, waiter, deadline)
                self._kill(kill)
                print(f"kill {number}: {kill} at {len(self.transfers)} visible transfers")
            while not self._has_finished():
                self._turn(waiter, deadline)
        finally:
            waiter.close()
            self._resume(math.inf)
        self.check()

    def check(self) -> None:
        """Compares all of the output of a job that has ended."""
        self.look()
        check = check_exactly_once if self._is_exact else check_at_least_once
        check(self._ledger, self.bookings, self.transfers, self.totals)

    def look(self) -> None:
        """Checks what is visible now."""
        self.bookings.look()
        self.transfers.look()
        self.totals.look()

    def slots(self) -> list[int]:
        """Living slot processes that were not killed."""
        found: list[int] = []
        for daemon in self._cluster.daemons("taskmanager"):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += self._cluster.slot_pids(daemon["pid"])
        return [pid for pid in found if pid not in self._killed]

    # ------------------------------------------------------------ moments

    def _await_moment(self, kill: Kill, waiter: OutputWatch, deadline: Deadline) -> None:
        """Returns at the moment of a kill."""
        while not self._has_come(kill):
            self._wait_on(kill, waiter, deadline)
        at = time.monotonic() + kill.delay_s
        while (left := at - time.monotonic()) > 0:
            self._turn(waiter, deadline, left)
        while not self._victims(kill.target):
            self._wait_on(kill, waiter, deadline)

    def _wait_on(self, kill: Kill, waiter: OutputWatch, deadline: Deadline) -> None:
        assert not self._has_finished(), f"the job ended before {kill}"
        self._turn(waiter, deadline)

    def _has_come(self, kill: Kill) -> bool:
        if kill.finished and self._finished() < kill.finished:
            return False
        if kill.rows is not None:
            return len(self.transfers) >= kill.rows
        return bool(set(self.slots()) - self._slots_before)

    def _turn(self, waiter: OutputWatch, deadline: Deadline, seconds: float = LOOK_S) -> None:
        """Waits for a change of the output, a moment at most; looks at it; starts what was killed."""
        waiter.wait(min(seconds, LOOK_S, deadline.left()))
        self._resume(time.monotonic())
        self.look()
        self._revive()

    def _revive(self) -> None:
        """Starts dead daemons beside everything else that happens."""
        if self._starting is not None:
            if self._starting.process.poll() is None:
                return
            # It fails where a daemon is killed while it starts: then once more.
            self._starting = None
        alive = [d for d in self._cluster.daemons() if self._is_alive(d["pid"])]
        if len(alive) < self._daemons_wanted():
            self._starting = self._cluster.site.start_penstock(
                "cluster", "start", "--dir", str(self._cluster.directory),
                "--taskmanagers", str(self._taskmanagers), *self._start_options(),
            )  # fmt: skip

    def _daemons_wanted(self) -> int:
        return 1 + self._taskmanagers

    def _start_options(self) -> list[str]:
        return []

    def _is_alive(self, pid: int) -> bool:
        return pid not in self._killed and psutil.pid_exists(pid)

    def _has_finished(self) -> bool:
        """Whether the job has, as far as anybody can be asked.

        Raises:
            AssertionError: it has ended otherwise.
        """
        details = self.details()
        if details is None or details.summary.state not in TERMINAL_STATES:
            return False
        assert state_name(details) == "FINISHED", details
        return True

    def _finished(self) -> int:
        """Subtasks that have finished, as far as anybody can be asked."""
        details = self.details()
        vertices = details.vertices if details is not None else ()
        states = [subtask.state for vertex in vertices for subtask in vertex.subtasks]
        return states.count(client_pb2.ATTEMPT_STATE_FINISHED)

    def details(self) -> client_pb2.JobDetails | None:
        """What the JobManager says of the job; None = there is none now."""
        with (
            contextlib.suppress(StreamError),
            Client(self._cluster.jobmanager, connect_timeout_s=1, call_timeout_s=5) as client,
        ):
            return client.job(self.job_id)
        return None

    # ------------------------------------------------------------ kills

    def _kill(self, kill: Kill) -> None:
        self._slots_before = set(self.slots())
        for pid in self._victims(kill.target):
            with contextlib.suppress(ProcessLookupError):
                if kill.pause_s:
                    os.kill(pid, signal.SIGSTOP)
                    self._paused.append((time.monotonic() + kill.pause_s, pid))
                else:
                    self._killed.add(pid)
                    os.kill(pid, signal.SIGKILL)

    def _resume(self, now: float) -> None:
        """Lets go on whoever has been stopped for long enough."""
        for at, pid in list(self._paused):
            if at <= now:
                self._paused.remove((at, pid))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _victims(self, target: str) -> list[int]:
        managers = [d["pid"] for d in self._cluster.daemons("jobmanager")]
        workers = [d["pid"] for d in self._cluster.daemons("taskmanager")]
        slots = self.slots()
        victims = list(managers) if "jobmanager" in target or target == "everything" else []
        if target in ("all taskmanagers", "everything"):
            victims += workers
        elif "taskmanager" in target and workers:
            victims.append(self._chance.choice(workers))
        if target == "all slots":
            victims += slots
        elif "slot" in target and slots:
            victims.append(self._chance.choice(slots))
        if target == "partition server" and workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                victims += self._cluster.partition_server_pids(self._chance.choice(workers))
        return [pid for pid in victims if self._is_alive(pid)]


class OutputWatch:
    """Wakes when something changes in the directories of a sink."""

    def __init__(self, output: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_CLOEXEC)
        self._output = output
        self._watched: set[Path] = set()

    def wait(self, seconds: float) -> None:
        """Returns when a file was renamed, after ``seconds`` at the latest."""
        for path in {self._output, *self._output.glob("*/")} - self._watched:
            path.mkdir(parents=True, exist_ok=True)
            moved = 0x80
            assert self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), moved) >= 0
            self._watched.add(path)
        if select.select([self._descriptor], [], [], seconds)[0]:
            os.read(self._descriptor, 1 << 16)

    def close(self) -> None:
        os.close(self._descriptor)
