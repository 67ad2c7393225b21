"""Merges the small files that sinks have written into a directory, while others read it and write to it.

In each directory of files, one after the other:

1. What earlier compactions have not ended is ended: steps 5 and 6 of theirs.
2. The manifest gets the name of this run. One that began before adds nothing to it any more: it is refused at its step 4.
3. Merged files are written under hidden names.
4. The manifest gets their names, and those of the files that they replace; only if nobody has changed it since step 2.
5. Each merged file gets its name: from here on it counts in the place of the others (see ``compacted``).
6. These are moved into the hidden directory, and stay there for a while, for those who found them before.
7. When they are removed, their names go from the manifest into an archive, many at a time: it is written, then the manifest names it; only
   if nobody has changed it since step 2. What was in archives before goes with them, so that these are few.

Killed at any point, it leaves a directory that reads as before or as afterwards, and the next run goes on from there.

Only files that a sink has committed are touched, by their names, and none of which the sink still has something under a hidden name:
that one a checkpoint or a savepoint may still commit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Final

from penstock.connectors.compacted import (
    HIDDEN,
    MANIFEST,
    ArchivedNames,
    CompactionManifest,
    MergedFile,
    ReplacedFile,
    decode_archive,
    encode_archive,
    replaced_place,
    with_archives,
)
from penstock.connectors.merged_files import NamedContent, alike, merge
from penstock.errors import StoreNotFound, StreamError
from penstock.storage.object_store import ObjectInfo, ObjectStore, delete_all
from penstock.storage.open_store import is_s3, open_bucket, open_store
from penstock.storage.settled_swap import settled_swap

TARGET_BYTES: Final = 64 << 20
KEEP_MS: Final = 7 * 24 * 3600 * 1000
ARCHIVED_NAMES_MIN: Final = 1000
"""So many names of removed files may stay in the manifest."""
_CLAIM_TRIES: Final = 8
_ARCHIVE: Final = ".names"

_FINAL: Final = re.compile(r"part-\d+-\d+-\d+-[0-9a-z]+-[0-9a-f]+\.(?P<form>parquet|csv|json)")
_PENDING: Final = re.compile(
    r"(?:\.held-\d+-|\.)?part-(?P<tag>[0-9a-z]+-[0-9a-f]+)-(?P<place>\d+-\d+-\d+)"
    r"\.(?P<form>parquet|csv|json)(?:\.inprogress|\.pending)?"
)


class CompactionSupersededError(StreamError):
    """Another compaction of the directory has begun since; nothing of this one counts."""


@dataclass(slots=True)
class CompactedDirectory:
    """What was done in one directory.

    Attributes:
        directory: below the one that was named, "" = that itself.
        merged: how many files have become fewer.
        into: how many those are.
        bytes: of the files that were merged.
        ended: merged files of a compaction before, which had not come that far.
        removed: files that had been replaced long enough ago.
    """

    directory: str
    merged: int = 0
    into: int = 0
    bytes: int = 0
    ended: int = 0
    removed: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """How a compaction works.

    Attributes:
        now_ms: since the epoch.
        target_bytes: size that merged files get; files of half of it are left as they are.
        keep_ms: for how long replaced files stay.
        archived_names_min: so many names of removed files go into an archive at once.
    """

    run: str
    now_ms: int
    target_bytes: int = TARGET_BYTES
    keep_ms: int = KEEP_MS
    archived_names_min: int = ARCHIVED_NAMES_MIN


def compact(directory: str, plan: Plan) -> list[CompactedDirectory]:
    """Compacts a directory and all below it; returns where something was done.

    Args:
        directory: a local path, or ``s3://bucket/prefix``.

    Raises:
        CompactionSupersededError: another compaction has begun since.
        JobRejected: a file is not what its name says.
        StoreTransient: something cannot be read or written now.
    """
    # What jobs have written is the user's to give away.
    store = open_store(directory, is_private=False)
    found: dict[str, _Found] = {}
    for info in store.list(""):
        above, _, name = info.path.rpartition("/")
        parts = above.split("/")
        is_hidden = parts[-1] == HIDDEN
        visible = parts[:-1] if is_hidden else parts
        if not any(part.startswith("_") for part in visible):
            place = found.setdefault("/".join(visible), _Found())
            (place.hidden if is_hidden else place.files)[name] = info
    uncommitted = uncommitted_names(
        directory
    )  # later than the listing: what is in neither is committed
    done = []
    for below, place in sorted(found.items()):
        one = _DirectoryCompaction(store, below, place, plan).run(uncommitted)
        if one.merged or one.ended or one.removed:
            done.append(one)
    return done


@dataclass(frozen=True, slots=True)
class _Found:
    """Objects of one directory by name, and those of its hidden one."""

    files: dict[str, ObjectInfo] = field(default_factory=dict)
    hidden: dict[str, ObjectInfo] = field(default_factory=dict)


def uncommitted_names(directory: str) -> frozenset[str]:
    """Final names of the files of which sinks have something under a hidden name, for this directory or one below.

    Raises:
        OSError: it cannot be looked at.
        StoreTransient: the same, on S3.
    """
    pending, held = (_hidden_objects if is_s3(directory) else _hidden_files)(directory)
    matches = filter(None, map(_PENDING.fullmatch, pending))
    finals = (f"part-{one['place']}-{one['tag']}.{one['form']}" for one in matches)
    return frozenset(finals) | frozenset(held)


def _hidden_files(directory: str) -> tuple[list[str], list[str]]:
    """Names as of what is pending, and final names."""
    return [
        path.name for glob in (".part-*", ".held-*") for path in Path(directory).rglob(glob)
    ], []


def _hidden_objects(directory: str) -> tuple[list[str], list[str]]:
    """Of a sink that writes there, or further above: its hidden objects are all below its own prefix."""
    bucket, prefix = open_bucket(directory.rstrip("/"))
    parts = prefix.split("/")
    found: dict[str, list[str]] = {"_pending": [], "_held": []}
    for end in range(len(parts), 0, -1):
        for hidden, names in found.items():
            below = bucket.below(f"{'/'.join(parts[:end])}/{hidden}/".lstrip("/"))
            names += [one.key.rpartition("/")[2] for one in below]
    return found["_pending"], found["_held"]


class _DirectoryCompaction:
    """Compacts the files of one directory."""

    def __init__(self, store: ObjectStore, below: str, found: _Found, plan: Plan) -> None:
        self._store = store
        self._prefix = f"{below}/" if below else ""
        self._found = found
        self._plan = plan
        self._done = CompactedDirectory(below)
        self._numbers = count()

    def run(self, uncommitted: frozenset[str]) -> CompactedDirectory:
        """Does all that there is to do."""
        _, manifest = self._read()
        for file in manifest.files:
            self._done.ended += self._end(file)
        self._remove_old(manifest)
        if not self._bins(manifest, uncommitted) and not self._to_archive(manifest):
            return self._done
        content, manifest = self._claim()
        self._sweep(manifest)
        content, manifest = self._archive(content, manifest)
        written = [
            file for names in self._bins(manifest, uncommitted) for file in self._write(names)
        ]
        if not written:
            return self._done
        files = tuple(one for one in manifest.files if one.name in self._found.files)
        added = replace(manifest, files=(*files, *written))
        if not self._swap(content, added):
            raise self._superseded([_new(file.name) for file in written])
        for file in written:
            self._end(file)
            self._done.merged += len(file.replaces)
            self._done.bytes += sum(one.size_bytes for one in file.replaces)
        self._done.into = len(written)
        self._remove_old(added)
        return self._done

    def _superseded(self, left: Iterable[str]) -> CompactionSupersededError:
        """The error, when what this one has written is removed."""
        delete_all(self._store, map(self._at, left))
        return CompactionSupersededError(
            f"{self._prefix or 'the directory'}: another compaction has begun since; nothing of this one counts. "
            "Compact a directory from one place only"
        )

    def _at(self, name: str) -> str:
        return f"{self._prefix}{name}"

    # -- the manifest

    def _read(self) -> tuple[bytes | None, CompactionManifest]:
        path = self._at(MANIFEST)
        for tries_left in reversed(range(_CLAIM_TRIES)):
            try:
                content = self._store.get(path)
            except StoreNotFound:
                return None, CompactionManifest()
            manifest = CompactionManifest.decode(content, path)
            try:
                return content, with_archives(manifest, path, self._archived)
            except StoreNotFound:  # the archive has become part of another one since
                if not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    def _archived(self, path: str) -> ArchivedNames:
        return decode_archive(self._store.get(path), path)

    def _claim(self) -> tuple[bytes, CompactionManifest]:
        for _ in range(_CLAIM_TRIES):
            before, manifest = self._read()
            claimed = replace(manifest, run=self._plan.run)
            if self._store.compare_and_swap(self._at(MANIFEST), before, claimed.encode()):
                # What another one had added by then may not have come to its end.
                for file in claimed.files:
                    self._end(file)
                return claimed.encode(), claimed
        raise CompactionSupersededError(
            f"{self._at(MANIFEST)}: other compactions change it all the time; try again later"
        )

    def _swap(self, expected: bytes, manifest: CompactionManifest) -> bool:
        return settled_swap(self._store, self._at(MANIFEST), expected, manifest.encode())

    # -- names of files that are gone

    def _to_archive(self, manifest: CompactionManifest) -> list[MergedFile]:
        """Merged files whose replaced ones are all removed, where they have names enough."""
        settled = [
            file
            for file in manifest.files
            if not file.archive
            and file.name in self._found.files
            and file.merged_at_ms <= self._plan.now_ms - self._plan.keep_ms
            and not any(
                one.name in self._found.files
                or _hidden(replaced_place(one.name)) in self._found.hidden
                for one in file.replaces
            )
        ]
        names = sum(len(file.replaces) for file in settled)
        return settled if names >= self._plan.archived_names_min else []

    def _archive(
        self, content: bytes, manifest: CompactionManifest
    ) -> tuple[bytes, CompactionManifest]:
        """Moves names into an archive, and what smaller archives have with them."""
        archived = {file.name: file for file in self._to_archive(manifest)}
        if not archived:
            return content, manifest
        names = sum(len(file.replaces) for file in archived.values())
        sizes = Counter(file.archive for file in manifest.files for _ in file.replaces)
        for older, size in sorted(sizes.items(), key=lambda one: one[1]):
            if older and size <= 2 * names:
                archived |= {one.name: one for one in manifest.files if one.archive == older}
                names += size
        name = f"{self._plan.run}{_ARCHIVE}"
        lists = {one.name: one.replaces for one in archived.values()}
        self._store.put(self._at(f"{HIDDEN}/{name}"), [encode_archive(lists)])
        changed = replace(
            manifest,
            files=tuple(
                replace(one, archive=name) if one.name in archived else one
                for one in manifest.files
                if one.name in self._found.files or not one.archive
            ),
        )
        if not self._swap(content, changed):
            raise self._superseded([f"{HIDDEN}/{name}"])
        unnamed = manifest.archives - changed.archives
        delete_all(self._store, [self._at(f"{HIDDEN}/{one}") for one in sorted(unnamed)])
        return changed.encode(), changed

    # -- writing

    def _bins(self, manifest: CompactionManifest, uncommitted: frozenset[str]) -> list[list[str]]:
        replaced = manifest.replaced_names
        files = [
            info
            for name, info in self._found.files.items()
            if _FINAL.fullmatch(name) and name not in replaced and name not in uncommitted
        ]
        return bins(files, self._plan.target_bytes)

    def _write(self, names: Sequence[str]) -> Iterator[MergedFile]:
        """Writes what files are merged into, under hidden names; files that went away meanwhile are left out."""
        contents = []
        for name in names:
            try:
                contents.append(NamedContent(name, self._store.get(self._at(name))))
            except StoreNotFound:
                continue
        form = names[0].rpartition(".")[2]
        for group in alike(form, contents):
            if len(group) < 2:
                continue
            merged = f"part-compacted-{self._plan.run}-{next(self._numbers)}.{form}"
            self._store.put(self._at(_new(merged)), [merge(form, group)])
            replaces = tuple(ReplacedFile(one.name, len(one.content)) for one in group)
            yield MergedFile(merged, replaces, self._plan.now_ms)

    def _sweep(self, manifest: CompactionManifest) -> None:
        """Removes what no manifest will ever name, and what was replaced by files that are gone."""
        named = {_hidden(_new(file.name)) for file in manifest.files}
        named |= {_hidden(replaced_place(name)) for name in manifest.replaced_names}
        named |= manifest.archives
        endings = (".new", ".replaced", _ARCHIVE)
        left = [name for name in self._found.hidden if name.endswith(endings) and name not in named]
        delete_all(self._store, [self._at(f"{HIDDEN}/{name}") for name in left])

    # -- what can be repeated from any point of it, by anybody

    def _end(self, file: MergedFile) -> bool:
        """Gives a merged file its name and moves what it replaces; returns whether there was something to do."""
        if (
            file.archive
        ):  # nothing is left to do; another compaction may have made all of it since the listing
            final = self._at(file.name)
            if file.name not in self._found.files and final in self._store.sizes([final]):
                self._found.files[file.name] = ObjectInfo(final, 0, self._plan.now_ms)
            return False
        new, final = self._at(_new(file.name)), self._at(file.name)
        is_there = file.name in self._found.files
        if not is_there:
            if final not in self._store.sizes([final]) and not self._copied({new: final}):
                return False  # somebody has removed it since
            self._found.files[file.name] = ObjectInfo(final, 0, self._plan.now_ms)
        left = [one.name for one in file.replaces if one.name in self._found.files]
        self._move(left)
        is_left = _hidden(_new(file.name)) in self._found.hidden
        if not is_there or is_left:
            self._store.delete(new)
        return not is_there or bool(left) or is_left

    def _move(self, names: Sequence[str]) -> None:
        """Replaced files go where those find them who found them before."""
        places = {self._at(name): replaced_place(self._at(name)) for name in names}
        try:
            self._store.copy_from(self._store, places)
        except StoreNotFound:  # another compaction is at it, too
            for path, place in places.items():
                self._copied({path: place})
        delete_all(self._store, places)
        for name in names:
            self._found.hidden[_hidden(replaced_place(name))] = self._found.files.pop(name)

    def _copied(self, paths: dict[str, str]) -> bool:
        """Copies an object, unless it is gone and its copy is there; returns whether its copy is there."""
        try:
            self._store.copy_from(self._store, paths)
        except StoreNotFound:
            return self._store.sizes(paths.values()).keys() == set(paths.values())
        return True

    def _remove_old(self, manifest: CompactionManifest) -> None:
        """Removes replaced files that have been kept long enough."""
        oldest_ms = self._plan.now_ms - self._plan.keep_ms
        places = {
            _hidden(replaced_place(one.name))
            for file in manifest.files
            if not file.archive and file.merged_at_ms <= oldest_ms
            for one in file.replaces
        }
        old = [name for name in places if name in self._found.hidden]
        delete_all(self._store, [self._at(f"{HIDDEN}/{name}") for name in old])
        for name in old:
            del self._found.hidden[name]
        self._done.removed += len(old)


def _new(name: str) -> str:
    return f"{HIDDEN}/{name}.new"


def _hidden(path: str) -> str:
    """The name in the hidden directory of what lies there."""
    return path.removeprefix(f"{HIDDEN}/")


def bins(files: Iterable[ObjectInfo], target_bytes: int) -> list[list[str]]:
    """Which files are merged together, by name: of one format, the oldest first, up to a size.

    Example: large files stay, and what has nothing to be merged with.
        >>> files = [ObjectInfo(f"{n}.csv", size, n) for n, size in enumerate((30, 90, 40, 20, 30))]
        >>> bins(files, target_bytes=100)
        [['0.csv', '2.csv', '3.csv', '4.csv']]
    """
    small = [info for info in files if info.size_bytes < target_bytes // 2]
    found: list[list[str]] = []
    for form in sorted({info.path.rpartition(".")[2] for info in small}):
        own = [info for info in small if info.path.endswith(f".{form}")]
        size_bytes = target_bytes
        for info in sorted(own, key=lambda info: (info.modified_at_ms, info.path)):
            if size_bytes >= target_bytes:
                found.append([])
                size_bytes = 0
            found[-1].append(info.path.rpartition("/")[2])
            size_bytes += info.size_bytes
    return [names for names in found if len(names) > 1]
