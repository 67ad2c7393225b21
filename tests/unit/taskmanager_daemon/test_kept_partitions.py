"""Aim: what finished attempts leave on disk is served, told, released and promoted, and never forgotten.

Method: real daemons; complete partitions are put where slots put them.
"""

# ruff: noqa: ASYNC240 - small files do not hold these tests up

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from common.elements import EndOfData
from common.pb import internal_pb2
from penstock.errors import JobRejected, StoreNotFound, StreamError
from penstock.partition_id import PartitionId
from penstock.pb import graph_pb2
from taskmanager.daemon.held_partitions import partition_id_of
from taskmanager.processes.fork_protocol import PARTITION_SERVER_NAME
from tests.support.exchange_slots import ThreadedSlot, drain, input_edge, rows_of, run_until
from tests.support.sealed_partitions import partition_message, seal_rows, write_rows

ONE, TWO = PartitionId("e0", "v0", 0, 0), PartitionId("e0", "v0", 1, 0)
DEADLINE_S = 90.0
MIB = 1 << 20


def spill_of(directory: Path) -> Path:
    return directory / "taskmanager-tm" / "spill"


async def until(condition: Callable[[], object]) -> None:
    """For what no message tells."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - the kernel and the disk do not call back
            await asyncio.sleep(0.01)


def held(c: Any) -> set[tuple[str, PartitionId, str]]:
    """What the last heartbeat named."""
    return {
        (one.job_id, partition_id_of(one.partition), one.promoted_as)
        for beat in c.jobmanager.heartbeats[-1:]
        for one in beat.holdings.partitions
    }


async def release(c: Any, job: str, *partitions: PartitionId) -> None:
    request = internal_pb2.ReleasePartitionsRequest(
        leader_epoch=c.jobmanager.epoch,
        job_id=job,
        partitions=[partition_message(one) for one in partitions],
    )
    await c.call("ReleasePartitions", request)


async def promote(c: Any, job: str, name: str, *partitions: PartitionId) -> None:
    request = internal_pb2.PromotePartitionsRequest(
        leader_epoch=c.jobmanager.epoch,
        partitions=[partition_message(one) for one in partitions],
        set=internal_pb2.PromotedSet(name=name, job_id=job, schema=b"columns", partition_count=2),
    )
    answer = await c.call("PromotePartitions", request)
    told = [one for one in answer.holdings.partitions if one.promoted_as == name]
    assert {partition_id_of(one.partition) for one in told} >= {*partitions}


async def deploy_writer(c: Any, job: str = "job") -> None:
    """A task that hangs and has the output e0."""
    attempt = internal_pb2.AttemptId(job_id=job, vertex="v0", subtask_index=0, attempt=0)
    task = internal_pb2.TaskDeployment(
        attempt=attempt,
        slot_id="s0",
        leader_epoch=c.jobmanager.epoch,
        vertex=graph_pb2.Vertex(id="v0", name="rest"),
        outputs=[internal_pb2.OutputEdge(edge=graph_pb2.Edge(id="e0"), subpartition_count=1)],
    )
    request = internal_pb2.DeployTasksRequest(leader_epoch=c.jobmanager.epoch, tasks=[task])
    await c.call("DeployTasks", request)


def test_they_are_told_and_released_one_by_one(tmp_path: Path, cluster: Any, go: Any) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            await c.allocate()
            spill = spill_of(tmp_path)
            paths = [seal_rows(spill, "job", partition, 5) for partition in (ONE, TWO)]
            other = seal_rows(spill, "other", ONE, 1)
            await c.jobmanager.until(lambda: len(held(c)) == 3)
            beat = c.jobmanager.heartbeats[-1]
            assert beat.holdings.count == 3
            assert beat.holdings.size_bytes == sum(
                path.stat().st_size for path in spill.rglob("*.arrow")
            )
            assert {one.rows for one in beat.holdings.partitions} == {5, 1}

            await release(c, "job", ONE)
            assert [path.exists() for path in (*paths, other)] == [False, True, True]
            await release(c, "job", ONE)  # harmless
            # That slots are freed releases nothing: the next stage reads it.
            await c.free()
            await c.jobmanager.until(lambda: held(c) == {("job", TWO, ""), ("other", ONE, "")})
            await release(c, "job")
            assert [path.exists() for path in (*paths, other)] == [False, False, True]
            await c.jobmanager.until(lambda: held(c) == {("other", ONE, "")})
            log = (tmp_path / "logs" / "jobs" / "job" / "slot-s0.log").read_text()
            assert "released job ['e0']" in log
            with pytest.raises(JobRejected, match="not usable"):
                await release(c, "../job")
            stale = internal_pb2.ReleasePartitionsRequest(leader_epoch=0, job_id="job")
            with pytest.raises(StreamError, match="leader epoch 0 is over"):
                await c.call("ReleasePartitions", stale)

    go(work)


def test_promoted_ones_outlive_their_job(tmp_path: Path, cluster: Any, go: Any) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            spill = spill_of(tmp_path)
            for partition in (ONE, TWO):
                seal_rows(spill, "job", partition, 5)
            gone = PartitionId("e0", "v0", 7, 0)
            with pytest.raises(StoreNotFound, match="part=7 holds no complete partition"):
                await promote(c, "job", "mine", ONE, gone)
            await promote(c, "job", "mine", ONE)
            await promote(c, "job", "mine", ONE)  # harmless
            await c.jobmanager.until(
                lambda: held(c) == {("job", ONE, ""), ("job", TWO, ""), ("job", ONE, "mine")}
            )
            # It takes no space of its own.
            assert c.jobmanager.heartbeats[-1].holdings.count == 2
            await release(c, "job")
            await c.jobmanager.until(lambda: held(c) == {("job", ONE, "mine")})
            assert len(list(spill.rglob("*.arrow"))) == 1
            with pytest.raises(JobRejected, match="not usable"):
                await promote(c, "job", "../x", ONE)

            # What the partitions are together is told once, and goes with the last of them.
            seal_rows(spill, "later", ONE, 5)
            await promote(c, "later", "mine", ONE)
            await c.jobmanager.until(
                lambda: len(c.jobmanager.heartbeats[-1].holdings.promoted) == 2
            )
            told = {one.job_id: one for one in c.jobmanager.heartbeats[-1].holdings.promoted}
            assert (told["job"].schema, told["job"].partition_count) == (b"columns", 2)

            async def drop(job: str = "") -> int:
                request = internal_pb2.DropPromotedPartitionsRequest(
                    leader_epoch=c.jobmanager.epoch, name="mine", job_id=job
                )
                answer = await c.call("DropPromotedPartitions", request)
                left = {one.job_id for one in answer.holdings.promoted}
                assert left == ({"later"} if job else set())
                return int(answer.dropped)

            assert [await drop("job"), await drop("job"), await drop(), await drop()] == [
                1,
                0,
                1,
                0,
            ]
            await release(c, "later")
            await c.jobmanager.until(lambda: not held(c))
            assert list(spill.rglob("*.arrow")) == []

    go(work)


def test_what_nobody_will_complete_is_removed(tmp_path: Path, cluster: Any, go: Any) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            await c.allocate()
            await deploy_writer(c)
            spill = spill_of(tmp_path)
            write_rows(spill, "job", ONE, 5)
            earlier = PartitionId("e0", "v0", 0, 7)
            write_rows(spill, "job", earlier, 5)
            seal_rows(spill, "job", TWO, 5)
            # That of an attempt which no slot process has goes, what is being written stays.
            await until(lambda: not (spill / "job" / "e0-7").exists())
            assert (spill / "job" / "e0-0" / "part=0").exists()
            # Also when all of the job is released while its slots still end.
            await release(c, "job")
            assert (spill / "job" / "e0-0" / "part=0").exists()
            assert not (spill / "job" / "e0-0" / "part=1").exists()
            await c.free()
            await until(lambda: not (spill / "job").exists())

    go(work)


def read_all(endpoint: internal_pb2.DataEndpoint, leader_epoch: int, host_id: str) -> list[int]:
    """The rows of partition ONE of job "job", as a slot of the job on this host reads them."""
    consumer = ThreadedSlot("consumer", host_id=host_id, leader_epoch=leader_epoch, token="")
    try:
        attempt = internal_pb2.AttemptId(job_id="job", vertex="v0", subtask_index=0, attempt=0)
        gate = consumer.gate(input_edge([(endpoint, attempt)]))
        elements: list[Any] = []

        def has_ended() -> bool:
            elements.extend(drain(gate))
            is_complete = any(isinstance(element, EndOfData) for element in elements)
            return bool(consumer.errors) or is_complete

        run_until([consumer], has_ended)
        if consumer.errors:
            raise consumer.errors[0]
        return rows_of(elements)
    finally:
        consumer.exchange.close()


async def read_when_served(
    endpoint: internal_pb2.DataEndpoint, leader_epoch: int, host_id: str
) -> list[int]:
    """The same, once the server listens again."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return await asyncio.to_thread(read_all, endpoint, leader_epoch, host_id)
            except StreamError:
                await asyncio.sleep(0.02)


def server_pids(daemon_pid: int) -> list[int]:
    def children(pid: int) -> list[int]:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(child) for child in text.split()]

    return [
        process
        for child in children(daemon_pid)
        for process in children(child)
        if Path(f"/proc/{process}/comm").read_text().strip() == PARTITION_SERVER_NAME
    ]


@pytest.mark.parametrize("sockets", ["true", "false"])
def test_a_server_that_is_killed_is_found_again_where_it_was(
    tmp_path: Path, cluster: Any, go: Any, environment: Any, sockets: str
) -> None:
    async def work() -> None:
        arguments = ["--entry", "fake_slot:run", "--warm-up", "fake_slot:warm_up", "--preload", ""]
        options = {"taskmanager_network_local__sockets": sockets}
        async with cluster(tmp_path, environment(), forkserver_arguments=arguments, **options) as c:
            endpoint = c.jobmanager.registrations[0].partition_endpoint
            assert bool(endpoint.unix_path) is (sockets == "true")
            assert endpoint.tcp_port
            request = internal_pb2.AllocateSlotsRequest(leader_epoch=1, job_id="job")
            assert (await c.call("AllocateSlots", request)).partition_endpoint == endpoint
            host_id = endpoint.host_id if sockets == "true" else "elsewhere"
            seal_rows(spill_of(tmp_path), "job", ONE, 500)
            epoch = c.jobmanager.epoch
            assert await asyncio.to_thread(read_all, endpoint, epoch, host_id) == list(range(500))

            (first,) = server_pids(os.getpid())
            os.kill(first, signal.SIGKILL)
            assert await read_when_served(endpoint, epoch, host_id) == list(range(500))
            (second,) = server_pids(os.getpid())
            assert second != first

            await release(c, "job", ONE)
            with pytest.raises(StreamError, match="is not held here"):
                await asyncio.to_thread(read_all, endpoint, epoch, host_id)

    go(work)


def take(listener: socket.socket, port: int) -> None:
    """Listens there as soon as nobody else does; a daemon of this thread comes second."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < deadline_s
        else:
            listener.listen()
            return


def test_a_server_whose_port_was_taken_says_so_and_comes_back(
    tmp_path: Path, cluster: Any, go: Any, environment: Any
) -> None:
    async def work() -> None:
        arguments = ["--entry", "fake_slot:run", "--warm-up", "fake_slot:warm_up", "--preload", ""]
        async with cluster(tmp_path, environment(), forkserver_arguments=arguments) as c:
            endpoint = c.jobmanager.registrations[0].partition_endpoint
            (first,) = server_pids(os.getpid())

            def says_so(entries: list[Any]) -> bool:
                taken = f"port {endpoint.tcp_port} of the partition server has been taken"
                failed = [e for e in entries if e["event"] == "partition_server.failed"]
                return len(failed) > 1 and all(taken in entry["reason"] for entry in failed)

            with socket.socket() as other, structlog.testing.capture_logs() as logs:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                os.kill(first, signal.SIGKILL)
                take(other, endpoint.tcp_port)
                await until(lambda: says_so(logs))
            seal_rows(spill_of(tmp_path), "job", ONE, 5)
            rows = await read_when_served(endpoint, c.jobmanager.epoch, endpoint.host_id)
            assert rows == list(range(5))

    go(work)


def test_they_are_kept_for_a_jobmanager_that_comes_back(
    tmp_path: Path, cluster: Any, go: Any
) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            path = seal_rows(spill_of(tmp_path), "job", ONE, 5)
            await c.jobmanager.until(lambda: held(c))
            await c.jobmanager.until_registered_again()
            (told,) = c.jobmanager.registrations[-1].holdings.partitions
            assert (told.job_id, partition_id_of(told.partition)) == ("job", ONE)
            assert path.exists()

    go(work)


def test_they_are_dropped_when_the_grace_is_over(tmp_path: Path, cluster: Any, go: Any) -> None:
    async def work() -> None:
        async with cluster(tmp_path, taskmanager_partitions_grace="100ms") as c:
            spill = spill_of(tmp_path)
            for partition in (ONE, TWO):
                seal_rows(spill, "job", partition, 5)
            await promote(c, "job", "mine", TWO)
            c.jobmanager.refuse_registration = StreamError("not now")
            c.jobmanager.is_known = False
            await until(lambda: not (spill / "job").exists())
            c.jobmanager.is_known, c.jobmanager.refuse_registration = True, None
            await c.jobmanager.until(lambda: held(c) == {("job", TWO, "mine")})

    go(work)


def test_a_disk_that_fills_up(tmp_path: Path, small_disk: Path, cluster: Any, go: Any) -> None:
    async def work() -> None:
        limits = {
            "taskmanager_spill_dir": str(small_disk),
            "taskmanager_spill_min__free": "8mb",
            "taskmanager_spill_hard__min__free": "2mb",
        }
        async with cluster(tmp_path, taskmanager_numberOfTaskSlots="2", **limits) as c:
            await c.allocate()
            log = tmp_path / "logs" / "jobs" / "job" / "slot-s0.log"
            file = small_disk / "file-of-somebody-else"
            file.write_bytes(b"x" * 9 * MIB)
            await until(lambda: "spill pressure True" in log.read_text())
            # Slots that come later are told as well.
            await c.allocate(slots=("s1",))
            later = tmp_path / "logs" / "jobs" / "job" / "slot-s1.log"
            await until(lambda: "spill pressure True" in later.read_text())
            file.write_bytes(b"x" * MIB)
            await until(lambda: "spill pressure False" in log.read_text())
            seal_rows(small_disk / "spill-tm", "job", ONE, 5)
            file.write_bytes(b"x" * 15 * MIB)
            await c.jobmanager.until(lambda: c.jobmanager.goodbyes)
            (goodbye,) = c.jobmanager.goodbyes
            for words in (str(small_disk), "bytes are free", "taskmanager.spill.hard-min-free"):
                assert words in goodbye.reason
            await asyncio.wait([c.daemon])
            assert list(small_disk.iterdir()) == [file]

    with pytest.raises(BaseExceptionGroup) as raised:
        go(work)
    assert raised.group_contains(StreamError, match="less than taskmanager.spill.hard-min-free")
