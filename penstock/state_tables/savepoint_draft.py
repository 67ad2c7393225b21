"""The manifest of a savepoint that is to be written from tables: what it begins with, and what may be changed (pure).

It begins as that of a base, a checkpoint or savepoint, or as what the job is by its graph. Each operator of it is then
given its state.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from penstock.graph.adopted_paths import adopt_paths
from penstock.graph.fingerprint import exchanges, fingerprint
from penstock.graph.restore_check import adopt_key_groups, check_restore
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.state_tables.file_positions import check_files, path_of_files, spell_as
from penstock.storage.checkpoint_properties import (
    CheckpointKind,
    CheckpointProperties,
    SavepointFormat,
)
from penstock.storage.codec import StateError
from penstock.storage.key_groups import check_parallelism
from penstock.storage.manifest import properties_message

_WATERMARK: Final = struct.Struct("<qii")
WATERMARK_CODEC: Final = "watermark/1"
_COUNT: Final = struct.Struct("<q")
ARRIVALS_CODEC: Final = "count/1"
_NAMED_MAX: Final = 10


class SavepointDraft:
    """A manifest in the making.

    Args:
        base: the manifest to begin with; None = there is none.
        graph: of the job that is to be started from it; None = that is not said. One of both is there.
        max_parallelism: number of key-groups of all operators; None = as it was.
        target: name of the savepoint.

    Raises:
        StateError: the numbers of key-groups cannot be those.

    Attributes:
        operators: uid -> what is known of the operator.
        declared: uid -> the operator in the job.
    """

    def __init__(
        self,
        base: checkpoint_pb2.CheckpointManifest | None,
        graph: graph_pb2.JobGraph | None,
        max_parallelism: int | None,
        target: str,
    ) -> None:
        assert base is not None or graph is not None
        self._graph = graph
        self.manifest = _begun(base, graph)
        self.manifest.properties.CopyFrom(
            properties_message(
                CheckpointProperties(
                    CheckpointKind.SAVEPOINT,
                    target,
                    is_full=True,
                    format=SavepointFormat.CANONICAL,
                )
            )
        )
        self.declared = {
            one.uid: one for vertex in (graph.vertices if graph else ()) for one in vertex.operators
        }
        if base is not None and graph is not None:
            self._add_operators(graph)
        if max_parallelism is not None:
            if isinstance(max_parallelism, bool) or not isinstance(max_parallelism, int):
                raise StateError(f"max_parallelism={max_parallelism!r} is no number of key-groups")
            check_parallelism(1, max_parallelism)
            self._change_key_groups(max_parallelism)
        self._vertex_of = {
            one.uid: vertex for vertex in self.manifest.vertices for one in vertex.operators
        }
        self.operators = {
            one.uid: one for vertex in self.manifest.vertices for one in vertex.operators
        }

    def check_uids(self, uids: Iterable[str]) -> None:
        """Checks that there are such operators.

        Raises:
            StateError: there are none.
        """
        known = self.declared or self.operators
        for uid in uids:
            if uid not in known:
                names = ", ".join(map(repr, list(known)[:_NAMED_MAX]))
                what = "the job" if self.declared else "the base"
                raise StateError(f"{what} has no operator of uid {uid!r}: there are {names}")

    def max_parallelism_of(self, uid: str) -> int:
        """Number of key-groups of an operator."""
        found: int = self._vertex_of[uid].max_parallelism
        return found

    def vertex_of(self, uid: str) -> str:
        """The vertex that an operator is in."""
        found: str = self._vertex_of[uid].id
        return found

    def snapshots_of(self, uid: str, count: int) -> list[checkpoint_pb2.OperatorSnapshot]:
        """What at least ``count`` subtasks of an operator have, to be filled in."""
        vertex = self._vertex_of[uid]
        own = {one.subtask_index: one for one in self.manifest.subtasks if one.vertex == vertex.id}
        is_finished = bool(own) and all(one.finished for one in own.values())
        vertex.parallelism = max(vertex.parallelism, count)
        found = []
        for index in range(vertex.parallelism):
            subtask = own.get(index)
            if subtask is None:
                subtask = self.manifest.subtasks.add(
                    vertex=vertex.id, subtask_index=index, finished=is_finished
                )
            held = next((one for one in subtask.operators if one.operator_uid == uid), None)
            found.append(subtask.operators.add(operator_uid=uid) if held is None else held)
        return found

    def fit_watermarks(self, uid: str) -> None:
        """Watermarks that were given of other key-groups than the operator's become one of all.

        Raises:
            StateError: they differ, or are none.
        """
        where = f"operator {self.operators[uid].name!r} (uid {uid!r})"
        lists = [
            one
            for held in self.snapshots_of(uid, 0)
            for one in held.lists
            if one.codec == WATERMARK_CODEC
        ]
        items = [item for held in lists for item in held.items]
        if any(len(item) != _WATERMARK.size for item in items):
            raise StateError(f"{where}: what is given is no watermark: give what open_state gives")
        ranges = sorted(_WATERMARK.unpack(item)[1:] for item in items)
        count = self.max_parallelism_of(uid)
        if [*(first for first, _ in ranges), count] != [0, *(last + 1 for _, last in ranges)]:
            _spread_watermark(lists, count, where)

    def check_is_open(self, uid: str, state: str, closed_at_ms: int) -> None:
        """Checks that windows which were given are not over by the operator's watermark: nothing would come of them.

        Args:
            closed_at_ms: the watermark that ends the first of them.

        Raises:
            StateError: they are.
        """
        found = [
            _WATERMARK.unpack(item)[0]
            for held in self.snapshots_of(uid, 0)
            for one in held.lists
            if one.codec == WATERMARK_CODEC
            for item in one.items
        ]
        if found and closed_at_ms <= min(found):
            raise StateError(
                f"state {state!r} of operator {uid!r} has a window that is over at {closed_at_ms} ms, and event time had come "
                f"to {min(found)} ms there: nothing would come of it; leave it out, or give 'watermark': None as well, "
                "from which on time begins anew"
            )

    def count_arrivals(self, uid: str, count: int) -> None:
        """Numbers what is to arrive at an operator behind so many rows, where it has not counted further.

        Raises:
            StateError: what it has counted was given as no count.
        """
        held = self.snapshots_of(uid, 1)
        lists = [one for own in held for one in own.lists if one.codec == ARRIVALS_CODEC]
        items = [item for one in lists for item in one.items]
        if any(len(item) != _COUNT.size for item in items):
            name = self.operators[uid].name
            raise StateError(
                f"operator {name!r} (uid {uid!r}): what is given is no count of arrivals: give what open_state gives"
            )
        if count > max((_COUNT.unpack(item)[0] for item in items), default=0):
            counted = lists[0] if lists else held[0].lists.add()
            counted.name, counted.codec = "arrived", ARRIVALS_CODEC
            counted.redistribution = checkpoint_pb2.REDISTRIBUTION_UNION
            counted.items.append(_COUNT.pack(count))

    def drop_done_splits(self, uid: str) -> list[checkpoint_pb2.DoneSplits]:
        """Forgets what a source has read to its end, and returns it."""
        dropped = [one for one in self.manifest.done_splits if one.operator_uid == uid]
        kept = [one for one in self.manifest.done_splits if one.operator_uid != uid]
        del self.manifest.done_splits[:]
        self.manifest.done_splits.extend(kept)
        return dropped

    def check_reads(self, uid: str, where: str) -> None:
        """Checks that all subtasks of a source read what they are given.

        Args:
            where: the source, for messages.

        Raises:
            StateError: some have finished.
        """
        vertex = self._vertex_of[uid].id
        finished = [one for one in self.manifest.subtasks if one.vertex == vertex and one.finished]
        if finished:
            raise StateError(
                f"{where}: {len(finished)} of its subtasks had finished in the base and read nothing any more: take as base "
                "what was stored before, or leave the source out"
            )

    def take_files(
        self,
        uid: str,
        splits: Sequence[checkpoint_pb2.SplitSnapshot],
        read: Sequence[checkpoint_pb2.SplitSnapshot],
        where: str,
    ) -> bool:
        """Gives the splits of a source of files the ids that the source knows them by.

        Args:
            read: those that the base has as done: they may be of a path that the source had before.
            where: the source, for messages.

        Returns:
            Whether it is a source of files.

        Raises:
            StateError: one is no file of the source, or is there twice.
        """
        job = self.declared.get(uid, graph_pb2.Operator()).source
        noted = self.operators[uid].declared.source
        if job.HasField("files") and noted.WhichOneof("kind") in (None, "files"):
            noted.files.path = path_of_files(noted.files, job.files, splits)
        if noted.files.path:
            spell_as(noted.files.path, [*splits, *read])
        if noted.HasField("files"):
            check_files(noted.files.path, splits, where, read={one.id for one in read})
        return bool(noted.HasField("files"))

    def leave_stages_out(self) -> None:
        """Vertices in front of blocking exchanges that hold nothing have not begun: what they make, the job makes first."""
        held = {
            one.vertex
            for one in self.manifest.subtasks
            if one.finished or any(map(_holds, one.operators))
        }
        left_out = _before_exchanges(self.manifest) - held
        begun = [one for one in self.manifest.subtasks if one.vertex not in left_out]
        del self.manifest.subtasks[:]
        self.manifest.subtasks.extend(begun)

    def check_start(self, path: str) -> None:
        """Checks that the job can be started from what was written.

        Raises:
            JobRejected: it cannot; the message says why.
        """
        if self._graph is None:
            return
        graph = graph_pb2.JobGraph()
        graph.CopyFrom(self._graph)
        adopt_key_groups(graph, self.manifest)
        adopt_paths(graph, self.manifest)
        check = check_restore(graph, self.manifest, ignores_unclaimed=False)
        check.raise_refusal(graph.name, path)

    def _add_operators(self, graph: graph_pb2.JobGraph) -> None:
        """Operators that the job has and the base has not, each as a vertex."""
        known = {one.uid for vertex in self.manifest.vertices for one in vertex.operators}
        for vertex in fingerprint(graph):
            for operator in vertex.operators:
                if operator.uid not in known:
                    added = self.manifest.vertices.add(
                        id=f"{vertex.id}-{operator.uid}",
                        name=operator.name,
                        parallelism=1,
                        max_parallelism=vertex.max_parallelism,
                    )
                    added.operators.append(operator)

    def _change_key_groups(self, max_parallelism: int) -> None:
        for vertex in self.manifest.vertices:
            if vertex.max_parallelism == max_parallelism:
                continue
            vertex.max_parallelism = max_parallelism
            uids = {one.uid: one.name for one in vertex.operators}
            held: dict[tuple[str, str], list[checkpoint_pb2.OperatorStateSnapshot]] = {}
            for subtask in self.manifest.subtasks:
                for operator in subtask.operators:
                    if operator.operator_uid in uids:
                        for one in operator.lists:
                            if one.codec == WATERMARK_CODEC:
                                held.setdefault((operator.operator_uid, one.name), []).append(one)
            for (uid, _), lists in held.items():
                _spread_watermark(lists, max_parallelism, f"operator {uids[uid]!r} (uid {uid!r})")


def _begun(
    base: checkpoint_pb2.CheckpointManifest | None, graph: graph_pb2.JobGraph | None
) -> checkpoint_pb2.CheckpointManifest:
    manifest = checkpoint_pb2.CheckpointManifest()
    if base is not None:
        manifest.CopyFrom(base)
        for subtask in manifest.subtasks:
            for operator in subtask.operators:
                operator.ClearField("keyed")
            del subtask.inputs[:]
            del subtask.outputs[:]
        parallelism = {vertex.id: vertex.parallelism for vertex in manifest.vertices}
        for subtask in manifest.subtasks:
            for operator in subtask.operators:
                if operator.splits and not operator.split_parallelism:
                    operator.split_parallelism = parallelism[subtask.vertex]
        return manifest
    assert graph is not None
    manifest.job_name = graph.name
    manifest.checkpoint_id = 1
    manifest.vertices.extend(fingerprint(graph))
    manifest.edges.extend(exchanges(graph))
    for vertex in manifest.vertices:
        for index in range(vertex.parallelism):
            subtask = manifest.subtasks.add(vertex=vertex.id, subtask_index=index)
            for stored in vertex.operators:
                subtask.operators.add(operator_uid=stored.uid)
    return manifest


def _holds(operator: checkpoint_pb2.OperatorSnapshot) -> bool:
    return bool(operator.HasField("keyed") or operator.lists or operator.splits)


def _before_exchanges(manifest: checkpoint_pb2.CheckpointManifest) -> frozenset[str]:
    """The vertices in front of blocking exchanges: these are made whole when the job has been started, and not before."""
    found = set[str]()
    rest = [edge.source_vertex for edge in manifest.edges if edge.blocking]
    while rest:
        current = rest.pop()
        if current not in found:
            found.add(current)
            rest += (e.source_vertex for e in manifest.edges if e.target_vertex == current)
    return frozenset(found)


def _spread_watermark(
    lists: Iterable[checkpoint_pb2.OperatorStateSnapshot], max_parallelism: int, where: str
) -> None:
    """Makes one watermark that of all key-groups, since each of them gets other keys."""
    lists = list(lists)
    found = {_WATERMARK.unpack(item)[0] for held in lists for item in held.items}
    if len(found) > 1:
        raise StateError(
            f"max_parallelism={max_parallelism}: {where} had come to different times in its key-groups ({min(found)} to "
            f"{max(found)} ms), and keys would change between them: take the savepoint with `stop`, or leave "
            "max_parallelism as it is"
        )
    for place, held in enumerate(lists):
        del held.items[:]
        if found and not place:
            held.items.append(_WATERMARK.pack(next(iter(found)), 0, max_parallelism - 1))


def changes_of(states: object) -> Mapping[str, Mapping[str, object] | None]:
    """What a caller has given, by uid; None = all state of the operator is dropped.

    Raises:
        StateError: it is no mapping of mappings.
    """
    if not isinstance(states, Mapping):
        raise StateError(
            f"write_savepoint takes {{uid: {{state: table}}}}, got {type(states).__name__}"
        )
    for uid, own in states.items():
        if not isinstance(uid, str) or not (own is None or isinstance(own, Mapping)):
            raise StateError(
                f"write_savepoint takes {{uid: {{state: table}}}}, got {{{uid!r}: {type(own).__name__}}}"
            )
    return states


def positions_of(sources: object) -> Mapping[str, object]:
    """Where a caller lets sources go on, by uid.

    Raises:
        StateError: it is no mapping.
    """
    if sources is None:
        return {}
    if not isinstance(sources, Mapping):
        raise StateError(
            f"write_savepoint takes sources={{uid: positions}}, got {type(sources).__name__}"
        )
    return sources
