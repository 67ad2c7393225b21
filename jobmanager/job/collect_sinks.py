"""How far collect sinks have got, read from snapshots.

The state of a collect sink is an operator list whose first item is the sequence number of its next chunk
(little endian, 8 bytes): a checkpoint covers the chunks below it. A subtask that has finished takes no more
snapshots: its last state goes into all later checkpoints, so that after a restart of the JobManager it is
known how many chunks there were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.pb import internal_pb2
from jobmanager.graph.execution_attempt import AttemptKey, SubtaskId
from jobmanager.results.collect_buffer import Sequences
from penstock.errors import Unrecoverable
from penstock.pb import checkpoint_pb2, graph_pb2

_LIST = "collect"
_NUMBER_BYTES = 8


class CollectSinks:
    """The collect sinks of a job."""

    def __init__(self, graph: graph_pb2.JobGraph) -> None:
        # (vertex, operator uid) -> collect id
        self._collect_ids: dict[tuple[str, str], str] = {}
        self._subtasks: dict[str, int] = {}
        self._states: dict[SubtaskId, list[checkpoint_pb2.OperatorSnapshot]] = {}
        for vertex in graph.vertices:
            self._subtasks[vertex.id] = vertex.parallelism
            for operator in vertex.operators:
                if operator.sink.HasField("collect"):
                    collect_id = operator.sink.collect.collect_id
                    self._collect_ids[vertex.id, operator.uid] = collect_id

    def committed(self, snapshots: Iterable[tuple[object, object]]) -> Sequences:
        """What a completed checkpoint covers: collect id -> subtask index -> next sequence; its states are
        the last ones from now on."""
        found: dict[str, dict[int, int]] = {}
        for _, snapshot in snapshots:
            assert isinstance(snapshot, checkpoint_pb2.SubtaskSnapshot), "what was acknowledged"
            self._note_states(SubtaskId(snapshot.vertex, snapshot.subtask_index), snapshot)
            for operator in snapshot.operators:
                collect_id = self._collect_ids.get((snapshot.vertex, operator.operator_uid))
                sequence = None if collect_id is None else _sequence(operator.lists)
                if collect_id is not None and sequence is not None:
                    found.setdefault(collect_id, {})[snapshot.subtask_index] = sequence
        return found

    def restored(
        self,
        tasks: Mapping[SubtaskId, internal_pb2.RestoredTask],
        subtasks: frozenset[SubtaskId] | None = None,
    ) -> Sequences:
        """Where the sinks of new attempts begin, or had ended; their states are the last ones. Those that
        had finished and never sent anything are left out.

        Args:
            tasks: what they start from.
            subtasks: that begin again; None = all.
        """
        kept = {} if subtasks is None else self._states
        self._states = {s: states for s, states in kept.items() if s not in (subtasks or ())}
        for subtask, restored in tasks.items():
            if subtasks is None or subtask in subtasks:
                self._note_states(subtask, restored)
        found: dict[str, dict[int, int]] = {}
        for (vertex, uid), collect_id in self._collect_ids.items():
            own = found.setdefault(collect_id, {})
            for index in range(self._subtasks[vertex]):
                if subtasks is not None and SubtaskId(vertex, index) not in subtasks:
                    continue
                task = tasks.get(SubtaskId(vertex, index))
                operators = () if task is None else task.operators
                lists = (op.lists for op in operators if op.operator_uid == uid)
                sequence = _sequence(next(lists, ()))
                if sequence is not None or task is None or not task.finished:
                    own[index] = sequence or 0
        return found

    def attempts_of(self, heard: Iterable[AttemptKey]) -> Sequences:
        """The numbers of the attempts that the sinks are in, by collect id and subtask index.

        Args:
            heard: the oldest attempt that counts of each subtask.
        """
        numbers: dict[str, dict[int, int]] = {}
        for key in heard:
            numbers.setdefault(key.vertex, {})[key.subtask_index] = key.attempt
        return {
            collect_id: numbers.get(vertex, {})
            for (vertex, _), collect_id in self._collect_ids.items()
        }

    def last_states(
        self, subtasks: Iterable[SubtaskId]
    ) -> dict[SubtaskId, list[checkpoint_pb2.OperatorSnapshot]]:
        """Of subtasks that have finished: the last states of their sinks, where there are any."""
        return {subtask: self._states[subtask] for subtask in subtasks if subtask in self._states}

    def _note_states(
        self,
        subtask: SubtaskId,
        snapshot: checkpoint_pb2.SubtaskSnapshot | internal_pb2.RestoredTask,
    ) -> None:
        states = [
            checkpoint_pb2.OperatorSnapshot(
                operator_uid=operator.operator_uid,
                lists=[state for state in operator.lists if state.name == _LIST],
            )
            for operator in snapshot.operators
            if (subtask.vertex, operator.operator_uid) in self._collect_ids
        ]
        if states:
            self._states[subtask] = states


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
