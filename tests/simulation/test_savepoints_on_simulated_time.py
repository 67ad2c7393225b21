"""Savepoints and stops at any moment, beside failures or alone, in one process on simulated time, over many seeds.

Aim: a savepoint is never in HEAD, nothing subsumes it, it aborts no checkpoint, and what it covers becomes visible once;
a stop that fails goes on; one that completes ends the job exactly there. Method: the directory of each savepoint is
looked through after every change, and so is HEAD; another job that goes on from it, at any parallelism, beside what was
visible and prepared when it was complete, has to come to the rows of the oracle. Jobs run slowly enough to be asked
something, and every third has no failures at all.
"""

import dataclasses
import functools
import random
from functools import partial

import pytest

from jobmanager.checkpoint.saved_checkpoints_store import SavedCheckpoints
from jobmanager.checkpoint.savepoint_store_runner import SavepointStoreRunner
from penstock.pb import checkpoint_pb2
from tests.support.simulated_cluster import SimulatedCluster
from tests.support.simulated_faults import OFTEN, SAVEPOINTS, Faults, Trigger
from tests.support.simulated_jobs import JOBS
from tests.support.simulated_kept_jobs import (
    caching,
    caching_twice,
    caching_windows,
    chains,
    pipelines,
    two_sinks,
)
from tests.support.simulated_run import draw_run, simulate_run

SEEDS, SEEDS_PER_TEST = range(8000, 8018), 2
_ABLE = (*JOBS, caching, caching_twice, caching_windows, chains, pipelines, two_sinks)
_ROWS, _RATE, _PAUSE_MAX_NS = 150, 1_000.0, 30_000_000


def wish(draws: random.Random) -> Trigger:
    """What a user asks for, and when."""
    point, often = draws.choice(OFTEN)
    pause_ns = draws.randrange(_PAUSE_MAX_NS)
    return Trigger(draws.choice(SAVEPOINTS), point, 1 + draws.randrange(often), pause_ns)


@functools.cache
def asked(seed: int) -> SimulatedCluster:
    """A run in which users ask for savepoints, and in every third nothing else happens."""
    draws = random.Random(f"asked {seed}")
    make = draws.choice(_ABLE)
    run = draw_run(seed, "hashmap", make.__name__)
    remade = partial(make, f"seed {seed}", _ROWS, _RATE)
    wishes = tuple(wish(draws) for _ in range(draws.choice((1, 2, 3))))
    faults = dataclasses.replace(run.faults, triggers=(*run.faults.triggers, *wishes))
    settings = run.settings
    if is_alone := seed % 3 == 0:
        faults = Faults(triggers=wishes)
        settings = settings | {"execution.checkpointing.timeout": "10min"}
    job = remade(draws.choice((1, 2, 3)))
    cluster = simulate_run(
        dataclasses.replace(run, make=remade, job=job, faults=faults, settings=settings), seed
    )
    if is_alone:
        # Checkpoints end so without savepoints, too; no savepoint does.
        assert cluster.aborted.keys() <= {"TASK_FINISHED", "SUBSUMED"}, f"{seed}: {cluster.aborted}"
    return cluster


@pytest.mark.parametrize("first", SEEDS[::SEEDS_PER_TEST])
def test_a_savepoint_is_whole_and_a_stop_ends_there_or_goes_on(first):
    for seed in range(first, first + SEEDS_PER_TEST):
        asked(seed)


def test_the_seeds_cover_what_they_are_for():
    clusters = [asked(seed) for seed in SEEDS]
    assert sum(cluster.resumed for cluster in clusters) >= 8
    assert sum(bool(cluster.savepoints.stopped) for cluster in clusters) >= 4
    wishes = [one for cluster in clusters for one in cluster.savepoints.asked]
    assert {one.wish for one in wishes if one.is_taken} == {one.wish for one in wishes}
    assert any(one.error for one in wishes)
    assert any(of_checkpoint(cluster) for cluster in clusters)


def of_checkpoint(cluster: SimulatedCluster) -> bool:
    """Whether a savepoint that was taken is made of a checkpoint."""
    made = cluster.savepoints
    return any(one.is_taken and made.is_of_checkpoint(one.path) for one in made.asked)


def test_a_savepoint_that_is_there_before_head_names_its_checkpoint_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def early(
        saved_checkpoints: SavedCheckpoints, saved: checkpoint_pb2.CheckpointManifest
    ) -> None:
        saved_checkpoints._open(saved.properties.target).complete(saved)
        saved_checkpoints._under_way = saved

    seed = next(s for s in SEEDS if of_checkpoint(asked(s)))
    monkeypatch.setattr(SavedCheckpoints, "bring", early)
    with pytest.raises(AssertionError, match="HEAD does not name"):
        asked.__wrapped__(seed)


def test_a_savepoint_of_which_nobody_says_that_it_is_committed_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed = next(s for s in SEEDS if any(one.is_taken for one in asked(s).savepoints.asked))
    monkeypatch.setattr(SavepointStoreRunner, "mark_committed", lambda _: None)
    with pytest.raises(AssertionError, match="nobody says"):
        asked.__wrapped__(seed)
