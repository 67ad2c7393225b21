"""Artifacts on their way to the JobManager, in pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from penstock.client.artifacts import LocalArtifact
from penstock.client.protocol import (
    CHUNK_SIZE_BYTES,
)
from penstock.pb import client_pb2, graph_pb2

Uploadable = LocalArtifact | tuple[graph_pb2.Artifact, Path]


def artifact_id_of(artifact: Uploadable) -> str:
    """The name of its content."""
    return artifact[0].id if isinstance(artifact, tuple) else artifact.id


def pieces_of(artifact: Uploadable) -> Iterator[bytes]:
    """Its content; at least one piece."""
    if not isinstance(artifact, tuple):
        yield from artifact.chunks(CHUNK_SIZE_BYTES)
        return
    with artifact[1].open("rb") as file:
        piece = file.read(CHUNK_SIZE_BYTES)
        yield piece
        while piece := file.read(CHUNK_SIZE_BYTES):
            yield piece


def upload_of(artifact_id: str, pieces: Iterator[bytes]) -> Iterator[client_pb2.ArtifactChunk]:
    """The messages that carry it; the first one names it."""
    with contextlib.closing(pieces):  # type: ignore[type-var]
        for index, piece in enumerate(pieces):
            yield client_pb2.ArtifactChunk(id="" if index else artifact_id, data=piece)
