"""A long job on a store that fails, hangs, lies about outcomes and comes back, on simulated time.

Store, JobManager and the user's job go through it together: every few seconds the store treats everybody
otherwise, now and then something dies or is stopped, and the rows that become visible are those of a run
without any of it, each once. ``python -m tests.support.simulated_chain SEED MINUTES``.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from pathlib import Path

import structlog

from jobmanager.messages.job_state import JobState
from penstock.config import Configuration
from tests.support.simulated_cluster import SimulatedCluster
from tests.support.simulated_directory import simulated_directory
from tests.support.simulated_faults import Fault, Faults
from tests.support.simulated_jobs import keyed_process
from tests.support.simulated_store import CALM, StoreWeather
from tests.support.simulated_world import World
from tests.support.story_columns import draw

_ROWS_PER_SECOND = 5
_NS_PER_S = 1_000_000_000
_WEATHERS = (
    CALM,
    CALM,
    StoreWeather(failures=0.1),
    StoreWeather(failures=0.4),
    StoreWeather(failures=1.0),
    StoreWeather(lost_answers=0.4),
    StoreWeather(failures=0.2, lost_answers=0.2),
    StoreWeather(hanging=0.2, hanging_max_ms=20_000),
    StoreWeather(failures=0.1, lost_answers=0.1, hanging=0.1, hanging_max_ms=5_000),
)
_FAULTS = (
    Fault.SLOT_DIES,
    Fault.TASKMANAGER_LOST,
    Fault.TASKMANAGER_STOPS,
    Fault.JOBMANAGER_DIES,
    Fault.JOBMANAGER_STOPS,
    Fault.JOBMANAGER_DIES_IN_STORE,
    Fault.CALL_FAILS,
    Fault.TASK_RAISES,
    Fault.CHECKPOINT_REQUESTED,
)


def simulate_minutes(seed: int, minutes: float) -> SimulatedCluster:
    """Runs a job through so many bad minutes, then to its end, and checks what it brought."""
    draws = random.Random(f"chain {seed}")
    world = World(f"chain {seed}")
    rows = int(minutes * 60 * _ROWS_PER_SECOND)
    job = keyed_process(f"chain {seed}", rows, float(_ROWS_PER_SECOND), 2)
    with simulated_directory() as directory:
        config = {
            "execution.checkpointing.dir": f"{directory}/checkpoints",
            "execution.checkpointing.interval": draws.choice(("500ms", "2s")),
            "execution.checkpointing.timeout": "5s",
            "execution.checkpointing.tolerable-failed-checkpoints": "infinite",
            "state.storage.fs.memory-threshold": 0,
            "restart-strategy.type": "fixed-delay",
            "restart-strategy.fixed-delay.attempts": 1_000_000,
            "restart-strategy.fixed-delay.delay": "100ms",
        }
        cluster = SimulatedCluster(
            job.graph,
            seed,
            Configuration.from_mapping(config),
            faults=Faults(),
            taskmanagers=2,
            work_directory=Path(directory),
            time_max_ms=3 * int(minutes * 60_000) + 1_200_000,
        )
        world.on_commit = cluster.committing
        world.on_processing = cluster.processing

        def has_passed() -> bool:
            return cluster.is_over or cluster.loop.now_ms() >= minutes * 60_000

        def change() -> None:
            if has_passed():
                cluster.change_weather(CALM, CALM)
            else:
                cluster.change_weather(draws.choice(_WEATHERS), draws.choice(_WEATHERS))
                cluster.loop.call_later(draws.randrange(1, 20) * _NS_PER_S, change)

        def strike() -> None:
            if not has_passed():
                cluster.strike(draws.choice(_FAULTS))
                cluster.loop.call_later(draws.randrange(5, 60) * _NS_PER_S, strike)

        cluster.loop.call_later(_NS_PER_S, change)
        cluster.loop.call_later(2 * _NS_PER_S, strike)
        try:
            cluster.run()
            assert cluster.state is JobState.FINISHED, f"it ended {cluster.state}: {cluster.cause}"
            job.check(world.visible(), is_exactly_once=True, has_finished=True)
        except BaseException as error:
            error.add_note(draw(cluster.story[-80:]))
            error.add_note(f"again: make sim-chain SEED={seed} MINUTES={minutes:g}")
            raise
    return cluster


def main(seed: int, minutes: float) -> None:
    """Runs one seed."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    started = time.monotonic()
    cluster = simulate_minutes(seed, minutes)
    print(
        f"{cluster.loop.now_ms() / 60_000:.1f} simulated minutes in "
        f"{time.monotonic() - started:.0f} s: {cluster.checkpoints_stored} checkpoints, "
        f"{cluster.failovers.restarts} restarts, {cluster.jobmanager_deaths} deaths and "
        f"{cluster.jobmanager_stops} stops of JobManagers, {cluster.audited.failures} store calls failed, "
        f"{cluster.audited.hangs} hung"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
