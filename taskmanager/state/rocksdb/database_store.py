"""One RocksDB database: bulk reads, files that are taken in, ranges that are dropped, hard links.

Everything but range deletions gets in as a finished SST file (``sst_file``), so that writing holds
neither the interpreter lock nor the write path of the database. There is no write-ahead log: what counts
is in checkpoints.

Reads are for the mailbox thread; writes for whoever holds the lock of the ``WriteQueue``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ENOSPC
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
from rocksdict import (
    BlockBasedOptions,
    Checkpoint,
    DBCompressionType,
    IngestExternalFileOptions,
    Options,
    Rdict,
    ReadOptions,
    WriteOptions,
)

from penstock.errors import StoreFull, StoreTransient, Unrecoverable
from penstock.storage.entries.byte_strings import ByteStrings, SstEntries
from penstock.storage.entries.database_reader_store import SCAN_BYTES, SCAN_ROWS, scan, unreadable
from taskmanager.state.rocksdb.slot_memory_store import SlotMemory
from taskmanager.state.rocksdb.sst_file import sst_file
from taskmanager.state.state_sizes import DatabaseSizes

VALUE_BYTES_MAX: Final = (1 << 31) - 1
"""RocksDB can hold twice as much; Arrow, as which values come back, cannot."""

FILE_BYTES: Final = 48 << 20
"""About so much is taken in as one file: who restores some of the key-groups needs whole files."""
_CACHE_COUNTS: Final = re.compile(r"^rocksdb\.block\.cache\.(hit|miss) COUNT : (\d+)", re.MULTILINE)
_NO_SPACE: Final = "No space left"
_DAMAGED: Final = "Corruption"
"""What RocksDB says of files that are not what was written."""


class Database:
    """A database in a directory.

    Args:
        directory: of the database; made where it is missing.
        ingest_directory: for files on their way in; on the same file system.

    Attributes:
        on_damage: called where a file turns out to be damaged, which is when it is read; on any thread.
        pace: called now and then while entries are written, on the thread that does so.

    Raises:
        StoreTransient: it cannot be opened.
    """

    def __init__(self, directory: Path, ingest_directory: Path, memory: SlotMemory) -> None:
        self.on_damage: Callable[[], object] = lambda: None
        self.pace: Callable[[], object] = lambda: None
        self._directory = directory
        self._damage = ""
        self._ingest_directory = ingest_directory
        self._file_numbers = count()
        ingest_directory.mkdir(parents=True, exist_ok=True)
        try:
            self._options = _options(memory)
            self._rocks: Any = Rdict(str(directory), self._options)
        except Exception as error:  # rocksdict raises nothing more special
            raise StoreTransient(
                f"the RocksDB database in {directory} cannot be opened: {error}"
            ) from error
        self._block_cache_bytes = memory.block_cache_bytes
        # Reads of many keys have the options of their handle, whatever options they are given.
        self._past_cache: Any = self._rocks.get_column_family("default")
        past_cache = ReadOptions()
        past_cache.fill_cache(False)
        self._past_cache.set_read_options(past_cache)
        options = WriteOptions()
        options.disable_wal = True
        self._rocks.set_write_options(options)
        self._ingest_options = IngestExternalFileOptions()
        self._ingest_options.set_move_files(True)

    def get_many(self, keys: list[bytes]) -> list[bytes | None]:
        """The values of keys, which are best sorted; None where there is no entry.

        What a block cache cannot hold is not put there: a block would leave before it is read again.

        Raises:
            StoreTransient: they cannot be read.
        """
        if not keys:
            return []
        with self._reading():
            fits = self.size_bytes() <= self._block_cache_bytes
            values: list[bytes | None] = (self._rocks if fits else self._past_cache)[keys]
        return values

    def scan(
        self, begin: bytes, end: bytes, rows_max: int = SCAN_ROWS
    ) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Keys and values with ``begin <= key < end`` in order, as they are at the first step.

        Args:
            rows_max: size of the parts.

        Raises:
            StoreTransient: they cannot be read.
        """
        with self._looking_for_damage():
            yield from scan(self._rocks, self._directory, begin, end, rows_max)

    def scan_prefixes(self, prefixes: list[bytes]) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Keys and values that begin with one of the prefixes, in parts.

        Args:
            prefixes: different, ascending, of one length.

        Raises:
            StoreTransient: they cannot be read.
        """
        names: list[bytes] = []
        values: list[bytes] = []
        size_bytes = 0
        with self._reading():
            entries = self._rocks.iter()
            for prefix in prefixes:
                entries.seek(prefix)
                while entries.valid() and (name := entries.key()).startswith(prefix):
                    value = entries.value()
                    if names and size_bytes + len(value) > SCAN_BYTES:
                        yield names, values
                        names, values, size_bytes = [], [], 0
                    names.append(name)
                    values.append(value)
                    size_bytes += len(value)
                    entries.next()
                entries.status()  # raises where the end is an error
                if len(names) >= SCAN_ROWS:
                    yield names, values
                    names, values, size_bytes = [], [], 0
        if names:
            yield names, values

    def ingest(self, entries: SstEntries) -> None:
        """Writes entries, which win over what is there.

        Raises:
            StoreFull: the disk is full.
            StoreTransient: they cannot be written.
            Unrecoverable: a value is larger than can be kept.
        """
        largest = int(entries.values.lengths().max(initial=0))
        if largest > VALUE_BYTES_MAX:
            raise Unrecoverable(
                f"what one key or row holds takes {largest >> 20} MB; RocksDB keeps values of at most "
                f"{VALUE_BYTES_MAX >> 20} MB: use smaller windows or fewer values per key, or "
                "state.backend.type: hashmap"
            )
        paths: list[Path] = []
        try:
            for piece in _in_files(entries):
                paths.append(self._ingest_directory / f"{next(self._file_numbers)}.sst")
                with self._writing(), paths[-1].open("wb") as file:
                    for part in sst_file(piece):
                        file.write(part)
                        self.pace()
                    # RocksDB would do so under the interpreter lock.
                    file.flush()
                    os.fsync(file.fileno())
            with self._writing():
                self._rocks.ingest_external_file(list(map(str, paths)), self._ingest_options)
        finally:
            for path in paths:
                path.unlink(missing_ok=True)

    def drop_range(self, begin: bytes, end: bytes) -> None:
        """Removes all entries with ``begin <= key < end``.

        Raises:
            StoreTransient: they cannot be removed.
        """
        with self._writing():
            self._rocks.delete_range(begin, end)

    def link(self, directory: Path) -> None:
        """Makes ``directory`` a database with the present content; files are shared, not copied.

        Raises:
            StoreFull: the disk is full.
            StoreTransient: it cannot be made.
        """
        with self._writing():
            self._rocks.flush()
            Checkpoint(self._rocks).create_checkpoint(str(directory))

    def check(self) -> None:
        """Ends the task where a file turned out to be damaged on another thread: no checkpoint can be written any more.

        Raises:
            StoreTransient: so it is.
        """
        if self._damage:
            raise unreadable(self._directory, self._damage)

    def size_bytes(self) -> int:
        """Approximate size on disk."""
        return int(self._rocks.property_int_value("rocksdb.total-sst-files-size") or 0)

    def sizes(self) -> DatabaseSizes:
        """What the database says of itself."""
        counts = dict(_CACHE_COUNTS.findall(self._options.get_statistics() or ""))
        return DatabaseSizes(
            self._number("cur-size-all-mem-tables"),
            self._number("num-files-at-level0"),
            self._number("estimate-pending-compaction-bytes"),
            self.size_bytes(),
            int(counts.get("hit", 0)),
            int(counts.get("miss", 0)),
        )

    def _number(self, name: str) -> int:
        return int(self._rocks.property_int_value(f"rocksdb.{name}") or 0)

    def close(self) -> None:
        """Closes the database; its files stay."""
        self._past_cache.close()
        self._rocks.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            with self._looking_for_damage():
                yield
        except Exception as error:  # rocksdict raises nothing more special
            raise unreadable(self._directory, error) from error

    @contextmanager
    def _looking_for_damage(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if _DAMAGED in str(error):
                self._damage = str(error)
                self.on_damage()
            raise

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Says what a failure to write means: nothing is lost, the checkpoint is declined."""
        try:
            with self._looking_for_damage():  # a compaction came upon it
                yield
        except Exception as error:  # rocksdict raises nothing more special
            full = getattr(error, "errno", None) == ENOSPC or _NO_SPACE in str(error)
            if full:
                raise StoreFull(f"no room for state in {self._directory}: free some") from error
            raise StoreTransient(
                f"state cannot be written in {self._directory}: {error}"
            ) from error


def _in_files(entries: SstEntries) -> Iterator[SstEntries]:
    """The same entries, as many at a time as a file is to have."""
    keys, values, gone = entries.keys, entries.values, entries.deleted
    ends = (keys.offsets - keys.offsets[0]) + (values.offsets - values.offsets[0])
    start, count = 0, len(keys)
    while start < count:
        stop = int(np.searchsorted(ends, ends[start] + FILE_BYTES, side="right")) - 1
        stop = count if ends[-1] - ends[start] <= FILE_BYTES else max(stop, start + 1)
        yield SstEntries(
            ByteStrings(keys.data, keys.offsets[start : stop + 1]),
            ByteStrings(values.data, values.offsets[start : stop + 1]),
            None if gone is None else gone[start:stop],
        )
        start = stop


def parts_of_values(
    keys: list[bytes], values: list[bytes]
) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """The same in parts of about ``SCAN_BYTES``, or of one value."""
    start = size_bytes = 0
    for place, value in enumerate(values):
        if place > start and size_bytes + len(value) > 2 * SCAN_BYTES:
            yield keys[start:place], values[start:place]
            start, size_bytes = place, 0
        size_bytes += len(value)
    yield keys[start:], values[start:]


def _options(memory: SlotMemory) -> Any:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    blocks = BlockBasedOptions()
    blocks.set_block_cache(memory.block_cache)
    blocks.set_block_size(8 << 10)
    blocks.set_bloom_filter(10, False)
    blocks.set_cache_index_and_filter_blocks(True)
    blocks.set_pin_l0_filter_and_index_blocks_in_cache(True)
    options.set_block_based_table_factory(blocks)
    options.set_write_buffer_manager(memory.write_buffers)
    options.set_write_buffer_size(memory.write_buffer_bytes)
    options.set_compression_type(DBCompressionType.none())
    options.set_bottommost_compression_type(DBCompressionType.lz4())
    # Every file that is taken in lies in level 0: merging fewer at once would write everything more often.
    options.set_level_zero_file_num_compaction_trigger(8)
    options.set_target_file_size_base(32 << 20)
    options.set_max_background_jobs(2)
    # The manifest is uploaded with each checkpoint.
    options.set_max_manifest_file_size(256 << 10)
    options.set_keep_log_file_num(1)
    options.set_stats_dump_period_sec(0)
    # For the metrics of the block cache; reads of many keys take 3 % longer with it.
    options.enable_statistics()
    return options
