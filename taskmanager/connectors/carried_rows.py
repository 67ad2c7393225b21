"""Rows that a file sink has for files too small to be written yet: a checkpoint takes them with it.

They are in memory and in the state of the checkpoint, and in no file: after a restore they are written again, to
whatever file comes next in their directory. What is carried on is bounded for each file and in all, so that
checkpoints stay small.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from penstock.errors import TaskFailure
from taskmanager.connectors.output_files import OutputFile

CARRIED_BYTES_MAX: Final = 32 << 20
_KEY: Final = b"penstock.carried"


@dataclass(frozen=True, slots=True)
class CarriedRows:
    """The rows of one file.

    Attributes:
        directory: ``key=value`` directories, "" = none.
        created_ms: when the first of them came.
        rows: in their order.
    """

    directory: str
    created_ms: int
    rows: tuple[pa.RecordBatch, ...]

    def encode(self) -> bytes:
        """As an item of a list in operator state."""
        schema = self.rows[0].schema
        about = json.dumps({"directory": self.directory, "created_ms": self.created_ms}).encode()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema.with_metadata({_KEY: about})) as writer:
            for rows in self.rows:
                writer.write_batch(rows.replace_schema_metadata({_KEY: about}))
        return bytes(sink.getvalue())

    @staticmethod
    def decode(item: bytes) -> CarriedRows:
        """Inverse of ``encode``; metadata of the rows' schema is not kept.

        Raises:
            TaskFailure: these are no such rows.
        """
        try:
            reader = pa.ipc.open_stream(item)
            about = json.loads(reader.schema.metadata[_KEY])
            rows = tuple(batch.replace_schema_metadata(None) for batch in reader)
            return CarriedRows(about["directory"], about["created_ms"], rows)
        except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
            raise TaskFailure(
                f"the checkpoint holds rows of a file sink that cannot be read: {error}"
            ) from error


def small_files(
    held: Mapping[str, OutputFile], min_size_bytes: int, oldest_ms: int
) -> dict[str, OutputFile]:
    """Those that are carried on: too small, and not too old; of too many the smallest.

    Args:
        held: by directory, those that are not started.
        min_size_bytes: from which on one is large enough.
        oldest_ms: of those that came first, in one that may wait.
    """
    small: dict[str, OutputFile] = {}
    left = CARRIED_BYTES_MAX
    for directory, file in sorted(held.items(), key=lambda one: one[1].held_bytes):
        left -= file.held_bytes
        is_young = file.created_ms is not None and file.created_ms > oldest_ms
        if file.held_bytes < min_size_bytes and is_young and left >= 0:
            small[directory] = file
    return small
