"""Rows of exchanges that only the job itself can go on with: what it has kept for itself, or will make again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from penstock.pb import checkpoint_pb2, graph_pb2


def exchange_problems(manifest: checkpoint_pb2.CheckpointManifest) -> Iterator[str]:
    """Rows that were complete on their way, and have gone with their job, and those that would come twice."""
    names = _names(manifest)
    begun = {subtask.vertex for subtask in manifest.subtasks}
    done = dict.fromkeys(begun, 0)
    for subtask in manifest.subtasks:
        done[subtask.vertex] += subtask.finished
    parallelism = {vertex.id: vertex.parallelism for vertex in manifest.vertices}
    for edge in manifest.edges:
        has_ended = done.get(edge.target_vertex, 0) == parallelism.get(edge.target_vertex)
        if edge.blocking and edge.source_vertex in begun and not has_ended:
            yield (
                f"it needs the rows of the blocking exchange {edge.id} ({names.get(edge.source_vertex)} -> "
                f"{names.get(edge.target_vertex)}), which were kept for the job that made them only: take "
                "another checkpoint, from before that exchange began or after it was read"
            )
    yield from rows_twice(manifest)


def rows_twice(manifest: checkpoint_pb2.CheckpointManifest) -> Iterator[str]:
    """Rows that are in the state of who has read them, and that their producer makes again after a failure."""
    names = _names(manifest)
    for edge in manifest.edges:
        if edge.ahead:
            yield (
                f"over the exchange {edge.id} ({names.get(edge.source_vertex)} -> {names.get(edge.target_vertex)}) "
                f"{edge.ahead}: another job would have rows twice. Take another once these have been made"
            )


def _names(manifest: checkpoint_pb2.CheckpointManifest) -> dict[str, str]:
    return {vertex.id: vertex.name for vertex in manifest.vertices}


def persisted_problems(
    operators: Mapping[str, graph_pb2.Operator], manifest: checkpoint_pb2.CheckpointManifest
) -> Iterator[str]:
    """What an earlier job has persisted, and this one was in the middle of: where it stood is not known to another job."""
    for vertex in manifest.vertices:
        taken = [one for one in manifest.subtasks if one.vertex == vertex.id]
        for stored in vertex.operators:
            operator = operators.get(stored.uid)
            if operator is None or operator.source.WhichOneof("kind") != "persisted":
                continue
            left = [one for one in taken if not one.finished]
            reads = [p for one in left for p in one.inputs if p.edge_id == stored.uid]
            # Savepoints hold no positions at all; splits are those of another source that had the uid.
            may_have_begun = len(left) < len(taken) or any(p.rows for p in reads) or not reads
            if left and may_have_begun and not _has_splits(left, stored.uid):
                yield (
                    f"operator {operator.name!r} (uid {stored.uid!r}) was reading what is persisted as "
                    f"{operator.source.persisted.name!r}, and where it stood counts for that job only: it would read "
                    "all of it again. Take the savepoint when it has read to the end, or begin without one"
                )


def _has_splits(subtasks: Iterable[checkpoint_pb2.SubtaskSnapshot], uid: str) -> bool:
    return any(
        one.operator_uid == uid and one.splits for subtask in subtasks for one in subtask.operators
    )
