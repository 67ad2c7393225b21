"""Aim: a leader that dies is replaced at once, and what 200 subtasks do is neither begun again nor held up; their metrics
are read fast.

Method: a real ZooKeeper, two JobManagers and five TaskManagers as processes; a job of 20 vertices in 10 slots, whose
sink notes when it gets rows. ZooKeeper's session is so long that a standby has to find the leader's port refused. A
leader whose port is not refused, as that of a machine that is gone, is one that is stopped: its node in the election
goes with its session, which is short then.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pyarrow as pa
import pytest
from kazoo.client import KazooClient

import penstock as ps
from benchmarks.output_log import NotingSink, largest_pause_ns, read_notes
from penstock.client.client import Client
from penstock.local.local_cluster import LocalCluster
from penstock.pb import client_pb2
from tests.support.elected_cluster import await_roles, token_of
from tests.support.jobs import DEADLINE_S
from tests.support.processes import Deadline, wait_ended
from tests.support.zookeeper import ensemble, quorum

pytestmark = [pytest.mark.large, pytest.mark.timeout(600)]

VERTICES, PARALLELISM, ROWS, RATE = 20, 10, 1_000_000, 2_000
SCHEDULED_S, LEADS_S, ADOPTED_S = 5.0, 2.0, 2.0
LEADS_BEHIND_SESSION_S, SESSION_S = 3.0, 6.0
WATCHED_S = 5.0
SCRAPE_S, SCRAPES = 0.05, 20


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with elected(tmp_path, session="30s") as (cluster, _):
        yield cluster


@contextmanager
def elected(tmp_path: Path, session: str) -> Iterator[tuple[LocalCluster, str]]:
    """A cluster, and where its ZooKeeper is."""
    with ensemble(tmp_path / "zookeeper") as servers:
        cluster = LocalCluster(tmp_path / "cluster")
        cluster.configure(
            {
                "high-availability.type": "zookeeper",
                "high-availability.zookeeper.quorum": quorum(servers),
                "high-availability.zookeeper.client.session-timeout": session,
                "jobmanager.rpc.port": 0,
                "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
                "execution.checkpointing.interval": "1s",
            }
        )
        try:
            cluster.start(jobmanagers=2, taskmanagers=5, slots=2)
            yield cluster, quorum(servers)
        finally:
            cluster.stop()


def numbers(start: int, count: int) -> pa.RecordBatch:
    keys = pa.array(range(start, start + count), pa.int64())
    return pa.record_batch({"key": keys, "rows": pa.array([1] * count, pa.int32())})


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def submitted(env: ps.Environment, notes: Path) -> ps.JobHandle:
    NotingSink.prepare(notes, ROWS)
    schema = {"key": "int64", "rows": "int32"}
    stream = env.generate(numbers, rate=RATE, rows=ROWS, schema=schema).uid("numbers")
    for number in range(VERTICES - 2):
        stream = stream.map_batches(same, schema=schema).uid(f"step-{number}")
    stream.sink(NotingSink(str(notes), ROWS)).uid("notes")
    return env.submit("200 subtasks")


def seconds_until(what: str, is_so: Callable[[], bool]) -> float:
    began, deadline = time.monotonic(), Deadline(what, DEADLINE_S)
    while not is_so():
        deadline.left()
        time.sleep(0.01)
    return time.monotonic() - began


def runs(client: Client, job_id: str) -> bool:
    details = client.job(job_id)
    states = [one.state for vertex in details.vertices for one in vertex.subtasks]
    return (
        details.summary.state == client_pb2.JOB_STATE_RUNNING
        and states == [client_pb2.ATTEMPT_STATE_RUNNING] * VERTICES * PARALLELISM
    )


def largest_gap_s(notes: Path, start_ns: int) -> float:
    gaps = [
        largest_pause_ns(own, start_ns, start_ns + int(WATCHED_S * 1e9))
        for own in read_notes(notes).values()
    ]
    return max(gaps) / 1e9


def scrape_s(address: str) -> float:
    """The median of several."""
    taken = []
    for _ in range(SCRAPES):
        began = time.monotonic()
        with urlopen(f"http://{address}/metrics", timeout=DEADLINE_S) as page:
            assert b"penstock_subtask_" in page.read()
        taken.append(time.monotonic() - began)
    return statistics.median(taken)


@pytest.mark.parametrize("exchange", ["pipelined", "caching"])
@pytest.mark.parametrize("told", [signal.SIGKILL, signal.SIGTERM])
def test_two_hundred_subtasks(
    cluster: LocalCluster, tmp_path: Path, told: signal.Signals, exchange: str
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    config: dict[str, Any] = {
        "pipeline.operator-chaining.enabled": "false",
        "execution.exchange.default": exchange,
    }
    with ps.Environment(cluster.address, parallelism=PARALLELISM, config=config) as env:
        began = time.monotonic()
        handle = submitted(env, notes)
        accepted = time.monotonic()
        with cluster.client() as client:
            scheduled_s = seconds_until("all run", lambda: runs(client, handle.job_id))
        before_ns = time.monotonic_ns()
        seconds_until(
            "so long without a takeover", lambda: time.monotonic_ns() - before_ns > WATCHED_S * 1e9
        )
        leader, standby = await_roles(cluster)
        scraped = (leader, *(one for one in cluster.daemons() if one.role == "taskmanager"))
        scrapes_s = [scrape_s(daemon.metrics_address) for daemon in scraped]
        killed_ns = time.monotonic_ns()
        os.kill(leader.pid, told)
        wait_ended(leader.pid)
        ended_s = (time.monotonic_ns() - killed_ns) / 1e9
        with Client(standby.address, token_of(cluster)) as client:
            client.cluster()
            leads_s = (time.monotonic_ns() - killed_ns) / 1e9
            adopted_s = seconds_until("all is adopted", lambda: runs(client, handle.job_id))
            seconds_until("its rows", lambda: time.monotonic_ns() - killed_ns > WATCHED_S * 1e9)
            assert client.job(handle.job_id).summary.restarts == 0
            client.cancel(handle.job_id)
        pauses_s, gap_s = largest_gap_s(notes, before_ns), largest_gap_s(notes, killed_ns)
        print(
            f"\n{told.name}, {exchange}: submitted in {accepted - began:.2f} s, scheduled in {scheduled_s:.2f} s; "
            f"ended in {ended_s:.2f} s, next leader answers after {leads_s:.2f} s, all adopted {adopted_s:.2f} s later; "
            f"largest gap {gap_s:.2f} s, {pauses_s:.2f} s without a takeover; a scrape of the JobManager takes "
            f"{1000 * scrapes_s[0]:.0f} ms, of a TaskManager {1000 * max(scrapes_s[1:]):.0f} ms"
        )
    assert scheduled_s < SCHEDULED_S
    assert leads_s < LEADS_S
    assert adopted_s < ADOPTED_S
    assert max(scrapes_s) < SCRAPE_S


def test_a_leader_that_only_its_session_gives_away(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    config: dict[str, Any] = {"pipeline.operator-chaining.enabled": "false"}
    with (
        elected(tmp_path, session=f"{SESSION_S:g}s") as (cluster, addresses),
        ps.Environment(cluster.address, parallelism=PARALLELISM, config=config) as env,
    ):
        handle = submitted(env, notes)
        with cluster.client() as client:
            seconds_until("all run", lambda: runs(client, handle.job_id))
        leader, standby = await_roles(cluster)
        zookeeper = KazooClient(addresses)
        zookeeper.start()
        try:
            election = "/penstock/default/election"
            first = min(zookeeper.get_children(election), key=lambda name: name.rpartition("-")[2])
            os.kill(leader.pid, signal.SIGSTOP)
            stopped_ns = time.monotonic_ns()
            seconds_until(
                "its session's end", lambda: zookeeper.exists(f"{election}/{first}") is None
            )
        finally:
            zookeeper.stop()
            zookeeper.close()
        session_ns = time.monotonic_ns()
        with Client(standby.address, token_of(cluster)) as client:
            client.cluster()
            leads_s = (time.monotonic_ns() - session_ns) / 1e9
            adopted_s = seconds_until("all is adopted", lambda: runs(client, handle.job_id))
            seconds_until("its rows", lambda: time.monotonic_ns() - stopped_ns > WATCHED_S * 1e9)
            assert client.job(handle.job_id).summary.restarts == 0
            client.cancel(handle.job_id)
        os.kill(leader.pid, signal.SIGCONT)
        print(
            f"\nSIGSTOP: its session is over after {(session_ns - stopped_ns) / 1e9:.2f} s, next leader answers "
            f"{leads_s:.2f} s later, all adopted {adopted_s:.2f} s later; "
            f"largest gap {largest_gap_s(notes, stopped_ns):.2f} s"
        )
    assert leads_s < LEADS_BEHIND_SESSION_S
    assert adopted_s < ADOPTED_S
