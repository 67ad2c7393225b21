"""From the snapshots of harnesses to what a subtask of another one starts with, at any parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.done_splits import NOTHING_DONE, DoneSplits, digests_from_bytes
from common.pb import internal_pb2
from penstock.errors import JobRejected
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.manifest import decode_manifest
from penstock.storage.snapshot_files import StoreSnapshotReader
from taskmanager.harness.partial_rows import PARTIAL_ROWS, Owner, owned
from taskmanager.state.operator_state import with_items

_INLINE = StoreSnapshotReader(None)


class StateAssignment(Protocol):
    """Who gets which state: the JobManager's decision, handed in by whoever knows both daemons."""

    def __call__(
        self,
        uid: str,
        name: str,
        held: Sequence[checkpoint_pb2.OperatorSnapshot | None],
        parallelism: int,
        max_parallelism: int,
    ) -> list[internal_pb2.RestoredOperator]:
        """What each subtask begins with of an operator, from what each old subtask held of it."""


class RestoredState:
    """The state in a number of snapshots, one per subtask of the job they were taken of.

    Args:
        snapshots: as ``HarnessRunner.snapshot`` returned them; none = the job starts from nothing.

    Raises:
        StoreCorrupt: one of them is no snapshot.
        JobRejected: one is there twice.
    """

    def __init__(self, snapshots: Sequence[bytes], assignment: StateAssignment) -> None:
        self._assign = assignment
        self.checkpoint_id = 0
        self._of_operator: dict[str, dict[int, checkpoint_pb2.OperatorSnapshot]] = {}
        self._names: dict[str, str] = {}
        self._parallelism: dict[str, int] = {}
        self.done: dict[str, DoneSplits] = {}
        """Splits that sources have read to their end, by operator uid."""
        for content in snapshots:
            manifest = decode_manifest(content, "the snapshot")
            self.checkpoint_id = max(self.checkpoint_id, manifest.checkpoint_id)
            for vertex in manifest.vertices:
                for operator in vertex.operators:
                    self._names[operator.uid] = operator.name
                    self._parallelism[operator.uid] = vertex.parallelism
            for done in manifest.done_splits:
                known = self.done.get(done.operator_uid, NOTHING_DONE)
                self.done[done.operator_uid] = known.with_digests(digests_from_bytes(done.loose))
            for subtask in manifest.subtasks:
                self._add(subtask)

    def _add(self, subtask: checkpoint_pb2.SubtaskSnapshot) -> None:
        for stored in subtask.operators:
            operator = _with_items(stored)
            held = self._of_operator.setdefault(operator.operator_uid, {})
            if names := [split.id for split in operator.splits if split.done]:
                known = self.done.get(operator.operator_uid, NOTHING_DONE)
                self.done[operator.operator_uid] = known.with_ids(names)
            if subtask.subtask_index in held and operator != held[subtask.subtask_index]:
                raise JobRejected(
                    f"restore: two of the snapshots are of subtask {subtask.subtask_index} of operator "
                    f"{self._names.get(operator.operator_uid, operator.operator_uid)!r}: give one "
                    "snapshot per subtask"
                )
            held[subtask.subtask_index] = operator

    def check(self, graph: graph_pb2.JobGraph) -> None:
        """Checks that all state has an operator.

        Raises:
            JobRejected: some has none.
        """
        known = {operator.uid for vertex in graph.vertices for operator in vertex.operators}
        for uid in dict.fromkeys((*self._of_operator, *self.done)):
            held = self._of_operator.get(uid, {})
            has_state = uid in self.done or any(map(_has_state, held.values()))
            if uid not in known and has_state:
                raise JobRejected(
                    f"restore: the snapshot has state of operator {self._names.get(uid, uid)!r} "
                    f"(uid {uid!r}), which is not there now: give operators with state a .uid('...'), and "
                    "restore what has the same"
                )

    def task_of(
        self, graph: graph_pb2.JobGraph, vertex: graph_pb2.Vertex, subtask_index: int
    ) -> internal_pb2.RestoredTask:
        """What one subtask starts with."""
        task = internal_pb2.RestoredTask(checkpoint_id=self.checkpoint_id)
        for index, spec in enumerate(vertex.operators):
            if held := self._of_operator.get(spec.uid):
                # Where snapshots of only some subtasks were given, the others had nothing.
                old = [held.get(before) for before in range(max(held) + 1)]
                restored = self._assign(
                    spec.uid, spec.name, old, vertex.parallelism, vertex.max_parallelism
                )[subtask_index]
                self._restore_partial_rows(restored, graph, vertex, index, subtask_index)
                task.operators.append(restored)
        return task

    def _restore_partial_rows(
        self,
        restored: internal_pb2.RestoredOperator,
        graph: graph_pb2.JobGraph,
        vertex: graph_pb2.Vertex,
        operator_index: int,
        subtask_index: int,
    ) -> None:
        """Puts in the place of the partial rows that were dealt out those of the subtask's own keys."""
        held_before = self._of_operator[restored.operator_uid]
        lists = [one for operator in held_before.values() for one in operator.lists]
        names = {one.name for one in lists if one.codec == PARTIAL_ROWS}
        if not names:
            return
        [name] = names
        kept = [one for one in restored.lists if one.name != name]
        (edge,) = (
            edge
            for edge in graph.edges
            if edge.source_vertex == vertex.id
            and edge.source_output.operator_index == operator_index
        )
        target = next(each for each in graph.vertices if each.id == edge.target_vertex)
        before = self._parallelism.get(target.operators[0].uid, 1)
        now = Owner(min(subtask_index, target.parallelism - 1), target.parallelism)
        found = checkpoint_pb2.OperatorStateSnapshot(
            name=name,
            redistribution=checkpoint_pb2.REDISTRIBUTION_SPLIT,
            codec=PARTIAL_ROWS,
        )
        for index, operator in sorted(held_before.items()):
            owners = (Owner(min(index, before - 1), before), now)
            for held in operator.lists:
                if held.name == name:
                    found.items.extend(
                        owned(item, edge, target.max_parallelism, owners) for item in held.items
                    )
        del restored.lists[:]
        restored.lists.extend([*kept, found])

    def split_ids(self, uid: str) -> frozenset[str]:
        """The splits that a source's snapshots name."""
        held = self._of_operator.get(uid, {})
        return frozenset(split.id for operator in held.values() for split in operator.splits)


def _with_items(stored: checkpoint_pb2.OperatorSnapshot) -> checkpoint_pb2.OperatorSnapshot:
    """The snapshot with the items of large lists in their places."""
    operator = checkpoint_pb2.OperatorSnapshot()
    operator.CopyFrom(stored)
    del operator.lists[:]
    operator.lists.extend(with_items(held, _INLINE) for held in stored.lists)
    return operator


def _has_state(operator: checkpoint_pb2.OperatorSnapshot) -> bool:
    return bool(
        operator.keyed.segments or operator.keyed.files or operator.lists or operator.splits
    )
