"""Open count windows in the database, with those of the keys that were in use lately in memory.

The table in memory is that of every backend. A batch first brings the keys that it has and memory has not
in; when memory is short, all is written and everything is forgotten. Both happen before a batch looks at
its keys (``key_indices``): between that and the batch's end, operators hold numbers of the table.

Invariants: what is in memory of a key is right whatever the database says; rows changed after
``_written_version`` may be missing in the database.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import Int64Array, value_type
from taskmanager.kernels import encode_keys
from taskmanager.kernels.backend import kernels as process_kernels
from taskmanager.state.count_table import CountTable
from taskmanager.state.instances import InstanceState
from taskmanager.state.rocksdb.cache_host import TableHome
from taskmanager.state.rocksdb.database_store import parts_of_values
from taskmanager.state.rocksdb.entry_keys import (
    decoded_keys,
    entry_keys,
    entry_order,
    partition_bounds,
)
from taskmanager.state.rocksdb.keyed_entries import FrozenKeyedRows, keyed_batch
from taskmanager.state.rocksdb.row_values import check_storable
from taskmanager.state.rocksdb.sst_file import ByteStrings
from taskmanager.state.snapshot_table import RestoredPart

_LOADED_VERSION: Final = 1
_SWEPT_ROWS: Final = 4096
"""Of the database, in one step of a sweep."""
_TOUCHED: Final = "touched_ms"


class StoredCountTable(CountTable):
    """See ``CountTable``.

    Args:
        partition: of the database.
        new_contents: makes the contents of a table without keys.
        is_complete: the database holds nothing of it.
    """

    def __init__(
        self,
        partition: int,
        key_types: Sequence[pa.DataType],
        new_contents: Callable[[], InstanceState],
        home: TableHome,
        ttl_ms: int = 0,
        *,
        is_complete: bool,
    ) -> None:
        super().__init__(key_types, new_contents(), ttl_ms)
        for column in self.schema():
            check_storable(column.type)
        self.partition = partition
        self.is_stored = not is_complete
        self._plain_types = tuple(value_type(kind) for kind in key_types)
        self._new_contents = new_contents
        self._home = home
        self._is_complete = is_complete
        self._version = _LOADED_VERSION + 1
        self._written_version = _LOADED_VERSION
        self._needs_room = False
        self._accounted_bytes = 0
        self._sweep_from: bytes | None = None
        """Where the sweep goes on in the database; None = it begins."""

    @property
    def known_row_count(self) -> int:
        """Number of keys where it is known without reading, else 0."""
        return len(self) if self._is_complete else 0

    @override
    def key_indices(self, keys: KeyBatch) -> Int64Array:
        self._make_room()
        if not self._is_complete:
            self._load(keys)
        return super().key_indices(keys)

    @override
    def sweep(self, now_ms: int) -> tuple[Int64Array, bool]:
        self._make_room()
        part = None
        if not self._is_complete:
            begin, end = partition_bounds(self.partition)
            part = next(self._home.reader.scan(self._sweep_from or begin, end, _SWEPT_ROWS), None)
        if part is None:
            self._sweep_from = None
            return self.expired(now_ms), True
        self._sweep_from = part[0][-1] + b"\0"
        rows = keyed_batch(self.schema(), self._plain_types, *part, with_numbers=False)
        touched = rows.column(_TOUCHED).to_numpy()
        is_due = touched <= now_ms - self._ttl_ms
        if not is_due.any():
            return np.zeros(0, np.int64), False
        due = rows.filter(pa.array(is_due))
        keys = encode_keys(due.columns[2 : 2 + len(self._types)])
        self._load(keys)
        return self.expired(now_ms, self._indices(keys)), False

    def freeze(self) -> FrozenKeyedRows | None:
        """What the database must be given; None = nothing."""
        if not self.is_changed(self._written_version):
            return None
        self.is_stored = True
        limit = self._home.max_parallelism
        return FrozenKeyedRows(
            self.partition,
            self.seal(self._written_version, limit),
            len(self._types),
            limit,
            self._written,
            with_numbers=False,
        )

    def evict(self, *, everything: bool) -> None:
        """Forgets what is in memory before the next batch."""
        self._needs_room = True

    def close(self) -> list[int]:
        """The table is not used any more; the partitions whose entries may go."""
        accounted, self._accounted_bytes = self._accounted_bytes, 0
        self._home.host.cache_resized(-accounted)
        return [self.partition] if self.is_stored else []

    def load_all(self) -> None:
        """Brings all keys into memory, for tests and tools."""
        if not self._is_complete:
            for names, _ in self._home.reader.scan(*partition_bounds(self.partition)):
                self._load(
                    decoded_keys(self._plain_types, ByteStrings.of(names), process_kernels())
                )

    def adopt(self, other: CountTable) -> None:
        """Takes over the keys of a table that was restored in memory; this one has none."""
        limit = self._home.max_parallelism
        self.load(other.seal(0, limit).batches(), RestoredPart(range(limit), 0, 1, len(other)))
        self.changed(np.arange(len(self)))

    def _written(self, version: int) -> None:
        self._written_version = max(self._written_version, version)
        self.forget(self._written_version)

    def _make_room(self) -> None:
        self._account()
        if self._needs_room and not self.is_changed(self._written_version):
            self._needs_room = False
            if len(self):
                self._is_complete = False
            self._begin(self._new_contents())
            self._account()

    def _load(self, keys: KeyBatch) -> None:
        missing = self._keys.missing(keys)
        if not len(missing):
            return
        limit = self._home.max_parallelism
        missing = missing.take(entry_order(missing, limit))
        names = entry_keys(self.partition, missing, limit).to_list()
        values = self._home.reader.get_many(names)
        found = [(n, v) for n, v in zip(names, values, strict=True) if v is not None]
        if found:
            parts = parts_of_values([name for name, _ in found], [value for _, value in found])
            batches = [
                keyed_batch(self.schema(), self._plain_types, *part, with_numbers=False)
                for part in parts
            ]
            self.load(batches, RestoredPart(range(limit), 0, 1, len(found)))

    def _account(self) -> None:
        size = self.memory_bytes()
        difference = size - self._accounted_bytes
        if difference:
            self._accounted_bytes = size
            self._home.host.cache_resized(difference)
