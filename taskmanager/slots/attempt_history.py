"""What a JobManager that takes a job over must know of one of its attempts (pure).

An attempt tells its JobManager what it finds, and is told what to read; that lives in the JobManager's memory. So it
is kept here as well, as far as no completed checkpoint covers it: a split that was given is covered by a checkpoint
whose snapshot names it, and one that was found by a checkpoint that was triggered after the JobManager had taken the
discovery over, since it has told the readers of it before.

Invariant: of each source the splits that a restored checkpoint does not know, and that this attempt has found or was
given, are here, unless ``is_incomplete`` says that there were too many.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from common.pb import internal_pb2
from penstock.pb import checkpoint_pb2
from taskmanager.alignment.void_checkpoints import void_ids

SPLITS_MAX_BYTES: Final = 4 << 20
"""Of one attempt; with more it cannot be gone on with, and begins again."""


@dataclass(slots=True)
class _Splits:
    """Splits of one source operator, in the order in which they came."""

    by_id: dict[str, internal_pb2.Split] = field(default_factory=dict)
    final: bool = False


class AttemptHistory:
    """What one attempt has said and was told.

    Example: what a completed checkpoint names need not be known any more.
        >>> history = AttemptHistory(internal_pb2.TaskDeployment())
        >>> for name in ("a", "b"):
        ...     given = internal_pb2.AddSplits(operator_uid="files", splits=[internal_pb2.Split(id=name)])
        ...     history.told(internal_pb2.TaskCommand(add_splits=given))
        ...     if name == "a":
        ...         operator = checkpoint_pb2.OperatorSnapshot(operator_uid="files", splits=[{"id": "a"}])
        ...         snapshot = checkpoint_pb2.SubtaskSnapshot(operators=[operator])
        ...         acknowledged = internal_pb2.CheckpointAcknowledged(checkpoint_id=1, snapshot=snapshot)
        ...         history.said(internal_pb2.TaskEvent(checkpoint_acknowledged=acknowledged))
        >>> completed = internal_pb2.CheckpointCompleted(checkpoint_id=1)
        >>> history.told(internal_pb2.TaskCommand(checkpoint_completed=completed))
        >>> [split.id for split in history.message().given[0].splits]
        ['b']
    """

    def __init__(self, deployment: internal_pb2.TaskDeployment) -> None:
        self._checkpoint_id = deployment.restore.checkpoint_id
        self._beside = deployment.beside if deployment.HasField("beside") else None
        self._commits = False
        self.sent_rows = False
        """A JobManager has taken rows of it."""
        self._savepoint_id = 0
        self._reads: dict[tuple[str, str, int], int] = {}
        """Edge, and vertex and index of a producer on it -> the attempt that is read."""
        for edge in deployment.inputs:
            for channel in edge.channels:
                self._read(channel)
        self._end = internal_pb2.AttemptStateChanged()
        self._has_ended_data = False
        self._has_loaded = False
        self._found: dict[str, _Splits] = {}
        self._given: dict[str, _Splits] = {}
        self._arrived: dict[str, set[str]] = {}
        """Of what was found: what the JobManager has taken over."""
        self._found_before: dict[int, dict[str, set[str]]] = {}
        """Checkpoint -> what had arrived of it when it was triggered."""
        self._named_by: dict[int, dict[str, set[str]]] = {}
        """Checkpoint -> splits that its snapshot names."""
        self._size_bytes = 0
        self._is_incomplete = False

    # ------------------------------------------------------------ what happens

    def said(self, event: internal_pb2.TaskEvent) -> None:
        """The attempt has something for the JobManager."""
        match event.WhichOneof("event"):
            case "state_changed":
                self._end = event.state_changed
            case "end_of_data":
                self._has_ended_data = True
            case "side_loaded":
                self._has_loaded = True
            case "splits_discovered":
                found = event.splits_discovered
                self._add(self._found, found.operator_uid, found.splits, final=found.final)
            case "checkpoint_acknowledged":
                acknowledged = event.checkpoint_acknowledged
                self._named_by[acknowledged.checkpoint_id] = _named(acknowledged.snapshot)
            case _:
                pass

    def arrived(self, event: internal_pb2.TaskEvent) -> None:
        """The JobManager has taken an event over."""
        if event.WhichOneof("event") == "splits_discovered":
            found = event.splits_discovered
            self._arrived.setdefault(found.operator_uid, set()).update(
                split.id for split in found.splits
            )

    def told(self, command: internal_pb2.TaskCommand) -> None:
        """The JobManager has told the attempt something."""
        match command.WhichOneof("command"):
            case "add_splits":
                given = command.add_splits
                self._add(self._given, given.operator_uid, given.splits, final=given.final)
            case "trigger_checkpoint":
                self._trigger(command.trigger_checkpoint)
            case "commit_output":
                self._commits = True
            case "replace_producer":
                self._read(command.replace_producer.channel)
            case "checkpoint_completed" if not command.checkpoint_completed.savepoint:
                self._complete(command.checkpoint_completed.checkpoint_id)
            case "checkpoint_completed":
                self._void(command.checkpoint_completed.checkpoint_id)
            case "checkpoint_aborted":
                for checkpoint_id in void_ids(command.checkpoint_aborted):
                    self._void(checkpoint_id)
            case _:
                pass

    def _read(self, channel: internal_pb2.InputChannel) -> None:
        producer = channel.producer_attempt
        key = channel.edge_id, producer.vertex, producer.subtask_index
        self._reads[key] = max(producer.attempt, self._reads.get(key, 0))

    def _trigger(self, trigger: internal_pb2.TriggerCheckpoint) -> None:
        if self._arrived:
            arrived = {uid: set(ids) for uid, ids in self._arrived.items() if ids}
            self._found_before[trigger.checkpoint_id] = arrived
        if trigger.properties.target:
            self._savepoint_id = max(trigger.checkpoint_id, self._savepoint_id)

    def _add(
        self,
        known: dict[str, _Splits],
        uid: str,
        splits: Iterable[internal_pb2.Split],
        *,
        final: bool,
    ) -> None:
        own = known.setdefault(uid, _Splits())
        own.final = own.final or final
        for split in splits:
            if split.id not in own.by_id:
                self._size_bytes += split.ByteSize()
                own.by_id[split.id] = split
        if self._size_bytes > SPLITS_MAX_BYTES:
            self._is_incomplete = True
        if self._is_incomplete:
            for all_of_source in (*self._found.values(), *self._given.values()):
                all_of_source.by_id.clear()

    def _complete(self, checkpoint_id: int) -> None:
        if checkpoint_id >= self._savepoint_id:
            self._savepoint_id = 0
        for uid, ids in self._named_by.get(checkpoint_id, {}).items():
            self._forget(self._given, uid, ids)
        for uid, ids in self._found_before.get(checkpoint_id, {}).items():
            self._forget(self._found, uid, ids)
            self._arrived[uid] -= ids
        self._named_by = {id: one for id, one in self._named_by.items() if id > checkpoint_id}
        self._found_before = {
            id: one for id, one in self._found_before.items() if id > checkpoint_id
        }

    def _void(self, checkpoint_id: int) -> None:
        self._named_by.pop(checkpoint_id, None)
        self._found_before.pop(checkpoint_id, None)

    def _forget(self, known: dict[str, _Splits], uid: str, ids: Iterable[str]) -> None:
        own = known.get(uid)
        for id in ids if own is not None else ():
            split = own.by_id.pop(id, None) if own is not None else None
            self._size_bytes -= 0 if split is None else split.ByteSize()

    # ------------------------------------------------------------ what it was

    def message(self) -> internal_pb2.HeldAttempt:
        """All of it, but for where the attempt is and how far."""
        return internal_pb2.HeldAttempt(
            failure=self._end.failure if self._end.HasField("failure") else None,
            last_states=self._end.last_states,
            checkpoint_id=self._checkpoint_id,
            reads=[
                internal_pb2.PartitionId(
                    edge_id=edge_id, vertex=vertex, subtask_index=index, attempt=attempt
                )
                for (edge_id, vertex, index), attempt in self._reads.items()
            ],
            end_of_data=self._has_ended_data,
            side_loaded=self._has_loaded,
            found=[
                internal_pb2.SplitsDiscovered(
                    operator_uid=uid, splits=own.by_id.values(), final=own.final
                )
                for uid, own in self._found.items()
            ],
            given=[
                internal_pb2.AddSplits(operator_uid=uid, splits=own.by_id.values(), final=own.final)
                for uid, own in self._given.items()
            ],
            is_incomplete=self._is_incomplete,
            savepoint_id=self._savepoint_id,
            beside=self._beside,
            commits=self._commits,
            sent_rows=self.sent_rows,
        )


def _named(snapshot: checkpoint_pb2.SubtaskSnapshot) -> dict[str, set[str]]:
    return {
        operator.operator_uid: {split.id for split in operator.splits}
        for operator in snapshot.operators
        if operator.splits
    }
