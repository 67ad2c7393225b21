"""A database as a snapshot has it, downloaded and read: whole, or what it has of some key-groups.

Whatever RocksDB has made of the files meanwhile (levels, compression, blocks), RocksDB reads them. It is imported where a
database is opened: users' scripts import this module with penstock, and most of them never open one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.errors import StoreTransient
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import SnapshotReader
from penstock.storage.entries.database_manifest import database_files, without_files
from penstock.storage.entries.entry_keys import group_bounds, partition_bounds
from penstock.storage.entries.file_names import SHARED_SUFFIX, local_name
from penstock.storage.entries.timer_entries import timer_groups
from penstock.storage.key_types import BoolArray
from penstock.storage.run_columns import TIMER_KIND

SCAN_ROWS: Final = 8192
SCAN_BYTES: Final = 64 << 20
"""About so many bytes of values are read at once, or one value."""
_CURRENT: Final = "CURRENT"
"""The file that names a database's manifest."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The key-groups whose entries are wanted."""

    key_groups: range
    max_parallelism: int

    def within(self, key_groups: range) -> Scope:
        """Fewer key-groups."""
        return Scope(key_groups, self.max_parallelism)

    def has_timers(self, names: list[bytes]) -> BoolArray:
        """bool[n]: which entries of timers are of these key-groups."""
        groups = timer_groups(names, self.max_parallelism)
        return (groups >= self.key_groups.start) & (groups < self.key_groups.stop)


class ReadOnlyDatabase:
    """A downloaded database from which ranges are copied.

    Raises:
        StoreTransient: it cannot be opened.
    """

    def __init__(self, directory: Path) -> None:
        from rocksdict import AccessType, Options, Rdict

        self._directory = directory
        options = Options(raw_mode=True)
        options.create_if_missing(False)
        try:
            self._rocks: Any = Rdict(
                str(directory), options, access_type=AccessType.read_only(False)
            )
        except Exception as error:
            raise unreadable(directory, error) from error

    def scan(
        self, begin: bytes, end: bytes, rows_max: int = SCAN_ROWS
    ) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """As ``Database.scan``."""
        return scan(self._rocks, self._directory, begin, end, rows_max)

    def close(self) -> None:
        """Closes it."""
        self._rocks.close()


def download(
    snapshot: checkpoint_pb2.KeyedStateSnapshot,
    reader: SnapshotReader,
    directory: Path,
    scope: Scope | None,
) -> None:
    """Makes the database of a snapshot, with the files that have something of the key-groups; None = with all."""
    directory.mkdir()
    tables = [file for file in snapshot.files if file.name.endswith(SHARED_SUFFIX)]
    for file in snapshot.files:
        if not file.name.endswith(SHARED_SUFFIX):  # the database writes on in it
            (directory / local_name(file)).write_bytes(reader.read(file.handle))
    foreign = set() if scope is None else _foreign_files(snapshot, directory, scope)
    wanted = [file for file in tables if local_name(file) not in foreign]
    reader.fetch_all({directory / local_name(file): file.handle for file in wanted})


def _foreign_files(
    snapshot: checkpoint_pb2.KeyedStateSnapshot, directory: Path, scope: Scope
) -> set[str]:
    """Takes the files that have nothing of the key-groups out of the database; their names."""
    manifest = directory / (directory / _CURRENT).read_text().strip()
    content = manifest.read_bytes()
    ranges = [
        partition_bounds(segment.offset)
        if snapshot.tables[segment.table].kind == TIMER_KIND
        else group_bounds(segment.offset, scope.key_groups)
        for segment in snapshot.segments
    ]
    files = database_files(content) or []
    foreign = [file for file in files if not file.has_some_of(ranges)]
    if foreign:
        manifest.write_bytes(without_files(content, foreign))
    return {f"{file.number:06d}{SHARED_SUFFIX}" for file in foreign}


def scan(
    rocks: Any, directory: Path, begin: bytes, end: bytes, rows_max: int
) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Keys and values with ``begin <= key < end`` in order, as they are at the first step.

    Raises:
        StoreTransient: they cannot be read.
    """
    from rocksdict import ReadOptions

    options = ReadOptions()
    options.set_iterate_upper_bound(end)
    try:
        entries = rocks.iter(read_opt=options)
        entries.seek(begin)
        while True:
            keys: list[bytes] = []
            values: list[bytes] = []
            size_bytes = 0
            while entries.valid() and len(keys) < rows_max and size_bytes < SCAN_BYTES:
                value = entries.value()
                if keys and size_bytes + len(value) > 2 * SCAN_BYTES:
                    break
                keys.append(entries.key())
                values.append(value)
                size_bytes += len(value)
                entries.next()
            entries.status()  # raises where the end is an error
            if not keys:
                return
            yield keys, values
    except Exception as error:
        raise unreadable(directory, error) from error


def unreadable(directory: Path, error: Exception | str) -> StoreTransient:
    """What is raised where RocksDB cannot read."""
    return StoreTransient(
        f"the RocksDB database in {directory} cannot be read: {error}; it is made anew from the "
        "newest checkpoint"
    )
