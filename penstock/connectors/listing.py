"""Which files a path names, and what their directories say about them.

A path is a file, a directory (read recursively) or a glob. Names that start with ``_`` or ``.`` are
never taken below a directory or through a wildcard: writers keep what is not committed under such
names. Directories called ``key=value`` are partition columns of the files below them (Hive's layout).
The client lists to find the schema, subtask 0 of the source lists to find the splits: both use this.

Of files that have been merged into larger ones the merged ones are taken (see ``compacted``).

Where the path is on S3, prefixes are its directories (see ``objects``).

Links are followed. One that leads round in a circle (to itself, or to a directory above it) has no files of its
own: it is left out, and whoever asks is told of it. What is no file (a named pipe, a socket, a device) and
what has a name that is not UTF-8 is refused by name.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

from penstock.connectors.compacted import (
    HIDDEN,
    MANIFEST,
    ManifestDamagedError,
    in_effect,
    read_manifest,
)
from penstock.connectors.globs import glob_matches, has_wildcard, is_circle, is_hidden
from penstock.connectors.objects import is_object, objects_of
from penstock.storage.open_store import is_s3, open_bucket

_NS_PER_MS = 1_000_000
_LIST_TRIES = 8
"""A listing during which files were merged is made again."""

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
"""Directory value that stands for null."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """One file: absolute path, size, when its text and when anything of it last changed, its inode; of an
    object its ETag, in place of the last two; of one that others were merged into those, as they were: (path, size)."""

    path: str
    size_bytes: int
    modified_ns: int
    inode: int = 0
    changed_ns: int = 0
    etag: str = ""
    replaces: tuple[tuple[str, int], ...] = ()


def is_glob(path: str) -> bool:
    """Whether the path is a pattern: it has a wildcard and is not itself a file or directory."""
    if is_s3(path):
        return has_wildcard(path) and not is_object(path)
    return has_wildcard(path) and not Path(path).exists()


def is_file(path: str) -> bool:
    """Whether it is one file, and no pattern or directory."""
    return is_object(path) if is_s3(path) else Path(path).is_file()


def is_directory(path: str) -> bool:
    """Whether files are looked for below it; on S3 that is said of every prefix, also where nothing is below."""
    if is_s3(path):
        return not has_wildcard(path) and not is_object(path)
    return Path(path).is_dir()


class EntryRefusedError(ValueError):
    """Something a path names that is no file that can be read; the message names it and says what to do."""


def list_files(path: str, on_circle: Callable[[str], None] = lambda _: None) -> list[ListedFile]:
    """All files that the path names, sorted by path.

    Args:
        path: absolute path of a file or directory, or a glob.
        on_circle: told of every link that leads round in a circle.

    Raises:
        FileNotFoundError: a path that is no glob does not exist.
        OSError: a directory cannot be read.
        EntryRefusedError: an entry is no file, or has a name that is not UTF-8.
    """
    _check_name(path)
    found: list[ListedFile] = []
    for _ in range(_LIST_TRIES):
        before = found
        found, directories = _list(path, on_circle)
        try:
            found, is_sure = _without_replaced(found, directories)
        except ManifestDamagedError as error:
            raise EntryRefusedError(str(error)) from error
        if is_sure or found == before:
            break
    return found


def _list(path: str, on_circle: Callable[[str], None]) -> tuple[list[ListedFile], Collection[str]]:
    """The files, and the directories in which files may have been merged."""
    if is_s3(path):
        return _list_objects(path)
    if is_glob(path):
        return _list_glob(path, on_circle)
    if Path(path).is_dir():
        found, directories = _list_tree(path, on_circle)
        return sorted(found, key=lambda file: file.path), directories
    status = Path(path).stat()
    _check_is_file(path, status)
    return [_listed(path, status)], ()


def _list_glob(
    path: str, on_circle: Callable[[str], None]
) -> tuple[list[ListedFile], Collection[str]]:
    found: set[ListedFile] = set()
    above = str(Path(path).parent)
    directories = {*(glob_matches(above, on_circle) if has_wildcard(above) else (above,))}
    for match in glob_matches(path, on_circle):
        if Path(match).is_dir():
            files, below = _list_tree(match, on_circle)
            directories.update(below)
        else:
            files = _stat(match, on_circle)
        found.update(files)
    return sorted(found, key=lambda file: file.path), directories


def _without_replaced(
    found: list[ListedFile], directories: Collection[str]
) -> tuple[list[ListedFile], bool]:
    """Leaves out the files whose rows are in merged ones; whether it is sure which those are."""
    names: dict[str, set[str]] = {directory: set() for directory in directories}
    for file in found:
        directory, _, name = file.path.rpartition("/")
        if directory in names:
            names[directory].add(name)
    left_out: set[str] = set()
    replaced: dict[str, tuple[tuple[str, int], ...]] = {}
    is_sure = True
    for directory, listed in names.items():
        manifest = read_manifest(directory)
        if manifest is None:
            continue
        effective, is_sure_of_it = in_effect(listed, manifest)
        is_sure = is_sure and is_sure_of_it
        for merged in effective:
            others = tuple((f"{directory}/{one.name}", one.size_bytes) for one in merged.replaces)
            replaced[f"{directory}/{merged.name}"] = others
            left_out.update(path for path, _ in others)
    if not replaced:
        return found, is_sure
    counting = [
        replace(file, replaces=replaced.get(file.path, ()))
        for file in found
        if file.path not in left_out
    ]
    return counting, is_sure


def _list_objects(path: str) -> tuple[list[ListedFile], Collection[str]]:
    bucket, _ = open_bucket(path)
    objects, manifests = objects_of(path, MANIFEST)
    files = [
        ListedFile(
            bucket.uri(found.key),
            found.size_bytes,
            found.modified_at_ms * _NS_PER_MS,
            etag=found.etag,
        )
        for found in objects
    ]
    return files, [bucket.uri(key).removesuffix(f"/{MANIFEST}") for key in manifests]


def _list_tree(
    directory: str, on_circle: Callable[[str], None]
) -> tuple[list[ListedFile], list[str]]:
    """All files below a directory, and the directories in which files have been merged."""
    found: list[ListedFile] = []
    merged: list[str] = []
    pending = [directory]
    while pending:
        place = pending.pop()
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.name == HIDDEN:
                    merged.append(place)
                elif is_hidden(entry.name):
                    continue
                elif entry.is_symlink() and is_circle(entry.path):
                    on_circle(entry.path)
                elif entry.is_dir():
                    pending.append(entry.path)
                else:
                    found.extend(_stat(entry.path, on_circle))
    return found, merged


def _stat(path: str, on_circle: Callable[[str], None]) -> list[ListedFile]:
    """The file, or nothing where it went away since it was listed (a writer's rename)."""
    _check_name(path)
    try:
        status = Path(path).stat()
    except FileNotFoundError:
        return []
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        on_circle(path)
        return []
    _check_is_file(path, status)
    return [_listed(path, status)]


def _listed(path: str, status: os.stat_result) -> ListedFile:
    return ListedFile(
        path, status.st_size, status.st_mtime_ns, status.st_ino, changed_ns=status.st_ctime_ns
    )


def _check_name(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise EntryRefusedError(
            f"{os.fsencode(path)!r}: the name is not valid UTF-8; rename it"
        ) from error


def _check_is_file(path: str, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a directory"}
    kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
    raise EntryRefusedError(
        f"{path}: is {kind}, not a file; move it away, or name the files that are meant"
    )


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
