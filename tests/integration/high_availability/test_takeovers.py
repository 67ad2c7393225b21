"""Aim: whoever of several JobManagers dies, is paused or is cut off, one leads, jobs go on, and what they write is there once.

Method: a real ZooKeeper, two JobManagers and two TaskManagers as processes; numbers in order are counted through keyed
state into files while leaders are killed, paused beyond their session, and told to end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

import penstock as ps
from penstock.client.client import Client
from penstock.errors import RowsComeAgain, StoreNotFound, Unauthenticated
from penstock.local.local_cluster import Daemon, LocalCluster
from penstock.pb import client_pb2
from tests.support.elected_cluster import (
    RATE,
    SESSION_S,
    await_roles,
    await_written,
    epoch_of,
    numbers,
    slots_of,
    stop,
    submitted,
    token_of,
    written,
)
from tests.support.jobs import DEADLINE_S, await_details
from tests.support.processes import Deadline, wait_ended
from tests.support.zookeeper import ZookeeperServer

pytestmark = [pytest.mark.integration, pytest.mark.sampled(2)]


def samples(daemon: Daemon) -> dict[str, float]:
    """What a JobManager says of itself; a metric by state under the name of the state that holds."""
    with urlopen(f"http://{daemon.metrics_address}/metrics", timeout=5) as page:
        text = page.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("penstock_jobmanager_"):
                chosen = ",".join(map(str, sample.labels.values()))
                found[f"{sample.name.removeprefix('penstock_jobmanager_')} {chosen}".strip()] = (
                    sample.value
                )
    return found


def test_the_leader_is_killed_again_and_again_and_every_row_is_there_once(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with ps.Environment(cluster.address, parallelism=2) as env:
        handle = submitted(env, out)
        await_written(out, RATE)
        epochs = []
        for _ in range(2):
            leader, _ = await_roles(cluster)
            before = written(out)
            os.kill(leader.pid, signal.SIGKILL)
            wait_ended(leader.pid)
            epochs.append(epoch_of(cluster))
            cluster.start(jobmanagers=2, taskmanagers=2)
            await_written(out, before + 1)
        stop(handle, tmp_path)  # the same handle, over all leaders
        assert sorted(set(epochs)) == epochs, "each leader has a higher epoch"
        assert written(out) > RATE


def test_tasks_go_on_while_nobody_leads_and_are_no_others_afterwards(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with ps.Environment(cluster.address, parallelism=2) as env:
        handle = submitted(env, out)
        await_written(out, RATE)
        before = slots_of(cluster, handle.job_id)
        for told in (signal.SIGKILL, signal.SIGTERM):
            leader, _ = await_roles(cluster)
            os.kill(leader.pid, told)
            wait_ended(leader.pid)
            await_written(out, written(out) + RATE)
            await_details(handle, lambda _, state: state == "RUNNING")
            with cluster.client() as client:
                assert client.job(handle.job_id).summary.restarts == 0
            assert slots_of(cluster, handle.job_id) == before != {}
            cluster.start(jobmanagers=2, taskmanagers=2)
        stop(handle, tmp_path)
        with cluster.client() as client:
            assert client.job(handle.job_id).summary.restarts == 0
        written(out)


def test_a_job_without_checkpoints_goes_on_as_well(cluster: LocalCluster, tmp_path: Path) -> None:
    out, config = tmp_path / "out", {"execution.checkpointing.interval": "none"}
    config["restart-strategy.type"] = "none"
    with ps.Environment(cluster.address, parallelism=2, config=config) as env:
        handle = submitted(env, out, rows=2 * RATE)
        await_details(handle, lambda _, state: state == "RUNNING")
        leader, _ = await_roles(cluster)
        os.kill(leader.pid, signal.SIGKILL)
        wait_ended(leader.pid)
        handle.wait(DEADLINE_S)
        assert written(out) == 2 * RATE
        with cluster.client() as client:
            assert client.job(handle.job_id).summary.restarts == 0


def test_collected_rows_that_are_lost_with_their_leader_are_an_error_and_never_missing(
    cluster: LocalCluster,
) -> None:
    """Checkpoints have covered some of them, which do not come again; of the last job, all."""
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(cluster.client())
        handles, collected = [], []
        for count in (4 * RATE, 4 * RATE, RATE // 2):
            env = stack.enter_context(ps.Environment(cluster.address, parallelism=1))
            stream = env.generate(numbers, rate=RATE, rows=count, schema={"n": "int64"})
            collected.append(stream.collect())
            handles.append(env.submit("collected"))
        loop = iter(collected[0])
        assert [next(loop)["n"] for _ in range(10)] == list(range(10))
        deadline = Deadline("checkpoints of two jobs, and the end of one", DEADLINE_S)
        while handles[2].status() != "FINISHED" or not all(
            any(one.status == "COMPLETED" for one in handle.checkpoints()) for handle in handles[:2]
        ):
            deadline.left()
            time.sleep(0.02)
        leader, _ = await_roles(cluster)
        epoch = epoch_of(cluster)
        os.kill(leader.pid, signal.SIGKILL)
        wait_ended(leader.pid)
        assert client.cluster().leader_epoch > epoch
        with pytest.raises(RowsComeAgain, match="a JobManager that has ended"):
            list(loop)
        for rows in collected[1:]:
            with pytest.raises(StoreNotFound, match="held by a JobManager that has ended"):
                rows.to_arrow()


def test_a_standby_answers_with_the_address_of_the_leader(cluster: LocalCluster) -> None:
    leader, standby = await_roles(cluster)
    with pytest.raises(
        ps.JobManagerUnreachable, match=f"is a standby: {leader.address} leads"
    ) as told:
        raise _refusal_of(standby, cluster)
    assert told.value.leader == leader.address  # type: ignore[attr-defined]
    # Who knows only the standby finds the leader.
    with Client(standby.address, token_of(cluster)) as client:
        deadline = Deadline("both TaskManagers come to who leads now", DEADLINE_S)
        while len(client.cluster().taskmanagers) < 2:
            deadline.left()
            time.sleep(0.05)
    with pytest.raises(Unauthenticated), Client(standby.address, "x" * 20) as client:
        client.jobs()


def test_metrics_tell_who_leads(cluster: LocalCluster) -> None:
    leader, standby = map(samples, await_roles(cluster))
    assert (leader["leading"], standby["leading"]) == (1, 0)
    assert leader["leader_epoch"] == standby["leader_epoch"] == epoch_of(cluster)
    for one in (leader, standby):
        assert one["zookeeper_state connected"] == 1
        assert one["zookeeper_state suspended"] == 0
        assert one["uptime_seconds"] > 0
        assert one["leader_changes_total"] >= 0
    assert leader["swaps_total LEADER,ok"] == 1
    assert leader["heartbeat_age_seconds"] < DEADLINE_S


def _refusal_of(standby: Daemon, cluster: LocalCluster) -> Exception:
    import grpc

    from penstock.client.credentials import token_metadata
    from penstock.client.grpc_errors import error_from_rpc
    from penstock.pb import client_pb2_grpc

    with grpc.insecure_channel(standby.address) as channel:
        stub = client_pb2_grpc.JobManagerStub(channel)
        try:
            stub.ListJobs(
                client_pb2.ListJobsRequest(), timeout=10, metadata=token_metadata(token_of(cluster))
            )
        except grpc.RpcError as error:
            return error_from_rpc(error)
    raise AssertionError("it answered")


@contextmanager
def loyal_taskmanager(cluster: LocalCluster, jobmanager: Daemon) -> Iterator[None]:
    """One more, with the address of this JobManager alone."""
    own = ["-D", "taskmanager.id=loyal", "--jobmanager", jobmanager.address]
    command = [sys.executable, "-P", "-m", "taskmanager", "--dir", str(cluster.directory), *own]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            deadline = Deadline("its registration", DEADLINE_S)
            with cluster.client() as client:
                while len(client.cluster().taskmanagers) < 3:
                    deadline.left()
                    time.sleep(0.05)
            yield
        finally:
            process.terminate()


def test_a_leader_that_was_paused_beyond_its_session_ends_and_touches_nothing(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """A TaskManager that knows of nobody else hears from the one that leads then."""
    out = tmp_path / "out"
    paused, standby = await_roles(cluster)
    with (
        loyal_taskmanager(cluster, paused),
        ps.Environment(cluster.address, parallelism=5) as env,
    ):
        handle = submitted(env, out)
        await_written(out, RATE)
        assert any(slot.startswith("loyal") for slot in slots_of(cluster, handle.job_id))
        epoch = epoch_of(cluster)
        os.kill(paused.pid, signal.SIGSTOP)
        try:
            with Client(standby.address, token_of(cluster)) as client:
                assert client.cluster().leader_epoch == epoch + 1
                await_written(out, written(out) + RATE)
                assert client.job(handle.job_id).summary.restarts == 0
        finally:
            os.kill(paused.pid, signal.SIGCONT)
        # It executes itself anew, and stands by for the one that leads now.
        leader, again = await_roles(cluster)
        assert (leader.address, again.pid) == (standby.address, paused.pid)
        log = (cluster.directory / "logs" / f"jobmanager-{paused.id}.log").read_text()
        assert "leadership.over" in log
        stop(handle, tmp_path)
        assert written(out) > 2 * RATE


def test_a_leader_that_is_told_to_end_hands_over_first(cluster: LocalCluster) -> None:
    leader, standby = await_roles(cluster)
    epoch = epoch_of(cluster)
    os.kill(leader.pid, signal.SIGTERM)
    wait_ended(leader.pid)
    with Client(standby.address, token_of(cluster)) as client:
        assert client.cluster().leader_epoch == epoch + 1


def test_no_outage_of_zookeeper_restarts_a_job(
    cluster: LocalCluster, zookeeper: list[ZookeeperServer], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with ps.Environment(cluster.address, parallelism=2) as env:
        handle = submitted(env, out)
        await_written(out, RATE)
        await_roles(cluster)
        epoch = epoch_of(cluster)
        [server] = zookeeper
        server.kill()
        await_written(out, written(out) + int(1.5 * SESSION_S * RATE))
        assert epoch_of(cluster) == epoch, "who leads goes on while nobody answers"
        server.start()
        server.await_serving()
        # The session may end before the leader is back at a server that has just started.
        await_written(out, written(out) + RATE)
        await_roles(cluster)
        with cluster.client() as client:
            assert client.job(handle.job_id).summary.restarts == 0
        handle.cancel()


def test_what_zookeeper_has_forgotten_is_found_in_the_storage(
    cluster: LocalCluster, zookeeper: list[ZookeeperServer], tmp_path: Path
) -> None:
    """Servers without their data refuse for ever those whom servers have told of newer transactions."""
    out = tmp_path / "out"
    with ps.Environment(cluster.address, parallelism=2) as env, cluster.client() as client:
        ended = submitted(env, tmp_path / "ended", rows=RATE)
        ended.wait(DEADLINE_S)
        handle = submitted(env, out)
        await_details(handle, lambda metrics, _: metrics["totals"]["records_in"] > RATE)
        epoch = epoch_of(cluster)
        [server] = zookeeper
        server.kill()
        server.empty()
        server.start()
        deadline = Deadline("another leader", DEADLINE_S)
        while epoch_of(cluster) == epoch:
            deadline.left()
            time.sleep(0.05)
        await_roles(cluster)
        await_written(out, written(out) + RATE)
        states = {job.job_id: client_pb2.JobState.Name(job.state) for job in client.jobs()}
        assert states[ended.job_id] == "JOB_STATE_FINISHED"
        assert client.job(handle.job_id).summary.restarts == 0
        handle.cancel()
