"""Open count windows in the database, with those of the keys that were in use lately in memory.

The table in memory is that of every backend. A batch first brings the keys that it has and memory has not
in; when memory is short, all is written and everything is forgotten. Both happen before a batch looks at
its keys (``key_indices``): between that and the batch's end, operators hold numbers of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import Int64Array
from taskmanager.kernels import encode_keys
from taskmanager.state.count_table import CountTable
from taskmanager.state.instances import InstanceState
from taskmanager.state.rocksdb.cache_host import TableHome
from taskmanager.state.rocksdb.entry_keys import partition_bounds
from taskmanager.state.rocksdb.spilled_table import LOADED_VERSION, KeyedSpill

_SWEPT_ROWS: Final = 4096
"""Of the database, in one step of a sweep."""
_TOUCHED: Final = "touched_ms"


class StoredCountTable(CountTable, KeyedSpill):
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
        CountTable.__init__(self, key_types, new_contents(), ttl_ms)
        KeyedSpill.__init__(
            self, partition, home, key_types, self.schema(), is_complete=is_complete
        )
        self._new_contents = new_contents
        self._version = LOADED_VERSION + 1
        self._sweep_from: bytes | None = None
        """Where the sweep goes on in the database; None = it begins."""

    @override
    def key_indices(self, keys: KeyBatch) -> Int64Array:
        self._make_room()
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
        rows = self._rows_of(part)
        touched = rows.column(_TOUCHED).to_numpy()
        is_due = touched <= now_ms - self._ttl_ms
        if not is_due.any():
            return np.zeros(0, np.int64), False
        due = rows.filter(pa.array(is_due))
        keys = encode_keys(due.columns[2 : 2 + len(self._types)])
        self._load(keys)
        return self.expired(now_ms, self._indices(keys)), False

    @override
    def written(self, version: int) -> None:
        super().written(version)
        self.forget(self._written_version)

    @override
    def _missing(self, keys: KeyBatch) -> KeyBatch:
        return self._keys.missing(keys)

    @override
    def _forget(self) -> None:
        self._begin(self._new_contents())
