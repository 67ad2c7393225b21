"""Where sources go on, as users say it: by split.

{"events-0": b"...", "events-1": ps.END}     a source of one's own: splits by id, or ``ps.Split`` where it has a payload
[{"id": ..., "position": ..., "done": ...}]   rows, or a table, with the columns that ``open_state`` gives of ``splits``
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Final

from penstock.connectors.file_paths import normal_path, whole_path
from penstock.connectors.listing import EntryRefusedError, list_files
from penstock.connectors.source import END, EndOfSplit, Split
from penstock.errors import ConfigurationError, JobRejected
from penstock.pb import checkpoint_pb2
from penstock.state_tables.given_rows import given_batches, given_columns
from penstock.state_tables.operator_tables import SPLITS_SCHEMA, SUBTASK
from penstock.state_tables.value_columns import fitted
from penstock.storage.codec import StateError

_COLUMNS: Final = frozenset(SPLITS_SCHEMA.names) - {SUBTASK}
_OF_SPLITS: Final = ("payload", "size", "min_event_time_ms")
_TIME_LIMIT_MS: Final = 1 << 62


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
    if given is None or isinstance(given, str | bytes | PathLike | int):
        raise StateError(
            f"{where} is given as {type(given).__name__}: give {{split: position}}, which ps.files_done(path) does of "
            "files, or rows; leave the source out to let it go on where the base has it"
        )
    found = list(
        _of_mapping(given, where) if isinstance(given, Mapping) else _of_rows(given, where)
    )
    check_once(found, where)
    return found


def check_once(splits: Iterable[checkpoint_pb2.SplitSnapshot], where: str) -> None:
    """Checks that no split is there twice.

    Raises:
        StateError: one is.
    """
    seen: set[str] = set()
    for split in splits:
        if split.id in seen:
            raise StateError(f"{where}: split {split.id!r} is there twice: give each split once")
        seen.add(split.id)


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
        values = {} if position is END else {name: getattr(one, name) for name in _OF_SPLITS}
        place = None if position is END else position
        yield _snapshot(values | {"id": one.id, "done": position is END, "position": place}, where)


def _of_rows(given: Any, where: str) -> Iterator[checkpoint_pb2.SplitSnapshot]:
    names = given_columns(given)
    if names is not None:
        _check_columns(names, where)
    first = 0
    for batch in given_batches(given, SPLITS_SCHEMA, where):
        if not batch.num_rows:
            continue
        _check_columns(batch.schema.names, where)
        columns = {
            name: fitted(column, SPLITS_SCHEMA.field(name).type, f"{where}: column {name!r}")
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
            if name != SUBTASK
        }
        values = (column.to_pylist() for column in columns.values())
        for index, row in enumerate(zip(*values, strict=True), first):
            yield _snapshot(dict(zip(columns, row, strict=True)), f"{where}: row {index}")
        first += batch.num_rows


def _snapshot(row: Mapping[str, Any], where: str) -> checkpoint_pb2.SplitSnapshot:
    """One split by the columns of its row; those that are null or not there say nothing."""
    name, position, size = row["id"], row.get("position"), row.get("size") or 0
    time_ms = row.get("min_event_time_ms")
    problem = ""
    if name is None or name == "":
        problem = (
            f"its id is {'null' if name is None else 'empty'}: give the id of a split of the source"
        )
    elif row.get("done") and position:
        problem = f"split {name!r} is done and has a position: what is done has none, what goes on there is not done"
    elif isinstance(size, int) and size < 0:
        problem = f"split {name!r} has the size {size}: give 0 where it is not known"
    elif isinstance(time_ms, int) and abs(time_ms) > _TIME_LIMIT_MS:
        problem = f"split {name!r} has min_event_time_ms {time_ms}, more than 2^62 ms from the epoch: null = it is not known"
    if problem:
        raise StateError(f"{where}: {problem}")
    try:
        if row.get("done"):
            return checkpoint_pb2.SplitSnapshot(id=name, done=True)
        return checkpoint_pb2.SplitSnapshot(
            id=name,
            payload=row.get("payload") or b"",
            size=size,
            min_event_time_ms=time_ms,
            position=position,
        )
    except (TypeError, ValueError) as error:
        raise StateError(
            f"{where}: {name!r} is no split: its id is a text of UTF-8, its payload bytes, its size and min_event_time_ms are "
            f"integers of 64 bits ({error})"
        ) from error


def _check_columns(names: Sequence[str], where: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or "id" not in names or not {*names} <= {*_COLUMNS, SUBTASK}:
        told = f", {', '.join(map(repr, twice))} more than once" if twice else ""
        raise StateError(
            f"{where} is given with {list(names)}{told}; columns of splits are {sorted(_COLUMNS)}, and 'id' has to be there"
        )
