"""Has hidden output of a job removed that is over: files that nobody will ever commit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from types import MappingProxyType
from typing import Final

import structlog

from common.pb import internal_pb2
from jobmanager.scheduler.cluster_runner import ClusterRunner
from penstock.errors import StreamError, TaskManagerLost
from penstock.pb import graph_pb2

_PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0)
"""Between tries to have hidden output removed; behind the last it is left to who removes the job's record."""

_log = structlog.get_logger()


def swept_sinks(graph: graph_pb2.JobGraph) -> list[internal_pb2.SweptSink]:
    """The sinks of a job that leave hidden files behind."""
    return [
        internal_pb2.SweptSink(operator_uid=one.uid, directory=one.sink.files.directory)
        for vertex in graph.vertices
        for one in vertex.operators
        if one.WhichOneof("spec") == "sink" and one.sink.HasField("files")
    ]


async def sweep_output(
    job_id: str,
    graph: graph_pb2.JobGraph,
    cluster: ClusterRunner,
    kept: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> None:
    """Asks all TaskManagers once: what was written lies where some of them can reach it.

    Args:
        kept: by the uid of a sink, last parts of the names of files that stay.

    Raises:
        StreamError: one of them could not remove what it found, or none is there; to be asked again.
    """
    sinks = swept_sinks(graph)
    if not sinks:
        return
    for sink in sinks:
        sink.kept.extend(kept.get(sink.operator_uid, ()))
    taskmanager_ids = [taskmanager.taskmanager_id for taskmanager in cluster.details()]
    if not taskmanager_ids:
        raise TaskManagerLost("hidden output stays until a TaskManager is there that can remove it")
    failure: StreamError | None = None
    for taskmanager_id in taskmanager_ids:
        try:
            count = await cluster.client(taskmanager_id).sweep_output(job_id, sinks)
        except StreamError as error:
            failure = error
        else:
            if count:
                _log.info("output.swept", job_id=job_id, taskmanager_id=taskmanager_id, count=count)
    if failure is not None:
        raise failure


class OutputSweepsRunner:
    """The hidden output of one job that ends, on all TaskManagers: it lies where some of them can reach it.

    Args:
        in_order: runs actions of one lane, a TaskManager, one after the other.
    """

    def __init__(
        self,
        job_id: str,
        graph: graph_pb2.JobGraph,
        cluster: ClusterRunner,
        in_order: Callable[[str, Callable[[], Awaitable[None]]], None],
    ) -> None:
        self._job_id = job_id
        self._sinks = swept_sinks(graph)
        self._cluster = cluster
        self._in_order = in_order
        self._log = _log.bind(job_id=job_id)
        self.are_given_up = False
        """Some TaskManager has not removed it, however often it was asked."""

    def begin(self) -> None:
        """Asks all TaskManagers, each behind the end of the slots that the job had there."""
        for taskmanager in self._cluster.details() if self._sinks else ():
            self._begin_on(taskmanager.taskmanager_id)

    def _begin_on(self, taskmanager_id: str) -> None:
        self._in_order(taskmanager_id, lambda: self._sweep_on(taskmanager_id))

    async def _sweep_on(self, taskmanager_id: str) -> None:
        pauses_s = iter(_PAUSES_S)
        while True:
            try:
                client = self._cluster.client(taskmanager_id)
                count = await client.sweep_output(self._job_id, self._sinks)
            except StreamError as error:
                pause_s = next(pauses_s, None)
                self._log.warning(
                    "output.not_swept",
                    taskmanager_id=taskmanager_id,
                    retry_s=pause_s,
                    reason=str(error),
                )
                if pause_s is None:
                    self.are_given_up = True
                    return
                await asyncio.sleep(pause_s)
            else:
                if count:
                    self._log.info("output.swept", taskmanager_id=taskmanager_id, count=count)
                return
