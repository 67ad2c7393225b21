"""Aim: what user code has started ends with its slot, however far it has gone and however the slot ends.

Method: functions that start programs in sessions of their own and daemons, without an environment to tell
them by; slots, daemons and the forkserver that end in every way; each program is waited for by pidfd.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

import penstock as ps
from tests.support.processes import (
    DEADLINE_S,
    Beacon,
    DaemonCluster,
    Site,
    is_alive,
    tell,
    wait_ended,
)

pytestmark = [pytest.mark.integration, pytest.mark.sampled(5)]

MakeEnvironment = Callable[..., ps.Environment]
OUT = {"a": pa.int64()}
NO_RESTARTS = {"restart-strategy.type": "none"}


def start_programs() -> list[int]:
    """A program in a session of its own, a daemon that was forked twice, and a child of such a one."""
    bare = {"PATH": os.environ["PATH"]}
    own_session = subprocess.Popen(["sleep", "1000"], start_new_session=True, env=bare)
    script = "setsid sh -c 'sleep 1000 >/dev/null 2>&1 & sleep 1001 >/dev/null 2>&1 & echo $! $$; exec sleep 1002 >&2' &"
    daemons = subprocess.run(
        ["sh", "-c", script], stdout=subprocess.PIPE, text=True, check=True, env=bare
    )
    return [own_session.pid, *map(int, daemons.stdout.split())]


def start_job(env: ps.Environment, path: Path, then: Callable[[], object]) -> ps.JobHandle:
    """A job whose function starts programs and goes on with ``then``."""
    target = str(path)

    def start(row: Any) -> Any:
        if row.a == 0:
            tell(target, " ".join(map(str, [os.getpid(), *start_programs()])))
            then()
        return {"a": row.a}

    env.from_rows([{"a": 0}, {"a": 1}]).map(start, schema=OUT).discard()
    return env.submit("starts-programs")


def hang() -> None:
    threading.Event().wait()


def told(beacon: Beacon) -> tuple[int, list[int]]:
    """The slot, and what was started there."""
    slot, *programs = map(int, beacon.wait().split())
    assert len(programs) == 3
    return slot, programs


def wait_all_ended(pids: list[int]) -> None:
    for pid in pids:
        wait_ended(pid)


def test_the_end_of_a_job_ends_what_has_left_its_session(
    environment: MakeEnvironment, beacon: Beacon
) -> None:
    handle = start_job(environment(), Path(beacon.path), int)
    _, programs = told(beacon)
    handle.wait(DEADLINE_S)
    wait_all_ended(programs)


@pytest.mark.parametrize("crash", [os.abort, lambda: os._exit(3)], ids=["abort", "exit"])
def test_a_slot_that_crashes_leaves_nothing(
    environment: MakeEnvironment, beacon: Beacon, crash: Callable[[], object]
) -> None:
    handle = start_job(environment(config=NO_RESTARTS), Path(beacon.path), crash)
    _, programs = told(beacon)
    with pytest.raises(ps.JobFailed):
        handle.wait(DEADLINE_S)
    wait_all_ended(programs)


def test_a_slot_that_is_killed_leaves_nothing_and_takes_nothing_from_others(
    environment: MakeEnvironment, beacon: Beacon, tmp_path: Path
) -> None:
    other_beacon = Beacon(tmp_path / "other-beacon")
    env = environment(config={**NO_RESTARTS, "task.cancellation.timeout": "300ms"})
    # Three slots, so that two of them share a TaskManager.
    jobs = [start_job(env, Path(other_beacon.path), hang) for _ in range(2)]
    others = [told(other_beacon) for _ in jobs]
    other_beacon.close()
    victim = start_job(env, Path(beacon.path), hang)
    slot, programs = told(beacon)
    os.kill(slot, signal.SIGKILL)
    with pytest.raises(ps.JobFailed):
        victim.wait(DEADLINE_S)
    wait_all_ended(programs)
    for other_slot, other_programs in others:
        assert all(map(is_alive, [other_slot, *other_programs]))
    for job in jobs:
        job.cancel()
        with pytest.raises(ps.JobCanceled):
            job.wait(DEADLINE_S)
    for _, other_programs in others:
        wait_all_ended(other_programs)


@pytest.mark.parametrize("end", ["cluster stop", "taskmanager", "forkserver", "all daemons"])
def test_the_end_of_daemons_leaves_nothing(own_site: Site, beacon: Beacon, end: str) -> None:
    cluster = DaemonCluster(own_site)
    cluster.start(taskmanagers=1, slots=1)
    with ps.Environment(cluster.jobmanager, config=NO_RESTARTS) as env:
        start_job(env, Path(beacon.path), hang)
        slot, programs = told(beacon)
        forkserver = psutil.Process(slot).ppid()
        taskmanager = cluster.pid("taskmanager")
        match end:
            case "cluster stop":
                cluster.stop()
                # The command returns when all has ended.
                assert not any(map(is_alive, programs))
            case "taskmanager":
                os.kill(taskmanager, signal.SIGKILL)
            case "forkserver":
                os.kill(forkserver, signal.SIGKILL)
            case _:
                for daemon in cluster.daemons():
                    os.kill(daemon["pid"], signal.SIGKILL)
        wait_all_ended([slot, *programs])
    cluster.stop()
    own_site.assert_nothing_left()
