"""Aim: what takes the place of a persisted set does so as a whole: whenever a JobManager dies, a name has the old rows or the new
ones; the old ones go when nobody reads them, and not before; and nobody replaces what he has not read.

Method: the promotion with two TaskManagers' real stores on disk; the JobManager dies before or behind its n-th call, for every n,
and the next one sees what lies there, and does it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from common.pb import internal_pb2
from jobmanager.graph.execution_attempt import AttemptKey
from jobmanager.job.promotion_runner import PromotionRunner
from jobmanager.messages.job_effects import PersistedPartition
from jobmanager.partitions.promoted import newest_named
from jobmanager.rpc.partition_convert import holdings_of
from jobmanager.scheduler.held_partitions_runner import HeldPartitionsRunner
from penstock.errors import JobRejected
from penstock.partition_id import PartitionId
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_to_bytes
from taskmanager.daemon.held_partitions import summarize
from taskmanager.harness.manual_clock import ManualClock
from taskmanager.partitions.promoted_store import PromotedStore
from taskmanager.partitions.sealed_store import SealedStore
from tests.support.sealed_partitions import seal_rows

NAMES = ("tm1", "tm2")
CALLS_MAX = 12


class DiedError(Exception):
    """The test's."""


class Disk:
    """What one TaskManager has on disk, and its answers to the JobManager."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.promoted = PromotedStore(directory)
        self.sealed = SealedStore(directory)
        self._version = 0

    @property
    def holdings(self) -> internal_pb2.Holdings:
        self._version += 1
        return summarize(
            self.sealed.held(), self.promoted.held(), self.promoted.sets(), version=self._version
        ).to_message()


class Cluster:
    """Two of them, and a JobManager that dies at its n-th call.

    Attributes:
        dies_at: number of the call, and whether it is made nevertheless; None = never.
    """

    def __init__(self, directory: Path) -> None:
        self.disks = {name: Disk(directory / name) for name in NAMES}
        self.dies_at: tuple[int, bool] | None = None
        self.calls = 0
        self.unended: set[str] = set()
        self.read: set[tuple[str, str]] = set()
        self.is_readable = True
        self.lead()

    def lead(self) -> None:
        """A new JobManager has heard of both."""
        self.started: list[Coroutine[Any, Any, None]] = []
        self.held = HeldPartitionsRunner(
            lambda name: cast("Any", Client(self, name)), self.started.append, lambda: 0.0
        )
        self.held.jobs = Jobs(self)
        for name in NAMES:
            self.held.observe(name, holdings_of(self.disks[name].holdings))
        self.dies_at, self.calls = None, 0

    def call(self, work: Any) -> Any:
        self.calls += 1
        dies, is_made = self.dies_at or (0, False)
        if dies != self.calls:
            return work()
        if is_made:
            work()
        raise DiedError

    def write(self, job_id: str, rows: int) -> list[PersistedPartition]:
        """What two subtasks of a job have written, one on each."""
        for index, name in enumerate(NAMES):
            partition_id = PartitionId("persisted-v0-1", "v0", index, 0)
            seal_rows(self.disks[name].directory, job_id, partition_id, rows)
        return [
            PersistedPartition(name, "persisted-v0-1", AttemptKey("v0", index, 0))
            for index, name in enumerate(NAMES)
        ]

    async def promote(
        self, job_id: str, partitions: Sequence[PersistedPartition], replaces: str = ""
    ) -> None:
        sink = graph_pb2.PersistSink(
            name="mine", overwrite=bool(replaces), replaces_job_id=replaces
        )
        runner = PromotionRunner(job_id, graph(sink), self.held, ManualClock(1_000))
        await runner.promote(partitions)

    async def sweep(self) -> None:
        for name in NAMES:
            self.held.release_unneeded(name, self.unended.__contains__)
        while self.started:
            await self.started.pop()

    def rows(self) -> list[tuple[str, int]]:
        """What a job that is built now reads."""
        found = newest_named(self.held.promoted(), "mine")
        return [
            (found.whole.job_id, part.rows)
            for part in self.held.parts_of("mine", found.whole.job_id)
        ]

    def on_disk(self) -> set[str]:
        return {one.job_id for disk in self.disks.values() for one in disk.promoted.sets()}


class Jobs:
    """Those that the JobManager knows."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def reads(self) -> set[tuple[str, str]] | None:
        return self._cluster.read if self._cluster.is_readable else None

    def has_unended(self, job_id: str) -> bool:
        return job_id in self._cluster.unended


class Client:
    """Calls to one TaskManager."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self._disk = cluster, cluster.disks[name]

    async def promote_partitions(
        self,
        promoted: internal_pb2.PromotedSet,
        partitions: Sequence[internal_pb2.PartitionId],
    ) -> internal_pb2.Holdings:
        chosen = [
            PartitionId(one.edge_id, one.vertex, one.subtask_index, one.attempt)
            for one in partitions
        ]
        self._cluster.call(lambda: self._disk.promoted.promote(promoted, chosen))
        return self._disk.holdings

    async def drop_promoted_partitions(
        self, name: str, job_id: str
    ) -> internal_pb2.DropPromotedPartitionsResponse:
        dropped = self._cluster.call(lambda: self._disk.promoted.drop(name, job_id))
        return internal_pb2.DropPromotedPartitionsResponse(
            dropped=dropped, holdings=self._disk.holdings
        )

    async def release_partitions(self, job_id: str, _partitions: object) -> None:
        self._disk.sealed.release(job_id, None)


def graph(sink: graph_pb2.PersistSink) -> graph_pb2.JobGraph:
    schema = schema_to_bytes(pa.schema([("n", pa.int64())]))
    vertex = graph_pb2.Vertex(id="v0", parallelism=2)
    vertex.operators.add(uid="source", output_schema=schema)
    vertex.operators.add(uid="persist", input_schema=schema, sink=graph_pb2.SinkSpec(persist=sink))
    return graph_pb2.JobGraph(vertices=[vertex])


OLD, NEW = [("old", 3), ("old", 3)], [("new", 5), ("new", 5)]


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("is_made", [False, True])
def test_a_name_has_the_old_rows_or_the_new_whenever_a_jobmanager_dies(
    tmp_path: Path, *, is_made: bool, is_read: bool
) -> None:
    async def scenario(number: int) -> bool:
        cluster = Cluster(tmp_path / str(number))
        await cluster.promote("old", cluster.write("old", 3))
        await cluster.sweep()
        if is_read:
            cluster.read.add(("mine", "old"))
        cluster.unended.add("new")
        written = cluster.write("new", 5)
        cluster.lead()
        cluster.dies_at = number, is_made
        try:
            await cluster.promote("new", written, replaces="old")
        except DiedError:
            has_died = True
        else:
            has_died = False
        for _ in range(2):  # the next one, and the one behind it
            cluster.lead()
            await cluster.sweep()
            assert cluster.rows() in (OLD, NEW)
            if is_read:
                assert [part.rows for part in cluster.held.parts_of("mine", "old")] == [3, 3]
            await cluster.promote("new", written, replaces="old")
            assert cluster.rows() == NEW
        cluster.unended.clear()
        await cluster.sweep()
        assert cluster.on_disk() == ({"old", "new"} if is_read else {"new"})
        cluster.lead()
        shown = {(one.job_id, one.promoted_as) for one in cluster.held.details(promoted=False)}
        assert shown == {("new", "mine")} | ({("old", "")} if is_read else set())
        assert {one.job_id for one in cluster.held.details(promoted=True)} == {"new"}
        cluster.read.clear()
        await cluster.sweep()
        assert (cluster.on_disk(), cluster.rows()) == ({"new"}, NEW)
        return has_died

    died = [asyncio.run(scenario(number)) for number in range(1, CALLS_MAX)]
    assert died[0]
    assert not died[-1], "every call was the last one once"


@pytest.mark.parametrize("is_made", [False, True])
def test_a_job_that_is_given_up_in_between_leaves_the_old_rows(
    tmp_path: Path, *, is_made: bool
) -> None:
    """The JobManager died before the first TaskManager was told, and the job was cancelled then."""

    async def scenario(number: int) -> None:
        cluster = Cluster(tmp_path / str(number))
        await cluster.promote("old", cluster.write("old", 3))
        written = cluster.write("new", 5)
        cluster.lead()
        cluster.dies_at = number, is_made
        with pytest.raises(DiedError):
            await cluster.promote("new", written, replaces="old")
        cluster.lead()
        await cluster.sweep()
        assert (cluster.rows(), cluster.on_disk()) == (OLD, {"old"})

    for number in (1, 2):
        asyncio.run(scenario(number))


def test_nobody_replaces_what_he_has_not_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        cluster = Cluster(tmp_path)
        await cluster.promote("old", cluster.write("old", 3))
        other = cluster.write("other", 4)
        new = cluster.write("new", 5)
        cluster.lead()
        await cluster.promote("other", other, replaces="old")
        with pytest.raises(JobRejected, match="was dropped or replaced meanwhile"):
            await cluster.promote("new", new, replaces="old")
        assert cluster.rows() == [("other", 4), ("other", 4)]
        await cluster.held.drop("mine")
        with pytest.raises(JobRejected, match="was dropped or replaced meanwhile"):
            await cluster.promote("new", new, replaces="other")
        assert cluster.on_disk() == set()

    asyncio.run(scenario())


def test_what_a_job_reads_that_is_being_accepted_stays(tmp_path: Path) -> None:
    async def scenario() -> None:
        cluster = Cluster(tmp_path)
        await cluster.promote("old", cluster.write("old", 3))
        cluster.unended.add("new")
        new = cluster.write("new", 5)
        cluster.lead()
        source = graph_pb2.PersistedSource(name="mine", job_id="old", partition_count=2)
        reader = graph_pb2.JobGraph(
            vertices=[
                graph_pb2.Vertex(
                    operators=[graph_pb2.Operator(source=graph_pb2.SourceSpec(persisted=source))]
                )
            ]
        )
        with cluster.held.checked(reader):
            await cluster.promote("new", new, replaces="old")
            cluster.unended.clear()
            await cluster.sweep()
            assert len(cluster.held.parts_of("mine", "old")) == 2
        with cluster.held.checked(reader):
            pass
        # A job that cannot be read may read it.
        cluster.is_readable = False
        await cluster.sweep()
        assert cluster.on_disk() == {"old", "new"}
        cluster.is_readable = True
        await cluster.sweep()
        assert cluster.on_disk() == {"new"}
        with pytest.raises(JobRejected, match="is gone"), cluster.held.checked(reader):
            pass

    asyncio.run(scenario())
