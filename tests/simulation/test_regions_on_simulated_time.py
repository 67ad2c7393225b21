"""Several regions of a job that fail at once, while groups of its subtasks are in any phase, on simulated time.

Aim: a failure restarts what the model of regions says, joins a restart or not and is due as the model of delays
says (``tests.support.simulated_failovers``, ``simulated_groups``); the output is that of a run without failures;
and whatever can happen to a group, in whatever phase, happens in one of these runs.
"""

import dataclasses
import functools
import random

import pytest

from jobmanager.job.groups import GROUP_TRANSITIONS, GroupEvent, GroupPhase
from jobmanager.messages.job_state import JobState
from tests.simulation.test_takeovers_on_simulated_time import taken_over
from tests.support.simulated_cluster import SimulatedCluster
from tests.support.simulated_faults import Fault, Faults, Trigger
from tests.support.simulated_groups import group_point
from tests.support.simulated_kept_jobs import blocking_stages, caching_twice, chains, pipelines
from tests.support.simulated_run import draw_run, simulate_run
from tests.support.simulated_store import StoreWeather

SEEDS = (2, 4, 7, 8, 18, 26, 41, 5109)
"""So few in which a group meets whatever it can: after a change of what is drawn, others may be needed."""
ENDINGS = [phase for phase in GroupPhase if phase is not GroupPhase.LOCATING]
WEATHER = StoreWeather(failures=0.02, hanging=0.03, hanging_max_ms=100)
"""So that checkpoints, and what goes on from them, take some time."""
FAILURES = (Fault.REGIONS_FAIL, Fault.REGIONS_FAIL, Fault.SLOT_DIES, Fault.TASK_RAISES)
SETTINGS = {
    "jobmanager.execution.failover-strategy": "region",
    "execution.checkpointing.mode": "exactly-once",
    "execution.checkpointing.interval": "20ms",
    "execution.checkpointing.timeout": "2s",
    "execution.checkpointing.tolerable-failed-checkpoints": "infinite",
}


def in_phase(fault: Fault, phase: GroupPhase, count: int, pause_ns: int = 0) -> Trigger:
    """A fault once so many groups have come to a phase."""
    return Trigger(fault, group_point(phase), count, pause_ns)


def drawn_triggers(draws: random.Random) -> list[Trigger]:
    """Failures in phases, and two TaskManagers lost where groups wait for slots: some will wait longer."""
    triggers = [Trigger(Fault.REGIONS_FAIL, "checkpoint_completed", 1, 0)]
    for phase in draws.choices(ENDINGS, k=8):
        fault = draws.choice((*FAILURES, Fault.ALL_FAIL))
        pause_ns = draws.choice((0, draws.randrange(1_000_000)))
        triggers.append(in_phase(fault, phase, draws.randint(2, 6), pause_ns))
    for count in draws.sample(range(2, 8), 2):
        for _ in range(2):
            pause_ns = draws.randrange(2_000_000)
            triggers.append(in_phase(Fault.TASKMANAGER_LOST, GroupPhase.SLOTS, count, pause_ns))
    return triggers


@functools.cache
def regions_failed(seed: int) -> SimulatedCluster:
    """Three regions or more, on three TaskManagers."""
    draws = random.Random(f"regions {seed}")
    made = draws.choice((chains, pipelines, caching_twice))(f"seed {seed}", 200, 1000.0, 3)
    drawn = draw_run(seed, "hashmap", made.name)
    delay = {"restart-strategy.fixed-delay.delay": draws.choice(("0ms", "5ms", "20ms"))}
    run = dataclasses.replace(
        drawn,
        job=made,
        settings=drawn.settings | SETTINGS | delay | made.settings,
        faults=Faults(tuple(drawn_triggers(draws)), slot_store=WEATHER, jobmanager_store=WEATHER),
        taskmanagers=3,
    )
    return simulate_run(run, seed)


@functools.cache
def cancelled_in(phase: GroupPhase) -> SimulatedCluster:
    """The job is cancelled while a group is in a phase: the first seed in which it is in it still."""
    for seed in range(1, 20):
        cluster = cancelled_by_seed(phase, seed)
        if cluster.groups.met[phase, GroupEvent.ENDED]:  # it may have gone on before that
            return cluster
    raise AssertionError(f"no group comes to {phase}")


def cancelled_by_seed(phase: GroupPhase, seed: int) -> SimulatedCluster:
    make, point, rows = pipelines, phase, 150
    fails = [Trigger(Fault.REGIONS_FAIL, "row", 40, 0)]
    delay = "0ms" if phase is GroupPhase.LATE else "20ms"
    if phase is GroupPhase.INPUTS:  # what reads the first stage waits while that runs
        make, point, rows, fails = blocking_stages, GroupPhase.RUNNING, 30, []
    elif phase is GroupPhase.SLOTS:
        fails = [Trigger(Fault.TASKMANAGER_LOST, "row", 40, n * 1_000_000) for n in range(3)]
    drawn = draw_run(seed, "hashmap", make.__name__)
    cancelled = in_phase(Fault.CANCELLED, point, 2 if phase is GroupPhase.SLOTS else 1)
    run = dataclasses.replace(
        drawn,
        job=make(f"seed {seed}", rows, 1000.0, 3),
        settings=drawn.settings | SETTINGS | {"restart-strategy.fixed-delay.delay": delay},
        faults=Faults((*fails, cancelled)),
        taskmanagers=3,
    )
    return simulate_run(run, seed)


@functools.cache
def found_by_a_successor(fault: Fault) -> SimulatedCluster:
    """Half of a blocking partition is in the state of the job that a JobManager begins again, since all its processes
    have ended; something comes while it asks who has that partition."""
    return only_rows_left(in_phase(fault, GroupPhase.LOCATING, 1))


@functools.cache
def only_rows_left(*others: Trigger) -> SimulatedCluster:
    """A JobManager dies behind a checkpoint of the second stage, and each process of the job before the next leads."""
    point = ("checkpoint_completed", 3)
    deaths = [Trigger(Fault.SLOT_DIES, *point, 1_000)] * 6
    triggers = (Trigger(Fault.JOBMANAGER_DIES, *point, 0), *deaths, *others)
    run = draw_run(24, "hashmap", "blocking_stages")
    return simulate_run(dataclasses.replace(run, faults=Faults(triggers)), 24)


@pytest.mark.parametrize("seed", SEEDS)
def test_regions_that_fail_while_others_are_on_their_way_recover_beside_them(seed):
    cluster = regions_failed(seed)
    assert cluster.state is JobState.FINISHED
    assert cluster.failovers.spared, "what has not failed runs on"


@pytest.mark.parametrize("phase", ENDINGS)
def test_a_job_can_be_cancelled_in_every_phase(phase):
    cluster = cancelled_in(phase)
    assert cluster.state is JobState.CANCELED


def test_what_is_left_of_a_stage_is_read_on_where_nothing_runs_any_more():
    cluster = only_rows_left()
    assert cluster.state is JobState.FINISHED
    assert cluster.adopted == 2, "both subtasks of the first stage"
    assert cluster.failovers.takeovers == 0


def test_what_comes_while_a_successor_asks_what_was_done_is_not_lost():
    failed = found_by_a_successor(Fault.ALL_FAIL)
    assert failed.groups.met[GroupPhase.LOCATING, GroupEvent.FAILED]
    assert failed.state is JobState.FINISHED
    assert failed.adopted, "it asks again"
    cancelled = found_by_a_successor(Fault.CANCELLED)
    assert cancelled.groups.met[GroupPhase.LOCATING, GroupEvent.ENDED]
    assert cancelled.state is JobState.CANCELED


def test_whatever_can_happen_to_a_group_in_every_phase_happens_here():
    clusters = [regions_failed(seed) for seed in SEEDS]
    clusters += [cancelled_in(phase) for phase in ENDINGS]
    clusters += [found_by_a_successor(fault) for fault in (Fault.ALL_FAIL, Fault.CANCELLED)]
    clusters.append(taken_over(4001))
    met = set().union(*(cluster.groups.met for cluster in clusters))
    assert met == set(GROUP_TRANSITIONS)
    beside = set().union(*(cluster.groups.beside for cluster in clusters))
    assert beside == set(ENDINGS), "something else fails while a group is in each phase"
