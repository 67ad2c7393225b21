"""The simulation fails where it should: shells that are wrong on purpose.

Aim: a check of the simulation that cannot fail is none. Method: one thing of a real shell is made wrong at a time;
and what a whole run shows too seldom (an order, a timer) is looked at by itself, on the same simulated time.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from jobmanager.checkpoint.checkpoint_deletions_runner import CheckpointDeletionsRunner
from jobmanager.job.job_master_runner import JobMasterRunner
from jobmanager.job.lanes_runner import LanesRunner
from jobmanager.messages import job_events
from jobmanager.messages.job_state import JobState
from jobmanager.results.results_store import ResultsStore
from penstock.config import Configuration
from penstock.errors import StreamError
from tests.support.in_memory_network import SimulatedLoop
from tests.support.simulated_cluster import SimulatedCluster
from tests.support.simulated_directory import simulated_directory
from tests.support.simulated_event_loop import SimulatedEventLoop
from tests.support.simulated_jobs import events
from tests.support.simulated_run import simulate


def no_answer(*_: object, **__: object) -> None:
    """Does nothing."""


def notices(seeds: range, job: str = "") -> bool:
    """Whether any of the seeds fails, however it shows."""
    for seed in seeds:
        try:
            simulate(seed, job=job)
        except (Exception, BaseExceptionGroup):
            return True
    return False


def test_a_discard_that_deletes_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckpointDeletionsRunner, "discard", no_answer)
    assert notices(range(1), "keyed_process")


def test_calls_to_one_taskmanager_are_made_one_after_the_other() -> None:
    clock, loop = simulated_loop()
    made: list[str] = []
    lanes = LanesRunner("the job")

    async def call(name: str, takes_s: float) -> None:
        await asyncio.sleep(takes_s)
        made.append(name)

    async def calls() -> None:
        async with asyncio.TaskGroup() as tasks:
            lanes.tasks = tasks
            for name, takes_s in (("first", 3.0), ("second", 2.0), ("third", 1.0)):
                lanes.run("tm", partial(call, name, takes_s))
            lanes.run("other", partial(call, "beside", 0.5))

    loop.create_task(calls())
    clock.run()
    assert made == ["beside", "first", "second", "third"]
    with pytest.raises(StreamError, match="the job ends here"):
        lanes.run("tm", partial(call, "late", 1.0))


def simulated_loop() -> tuple[SimulatedLoop, SimulatedEventLoop]:
    clock = SimulatedLoop()
    host: Any = SimpleNamespace(loop=clock, broke=lambda error: None)
    return clock, SimulatedEventLoop(host, lambda *_: None, lambda: None)


def collected(seed: int = 1) -> tuple[SimulatedCluster, dict[str, int]]:
    """A job whose rows are collected, and how many of them had come when it ended."""
    env = ps.Environment(parallelism=2)
    env.generate(events, rows=300, rate=1000.0, schema=events(0, 1).schema).collect()
    config = {"execution.checkpointing.interval": "20ms", "execution.batch-rows": 5}
    with simulated_directory() as directory:
        config["execution.checkpointing.dir"] = f"{directory}/checkpoints"
        cluster = SimulatedCluster(
            env.plan("collected").graph,
            seed,
            Configuration.from_mapping(config),
            work_directory=Path(directory),
        )
        come: dict[str, int] = {}
        publish = cluster.publish

        def note(state: JobState) -> None:
            come[state.name] = sum(b.num_rows for bs in cluster.rows.values() for b in bs)
            publish(state)

        cluster.publish = note  # type: ignore[method-assign]
        cluster.run()
    return cluster, come


def test_rows_are_handed_out_as_checkpoints_cover_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, come = collected()
    assert sum(b.num_rows for bs in cluster.rows.values() for b in bs) == 300
    assert come["FINISHED"] > 100
    monkeypatch.setattr(ResultsStore, "commit", no_answer)
    assert collected()[1]["FINISHED"] == 0  # what the line before notices


def test_the_overdue_timer_is_replaced() -> None:
    """A second cancellation begins anew: nobody is given up on for the time of the first."""
    clock, loop = simulated_loop()
    posted: list[tuple[int, job_events.JobEvent]] = []
    runner: Any = SimpleNamespace(
        _job=SimpleNamespace(config=SimpleNamespace(task_cancellation_timeout_ms=1_000)),
        _overdue_timers={},
        post=lambda event: posted.append((clock.now_ms(), event)),
    )

    async def cancel_twice() -> None:
        JobMasterRunner._start_overdue_timer(runner, 3)
        await asyncio.sleep(5)
        JobMasterRunner._start_overdue_timer(runner, 3)

    loop.create_task(cancel_twice())
    clock.run()
    assert posted == [(11_000, job_events.CancellationOverdue(3))]
