"""Aim: what somebody starts from holds no row twice: who has read more than was made again is found, and nobody else.

Method: random positions of random exchanges; the rule as it is said, channel by channel, is the oracle.
"""

from __future__ import annotations

from random import Random

import pytest

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.manifest_composer import ManifestComposer, as_savepoint
from jobmanager.checkpoint.rows_ahead import rows_ahead
from jobmanager.graph.deployment import producers_of
from jobmanager.graph.execution_attempt import AttemptKey
from jobmanager.graph.job_plan import EdgePlan, Exchange, JobPlan, Partitioning, VertexPlan
from penstock.errors import JobRejected
from penstock.graph.rows_left_behind import exchange_problems
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.checkpoint_properties import CheckpointKind, CheckpointProperties

Snapshot = checkpoint_pb2.SubtaskSnapshot


def plan(partitioning: Partitioning, producers: int, consumers: int) -> JobPlan:
    edge = EdgePlan("e", "made", "read", partitioning, Exchange.CACHING)
    return JobPlan((VertexPlan("made", producers), VertexPlan("read", consumers)), (edge,))


@pytest.mark.parametrize("seed", range(200))
def test_one_channel_that_is_ahead_is_found_wherever_it_is(seed: int) -> None:
    chance = Random(seed)
    partitioning = chance.choice(list(Partitioning))
    producers, consumers = chance.randint(1, 4), chance.randint(1, 4)
    if partitioning is Partitioning.FORWARD:
        consumers = producers
    made = [Snapshot(vertex="made", subtask_index=n) for n in range(producers)]
    read = [Snapshot(vertex="read", subtask_index=n) for n in range(consumers)]
    channels = [
        (producer, subpartition, consumer)
        for consumer in range(consumers)
        for producer, subpartition in producers_of(partitioning, producers, consumers, consumer)
    ]
    ahead = chance.choice([None, *channels])
    finished = set(chance.sample(range(producers), chance.randint(0, producers)))
    for channel in channels:
        producer, subpartition, consumer = channel
        rows = chance.randint(0, 5)
        made[producer].outputs.add(edge_id="e", index=subpartition, rows=rows)
        read[consumer].inputs.add(edge_id="e", index=producer, rows=rows + (channel == ahead))
    for number in finished:
        made[number].finished = True
        del made[number].outputs[:]
    expected = ahead is not None and ahead[0] not in finished
    found = rows_ahead(plan(partitioning, producers, consumers), [*made, *read])
    assert list(found) == ["e"] * expected
    if expected and ahead is not None:
        assert found["e"].startswith(f"read/{ahead[2]} has read ")
        assert f" rows of made/{ahead[0]}, " in found["e"]


def stored(kind: CheckpointKind) -> c.StoreCheckpoint:
    made, read = Snapshot(vertex="made"), Snapshot(vertex="read")
    made.outputs.add(edge_id="e", rows=3)
    read.inputs.add(edge_id="e", rows=5)
    return c.StoreCheckpoint(
        checkpoint_id=7,
        triggered_at_ms=1,
        snapshots=((AttemptKey("made", 0, 1), made), (AttemptKey("read", 0, 0), read)),
        finished=(),
        replaced=(),
        retained=(7,),
        next_checkpoint_id=8,
        state_bytes=0,
        properties=CheckpointProperties(kind),
    )


def composer(counts_once: bool) -> ManifestComposer:
    graph = graph_pb2.JobGraph(name="job")
    graph.vertices.add(id="made", name="Made", parallelism=1, max_parallelism=8)
    graph.vertices.add(id="read", name="Read", parallelism=1, max_parallelism=8)
    graph.edges.add(id="e", source_vertex="made", target_vertex="read")
    shape = plan(Partitioning.HASH, 1, 1)
    return ManifestComposer("job", graph, 1, "1.0", shape if counts_once else None)


def test_a_checkpoint_with_such_rows_is_for_its_own_job_alone() -> None:
    manifest = composer(True).compose(stored(CheckpointKind.CHECKPOINT), (), {}, now_ms=9)
    assert [one.inputs[0].rows for one in manifest.subtasks if one.inputs] == [5]
    [problem] = exchange_problems(manifest)
    told = r"exchange e \(Made -> Read\) read/0 has read 5 rows of made/0, which has made 3"
    with pytest.raises(JobRejected, match=told):
        raise JobRejected(problem)
    with pytest.raises(JobRejected, match=told):
        as_savepoint(manifest)
    with pytest.raises(JobRejected, match=told):
        composer(True).compose(stored(CheckpointKind.SAVEPOINT), (), {}, now_ms=9)


def test_where_rows_may_count_twice_nothing_is_refused() -> None:
    manifest = composer(False).compose(stored(CheckpointKind.CHECKPOINT), (), {}, now_ms=9)
    assert not list(exchange_problems(manifest))
    saved = composer(False).compose(stored(CheckpointKind.SAVEPOINT), (), {}, now_ms=9)
    assert not any(
        one.inputs or one.outputs for one in (*saved.subtasks, *as_savepoint(manifest).subtasks)
    )
