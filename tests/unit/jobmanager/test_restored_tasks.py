"""Aim: a restore gives each operator the state that its uid has in the checkpoint, wherever it is in the job now.

Method: properties over generated jobs and their checkpoints. At the old parallelism, in an unchanged job, what
subtasks begin with is byte for byte what they had.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.job.restored_tasks import restored_tasks
from penstock.errors import Unrecoverable
from penstock.graph.fingerprint import fingerprint
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.key_groups import key_group_range

MAX_PARALLELISM = 8
SPLIT = checkpoint_pb2.REDISTRIBUTION_SPLIT
UNION = checkpoint_pb2.REDISTRIBUTION_UNION
BROADCAST = checkpoint_pb2.REDISTRIBUTION_BROADCAST
LISTS = (("dealt", SPLIT), ("shown to all", UNION), ("the same", BROADCAST))

Manifest = checkpoint_pb2.CheckpointManifest


def job_of(shape: list[tuple[str, list[str], int]]) -> graph_pb2.JobGraph:
    """A job of vertices: id, uids of the operators, parallelism."""
    graph = graph_pb2.JobGraph(name="job")
    for id_, uids, parallelism in shape:
        vertex = graph.vertices.add(
            id=id_, parallelism=parallelism, max_parallelism=MAX_PARALLELISM
        )
        for uid in uids:
            vertex.operators.add(uid=uid, name=f"the {uid}")
    return graph


@st.composite
def jobs(draw: st.DrawFn) -> graph_pb2.JobGraph:
    shape = []
    for number in range(draw(st.integers(1, 3))):
        uids = [f"op-{number}-{index}" for index in range(draw(st.integers(1, 3)))]
        shape.append((f"v{number}", uids, draw(st.integers(1, 4))))
    return job_of(shape)


def operator_snapshot(
    draw: st.DrawFn, uid: str, subtask_index: int, parallelism: int
) -> checkpoint_pb2.OperatorSnapshot:
    operator = checkpoint_pb2.OperatorSnapshot(operator_uid=uid)
    owned = key_group_range(subtask_index, parallelism, MAX_PARALLELISM)
    if draw(st.booleans()):
        keyed = operator.keyed
        keyed.first_key_group, keyed.last_key_group = owned.start, owned.stop - 1
        keyed.max_parallelism = MAX_PARALLELISM
        for name in draw(st.sets(st.sampled_from(["1.sst", "2.sst"]), min_size=1)):
            file = keyed.files.add(name=name, shared=True)
            file.handle.path = f"shared/{uid}-{subtask_index}-{name}"
            file.handle.offset = draw(st.integers(0, 99))
    for name, redistribution in LISTS:
        if draw(st.booleans()):
            held = operator.lists.add(name=name, redistribution=redistribution)
            count = draw(st.integers(0, 4))
            if draw(st.booleans()):
                held.handle.path = f"shared/{uid}-{subtask_index}-{name}"
                held.item_count = count + 1
            else:
                held.items.extend(f"{uid}/{subtask_index}/{n}".encode() for n in range(count))
    for number in range(draw(st.integers(0, 2))):
        operator.splits.add(id=f"{uid}/{subtask_index}/{number}", position=b"7")
    return operator


@st.composite
def checkpoints(draw: st.DrawFn, graph: graph_pb2.JobGraph, *, is_whole: bool) -> Manifest:
    """A checkpoint of a job; in one that is not whole, subtasks have not begun or have finished."""
    manifest = Manifest(checkpoint_id=4, vertices=fingerprint(graph))
    for vertex in graph.vertices:
        for index in range(vertex.parallelism):
            if not is_whole and draw(st.integers(0, 4)) == 0:
                continue
            subtask = manifest.subtasks.add(vertex=vertex.id, subtask_index=index)
            subtask.finished = not is_whole and draw(st.integers(0, 3)) == 0
            for spec in vertex.operators:
                if not subtask.finished or draw(st.booleans()):
                    snapshot = operator_snapshot(draw, spec.uid, index, vertex.parallelism)
                    subtask.operators.append(snapshot)
            subtask.inputs.add(edge_id="e", index=index, rows=draw(st.integers(0, 9)))
            subtask.outputs.add(edge_id="f", index=index, rows=draw(st.integers(0, 9)))
    return manifest


def held_by(manifest: Manifest, uid: str) -> dict[int, checkpoint_pb2.OperatorSnapshot]:
    return {
        subtask.subtask_index: operator
        for subtask in manifest.subtasks
        for operator in subtask.operators
        if operator.operator_uid == uid
    }


def written(messages: object) -> list[bytes]:
    return [message.SerializeToString(deterministic=True) for message in messages]  # type: ignore[attr-defined]


@given(st.data())
@settings(deadline=None)
def test_at_the_old_parallelism_each_gets_what_it_had_byte_for_byte(data: st.DataObject) -> None:
    graph = data.draw(jobs())
    manifest = data.draw(checkpoints(graph, is_whole=False))
    tasks = restored_tasks(manifest, graph)
    assert set(tasks) == {SubtaskId(s.vertex, s.subtask_index) for s in manifest.subtasks}
    for subtask in manifest.subtasks:
        task = tasks[SubtaskId(subtask.vertex, subtask.subtask_index)]
        assert (task.checkpoint_id, task.finished) == (4, subtask.finished)
        assert written(task.inputs) == written(subtask.inputs)
        assert written(task.outputs) == written(subtask.outputs)
        restored = {operator.operator_uid: operator for operator in task.operators}
        for operator in subtask.operators:
            own = restored.pop(operator.operator_uid)
            assert written(own.keyed) == written(
                [operator.keyed] if operator.HasField("keyed") else []
            )
            assert written(own.splits) == written(operator.splits)
            had = [one for one in operator.lists if one.redistribution != UNION]
            names = {one.name for one in had}
            given_back = written(one for one in own.lists if one.name in names)
            assert sorted(given_back) == sorted(written(had))
            if not subtask.finished:
                everyone = held_by(manifest, operator.operator_uid)
                unions = [
                    one
                    for _, other in sorted(everyone.items())
                    for one in other.lists
                    if one.redistribution == UNION
                ]
                assert written(o for o in own.lists if o.redistribution == UNION) == written(unions)
        assert not restored, "nobody gets what it had not"


@given(st.data())
@settings(deadline=None)
def test_an_operator_that_stands_in_another_vertex_is_found_again(data: st.DataObject) -> None:
    """All operators of a job with one parallelism, chained anew under other names."""
    parallelism = data.draw(st.integers(1, 4))
    uids = [f"op-{index}" for index in range(data.draw(st.integers(1, 5)))]
    graph = job_of([(f"v{uid}", [uid], parallelism) for uid in uids])
    manifest = data.draw(checkpoints(graph, is_whole=True))
    shuffled = data.draw(st.permutations(uids))
    cut = data.draw(st.integers(0, len(uids)))
    chains = [chain for chain in (shuffled[:cut], shuffled[cut:]) if chain]
    changed = job_of([(f"w{n}", chain, parallelism) for n, chain in enumerate(chains)])
    tasks = restored_tasks(manifest, changed)
    assert {task.finished for task in tasks.values()} == {False}
    found = set()
    for subtask, task in tasks.items():
        for operator in task.operators:
            found.add((operator.operator_uid, subtask.subtask_index))
            before = held_by(manifest, operator.operator_uid)[subtask.subtask_index]
            assert written(operator.keyed) == written(
                [before.keyed] if before.HasField("keyed") else []
            )
            assert written(operator.splits) == written(before.splits)
            for name, redistribution in LISTS:
                if redistribution == SPLIT:
                    own = [one for one in operator.lists if one.name == name]
                    assert written(own) == written(o for o in before.lists if o.name == name)
    assert found == {(uid, index) for uid in uids for index in range(parallelism)}


@given(st.data())
@settings(deadline=None)
def test_at_another_parallelism_nothing_is_lost_and_nothing_is_there_twice(
    data: st.DataObject,
) -> None:
    old, new = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    manifest = data.draw(checkpoints(job_of([("v", ["op"], old)]), is_whole=True))
    tasks = restored_tasks(manifest, job_of([("v", ["op"], new)]))
    held = held_by(manifest, "op")
    groups: Counter[int] = Counter()
    splits: Counter[str] = Counter()
    items: Counter[bytes] = Counter()
    file_items: Counter[tuple[str, int]] = Counter()
    for subtask, task in tasks.items():
        owned = key_group_range(subtask.subtask_index, new, MAX_PARALLELISM)
        for operator in task.operators:
            for keyed in operator.keyed:
                groups.update(
                    g for g in owned if keyed.first_key_group <= g <= keyed.last_key_group
                )
            splits.update(split.id for split in operator.splits)
            for one in operator.lists:
                if one.redistribution == SPLIT:
                    items.update(one.items)
                    range_ = range(one.first_item, one.first_item + one.item_count)
                    file_items.update((one.handle.path, item) for item in range_)
    dealt = [one for o in held.values() for one in o.lists if one.redistribution == SPLIT]
    assert groups == Counter(
        group
        for o in held.values()
        if o.HasField("keyed")
        for group in range(o.keyed.first_key_group, o.keyed.last_key_group + 1)
    )
    assert splits == Counter(split.id for o in held.values() for split in o.splits)
    assert items == Counter(item for one in dealt for item in one.items)
    assert file_items == Counter(
        (one.handle.path, item) for one in dealt for item in range(one.item_count)
    )


def test_a_vertex_that_is_what_it_was_under_another_name_goes_on_as_it_was() -> None:
    graph = job_of([("v0", ["a", "b"], 2)])
    manifest = Manifest(checkpoint_id=4, vertices=fingerprint(graph))
    for index in range(2):
        subtask = manifest.subtasks.add(vertex="v0", subtask_index=index, finished=index == 0)
        subtask.outputs.add(edge_id="e", rows=5)
    tasks = restored_tasks(manifest, job_of([("other", ["b", "a"], 2)]))
    assert [tasks[SubtaskId("other", index)].finished for index in range(2)] == [True, False]
    assert all(task.outputs[0].rows == 5 for task in tasks.values())


def test_state_whose_operator_is_gone_is_refused_with_what_to_do() -> None:
    before = job_of([("v0", ["a", "b"], 1)])
    manifest = Manifest(checkpoint_id=4, vertices=fingerprint(before))
    subtask = manifest.subtasks.add(vertex="v0")
    subtask.operators.add(operator_uid="a")
    subtask.operators.add(operator_uid="b").splits.add(id="x")
    with pytest.raises(Unrecoverable, match=r"operator 'the b' \(uid 'b'\).*give operators.*uid"):
        restored_tasks(manifest, job_of([("v0", ["a"], 1)]))
    tasks = restored_tasks(manifest, job_of([("v0", ["b"], 1)]))
    assert [one.operator_uid for one in tasks[SubtaskId("v0", 0)].operators] == ["b"]


def test_keys_of_another_max_parallelism_are_refused() -> None:
    graph = job_of([("v0", ["a"], 1)])
    manifest = Manifest(checkpoint_id=4, vertices=fingerprint(graph))
    operator = manifest.subtasks.add(vertex="v0").operators.add(operator_uid="a")
    operator.keyed.last_key_group, operator.keyed.max_parallelism = 15, 16
    with pytest.raises(Unrecoverable, match="set it back to 16"):
        restored_tasks(manifest, graph)
