"""One simulated run of a job with checkpoints: everything about it is drawn from its seed.

``python -m tests.support.simulated_run SEED COUNT BACKEND`` runs seeds one after the other and says how to
repeat those that fail.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import structlog

from jobmanager.dispatcher.job_state import JobState
from penstock.config import Configuration
from tests.support.simulated_cluster import SimulatedCluster
from tests.support.simulated_faults import Faults, draw_faults
from tests.support.simulated_jobs import JOBS, SimulatedJob
from tests.support.simulated_world import World


@dataclass(frozen=True, slots=True)
class Run:
    """What a seed stands for."""

    job: SimulatedJob
    world: World
    settings: dict[str, object]
    faults: Faults
    taskmanagers: int

    @property
    def is_exactly_once(self) -> bool:
        """Whether each row must come out once."""
        return self.settings["execution.checkpointing.mode"] == "exactly-once"


def draw_run(seed: int, backend: str) -> Run:
    """Draws a run.

    Args:
        backend: of keyed state; "rocksdb" writes real files, at the pace of a real disk.
    """
    draws = random.Random(seed)
    world = World(f"seed {seed}")
    make = draws.choice(JOBS)
    job = make(
        f"seed {seed}",
        draws.choice((30, 150, 300)),
        draws.choice((None, None, 1000.0, 5000.0)),
        draws.choice((1, 2, 2, 3)),
    )
    settings: dict[str, object] = {
        "execution.checkpointing.dir": "/simulated",
        "execution.checkpointing.interval": draws.choice(("3ms", "20ms", "20ms", "100ms")),
        "execution.checkpointing.mode": draws.choice(
            ("exactly-once", "exactly-once", "exactly-once", "at-least-once")
        ),
        "execution.checkpointing.timeout": draws.choice(("10min", "2s", "40ms")),
        "execution.checkpointing.min-pause": draws.choice(("0ms", "10ms")),
        "execution.checkpointing.max-concurrent-checkpoints": draws.choice((1, 2, 3)),
        "execution.checkpointing.num-retained": draws.choice((1, 1, 3)),
        "execution.checkpointing.incremental": draws.choice((True, False)),
        "execution.checkpointing.tolerable-failed-checkpoints": draws.choice((-1, -1, 3)),
        "state.backend.type": backend,
        "state.storage.fs.memory-threshold": draws.choice((0, 200, 20_000)),
        "execution.batch-rows": draws.choice((3, 16, 64)),
        "execution.buffer-timeout.interval": draws.choice(("0ms", "5ms", "100ms")),
        "pipeline.auto-watermark-interval": draws.choice(("0ms", "10ms", "50ms")),
        "taskmanager.network.credit-per-channel": draws.choice((1024, 10_000, 2 << 20)),
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": 1000,
        "restart-strategy.fixed-delay.delay": draws.choice(("0ms", "20ms")),
    }
    return Run(job, world, settings, draw_faults(draws), draws.choice((1, 2, 3)))


def simulate(seed: int, backend: str = "hashmap") -> SimulatedCluster:
    """Runs a seed and checks all there is to check."""
    run = draw_run(seed, backend)
    config = Configuration.from_mapping(run.settings)
    with tempfile.TemporaryDirectory() as directory:
        cluster = SimulatedCluster(
            run.job.graph,
            seed,
            config,
            faults=run.faults,
            taskmanagers=run.taskmanagers,
            work_directory=Path(directory),
        )
        run.world.on_commit = cluster.committing
        try:
            cluster.run()
            _check_end(run, cluster)
        except BaseException as error:
            error.add_note(f"{run.job.name} of seed {seed}: {run.settings}; {run.faults}")
            error.add_note("\n".join(cluster.story[-60:]))
            error.add_note(f"again: make sim SEED={seed} COUNT=1 BACKEND={backend}")
            raise
    return cluster


def _check_end(run: Run, cluster: SimulatedCluster) -> None:
    expected = {JobState.FINISHED} | ({JobState.CANCELED} if cluster.is_cancelled else set())
    assert cluster.state in expected, f"it ended {cluster.state.name}: {cluster.failure}"
    run.job.check(
        run.world.visible(),
        is_exactly_once=run.is_exactly_once,
        has_finished=cluster.state is JobState.FINISHED,
    )
    if not (run.faults.jobmanager_store_failures or run.faults.lost_answers):
        left = cluster.audited.paths()
        assert not left or cluster.has_leftovers, f"left in the store: {sorted(left)}"


def main(first: int, count: int, backend: str) -> int:
    """Runs seeds; returns how many have failed."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    failed: list[int] = []
    restarts = deaths = takeovers = checks = 0
    started = time.monotonic()
    for seed in range(first, first + count):
        try:
            cluster = simulate(seed, backend)
        except KeyboardInterrupt:
            break
        except BaseException:
            failed.append(seed)
            traceback.print_exc()
        else:
            restarts += cluster.states.count(JobState.RESTARTING)
            deaths += cluster.slot_deaths
            takeovers += cluster.jobmanager_deaths
            checks += cluster.orphan_checks
    print(
        f"{count} runs in {time.monotonic() - started:.1f} s: {restarts} restarts, {deaths} deaths of "
        f"slots, {takeovers} of JobManagers, {checks} looks at a store at rest; failed: {failed}"
    )
    return len(failed)


if __name__ == "__main__":
    _first, _count, _backend = [*sys.argv[1:], *("0", "1", "hashmap")[len(sys.argv) - 1 :]]
    sys.exit(min(1, main(int(_first), int(_count), _backend)))
