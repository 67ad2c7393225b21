"""A ledger job on a whole topology while everything around it fails at random, one thing after the other.

Three ZooKeepers, two JobManagers and three TaskManagers are processes; the job's checkpoints and all that JobManagers keep
lie in a store that is bad now and then (``tests.support.bad_store``). Every few seconds something is killed, or stopped for
shorter or longer than its session, its heartbeats or its call may take. What was killed is started again, as a
supervisor does. Committed output is looked at all the time, and all of it is compared at the end with what was
computed without the engine. A seed repeats the faults, not the moments of threads.
"""

from __future__ import annotations

import contextlib
import math
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import psutil
from typing_extensions import override

from tests.support.bad_store import DIRECTORY_VARIABLE, StoreControl
from tests.support.elected_cluster import LEADS
from tests.support.killer import Kill, LedgerRun, OutputWatch
from tests.support.ledger import Ledger
from tests.support.processes import DaemonCluster, Deadline, site
from tests.support.simulated_store import CALM, StoreWeather
from tests.support.zookeeper import ZookeeperServer, ensemble, quorum

JOBMANAGERS, TASKMANAGERS, ZOOKEEPERS = 2, 3, 3
SESSION_S = 2.0
ROWS_PER_SECOND = 1_000
END_S = 180.0
"""In which the job has to come to its end once nothing fails any more."""
_HEALTH_S = 0.5

TARGETS = {
    "leader": 4,
    "standby": 2,
    "jobmanagers": 1,
    "taskmanager": 4,
    "slot": 5,
    "all slots": 1,
    "leader and taskmanager": 1,
    "zookeeper": 4,
    "zookeepers": 1,
    "store": 4,
}
"""What fails, by weight."""
PAUSED_SHARE = 0.4
PAUSE_S = (0.3, 6.0)
"""Shorter and longer than sessions (2 s) and heartbeats (3 s) live."""
BETWEEN_S = (0.3, 4.0)


@dataclass(frozen=True)
class Fault:
    """One thing that fails.

    Attributes:
        at_s: when, since the job runs.
        target: one of ``TARGETS``.
        seconds: how long it is stopped, or bad; of what is killed: until it may start again.
        is_pause: it is stopped (SIGSTOP), else killed.
        weather: of the store.
    """

    at_s: float
    target: str
    seconds: float
    is_pause: bool
    weather: StoreWeather = CALM


def drawn_faults(seed: int, seconds: float) -> list[Fault]:
    """The faults of a run, in order."""
    chance = random.Random(seed)
    names, weights = list(TARGETS), list(TARGETS.values())
    faults: list[Fault] = []
    at_s = chance.uniform(*BETWEEN_S)
    while at_s < seconds:
        [target] = chance.choices(names, weights)
        is_pause = target != "store" and chance.random() < PAUSED_SHARE
        lasts = chance.uniform(*PAUSE_S) if is_pause or target == "store" else chance.uniform(0, 2)
        weather = CALM
        if target == "store":
            failures, lost, hanging = (chance.choice([0, 0.1, 0.5]) for _ in range(3))
            weather = StoreWeather(failures or 0.05, lost, hanging / 2, hanging_max_ms=1_500)
        faults.append(Fault(at_s, target, lasts, is_pause, weather))
        at_s += chance.uniform(*BETWEEN_S)
    return faults


class SoakRun(LedgerRun):
    """A ledger job on the topology.

    Args:
        zookeepers: which run already.
        store: by which the store is made bad.
        gate: what the last rows wait for.
    """

    def __init__(
        self,
        cluster: DaemonCluster,
        ledger: Ledger,
        seed: int,
        zookeepers: list[ZookeeperServer],
        store: StoreControl,
        gate: Path,
    ) -> None:
        super().__init__(cluster, ledger, seed, taskmanagers=TASKMANAGERS)
        self._zookeepers = zookeepers
        self._store = store
        self._gate = gate
        self._due: list[tuple[float, ZookeeperServer | None]] = []
        """When a ZooKeeper starts again; None = when the store is good again."""
        self.done: Counter[str] = Counter()
        """Faults by target, those that met nobody left out."""

    def go_through(self, faults: list[Fault], seconds: float) -> None:
        """All faults at their time, then the end of the job, and the comparison."""
        began, waiter = time.monotonic(), OutputWatch(self._ledger.output)
        deadline = Deadline("the soak's faults", seconds + END_S)
        try:
            for fault in faults:
                while time.monotonic() < began + fault.at_s:
                    self._turn(waiter, deadline)
                self._fail(fault)
            self._calm()
            self._gate.touch()
            deadline = Deadline("the end of the job when nothing fails any more", END_S)
            while not self._has_finished():
                self._turn(waiter, deadline)
            while not self._is_whole():
                self._turn(waiter, deadline)
        finally:
            waiter.close()
            self._calm()
        self.check()

    def _is_whole(self) -> bool:
        """Whether every daemon runs again, and nobody starts one."""
        is_starting = self._starting is not None and self._starting.process.poll() is None
        alive = [one for one in self._cluster.daemons() if self._is_alive(one["pid"])]
        return not is_starting and len(alive) >= self._daemons_wanted()

    def _fail(self, fault: Fault) -> None:
        now = time.monotonic()
        if fault.target == "store":
            self._store.set(fault.weather)
            self._due.append((now + fault.seconds, None))
            met = 1
        elif "zookeeper" in fault.target:
            count = 1 if fault.target == "zookeeper" else 2
            met = sum(
                self._fail_zookeeper(server, fault)
                for server in self._chance.sample(self._zookeepers, count)
            )
        else:
            before = len(self._killed) + len(self._paused)
            self._kill(Kill(fault.target, None, 0, pause_s=fault.seconds * fault.is_pause))
            met = len(self._killed) + len(self._paused) - before
        how = "stopped" if fault.is_pause else "bad" if fault.target == "store" else "killed"
        print(f"{fault.at_s:7.1f} s: {fault.target} {how}, {fault.seconds:.1f} s, met {met}; "
              f"{len(self.transfers)} transfers are visible", flush=True)  # fmt: skip
        self.done[fault.target] += bool(met)

    def _fail_zookeeper(self, server: ZookeeperServer, fault: Fault) -> bool:
        now = time.monotonic()
        if server.process is None or server.process.poll() is not None:
            return False
        if fault.is_pause:
            server.signal(signal.SIGSTOP)
            self._paused.append((now + fault.seconds, server.process.pid))
        else:
            server.kill()
            self._due.append((now + fault.seconds, server))
        return True

    def _calm(self) -> None:
        """Nothing fails any more."""
        self._resume(math.inf)
        self._mend(math.inf)

    def _mend(self, now: float) -> None:
        for due in list(self._due):
            at, server = due
            if at > now:
                continue
            self._due.remove(due)
            if server is None:
                if not any(other is None for _, other in self._due):
                    self._store.set(CALM)
            elif server.process is None or server.process.poll() is not None:
                server.start()

    @override
    def _turn(self, waiter: OutputWatch, deadline: Deadline, seconds: float = 0.1) -> None:
        super()._turn(waiter, deadline, seconds)
        self._mend(time.monotonic())

    @override
    def _daemons_wanted(self) -> int:
        return JOBMANAGERS + TASKMANAGERS

    @override
    def _start_options(self) -> list[str]:
        return ["--jobmanagers", str(JOBMANAGERS)]

    @override
    def _victims(self, target: str) -> list[int]:
        managers = self._jobmanagers()
        workers = [daemon["pid"] for daemon in self._cluster.daemons("taskmanager")]
        slots = self.slots()
        match target:
            case "leader" | "standby":
                victims = managers[target][:1]
            case "jobmanagers":
                victims = [pid for pids in managers.values() for pid in pids]
            case "leader and taskmanager":
                victims = managers["leader"] + self._chance.sample(workers, min(1, len(workers)))
            case "taskmanager":
                victims = self._chance.sample(workers, min(1, len(workers)))
            case "slot":
                victims = self._chance.sample(slots, min(1, len(slots)))
            case _:
                victims = slots
        return [pid for pid in victims if self._is_alive(pid)]

    def _jobmanagers(self) -> dict[str, list[int]]:
        """Role -> who has it, as they say of themselves; who says nothing is no leader."""
        found: dict[str, list[int]] = {"leader": [], "standby": []}
        for daemon in self._cluster.daemons("jobmanager"):
            said = ""
            with (
                contextlib.suppress(OSError),
                urlopen(f"http://{daemon['metrics_address']}/health", timeout=_HEALTH_S) as page,
            ):
                said = page.read().decode().strip()
            found["leader" if said == LEADS else "standby"].append(daemon["pid"])
        return found


@contextlib.contextmanager
def topology(
    directory: Path,
) -> Iterator[tuple[DaemonCluster, list[ZookeeperServer], StoreControl]]:
    """All of it, for the time of the block; nothing may be left of it."""
    calls = directory / "bad-store"
    calls.mkdir()
    with ensemble(directory, ZOOKEEPERS) as zookeepers, site(directory) as place:
        root = Path(__file__).resolve().parents[2]
        place.environment |= {DIRECTORY_VARIABLE: str(calls), "PYTHONPATH": str(root)}
        place.command_line = ("-P", "-m", "tests.support.bad_store", "penstock")
        cluster = DaemonCluster(place)
        cluster.start(
            *("--jobmanagers", str(JOBMANAGERS)),
            taskmanagers=TASKMANAGERS,
            slots=1,
            heartbeat_interval="200ms",
            heartbeat_timeout="3s",
            high__availability_type="zookeeper",
            high__availability_zookeeper_quorum=quorum(zookeepers),
            high__availability_zookeeper_client_session__timeout=f"{SESSION_S:g}s",
        )
        yield cluster, zookeepers, StoreControl(calls)
        cluster.stop()
        cluster.assert_nothing_left()
        place.assert_nothing_left()


def go_through(directory: Path, seed: int, seconds: float) -> Counter[str]:
    """The whole of it for so many seconds; fails where anything is wrong at the end.

    Args:
        directory: empty; for all files.

    Returns:
        The faults that met somebody, by target.
    """
    print(f"SEED={seed}", flush=True)
    with topology(directory) as (cluster, zookeepers, store):
        gate = directory / "gate"
        rows = int(ROWS_PER_SECOND * seconds * 0.8)
        ledger = Ledger(rows, ROWS_PER_SECOND, directory / "output", str(gate))
        run = SoakRun(cluster, ledger, seed, zookeepers, store, gate)
        config = {
            "execution.checkpointing.interval": "300ms",
            "execution.checkpointing.timeout": "10s",
            "restart-strategy.type": "fixed-delay",
            "restart-strategy.fixed-delay.attempts": "infinite",
            "restart-strategy.fixed-delay.delay": "100ms",
        }
        run.submit(2, config)
        run.go_through(drawn_faults(seed, seconds), seconds)
        for taskmanager in cluster.daemons("taskmanager"):
            assert psutil.pid_exists(taskmanager["pid"])
        cluster.assert_slots_ended()
    return run.done


def main(seed: int, minutes: float) -> None:
    """Runs one seed."""
    with tempfile.TemporaryDirectory() as directory:
        done = go_through(Path(directory), seed, minutes * 60)
    print(f"exact after {sum(done.values())} faults: {dict(done)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
