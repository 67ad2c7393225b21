"""A store, the JobManager, TaskManagers and a user's job go through bad times together, as real processes.

Every few seconds the checkpoint store is bad in another way (``tests.support.bad_store``) and comes back; while it is
bad daemons and slots are killed, and all the time ``penstock checkpoint`` asks for checkpoints. Then the store
stays good, and the job has to end with exact output, every request with an answer, and the store with nothing in it.
A seed gives the same plan again; what happens to a single call depends on the processes, too.
``python -m tests.support.chain SEED MINUTES``.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from penstock.storage.fsck import check_store
from tests.support.bad_store import DIRECTORY_VARIABLE, StoreControl
from tests.support.killer import LOOK_S, TARGETS, Kill, LedgerRun, OutputWatch
from tests.support.ledger import Ledger
from tests.support.processes import DaemonCluster, Deadline, Program, site, wait_gone
from tests.support.simulated_store import CALM, StoreWeather

_TASKMANAGERS = 2
_ROWS_PER_SECOND = 300.0
_ANSWER_MAX_S = 60.0
"""For a request: longer than a JobManager takes to come back, and a checkpoint until it is given up."""
_END_MAX_S = 120.0
_WEATHERS = (
    StoreWeather(lost_answers=0.4, hanging=0.3, hanging_max_ms=1_500),
    StoreWeather(failures=0.1, lost_answers=0.2, hanging=0.2, hanging_max_ms=3_000),
    StoreWeather(lost_answers=0.6),
    StoreWeather(hanging=0.5, hanging_max_ms=8_000),
    StoreWeather(failures=0.4),
    StoreWeather(failures=1.0),
)
_CONFIG = {
    "execution.checkpointing.interval": "200ms",
    "execution.checkpointing.timeout": "3s",
    "execution.checkpointing.tolerable-failed-checkpoints": "infinite",
    "execution.checkpointing.num-retained": "2",
    "state.storage.fs.memory-threshold": "1",
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": "infinite",
    "restart-strategy.fixed-delay.delay": "100ms",
}

Event = StoreWeather | Kill | None
"""None: a checkpoint is asked for."""


@dataclass(frozen=True)
class Brought:
    """What a run has brought.

    Attributes:
        calls: how many calls of the store were treated how.
        answers: how many requests ended with which exit status.
        kills: how many came.
    """

    calls: Counter[str]
    answers: Counter[int]
    kills: int


def plan(seed: int, seconds: float) -> list[tuple[float, Event]]:
    """What happens after how many seconds, in this order; the store is good at the end."""
    draws = random.Random(f"chain {seed}")
    events: list[tuple[float, Event]] = []
    weathers, targets = _weathers(draws), _targets(draws)
    now = 1.0
    bad_times = 0
    while now < seconds:
        end = min(now + draws.uniform(1.5, 4.0), seconds)
        events.append((now, next(weathers)))
        bad_times += 1
        if bad_times <= 2 or draws.random() < 0.7:
            events.append((draws.uniform(now, end), Kill(next(targets), None, 0)))
        events.append((end, CALM))
        now = end + draws.uniform(0.5, 3.0)
    at = 0.5
    while at < seconds:
        events.append((at, None))
        at += draws.uniform(0.5, 4.0)
    return sorted(events, key=lambda event: event[0])


def _weathers(draws: random.Random) -> Iterator[StoreWeather]:
    yield _WEATHERS[0]
    while True:
        yield from draws.sample(_WEATHERS, len(_WEATHERS))


def _targets(draws: random.Random) -> Iterator[str]:
    yield from draws.sample(["jobmanager", "taskmanager"], 2)
    while True:
        yield from draws.choices(list(TARGETS), list(TARGETS.values()))


class _ChainRun(LedgerRun):
    """The ledger job, to which things happen at their time."""

    def start(self, control: StoreControl, gate: Path) -> None:
        """Prepares ``go_through``."""
        self._control = control
        self._gate = gate
        self._asked: list[tuple[Deadline, Program]] = []
        self._answers: Counter[int] = Counter()
        self._told: Counter[str] = Counter()
        self._taken = 0

    def go_through(self, events: list[tuple[float, Event]], *, with_successor: bool) -> Brought:
        """Lets the events happen, waits for the end of the job, and checks what it has written."""
        waiter = OutputWatch(self._ledger.output)
        deadline = Deadline("the bad times", 3 * events[-1][0] + 120)
        kills: list[Kill] = []
        try:
            while not len(self.transfers):
                self._turn(waiter, deadline)
            began = time.monotonic()
            for at, event in events:
                while (left := began + at - time.monotonic()) > 0:
                    self._turn(waiter, deadline, left)
                if isinstance(event, StoreWeather):
                    while not self._has_struck():
                        self._turn(waiter, deadline)
                    self._control.set(event)
                elif isinstance(event, Kill):
                    while not self._victims(event.target):
                        self._turn(waiter, deadline)
                    kills.append(event)
                    self._kill(event)
                else:
                    self._ask()
                print(f"{time.monotonic() - began:6.1f} s, {len(self.transfers)} rows: {event}")
            deadline = Deadline("the end of the job after the bad times", _END_MAX_S)
            self._await_completed(waiter, deadline)
            if with_successor:
                self._kill(Kill("jobmanager", None, 0))
                taken = self._await_completed(waiter, deadline)
                while self._is_littered(taken):
                    self._turn(waiter, deadline)
            self._gate.touch()
            while not self._has_finished() or self._asked:
                self._turn(waiter, deadline)
        finally:
            waiter.close()
        self.check()
        return Brought(self._control.told(), self._answers, len(kills))

    def _has_struck(self) -> bool:
        """Whether calls have met what the store does now: a time in which none has is no bad time."""
        weather, told = self._control.weather(), self._control.told() - self._told
        has_lied = bool(told["lost"] + told["denied"]) or not weather.lost_answers
        has_hung = bool(told["hung"]) or not weather.hanging
        # Where reading fails, nothing may ever be written.
        if not (told["failed"] if weather.failures else has_lied and has_hung):
            return False
        self._told += told
        return True

    def _await_completed(self, waiter: OutputWatch, deadline: Deadline) -> int:
        """The checkpoint of a request that is made from now on."""
        while self._asked:
            self._turn(waiter, deadline)
        before = self._answers[0]
        while self._answers[0] == before:
            if not self._asked:
                self._ask()
            self._turn(waiter, deadline)
        return self._taken

    def _is_littered(self, before: int) -> bool:
        """Whether anything is wrong in the store, or left of checkpoints before this one.

        What was being written by a process that died has a hidden name, and stays for an hour.
        """
        report = check_store(str(self._cluster.directory / "checkpoints"))
        return not report.is_healthy or any(
            orphan.checkpoint_id is not None and orphan.checkpoint_id < before
            for job in report.jobs
            for orphan in job.orphans
        )

    def _ask(self) -> None:
        program = self._cluster.site.start_penstock(
            "checkpoint", self.job_id, "--json", "--jobmanager", self._cluster.jobmanager
        )
        self._asked.append((Deadline("the answer to a request", _ANSWER_MAX_S), program))

    @override
    def _turn(self, waiter: OutputWatch, deadline: Deadline, seconds: float = LOOK_S) -> None:
        super()._turn(waiter, deadline, seconds)
        for asked in list(self._asked):
            waits, program = asked
            if program.process.poll() is None:
                waits.left()
                continue
            self._asked.remove(asked)
            ended = program.wait()
            assert "Traceback" not in ended.stderr, ended
            assert ended.status == 0 or ended.stderr, ended
            self._answers[ended.status] += 1
            if ended.status == 0:
                self._taken = max(self._taken, ended.json["checkpoint_id"])


def go_through(
    directory: Path, seed: int, seconds: float, *, with_successor: bool = True
) -> Brought:
    """A cluster, its job and bad times for so many seconds; fails where anything is wrong at the end.

    Args:
        directory: empty; for all files.
        with_successor: a JobManager that begins when the store is good again has to leave no orphans.
    """
    print(f"SEED={seed}")
    gate, calls = directory / "gate", directory / "bad-store"
    calls.mkdir()
    with site(directory) as place:
        root = Path(__file__).resolve().parents[2]
        place.environment |= {DIRECTORY_VARIABLE: str(calls), "PYTHONPATH": str(root)}
        place.command_line = ("-P", "-m", "tests.support.bad_store", "penstock")
        cluster = DaemonCluster(place)
        cluster.start(
            taskmanagers=_TASKMANAGERS, slots=1, heartbeat_interval="200ms", heartbeat_timeout="3s"
        )
        rows = int(_ROWS_PER_SECOND * seconds * 0.4)
        ledger = Ledger(rows, _ROWS_PER_SECOND, directory / "output", str(gate))
        run = _ChainRun(cluster, ledger, seed, taskmanagers=_TASKMANAGERS)
        run.start(StoreControl(calls), gate)
        run.submit(2, _CONFIG)
        brought = run.go_through(plan(seed, seconds), with_successor=with_successor)
        _check_store(cluster, run.job_id)
        cluster.stop()
        cluster.assert_nothing_left()
        place.assert_nothing_left()
    return brought


def _check_store(cluster: DaemonCluster, job_id: str) -> None:
    """Nothing is left of a job that has finished."""
    checkpoints = cluster.directory / "checkpoints"
    cluster.assert_slots_ended()
    wait_gone(checkpoints / job_id, Deadline(f"the end of the checkpoints of {job_id}", 30))
    assert not check_store(str(checkpoints)).jobs
    assert not list(checkpoints.iterdir())


def main(seed: int, minutes: float) -> None:
    """Runs one seed."""
    with tempfile.TemporaryDirectory() as directory:
        brought = go_through(Path(directory), seed, minutes * 60)
    print(f"{brought.kills} kills; calls: {dict(brought.calls)}; answers: {dict(brought.answers)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
