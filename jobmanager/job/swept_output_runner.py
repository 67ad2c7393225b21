"""Has hidden output of a job removed that was cancelled for good: files that nobody will ever commit."""

from __future__ import annotations

import structlog

from common.pb import internal_pb2
from jobmanager.scheduler.cluster_runner import ClusterRunner
from penstock.errors import StreamError, TaskManagerLost
from penstock.pb import graph_pb2

_log = structlog.get_logger()


def swept_sinks(graph: graph_pb2.JobGraph) -> list[internal_pb2.SweptSink]:
    """The sinks of a job that leave hidden files behind."""
    return [
        internal_pb2.SweptSink(operator_uid=one.uid, directory=one.sink.files.directory)
        for vertex in graph.vertices
        for one in vertex.operators
        if one.WhichOneof("spec") == "sink" and one.sink.HasField("files")
    ]


async def sweep_output(job_id: str, graph: graph_pb2.JobGraph, cluster: ClusterRunner) -> None:
    """Asks all TaskManagers once: what was written lies where some of them can reach it.

    Raises:
        StreamError: one of them could not remove what it found, or none is there; to be asked again.
    """
    sinks = swept_sinks(graph)
    if not sinks:
        return
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
