"""Files of a source as state knows them: by their paths, spelt as the source spells its own."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.connectors.file_paths import normal_path
from penstock.connectors.globs import has_wildcard
from penstock.connectors.source import PART_OF
from penstock.pb import checkpoint_pb2, graph_pb2


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
    given = _fixed(job.path_as_given)
    return job.path_as_given if any(_below(given, one.id) for one in splits) else job.path


def spell_as(path: str, splits: Iterable[checkpoint_pb2.SplitSnapshot]) -> None:
    """Gives splits the ids by which a source of this path knows them."""
    spelt, normal = _fixed(path), normal_path(_fixed(path))
    for split in splits:
        file, separator, part = split.id.partition(PART_OF)
        if not file.startswith("/") or _below(spelt, file):
            continue
        file = normal_path(file)
        if spelt != normal and _below(normal, file):
            file = spelt + file.removeprefix(normal)
        split.id = f"{file}{separator}{part}"


def _fixed(path: str) -> str:
    """The part of a path that is in front of wildcards."""
    kept = []
    for part in path.split("/"):
        if has_wildcard(part):
            break
        kept.append(part)
    return "/".join(kept)


def _below(path: str, file: str) -> bool:
    """Whether a file is this, or below it, as it is spelt."""
    return bool(path) and (file == path or file.startswith(f"{path.rstrip('/')}/"))
