"""Aim: a daemon that is killed, paused or told to end takes nothing down with it but its slots.

The jobs here are told not to restart, so that what they are told can be seen; how jobs go on is in
``test_failures_restarts.py``.

Method: signals to real daemons while a job runs; what must end is waited for by pidfd, what the
client is told is compared, and then every process, socket and directory of the cluster is looked for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import psutil
import pyarrow as pa
import pytest

import penstock as ps
from penstock.client.client import Client
from penstock.errors import StreamError
from penstock.pb import client_pb2
from tests.support.processes import (
    DEADLINE_S,
    Beacon,
    DaemonCluster,
    is_alive,
    site,
    tell,
    wait_ended,
)

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

NO_RESTARTS = {"restart-strategy.type": "none"}
NO_CHECKPOINTS = {"execution.checkpointing.interval": "none"}
"""Such a job has no restart strategy either, and ends with its JobManager."""


class Submit(Protocol):
    """Submits an endless job with a subtask on each TaskManager and waits until both work."""

    def __call__(self, config: Mapping[str, object] = NO_RESTARTS) -> ps.JobHandle: ...


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonCluster]:
    """Two TaskManagers with one slot each, quick to notice; nothing may be left of them."""
    with site(tmp_path_factory.mktemp("daemons")) as place:
        cluster = DaemonCluster(place)
        cluster.start(
            taskmanagers=2,
            slots=1,
            heartbeat_interval="200ms",
            heartbeat_timeout="3s",
            taskmanager_jobmanager__grace="1s",
        )
        yield cluster
        daemons = {(daemon["role"], daemon["pid"]) for daemon in cluster.daemons()}
        stopped = cluster.stop().json
        assert stopped.keys() == {"stopped", "jobs"}
        assert {(one["role"], one["pid"]) for one in stopped["stopped"]} == daemons
        cluster.assert_nothing_left()
        place.assert_nothing_left()


@pytest.fixture
def cluster(shared: DaemonCluster) -> DaemonCluster:
    """The cluster, with what the last test has ended started again."""
    if len([daemon for daemon in shared.daemons() if is_alive(daemon["pid"])]) < 3:
        shared.start(taskmanagers=2)
    return shared


@pytest.fixture
def submit(cluster: DaemonCluster, tmp_path: Path) -> Iterator[Submit]:
    """Jobs; those that still run at the end of the test are cancelled."""
    environments = []
    handles: list[ps.JobHandle] = []

    def run(config: Mapping[str, object] = NO_RESTARTS) -> ps.JobHandle:
        env = ps.Environment(cluster.jobmanager, parallelism=2, config=config)
        environments.append(env)
        beacon = Beacon(tmp_path / f"beacon-{len(environments)}")
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
        beacon.close()
        return handle

    yield run
    for handle in handles:
        # What a failed test leaves running must not take the next one's slots.
        with contextlib.suppress(StreamError):
            handle.cancel()
    for env in environments:
        env.close()


def slots_of(cluster: DaemonCluster) -> list[int]:
    return [
        pid for daemon in cluster.daemons("taskmanager") for pid in cluster.slot_pids(daemon["pid"])
    ]


def forkservers_of(cluster: DaemonCluster) -> list[int]:
    return [
        process.pid
        for process in cluster.site.processes()
        if "taskmanager.processes.forkserver" in process.command
        and process.parent_pid in [daemon["pid"] for daemon in cluster.daemons("taskmanager")]
    ]


def failure_of(handle: ps.JobHandle) -> ps.JobFailed:
    with pytest.raises(ps.JobFailed) as raised:
        handle.wait(DEADLINE_S)
    return raised.value


def reason_of_restart(handle: ps.JobHandle) -> client_pb2.FailureCause:
    """Why the job begins again, as soon as it does."""

    class Restarts(Exception):  # noqa: N818 - not an error
        pass

    def look(details: client_pb2.JobDetails) -> None:
        if details.summary.restarts:
            raise Restarts

    with pytest.raises(Restarts):
        handle.wait(DEADLINE_S, on_progress=look)
    return handle.details().failure


def test_a_taskmanager_that_is_killed_fails_the_job_and_is_replaced(
    cluster: DaemonCluster, submit: Submit
) -> None:
    handle = submit()
    victim = cluster.daemons("taskmanager")[0]
    slots = cluster.slot_pids(victim["pid"])
    assert len(slots) == 1
    others = [pid for pid in slots_of(cluster) if pid not in slots]
    os.kill(victim["pid"], signal.SIGKILL)
    for pid in slots:
        wait_ended(pid)
    error = failure_of(handle)
    assert error.cause == "TaskManagerLost"
    assert victim["id"] in str(error)
    for pid in others:
        wait_ended(pid)

    status = cluster.site.penstock("cluster", "status", "--json", "--dir", str(cluster.directory))
    alive = {daemon["id"]: daemon["alive"] for daemon in status.json["daemons"]}
    assert alive == {"1": True, "tm-1": False, "tm-2": True}
    before = {daemon["id"]: daemon["pid"] for daemon in cluster.daemons()}
    cluster.start(taskmanagers=2)
    after = {daemon["id"]: daemon["pid"] for daemon in cluster.daemons()}
    assert after.keys() == before.keys()
    assert {id for id in before if before[id] != after[id]} == {victim["id"]}
    # The new one has registered when the command returns, and nobody counts on the old one.
    with Client(cluster.jobmanager) as client:
        found = {(tm.taskmanager_id, tm.pid) for tm in client.cluster().taskmanagers}
    assert found == {(id, pid) for id, pid in after.items() if id.startswith("tm")}
    handle = submit()
    handle.cancel()
    with pytest.raises(ps.JobCanceled):
        handle.wait(DEADLINE_S)


def test_a_taskmanager_that_is_paused_is_given_up_and_comes_back(
    cluster: DaemonCluster, submit: Submit
) -> None:
    handle = submit()
    paused = cluster.daemons("taskmanager")[0]
    slots = slots_of(cluster)
    os.kill(paused["pid"], signal.SIGSTOP)
    try:
        error = failure_of(handle)
        assert error.cause == "TaskManagerLost"
        assert paused["id"] in str(error)
        assert "heartbeat" in str(error)
    finally:
        os.kill(paused["pid"], signal.SIGCONT)
    # It learns that nobody counts on it, ends what it ran and registers again.
    for pid in slots:
        wait_ended(pid)
    cluster.wait_for_log("taskmanager", "jobmanager.lost")
    handle = submit()
    handle.cancel()
    with pytest.raises(ps.JobCanceled):
        handle.wait(DEADLINE_S)


def test_a_jobmanager_that_is_paused_for_too_long_is_found_again(
    cluster: DaemonCluster, submit: Submit
) -> None:
    handle = submit()
    slots = slots_of(cluster)
    pid = cluster.pid("jobmanager")
    os.kill(pid, signal.SIGSTOP)
    try:
        # Nobody answers for longer than heartbeat.timeout and the grace: what runs, runs for nobody.
        for slot in slots:
            wait_ended(slot)
    finally:
        os.kill(pid, signal.SIGCONT)
    error = failure_of(handle)
    assert error.cause == "TaskManagerLost"
    handle = submit()
    handle.cancel()
    with pytest.raises(ps.JobCanceled):
        handle.wait(DEADLINE_S)


def test_a_taskmanager_ends_although_a_function_blocks(
    cluster: DaemonCluster, tmp_path: Path
) -> None:
    beacon = Beacon(tmp_path / "beacon")
    path = beacon.path

    def block(row: Any) -> Any:
        subprocess.Popen(["sleep", "1000"])
        tell(path, os.getpid())
        threading.Event().wait()

    config = {**NO_RESTARTS, "task.cancellation.timeout": "1s"}
    with ps.Environment(cluster.jobmanager, config=config) as env:
        env.from_rows([{"a": 1}]).map(block, schema={"a": pa.int64()}).discard()
        handle = env.submit("blocks")
        slot = int(beacon.wait())
        beacon.close()
        pid = psutil.Process(psutil.Process(slot).ppid()).ppid()
        (child,) = [process.pid for process in psutil.Process(slot).children()]
        os.kill(pid, signal.SIGTERM)
        wait_ended(pid)
        wait_ended(slot)
        wait_ended(child)
        assert reason_of_restart(handle).error_class == "TaskManagerLost"
        handle.cancel()
        with pytest.raises(ps.JobCanceled):
            handle.wait(DEADLINE_S)


def test_the_jobmanager_that_is_killed_takes_jobs_without_checkpoints_with_it_and_comes_back(
    cluster: DaemonCluster, submit: Submit
) -> None:
    handle = submit(NO_CHECKPOINTS)
    slots = slots_of(cluster)
    assert len(slots) == 2
    taskmanagers = [daemon["pid"] for daemon in cluster.daemons("taskmanager")]
    os.kill(cluster.pid("jobmanager"), signal.SIGKILL)
    with pytest.raises(ps.JobManagerUnreachable, match="cluster status"):
        handle.wait(DEADLINE_S)
    ended = cluster.site.penstock("list", "--jobmanager", cluster.jobmanager)
    assert ended.status == 3
    # Nobody wants the slots any more: the TaskManagers end them and wait for a JobManager.
    for pid in slots:
        wait_ended(pid)
    address = cluster.jobmanager
    cluster.start(taskmanagers=2)
    assert cluster.jobmanager == address
    assert [daemon["pid"] for daemon in cluster.daemons("taskmanager")] == taskmanagers
    info = cluster.site.penstock("info", handle.job_id, "--json", "--jobmanager", address)
    assert info.json["state"] == "FAILED"
    assert "submit it again" in info.json["failure"]["message"]
    submit().cancel()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_taskmanager_that_is_told_to_end(
    cluster: DaemonCluster, submit: Submit, number: signal.Signals
) -> None:
    handle = submit()
    told = cluster.daemons("taskmanager")[1]
    slots = cluster.slot_pids(told["pid"])
    os.kill(told["pid"], number)
    wait_ended(told["pid"])
    for pid in slots:
        wait_ended(pid)
    # Which is no failure: the job waits for another one.
    failure = reason_of_restart(handle)
    assert failure.error_class == "TaskManagerLost"
    assert "was told to end" in failure.message
    assert told["id"] in failure.message
    assert told["id"] not in [daemon["id"] for daemon in cluster.daemons()]
    assert not (cluster.directory / f"taskmanager-{told['id']}").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_jobmanager_that_is_told_to_end_ends_jobs_without_checkpoints(
    cluster: DaemonCluster, submit: Submit, number: signal.Signals
) -> None:
    handle = submit(NO_CHECKPOINTS)
    slots = slots_of(cluster)
    failures: list[StreamError] = []

    def wait() -> None:
        try:
            handle.wait(DEADLINE_S)
        except StreamError as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    pid = cluster.pid("jobmanager")
    os.kill(pid, number)
    wait_ended(pid)
    for slot in slots:
        wait_ended(slot)
    waiting.join(DEADLINE_S)
    (error,) = failures
    assert isinstance(error, ps.JobFailed)
    assert "JobManager stopped" in str(error)
    assert cluster.daemons("jobmanager") == []


def test_a_forkserver_that_is_killed_is_replaced(cluster: DaemonCluster, submit: Submit) -> None:
    handle = submit()
    slots = slots_of(cluster)
    for pid in forkservers_of(cluster):
        os.kill(pid, signal.SIGKILL)
    for pid in slots:
        wait_ended(pid)
    error = failure_of(handle)
    assert "the forkserver" in str(error)
    assert "SIGKILL" in str(error)
    handle = submit()
    handle.cancel()
    with pytest.raises(ps.JobCanceled):
        handle.wait(DEADLINE_S)


def test_a_cluster_whose_daemons_are_all_killed_leaves_no_process_and_starts_again(
    cluster: DaemonCluster, submit: Submit
) -> None:
    submit(NO_CHECKPOINTS)
    for daemon in cluster.daemons():
        os.kill(daemon["pid"], signal.SIGKILL)
    cluster.site.wait_for_no_process()
    cluster.stop()
    cluster.assert_nothing_left()
    cluster.site.assert_nothing_left()
    cluster.start(taskmanagers=2)
    handle = submit()
    handle.cancel()
    with pytest.raises(ps.JobCanceled):
        handle.wait(DEADLINE_S)
