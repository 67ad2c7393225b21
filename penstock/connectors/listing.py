"""Which files a path names, and what their directories say about them.

A path is a file, a directory (read recursively) or a glob. Names that start with ``_`` or ``.`` are
never taken below a directory or through a wildcard: writers keep what is not committed under such
names. Directories called ``key=value`` are partition columns of the files below them (Hive's layout).
The client lists to find the schema, subtask 0 of the source lists to find the splits: both use this.
"""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
"""Directory value that stands for null."""

_WILDCARDS = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class ListedFile:
    """One file: absolute path, size, the time of its last change and its inode."""

    path: str
    size_bytes: int
    modified_ns: int
    inode: int = 0


def is_glob(path: str) -> bool:
    """Whether the path is a pattern: it has a wildcard and is not itself a file or directory."""
    return not _WILDCARDS.isdisjoint(path) and not Path(path).exists()


def is_hidden(name: str) -> bool:
    """Whether readers skip a file or directory of this name."""
    return name.startswith(("_", "."))


def list_files(path: str) -> list[ListedFile]:
    """All files that the path names, sorted by path.

    Args:
        path: absolute path of a file or directory, or a glob.

    Raises:
        FileNotFoundError: a path that is no glob does not exist.
        OSError: a directory cannot be read.
    """
    if is_glob(path):
        found: list[ListedFile] = []
        # Path.glob would need the part before the first wildcard; glob keeps hidden names out.
        for match in sorted(glob.glob(path, recursive=True)):  # noqa: PTH207
            if not is_hidden(Path(match).name):
                found.extend(_list_tree(match) if Path(match).is_dir() else _stat(match))
        return sorted(set(found), key=lambda file: file.path)
    if Path(path).is_dir():
        return sorted(_list_tree(path), key=lambda file: file.path)
    status = Path(path).stat()
    return [ListedFile(path, status.st_size, status.st_mtime_ns, status.st_ino)]


def _list_tree(directory: str) -> list[ListedFile]:
    found: list[ListedFile] = []
    pending = [directory]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if is_hidden(entry.name):
                    continue
                if entry.is_dir():
                    pending.append(entry.path)
                else:
                    found.extend(_stat(entry.path))
    return found


def _stat(path: str) -> list[ListedFile]:
    """The file, or nothing where it went away since it was listed (a writer's rename)."""
    try:
        status = Path(path).stat()
    except FileNotFoundError:
        return []
    return [ListedFile(path, status.st_size, status.st_mtime_ns, status.st_ino)]


def partition_values(base: str, path: str) -> dict[str, str | None]:
    """The ``key=value`` directories between a directory and a file below it; null is None."""
    try:
        relative = Path(path).relative_to(base)
    except ValueError:
        return {}
    values: dict[str, str | None] = {}
    for part in relative.parts[:-1]:
        key, separator, value = part.partition("=")
        if separator and key:
            values[unquote(key)] = None if value == HIVE_NULL else unquote(value)
    return values
