"""Files of a source as state knows them: by their paths, spelt as the source spells its own."""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Iterable
from pathlib import Path

from penstock.connectors.file_paths import normal_path
from penstock.connectors.globs import fixed_part
from penstock.connectors.source import PART_OF
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.rows.column_values import short_repr
from penstock.state_tables.source_positions import check_once
from penstock.storage.codec import StateError
from penstock.storage.open_store import is_s3

_log = logging.getLogger("penstock")


def path_of_files(
    noted: graph_pb2.FileSource,
    job: graph_pb2.FileSource,
    splits: Iterable[checkpoint_pb2.SplitSnapshot],
) -> str:
    """How a source shall spell its path that goes on with splits.

    Args:
        noted: what the state says of the source.
        job: what it is in the job that is to be started.
        splits: that it is given.
    """
    if noted.path and normal_path(noted.path) == job.path:
        return noted.path
    given = fixed_part(job.path_as_given)
    return job.path_as_given if any(_below(given, one.id) for one in splits) else job.path


def spell_as(path: str, splits: Iterable[checkpoint_pb2.SplitSnapshot]) -> None:
    """Gives splits the ids by which a source of this path knows them."""
    spelt, normal = fixed_part(path), normal_path(fixed_part(path))
    for split in splits:
        file, separator, part = split.id.partition(PART_OF)
        if not file.startswith("/"):
            continue
        whole = normal_path(file)
        if _below(normal, whole):
            file = f"{spelt.rstrip('/')}/{whole.removeprefix(normal).lstrip('/')}".rstrip("/")
        elif not split.payload:  # what it was found by spells it, too
            file = whole
        split.id = f"{file or '/'}{separator}{part}"


def check_files(
    path: str,
    splits: Iterable[checkpoint_pb2.SplitSnapshot],
    where: str,
    *,
    read: Container[str] = (),
) -> None:
    """Checks that splits are files that a source of this path finds.

    Args:
        path: "" = it is not known.
        where: the source, for messages.
        read: what the source has read, under whatever path it had then.

    Raises:
        StateError: one is none, or is there twice.
    """
    splits = list(splits)
    check_once(splits, where)
    gone = []
    for split in splits:
        file = split.id.partition(PART_OF)[0]
        is_read = split.done and split.id in read
        problem = "" if is_read else _problem(path, file, split)
        if problem:
            raise StateError(f"{where}: {split.id!r} {problem}")
        if not is_s3(file) and not Path(file).exists():
            gone.append(file)
    if gone:
        _log.warning(
            "%s: %d of %d files are not there, as %s: one that is misspelt is read from its start",
            where,
            len(gone),
            len(splits),
            gone[0],
        )


def _problem(path: str, file: str, split: checkpoint_pb2.SplitSnapshot) -> str:
    """What keeps a split from being one of a file; "" = nothing does."""
    if not is_s3(file) and not file.startswith("/"):
        return "is no whole path, by which files are known: give what ps.files_done(path) gives"
    if file.endswith("/") or (not is_s3(file) and Path(file).is_dir()):
        return "is a directory: give its files, as ps.files_done(path) does"
    if not split.done and not split.payload:
        return (
            "is not done, and has no payload, which says how the file was found: leave it out to have it read from its "
            "start, or give the row that open_state gives of it"
        )
    if split.payload and _found_as(split.payload) != file:
        return f"has the payload of another split ({short_repr(split.payload)}): give the row that open_state gives of it"
    if path and split.done and not _below(fixed_part(path), file):
        return f"is not in {path}, which the source reads: name the files that are, or leave it out"
    return ""


def _found_as(payload: bytes) -> object:
    """The path in what a file was found by."""
    try:
        found = json.loads(payload)
    except ValueError:
        return None
    return found.get("path") if isinstance(found, dict) else None


def _below(path: str, file: str) -> bool:
    """Whether a file is this, or below it, as it is spelt."""
    return bool(path) and (file == path or file.startswith(f"{path.rstrip('/')}/"))
