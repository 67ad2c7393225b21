"""Where sources go on, as users say it: by split.

{"events-0": b"...", "events-1": ps.END}     a source of one's own: splits by id, or ``ps.Split`` where it has a payload
[{"id": ..., "position": ..., "done": ...}]   rows, or a table, with the columns that ``open_state`` gives of ``splits``
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from typing import Any, Final

import pyarrow as pa

from penstock.connectors.file_paths import normal_path, whole_path
from penstock.connectors.listing import EntryRefusedError, list_files
from penstock.connectors.source import END, EndOfSplit, Split
from penstock.errors import ConfigurationError, JobRejected
from penstock.pb import checkpoint_pb2
from penstock.state_tables.given_rows import given_batches
from penstock.state_tables.operator_tables import SPLITS_SCHEMA, SUBTASK
from penstock.storage.codec import StateError

_COLUMNS: Final = frozenset(SPLITS_SCHEMA.names) - {SUBTASK}


def files_done(*paths: str | PathLike[str]) -> dict[str, EndOfSplit]:
    """Files that a source shall not read: they are the history. For ``write_savepoint(sources={uid: files_done(...)})``.

    Args:
        paths: files, directories or globs as the source takes them, also ``s3://``; of directories what is in them now.

    Returns:
        Absolute path of each file -> ``ps.END``; read the history from its keys, so that no row is in both or in neither.

    Raises:
        StateError: there are no such files.
    """
    found: dict[str, EndOfSplit] = {}
    for path in paths:
        try:
            full = normal_path(whole_path(path))
        except (ConfigurationError, JobRejected) as error:
            raise StateError(f"files_done: {error}") from error
        try:
            listed = list_files(full)
        except (OSError, EntryRefusedError) as error:
            raise StateError(f"files_done: {full} cannot be listed: {error}") from error
        if not listed:
            raise StateError(f"files_done: there are no files in {full}")
        found.update((file.path, END) for file in listed)
    if not found:
        raise StateError("files_done: name the files of the history, or their directory")
    return found


def split_snapshots(given: Any, where: str) -> list[checkpoint_pb2.SplitSnapshot]:
    """The splits of a source as they are stored.

    Args:
        where: the source, for messages.

    Raises:
        StateError: they are not what splits are, or one is there twice.
    """
    found = list(
        _of_mapping(given, where) if isinstance(given, Mapping) else _of_rows(given, where)
    )
    seen: set[str] = set()
    for split in found:
        if split.id in seen:
            raise StateError(f"{where}: split {split.id!r} is there twice")
        seen.add(split.id)
    return found


def _of_mapping(given: Mapping[Any, Any], where: str) -> Iterator[checkpoint_pb2.SplitSnapshot]:
    for split, position in given.items():
        one = (
            split if isinstance(split, Split) else Split(split) if isinstance(split, str) else None
        )
        if one is None or not (position is None or position is END or isinstance(position, bytes)):
            raise StateError(
                f"{where}: {split!r}: {position!r} is no split (its id, or a ps.Split) and its position (bytes, None for its "
                "start, ps.END for its end)"
            )
        if position is END:
            yield checkpoint_pb2.SplitSnapshot(id=one.id, done=True)
        else:
            yield checkpoint_pb2.SplitSnapshot(
                id=one.id,
                payload=one.payload,
                size=one.size,
                min_event_time_ms=one.min_event_time_ms,
                position=position,
            )


def _of_rows(given: Any, where: str) -> Iterator[checkpoint_pb2.SplitSnapshot]:
    for batch in given_batches(given, SPLITS_SCHEMA, where):
        _check_columns(batch.schema, where)
        for row in batch.to_pylist():
            if row.get("done"):
                yield checkpoint_pb2.SplitSnapshot(id=row["id"], done=True)
                continue
            yield checkpoint_pb2.SplitSnapshot(
                id=row["id"],
                payload=row.get("payload") or b"",
                size=row.get("size") or 0,
                min_event_time_ms=row.get("min_event_time_ms"),
                position=row.get("position"),
            )


def _check_columns(schema: pa.Schema, where: str) -> None:
    names: Iterable[str] = schema.names
    if "id" not in names or not {*names} <= {*_COLUMNS, SUBTASK}:
        raise StateError(
            f"{where} is given with {list(names)}; columns of splits are {sorted(_COLUMNS)}"
        )
