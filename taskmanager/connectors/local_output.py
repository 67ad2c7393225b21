"""Output in a directory: hidden names in it, renamed at commit."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from typing_extensions import override

from penstock.connectors.compacted import ReplacedFiles, replaced_place
from penstock.connectors.sink import SinkContext
from penstock.storage.private_directories import sync_directory
from taskmanager.connectors.hidden_files import (
    held_files,
    held_path,
    hidden_files,
    output_tag,
    remove_hidden,
)
from taskmanager.connectors.output_place import FileNames, FoundFile, HiddenFile, OutputPlace

_CREATE_TRIES = 10
_READ_BYTES: Final = 1 << 20


class LocalOutput(OutputPlace):
    """A directory of this machine, or one that all machines share."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._made: list[Path] = []
        """Directories in which nothing has been committed yet."""

    @override
    def open(self, context: SinkContext) -> None:
        self._context = context
        self._tag = output_tag(context.job_id, context.operator_uid)
        self._hidden_stem = f".part-{self._tag}-{context.subtask_index}-{context.attempt}"
        self._final_stem = f"part-{context.subtask_index}-{context.attempt}"
        for made in self._make_directory(self._directory):
            sync_directory(made.parent)
        probe = self._directory / f"{self._hidden_stem}.probe"
        probe.touch()
        probe.unlink()

    @override
    def names(self, directory: str, number: int, extension: str) -> FileNames:
        target = self._directory / directory
        stem = f"{self._hidden_stem}-{number}.{extension}"
        final = target / f"{self._final_stem}-{number}-{self._tag}.{extension}"
        depth = len(target.parts) - len(self._directory.parts)
        return FileNames(
            f"{target / stem}.inprogress",
            f"{target / stem}.pending",
            str(final),
            frozenset({target, *target.parents[:depth]}),
        )

    @override
    def create(self, names: FileNames) -> HiddenFile:
        hidden = Path(names.hidden)
        return _LocalFile(self._open_new(hidden), hidden, Path(names.pending))

    def _open_new(self, hidden: Path) -> BinaryIO:
        for left in reversed(range(_CREATE_TRIES)):
            try:
                return hidden.open("xb")
            except FileNotFoundError:
                # The first of its partition; or another writer has just removed the directory, which it
                # had found empty.
                if not left:
                    raise
                self._made += self._make_directory(hidden.parent)
        raise AssertionError("the last try returns or raises")

    def _make_directory(self, target: Path) -> list[Path]:
        """Makes a directory; returns what was missing, the innermost first."""
        missing = [path for path in (target, *target.parents) if not path.exists()]
        target.mkdir(parents=True, exist_ok=True)
        return missing

    @override
    def sync(self, directory: Path) -> None:
        sync_directory(directory)

    @override
    def commit(self, pairs: Sequence[tuple[str, str]], *, is_repeated: bool) -> list[str]:
        directories: set[Path] = set()
        missing = []
        # Others may have been merged into larger files since: these must not come again.
        replaced = ReplacedFiles()
        merged = replaced.among(final for _, final in pairs) if is_repeated else frozenset()
        for pending, final in ((Path(one), Path(other)) for one, other in pairs):
            if str(final) in merged:
                pending.unlink(missing_ok=True)
                continue
            try:
                pending.rename(final)
            except FileNotFoundError:
                if not final.exists():
                    if not replaced.among([str(final)]):
                        missing.append(str(final))
                    continue
            # Two names of one file stay two.
            pending.unlink(missing_ok=True)
            directories.add(final.parent)
        for directory in sorted(directories):
            sync_directory(directory)
        # They stay, whatever else becomes of the attempt.
        filled = {above for directory in directories for above in (directory, *directory.parents)}
        self._made = [made for made in self._made if made not in filled]
        return missing

    @override
    def found(self, names: Collection[str]) -> Mapping[str, FoundFile]:
        found = {}
        for name in names:
            with suppress(FileNotFoundError):
                found[name] = FoundFile(Path(name).stat().st_size)
        return found

    @override
    def checksum(self, name: str) -> int:
        found = 0
        with Path(name).open("rb") as file:
            while part := file.read(_READ_BYTES):
                found = zlib.crc32(part, found)
        return found

    @override
    def held_name(self, pending: str, final: str, savepoint_id: int) -> str:
        return str(held_path(Path(pending), savepoint_id))

    @override
    def keep_held(self, pending: str, final: str, savepoint_id: int) -> None:
        held = held_path(Path(pending), savepoint_id)
        try:
            _second_name(held, Path(pending))
        except FileNotFoundError:
            try:
                _second_name(held, Path(final))  # it has been committed meanwhile
            except FileNotFoundError:
                _second_name(held, Path(replaced_place(final)))  # and merged into another one

    @override
    def let_go(self, pending: str, final: str, savepoint_id: int) -> None:
        held_path(Path(pending), savepoint_id).unlink(missing_ok=True)

    @override
    def remove_pending(self, names: Collection[str]) -> None:
        for name in names:
            Path(name).unlink(missing_ok=True)

    @override
    def remove_leftovers(self) -> None:
        own, parallelism = self._context.subtask_index, self._context.parallelism
        parents = set()
        for path, subtask_index, attempt in hidden_files(self._directory, self._tag):
            if subtask_index % parallelism == own and attempt < self._context.attempt:
                remove_hidden(path)
                parents.add(path.parent)
        replaced = ReplacedFiles()
        for held, final, subtask_index in held_files(self._directory, self._tag):
            if subtask_index % parallelism == own and (
                final.exists() or replaced.among([str(final)])
            ):
                held.unlink(missing_ok=True)  # it has been committed, which ends the doubt
        for parent in parents:
            while parent != self._directory and _remove_if_empty(parent):
                parent = parent.parent

    @override
    def remove_made(self) -> None:
        for directory in sorted(self._made, key=lambda path: len(path.parts), reverse=True):
            _remove_if_empty(directory)


class _LocalFile(HiddenFile):
    def __init__(self, stream: BinaryIO, path: Path, pending: Path) -> None:
        super().__init__(stream.write, stream.tell)
        self._file = stream
        self._path = path
        self._pending = pending

    @override
    def complete(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._path.rename(self._pending)

    @override
    def release(self) -> None:
        with suppress(OSError):
            # Its content is given up; a full disk must not stand in the way of removing it.
            self._file.close()

    @override
    def remove(self) -> None:
        self.release()
        self._path.unlink(missing_ok=True)
        self._pending.unlink(missing_ok=True)


def _second_name(held: Path, file: Path) -> None:
    held.unlink(missing_ok=True)
    try:
        held.hardlink_to(file)
    except FileNotFoundError:
        raise
    except OSError:  # the file system knows no second names
        shutil.copyfile(file, held)


def _remove_if_empty(directory: Path) -> bool:
    with suppress(OSError):
        # Fails where another writer's or a committed file lies in it: then it stays.
        directory.rmdir()
        return True
    return False
