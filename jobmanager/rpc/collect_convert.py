"""How far collect sinks have got, read from snapshots.

The state of a collect sink is an operator list whose first item is the sequence number of its next chunk
(little endian, 8 bytes): a checkpoint covers the chunks below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.pb import internal_pb2
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.results.collect_buffer import Sequences
from penstock.errors import Unrecoverable
from penstock.pb import checkpoint_pb2, graph_pb2

_LIST = "collect"
_NUMBER_BYTES = 8


class CollectSinks:
    """The collect sinks of a job.

    Args:
        graph: the job's.
    """

    def __init__(self, graph: graph_pb2.JobGraph) -> None:
        # (vertex, operator uid) -> collect id
        self._collect_ids: dict[tuple[str, str], str] = {}
        self._subtasks: dict[str, int] = {}
        for vertex in graph.vertices:
            self._subtasks[vertex.id] = vertex.parallelism
            for operator in vertex.operators:
                if operator.sink.HasField("collect"):
                    collect_id = operator.sink.collect.collect_id
                    self._collect_ids[vertex.id, operator.uid] = collect_id

    def committed(self, snapshots: Iterable[tuple[object, object]]) -> Sequences:
        """What a completed checkpoint covers: collect id -> subtask index -> next sequence."""
        found: dict[str, dict[int, int]] = {}
        for _, snapshot in snapshots:
            assert isinstance(snapshot, checkpoint_pb2.SubtaskSnapshot), "what was acknowledged"
            for operator in snapshot.operators:
                collect_id = self._collect_ids.get((snapshot.vertex, operator.operator_uid))
                sequence = None if collect_id is None else _sequence(operator.lists)
                if collect_id is not None and sequence is not None:
                    found.setdefault(collect_id, {})[snapshot.subtask_index] = sequence
        return found

    def restored(self, tasks: Mapping[SubtaskId, internal_pb2.RestoredTask]) -> Sequences:
        """Where the sinks of a new attempt begin; those that had finished are left out."""
        found: dict[str, dict[int, int]] = {}
        for (vertex, uid), collect_id in self._collect_ids.items():
            own = found.setdefault(collect_id, {})
            for index in range(self._subtasks[vertex]):
                task = tasks.get(SubtaskId(vertex, index))
                if task is None:
                    own[index] = 0
                elif not task.finished:
                    lists = (op.lists for op in task.operators if op.operator_uid == uid)
                    own[index] = _sequence(next(lists, ())) or 0
        return found


def _sequence(lists: Iterable[checkpoint_pb2.OperatorStateSnapshot]) -> int | None:
    for state in lists:
        if state.name == _LIST and state.items:
            if len(state.items[0]) != _NUMBER_BYTES:
                raise Unrecoverable(
                    f"the state of a collect sink begins with {len(state.items[0])} bytes in the "
                    f"place of {_NUMBER_BYTES}: it was written by another version"
                )
            return int.from_bytes(state.items[0], "little", signed=True)
    return None
