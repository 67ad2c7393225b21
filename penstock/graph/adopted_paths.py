"""Sources of files that go on from state know their files by the paths that they were found by."""

from __future__ import annotations

import os

from penstock.connectors.file_paths import normal_path
from penstock.connectors.globs import fixed_part
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.open_store import is_s3


def adopt_paths(graph: graph_pb2.JobGraph, manifest: checkpoint_pb2.CheckpointManifest) -> None:
    """Takes over how the path of a source of files is spelt where its state was stored.

    State of older versions has dots in its paths, and does not always say how they were spelt: then they are as given.
    What a spelling leads to whose link is gone is not what the job reads, where that is there.
    """
    stored = {one.uid: one for vertex in manifest.vertices for one in vertex.operators}
    for operator in (one for vertex in graph.vertices for one in vertex.operators):
        if not operator.source.HasField("files") or operator.uid not in stored:
            continue
        files, noted = operator.source.files, stored[operator.uid].declared.source.files.path
        if not noted:
            files.path = files.path_as_given or files.path
        elif noted == files.path_as_given or (
            normal_path(noted) == files.path and (_is_there(noted) or not _is_there(files.path))
        ):
            files.path = noted


def _is_there(path: str) -> bool:
    fixed = fixed_part(path)
    # Path.exists raises below a directory that may not be entered.
    return is_s3(fixed) or os.path.exists(fixed)  # noqa: PTH110
