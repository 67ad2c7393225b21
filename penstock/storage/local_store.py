"""Objects as files below a directory, on a local or a mounted file system.

- An object is written under a hidden name beside its own, synchronised, closed and renamed, and then
  its directory is synchronised: it appears whole or not at all, and stays. One file fsync per object.
- A writer that dies leaves its hidden file. No listing shows it; the first ``put`` of an instance into
  a directory removes those that nobody has written to for an hour. Should its writer live after all,
  its rename fails and it is told so: nothing half-written ever gets a name.
- ``compare_and_swap`` holds a lock on a hidden file beside the object while it reads and renames, and no longer: who is
  paused meanwhile keeps it. The kernel gives it back when its holder dies. Who makes an object removes the file, so
  that none stays beside what is never replaced, as the manifest of a savepoint; who waited for it finds the object.
- Where the last step fails, synchronising the directory, the caller is told that the write failed,
  and finds the new object or what was there before: whole in either case.
- Nothing leaves the root: see ``object_paths``.
- A root that has been there and is not is storage that is away, as a file system that is not mounted: every call
  says so, and none makes it again, since what is written in its place is hidden when it is back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Final, NoReturn

from typing_extensions import override

from penstock.errors import StoreCorrupt, StoreNotFound, StoreTransient
from penstock.storage.file_locks import LOCK_WAIT_MAX_S, LockedFile
from penstock.storage.object_paths import check_path, check_prefix
from penstock.storage.object_store import TEMPORARY_AGE_MAX_MS, ObjectInfo, ObjectStore
from penstock.storage.os_errors import store_error
from penstock.storage.private_directories import make_directories, sync_directory
from penstock.storage.request_counts import FILE_REQUESTS, counted_call

TEMPORARY_PREFIX: Final = ".tmp-"
_BUFFER_BYTES: Final = 1 << 20
_DIRECTORY_ATTEMPTS: Final = 8
_NO_LINKS: Final = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)


class LocalStore(ObjectStore):
    """An ``ObjectStore`` on a file system.

    Args:
        root: the directory of all objects; made, with its parents, by the first write.
        lock_wait_max_s: how long a swap waits for others that swap the same object.
        is_private: no other user may look into what it makes, whatever the umask says; else it is as that says.
    """

    def __init__(
        self,
        root: Path,
        *,
        lock_wait_max_s: float = LOCK_WAIT_MAX_S,
        is_private: bool = True,
    ) -> None:
        self.root = root
        self._directory_mode, self._file_mode = (0o700, 0o600) if is_private else (0o777, 0o666)
        self._lock_wait_max_s = lock_wait_max_s
        self._lock = threading.Lock()
        # Directories that this instance has made durable and swept.
        self._prepared: set[Path] = set()
        self._has_place = False

    @override
    def __repr__(self) -> str:
        return f"LocalStore({str(self.root)!r})"

    @override
    def note_place(self) -> None:
        self._has_place = True

    @override
    @counted_call
    def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        target = self._file(path)
        try:
            return self._write(target, chunks)
        except OSError as error:
            self._fail("written", target, error)

    @override
    @counted_call
    def get(self, path: str) -> bytes:
        target = self._file(path)
        try:
            content = target.read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            self._check_place()
            raise _not_found(target, error) from error
        except OSError as error:
            self._fail("read", target, error)
        FILE_REQUESTS.add_bytes(received=len(content))
        return content

    @override
    @counted_call
    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        if offset < 0 or size_bytes < 0:
            raise ValueError(f"{path!r}: no range of {size_bytes} bytes begins at {offset}")
        target = self._file(path)
        try:
            with target.open("rb", buffering=0) as file:
                parts = []
                missing = size_bytes
                while missing:
                    part = os.pread(file.fileno(), missing, offset + size_bytes - missing)
                    if not part:
                        break
                    parts.append(part)
                    missing -= len(part)
                if missing:
                    raise StoreCorrupt(
                        f"{target} ends at {os.fstat(file.fileno()).st_size} bytes: "
                        f"{size_bytes} bytes at offset {offset} were to be read"
                    )
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            self._check_place()
            raise _not_found(target, error) from error
        except OSError as error:
            self._fail("read", target, error)
        FILE_REQUESTS.add_bytes(received=size_bytes)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @override
    @counted_call
    def sizes(self, paths: Iterable[str]) -> Mapping[str, int]:
        found = {}
        for path in paths:
            target = self._file(path)
            try:
                status = target.lstat()
            except (FileNotFoundError, NotADirectoryError):
                self._check_place()
                continue
            except OSError as error:
                self._fail("looked at", target, error)
            if stat.S_ISREG(status.st_mode):
                found[path] = status.st_size
        return found

    @override
    @counted_call
    def list(self, prefix: str) -> list[ObjectInfo]:
        check_prefix(prefix)
        directory, _, beginning = prefix.rpartition("/")
        found: list[ObjectInfo] = []
        for entry in self._walk(self.root / directory if directory else self.root, beginning):
            info = self._info(entry)
            if info is not None:
                found.append(info)
        self._check_place()
        return sorted(found, key=lambda info: info.path)

    @override
    @counted_call
    def delete(self, path: str) -> None:
        target = self._file(path)
        try:
            lock_file = _lock_file(target)
            if lock_file.exists():
                with LockedFile(lock_file, self._lock_wait_max_s, self._file_mode):
                    target.unlink(missing_ok=True)
                    lock_file.unlink(missing_ok=True)
            else:
                target.unlink(missing_ok=True)
        except (NotADirectoryError, IsADirectoryError, FileNotFoundError):
            return  # there is no such object
        except OSError as error:
            self._fail("removed", target, error)
        self._check_place()
        self._remove_empty(target.parent)

    @override
    @counted_call
    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        target = self._file(path)
        try:
            found = _content(target)
            if found is None and expected is not None:
                self._check_place()
            return found == expected and self._swap(target, expected, new)
        except OSError as error:
            self._fail("replaced", target, error)

    def _swap(self, target: Path, expected: bytes | None, new: bytes) -> bool:
        with self._written(target, (new,)) as (temporary, size):
            lock_file = _lock_file(target)
            with LockedFile(lock_file, self._lock_wait_max_s, self._file_mode):
                try:
                    if _content(target) != expected:
                        temporary.unlink(missing_ok=True)
                        return False
                    temporary.rename(target)
                finally:
                    if expected is None:
                        lock_file.unlink(missing_ok=True)
        sync_directory(target.parent)
        FILE_REQUESTS.add_bytes(sent=size)
        return True

    @override
    def can_copy_from(self, source: ObjectStore) -> bool:
        if not isinstance(source, LocalStore):
            return False
        try:
            return _device(self.root) == _device(source.root)
        except OSError as error:
            self._fail("looked at", self.root, error)

    @override
    @counted_call
    def copy_from(self, source: ObjectStore, paths: Mapping[str, str]) -> None:
        assert isinstance(source, LocalStore), "as can_copy_from says"
        directories: dict[Path, None] = {}
        for source_path, path in paths.items():
            file, target = source._file(source_path), self._file(path)
            try:
                self._prepare(target.parent)
                if not self._link(file, target):
                    # The file system makes no second names, or no more of this file.
                    with file.open("rb", buffering=0) as opened:
                        self._write(target, _chunks(opened))
            except FileNotFoundError as error:
                source._check_place()
                raise _not_found(file, error) from error
            except OSError as error:
                self._fail("copied", target, error)
            directories[target.parent] = None
        for directory in directories:
            sync_directory(directory)

    def _link(self, file: Path, target: Path) -> bool:
        try:
            try:
                target.hardlink_to(file)
            except FileExistsError:
                # Whoever looks finds one or the other.
                temporary = target.parent / _temporary_name()
                temporary.hardlink_to(file)
                temporary.rename(target)
                temporary.unlink(missing_ok=True)  # two names of one file stay two
        except OSError as error:
            if error.errno in _NO_LINKS:
                return False
            raise
        return True

    @override
    def first_parts(self) -> tuple[str, ...]:
        try:
            with os.scandir(self.root) as entries:
                names = [entry.name for entry in entries if not entry.name.startswith(".")]
        except FileNotFoundError as error:
            raise StoreNotFound(f"{self.root} is no directory that exists") from error
        except NotADirectoryError as error:
            raise StoreNotFound(f"{self.root} is a file, and no directory") from error
        except OSError as error:
            self._fail("listed", self.root, error)
        return tuple(sorted(names))

    @override
    def check_writable(self) -> None:
        try:
            make_directories(self.root, self._directory_mode)
        except OSError as error:
            self._fail("made", self.root, error)
        if not os.access(self.root, os.W_OK | os.X_OK):
            self._fail("written", self.root, PermissionError(errno.EACCES, "Permission denied"))

    @override
    def temporaries(self) -> tuple[ObjectInfo, ...]:
        entries = self._walk(self.root, TEMPORARY_PREFIX, hidden=True)
        found = [info for entry in entries if (info := self._info(entry)) is not None]
        return tuple(sorted(found, key=lambda info: info.path))

    @override
    def sweep_temporaries(self, age_min_ms: int = TEMPORARY_AGE_MAX_MS) -> tuple[str, ...]:
        latest_ms = time.time_ns() // 1_000_000 - age_min_ms
        swept = [info.path for info in self.temporaries() if info.modified_at_ms <= latest_ms]
        for path in swept:
            self.remove_temporary(path)
        # Who died before writing into a directory, or when emptying it, has left it.
        self._sweep_empty(self.root)
        return tuple(swept)

    @override
    def remove_remains(self) -> None:
        self.sweep_temporaries(0)
        with contextlib.suppress(OSError):  # gone, or somebody has put something there
            self.root.rmdir()
            self._has_place = False

    @override
    def remove_temporary(self, path: str) -> None:
        directory, _, name = path.rpartition("/")
        if directory:
            check_path(directory)
        if not name.startswith(TEMPORARY_PREFIX):
            raise ValueError(f"{path!r} is not a temporary file")
        file = self.root / path
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            self._fail("removed", file, error)
        self._remove_empty(file.parent)

    def _file(self, path: str) -> Path:
        check_path(path)
        return self.root / path

    def _write(self, target: Path, chunks: Iterable[bytes | memoryview]) -> int:
        """Writes the file, which appears whole or not at all; nothing is left where it fails."""
        with self._written(target, chunks) as (temporary, size):
            temporary.rename(target)
        sync_directory(target.parent)
        FILE_REQUESTS.add_bytes(sent=size)
        return size

    @contextlib.contextmanager
    def _written(
        self, target: Path, chunks: Iterable[bytes | memoryview]
    ) -> Iterator[tuple[Path, int]]:
        """The file beside its target, and its size, for the caller to rename; nothing is left where it fails."""
        temporary, descriptor = self._open_temporary(target)
        size = 0
        try:
            file = os.fdopen(descriptor, "wb", buffering=_BUFFER_BYTES)
            try:
                for chunk in chunks:
                    size += chunk.nbytes if isinstance(chunk, memoryview) else len(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                # Closing writes what is buffered, which fails again on a full disk.
                with contextlib.suppress(OSError):
                    file.close()
                raise
            file.close()
            yield temporary, size
        except BaseException:
            with contextlib.suppress(OSError):  # the first error says why; it is swept later
                temporary.unlink(missing_ok=True)
            self._remove_empty(target.parent)
            raise

    def _open_temporary(self, target: Path) -> tuple[Path, int]:
        temporary = target.parent / _temporary_name()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for _ in range(_DIRECTORY_ATTEMPTS):
            # Until the file is there, somebody may remove the directory, which is empty.
            with contextlib.suppress(FileNotFoundError):
                self._prepare(target.parent)
                return temporary, os.open(temporary, flags, self._file_mode)
        self._prepare(target.parent)
        return temporary, os.open(temporary, flags, self._file_mode)

    def _prepare(self, directory: Path) -> None:
        """Makes a directory such that it survives a crash, and sweeps it; once per instance."""
        with self._lock:
            is_prepared = directory in self._prepared
        if is_prepared and directory.is_dir():
            return
        self._check_place()
        top = self.root
        while not top.is_dir() and top != top.parent:
            top = top.parent
        make_directories(directory, self._directory_mode)
        # Also where it was there: whoever made it may not have come this far yet.
        above = directory
        while above != top:
            above = above.parent
            sync_directory(above)
        self._sweep_directory(directory)
        with self._lock:
            self._prepared.add(directory)

    def _sweep_directory(self, directory: Path) -> None:
        latest_ns = time.time_ns() - TEMPORARY_AGE_MAX_MS * 1_000_000
        for file in directory.glob(f"{TEMPORARY_PREFIX}*"):
            with contextlib.suppress(FileNotFoundError):  # its writer has just renamed it
                if file.lstat().st_mtime_ns <= latest_ns:
                    file.unlink()

    def _forget(self, directory: Path) -> None:
        with self._lock:
            self._prepared.discard(directory)

    def _remove_empty(self, directory: Path) -> None:
        """Removes a directory and those above it, below the root, while they are empty."""
        while directory != self.root and self.root in directory.parents:
            try:
                directory.rmdir()
            except OSError:
                return  # not empty, or gone
            self._forget(directory)
            directory = directory.parent

    def _sweep_empty(self, directory: Path) -> None:
        """Removes directories below this one that are empty, or hold only such; writers make theirs again."""
        try:
            with os.scandir(directory) as entries:
                found = [
                    directory / entry.name
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
                ]
        except FileNotFoundError:
            return
        except OSError as error:
            self._fail("listed", directory, error)
        for one in found:
            self._sweep_empty(one)
            self._remove_empty(one)

    def _walk(self, directory: Path, beginning: str, hidden: bool = False) -> Iterator[Path]:
        """Files below a directory.

        Args:
            beginning: what names start with: here, or in all directories where ``hidden`` is set.
            hidden: hidden files, else those that are not.
        """
        try:
            with os.scandir(directory) as entries:
                found = list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self._fail("listed", directory, error)
        for entry in found:
            path = directory / entry.name
            if entry.is_dir(follow_symlinks=False):
                if not entry.name.startswith("."):
                    if hidden:
                        yield from self._walk(path, beginning, hidden=True)
                    elif entry.name.startswith(beginning):
                        yield from self._walk(path, "")
            elif entry.name.startswith(".") == hidden and entry.name.startswith(beginning):
                yield path

    def _info(self, file: Path) -> ObjectInfo | None:
        try:
            status = file.lstat()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._fail("listed", file, error)
        path = file.relative_to(self.root).as_posix()
        return ObjectInfo(path, status.st_size, status.st_mtime_ns // 1_000_000)

    def _check_place(self) -> None:
        """Says that the storage is away, where that is why an object was not found."""
        if self._has_place and not self.root.is_dir():
            raise StoreTransient(
                f"{self.root} is not there any more: is its file system mounted, and has nobody moved the directory? "
                "It is tried again"
            )

    def _fail(self, what: str, target: Path, error: OSError) -> NoReturn:
        raise store_error(what, target, error) from error


def _temporary_name() -> str:
    return f"{TEMPORARY_PREFIX}{os.getpid()}-{os.urandom(8).hex()}"


def _device(directory: Path) -> int:
    """Of the file system that a directory is on, or will be."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory.stat().st_dev


def _chunks(file: FileIO) -> Iterator[bytes]:
    while chunk := file.read(_BUFFER_BYTES):
        yield chunk


def _lock_file(target: Path) -> Path:
    return target.with_name(f".{target.name}.lock")


def _content(target: Path) -> bytes | None:
    try:
        return target.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _not_found(target: Path, error: OSError) -> StoreNotFound:
    if isinstance(error, IsADirectoryError):
        return StoreNotFound(f"{target} is a directory: where it is, there can be no object")
    return StoreNotFound(f"{target} does not exist")
