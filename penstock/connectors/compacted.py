"""Directories whose small files have been merged into larger ones: which of them count, for whoever reads.

A directory with files of sinks may have a hidden one, ``_compacted``. The *manifest* in it names for each merged
file those that it *replaces*:

- a merged file that the manifest names and that is there counts, and what it replaces does not, there or not;
- one that is not there yet counts for nothing: what it is to replace is all there still.

So the moment at which a merged file appears under its name is the moment at which it replaces the others, at once. What
it replaces is moved into the hidden directory afterwards, for those who found it before; they look there, too.

The manifest keeps the names for as long as the merged file is there: a job that has read some of the files goes on
with the others, and who commits one of them again learns that this is done.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from penstock.connectors.objects import as_os_errors
from penstock.errors import StoreCorrupt
from penstock.storage.open_store import is_s3, open_bucket

HIDDEN: Final = "_compacted"
MANIFEST: Final = f"{HIDDEN}/manifest"
_FORMAT: Final = 1


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
    """

    name: str
    replaces: tuple[ReplacedFile, ...]
    merged_at_ms: int

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
        """As the content of the manifest."""
        return json.dumps({"format": _FORMAT} | asdict(self)).encode()

    @staticmethod
    def decode(content: bytes, path: str) -> CompactionManifest:
        """Inverse of ``encode``.

        Args:
            path: for messages.

        Raises:
            ManifestDamagedError: it is none, or one of a later version.
        """
        try:
            fields = json.loads(content)
            if fields["format"] != _FORMAT:
                raise ManifestDamagedError(
                    f"{path}: has format {fields['format']!r}, known is {_FORMAT}: it was written by another version"
                )
            files = [
                MergedFile(
                    one["name"],
                    tuple(ReplacedFile(**replaced) for replaced in one["replaces"]),
                    one["merged_at_ms"],
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
    if not is_s3(directory):
        try:
            content = Path(path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return CompactionManifest.decode(content, path)
    bucket, key = open_bucket(path)
    with as_os_errors(path):
        found = bucket.find(key)
        if found is None:
            return None
        return CompactionManifest.decode(bucket.read(found, 0, found.size_bytes), path)


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
        elif not file.replaced_names.issubset(names):
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
