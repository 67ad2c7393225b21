"""What a restart from an older checkpoint than the newest one writes again.

Output is committed when the checkpoint that covers it is complete. Where the newest checkpoints are damaged and
an older one is gone on from, what they had covered has been committed, or is about to be: the job writes it
again under other names.

Invariant: the files named are those that a damaged checkpoint lets commit and the one gone on from does not.
Where a damaged manifest cannot be read, HEAD tells the names of not too many; where it does not tell all of them, the
place where they lie is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from typing_extensions import override

from jobmanager.checkpoint.prepared_files import prepared_files
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.snapshot_files import StoreSnapshotReader

FILES_NAMED_MAX: Final = 1_000
HEAD_FILES_MAX: Final = 200
"""HEAD is written whole with each checkpoint."""


@dataclass(frozen=True, slots=True)
class RepeatedOutput:
    """What may be there twice.

    Attributes:
        from_checkpoint_id: what the job goes on from.
        to_checkpoint_id: the newest checkpoint that was complete, and is damaged.
        files: of output that was committed in between, by their final names; the first ones.
        file_count: how many there are.
        places: of output that cannot be named: a sink, and where it writes.
    """

    from_checkpoint_id: int
    to_checkpoint_id: int
    files: tuple[str, ...] = ()
    file_count: int = 0
    places: tuple[str, ...] = ()

    @override
    def __str__(self) -> str:
        after, newest = self.from_checkpoint_id, self.to_checkpoint_id
        text = (
            f"checkpoint {newest} is damaged, so the job goes on from checkpoint {after}: output committed from "
            f"checkpoint {after} to checkpoint {newest} may be there twice"
        )
        if self.file_count:
            text += f"; the first copy is in {self.file_count} files"
        if self.places:
            text += f"; not to be told by name: {', '.join(self.places)}"
        return text


def repeated_output(
    graph: graph_pb2.JobGraph,
    restored: checkpoint_pb2.CheckpointManifest,
    damaged: Iterable[
        tuple[checkpoint_pb2.RetainedCheckpoint, checkpoint_pb2.CheckpointManifest | None]
    ],
    reader: StoreSnapshotReader,
) -> RepeatedOutput | None:
    """What is written again; None where no sink of the job has committed anything.

    Args:
        restored: what the job goes on from.
        damaged: newer checkpoints as HEAD names them, the oldest first; None = the manifest cannot be read.
    """
    sinks = _sinks(graph)
    newest, places = 0, dict[str, None]()
    files: dict[str, None] = {}
    covered = _files(restored, sinks, reader, lambda _: None)
    for retained, manifest in damaged:
        newest = retained.checkpoint_id
        if manifest is None:
            files.update((name, None) for name in retained.files if name not in covered)
            if retained.has_more_files:
                places.update(dict.fromkeys(map(_place, sinks.values())))
            continue
        found = _files(
            manifest, sinks, reader, lambda uid: places.setdefault(_place(sinks[uid]), None)
        )
        files.update((name, None) for name in found if name not in covered)
    # Sinks without files of their own names commit as they write.
    places.update(
        (_place(sink), None) for sink in sinks.values() if not sink.sink.HasField("files")
    )
    if not files and not places:
        return None
    named = tuple(sorted(files))
    return RepeatedOutput(
        restored.checkpoint_id, newest, named[:FILES_NAMED_MAX], len(named), tuple(places)
    )


def note_files(
    retained: checkpoint_pb2.RetainedCheckpoint,
    graph: graph_pb2.JobGraph,
    manifest: checkpoint_pb2.CheckpointManifest,
) -> None:
    """Notes in HEAD's entry of a checkpoint which files are committed with it."""
    untold: set[str] = set()
    found = list(_files(manifest, _sinks(graph), None, untold.add))
    retained.files.extend(found[:HEAD_FILES_MAX])
    retained.has_more_files = len(found) > HEAD_FILES_MAX or bool(untold)


def _sinks(graph: graph_pb2.JobGraph) -> dict[str, graph_pb2.Operator]:
    return {
        operator.uid: operator
        for vertex in graph.vertices
        for operator in vertex.operators
        if operator.WhichOneof("spec") == "sink" and operator.sink.WhichOneof("kind") != "discard"
    }


def _files(
    manifest: checkpoint_pb2.CheckpointManifest,
    sinks: dict[str, graph_pb2.Operator],
    reader: StoreSnapshotReader | None,
    untold: Callable[[str], object],
) -> dict[str, None]:
    """Final names of the files that are committed with a checkpoint; arguments as of ``prepared_files``."""
    uids = {uid for uid, sink in sinks.items() if sink.sink.HasField("files")}
    found = prepared_files(manifest, uids, reader, untold)
    return {str(file["final"]): None for _, file in found}


def _place(operator: graph_pb2.Operator) -> str:
    directory = operator.sink.files.directory
    return f"sink {operator.name!r} in {directory}" if directory else f"sink {operator.name!r}"
