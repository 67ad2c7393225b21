"""The operators of a checkpoint by uid, wherever they stood in the graph that it was taken of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jobmanager.graph.execution_attempt import SubtaskId
from penstock.errors import Unrecoverable
from penstock.pb import checkpoint_pb2, graph_pb2

_NAMED_MAX = 10


class StoredOperators:
    """What a manifest holds.

    Attributes:
        snapshots: of the subtasks that had begun.

    Raises:
        Unrecoverable: it holds subtasks of vertices that it does not describe.
    """

    def __init__(self, manifest: checkpoint_pb2.CheckpointManifest) -> None:
        self.checkpoint_id = manifest.checkpoint_id
        self.snapshots = {
            SubtaskId(snapshot.vertex, snapshot.subtask_index): snapshot
            for snapshot in manifest.subtasks
        }
        self._vertices = {vertex.id: vertex for vertex in manifest.vertices}
        self._vertex_of = {
            operator.uid: vertex for vertex in manifest.vertices for operator in vertex.operators
        }
        unknown = sorted(
            subtask
            for subtask in self.snapshots
            if subtask.vertex not in self._vertices
            or subtask.subtask_index >= self._vertices[subtask.vertex].parallelism
        )
        if unknown:
            raise Unrecoverable(
                f"checkpoint {self.checkpoint_id} does not fit the job that it describes, which has no "
                f"subtasks {', '.join(map(str, unknown[:_NAMED_MAX]))}"
            )
        self._done = frozenset(done.operator_uid for done in manifest.done_splits)
        self._held: dict[str, dict[int, checkpoint_pb2.OperatorSnapshot]] = {}
        for subtask, snapshot in self.snapshots.items():
            for operator in snapshot.operators:
                held = self._held.setdefault(operator.operator_uid, {})
                held[subtask.subtask_index] = operator

    def check(self, graph: graph_pb2.JobGraph) -> None:
        """Checks that the graph has a place for all state.

        Raises:
            Unrecoverable: it has not.
        """
        known = {operator.uid for vertex in graph.vertices for operator in vertex.operators}
        names = {one.uid: one.name for old in self._vertices.values() for one in old.operators}
        for uid in dict.fromkeys((*self._held, *self._done)):
            held = self._held.get(uid, {})
            if uid not in known and (uid in self._done or any(map(has_state, held.values()))):
                raise Unrecoverable(
                    f"checkpoint {self.checkpoint_id} has state of operator {names.get(uid, uid)!r} (uid "
                    f"{uid!r}), which the job does not have: give operators with state a .uid('...'), and "
                    "restore what has the same"
                )

    def leave_out(self, lists: Mapping[str, str]) -> None:
        """Forgets one list of each of some operators.

        Args:
            lists: operator uid -> name.
        """
        for uid, name in lists.items():
            for index, operator in self._held.get(uid, {}).items():
                kept = checkpoint_pb2.OperatorSnapshot()
                kept.CopyFrom(operator)
                del kept.lists[:]
                kept.lists.extend(one for one in operator.lists if one.name != name)
                self._held[uid][index] = kept

    def held_by(self, uid: str) -> list[checkpoint_pb2.OperatorSnapshot | None]:
        """What an operator held, by old subtask; empty = it was not there."""
        vertex, held = self._vertex_of.get(uid), self._held.get(uid, {})
        return [] if vertex is None else [held.get(index) for index in range(vertex.parallelism)]

    def same_as(self, vertex: graph_pb2.Vertex) -> str | None:
        """The vertex that had the same operators and as many subtasks; None = there was none."""
        uids = _uids(vertex.operators)
        named = self._vertices.get(vertex.id) if not uids else None
        old = next((self._vertex_of[uid] for uid in uids if uid in self._vertex_of), named)
        if old is None or _uids(old.operators) != uids or old.parallelism != vertex.parallelism:
            return None
        return old.id

    def before(self, vertex: graph_pb2.Vertex) -> list[checkpoint_pb2.SubtaskSnapshot]:
        """The subtasks in which the operators of a vertex were."""
        old = {
            self._vertex_of[one.uid].id for one in vertex.operators if one.uid in self._vertex_of
        }
        return [snapshot for subtask, snapshot in self.snapshots.items() if subtask.vertex in old]


def has_state(operator: checkpoint_pb2.OperatorSnapshot) -> bool:
    """Whether anything would be lost with it."""
    keyed = operator.keyed
    return bool(keyed.segments or keyed.files or operator.lists or operator.splits)


def _uids(
    operators: Iterable[graph_pb2.Operator] | Iterable[checkpoint_pb2.OperatorFingerprint],
) -> frozenset[str]:
    return frozenset(operator.uid for operator in operators)
