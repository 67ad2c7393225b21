"""One simulated run of a job with checkpoints: everything about it is drawn from its seed.

``python -m tests.support.simulated_run SEED COUNT BACKEND JOB STORY`` runs seeds one after the other and says how
to repeat those that fail. STORY draws what happened, whether or not they fail: 1 = without the middle of a long story,
more = so many moments at most.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from jobmanager.messages.job_state import JobState
from penstock.config import Configuration
from penstock.pb import graph_pb2
from tests.support.simulated_cluster import SimulatedCluster
from tests.support.simulated_directory import simulated_directory
from tests.support.simulated_faults import (
    Faults,
    draw_faults,
    draw_freezes,
    draw_region_failures,
    draw_savepoints,
)
from tests.support.simulated_jobs import JOBS, SimulatedJob
from tests.support.simulated_kept_jobs import KEPT_JOBS
from tests.support.simulated_loading_jobs import LOADING_JOBS
from tests.support.simulated_savepoints import SavepointDirectory
from tests.support.simulated_store import CALM
from tests.support.simulated_world import World
from tests.support.story_columns import draw

ALL_JOBS = (*JOBS, *KEPT_JOBS)
"""Of which seeds draw where they are told none."""
_WEATHER_NS = 60_000_000_000
"""For so long a store is bad: who tries again after growing pauses is not stuck, but needs some luck."""
_WEATHER_RESTARTS = 100
"""After so many it is good again: a job that restarts without a delay would have used up all of its own before."""

_MOMENTS_MAX = 400
_LAST_MOMENTS = 60
"""What is drawn of a failed run of which nobody has asked for the story."""


class KeptSavepoint:
    """A savepoint, with all that sinks have made safe."""

    def __init__(self, store: SavepointDirectory, world: World) -> None:
        self.store = store
        self.world = world.copy()


@dataclass(frozen=True, slots=True)
class Run:
    """What a seed stands for.

    Attributes:
        make: the same job at another parallelism.
        copies_savepoints: whether the store takes files of a checkpoint over into a savepoint by itself.
    """

    job: SimulatedJob
    world: World
    settings: dict[str, object]
    faults: Faults
    taskmanagers: int
    make: Callable[[int], SimulatedJob]
    copies_savepoints: bool

    @property
    def is_exactly_once(self) -> bool:
        """Whether each row must come out once."""
        return (
            self.settings["execution.checkpointing.mode"] == "exactly-once"
            or self.settings["execution.checkpointing.interval"] == "none"
        )


def draw_run(seed: int, backend: str, job: str = "") -> Run:
    """Draws a run.

    Args:
        job: name of the job, "" = drawn too.
        backend: of keyed state; "rocksdb" writes real files, at the pace of a real disk.
    """
    draws = random.Random(seed)
    world = World(f"seed {seed}")
    named = [made for made in (*ALL_JOBS, *LOADING_JOBS) if made.__name__ == job]
    assert named or not job, f"there is no job {job!r}"
    make = draws.choice(named or ALL_JOBS)
    remake = partial(
        make,
        f"seed {seed}",
        draws.choice((30, 150, 300)),
        draws.choice((None, None, 1000.0, 5000.0)),
    )
    made = remake(draws.choice((1, 2, 2, 3)))
    settings: dict[str, object] = {
        "execution.checkpointing.interval": draws.choice(("3ms", "20ms", "20ms", "100ms")),
        "execution.checkpointing.mode": draws.choice(
            ("exactly-once", "exactly-once", "exactly-once", "at-least-once")
        ),
        "execution.checkpointing.timeout": draws.choice(("10min", "2s", "40ms")),
        "execution.checkpointing.min-pause": draws.choice(("0ms", "10ms")),
        "execution.checkpointing.max-concurrent-checkpoints": draws.choice((1, 2, 3)),
        "execution.checkpointing.num-retained": draws.choice((1, 1, 3)),
        "execution.checkpointing.incremental": draws.choice((True, False)),
        "execution.checkpointing.tolerable-failed-checkpoints": draws.choice(
            ("infinite", "infinite", 3)
        ),
        "state.backend.type": backend,
        "state.storage.fs.memory-threshold": draws.choice((0, 200, 20_000)),
        "execution.batch-rows": draws.choice((3, 16, 64)),
        "execution.buffer-timeout.interval": draws.choice(("0ms", "5ms", "100ms")),
        "pipeline.auto-watermark-interval": draws.choice(("0ms", "10ms", "50ms")),
        "taskmanager.network.credit-per-channel": draws.choice((1024, 10_000, 2 << 20)),
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": 1000,
        "restart-strategy.fixed-delay.delay": draws.choice(("0ms", "20ms")),
        "jobmanager.execution.failover-strategy": draws.choice((*("region",) * 5, "full")),
        "taskmanager.memory.exchange-cache.size": draws.choice((400, 2_000, 20_000, 64 << 20)),
    }
    settings |= made.settings
    faults = draw_faults(draws)
    if faults.slot_store.hanging or faults.jobmanager_store.hanging:
        settings["execution.checkpointing.timeout"] = "2s"  # nobody waits for minutes here
    freezes = draw_freezes(random.Random(f"freezes of {seed}"))  # so that the rest stays as it was
    regions = draw_region_failures(random.Random(f"regions of {seed}"))
    asked = random.Random(f"savepoints of {seed}")
    savepoints = draw_savepoints(asked)
    triggers = (*faults.triggers, *freezes, *regions, *savepoints)
    faults = dataclasses.replace(faults, triggers=triggers)
    taskmanagers, copies = draws.choice((1, 2, 3)), asked.random() < 0.5
    return Run(made, world, settings, faults, taskmanagers, remake, copies)


def simulate(
    seed: int, backend: str = "hashmap", job: str = "", moments_max: int = 0
) -> SimulatedCluster:
    """Runs a seed and checks all there is to check."""
    return simulate_run(draw_run(seed, backend, job), seed, backend, job, moments_max)


def simulate_run(
    run: Run, seed: int, backend: str = "hashmap", job: str = "", moments_max: int = 0
) -> SimulatedCluster:
    """Runs what was drawn from a seed, or made of that.

    Args:
        moments_max: how much of its story a failure shows; 0 = the last moments.
    """
    with simulated_directory() as directory:
        checkpoints = {"execution.checkpointing.dir": f"{directory}/checkpoints"}
        config = Configuration.from_mapping(run.settings | checkpoints)
        cluster = SimulatedCluster(
            run.job.graph,
            seed,
            config,
            faults=run.faults,
            taskmanagers=run.taskmanagers,
            work_directory=Path(directory),
        )
        run.world.on_commit = cluster.committing
        run.world.on_processing = cluster.processing
        kept: list[KeptSavepoint] = []
        cluster.savepoints.copies = run.copies_savepoints

        def keep(store: SavepointDirectory) -> None:
            if cluster.savepoints.is_for_going_on(store.uri):
                kept.append(KeptSavepoint(store.copy(), run.world))

        cluster.savepoints.on_complete = keep
        cluster.loop.call_later(_WEATHER_NS, lambda: cluster.change_weather(CALM, CALM))

        def count_restarts() -> None:
            if cluster.failovers.restarts == _WEATHER_RESTARTS:
                cluster.change_weather(CALM, CALM)

        cluster.on_restart = count_restarts
        try:
            cluster.run()
            _check_end(run, cluster)
            _go_on(run, cluster, kept, seed, Path(directory))
        except BaseException as error:
            error.add_note(f"{run.job.name} of seed {seed}: {run.settings}; {run.faults}")
            shown = cluster.story if moments_max else cluster.story[-_LAST_MOMENTS:]
            error.add_note(draw(shown, moments_max=moments_max or None))
            error.add_note(f"again: make sim SEED={seed} BACKEND={backend} JOB={job} STORY=1")
            raise
    return cluster


def _check_end(run: Run, cluster: SimulatedCluster) -> None:
    expected = {JobState.FINISHED} | ({JobState.CANCELED} if cluster.is_cancelled else set())
    if cluster.has_noted_commit:
        expected |= {JobState.FAILED}  # a failure in the midst of the only commit ends the job
    if cluster.cause is not None and "is lost, and the rows that would come instead" in (
        cluster.cause.message
    ):
        expected |= {JobState.FAILED}  # half of a blocking partition is in the state
        faults = run.faults
        assert (
            cluster.taskmanager_losses
            or run.settings["jobmanager.execution.failover-strategy"] == "full"
            or faults.slot_store is not CALM
            or faults.jobmanager_store is not CALM
        ), "what is held can be read on"
    assert cluster.state in expected, f"it ended {cluster.state.name}: {cluster.cause}"
    assert not run.world.breaches, run.world.breaches[:5]
    has_finished = cluster.state is JobState.FINISHED
    cluster.savepoints.check_end(
        has_finished=has_finished,
        is_cancelled=cluster.is_cancelled,
        is_calm=_is_calm(run, cluster),
    )
    noticed = run.job.noticed_rows
    if noticed is not None and cluster.processed_at_restart > noticed:
        return
    stopped = cluster.savepoints.stopped
    if stopped and not cluster.savepoints.is_for_going_on(stopped):
        if run.is_exactly_once:
            run.job.check_drained(run.world.visible(), is_whole=has_finished)
        return
    run.job.check(
        run.world.visible(),
        is_exactly_once=run.is_exactly_once,
        has_finished=has_finished and not stopped,
    )


def _is_calm(run: Run, cluster: SimulatedCluster) -> bool:
    """Whether nobody was kept from cleaning up."""
    return (
        run.faults.slot_store is CALM
        and run.faults.jobmanager_store is CALM
        and not cluster.failovers.restarts
        and not cluster.jobmanager_deaths
        and not cluster.jobmanager_stops
        and not cluster.slot_deaths
        and not cluster.taskmanager_losses
    )


def _go_on(
    run: Run, cluster: SimulatedCluster, kept: list[KeptSavepoint], seed: int, directory: Path
) -> None:
    """Another job goes on from a savepoint, where there is one, and has to come to the oracle's rows."""
    if run.job.noticed_rows is not None:
        return
    draws = random.Random(f"goes on {seed}")
    begins, stopped = kept[:1], cluster.savepoints.stopped
    if cluster.savepoints.is_for_going_on(stopped) and cluster.state is JobState.FINISHED:
        begins.append(KeptSavepoint(cluster.savepoints.stores[stopped], run.world))
    cluster.resumed = len(begins)
    for number, begin in enumerate(begins):
        job = run.make(draws.choice((1, 2, 3)))
        graph = graph_pb2.JobGraph()
        graph.CopyFrom(job.graph)
        graph.config["execution.state-recovery.path"] = begin.store.uri
        graph.config["execution.state-recovery.in-doubt"] = "commit"
        work = directory / f"resumed-{number}"
        checkpoints = {"execution.checkpointing.dir": f"{work}/checkpoints"}
        resumed = SimulatedCluster(
            graph,
            seed,
            Configuration.from_mapping(run.settings | checkpoints),
            taskmanagers=run.taskmanagers,
            work_directory=work,
            job_id="0" * 31 + "2",
        )
        resumed.savepoints.directory = cluster.savepoints.directory
        resumed.savepoints.stores[begin.store.uri] = begin.store
        begin.world.begin()
        try:
            resumed.run()
            assert resumed.state is JobState.FINISHED, f"it ended {resumed.state.name}"
            job.check(begin.world.visible(), is_exactly_once=run.is_exactly_once, has_finished=True)
        except BaseException as error:
            error.add_note(
                f"going on from {begin.store.uri} at {job.graph.vertices[0].parallelism}"
            )
            error.add_note(draw(resumed.story, moments_max=400))
            raise


def main(first: int, count: int, backend: str, job: str, moments_max: int) -> int:
    """Runs seeds; returns how many have failed."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    failed: list[int] = []
    totals: collections.Counter[str] = collections.Counter()
    started = time.monotonic()
    for seed in range(first, first + count):
        try:
            cluster = simulate(seed, backend, job, moments_max)
        except KeyboardInterrupt:
            break
        except BaseException:
            failed.append(seed)
            traceback.print_exc()
        else:
            if moments_max:
                print(f"seed {seed}\n{draw(cluster.story, moments_max=moments_max)}\n")
            totals.update(
                {
                    "restarts": cluster.failovers.restarts,
                    "of them partial": cluster.failovers.spared,
                    "with a missing partition": cluster.failovers.backtracked,
                    "deaths of slots": cluster.slot_deaths,
                    "of JobManagers": cluster.jobmanager_deaths,
                    "planned stops of them": cluster.jobmanager_stops,
                    "failed store calls": cluster.audited.failures,
                    "hanging ones": cluster.audited.hangs,
                    "stages adopted": cluster.adopted,
                    "savepoints": sum(one.is_taken for one in cluster.savepoints.asked),
                    "of": len(cluster.savepoints.asked),
                    "stops": bool(cluster.savepoints.stopped),
                    "jobs that went on from one": cluster.resumed,
                    "inputs lost": cluster.state is JobState.FAILED,
                    "looks at a store at rest": cluster.orphan_checks,
                }
            )
    told = ", ".join(f"{total} {what}" for what, total in totals.items())
    print(f"{count} runs in {time.monotonic() - started:.1f} s: {told}; failed: {failed}")
    return len(failed)


if __name__ == "__main__":
    _given = [*sys.argv[1:], *("0", "1", "hashmap", "", "0")[len(sys.argv) - 1 :]]
    _moments_max = _MOMENTS_MAX if _given[4] == "1" else int(_given[4])
    sys.exit(min(1, main(int(_given[0]), int(_given[1]), _given[2], _given[3], _moments_max)))
