"""The cluster that a script embeds when it names no address: child processes that end with it.

A cluster that nobody can reach any more, as its environment and all that came from it are gone, ends before: a script may
make hundreds of environments. It stays where a job of it runs, or has left what it can be started from again.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from penstock.client.job import TERMINAL_STATES
from penstock.client.termination import raise_on_termination
from penstock.config import Configuration
from penstock.errors import JobManagerUnreachable, JobRejected
from penstock.graph.persisted import persisted_sources
from penstock.pb import client_pb2, graph_pb2

if TYPE_CHECKING:
    from penstock.client.client import Client
    from penstock.local.embedded_cluster import EmbeddedCluster

_SLOTS_MIN = 2

_living: dict[EmbeddedCluster, int] = {}
"""Cluster -> the process that started it; who takes one out ends it."""


def slots_needed(graph: graph_pb2.JobGraph) -> int:
    """Slots that a job takes: per slot sharing group as many as its widest vertex has subtasks."""
    groups: dict[str, int] = {}
    for vertex in graph.vertices:
        groups[vertex.slot_group] = max(groups.get(vertex.slot_group, 0), vertex.parallelism)
    return sum(groups.values())


class EmbeddedClusters:
    """Starts a cluster at the first job and ends it with the process.

    A job for which there are too few free slots gets a new one; jobs that run stay where they are. A job that
    reads what another one has persisted runs where that lies.
    """

    def __init__(self) -> None:
        self._clusters: list[tuple[EmbeddedCluster, Client]] = []

    @property
    def clients(self) -> list[Client]:
        """One for each cluster."""
        return [client for _, client in self._clusters]

    def client_for(self, graph: graph_pb2.JobGraph, config: Configuration) -> Client:
        """A client of a cluster with room for the job.

        Args:
            config: of the daemons, where they have to be started.

        Raises:
            JobRejected: what the job reads lies in no cluster that it fits into.
        """
        needed = slots_needed(graph)
        persisted = persisted_sources(graph)
        if persisted:
            return self._holder_of(persisted, needed)
        for _, client in self._clusters:
            if _has_room(client, needed):
                return client
        return self._start(max(_SLOTS_MIN, needed, config.taskmanager_slots), config)

    def _holder_of(self, persisted: Sequence[graph_pb2.PersistedSource], slots: int) -> Client:
        wanted = {(source.name, source.job_id) for source in persisted}
        names = ", ".join(sorted(repr(source.name) for source in persisted))
        for client in self.clients:
            held = {(one.promoted_as, one.job_id) for one in client.partitions(promoted=True)}
            if not wanted <= held:
                continue
            total = client.cluster().slots_total
            if slots > total:
                raise JobRejected(
                    f"the job needs {slots} slots, and the embedded cluster that holds {names} has {total}: "
                    "lower the parallelism, or set taskmanager.slots before the first job"
                )
            return client
        raise JobRejected(f"no cluster of this environment holds {names} (any more)")

    def _start(self, slots: int, config: Configuration) -> Client:
        from penstock.local.embedded_cluster import EmbeddedCluster

        if not _living:
            atexit.register(_end_all)
        raise_on_termination()  # else SIGTERM would end the process without atexit
        cluster = EmbeddedCluster(config, slots)
        _living[cluster] = os.getpid()
        client = cluster.client()
        # Handles and rows hold the client, too: it is what everybody needs who can still reach the cluster.
        weakref.finalize(client, _end_unreachable, cluster).atexit = False
        self._clusters.append((cluster, client))
        return client

    def close(self) -> None:
        """Ends all clusters; in a process that was forked from theirs it does nothing."""
        for cluster, client in self._clusters:
            if _is_own(cluster):
                client.close()
                _end(cluster)
        self._clusters = [
            (cluster, client) for cluster, client in self._clusters if cluster in _living
        ]


def _is_own(cluster: EmbeddedCluster) -> bool:
    """Whether this process has started it, and it has not been ended."""
    return _living.get(cluster) == os.getpid()


def _end(cluster: EmbeddedCluster) -> None:
    if _is_own(cluster) and _living.pop(cluster, None) is not None:
        cluster.close()


def _end_all() -> None:
    for cluster in list(_living):
        _end(cluster)


def _end_unreachable(cluster: EmbeddedCluster) -> None:
    """Called by the garbage collector, wherever that may be: what waits is for a thread."""
    if _is_own(cluster):
        threading.Thread(target=_end_idle, args=(cluster,), name="embedded-end").start()


def _end_idle(cluster: EmbeddedCluster) -> None:
    jobs: Sequence[client_pb2.JobSummary] = ()
    with closing(cluster.client()) as client, suppress(JobManagerUnreachable):
        jobs = client.jobs(look_again=True)  # of a JobManager that is gone none goes on
    if all(job.state in TERMINAL_STATES and not job.restorable_from for job in jobs):
        _end(cluster)


def _has_room(client: Client, slots: int) -> bool:
    """Whether a cluster can run a job at once, or as soon as its slots of ended jobs are back."""
    details = client.cluster()
    if slots > details.slots_total:
        return False
    return slots <= details.slots_free or all(job.state in TERMINAL_STATES for job in client.jobs())
