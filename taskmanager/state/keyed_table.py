"""Tables of rows by key: one index of keys, arrays by row, one log of changes by versions.

A row is known by its key, or by its key and a number (``number_field``). In memory it is a small integer,
which indexes the arrays; what else belongs to it (``contents``) goes by numbers too. A snapshot has the
rows that changed, and a tombstone for each that was removed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import ClassVar

import pyarrow as pa

from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import Int64Array
from penstock.storage.run_columns import key_fields, keyed_schema
from penstock.storage.run_merge import latest
from taskmanager.kernels import encode_keys
from taskmanager.kernels.tombstones import FIRST_VERSION
from taskmanager.state.instances import InstanceState, NumberPool
from taskmanager.state.key_index import KeyIndex
from taskmanager.state.keyed_rows import MakeColumns, checked_rows, sealed_batches
from taskmanager.state.slot_arrays import SlotArrays
from taskmanager.state.snapshot_table import SealedTable


class KeyedTable(SlotArrays):
    """Base of the tables of count windows and of sessions.

    Args:
        contents: what belongs to the rows; part of this table.

    Attributes:
        numbers: gives out the numbers of contents.
    """

    kind: ClassVar[str]
    number_field: ClassVar[pa.Field | None] = None
    _changed_in: Int64Array
    """By row: the version of the last change."""

    def __init__(self, key_types: Sequence[pa.DataType], contents: InstanceState) -> None:
        self._types = tuple(key_types)
        self._version = FIRST_VERSION
        self._last_change = 0
        self._begin(contents)

    def _begin(self, contents: InstanceState) -> None:
        """Nothing is in memory."""
        self.contents = contents
        self.numbers = NumberPool()
        self._keys = KeyIndex(self._types)
        self._make_arrays()

    def memory_bytes(self) -> int:
        """Approximate size, contents included."""
        return self._keys.memory_bytes() + self._array_bytes() + self.contents.memory_bytes()

    def key_indices(self, keys: KeyBatch) -> Int64Array:
        """What n keys go by, new ones included: int64[n]."""
        return self._indices(keys)

    def schema(self) -> pa.Schema:
        """Schema of the exported rows."""
        number = [] if self.number_field is None else [self.number_field]
        content = [*self._fields(), *self.contents.state_fields()]
        return keyed_schema([*key_fields(self._types), *number], content)

    def is_changed(self, since_version: int) -> bool:
        """Rows were changed or removed after that version."""
        return self._last_change > since_version

    def seal(self, since_version: int, max_parallelism: int) -> SealedTable:
        """Freezes what changed after ``since_version``: copies numbers of rows, but no contents."""
        version = self._version
        self._version += 1
        rows = self._rows()
        if since_version:
            rows = rows[self._changed_in[rows] > since_version]
        rows, removed = self._without_removed(rows, since_version)
        read = partial(
            sealed_batches,
            self.schema(),
            len(self._types),
            max_parallelism,
            self._identity(rows),
            self._content(rows),
            removed if since_version else None,
        )
        return SealedTable(since_version, version, read)

    def _touch(self, rows: Int64Array) -> None:
        self._changed_in[rows] = self._version
        self._last_change = self._version

    def _restored_rows(
        self, batches: Iterable[pa.RecordBatch]
    ) -> Iterator[tuple[Int64Array, list[pa.Array]]]:
        """Restored rows that count: what their keys go by, and the columns behind the key."""
        schema, key_count = self.schema(), len(self._types)
        identity_count = key_count + (self.number_field is not None)
        checked = [checked_rows(batch, schema) for batch in batches]
        for batch in latest(checked, schema.names[2 : 2 + identity_count]):
            columns = batch.columns[2:]
            yield self._indices(encode_keys(columns[:key_count])), columns[key_count:]

    @abstractmethod
    def _indices(self, keys: KeyBatch) -> Int64Array:
        """``key_indices`` of what is in memory."""

    @abstractmethod
    def _fields(self) -> Sequence[pa.Field]:
        """Columns of the exported rows between their identity and their contents."""

    @abstractmethod
    def _rows(self) -> Int64Array:
        """The rows there are."""

    @abstractmethod
    def _identity(self, rows: Int64Array) -> list[pa.Array]:
        """The columns that rows are known by."""

    @abstractmethod
    def _without_removed(
        self, rows: Int64Array, since_version: int
    ) -> tuple[Int64Array, list[pa.Array] | None]:
        """Those of the changed rows that count; identity columns of what was removed."""

    @abstractmethod
    def _content(self, rows: Int64Array) -> MakeColumns:
        """Makes the columns behind the identity as they are now."""
