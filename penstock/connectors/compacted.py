"""Directories whose small files have been merged into larger ones: which of them count, for whoever reads.

A directory with files of sinks may have a hidden one, ``_compacted``. The *manifest* in it names for each merged
file those that it *replaces*:

- a merged file that the manifest names and that is there counts, and what it replaces does not, there or not;
- one that is not there yet counts for nothing: what it is to replace is all there still.

So the moment at which a merged file appears under its name is the moment at which it replaces the others, at once. What
it replaces is moved into the hidden directory afterwards, for those who found it before; they look there, too.

The names are kept for as long as the merged file is there: a job that has read some of the files goes on with the
others, one that has read them all does not read the merged one, however late it comes, and who commits one of them again
learns that this is done. But once the replaced files are removed, few will ask: their names go into an *archive*, a file
beside the manifest that never changes, which a process reads once. So the manifest, which is read for each listing,
grows with what is there, and not with all that was ever merged.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final

from penstock.connectors.objects import as_os_errors
from penstock.errors import StoreCorrupt
from penstock.storage.open_store import is_s3, open_bucket

HIDDEN: Final = "_compacted"
MANIFEST: Final = f"{HIDDEN}/manifest"
_FORMAT: Final = 1
_FORMAT_WITH_ARCHIVES: Final = 2
"""Versions that know of no archives refuse it."""
_ARCHIVES_CACHED: Final = 32
_READ_TRIES: Final = 8
"""An archive may have become part of another one since the manifest was read."""


class ManifestDamagedError(StoreCorrupt):
    """What is in the place of a manifest is none; the message names it."""


@dataclass(frozen=True, slots=True)
class ReplacedFile:
    """A file of which the rows are in a merged one."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class MergedFile:
    """A file that holds the rows of others.

    Attributes:
        name: in the directory.
        replaces: in the order of their rows.
        merged_at_ms: when, since the epoch.
        archive: where the names are, in the hidden directory, and no replaced file is left; "" = in the manifest.
    """

    name: str
    replaces: tuple[ReplacedFile, ...]
    merged_at_ms: int
    archive: str = ""

    @property
    def replaced_names(self) -> frozenset[str]:
        """Names of the files that do not count where it is there."""
        return frozenset(file.name for file in self.replaces)


@dataclass(frozen=True, slots=True)
class CompactionManifest:
    """What has become of the files of one directory.

    Attributes:
        run: the compaction that began last: no other one adds to it.
        files: the merged files, the oldest first.
    """

    run: str = ""
    files: tuple[MergedFile, ...] = ()

    def encode(self) -> bytes:
        """As the content of the manifest; names that are in archives are left out."""
        files = [asdict(replace(one, replaces=()) if one.archive else one) for one in self.files]
        if any(one.archive for one in self.files):
            return json.dumps(
                {"format": _FORMAT_WITH_ARCHIVES, "run": self.run, "files": files}
            ).encode()
        for one in files:
            del one["archive"]
        return json.dumps({"format": _FORMAT, "run": self.run, "files": files}).encode()

    @staticmethod
    def decode(content: bytes, path: str) -> CompactionManifest:
        """Inverse of ``encode``; what is in archives is not read (``with_archived``).

        Raises:
            ManifestDamagedError: it is none, or one of a later version.
        """
        try:
            fields = json.loads(content)
            if fields["format"] not in (_FORMAT, _FORMAT_WITH_ARCHIVES):
                raise ManifestDamagedError(
                    f"{path}: has format {fields['format']!r}, known are {_FORMAT} and {_FORMAT_WITH_ARCHIVES}: it was "
                    "written by another version"
                )
            files = [
                MergedFile(
                    one["name"],
                    tuple(ReplacedFile(**replaced) for replaced in one["replaces"]),
                    one["merged_at_ms"],
                    one.get("archive", ""),
                )
                for one in fields["files"]
            ]
            return CompactionManifest(fields["run"], tuple(files))
        except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ManifestDamagedError(
                f"{path}: is damaged, so which files count cannot be told: {error!r}"
            ) from error

    @property
    def replaced_names(self) -> frozenset[str]:
        """Names of all files that have been, or are to be, replaced."""
        return frozenset(name for file in self.files for name in file.replaced_names)

    @property
    def archives(self) -> frozenset[str]:
        """Names of the archives that count."""
        return frozenset(file.archive for file in self.files if file.archive)

    def with_archived(self, archives: Mapping[str, ArchivedNames], path: str) -> CompactionManifest:
        """With what is in the archives, which are those of ``archives``.

        Raises:
            ManifestDamagedError: an archive has not what it should have.
        """
        try:
            files = [
                replace(file, replaces=archives[file.archive][file.name]) if file.archive else file
                for file in self.files
            ]
        except KeyError as error:
            raise ManifestDamagedError(
                f"{path}: its archives lack what {error} has replaced: they are damaged"
            ) from error
        return replace(self, files=tuple(files))


ArchivedNames = Mapping[str, tuple[ReplacedFile, ...]]
"""By merged file what it replaces."""


def encode_archive(names: ArchivedNames) -> bytes:
    """As the content of an archive."""
    lists = {
        merged: [[one.name, one.size_bytes] for one in files] for merged, files in names.items()
    }
    return gzip.compress(json.dumps(lists).encode(), mtime=0)


def decode_archive(content: bytes, path: str) -> ArchivedNames:
    """Inverse of ``encode_archive``.

    Raises:
        ManifestDamagedError: it is none.
    """
    try:
        lists = json.loads(gzip.decompress(content))
        return {
            merged: tuple(ReplacedFile(name, size) for name, size in files)
            for merged, files in lists.items()
        }
    except (OSError, EOFError, zlib.error, ValueError, TypeError, AttributeError) as error:
        raise ManifestDamagedError(
            f"{path}: is damaged, so which files count cannot be told: {error!r}"
        ) from error


def replaced_place(path: str) -> str:
    """Where a file is found that has been replaced.

    Args:
        path: as it was; local, of an object, or relative to a store.
    """
    directory, slash, name = path.rpartition("/")
    return f"{directory}{slash}{HIDDEN}/{name}.replaced"


def read_manifest(directory: str) -> CompactionManifest | None:
    """The manifest of a directory; None = nothing of it was ever merged.

    Args:
        directory: a local path, or ``s3://bucket/prefix``.

    Raises:
        OSError: it cannot be read.
        ManifestDamagedError: it is none.
    """
    path = f"{directory.rstrip('/')}/{MANIFEST}"
    for tries_left in reversed(range(_READ_TRIES)):
        try:
            content = _content(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        manifest = CompactionManifest.decode(content, path)
        try:
            return with_archives(manifest, path, _archive)
        except FileNotFoundError:
            if not tries_left:
                raise
    raise AssertionError("the last try returns or raises")


def with_archives(
    manifest: CompactionManifest, path: str, read: Callable[[str], ArchivedNames]
) -> CompactionManifest:
    """The manifest with what is in its archives.

    Args:
        read: reads an archive, by its path.

    Raises:
        ManifestDamagedError: an archive is none.
        OSError, StreamError: ``read`` fails.
    """
    if not manifest.archives:
        return manifest
    directory = path.rpartition("/")[0]
    archives = {name: read(f"{directory}/{name}") for name in manifest.archives}
    return manifest.with_archived(archives, path)


@lru_cache(_ARCHIVES_CACHED)
def _archive(path: str) -> ArchivedNames:
    """One archive: it never changes, and its name is never given to another."""
    return decode_archive(_content(path), path)


def _content(path: str) -> bytes:
    """All of a file or an object.

    Raises:
        OSError: it cannot be read, or is not there.
    """
    if not is_s3(path):
        return Path(path).read_bytes()
    bucket, key = open_bucket(path)
    with as_os_errors(path):
        found = bucket.find(key)
        if found is None:
            raise FileNotFoundError(f"{path} is not there")
        return bytes(bucket.read(found, 0, found.size_bytes))


def in_effect(
    names: Collection[str], manifest: CompactionManifest
) -> tuple[list[MergedFile], bool]:
    """Which merged files count in a listing that was made before the manifest was read.

    Args:
        names: of the files of the directory that were listed.

    Returns:
        Those, and whether that is sure: files that are moved while they are listed may be seen under no name.
    """
    effective, is_sure = [], True
    for file in manifest.files:
        if file.name in names:
            effective.append(file)
        elif not file.archive and not file.replaced_names.issubset(names):
            is_sure = False
    return effective, is_sure


class ReplacedFiles:
    """Answers for many files whether they have been replaced; reads the manifest of each directory once."""

    def __init__(self) -> None:
        self._names: dict[str, frozenset[str]] = {}

    def among(self, paths: Iterable[str]) -> frozenset[str]:
        """Those of the paths whose rows are in a merged file.

        Raises:
            OSError: a manifest cannot be read.
            ManifestDamagedError: it is none.
        """
        return frozenset(path for path in paths if self._holds(path))

    def _holds(self, path: str) -> bool:
        directory, _, name = path.rpartition("/")
        if directory not in self._names:
            manifest = read_manifest(directory)
            self._names[directory] = frozenset() if manifest is None else manifest.replaced_names
        return name in self._names[directory]
