"""Aim: a job gets an embedded cluster with room for it, and only the process that started one ends it.

Method: fake clusters and clients that count slots and jobs.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from penstock.config import Configuration
from penstock.local.embedded import EmbeddedClusters, slots_needed
from penstock.pb import client_pb2, graph_pb2


class FakeCluster:
    """A cluster, and the client of it."""

    def __init__(self, _config: Configuration, slots: int) -> None:
        self.slots_total = self.slots_free = slots
        self.states: list[client_pb2.JobState.ValueType] = []
        self.closed = 0

    def client(self) -> FakeCluster:
        return self

    def cluster(self) -> client_pb2.ClusterDetails:
        return client_pb2.ClusterDetails(slots_total=self.slots_total, slots_free=self.slots_free)

    def jobs(self) -> list[client_pb2.JobSummary]:
        return [client_pb2.JobSummary(state=state) for state in self.states]

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> EmbeddedClusters:
    monkeypatch.setattr("penstock.local.embedded_cluster.EmbeddedCluster", FakeCluster)
    monkeypatch.setattr("penstock.local.embedded.raise_on_termination", bool)
    return EmbeddedClusters()


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
    first = client_for(clusters, 4)
    assert first.slots_total == 4
    assert client_for(clusters, 2) is first
    # A job runs: what is free decides.
    first.states, first.slots_free = [client_pb2.JOB_STATE_RUNNING], 2
    assert client_for(clusters, 2) is first
    second = client_for(clusters, 3)
    assert second is not first
    # It has ended, its slots are about to come back.
    first.states, first.slots_free = [client_pb2.JOB_STATE_FINISHED], 0
    assert client_for(clusters, 4) is first
    # A cluster whose TaskManager has died has none.
    first.slots_total = second.slots_total = 0
    assert client_for(clusters, 2) not in (first, second)
    clusters.close()
    assert (first.closed, second.closed) == (2, 2)


def test_a_forked_process_leaves_its_parents_clusters_alone(
    clusters: EmbeddedClusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_for(clusters, 2)
    own = os.getpid()
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: own + 1)
        clusters.close()
    assert client.closed == 0
    assert client_for(clusters, 2) is client
    clusters.close()
    assert client.closed == 2
