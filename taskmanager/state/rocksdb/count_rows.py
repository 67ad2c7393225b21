"""Open count windows in the database, with those of the keys that were in use lately in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.storage.entries.entry_keys import partition_bounds
from penstock.storage.key_types import Int64Array
from taskmanager.kernels import encode_keys
from taskmanager.state.count_table import CountTable
from taskmanager.state.instances import InstanceState
from taskmanager.state.rocksdb.cache_host import TableHome
from taskmanager.state.rocksdb.partitions import Partition
from taskmanager.state.rocksdb.spilled_table import SpilledKeyedTable

_SWEPT_ROWS: Final = 4096
"""Of the database, in one step of a sweep."""
_TOUCHED: Final = "touched_ms"


class StoredCountTable(SpilledKeyedTable, CountTable):
    """See ``CountTable``.

    Args:
        new_contents: makes the contents of a table without keys.
    """

    def __init__(
        self,
        found: Partition,
        home: TableHome,
        key_types: Sequence[pa.DataType],
        new_contents: Callable[[], InstanceState],
        ttl_ms: int,
    ) -> None:
        CountTable.__init__(self, key_types, new_contents(), ttl_ms)
        self._spill(found, home, new_contents)
        self._sweep_from: bytes | None = None
        """Where the sweep goes on in the database; None = it begins."""

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
