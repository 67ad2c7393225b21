"""What the subtasks of a job have written, as text per attempt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.pb import client_pb2


@dataclass(frozen=True, slots=True)
class AttemptLog:
    """What one attempt of a subtask has written: what its code printed, rows of print sinks, its failure."""

    vertex: str
    subtask_index: int
    attempt: int
    text: str


def attempt_logs(chunks: Iterable[client_pb2.LogChunk]) -> list[AttemptLog]:
    """The logs that were sent in pieces, in order of their first pieces."""
    # A piece may end in the middle of a character.
    content: dict[tuple[str, int, int], bytearray] = {}
    for chunk in chunks:
        key = chunk.vertex, chunk.subtask_index, chunk.attempt
        content.setdefault(key, bytearray()).extend(chunk.data)
    return [AttemptLog(*key, data.decode(errors="replace")) for key, data in content.items()]
