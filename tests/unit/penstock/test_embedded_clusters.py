"""Aim: a job gets an embedded cluster with room for it, only the process that started one ends it, and one that nobody can reach is ended.

Method: fake clusters and clients that count slots and jobs.
"""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import pytest

from penstock.config import Configuration
from penstock.local import embedded
from penstock.local.embedded import EmbeddedClusters, slots_needed
from penstock.pb import client_pb2, graph_pb2


class FakeClient:
    """Of a fake cluster."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self.close = cluster.note_closed_client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)


class FakeCluster:
    """A cluster, and what its clients are told."""

    def __init__(self, _config: Configuration, slots: int) -> None:
        self.slots_total = self.slots_free = slots
        self.states: list[client_pb2.JobState.ValueType] = []
        self.left = ""
        self.closed = self.closed_clients = 0

    def client(self) -> FakeClient:
        return FakeClient(self)

    def note_closed_client(self) -> None:
        self.closed_clients += 1

    def cluster(self) -> client_pb2.ClusterDetails:
        return client_pb2.ClusterDetails(slots_total=self.slots_total, slots_free=self.slots_free)

    def jobs(self, *, look_again: bool = False) -> list[client_pb2.JobSummary]:
        left = self.left if look_again else ""
        return [client_pb2.JobSummary(state=one, restorable_from=left) for one in self.states]

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> EmbeddedClusters:
    monkeypatch.setattr("penstock.local.embedded_cluster.EmbeddedCluster", FakeCluster)
    monkeypatch.setattr("penstock.local.embedded.raise_on_termination", bool)
    return EmbeddedClusters()


def collect_garbage() -> None:
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "embedded-end":
            thread.join(60)


def cluster_for(clusters: EmbeddedClusters, slots: int) -> Any:
    return client_for(clusters, slots)._cluster


def client_for(clusters: EmbeddedClusters, slots: int) -> Any:
    graph = graph_pb2.JobGraph(
        vertices=[
            graph_pb2.Vertex(slot_group="a", parallelism=1),
            graph_pb2.Vertex(slot_group="b", parallelism=slots - 1),
        ]
    )
    assert slots_needed(graph) == slots
    return clusters.client_for(graph, Configuration())


def test_a_job_goes_where_there_is_room_for_it(clusters: EmbeddedClusters) -> None:
    first = cluster_for(clusters, 4)
    assert first.slots_total == 4
    assert cluster_for(clusters, 2) is first
    # A job runs: what is free decides.
    first.states, first.slots_free = [client_pb2.JOB_STATE_RUNNING], 2
    assert cluster_for(clusters, 2) is first
    second = cluster_for(clusters, 3)
    assert second is not first
    # It has ended, its slots are about to come back.
    first.states, first.slots_free = [client_pb2.JOB_STATE_FINISHED], 0
    assert cluster_for(clusters, 4) is first
    # A cluster whose TaskManager has died has none.
    first.slots_total = second.slots_total = 0
    assert cluster_for(clusters, 2) not in (first, second)
    clusters.close()
    assert (first.closed, second.closed) == (1, 1)
    assert (first.closed_clients, second.closed_clients) == (1, 1)


def test_a_forked_process_leaves_its_parents_clusters_alone(
    clusters: EmbeddedClusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = cluster_for(clusters, 2)
    own = os.getpid()
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: own + 1)
        clusters.close()
    assert cluster.closed == 0
    assert cluster_for(clusters, 2) is cluster
    clusters.close()
    assert cluster.closed == 1


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize(
    ("states", "left"),
    [
        ([], ""),
        ([client_pb2.JOB_STATE_FINISHED, client_pb2.JOB_STATE_FAILED], ""),
        ([client_pb2.JOB_STATE_FINISHED, client_pb2.JOB_STATE_RUNNING], ""),
        ([client_pb2.JOB_STATE_FAILED], "/somewhere/chk-3"),
    ],
)
def test_a_cluster_that_nobody_can_reach_is_ended_unless_it_has_work_or_state(
    states: list[client_pb2.JobState.ValueType], left: str
) -> None:
    client = client_for(EmbeddedClusters(), 2)
    cluster = client._cluster
    collect_garbage()
    assert cluster.closed == 0  # a handle or rows may hold it
    cluster.states, cluster.left = states, left
    is_needed = bool(left) or client_pb2.JOB_STATE_RUNNING in states
    del client
    collect_garbage()
    assert cluster.closed == int(not is_needed)
    embedded._end_all()  # as at the end of the process
    assert cluster.closed == 1
