"""Aim: what dies is noticed at once, and what only pauses is not taken for dead.

Method: signals to real daemons and slots while an endless job runs that is told not to restart; when the
JobManager noticed is read from its log. The job takes checkpoints all the time, so that calls to a daemon
that pauses are always under way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from common.clock import SystemClock
from penstock.errors import StreamError
from tests.support.examples import RUNS_ALL
from tests.support.processes import (
    DEADLINE_S,
    Beacon,
    DaemonCluster,
    is_alive,
    logged_at,
    own_cluster,
    tell,
    wait_ended,
)

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

NOTICED_S = 0.5
"""What an operator is promised; a quiet machine needs a tenth of it, and one with much other work may need more: how long it
took is looked at where all tests run, and elsewhere only that it was noticed by the connection's end. The better one of two
counts: a wait for anything else would delay both."""
TIMEOUT_S = 6.0
PAUSE_S = 3.5
"""Longer than any ping is waited for, shorter than the heartbeat timeout."""
CONFIG = {"restart-strategy.type": "none", "execution.checkpointing.interval": "100ms"}

Submit = Callable[[], ps.JobHandle]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonCluster]:
    """Two TaskManagers with one slot each; nothing may be left of them."""
    with own_cluster(
        tmp_path_factory.mktemp("detection"),
        taskmanagers=2,
        slots=1,
        heartbeat_interval="200ms",
        heartbeat_timeout=f"{TIMEOUT_S:g}s",
    ) as cluster:
        yield cluster


@pytest.fixture
def submit(cluster: DaemonCluster, tmp_path: Path) -> Iterator[Submit]:
    """Submits the endless job, a subtask on each TaskManager; returns when both work."""
    handles: list[ps.JobHandle] = []
    with contextlib.ExitStack() as stack:

        def run() -> ps.JobHandle:
            env = stack.enter_context(
                ps.Environment(cluster.jobmanager, parallelism=2, config=CONFIG)
            )
            beacon = Beacon(tmp_path / f"beacon-{len(handles)}")
            stack.callback(beacon.close)
            path = beacon.path

            def make(start: int, count: int) -> pa.RecordBatch:
                return pa.record_batch({"a": pa.array(range(start, start + count), pa.int64())})

            class Tell(ps.MapFunction):
                told = False

                def __call__(self, row: Any) -> Any:
                    if not self.told:
                        self.told = True
                        tell(path, os.getpid())
                    return {"a": row.a}

            rows = env.generate(make, rate=2000, schema=pa.schema([("a", pa.int64())]))
            rows.rebalance().map(Tell(), schema={"a": pa.int64()}).discard()
            handle = env.submit("endless")
            handles.append(handle)
            beacon.wait()
            beacon.wait()
            return handle

        yield run
        for handle in handles:
            with contextlib.suppress(StreamError):
                handle.cancel()
                handle.wait(DEADLINE_S)


def failure_of(handle: ps.JobHandle) -> ps.JobFailed:
    with pytest.raises(ps.JobFailed) as raised:
        handle.wait(DEADLINE_S)
    return raised.value


def now_s() -> float:
    """The wall clock, as logs tell it."""
    return SystemClock().now_ms() / 1000


def kill(pid: int) -> float:
    """Kills a process and waits for its end; when it was killed."""
    at = now_s()
    os.kill(pid, signal.SIGKILL)
    wait_ended(pid)
    return at


def pause(pid: int, seconds: float) -> None:
    """Pauses a process for a time."""
    os.kill(pid, signal.SIGSTOP)
    try:
        threading.Event().wait(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


def await_checkpoint(handle: ps.JobHandle) -> None:
    """Waits until one more checkpoint is complete."""

    class Taken(Exception):  # noqa: N818 - not an error
        pass

    before = handle.details().last_checkpoint_id

    def look(details: Any) -> None:
        if details.last_checkpoint_id > before:
            raise Taken

    with contextlib.suppress(Taken):
        handle.wait(DEADLINE_S, on_progress=look)


def test_a_taskmanager_that_is_killed_is_noticed_at_once(cluster: DaemonCluster) -> None:
    took_s = []
    for victim in cluster.daemons("taskmanager"):
        since = kill(victim["pid"])
        lost = cluster.wait_for_log(
            "jobmanager", "taskmanager.lost", since=since, taskmanager_id=victim["id"]
        )
        assert lost["loss"] == "connection-refused"
        took_s.append(logged_at(lost) - since)
    assert min(took_s) < NOTICED_S or not RUNS_ALL, took_s


def test_a_slot_that_is_killed_is_noticed_at_once(cluster: DaemonCluster, submit: Submit) -> None:
    took_s = []
    for _ in range(2):
        handle = submit()
        (slot,) = cluster.slot_pids(cluster.pid("taskmanager"))
        since = kill(slot)
        failing = cluster.wait_for_log(
            "jobmanager", "job.state_changed", since=since, job_id=handle.job_id, state="FAILING"
        )
        assert "SIGKILL" in str(failure_of(handle))
        took_s.append(logged_at(failing) - since)
    assert min(took_s) < NOTICED_S or not RUNS_ALL, took_s


def test_a_pause_that_is_shorter_than_the_timeout_loses_nothing(
    cluster: DaemonCluster, submit: Submit
) -> None:
    handle = submit()
    await_checkpoint(handle)
    paused = cluster.daemons("taskmanager")[0]
    slots = cluster.slot_pids(paused["pid"])
    pause(paused["pid"], PAUSE_S)
    await_checkpoint(handle)
    assert handle.status() == "RUNNING"
    assert cluster.slot_pids(paused["pid"]) == slots


def test_a_pause_that_is_longer_than_the_timeout_ends_what_ran(
    cluster: DaemonCluster, submit: Submit
) -> None:
    handle = submit()
    paused = cluster.daemons("taskmanager")[0]
    (slot,) = cluster.slot_pids(paused["pid"])
    since = now_s()
    os.kill(paused["pid"], signal.SIGSTOP)
    try:
        lost = cluster.wait_for_log(
            "jobmanager", "taskmanager.lost", since=since, taskmanager_id=paused["id"]
        )
        assert lost["loss"] == "heartbeat-timeout"
        assert failure_of(handle).cause == "TaskManagerLost"
        assert is_alive(slot), "its slot works on, for nobody"
    finally:
        os.kill(paused["pid"], signal.SIGCONT)
    # It learns that nobody counts on it, ends its slot and comes as a new incarnation.
    wait_ended(slot)
    gone = cluster.wait_for_log("taskmanager", "jobmanager.lost", since=since)
    assert "does not know" in gone["reason"] or "not registered" in gone["reason"]
    cluster.wait_for_log("jobmanager", "taskmanager.registered", since=logged_at(gone))
    again = submit()
    await_checkpoint(again)


def test_a_taskmanager_that_is_killed_while_it_is_paused_is_noticed_at_once(
    cluster: DaemonCluster,
) -> None:
    victim = cluster.daemons("taskmanager")[0]
    os.kill(victim["pid"], signal.SIGSTOP)
    since = kill(victim["pid"])
    lost = cluster.wait_for_log(
        "jobmanager", "taskmanager.lost", since=since, taskmanager_id=victim["id"]
    )
    assert lost["loss"] == "connection-refused", "and not when heartbeats are missed"


def test_a_taskmanager_says_goodbye(cluster: DaemonCluster, submit: Submit) -> None:
    submit()
    told = cluster.daemons("taskmanager")[0]
    slots = cluster.slot_pids(told["pid"])
    since = now_s()
    os.kill(told["pid"], signal.SIGTERM)
    lost = cluster.wait_for_log(
        "jobmanager", "taskmanager.lost", since=since, taskmanager_id=told["id"]
    )
    assert lost["loss"] == "goodbye"
    wait_ended(told["pid"])
    for pid in slots:
        wait_ended(pid)


def test_a_taskmanager_ends_although_nobody_hears_its_goodbye(
    cluster: DaemonCluster, submit: Submit
) -> None:
    submit()
    told = cluster.daemons("taskmanager")[0]
    slots = cluster.slot_pids(told["pid"])
    jobmanager = cluster.pid("jobmanager")
    os.kill(jobmanager, signal.SIGSTOP)
    try:
        os.kill(told["pid"], signal.SIGTERM)
        wait_ended(told["pid"])
        for pid in slots:
            wait_ended(pid)
    finally:
        os.kill(jobmanager, signal.SIGCONT)
