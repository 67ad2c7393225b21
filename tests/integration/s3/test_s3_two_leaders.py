"""Aim: of JobManagers that all believe they lead a job, on one HEAD on S3, one wins, and no file that counts is deleted.

Method: real JobManagers in this process, each on a copy of what its predecessor keeps of the job, so that none hears of
another but by HEAD; TaskManagers that only pretend, and upload a file per checkpoint. Each leader has those that came
to it, and has waited for the others: for as long as those that live may take to come. All take checkpoints as fast as
they can while a proxy in front of a real S3 server loses answers at random, before and after the server has done what
was asked. All the time a thread looks whether what HEAD names is there.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import grpc
import pytest
from typing_extensions import override

from common.clock import SystemClock
from common.pb import internal_pb2
from jobmanager.assembly_runner import serving
from penstock.config import Configuration
from penstock.errors import StoreNotFound
from penstock.pb import checkpoint_pb2, client_pb2
from penstock.storage.head import HeadStore
from penstock.storage.manifest import decode_manifest, references
from penstock.storage.s3.s3_store import S3Store
from penstock.storage.snapshot_files import snapshot_file_name
from tests.integration.s3.conftest import BUCKET, settings_of
from tests.support.radosgw import RadosGateway, s3_options
from tests.support.s3_proxy import Fault, Request, S3Proxy
from tests.unit.jobmanager.conftest import Cluster, job_graph
from tests.unit.jobmanager.test_jobmanager_checkpoints import JOB, Checkpointed

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LEADERS = 4
CHECKPOINTS = 5
"""Of each leader, before the next one comes and after it has come."""
LOST_SHARE = 0.25


class Uploading(Checkpointed):
    """Each of its tasks uploads a file per checkpoint, and goes on naming that of the last complete one."""

    def __init__(self, taskmanager: Any, store: S3Store) -> None:
        super().__init__(taskmanager)
        self._store = store
        self._uploaded: dict[tuple[str, int, int], checkpoint_pb2.StateFile] = {}

    @override
    def acknowledge(self, attempt: Any, checkpoint_id: int) -> None:
        vertex, index = attempt.vertex, attempt.subtask_index
        name = snapshot_file_name(
            checkpoint_id, vertex, index, attempt.attempt, self.taskmanager.id
        )
        path = f"shared/{name}"
        self._store.put(path, [b"state"])
        handle = checkpoint_pb2.StateHandle(path=path, size_bytes=5)
        new = checkpoint_pb2.StateFile(name=name, shared=True, handle=handle)
        self._uploaded[vertex, index, checkpoint_id] = new
        last = self._uploaded.get((vertex, index, max(self.completed, default=0)))
        snapshot = checkpoint_pb2.SubtaskSnapshot(vertex=vertex, subtask_index=index)
        operator = snapshot.operators.add(operator_uid="src" if vertex == "v0" else "snk")
        operator.keyed.instance = f"{self.taskmanager.id}-{vertex}-{index}"
        half = 64 * index
        operator.keyed.first_key_group, operator.keyed.last_key_group = half, half + 63
        operator.keyed.max_parallelism = 128
        operator.keyed.files.extend([new] if last is None else [last, new])
        acked = internal_pb2.CheckpointAcknowledged(
            checkpoint_id=checkpoint_id, snapshot=snapshot, leader_epoch=self.triggered_by
        )
        event = internal_pb2.TaskEvent(attempt=attempt, checkpoint_acknowledged=acked)
        self.taskmanager.report(event)


class Leader:
    """One that believes it leads, and takes one checkpoint after the other."""

    def __init__(
        self, directory: Path, cluster: Cluster, fake: Uploading, watched: Watched
    ) -> None:
        self.directory, self.cluster, self.fake = directory, cluster, fake
        self._watched = watched
        self.taken: list[int] = []

    async def take_checkpoints(self) -> None:
        request = client_pb2.TriggerCheckpointRequest(job_id=JOB)
        while True:
            try:
                taken = await self.cluster.client.TriggerCheckpoint(request, timeout=20)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.02)  # its storage, or it has been deposed
            else:
                self.taken.append(taken.checkpoint_id)

    async def await_more(self, count: int) -> None:
        wanted = len(self.taken) + count
        while len(self.taken) < wanted:
            # Nobody completes another one where something is gone: that is to be said, and not that time is up.
            assert not self._watched.missing
            await asyncio.sleep(0.02)


class SkippedClock(SystemClock):
    """Goes on as the machine's does, behind what it has skipped."""

    def __init__(self) -> None:
        self.skipped_ms = 0

    @override
    def monotonic_ns(self) -> int:
        return super().monotonic_ns() + self.skipped_ms * 1_000_000


class Watched:
    """What HEAD names, looked at all the time."""

    def __init__(self, store: S3Store) -> None:
        self.store = store
        self.looks = 0
        self.missing: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.01):
            self.look()

    def look(self) -> None:
        """Notes what HEAD names and is not there, unless HEAD has changed meanwhile."""
        before = self.head()
        missing = [] if before is None else self._missing(before)
        if missing and self.head() == before:
            self.missing += missing
        self.looks += 1

    def head(self) -> checkpoint_pb2.CheckpointHead | None:
        return HeadStore(self.store).read()

    def _missing(self, head: checkpoint_pb2.CheckpointHead) -> list[str]:
        missing = []
        for one in head.retained:
            sizes = self.store.sizes([one.manifest_path])
            if one.manifest_path not in sizes:
                missing.append(one.manifest_path)
                continue
            try:
                manifest = decode_manifest(self.store.get(one.manifest_path))
            except StoreNotFound:  # removed since, behind another HEAD
                missing.append(one.manifest_path)
                continue
            paths = [reference.location.path for reference in references(manifest)]
            there = self.store.sizes(paths)
            missing += [path for path in paths if path not in there]
        return missing


@pytest.fixture
def losing(proxy: S3Proxy) -> Iterator[S3Proxy]:
    """Loses answers, and requests."""
    drawn = random.Random(13)

    def concerns(request: Request) -> bool:
        return request.kind in ("CAS", "DELETE", "PUT") and drawn.random() < LOST_SHARE / 3

    many = 10**9
    proxy.faults += [
        Fault(concerns, many, forwards=True),  # done, and reset
        Fault(concerns, many, forwards=True, status=500),  # done, and said to have failed
        Fault(concerns, many),  # lost on the way there
    ]
    return proxy


@asynccontextmanager
async def leading(
    directory: Path, config: dict[str, object], watched: Watched, name: str
) -> AsyncIterator[Leader]:
    """A JobManager on what it has in its directory."""
    settings = Configuration.from_mapping(config)
    clock = SkippedClock()
    async with (
        serving(settings, directory, clock) as jobmanager,
        asyncio.TaskGroup() as tasks,
    ):
        # TaskManagers of its predecessors live, and stay with these: they are waited for as long as they may take.
        clock.skipped_ms = 2 * settings.heartbeat_timeout_ms
        assert jobmanager.cluster.settles_in_s < 0
        cluster = Cluster(jobmanager, tasks)
        try:
            fake = Uploading(await cluster.add(name), watched.store)
            leader = Leader(directory, cluster, fake, watched)
            cluster.background.append(tasks.create_task(leader.take_checkpoints()))
            yield leader
        finally:
            await jobmanager.dispatcher.stop()
            for task in cluster.background:
                task.cancel()
            for taskmanager in cluster.taskmanagers:
                await taskmanager.close()
            await cluster.channel.close()


def test_one_of_those_who_believe_they_lead_wins_and_what_head_names_stays(
    s3_server: RadosGateway, losing: S3Proxy, tmp_path: Path
) -> None:
    prefix = f"{tmp_path.name}/checkpoints"
    store = S3Store(BUCKET, f"{prefix}/{JOB}", settings_of(s3_server.endpoint))
    config: dict[str, object] = {
        "jobmanager.rpc.port": 0,
        "jobmanager.metrics.port": -1,
        "security.open-loopback": True,
        "execution.checkpointing.dir": f"s3://{BUCKET}/{prefix}",
        "execution.checkpointing.interval": "1h",
        "restart-strategy.exponential-delay.initial-backoff": "10ms",
        "heartbeat.timeout": "10min",
        **s3_options(losing.endpoint),
        "s3.retry.timeout": "5s",
    }

    async def scenario(watched: Watched) -> None:
        async with asyncio.timeout(240), AsyncExitStack() as stack:
            leaders: list[Leader] = []
            for number in range(1, LEADERS + 1):
                directory = tmp_path / f"jobmanager-{number}"
                if leaders:  # it has heard of nothing that its predecessor does from here on
                    half_written = shutil.ignore_patterns(".tmp-*")
                    shutil.copytree(leaders[-1].directory, directory, ignore=half_written)
                one = await stack.enter_async_context(
                    leading(directory, config, watched, f"tm{number}")
                )
                if not leaders:
                    await one.cluster.submit(job_graph())
                leaders.append(one)
                await one.await_more(CHECKPOINTS)
                assert one.taken == sorted(set(one.taken))
                head = watched.head()
                assert head is not None
                assert head.leader_epoch == number
                for deposed in leaders[:-1]:
                    before = list(deposed.taken)
                    await one.await_more(1)
                    assert deposed.taken == before, "who was deposed completes nothing any more"
            for deposed in leaders[:-1]:
                failed = await deposed.cluster.wait_for(JOB, "FAILED")
                assert "has taken the job over" in failed.failure.message
            await leaders[-1].await_more(CHECKPOINTS)
            taken = [one.taken for one in leaders]
            assert len({id for own in taken for id in own}) == sum(map(len, taken))
        head = watched.head()
        assert head is not None
        assert head.leader_epoch == LEADERS
        assert head.retained[-1].checkpoint_id >= leaders[-1].taken[-1]

    with Watched(store) as watched:
        asyncio.run(scenario(watched))
        watched.look()
    assert not watched.missing
    assert watched.looks > CHECKPOINTS
